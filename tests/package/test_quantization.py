# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Quantised weights: where they are, that a budget stays a prefix of them, saved copies, kernels and refusals."""

import copy
import json
import math
import os
import shutil
import subprocess
import sys

import pytest
import torch
from helpers import BUDGETS, assert_close, random_ids, random_model
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from modeling_essm import ESSMCache, ESSMForCausalLM, ESSMForSequenceClassification, ESSMModel, essm_quantization
from modeling_essm import quantized_weights as q
from modeling_essm.decoding import speculate

pytest.importorskip("torchao", reason="quantised weights need torchao")

TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])
# Two groups of int4 in a row of the paper's channel_mixing; a gated block that is all quantised, and one whose diagonal
# M_k stay.
_GATED = {"block": "gated", "hidden_size": 64, "inner_size": 64, "gate_hidden_size": 32, "num_heads": 2}
BLOCKS = {
    "paper": {"hidden_size": 128, "gate_hidden_size": 32},
    "gated": {**_GATED, "mixing_size": 32, "intermediate_size": 96},
    "gated-diagonal": _GATED,
}
MATRICES = {
    "paper": ("mixer.channel_mixing", "mixer.skip.weight", "mixer.gate_in.weight", "ffn.up.weight", "ffn.down.weight"),
    "gated-diagonal": ("mixer.gate_in.weight", "in_proj.weight", "out_proj.weight"),
}
MATRICES["gated"] = (*MATRICES["gated-diagonal"], "mixer.channel_mixing", "ffn.up.weight", "ffn.down.weight")
blocks = pytest.mark.parametrize("block", BLOCKS, indirect=True, scope="module")  # of other tests it is the paper's
FORMATS = pytest.mark.parametrize("name", q.FORMATS)
# Rounding to the nearest of n levels is off by half a step at most: of a row scaled by its largest value, of a group by
# its range, whose fp16 scale and bias add a little.
STEPS = {"int8": 1 / 127.5, "int4": 1 / 15}


@pytest.fixture(scope="module")
def block(request):
    return getattr(request, "param", "paper")


@pytest.fixture(scope="module")
def large(block):
    return random_model(**BLOCKS[block])


@pytest.fixture(scope="module")
def folders(large, tmp_path_factory):
    """The full-precision checkpoint and those of the quantised models."""
    root = tmp_path_factory.mktemp("saved")
    large.save_pretrained(root / "full")
    for name in q.FORMATS:
        model = ESSMForCausalLM.from_pretrained(root / "full", quantization_config=name)
        model.save_pretrained(root / name)
    return root


@pytest.fixture(scope="module")
def models(folders):
    return {name: ESSMForCausalLM.from_pretrained(folders / "full", quantization_config=name) for name in q.FORMATS}


@torch.no_grad()
def outputs(model, budget=None):
    ids = random_ids(3, 30)
    mask = torch.ones_like(ids)
    mask[1, :7] = 0
    logits = model(ids, attention_mask=mask, spectral_budget=budget)[0]
    return logits.masked_fill(mask[..., None] == 0, 0.0)  # what stands at padding means nothing


def quantised_names(model):
    return {name for name, parameter in model.named_parameters() if q.is_quantized(parameter)}


def dequantised(model):
    """The model of full precision with the values that the quantised one stores."""
    fields = {key: value for key, value in model.config.to_diff_dict().items() if key != "quantization_config"}
    plain = random_model(type(model), **fields)
    state = {name: q.dequantize(t) if q.is_quantized(t) else t for name, t in model.state_dict().items()}
    plain.load_state_dict(state)
    return plain


