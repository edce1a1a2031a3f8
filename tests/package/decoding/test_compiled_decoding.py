# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Compiled steps: the logits, states and tokens of eager steps, wherever they are taken, and never after a change."""

import copy
import itertools
import pickle
import shutil

import pytest
import torch
from helpers import ROOT, VARIANTS, assert_close, captured_warnings, filled, random_ids, random_model
from torch._inductor import config as inductor_config
from torch._inductor.utils import fresh_cache
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


@pytest.fixture
def graphs():
    """A function that counts the graphs compiled since the test began."""
    torch._dynamo.reset()
    stats = torch._dynamo.utils.counters["stats"]
    before = stats["unique_graphs"]
    yield lambda: stats["unique_graphs"] - before
    torch._dynamo.reset()


def compiled_model(budgets, taken, batch_size=1, state_budget=None, **fields):
    model = compile_decoding(random_model(**fields), budgets, batch_size, state_budget, backend="eager")
    taken.clear()
    return model


@torch.no_grad()
def decode(model, ids, budget, cache=None):
    """Logits of every position after the first, one call each, and the cache."""
    cache = filled(model, ids[:, :1], budget, cache)
    steps = [model(ids[:, [t]], past_key_values=cache, spectral_budget=budget) for t in range(1, ids.shape[1])]
    return torch.cat([step.logits for step in steps], 1), cache


ONE = {"num_hidden_layers": 1}


@pytest.mark.parametrize(("variant", "budget"), [({}, [3, 17]), (VARIANTS["memory"], 5)], ids=["paper", "memory"])
def test_steps_equal_eager_ones(variant, budget, taken):
    model, ids = compiled_model([budget], taken, batch_size=2, state_budget=20, **variant), random_ids(2, 9)
    (logits, cache), (expected, other) = (
        decode(each, ids, budget, ESSMCache(model.config, state_budget=20)) for each in (model, random_model(**variant))
    )
    assert taken == [model.config.resolve_budget(budget).layers] * 8
    assert_close(logits, expected)
    assert cache.get_seq_length() == other.get_seq_length() == 9 and cache.states.keys() == other.states.keys()
    kept = cache.states
    for name, tensor in other.states.items():
        assert_close(kept[name], tensor)
    before = {name: tensor.clone() for name, tensor in kept.items()}
    with torch.no_grad():
        model(ids[:, :1], past_key_values=cache, spectral_budget=budget)
    for name, tensor in cache.states.items():  # states are not written into
        assert torch.equal(kept[name], before[name]) and not torch.equal(tensor, before[name])


@pytest.mark.parametrize("block", ["paper", "elastic"])
def test_one_graph_serves_all_prompts_and_modes(block, taken, graphs):
    """A single row keeps the strides of what it was cut from; tensors of inference mode have other dispatch keys."""
    model = compiled_model([5], taken, state_budget=5, **VARIANTS[block] | ONE)
    modes, steps = (torch.no_grad, torch.inference_mode), 0
    for length, reading, decoding in itertools.product((1, 2, 8, 9, 17), modes, modes):
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
            expected = random_model(**VARIANTS[block] | ONE)(ids, spectral_budget=5).logits[:, -2:]
            assert_close(torch.cat(logits, 1), expected)
    assert len(taken) == steps and graphs() == 1


def test_states_laid_out_otherwise_are_not_compiled_for(taken):
    model = compiled_model([5], taken, **ONE)
    _, cache = decode(model, random_ids(1, 4), 5)
    taken.clear()
    for layer in cache.layers:
        layer.apply(lambda t: t.mT.contiguous().mT)
    with torch.no_grad():
        for _ in range(3):
            model(random_ids(1, 1), past_key_values=cache, spectral_budget=5)
    assert len(taken) == 2  # the first runs eagerly, and leaves states as they should lie


def test_other_dtypes_are_not_compiled_for(taken):
    """Of the states, as a cache on disk may have been cast, or of products under autocast."""
    model = compiled_model([5], taken, **ONE)
    _, cache = decode(model, random_ids(1, 4), 5)
    taken.clear()
    with torch.no_grad():
        with torch.autocast("cpu", torch.bfloat16):
            model(random_ids(1, 1), past_key_values=cache, spectral_budget=5)
        for layer in cache.layers:
            layer.apply(torch.Tensor.double)
        model(random_ids(1, 1), past_key_values=cache, spectral_budget=5)
    assert not taken


