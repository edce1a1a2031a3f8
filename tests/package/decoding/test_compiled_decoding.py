# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Compiled steps: the logits, states and tokens of eager steps, wherever they are taken, and never after a change."""

import copy
import itertools
import pickle
import shutil

import pytest
import torch
from helpers import ROOT, VARIANTS, assert_close, captured_warnings, random_ids, random_model
from transformers import CompileConfig

from modeling_essm import ESSMCache, ESSMConfig, ESSMForCausalLM
from modeling_essm.cache_essm import ESSMStaticCache
from modeling_essm.decoding import compile_decoding, compiled_steps, speculate


@pytest.fixture
def taken(monkeypatch):
    """Budgets of the compiled steps that were taken, in order."""
    calls: list[tuple[int, ...]] = []
    call = compiled_steps._call

    def spy(step, model, layers, *rest):
        calls.append(layers)
        return call(step, model, layers, *rest)

    monkeypatch.setattr(compiled_steps, "_call", spy)
    return calls


def compiled_model(budgets, taken=None, **fields):
    arguments = {name: fields.pop(name) for name in ("batch_size", "state_budget") if name in fields}
    model = compile_decoding(random_model(**fields), budgets, backend="eager", **arguments)
    if taken is not None:
        taken.clear()
    return model


@torch.no_grad()
def decode(model, ids, budget, cache=None):
    """Logits of every position after the first, one call each."""
    cache = ESSMCache(model.config) if cache is None else cache
    model(ids[:, :1], past_key_values=cache, spectral_budget=budget)
    steps = [model(ids[:, t : t + 1], past_key_values=cache, spectral_budget=budget) for t in range(1, ids.shape[1])]
    return torch.cat([step.logits for step in steps], 1), cache


@pytest.mark.parametrize(
    ("variant", "budget"),
    [({}, [3, 17]), (VARIANTS["no-gate"], 5), (VARIANTS["gated"], 5)],
    ids=["per-layer", "no-gate", "gated"],
)
def test_steps_equal_eager_ones(variant, budget, taken):
    model = compiled_model([budget], taken, batch_size=2, **variant)
    ids = random_ids(2, 9)
    logits, cache = decode(model, ids, budget)
    expected, expected_cache = decode(random_model(**variant), ids, budget)
    layers = model.config.resolve_budget(budget).layers
    assert taken == [layers] * 8
    assert_close(logits, expected)
    assert cache.get_seq_length() == expected_cache.get_seq_length() == 9
    for layer, other in zip(cache.layers, expected_cache.layers):
        assert layer.tensors.keys() == other.tensors.keys()
        for name in layer.tensors:
            assert_close(layer.tensors[name], other.tensors[name])


@pytest.mark.parametrize("block", ["paper", "gated"])
def test_one_graph_serves_all_prompts_and_modes(block, taken):
    """A single row keeps the strides of what it was cut from; tensors of inference mode have other dispatch keys."""
    torch._dynamo.reset()
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    model = compiled_model([5], taken, state_budget=5, **VARIANTS[block])
    modes, steps = (torch.no_grad, torch.inference_mode), 0
    for length in (1, 2, 8, 9, 17):
        for reading, decoding in itertools.product(modes, modes):
            ids = random_ids(1, length + 2)
            cache = ESSMCache(model.config, state_budget=9 if length % 2 else None)
            with reading():
                model(ids[:, :length], past_key_values=cache, spectral_budget=5)
                cache.shrink(5)
            with decoding():
                logits = [model(ids[:, [t]], past_key_values=cache, spectral_budget=5).logits for t in (-2, -1)]
                model(ids[:, -1:], past_key_values=cache, spectral_budget=5)
            steps += 3
            assert not any(tensor.is_inference() for tensor in cache.states.values())
            if length == 9:
                assert_close(
                    torch.cat(logits, 1), random_model(**VARIANTS[block])(ids, spectral_budget=5).logits[:, -2:]
                )
    assert len(taken) == steps
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before + 1
    torch._dynamo.reset()


def test_states_laid_out_otherwise_are_not_compiled_for(taken):
    model = compiled_model([5], taken)
    _, cache = decode(model, random_ids(1, 4), 5)
    taken.clear()
    for layer in cache.layers:
        layer.apply(lambda t: t.mT.contiguous().mT)
    with torch.no_grad():
        for _ in range(3):
            model(random_ids(1, 1), past_key_values=cache, spectral_budget=5)
    assert len(taken) == 2  # the first runs eagerly, and leaves states as they should lie