@blocks
@FORMATS
def test_the_matrices_are_quantised_and_nothing_else(models, name, block):
    model = models[name]
    assert quantised_names(model) == {f"model.layers.{i}.{matrix}" for i in range(2) for matrix in MATRICES[block]}
    kind = {"int8": "Int8Tensor", "int4": "ESSMInt4Tensor"}[name]
    for parameter in filter(q.is_quantized, model.parameters()):
        assert type(parameter).__name__ == kind and not parameter.requires_grad
        bits = 8 * q.weight_bytes(parameter) / parameter.numel()
        assert bits < (8 + 8 * 5 / 32 + 0.01 if name == "int8" else 5.01)  # 32 inputs; 32 outputs
    assert model.lm_head.weight is model.model.embed_tokens.weight


@blocks
@FORMATS
def test_every_weight_is_near_its_own(large, models, name):
    for (key, weight), quantised in zip(large.named_parameters(), models[name].parameters()):
        if not q.is_quantized(quantised):
            assert torch.equal(weight, quantised), key
            continue
        assert quantised.shape == weight.shape
        values, error = q.dequantize(quantised), (q.dequantize(quantised) - weight).abs()
        if name == "int8":
            span = weight.abs().amax(-1, keepdim=True)
        else:  # of the outputs of one input, at most 64 of them
            columns = weight if weight.ndim == 3 else weight.T
            groups = columns.unflatten(-1, (-1, math.gcd(columns.shape[-1], 64)))
            span = (groups.amax(-1, keepdim=True) - groups.amin(-1, keepdim=True)).expand_as(groups).flatten(-2)
            span = span if weight.ndim == 3 else span.T
        assert (error <= 0.51 * STEPS[name] * span + 1e-3 * weight.abs().amax()).all(), key
        assert values.flatten().unique().numel() > 64 and error.max() > 0, key


@blocks
@FORMATS
def test_a_budget_is_the_quantised_prefix(large, folders, models, name, tmp_path):
    """Bit for bit: nothing of a channel depends on the channels behind it."""
    copy.deepcopy(large).truncate(5).save_pretrained(tmp_path)
    small = ESSMForCausalLM.from_pretrained(tmp_path, quantization_config=name)
    for a, b in zip(models[name].model.layers, small.model.layers):
        held, cut = a.mixer.channel_mixing, b.mixer.channel_mixing
        assert len(cut) == 5 and q.is_quantized(cut) == q.is_quantized(held)
        assert all(torch.equal(x[:5], y) for x, y in zip(q.parts(held), q.parts(cut), strict=True))
    expected = outputs(small)
    assert torch.equal(outputs(models[name], 5), expected)
    assert torch.equal(outputs(copy.deepcopy(models[name]).truncate(5)), expected)
    read = ESSMForCausalLM.from_pretrained(folders / name, spectral_capacity=5)
    both = ESSMForCausalLM.from_pretrained(folders / "full", spectral_capacity=5, quantization_config=name)
    for model in (read, both):
        assert torch.equal(outputs(model), expected) and model.config.capacities == (5, 5)
        assert quantised_names(model) == quantised_names(small)
        with pytest.raises(ValueError, match=r"\[1, 5\]"):
            model(random_ids(1, 4), spectral_budget=6)
    assert read.get_memory_footprint() == small.get_memory_footprint() < models[name].get_memory_footprint()


@pytest.mark.parametrize("block", ["paper", "gated"], indirect=True, scope="module")
@FORMATS
def test_channels_beyond_the_budget_are_not_read(models, name):
    model = copy.deepcopy(models[name])
    expected = outputs(model, 5)
    for layer in model.model.layers:
        M = layer.mixer.channel_mixing
        M.qdata[5:] = 255 if name == "int4" else -128  # as fp16, 255 255 is a NaN
        if name == "int8":
            M.scale[5:] = torch.nan
    assert torch.equal(outputs(model, 5), expected)
    assert outputs(model, 6).isnan().any()


@blocks
@FORMATS
@pytest.mark.parametrize("budget", BUDGETS)
def test_outputs_are_those_of_the_stored_values(models, name, budget):
    plain = dequantised(models[name])
    # 1e-4: int8 layers scale after the product, where the plain model multiplies by scaled weights.
    assert_close(outputs(models[name], budget), outputs(plain, budget), atol=1e-4)
    ids = random_ids(2, 12)
    rows = torch.tensor([budget, 3])
    with torch.no_grad():
        mixed = models[name](ids, spectral_budget=rows).logits
        assert_close(mixed[:1], plain(ids[:1], spectral_budget=budget).logits, atol=1e-4)
        assert_close(mixed[1:], plain(ids[1:], spectral_budget=3).logits, atol=1e-4)