def off_by_a_little(logits, states):
    return logits + 1e-3 * logits.norm() * torch.nn.functional.normalize(torch.ones_like(logits), dim=-1), states


MISTAKES = {
    "a little": (torch.float32, off_by_a_little),
    "one state": (torch.float32, lambda x, states: (x, states | {"1.convolution": states["1.convolution"].flip(1)})),
    "not finite": (torch.float32, lambda logits, states: (logits * float("nan"), states)),
    "in bf16": (torch.bfloat16, lambda logits, states: (1.15 * logits, states)),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_wrong_step_is_refused(name, monkeypatch):
    dtype, mistake = MISTAKES[name]

    def wrong(model, layers, ids, states):
        return mistake(*model.step(ids, layers, states))

    monkeypatch.setattr(compiled_steps, "_compile", lambda *_: wrong)
    model = random_model(**VARIANTS["memory"]).to(dtype)
    with pytest.raises(RuntimeError, match="the compiled step is wrong: its"):
        compile_decoding(model, [5])
    assert not model.decoding_steps


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_step_that_rounds_in_another_order_is_right(dtype, monkeypatch):
    def rounded_at_its_end(model, layers, ids, states):
        states = {name: tensor.float() for name, tensor in states.items()}
        logits, after = copy.deepcopy(model).float().step(ids, layers, states)
        return logits.to(dtype), {name: tensor.to(states[name].dtype) for name, tensor in after.items()}

    monkeypatch.setattr(compiled_steps, "_compile", lambda *_: rounded_at_its_end)
    model = random_model(**VARIANTS["elastic"], num_hidden_layers=8).to(dtype)
    assert compile_decoding(model, [2]).decoding_steps


@pytest.mark.slow
@pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="needs a C++ compiler")
def test_inductor(taken):
    """Ahead, and by `generate` with a static cache; a layer of a released size in bf16."""
    model, settings = random_model(**ONE), {"max_new_tokens": 5, "do_sample": False, "spectral_budget": 5}
    expected = model.generate(random_ids(2, 9), **settings)
    config = compile_config("inductor", mode="default")
    settings |= {"cache_implementation": "static", "compile_config": config}
    assert torch.equal(model.generate(random_ids(2, 9), **settings), expected)
    compile_decoding(model, [4])
    taken.clear()
    logits, _ = decode(model, random_ids(1, 6), 4)
    assert_close(logits, decode(random_model(**ONE), random_ids(1, 6), 4)[0])
    assert taken == [(4,)] * 5
    config = ESSMConfig.from_pretrained(ROOT / "hub_configs" / "essm-elastic-6m", **ONE)
    large = ESSMForCausalLM(config).eval().bfloat16()
    assert compile_decoding(large, [2]).decoding_steps
    torch._dynamo.reset()


WAYS = [{"do_sample": False}, {"do_sample": True}, {"custom_generate": speculate(2)}]


@pytest.mark.parametrize(("rows", "ways"), [(1, WAYS), (3, [{"num_beams": 3}])], ids=["one", "beams"])
def test_generate(rows, ways, taken):
    model, eager = compiled_model([2, 6], taken, batch_size=rows, **ONE), random_model(**ONE)
    for way in ways:
        taken.clear()
        tokens = []
        for each in (model, eager):
            torch.manual_seed(0)
            tokens.append(each.generate(random_ids(1, 7), max_new_tokens=12, spectral_budget=6, **way))
        assert set(taken) == ({(2,)} if "custom_generate" in way else {(6,)}) and len(taken) >= 5
        assert torch.equal(*tokens)


