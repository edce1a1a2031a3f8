# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Models in torch.compile and torch.export, and on disk."""

import copy
import json
import pickle
import shutil

import pytest
import torch
from helpers import (
    HYBRID,
    VARIANTS,
    assert_close,
    captured_warnings,
    hub_snapshot,
    random_ids,
    random_masks,
    random_model,
)
from torch._subclasses import FakeTensorMode
from torch.func import functional_call, grad

from modeling_essm import ESSMCache, ESSMConfig, ESSMForCausalLM

# --- torch.compile and torch.export


ONE = {"num_hidden_layers": 1}


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({}, id="paper"),
        pytest.param(VARIANTS["memory"] | ONE, id="elastic"),
        pytest.param(HYBRID, id="hybrid", marks=pytest.mark.slow),
    ],
)
@torch._dynamo.config.patch(recompile_limit=32)
def test_compiled_calls_and_training_equal_eager(fields):
    torch._dynamo.reset()
    model, ids, gradients = random_model(**fields, chunk_size=4), random_ids(2, 7), []  # two chunks
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    holes = random_masks(4, 7, torch.Generator().manual_seed(2))[:2]
    calls = [{"spectral_budget": [3, 9][: len(model.config.capacities)], "attention_mask": holes}]
    with torch.no_grad():
        for call in (*calls, *[{"spectral_budget": 4}] * (not fields)):  # another budget is another graph of any block
            assert_close(compiled(ids, use_cache=False, **call).logits, model(ids, **call).logits)
        cache, expected = ESSMCache(model.config), ESSMCache(model.config)
        for part in ids.split([6, 1], 1) if fields is not HYBRID else ():  # whose keys grow: no graph serves the next
            assert_close(compiled(part, past_key_values=cache).logits, model(part, past_key_values=expected).logits)
    for run in (model.train(), compiled):
        model.zero_grad()
        run(ids, labels=ids, spectral_budget=6).loss.backward()
        gradients.append([p.grad for p in model.parameters()])
    for eager, other in zip(*gradients):
        assert_close(other, eager)


@pytest.mark.parametrize("variant", ["paper", "no-gate"])
def test_compiled_for_any_length(variant):
    torch._dynamo.reset()
    model = random_model(**VARIANTS[variant] | ONE, chunk_size=4)
    compiled = torch.compile(model, backend="eager", dynamic=True)
    with torch.no_grad():
        for length in (9, 20):
            ids = random_ids(2, length)
            assert_close(compiled(ids, use_cache=False).logits, model(ids).logits)


@pytest.mark.parametrize("fields", VARIANTS.values(), ids=VARIANTS)
def test_shapes_without_values(fields):
    """On the meta device, and of fake tensors, with which tools find out what a call would take."""
    model, ids = random_model(**fields), random_ids(2, 9)
    assert copy.deepcopy(model).to("meta")(ids.to("meta")).logits.shape == (2, 9, 259)
    with FakeTensorMode(allow_non_fake_inputs=True) as fake:
        assert model(fake.from_tensor(ids)).logits.shape == (2, 9, 259)


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
@pytest.mark.slow
def test_inductor_equals_eager():
    torch._dynamo.reset()
    model, ids = random_model(**ONE), random_ids(2, 21)
    with torch.no_grad():
        actual = torch.compile(model, fullgraph=True)(ids, use_cache=False, spectral_budget=6).logits
        assert_close(actual, model(ids, spectral_budget=6).logits)


@pytest.mark.parametrize("algorithm", ["fft", "step"])
def test_export_of_another_algorithm_for_any_length_is_refused(algorithm):
    model, ids = random_model(spectral_algorithm=algorithm), random_ids(2, 21)
    shapes = {"input_ids": {1: torch.export.Dim("length", min=2, max=512)}, "use_cache": None}
    with pytest.raises(ValueError, match=f"spectral_algorithm='{algorithm}' cannot be exported for any length"):
        torch.export.export(model, (), {"input_ids": ids, "use_cache": False}, dynamic_shapes=shapes)


def test_constants_outlive_a_transform():
    """A filter made inside torch.func belonged to the transform, and a later compilation in that process failed."""
    torch._dynamo.reset()
    model = random_model(num_hidden_layers=1, num_spectral_channels=2, filter_length=67)  # a length of no other test
    ids = random_ids(1, 70)

    def loss(weights):
        return functional_call(model, weights, (ids,), {"labels": ids}).loss

    grad(loss)(dict(model.named_parameters()))
    torch.compile(model, backend="aot_eager")(ids)


