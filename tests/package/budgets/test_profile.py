# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""The budget profile: what it chooses, its file, the model that it belongs to, and its curve."""

import copy
import dataclasses
import json
import math
import os
import socket
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers import ROOT, SHA, VARIANTS, blocks, captured_warnings, hub_snapshot, random_model
from huggingface_hub import constants
from profiles import BUDGETS, HERE, THERE, as_here, device, of, profile, quality
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import PushToHubMixin

from modeling_essm import ESSMForCausalLM
from modeling_essm.budgets import budget_profile, choose_budget, read_profile
from modeling_essm.budgets import profile as profile_module
from modeling_essm.budgets.curve import BudgetCurve
from modeling_essm.budgets.profile import PROFILE_NAME, device_name
from modeling_essm.budgets.weights import same_weights, weights_checksum
from modeling_essm.loading_essm import channel_parameters, leading


@pytest.fixture(autouse=True)
def named_machine(monkeypatch):
    """The tests run HERE."""
    as_here(monkeypatch)


# --- The choice


@pytest.mark.parametrize(
    "limits, budget",
    [
        ({"max_quality_drop": 0}, 32),
        ({"max_quality_drop": 0.05}, 4),  # exactly 5%
        ({"max_quality_drop": 0.0499}, 8),
        ({"max_latency_ms": 5.0}, 32),
        ({"max_latency_ms": 4.99}, 16),
        ({"max_latency_ms": 5.0, "batch_size": 4}, 8),
        ({"max_latency_ms": 12, "phase": "prefill"}, 8),
        ({"max_latency_ms": 3.0, "max_quality_drop": 0.05}, 4),  # the smallest of 4, 8 and 16
        ({"max_latency_ms": 2.0, "max_quality_drop": 0.02}, 8),  # the only one
    ],
    ids=str,
)
def test_the_budget_that_keeps_to_the_limits(limits, budget):
    assert profile().choose(**limits) == budget


def test_a_budget_that_saves_no_time_gives_way_to_a_better_one():
    """In the choice, the presets, the marks of the figure and the table alike; and the table says so."""
    level = profile(**{HERE: device(HERE, (5.0, 5.1, 5.0, 5.2, 5.0), prefill=(20.0, 20.0, 20.0, 21.0, 20.0))})
    for limits in ({}, {"max_latency_ms": 9.0}):
        assert level.choose(max_quality_drop=0.05, **limits) == 32
    assert level.presets()["medium"] == level.quality.marks["sweet spot"] == 32
    assert level.table(HERE).count("A smaller budget saves no time here") == 2
    faster = level.merge(device(THERE, (1.0, 1.5, 2.0, 3.0, 5.0)))
    assert faster.presets()["medium"] == faster.choose(max_quality_drop=0.02) == 8  # it saves time there
    assert faster.choose(max_quality_drop=0.05, max_latency_ms=9.0, device=HERE) == 32
    assert "saves no time" not in faster.table(THERE)


def test_time_buys_quality_and_not_size():
    """Budgets of equal or better quality win although there is time for larger ones."""
    assert profile((2.4, 1.9, 2.03, 2.01, 2.0)).choose(max_latency_ms=100.0) == 4
    assert profile((2.4, 2.0, 2.0, 2.0, 2.0)).choose(max_latency_ms=100.0) == 4
    accuracy = profile((0.5, 0.85, 0.88, 0.95, 0.9), higher=True)
    assert accuracy.choose(max_quality_drop=0.05) == 8
    assert accuracy.choose(max_quality_drop=0.0) == accuracy.choose(max_latency_ms=9.0) == 16