@blocks
@FORMATS
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize("batch", [1, 3])
def test_steps_continue_the_sequence(models, name, mode, batch):
    """Single steps have products of their own; batch 1 has int4's kernel."""
    model, ids = models[name], random_ids(batch, 12)
    plain = dequantised(model)
    with mode():
        for K in (1, 5, 32):
            whole = plain(ids, spectral_budget=K).logits
            cache = ESSMCache(model.config)
            model(ids[:, :9], past_key_values=cache, use_cache=True, spectral_budget=K)
            for t in range(9, 12):
                step = model(ids[:, t : t + 1], past_key_values=cache, use_cache=True, spectral_budget=K).logits
                assert_close(step, whole[:, t : t + 1], atol=1e-4)


def test_the_kernel_of_4_bit_rows_agrees(monkeypatch):
    used = []
    kernel = q._BAG
    assert kernel is not None
    monkeypatch.setattr(q, "_BAG", lambda *args: used.append(1) or kernel(*args))
    q.register_formats()
    weight, x = torch.randn(6, 16, 128), torch.randn(1, 1, 4 * 16)
    packed = q.ESSMInt4Tensor(q.pack_rows(weight, 64), torch.float32)
    expected = x @ q.dequantize(packed)[:4].flatten(0, 1)
    assert_close(q.quantized_product(x, packed), expected)
    assert used == [1]
    linear = q.ESSMInt4Tensor(q.pack_rows(torch.randn(8, 24).T, 8), torch.float32)
    x = torch.randn(1, 24)
    assert linear.shape == (8, 24)
    for bias in (None, torch.randn(8)):
        assert_close(
            torch.nn.functional.linear(x, linear, bias), x @ linear.dequantize().T + (0 if bias is None else bias)
        )
    assert used == [1] * 3
    assert torch.nn.functional.linear(x.double(), linear).dtype == torch.float64 and used == [1] * 3


def test_packing_keeps_what_four_bits_can():
    levels = torch.arange(16.0).flip(0) * 0.5 - 2.0
    for weights in (levels.repeat(3, 4), torch.zeros(2, 64), torch.full((1, 64), 0.25), -levels.repeat(1, 4)):
        assert torch.equal(q.unpack_rows(q.pack_rows(weights, 64), torch.float32), weights)
    small = torch.randn(5, 128) * 1e-3  # fp16 scales are subnormal
    error = (q.unpack_rows(q.pack_rows(small, 64), torch.float32) - small).norm() / small.norm()
    assert error < 0.12


@blocks
@FORMATS
def test_saved_copies_are_the_model(models, folders, name, block, tmp_path):
    expected = outputs(models[name], 7)
    again = ESSMForCausalLM.from_pretrained(folders / name)
    assert again.is_quantized and quantised_names(again) == quantised_names(models[name])
    assert not any(p.requires_grad for p in again.parameters() if q.is_quantized(p))
    again.save_pretrained(tmp_path / "again")
    again.truncate(7).save_pretrained(tmp_path / "small", max_shard_size="40KB")
    assert (tmp_path / "small" / "model.safetensors.index.json").exists()
    for source in (folders / name, tmp_path / "again", tmp_path / "small"):
        loaded, info = ESSMForCausalLM.from_pretrained(source, output_loading_info=True)
        assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
        assert torch.equal(outputs(loaded, 7), expected)
        assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    whole, small = (
        sum(p.stat().st_size for p in f.glob("*.safetensors")) for f in (folders / name, tmp_path / "small")
    )
    full = (folders / "full" / "model.safetensors").stat().st_size
    share = {"paper": 0.33 if name == "int8" else 0.20, "gated": 0.45, "gated-diagonal": 0.8}[block]
    assert small < whole < share * full
    with safe_open(folders / name / "model.safetensors", "pt") as file:
        matrix = MATRICES[block][0]  # channel_mixing of the paper's block
        stored = file.get_slice("model.layers.0." + "._".join(matrix.rsplit(".", 1)) + "_qdata")
        assert stored.get_dtype() == ("I8" if name == "int8" else "U8")
    assert torch.equal(
        outputs(ESSMForCausalLM.from_pretrained(tmp_path / "small", spectral_capacity=3)), outputs(models[name], 3)
    )