def test_what_was_not_compiled_runs_eagerly(taken):
    model, eager, ids = compiled_model([6], taken), random_model(), random_ids(2, 8)
    for budget, rows in ((5, 1), (6, 2), ([6, 5], 1), (torch.tensor([6, 2]), 2)):
        assert_close(decode(model, ids[:rows], budget)[0], decode(eager, ids[:rows], budget)[0])
    with captured_warnings() as messages:
        decode(model, ids[:1], 6, ESSMCache(model.config, state_budget=32))  # a larger state than was compiled
    assert taken == [] and len(messages) == 1 and "state_budget=that budget" in messages[0]
    with captured_warnings() as messages:
        compile_decoding(model, [6], state_budget=32, backend="eager")
    assert not messages
    _, cache = decode(model, ids[:1], 6)
    taken.clear()
    mask = torch.ones(1, 1, dtype=torch.long)
    with torch.no_grad():
        model(ids[:1, :2], past_key_values=cache, spectral_budget=6)
        for given in ({"attention_mask": mask}, {"labels": ids[:1, :1]}, {"output_hidden_states": True}):
            model(ids[:1, :1], past_key_values=cache, spectral_budget=6, **given)
        model(ids[:1, :1], spectral_budget=6)
        assert model(ids[:1, :1], past_key_values=cache, spectral_budget=6, use_cache=False).past_key_values is None
    model(ids[:1, :1], past_key_values=cache, spectral_budget=6).logits.sum().backward()
    assert taken == [] and model.model.layers[0].mixer.channel_mixing.grad.abs().sum() > 0


def truncated(model):
    model.truncate(20)


def new_parameter(model):
    model.model.layers[0].ffn.up.weight = torch.nn.Parameter(2 * model.model.layers[0].ffn.up.weight.detach())


def new_module(model):
    model.model.layers[0].ffn.down = torch.nn.Linear(64, 16)


def new_dtype(model):
    model.double()


def new_hook(model):
    model.model.layers[0].register_forward_hook(lambda module, args, output: 2 * output)


def new_forward(model):
    forward = model.model.norm.forward
    model.model.norm.forward = lambda x: -forward(x)


def new_values(model):
    model.model.layers[0].mixer.channel_mixing.data.mul_(-2.0)


@pytest.mark.parametrize("change", [truncated, new_parameter, new_module, new_dtype, new_hook, new_forward, new_values])
def test_a_changed_model_decodes_eagerly_and_says_so(change, taken):
    """New values in the same weights are no such change."""
    model, eager, ids = compiled_model([6], taken, **ONE), random_model(**ONE), random_ids(1, 6)
    for each in (model, eager):
        torch.manual_seed(0)
        change(each)
    expected = decode(eager, ids, 6)[0]
    with captured_warnings() as messages:
        assert_close(decode(model, ids, 6)[0], expected)
    told = any("compile_decoding" in message for message in messages)
    assert (len(taken), told) == ((5, False) if change is new_values else (0, True))
    if change is truncated:
        for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):  # start uncompiled
            assert not copied.decoding_steps
        compile_decoding(model, [6], backend="eager")
        taken.clear()
        assert_close(decode(model, ids, 6)[0], expected)
        assert len(taken) == 5


@torch.no_grad()
def test_checks_of_the_eager_step_hold(taken):
    model = compiled_model([6], taken)
    _, cache = decode(model, random_ids(1, 4), 6)
    for ids, budget, message in (
        (torch.tensor([[999]]), 6, "input_ids must be in"),
        (random_ids(1, 1), 0, "spectral_budget must be an integer"),
        (random_ids(2, 1), 6, "holds 1 rows"),
    ):
        with pytest.raises(ValueError, match=message):
            model(ids, past_key_values=cache, spectral_budget=budget)
    output = model(random_ids(1, 1), past_key_values=cache, spectral_budget=6)
    assert output.spectral_budget == (6, 6) and output.past_key_values is cache
    assert isinstance(model(random_ids(1, 1), past_key_values=cache, return_dict=False, spectral_budget=6), tuple)
    model.config.output_hidden_states = True
    assert len(model(random_ids(1, 1), past_key_values=cache, spectral_budget=6).hidden_states) == 3
    model = compiled_model([8], taken, batch_size=2)
    merged = ESSMCache.merge([decode(model, random_ids(1, 3), K)[1] for K in (4, 8)])
    with pytest.raises(ValueError, match="row 0 of layer 0"):
        model(random_ids(2, 1), past_key_values=merged, spectral_budget=8)


@pytest.mark.parametrize(
    ("attributes", "arguments", "message"),
    [
        ({}, {"budgets": [33]}, "33"),
        ({}, {"budgets": "small"}, "budgets must be a list of budgets, got 'small'"),
        ({}, {"budgets": None}, "budgets must be a list of budgets, got None"),
        ({}, {"budgets": [torch.tensor([2, 3])], "batch_size": 2}, "one budget for all rows"),
        ({}, {"batch_size": 0}, "batch_size must be an integer of at least 1, got 0"),
        ({}, {"backend": "onnx"}, "backend must be one of"),
        ({"training": True}, {}, "evaluation mode"),
        ({"is_quantized": True}, {}, "quantised weights are not compiled"),
    ],
)
def test_bad_arguments(attributes, arguments, message):
    model = random_model()
    vars(model).update(attributes)
    with pytest.raises(ValueError, match=message):
        compile_decoding(model, **{"backend": "eager", **arguments})