@pytest.mark.parametrize(
    "limits, message",
    [
        ({}, "needs max_latency_ms, max_quality_drop or both"),
        ({"max_latency_ms": 0.5}, "decodes a token within 0.5 ms on this machine at batch size 1; .* K=2, needs 1 ms"),
        ({"max_latency_ms": 1, "phase": "prefill"}, "no budget reads its input within 1 ms .* K=2, needs 10 ms"),
        ({"max_latency_ms": 1.9, "max_quality_drop": 0.02}, "loses at most 0.02 decodes .* 1.9 ms .* K=8, needs 2 ms"),
        ({"max_latency_ms": 10**400}, "max_latency_ms must be a finite number >= 0, got 1000"),
        ({"max_latency_ms": True}, "max_latency_ms must be a finite number >= 0, got True"),
        ({"max_quality_drop": 0.1, "device": "moon"}, "device need max_latency_ms, got 'moon' without it"),
        ({"max_quality_drop": "0.02"}, "max_quality_drop must be a finite number >= 0, got '0.02'"),
        ({"max_quality_drop": -0.1}, "max_quality_drop must be a finite number >= 0, got -0.1"),
        ({"max_latency_ms": 2, "batch_size": 3}, r"batch_size must be one of \[1, 4\], measured on .*, got 3"),
        ({"max_latency_ms": 2, "phase": "train"}, r"phase must be one of \['prefill', 'decode'\].*got 'train'"),
        ({"max_latency_ms": 2, "device": "moon"}, "device must be one of those measured, 'this machine', got 'moon'"),
    ],
    ids=str,
)
def test_limits_that_cannot_be_kept(limits, message):
    with pytest.raises(ValueError, match=message):
        profile().choose(**limits)


def test_which_device(monkeypatch):
    slow, fast = device(THERE, (10.0, 15.0, 20.0, 30.0, 50.0)), device(HERE, (1.0, 1.5, 2.0, 3.0, 5.0))
    both = profile(**{THERE: slow, HERE: fast})
    assert both.choose(max_latency_ms=20, device=THERE) == 8
    with captured_warnings() as messages:
        assert both.choose(max_latency_ms=20) == 32 and not messages
        assert profile(**{THERE: slow}).choose(max_latency_ms=20) == 8  # the only one
    assert messages == ["budgets are chosen by times measured on 'another machine'; this is 'this machine'"]
    monkeypatch.setattr(profile_module, "device_name", lambda device=None: f"a {device or 'third'}")
    with pytest.raises(ValueError, match=r"no times were measured on 'a third'.*'another machine', 'this machine'"):
        both.choose(max_latency_ms=20)
    with pytest.raises(ValueError, match="no times were measured on 'a cpu'"):  # where the model is
        choose_budget(random_model(), profile=both, max_latency_ms=20, device=None)
    assert both.choose(max_quality_drop=0.02) == 8  # needs no device
    with pytest.raises(ValueError, match=r"\(measured: none\)"):
        replace(both, devices={}).choose(max_latency_ms=20)


def test_times_of_another_dtype_or_number_of_threads_come_with_a_warning():
    model, own = random_model(), torch.get_num_threads()
    for dtype, more, told in ((torch.float32, 0, 0), (torch.bfloat16, 0, 1), (torch.float32, 1, 1)):
        found = replace(device(HERE, (1.0, 1.5, 2.0, 3.0, 5.0)), threads=own + more)
        with captured_warnings() as messages:
            assert choose_budget(model.to(dtype), profile=profile(**{HERE: found}), max_latency_ms=3.5) == 16
            assert choose_budget(model, profile=profile(**{HERE: found}), max_latency_ms=3.5, device=HERE) == 16
        assert len(messages) == told and all("budgets are chosen by times measured in float32" in x for x in messages)


def test_what_was_not_measured_is_not_chosen():
    prefill = profile(**{HERE: device(HERE)})
    assert prefill.choose(max_latency_ms=12.5) == 8  # of a classifier
    with pytest.raises(ValueError, match=r"phase must be one of \['prefill'\].*got 'decode'"):
        prefill.choose(max_latency_ms=12.5, phase="decode")
    found = profile(**{HERE: device(HERE, (1.0, 1.5, 2.0, 3.0, 5.0))})
    assert replace(found, quality=quality((2.4, 2.0), budgets=(2, 32))).choose(max_latency_ms=3.5) == 2
    with pytest.raises(ValueError, match="none of them was timed"):
        replace(found, quality=quality((2.0,), budgets=(3,))).choose(max_latency_ms=3.5)


def test_a_device_is_named_by_its_parts(monkeypatch):
    monkeypatch.undo()
    name = device_name(torch.device("cpu"))
    assert name.endswith(" cores") and len(name.split(", ")[0]) > 2
    told = {"/proc/cpuinfo": "processor\t: 0\nBogoMIPS\t: 108.00\n", "/proc/device-tree/model": "Some Board 5\0"}
    with monkeypatch.context() as context:
        context.setattr(Path, "read_text", lambda path, **_: told[str(path)])
        assert device_name(torch.device("cpu")).startswith("Some Board 5, ")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"GPU {device}")
    assert device_name() == device_name(torch.device("cuda")) == "GPU cuda"


