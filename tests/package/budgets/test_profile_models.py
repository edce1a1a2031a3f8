# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Which model a profile belongs to, and what a model does with its own."""

import copy
import socket
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers import VARIANTS, random_model, truncate
from huggingface_hub import constants
from profiles import BUDGETS, HERE, THERE, as_here, device, of, profile, trained_further
from transformers import AutoConfig, AutoModelForCausalLM

from modeling_essm import ESSMForCausalLM, ESSMModel
from modeling_essm.budgets import budget_profile, choose_budget, profile_file, read_profile
from modeling_essm.budgets.fingerprint import fingerprint
from modeling_essm.loading_essm import PROFILE_NAME


@pytest.fixture(autouse=True)
def named_machine(monkeypatch):
    """The tests run HERE."""
    as_here(monkeypatch)


class Quantised(torch.nn.Module):
    """What stands in place of a quantised layer."""

    def __init__(self, weight: torch.Tensor, dtype: torch.dtype):
        super().__init__()
        self.register_buffer("weight", (weight.detach() * 100).to(dtype))


def quantised(model, dtype):
    model.model.embed_tokens = Quantised(model.model.embed_tokens.weight, dtype)
    for layer in model.model.layers:
        layer.ffn.up = Quantised(layer.ffn.up.weight, dtype)
    return model


SAME = {
    "itself": lambda model: model,
    "bf16": lambda model: model.bfloat16(),
    "fp16": lambda model: model.half(),
    "fp64": lambda model: model.double(),
    "without-head": lambda model: model.model,
    "truncated": lambda model: truncate(model, 5),
    "int8": lambda model: quantised(model, torch.int8),
    "packed": lambda model: quantised(model, torch.int32),
    "fp8": lambda model: quantised(model, torch.float8_e4m3fn),
    "meta": lambda model: model.to("meta"),
}


blocks = pytest.mark.parametrize("block", ["paper", "gated"])


@blocks
@pytest.mark.parametrize("change", SAME.values(), ids=SAME)
def test_the_same_model_in_another_form(tmp_path, change, block):
    model = random_model(seed=3, **VARIANTS[block])
    of(model).save(tmp_path)
    changed = change(copy.deepcopy(model))
    assert read_profile(tmp_path, changed).quality.values[0] == 2.4
    if "meta" not in str(next(changed.parameters()).device):
        assert fingerprint(changed).samples.keys() >= {"the norms", "channel_mixing[0]"}


def test_the_same_model_saved_and_loaded(tmp_path):
    model = random_model(seed=3)
    of(model.bfloat16()).save(tmp_path)
    random_model(seed=3).save_pretrained(tmp_path / "model")
    assert read_profile(tmp_path, ESSMForCausalLM.from_pretrained(tmp_path / "model")) == of(model)
    assert read_profile(tmp_path, ESSMModel.from_pretrained(tmp_path / "model")) == of(model)


@torch.no_grad()
def with_other_mixing(model):
    """A model of equal norms, as two that were never trained have."""
    model.model.layers[-1].mixer.channel_mixing[0].mul_(1.05)
    return model


OTHERS = {
    "seed": (lambda model: random_model(seed=4), r"other weights: a value of .* is -?\d\.\d+ instead of"),
    "trained": (trained_further, "other weights"),
    "mixing": (with_other_mixing, r"other weights: a value of channel_mixing\[0\]"),
    "width": (lambda model: random_model(hidden_size=8), "hidden_size 8 instead of 16"),
    "depth": (lambda model: random_model(num_hidden_layers=1), "1 layers instead of 2"),
}


@blocks
@pytest.mark.parametrize("other, message", OTHERS.values(), ids=OTHERS)
def test_another_model(tmp_path, other, message, block):
    model = random_model(seed=3, **VARIANTS[block])
    path = of(model).save(tmp_path)
    with pytest.raises(ValueError, match=message) as error:
        read_profile(tmp_path, other(model))
    assert str(error.value).startswith(f"{path} was measured on another model: this one has ")


def test_an_untrained_model_is_told_from_another():
    """Whose norms are all ones and zeros."""
    torch.manual_seed(0)
    one = ESSMForCausalLM(random_model().config)
    two = ESSMForCausalLM(one.config)
    assert "other weights" in fingerprint(one).difference(fingerprint(two))