# --- Saving and loading


def test_bf16_by_conversion_and_by_loading_agree(tmp_path):
    """The basis is fp64 whatever happens to the parameters: nothing of it may be rounded twice."""
    model, ids = random_model(), random_ids(2, 40)
    model.save_pretrained(tmp_path)
    rounded = copy.deepcopy(model)
    with torch.no_grad():
        for p in rounded.parameters():
            p.copy_(p.to(torch.bfloat16))
    for half in (model.to(torch.bfloat16), ESSMForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)):
        assert {p.dtype for p in half.parameters()} == {torch.bfloat16}
        # back in fp32, the model is exactly the one with rounded weights
        assert torch.equal(half.float()(ids).logits, rounded(ids).logits)


def test_attention_implementations_are_refused(tmp_path):
    random_model().save_pretrained(tmp_path)
    for name in ("sdpa", "flash_attention_2"):
        with pytest.raises(ValueError, match=rf"None or 'eager', got '{name}'.*no attention.*spectral_algorithm"):
            ESSMForCausalLM.from_pretrained(tmp_path, attn_implementation=name)
    assert ESSMForCausalLM.from_pretrained(tmp_path, attn_implementation="eager") is not None


class DerivedLM(ESSMForCausalLM):
    """As a user derives one, in a file of his own."""


def test_a_derived_model_is_saved_with_our_code_and_no_secret(tmp_path):
    model = random_model(DerivedLM)
    model.save_pretrained(tmp_path)
    assert type(model) is DerivedLM
    names = {reference.split(".")[0] for reference in model.config.auto_map.values()}
    assert all((tmp_path / f"{name}.py").is_file() for name in names)
    loaded = ESSMForCausalLM.from_pretrained(tmp_path, token="a-secret")
    assert torch.equal(loaded(random_ids(1, 5)).logits, model(random_ids(1, 5)).logits)
    assert b"a-secret" not in pickle.dumps(loaded)


def test_a_configuration_names_only_code_that_lies_beside_it(tmp_path):
    ESSMConfig().save_pretrained(tmp_path / "config")
    assert ESSMConfig.from_pretrained(tmp_path / "config").auto_map  # of this class, whatever the file says
    text = (tmp_path / "config" / "config.json").read_text()
    assert "configuration_essm.ESSMConfig" in text and "modeling_essm.ESSMModel" not in text
    random_model().save_pretrained(tmp_path / "model")
    assert "modeling_essm.ESSMModel" in (tmp_path / "model" / "config.json").read_text()
    elsewhere = {"AutoModel": "org/name--modeling_essm.ESSMModel", "AutoTokenizer": ["mine.Tokenizer", None]}
    ESSMConfig(auto_map=elsewhere).save_pretrained(tmp_path / "remote")
    assert elsewhere.items() <= json.loads((tmp_path / "remote" / "config.json").read_text())["auto_map"].items()
    ESSMConfig(auto_map={"AutoModel": "essm.ESSMModel"}).save_pretrained(tmp_path / "released")  # as in hub_configs
    assert "essm.ESSMModel" not in (tmp_path / "released" / "config.json").read_text()


def test_other_code_beside_the_weights_is_named(tmp_path):
    """Edited or of another version, in a folder or a snapshot of the Hub; other line ends are no other code."""
    saved, snapshot = tmp_path / "saved", hub_snapshot(tmp_path / "hub", "org/name")
    random_model().save_pretrained(saved)
    code = saved / "mixer_essm.py"
    code.write_bytes(code.read_bytes().replace(b"\n", b"\r\n"))
    shutil.copytree(saved, snapshot)
    with captured_warnings() as messages:
        ESSMForCausalLM.from_pretrained(saved)
        ESSMForCausalLM.from_pretrained(snapshot)
        assert not messages
        for folder in (saved, snapshot):
            (folder / code.name).write_text(code.read_text() + "# mine\n")
            for _ in range(2):
                ESSMForCausalLM.from_pretrained(folder)
            (message,) = messages
            assert f"beside the weights in '{folder}', edited or of another version, is not run" in message
            assert "Different: mixer_essm.py." in message
            messages.clear()