# --- The file


def test_devices_stand_side_by_side(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"there is no .*budget_profile.json: write it with essm-calibrate"):
        read_profile(tmp_path)
    one = profile(**{HERE: device(HERE, (1.0, 1.5, 2.0, 3.0, 5.0))})
    path = one.save(tmp_path)
    assert path == tmp_path / PROFILE_NAME and read_profile(tmp_path) == read_profile(path) == one
    both = one.merge(device(THERE, (10.0, 15.0, 20.0, 30.0, 50.0)))
    both.save(path)
    assert read_profile(path) == both and list(both.devices) == [HERE, THERE]
    again = read_profile(path).merge(device(HERE, (2.0, 2.5, 3.0, 4.0, 6.0)))
    assert again.devices[THERE] == both.devices[THERE] and again.choose(max_latency_ms=5.0) == 16  # 32 before
    assert list(tmp_path.iterdir()) == [path]
    both.merge(replace(device(THERE), rows=())).save(path)
    assert list(read_profile(path).devices) == [HERE]  # nothing was measured on the other


@pytest.mark.parametrize("keys", [["weights"], ["quality", "budgets"], ["devices", HERE, "rows", 0, "max_ms"]])
def test_a_missing_field(tmp_path, keys):
    path = profile().save(tmp_path)
    record = inner = json.loads(path.read_text())
    *above, name = keys
    for key in above:
        inner = inner[key]
    del inner[name]
    path.write_text(json.dumps(record))
    with pytest.raises(ValueError, match=rf"{PROFILE_NAME} is damaged \(KeyError\('{name}'\)\): run essm-calibrate"):
        read_profile(tmp_path)


DAMAGED = [b"", b"\xff\xfe", b"[1]", b"[" * 100_000 + b"]" * 100_000, b'{"format_version": 1' + b"0" * 5000 + b"}"]
DAMAGED += [b'{"format_version": 2, "devices": []}']


def test_a_damaged_file_is_refused_and_does_not_keep_a_model_from_being_saved(tmp_path):
    random_model().save_pretrained(tmp_path / "model")
    loaded, path = ESSMForCausalLM.from_pretrained(tmp_path / "model"), tmp_path / "model" / PROFILE_NAME
    for content in DAMAGED:
        path.write_bytes(content)
        with pytest.raises(ValueError, match=PROFILE_NAME) as error:
            choose_budget(loaded, max_quality_drop=0.1)
        assert path.read_bytes() == content and len(str(error.value)) < len(str(path)) + 300
        with captured_warnings() as messages:
            loaded.save_pretrained(tmp_path / "again")
        assert len(messages) == 1 and messages[0].startswith(f"no budget profile is saved: {path}")
        assert (tmp_path / "again" / "model.safetensors").exists() and not (tmp_path / "again" / PROFILE_NAME).exists()


# --- Its model


@blocks
def test_casts_and_truncations_leave_a_model_what_it_is(block):
    model = random_model(seed=3, **block)
    weights = weights_checksum(model)
    for change in (torch.nn.Module.bfloat16, torch.nn.Module.double):
        assert weights_checksum(change(copy.deepcopy(model))) == weights
    cut = weights_checksum(copy.deepcopy(model).truncate([5, 3]))
    assert cut != weights and same_weights(cut, weights) and same_weights(weights, cut)
    assert weights_checksum(copy.deepcopy(model).to("meta")) is None and same_weights(weights, None)


SMALL = {"num_hidden_layers": 1, "hidden_size": 2, "vocab_size": 3, "num_spectral_channels": 3, "gate_hidden_size": 6}
ELASTIC = VARIANTS["memory"] | {"head_size": 3, "memory_value_size": 1}


@pytest.mark.parametrize("block", [{}, ELASTIC], ids=["paper", "elastic"])
def test_every_weight_counts(block):
    """Another number at any place makes another model, and to one of two channels where it has that place, too."""
    model = random_model(seed=3, intermediate_size=6, **SMALL, **block)
    weights, small = weights_checksum(model), weights_checksum(copy.deepcopy(model).truncate(2))
    parts, found = {id(p): leading(block, 2) for _, block, _, _, p in channel_parameters(model)}, {weights}
    for parameter in model.parameters():
        held = torch.zeros(parameter.shape, dtype=torch.bool)
        held[parts.get(id(parameter), ())] = True
        for place, kept in enumerate(held.flatten().tolist()):
            value = parameter.detach().view(-1)[place]
            before = value.clone()
            value += 1
            changed = weights_checksum(model)
            assert not same_weights(changed, weights) and same_weights(changed, small) != kept
            found.add(changed)
            value.copy_(before)
    assert len(found) == model.num_parameters() + 1