def rounded_otherwise(model, layers, ids, states):
    """The step in fp32, rounded at its end."""
    states = {name: tensor.float() for name, tensor in states.items()}
    logits, after = copy.deepcopy(model).float().step(ids, layers, states)
    return logits.to(model.dtype), {name: tensor.to(states[name].dtype) for name, tensor in after.items()}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_step_that_rounds_in_another_order_is_right(dtype, monkeypatch):
    monkeypatch.setattr(compiled_steps, "_compile", lambda *_: rounded_otherwise)
    fields = {"block": "gated", "inner_size": 16, "mixing_size": 1, "num_hidden_layers": 8}
    model = random_model(**fields).to(dtype)
    assert compile_decoding(model, [2]).decoding_steps


def off_by_a_little(logits, states):
    return logits + 1e-3 * logits.norm() * torch.nn.functional.normalize(torch.ones_like(logits), dim=-1), states


def one_state_wrong(logits, states):
    return logits, states | {"1.convolution": states["1.convolution"].flip(1)}


def not_finite(logits, states):
    return logits * float("nan"), states


@pytest.mark.parametrize("mistake", [off_by_a_little, one_state_wrong, not_finite, "forgets", "off in bf16"])
def test_a_wrong_step_is_refused(mistake, monkeypatch):
    def wrong(model, layers, ids, states):
        if mistake == "forgets":
            states = {name: torch.zeros_like(tensor) for name, tensor in states.items()}
        logits, states = model.step(ids, layers, states)
        if mistake == "off in bf16":
            return 1.15 * logits, states
        return (logits, states) if mistake == "forgets" else mistake(logits, states)

    monkeypatch.setattr(compiled_steps, "_compile", lambda *_: wrong)
    model = random_model(**VARIANTS["gated"]).to(torch.bfloat16 if mistake == "off in bf16" else torch.float32)
    with pytest.raises(RuntimeError, match="the compiled step is wrong: its"):
        compile_decoding(model, [5])
    assert not model.decoding_steps


@pytest.mark.slow
@pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="needs a C++ compiler")
def test_inductor(taken):
    """Ahead, and by `generate` with a static cache; a released size in bf16."""
    model, ids = random_model(num_hidden_layers=1), random_ids(2, 9)
    settings = {"max_new_tokens": 5, "do_sample": False, "spectral_budget": 5}
    expected = model.generate(ids, **settings)
    config = compile_config("inductor", mode="default")
    assert torch.equal(model.generate(ids, cache_implementation="static", compile_config=config, **settings), expected)
    model = compile_decoding(random_model(num_hidden_layers=1), [4, 32])
    taken.clear()
    for budget in (4, 32):
        logits, _ = decode(model, random_ids(1, 6), budget)
        assert_close(logits, decode(random_model(num_hidden_layers=1), random_ids(1, 6), budget)[0])
    assert taken == [(4,)] * 5 + [(32,)] * 5
    large = ESSMForCausalLM(ESSMConfig.from_pretrained(ROOT / "hub_configs" / "essm-gated-20m")).eval().bfloat16()
    assert compile_decoding(large, [2]).decoding_steps
    torch._dynamo.reset()


WAYS = [{"do_sample": False}, {"do_sample": True}, {"custom_generate": speculate(2)}]


@pytest.mark.parametrize(("rows", "ways"), [(1, WAYS), (3, [{"num_beams": 3}])], ids=["one", "beams"])
def test_generate(rows, ways, taken):
    model, eager = compiled_model([2, 6], batch_size=rows), random_model()
    for way in ways:
        taken.clear()
        arguments = {"max_new_tokens": 12, "spectral_budget": 6, **way}
        torch.manual_seed(0)
        tokens = model.generate(random_ids(1, 7), **arguments)
        assert set(taken) == ({(2, 2)} if "custom_generate" in way else {(6, 6)}) and len(taken) >= 5
        torch.manual_seed(0)
        assert torch.equal(tokens, eager.generate(random_ids(1, 7), **arguments))


def test_what_was_not_compiled_runs_eagerly(taken):
    model, eager, ids = compiled_model([6], taken), random_model(), random_ids(2, 8)
    for budget, rows in ((5, 1), (6, 2), ([6, 5], 1), (torch.tensor([6, 2]), 2)):
        assert_close(decode(model, ids[:rows], budget)[0], decode(eager, ids[:rows], budget)[0])
    assert taken == []
    mask = torch.ones(1, 1, dtype=torch.long)
    _, cache = decode(model, ids[:1], 6)
    taken.clear()
    with torch.no_grad():
        model(ids[:1, :2], past_key_values=cache, spectral_budget=6)
        for given in ({"attention_mask": mask}, {"labels": ids[:1, :1]}, {"output_hidden_states": True}):
            model(ids[:1, :1], past_key_values=cache, spectral_budget=6, **given)
        model(ids[:1, :1], spectral_budget=6)
    assert taken == []