def test_a_truncated_model_has_no_larger_budgets(tmp_path):
    model = random_model(seed=3)
    of(model).save(tmp_path)
    small = truncate(model, 9)
    found = read_profile(tmp_path, small)
    assert found.quality.budgets == (2, 4, 8) and found.quality.values == (2.4, 2.1, 2.03)
    assert len(found.quality.drop_errors) == len(found.quality.errors) == 3
    assert {row.budget for row in found.devices[HERE].rows} == {2, 4, 8} and len(found.devices[HERE].rows) == 12
    assert found.choose(max_latency_ms=100.0) == 8
    assert found.presets()["full"] == 8
    assert found.model.capacities == (8, 8)
    found.save(tmp_path / "small.json")
    assert read_profile(tmp_path / "small.json", small) == found
    with pytest.raises(ValueError, match=r"quality.budgets must hold one in \[1, 1\].* got \[2, 4, 8, 16, 32\]"):
        read_profile(tmp_path, truncate(model, 1))


def test_layers_truncated_to_different_lengths(tmp_path, monkeypatch):
    """A budget counts where every layer has as many of its channels as when it was measured."""
    model = random_model(seed=3)
    of(model).save(tmp_path)
    own = fingerprint(model)

    def budgets(measured, capacities):
        record = of(model).restricted_to(max(measured))
        replace(record, model=replace(own, capacities=measured)).save(tmp_path)
        monkeypatch.setattr(profile_file, "fingerprint", lambda model: replace(own, capacities=capacities))
        found = read_profile(tmp_path, model).quality.budgets
        monkeypatch.setattr(profile_file, "fingerprint", fingerprint)
        return found

    assert budgets((32, 32), (4, 16)) == (2, 4)
    assert budgets((4, 16), (4, 16)) == (2, 4, 8, 16)  # measured so: the first layer always ran 4
    assert budgets((4, 16), (4, 8)) == (2, 4, 8)


def test_restricted_to_a_capacity():
    found = profile()
    assert found.restricted_to(32) == replace(found, model=replace(found.model, capacities=(32, 32)))
    assert found.restricted_to(4).quality.budgets == (2, 4)
    assert found.restricted_to(1) is None
    large = replace(device(THERE), rows=device(THERE).rows[3:])
    assert list(found.merge(large).restricted_to(8).devices) == [HERE]  # nothing is left of the other


def test_the_profile_is_found_beside_the_weights(tmp_path, monkeypatch):
    model = random_model(seed=3)
    with pytest.raises(ValueError, match=r"choose_budget needs budget_profile.json beside the model"):
        choose_budget(model, max_quality_drop=0.02)
    folder = tmp_path / "model"
    model.save_pretrained(folder)
    loaded = ESSMForCausalLM.from_pretrained(folder)
    assert budget_profile(model) is None and budget_profile(loaded) is None
    of(model).save(folder)
    assert budget_profile(loaded) == of(model)
    assert choose_budget(loaded, max_quality_drop=0.02) == 8
    assert choose_budget(loaded, max_latency_ms=5.0, batch_size=4, phase="decode", device=HERE) == 8
    assert choose_budget(model, profile=of(model), max_latency_ms=12, phase="prefill") == 8
    folder.rename(tmp_path / "gone")
    assert budget_profile(loaded) is None


LOADS = {
    "class": lambda source: ESSMForCausalLM.from_pretrained(source),
    "auto": lambda source: AutoModelForCausalLM.from_pretrained(source),
    "prefix": lambda source: ESSMForCausalLM.from_pretrained(source, spectral_capacity=32),
    "path": lambda source: ESSMForCausalLM.from_pretrained(Path(source)),
    "config": lambda source: AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(source)),
}