def test_the_released_model_knows_its_profile():
    """So names, shapes and values that the checksum is taken of have stayed what they were."""
    folder = ROOT / "hub_configs" / "essm-novels-6m"
    whole = AutoModelForCausalLM.from_pretrained(folder)
    assert choose_budget(whole, max_quality_drop=0.02) == whole.config.budget_presets["medium"]
    part = AutoModelForCausalLM.from_pretrained(folder, spectral_capacity=4, dtype=torch.float32)
    measured = budget_profile(whole).quality.budgets
    assert budget_profile(part).quality.budgets == tuple(K for K in measured if K <= 4) != measured


def test_a_truncated_model_has_no_larger_budgets(tmp_path):
    model = random_model(seed=3)
    of(model).save(tmp_path)
    found = read_profile(tmp_path, copy.deepcopy(model).truncate(9))
    assert found.quality.budgets == (2, 4, 8) and found.quality.values == (2.4, 2.1, 2.03)
    assert len(found.quality.drop_errors) == len(found.quality.errors) == 3
    assert {row.budget for row in found.devices[HERE].rows} == {2, 4, 8} and len(found.devices[HERE].rows) == 12
    assert found.choose(max_latency_ms=100.0) == found.presets()["full"] == 8
    with pytest.raises(ValueError, match=r"this model runs none of its budgets \[2, 4, 8, 16, 32\]"):
        read_profile(tmp_path, model.truncate(1))
    small = profile(**{HERE: device(HERE), THERE: replace(device(THERE), rows=device(THERE).rows[3:])}).up_to(8)
    assert list(small.devices) == [HERE]  # nothing is left of the other


@pytest.mark.parametrize(
    ("measured", "now", "budgets"),
    [((32, 32), (4, 16), (2, 4)), ((4, 16), (4, 16), (2, 4, 8, 16)), ((4, 16), (4, 8), (2, 4, 8))],
)
def test_a_budget_counts_where_every_layer_runs_what_it_ran(measured, now, budgets, tmp_path):
    model = random_model(seed=3).truncate(list(measured))
    of(model).up_to(max(measured)).save(tmp_path)
    assert read_profile(tmp_path, model.truncate(list(now))).quality.budgets == budgets


LOADS = {
    "auto": AutoModelForCausalLM.from_pretrained,
    "prefix": lambda source: ESSMForCausalLM.from_pretrained(source, spectral_capacity=32),
    "config": lambda source: AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(source)),
}


@pytest.mark.parametrize("load", LOADS.values(), ids=LOADS)
def test_a_local_model_finds_its_profile_and_never_asks_the_hub(load, tmp_path, monkeypatch):
    """Loaded by a relative name that a repository could have; then the working directory changes, the folder moves."""
    asked = []
    for name in ("getaddrinfo", "create_connection"):
        monkeypatch.setattr(socket, name, lambda *args, **kwargs: asked.append(args) or 1 / 0)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.chdir(tmp_path)
    model = random_model(seed=3)
    model.save_pretrained("org/name")
    of(model).save("org/name")
    near, far = load("org/name"), load("org/name")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    # A config has its weights from nowhere.
    assert budget_profile(near) == (None if load is LOADS["config"] else of(model))
    Path("../org/name").rename("moved")
    assert budget_profile(far) is None
    with pytest.raises(ValueError, match=r"choose_budget needs budget_profile.json beside the model"):
        choose_budget(far, max_quality_drop=0.02)
    far.save_pretrained("saved")
    assert not asked and not Path("saved/budget_profile.json").exists()


def test_the_profile_of_a_repository(tmp_path, monkeypatch):
    model, other = random_model(seed=3), random_model(seed=4)
    snapshot, main = (hub_snapshot(tmp_path, "org/name", sha) for sha in (SHA, SHA[::-1]))
    for each, folder in ((model, snapshot), (other, main)):
        each.save_pretrained(folder)
        of(each).save(folder)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    loaded = AutoModelForCausalLM.from_pretrained("org/name", revision=SHA, cache_dir=tmp_path)
    assert budget_profile(loaded) == of(model)
    assert budget_profile(AutoModelForCausalLM.from_pretrained("org/name", cache_dir=tmp_path)) == of(other)
    (snapshot / PROFILE_NAME).unlink()
    assert budget_profile(loaded) is None