def test_an_error_leaves_the_steps_that_were_compiled(taken):
    model = compiled_model([6], taken)
    with pytest.raises(ValueError, match="99"):
        compile_decoding(model, [6], state_budget=99, backend="eager")
    decode(model, random_ids(1, 8), 6)
    assert taken


def test_without_a_compiler(monkeypatch):
    monkeypatch.setenv("PATH", "")
    no_compiler, refused = {"cpp.cxx": ("no-such-compiler",)}, pytest.raises(RuntimeError, match="needs a C")
    with inductor_config.patch(no_compiler), fresh_cache(), refused:
        compile_decoding(random_model(num_hidden_layers=1, hidden_size=24), [4])


# --- Steps that generate compiles by itself, with a static cache


def compile_config(backend="eager", **fields):
    config = CompileConfig(**{"fullgraph": True, "dynamic": False, "backend": backend, "mode": None, **fields})
    config._compile_all_devices = True  # else accelerators only
    return config


@pytest.mark.parametrize(("start", "block"), [("ids", "elastic"), ("padded", "memory"), ("embeddings", "paper")])
def test_generate_with_a_static_cache_is_one_graph(start, block, graphs):
    """What the library asks of a static cache: no graph break, and one graph for all steps of all calls of a shape."""
    model, ids, calls = random_model(**VARIANTS[block]), random_ids(2, 9), []
    wanted = {"max_new_tokens": 5, "do_sample": False, "return_dict_in_generate": True, "output_scores": True}
    wanted |= {"output_hidden_states": True, "output_attentions": True, "spectral_budget": 5}
    for prompt in (ids, ids.flip(0)):
        call = {"input_ids": prompt, "attention_mask": torch.ones_like(prompt), **wanted}
        if start == "padded":
            call["attention_mask"][0, :4] = 0
        if start == "embeddings":
            call["inputs_embeds"] = model.get_input_embeddings()(prompt).detach()
        calls.append(call)
    expected = [model.generate(**call) for call in calls]
    assert type(expected[0].past_key_values) is ESSMCache and not hasattr(model, "_compiled_call")
    for call, eager in zip(calls, expected):
        actual = model.generate(**call, cache_implementation="static", compile_config=compile_config())
        cache, other = actual.past_key_values, eager.past_key_values
        assert type(cache) is ESSMStaticCache and cache.get_seq_length() == other.get_seq_length()
        assert torch.equal(actual.sequences, eager.sequences)
        for step, score in zip(actual.scores, eager.scores, strict=True):
            assert_close(step, score)
        assert [len(states) for states in actual.hidden_states] == [3] * 5  # embeddings and two layers a step
        for name, tensor in other.states.items():
            assert_close(cache.states[name], tensor, atol=1e-4)
    assert graphs() == 1


@torch.no_grad()
def test_a_static_cache_stays_where_it_is():
    """Compiled steps and CUDA graphs know their states by address."""
    model, ids, places = random_model(), random_ids(2, 12), set()
    cache, expected = ESSMStaticCache(model.config, state_budget=9), ESSMCache(model.config, state_budget=9)
    for a, b in ((0, 9), (9, 10), (10, 12)):
        for each in (cache, expected):
            filled(model, ids[:, a:b], 5, each)
        held = cache.layers[1].tensors["features"]
        places.add(held.data_ptr())
        assert torch.equal(held, expected.layers[1].tensors["features"])
    cache.reorder_cache(torch.tensor([1, 1]))
    assert {cache.layers[1].tensors["features"].data_ptr()} == places
    assert torch.equal(held[0], held[1]) and cache.get_seq_length() == 12
    assert type(cache.select([0])) is ESSMCache and cache.select([0]).get_seq_length() == 12
    cache.reset()
    assert cache.get_seq_length() == 0 and cache.batch_size is None
    # another batch, after a reset
    logits = model(ids[:1], past_key_values=cache, spectral_budget=5).logits
    assert_close(logits, model(ids[:1], spectral_budget=5).logits)