def test_gradients_are_those_of_the_eager_step(taken):
    model = compiled_model([6], taken)
    _, cache = decode(model, random_ids(1, 4), 6)
    taken.clear()
    model(random_ids(1, 1), past_key_values=cache, spectral_budget=6).logits.sum().backward()
    assert taken == [] and model.model.layers[0].mixer.channel_mixing.grad.abs().sum() > 0


def test_room_for_more_than_the_budget(taken):
    model = compiled_model([4], taken, state_budget=32)
    ids, room = random_ids(1, 6), ESSMCache(model.config, state_budget=32)
    logits, _ = decode(model, ids, 4, room)
    assert taken == [(4, 4)] * 5
    assert_close(logits, decode(random_model(), ids, 4)[0])
    taken.clear()
    decode(model, ids, 4)
    assert taken == []  # a smaller state than was compiled


def test_merged_caches_of_different_room_are_still_checked():
    model = compiled_model([8], batch_size=2)
    small, large = (decode(model, random_ids(1, 3), K)[1] for K in (4, 8))
    merged = ESSMCache.merge([small, large])
    with torch.no_grad(), pytest.raises(ValueError, match="row 0 of layer 0"):
        model(random_ids(2, 1), past_key_values=merged, spectral_budget=8)


def test_states_are_not_written_into(taken):
    model = compiled_model([6], taken)
    _, cache = decode(model, random_ids(1, 4), 6)
    kept = cache.layers[0].tensors["features"]
    before = kept.clone()
    with torch.no_grad():
        model(random_ids(1, 1), past_key_values=cache, spectral_budget=6)
    assert torch.equal(kept, before) and not torch.equal(cache.layers[0].tensors["features"], before)


def truncated(model):
    model.truncate(20)


def new_parameter(model):
    model.model.layers[1].ffn.up.weight = torch.nn.Parameter(2 * model.model.layers[1].ffn.up.weight.detach())


def new_module(model):
    model.model.layers[0].ffn.down = torch.nn.Linear(64, 16)


def new_dtype(model):
    model.double()


@pytest.mark.parametrize("change", [truncated, new_parameter, new_module, new_dtype])
def test_a_changed_model_decodes_eagerly_and_says_so(change, taken):
    model, ids = compiled_model([6], taken), random_ids(1, 6)
    torch.manual_seed(0)
    change(model)
    with captured_warnings() as messages:
        logits, _ = decode(model, ids, 6)
    assert taken == [] and any("compile_decoding" in message for message in messages)
    eager = random_model()
    torch.manual_seed(0)
    change(eager)
    assert_close(logits, decode(eager, ids, 6)[0])
    if change is truncated:
        compile_decoding(model, [6], backend="eager")
        taken.clear()
        assert_close(decode(model, ids, 6)[0], logits)
        assert len(taken) == 5


def test_new_values_in_the_same_weights_count(taken):
    model, eager, ids = compiled_model([6], taken), random_model(), random_ids(1, 6)
    with torch.no_grad():
        for changed in (model, eager):
            changed.model.layers[0].mixer.channel_mixing.mul_(-2.0)
    assert_close(decode(model, ids, 6)[0], decode(eager, ids, 6)[0])
    assert len(taken) == 5


def test_copies_start_uncompiled(taken):
    model = compiled_model([6], taken)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert_close(decode(other, random_ids(1, 5), 6)[0], decode(random_model(), random_ids(1, 5), 6)[0])
    assert taken == []