@blocks
@FORMATS
def test_options_of_loading(folders, models, name):
    reference = outputs(models[name]).float()
    for source, options in (("full", {"quantization_config": name}), (name, {})):
        half = ESSMForCausalLM.from_pretrained(folders / source, dtype=torch.bfloat16, **options)
        logits = outputs(half)
        assert logits.dtype == torch.bfloat16
        # bf16 gives 3e-3 an operation; before quantisation it also moves weights to the next of 16 levels.
        tolerance = 0.2 if (source, name) == ("full", "int4") else 0.05
        assert (logits.float() - reference).norm() < tolerance * reference.norm()
        mapped = ESSMForCausalLM.from_pretrained(folders / source, device_map="cpu", **options)
        assert torch.equal(outputs(mapped), reference)
    config = ESSMForCausalLM.from_pretrained(folders / "full", quantization_config=essm_quantization(name))
    assert torch.equal(outputs(config), reference)
    budget = ESSMForCausalLM.from_pretrained(folders / name, spectral_budget=4)
    assert torch.equal(outputs(budget), outputs(models[name], 4))


@blocks
@FORMATS
def test_generation_beams_and_profile_of_a_quantised_model(models, folders, name):
    model, ids = models[name], random_ids(2, 9)
    greedy = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    batch = model.generate(ids, spectral_budget=torch.tensor([4, 20]), **greedy)
    assert torch.equal(batch[:1], model.generate(ids[:1], spectral_budget=4, **greedy))
    assert torch.equal(model.generate(ids, custom_generate=speculate(2), **greedy), model.generate(ids, **greedy))
    assert model.generate(ids, num_beams=3, spectral_budget=5, **greedy).shape == (2, 15)
    assert model.num_active_parameters(3) < model.num_active_parameters() == model.num_parameters()
    clone = copy.deepcopy(model)
    assert torch.equal(outputs(clone), outputs(model))


@blocks
@FORMATS
@pytest.mark.parametrize("algorithm", ["fft", "step", "naive"])
def test_every_algorithm_takes_quantised_weights(models, name, algorithm):
    model = copy.deepcopy(models[name])
    for layer in model.model.layers:
        layer.mixer.algorithm = algorithm
    assert_close(outputs(model, 6), outputs(models[name], 6), atol=1e-4)


@FORMATS
def test_autoregressive_terms_stay_in_full_precision(name, tmp_path):
    large = random_model(ar_order=2, hidden_size=64)
    large.save_pretrained(tmp_path / "full")
    model = ESSMForCausalLM.from_pretrained(tmp_path / "full", quantization_config=name)
    mixer = model.model.layers[0].mixer
    kept = (mixer.channel_mixing_negative, mixer.input_mixing, mixer.output_mixing)
    assert q.is_quantized(mixer.channel_mixing) and not any(map(q.is_quantized, kept))
    model.save_pretrained(tmp_path / "small")
    for loaded in (model, ESSMForCausalLM.from_pretrained(tmp_path / "small")):
        assert_close(outputs(loaded, 6), outputs(dequantised(model), 6), atol=1e-4)