def test_a_profile_is_there_when_saving_uploads(tmp_path, monkeypatch):
    """`save_pretrained(.., push_to_hub=True)` of the library uploads before it returns."""
    model, uploaded = random_model(seed=3), []
    model.save_pretrained(tmp_path / "model")
    of(model).save(tmp_path / "model")
    monkeypatch.setattr(
        PushToHubMixin, "_upload_modified_files", lambda self, folder, *_, **__: uploaded.extend(os.listdir(folder))
    )
    (tmp_path / "pushed").mkdir()
    ESSMForCausalLM.from_pretrained(tmp_path / "model")._upload_modified_files(
        tmp_path / "pushed", "org/name", {}, token=None
    )
    assert uploaded == [PROFILE_NAME]


def test_a_saved_model_takes_its_profile_along(tmp_path):
    """Over that of another model too; but one that was trained on leaves it behind."""
    load = ESSMForCausalLM.from_pretrained
    model, other = random_model(budget_presets={"medium": 8, "full": 32}), random_model(seed=1)
    for name, each in (("large", model), ("copy", other)):
        each.save_pretrained(tmp_path / name)
        of(each).save(tmp_path / name)
    whole, place = load(tmp_path / "large"), tmp_path / "copy" / PROFILE_NAME
    earlier = place.read_text()
    with place.open() as there:  # replaced in one move: what is being read stays whole
        whole.save_pretrained(tmp_path / "copy")
        assert there.read() == earlier
    assert read_profile(tmp_path / "copy", whole) == of(model) == budget_profile(whole)
    read = load(tmp_path / "large", spectral_capacity=8, dtype=torch.bfloat16)
    for i, small in enumerate((read, whole.truncate(8))):
        small.save_pretrained(tmp_path / str(i))
        again = load(tmp_path / str(i))
        assert budget_profile(again).quality.budgets == (2, 4, 8)
        assert choose_budget(again, max_quality_drop=0.0) == 8  # the full budget, now
        assert again(torch.tensor([[1, 2]]), spectral_budget="medium").spectral_budget == (8, 8)
    trained = load(tmp_path / "large")
    trained.lm_head.weight.data.mul_(1.01)
    trained.save_pretrained(tmp_path / "new")
    assert not (tmp_path / "new" / PROFILE_NAME).exists()
    with pytest.raises(ValueError, match="was measured on other weights"):
        choose_budget(trained, max_quality_drop=0.02)


# --- The budget curve: drops, and what is marked


def curve(values, higher=False, budgets=BUDGETS) -> BudgetCurve:
    return BudgetCurve("accuracy" if higher else "bits_per_byte", higher, budgets, values, (1.0,) * len(budgets))


@pytest.mark.parametrize(
    "values, higher, sweet_spot, collapse_boundary",
    [
        ((2.4, 2.1, 2.03, 2.01, 2.0), False, 8, 4),
        ((2.0, 1.9, 1.8, 1.79, 1.8), False, 8, 2),  # 1.8 / 0.9 is 2.0
        ((2.3, 2.23, 2.22, 2.04, 2.0), False, 16, 8),  # at most 2.04 and 2.2222
        ((9.0, 8.0, 7.0, 6.0, 2.0), False, 32, 32),
        ((0.5, 0.80, 0.881, 0.9, 0.9), True, 16, 8),
        ((0.5, 0.81, 0.882, 0.9, 0.9), True, 8, 4),  # 90% is 0.81, 98% is 0.882
        ((0.0, 0.0, 0.0, 0.0, 0.0), True, 2, 2),
    ],
    ids=str,
)
def test_what_is_marked(values, higher, sweet_spot, collapse_boundary):
    found = curve(values, higher)
    assert (found.sweet_spot, found.collapse_boundary) == (sweet_spot, collapse_boundary)
    assert found.presets() == {"small": collapse_boundary, "medium": sweet_spot, "full": 32}
    collapses = collapse_boundary > 2  # or no smaller budget shows that the model falls apart below
    assert found.marks == {"sweet spot": sweet_spot} | ({"collapse boundary": collapse_boundary} if collapses else {})
    lines = found.table().splitlines()[1:]
    assert [K for K, line in zip(BUDGETS, lines) if "* sweet spot" in line] == [sweet_spot]
    assert [K for K, line in zip(BUDGETS, lines) if "^ collapse" in line] == [collapse_boundary] * collapses