def test_checks_of_the_eager_step_hold():
    model = compiled_model([6])
    _, cache = decode(model, random_ids(1, 4), 6)
    with torch.no_grad():
        with pytest.raises(ValueError, match="input_ids must be in"):
            model(torch.tensor([[999]]), past_key_values=cache, spectral_budget=6)
        with pytest.raises(ValueError, match="spectral_budget must be an integer"):
            model(random_ids(1, 1), past_key_values=cache, spectral_budget=0)
        with pytest.raises(ValueError, match="holds 1 rows"):
            model(random_ids(2, 1), past_key_values=cache, spectral_budget=6)
        output = model(random_ids(1, 1), past_key_values=cache, spectral_budget=6)
        assert output.spectral_budget == (6, 6) and output.past_key_values is cache
        assert isinstance(model(random_ids(1, 1), past_key_values=cache, return_dict=False, spectral_budget=6), tuple)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"budgets": [33]}, "33"),
        ({"budgets": [torch.tensor([2, 3])], "batch_size": 2}, "one budget for all rows"),
        ({"batch_size": 0}, "batch_size must be an integer of at least 1, got 0"),
        ({"backend": "onnx"}, "backend must be one of"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        compile_decoding(random_model(), **{"backend": "eager", **arguments})
    with pytest.raises(ValueError, match="evaluation mode"):
        compile_decoding(random_model().train(), backend="eager")
    quantised = random_model()
    quantised.is_quantized = True
    with pytest.raises(ValueError, match="quantised weights are not compiled"):
        compile_decoding(quantised, backend="eager")


def test_without_a_compiler(monkeypatch):
    from torch._inductor import config
    from torch._inductor.utils import fresh_cache

    with config.patch({"cpp.cxx": ("no-such-compiler",)}), fresh_cache():
        monkeypatch.setenv("PATH", "")
        with pytest.raises(RuntimeError, match="needs a C"):
            compile_decoding(random_model(num_hidden_layers=1, hidden_size=24), [4])


# --- Steps that generate compiles by itself, with a static cache


def compile_config(backend="eager", **fields):
    config = CompileConfig(**{"fullgraph": True, "dynamic": False, "backend": backend, "mode": None, **fields})
    config._compile_all_devices = True  # else accelerators only
    return config


@pytest.mark.parametrize(
    ("start", "block"), [("ids", "paper"), ("ids", "gated"), ("padded", "gated"), ("embeddings", "paper")]
)
def test_generate_with_a_static_cache_is_one_graph(start, block):
    """What the library asks of a static cache: no graph break, and one graph for all steps of all calls of a shape."""
    torch._dynamo.reset()
    model, ids = random_model(**VARIANTS[block]), random_ids(2, 9)
    wanted = {"max_new_tokens": 5, "do_sample": False, "return_dict_in_generate": True, "output_scores": True}
    wanted |= {"output_hidden_states": True, "output_attentions": True, "spectral_budget": 5}
    calls = []
    for prompt in (ids, ids.flip(0)):
        mask = torch.ones_like(prompt)
        if start == "padded":
            mask[0, :4] = 0
        prompts = {"input_ids": prompt}
        if start == "embeddings":
            prompts["inputs_embeds"] = model.get_input_embeddings()(prompt).detach()
        calls.append(prompts | {"attention_mask": mask} | wanted)
    expected = [model.generate(**call) for call in calls]
    assert type(expected[0].past_key_values) is ESSMCache and not expected[0].past_key_values.is_compileable
    assert not hasattr(model, "_compiled_call")
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for call, eager in zip(calls, expected):
        actual = model.generate(**call, cache_implementation="static", compile_config=compile_config())
        cache = actual.past_key_values
        assert type(cache) is ESSMStaticCache and cache.is_compileable
        assert cache.get_seq_length() == eager.past_key_values.get_seq_length()
        assert torch.equal(actual.sequences, eager.sequences)
        for step, other in zip(actual.scores, eager.scores, strict=True):
            assert_close(step, other)
        assert [len(states) for states in actual.hidden_states] == [3] * 5  # embeddings and two layers a step
        for layer, other in zip(cache.layers, eager.past_key_values.layers):
            for name in other.tensors:
                assert_close(layer.tensors[name], other.tensors[name], atol=1e-4)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before + 1
    torch._dynamo.reset()


def test_a_static_cache_stays_where_it_is():
    """Compiled steps and CUDA graphs know their states by address."""
    model, ids = random_model(), random_ids(2, 12)
    cache, expected = ESSMStaticCache(model.config, state_budget=9), ESSMCache(model.config, state_budget=9)
    where = None
    with torch.no_grad():
        for a, b in ((0, 9), (9, 10), (10, 12)):
            model(ids[:, a:b], past_key_values=cache, spectral_budget=5)
            model(ids[:, a:b], past_key_values=expected, spectral_budget=5)
            held = cache.layers[1].tensors["features"]
            where = where or held.data_ptr()
            assert held.data_ptr() == where
            assert torch.equal(held, expected.layers[1].tensors["features"])
    cache.reorder_cache(torch.tensor([1, 1]))
    assert cache.layers[1].tensors["features"].data_ptr() == where
    assert torch.equal(held[0], held[1]) and cache.get_seq_length() == 12
    assert type(cache.select([0])) is ESSMCache and cache.select([0]).get_seq_length() == 12
    cache.reset()
    assert cache.get_seq_length() == 0 and cache.batch_size is None
    with torch.no_grad():  # another batch, after a reset
        logits = model(ids[:1], past_key_values=cache, spectral_budget=5).logits
        assert_close(logits, model(ids[:1], spectral_budget=5).logits)