@pytest.mark.parametrize("load", LOADS.values(), ids=LOADS)
def test_a_local_model_never_asks_the_hub(load, tmp_path, monkeypatch):
    """Loaded by a relative name that a repository could have; then the working directory changes, the folder moves."""
    asked = []

    def refuse(*args, **kwargs):
        asked.append(args)
        raise RuntimeError("the network was used")

    for name in ("getaddrinfo", "create_connection"):
        monkeypatch.setattr(socket, name, refuse)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.chdir(tmp_path)
    model = random_model(seed=3)
    model.save_pretrained("org/name")
    of(model).save("org/name")
    near, far = load("org/name"), load("org/name")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert budget_profile(near) == (
        None if load is LOADS["config"] else of(model)
    )  # which has its weights from nowhere
    Path("../org/name").rename("moved")
    assert budget_profile(far) is None
    with pytest.raises(ValueError, match=r"choose_budget needs budget_profile.json"):
        choose_budget(far, max_quality_drop=0.02)
    far.save_pretrained("saved")
    assert not asked and not Path("saved/budget_profile.json").exists()


def test_the_profile_of_a_repository(tmp_path, monkeypatch):
    model, other = random_model(seed=3), random_model(seed=4)
    repository = tmp_path / "cache" / "models--org--name"
    shas = {model: "0123456789abcdef0123456789abcdef01234567", other: "76543210fedcba9876543210fedcba9876543210"}
    for each, sha in shas.items():
        each.save_pretrained(repository / "snapshots" / sha)
        of(each).save(repository / "snapshots" / sha)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(shas[other])
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    where = {"cache_dir": str(tmp_path / "cache")}
    for cls in (ESSMForCausalLM, AutoModelForCausalLM):
        loaded = cls.from_pretrained("org/name", revision=shas[model], **where)
        assert budget_profile(loaded) == of(model)
        assert budget_profile(cls.from_pretrained("org/name", **where)) == of(other)
        (repository / "snapshots" / shas[model] / "budget_profile.json").unlink()
        assert budget_profile(loaded) is None
        of(model).save(repository / "snapshots" / shas[model])


def test_a_model_chooses_by_its_profile(tmp_path):
    model = random_model()
    assert budget_profile(model) is None
    with pytest.raises(ValueError, match=r"choose_budget needs budget_profile\.json"):
        choose_budget(model, max_quality_drop=0.02)
    model.save_pretrained(tmp_path)
    of(model).save(tmp_path)
    loaded = ESSMForCausalLM.from_pretrained(tmp_path)
    assert choose_budget(loaded, max_quality_drop=0.02) == 8
    assert choose_budget(loaded, max_latency_ms=3.0, phase="decode", batch_size=4, device=HERE) == 4
    with pytest.raises(ValueError, match="needs max_latency_ms, max_quality_drop or both"):
        choose_budget(loaded)


def test_a_smaller_model_carries_what_it_can_run(tmp_path):
    model = random_model(budget_presets={"sweet-spot": 8, "full": 32})
    model.save_pretrained(tmp_path / "large")
    of(model).save(tmp_path / "large")
    whole = ESSMForCausalLM.from_pretrained(tmp_path / "large")
    whole.save_pretrained(tmp_path / "copy")
    assert read_profile(tmp_path / "copy", whole) == of(model)
    read = ESSMForCausalLM.from_pretrained(tmp_path / "large", spectral_capacity=8)
    assert budget_profile(whole).quality.budgets == BUDGETS
    for i, small in enumerate((read, whole.truncate(8))):
        small.save_pretrained(tmp_path / str(i))
        again = ESSMForCausalLM.from_pretrained(tmp_path / str(i))
        assert read_profile(tmp_path / str(i)).quality.budgets == (2, 4, 8)
        assert budget_profile(again).quality.budgets == (2, 4, 8)
        assert choose_budget(again, max_quality_drop=0.0) == 8  # the full budget, now
        assert again(torch.tensor([[1, 2]]), spectral_budget="sweet-spot").spectral_budget == (8, 8)
        with pytest.raises(ValueError, match="unknown spectral_budget preset 'full'"):
            again(torch.tensor([[1, 2]]), spectral_budget="full")


def test_a_model_trained_on_is_saved_without_the_old_profile(tmp_path):
    model = random_model()
    model.save_pretrained(tmp_path / "old")
    of(model).save(tmp_path / "old")
    trained = trained_further(ESSMForCausalLM.from_pretrained(tmp_path / "old"))
    trained.save_pretrained(tmp_path / "new")
    assert not (tmp_path / "new" / PROFILE_NAME).exists()
    with pytest.raises(ValueError, match="was measured on another model"):
        choose_budget(trained, max_quality_drop=0.02)