@FORMATS
def test_classifiers_and_odd_widths(name, tmp_path):
    large = random_model(ESSMForSequenceClassification, hidden_size=20, intermediate_size=48, num_input_features=3)
    large.save_pretrained(tmp_path / "full")
    model = ESSMForSequenceClassification.from_pretrained(tmp_path / "full", quantization_config=name)
    assert not q.is_quantized(model.score.weight) and not q.is_quantized(model.model.embed_features.weight)
    mixer, ffn = model.model.layers[0].mixer, model.model.layers[0].ffn
    assert q.is_quantized(ffn.up.weight)
    assert q.is_quantized(mixer.channel_mixing) == (name == "int8")  # too small a group
    model.save_pretrained(tmp_path / "small")
    again = ESSMForSequenceClassification.from_pretrained(tmp_path / "small")
    features = torch.randn(2, 11, 3)
    with torch.no_grad():
        logits = model(input_features=features, spectral_budget=4).logits
        assert torch.equal(again(input_features=features, spectral_budget=4).logits, logits)
        expected = large(input_features=features, spectral_budget=4).logits
    assert (logits - expected).norm() < (0.05 if name == "int8" else 0.3) * expected.norm()


def test_a_fresh_process_loads_it_without_the_package(folders, models, tmp_path):
    code = (
        "import sys, torch; sys.modules['modeling_essm'] = None\n"
        "from pathlib import Path\n"
        "from transformers import AutoModelForCausalLM\n"
        "torch.set_num_threads(1)\n"
        "root, out = map(Path, sys.argv[1:])\n"
        "ids, results = torch.load(out / 'ids.pt'), {}\n"
        "load = lambda folder, **k: AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, **k)\n"
        "with torch.no_grad():\n"
        "    for name in ('int8', 'int4'):\n"
        "        model = load(root / name)\n"
        "        results[name] = [model(ids).logits, load(root / name, spectral_capacity=4)(ids).logits]\n"
        "        results[name].append(load(root / 'full', quantization_config=name)(ids).logits)\n"
        "        model.truncate(4).save_pretrained(out / name)\n"
        "        results[name].append(load(out / name)(ids).logits)\n"
        "torch.save(results, out / 'results.pt')\n"
    )
    ids = random_ids(2, 20)
    torch.save(ids, tmp_path / "ids.pt")
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_MODULES_CACHE": str(tmp_path / "modules")}
    command = [sys.executable, "-c", code, str(folders), str(tmp_path)]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    results = torch.load(tmp_path / "results.pt")
    for name in q.FORMATS:
        with torch.no_grad():
            whole, four = models[name](ids).logits, models[name](ids, spectral_budget=4).logits
        for found, expected in zip(results[name], (whole, four, whole, four), strict=True):
            assert_close(found, expected)  # another process: not always as many threads


@blocks
def test_a_remote_copy_beside_the_package(folders, models, tmp_path, monkeypatch):
    """Two copies of the code in one process: each reads what the other wrote."""
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    remote = get_class_from_dynamic_module("modeling_essm.ESSMForCausalLM", str(folders / "full"))
    assert remote is not ESSMForCausalLM
    for name in q.FORMATS:
        expected = outputs(models[name], 9)
        assert torch.equal(outputs(remote.from_pretrained(folders / name), 9), expected)
        remote.from_pretrained(folders / "full", quantization_config=name).save_pretrained(tmp_path / name)
        assert torch.equal(outputs(ESSMForCausalLM.from_pretrained(tmp_path / name), 9), expected)


# --- Refusals


@pytest.mark.parametrize("name", ["int3", "INT8", ""])
def test_unknown_names_are_refused(folders, name):
    for call in (
        lambda: essm_quantization(name),
        lambda: ESSMForCausalLM.from_pretrained(folders / "full", quantization_config=name),
        lambda: AutoModelForCausalLM.from_pretrained(folders / "full", quantization_config=name),
    ):
        with pytest.raises(ValueError, match=rf"must be one of \('int8', 'int4'\), got '{name}'"):
            call()


def test_quantised_models_do_not_train(models):
    model = copy.deepcopy(models["int8"])
    assert model.eval() is model and model.train(False) is model
    with pytest.raises(ValueError, match="a quantised model cannot be trained: train in full precision"):
        model.train()
    assert not model.training