SLOW, LIKE = (7.2, 7.0), (6.5, 6.3)  # median and fastest round
FAST, NOISY = (4.0, 3.9), (4.0, 1.0)


@pytest.mark.parametrize(
    "times, sweet_spot",
    [
        ((LIKE, SLOW, LIKE), 8),  # 3 is worse and slower
        ((LIKE, LIKE, LIKE), 8),
        ((FAST, FAST, LIKE), 3),
        ((NOISY, NOISY, LIKE), 8),  # faster by less than its rounds differ
        ((FAST, FAST, (6.5, 4.1)), 8),  # as the full one may be, on a quieter machine
        ((FAST, LIKE, LIKE), 8),  # 2 loses too much
    ],
    ids=str,
)
def test_what_is_worse_and_not_faster_is_not_recommended(times, sweet_spot):
    values, budgets = (1.86, 1.790, 1.765), (2, 3, 8)
    found = replace(curve(values, budgets=budgets), timings=(dict(zip(budgets, times)),))
    assert found.sweet_spot == found.marks["sweet spot"] == found.presets()["medium"] == sweet_spot
    assert ("saves no time" in found.table()) == (FAST not in times or times[2][1] < 5)
    saved = replace(found, timings=(*found.timings, dict(zip(budgets, (FAST, FAST, SLOW)))))
    assert saved.sweet_spot == 3 and "saves no time" not in saved.table()  # in another kind of call
    assert replace(found, timings=({8: LIKE},)).sweet_spot == 3  # of the others nothing is known


def test_what_is_worse_within_its_error_is_the_smaller_one():
    errors, timings = (0.02, 0.02, 0.0), ({2: SLOW, 3: SLOW, 8: LIKE},)
    found = replace(curve((1.86, 1.790, 1.765), budgets=(2, 3, 8)), timings=timings, drop_errors=errors)
    assert found.sweet_spot == 3 and found.undominated((2, 3, 8)) == (3, 8)


def test_what_is_ruled_out_rules_out_no_other():
    """The spreads of 3 and 6, and of 6 and 8, overlap; those of 3 and 8 do not."""
    timings = ({3: (3.5, 3.1), 6: (3.9, 3.5), 8: (4.5, 4.1)},)
    found = replace(curve((1.79, 1.78, 1.765), budgets=(3, 6, 8)), timings=timings)
    assert found.undominated((3, 6, 8)) == (3, 8) and found.undominated((6, 3)) == (6,) and found.sweet_spot == 3


def test_drops_and_retention_are_against_the_full_budget():
    accuracy = curve((0.5, 0.6, 0.7, 0.9, 0.8), True)
    assert accuracy.drops == pytest.approx((0.375, 0.25, 0.125, -0.125, 0))
    assert accuracy.retention == pytest.approx((0.625, 0.75, 0.875, 1.125, 1.0))
    loss = curve((4.0, 2.5, 2.0, 2.0, 2.0))
    assert loss.drops == pytest.approx((1.0, 0.25, 0, 0, 0)) and loss.retention == pytest.approx((0.5, 0.8, 1, 1, 1))
    assert curve((0.1, 0.0, 0.0, 0.0, 0.0)).drops == (math.inf, 0, 0, 0, 0)
    assert curve((0.1, 0.0, 0.0, 0.0, 0.0), True).retention == (math.inf, 1, 1, 1, 1)
    assert curve((-3.0, -2.5, -2.0, -2.0, -2.0), True).drops == (0.5, 0.25, 0, 0, 0)


def test_the_table():
    table = curve((0.5, 0.71, 0.73, 0.785, 0.8), True, budgets=(2, 3, 4, 6, 8)).table()
    assert "   6     0.7850     -1.9%          1  * sweet spot" in table
    assert table.splitlines()[0] == "   K   accuracy   vs full   tokens/s"
    assert "n/a" in curve((0.0,) * 5, True).table()
    without = dataclasses.replace(curve((0.5, 0.71, 0.73, 0.785, 0.8), True, budgets=(2, 3, 4, 6, 8)), speeds=())
    assert "   6     0.7850     -1.9%  * sweet spot" in without.table()