@FORMATS
def test_a_checkpoint_loads_as_its_own_class(folders, name):
    with pytest.raises(ValueError, match=r"do not fit ESSMModel: load them as the class that was saved"):
        ESSMModel.from_pretrained(folders / name)


@FORMATS
def test_values_that_are_not_finite_are_refused(large, name, tmp_path):
    broken = copy.deepcopy(large)
    with torch.no_grad():
        broken.model.layers[1].mixer.channel_mixing[3, 2, 1] = torch.nan
    broken.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"layers\.1\.mixer\.channel_mixing of checkpoint .* contains NaN"):
        ESSMForCausalLM.from_pretrained(tmp_path, quantization_config=name)


def test_without_torchao_everything_else_works(folders, tmp_path):
    code = (
        "import sys; sys.modules['torchao'] = None\n"
        "import importlib.util, importlib.metadata\n"
        "find = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, *a: None if name.startswith('torchao') else find(name, *a)\n"
        "import torch, transformers\n"
        "from modeling_essm import ESSMForCausalLM, essm_quantization\n"
        "full, int8, int4 = sys.argv[1:]\n"
        "ESSMForCausalLM.from_pretrained(full)(torch.arange(9)[None])\n"
        "calls = [lambda: essm_quantization('int8'), lambda: essm_quantization('int4')]\n"
        "calls += [lambda: ESSMForCausalLM.from_pretrained(full, quantization_config='int8')]\n"
        "calls += [lambda: ESSMForCausalLM.from_pretrained(int8), lambda: ESSMForCausalLM.from_pretrained(int4)]\n"
        "for call in calls:\n"
        "    try:\n        call()\n"
        "    except ImportError as error:\n        print('refused:', error)\n"
    )
    arguments = [str(folders / name) for name in ("full", "int8", "int4")]
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("refused: quantised weights need torchao: pip install 'torchao>=") == 5, done.stdout


@pytest.mark.skipif(TORCH < (2, 13), reason="torch 2.11 cannot compile the basis, quantised or not")
@FORMATS
@pytest.mark.parametrize("shape", [(2, 20), (1, 1)])
@pytest.mark.sampled(1)
def test_compiled_models_agree(models, name, shape):
    model, ids = models[name], random_ids(*shape)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        assert_close(compiled(ids, use_cache=False, spectral_budget=5).logits, model(ids, spectral_budget=5).logits)


def test_older_int8_checkpoints_load(folders, models, tmp_path):
    """Those that name torchao's own config."""
    shutil.copytree(folders / "int8", tmp_path / "old")
    config = json.loads((tmp_path / "old" / "config.json").read_text())
    quantization = config["quantization_config"]
    formats = quantization["quant_type"]["default"]["_data"]
    for key in ("fqn_to_config", "module_fqn_to_config"):
        for value in formats.get(key, {}).values():
            value |= {"_type": "Int8WeightOnlyConfig", "_version": 2, "_data": {"set_inductor_config": False}}
    (tmp_path / "old" / "config.json").write_text(json.dumps(config))
    assert "ESSMInt8Config" not in (tmp_path / "old" / "config.json").read_text()
    assert torch.equal(outputs(ESSMForCausalLM.from_pretrained(tmp_path / "old")), outputs(models["int8"]))


def test_a_config_can_be_made_before_anything_is_loaded(monkeypatch):
    monkeypatch.delattr(q, "ESSMInt4Config", raising=False)
    q.register_formats.cache_clear()
    assert essm_quantization("int4").to_dict()["quant_method"] == "torchao"


def test_the_config_tells_the_format(folders):
    stored = json.loads((folders / "int4" / "config.json").read_text())["quantization_config"]
    assert stored["quant_method"] == "torchao" and "ESSMInt4Config" in json.dumps(stored)
    assert json.loads((folders / "int4" / "config.json").read_text())["num_spectral_channels"] == 32
