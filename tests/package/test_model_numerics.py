# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Heads and losses, gradients, dropout, precision, and the bound on outputs."""

import copy

import pytest
import torch
import torch.nn.functional as F
from helpers import (
    HYBRID,
    VARIANTS,
    WITH_GATES,
    all_variants,
    assert_close,
    blocks,
    captured_warnings,
    pad,
    random_ids,
    random_model,
    tiny_config,
    variants,
)
from torch.func import functional_call, grad, vmap

from modeling_essm import ESSMForCausalLM, ESSMForSequenceClassification
from modeling_essm.packing import pool

# --- Heads


def test_logits_to_keep_hidden_states_and_tuples():
    model, ids = random_model(), random_ids(2, 20)
    with torch.no_grad():
        full = model(ids, output_hidden_states=True, use_cache=False)
        assert_close(model(ids, logits_to_keep=3).logits, full.logits[:, -3:], atol=1e-6)
        assert_close(model(ids, logits_to_keep=torch.tensor([0, 7])).logits, full.logits[:, [0, 7]], atol=1e-6)
        as_tuple = model(ids, return_dict=False, use_cache=False)
    assert isinstance(as_tuple, tuple) and torch.equal(as_tuple[0], full.logits)
    assert len(full.hidden_states) == 3 and full.past_key_values is None
    assert_close(model.lm_head(full.hidden_states[-1]), full.logits, atol=1e-6)
    assert torch.equal(full.hidden_states[0], model.model.embed_tokens(ids))


@torch.no_grad()
@pytest.mark.parametrize("fields", [{}, HYBRID, HYBRID | VARIANTS["elastic"]], ids=["paper", "hybrid", "elastic"])
def test_layers_are_pre_norm_residual_blocks(fields):
    """x + mixer(norm(x)), then x + ffn(norm(x)), each read from what the layer before left."""
    model, read = random_model(**fields), {}
    for module in model.model.layers.modules():
        module.register_forward_hook(lambda module, args, y: read.update({module: (args[0], y)}))
    states = model(random_ids(2, 20), output_hidden_states=True, use_cache=False).hidden_states
    for layer, x in zip(model.model.layers, states):
        branches = [(layer.input_norm, layer.mixer if hasattr(layer, "mixer") else layer.self_attn)]
        for norm, branch in [*branches, (layer.ffn_norm, layer.ffn)]:
            assert_close(read[norm][0], x, atol=0)
            assert_close(read[branch][0], norm(x), atol=1e-6)
            x = x + read[branch][1]
        assert_close(read[layer][1], x, atol=1e-6)


POOLS = {"mean": lambda h: h.mean(1), "last": lambda h: h[:, -1]}


@torch.no_grad()
@pytest.mark.parametrize("pooling", POOLS)
@pytest.mark.parametrize("features", [None, 5], ids=["ids", "features"])
def test_a_classifier_pools_real_positions(pooling, features):
    fields = {"classifier_pooling": pooling, "num_input_features": features, "num_labels": 3}
    model, ids, lengths = random_model(ESSMForSequenceClassification, **fields), random_ids(3, 20), [20, 11, 1]
    encode = torch.randn(259, 5, generator=torch.Generator().manual_seed(0))

    def inputs(x):
        return {"input_ids": x} if features is None else {"input_features": encode[x]}

    for side in ("left", "right"):
        padded, mask = pad(ids, lengths, side)
        logits = model(**inputs(padded), attention_mask=mask, spectral_budget=9).logits
        for i, n in enumerate(lengths):
            alone = model.model(**inputs(ids[i : i + 1, :n]), spectral_budget=9).last_hidden_state
            assert_close(logits[i : i + 1], model.score(POOLS[pooling](alone)))


@pytest.mark.parametrize("length", [16_384, 70_000])
def test_long_rows_are_pooled_in_fp32(length):
    states = torch.full((1, length, 1), 60.0, dtype=torch.float16)
    assert pool(states, torch.ones(1, length), "mean").item() == 60.0


def test_a_classifiers_loss_is_that_of_its_problem():
    model = random_model(ESSMForSequenceClassification, num_labels=3, problem_type="multi_label_classification")
    labels = torch.tensor([[1.0, 0.0, 1.0], [0.0, 0.0, 1.0]])
    outputs = model(random_ids(2, 9), labels=labels)
    assert_close(outputs.loss, F.binary_cross_entropy_with_logits(outputs.logits, labels), atol=1e-6)
    outputs.loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


class Reviewer(ESSMForSequenceClassification):
    """Its name says nothing of its loss, by which the library would choose one."""


def test_the_loss_of_a_derived_class_is_that_of_its_base():
    derived, base = (random_model(cls, num_labels=3) for cls in (Reviewer, ESSMForSequenceClassification))
    ids, labels = random_ids(2, 9), torch.tensor([0, 2])
    assert derived(ids, labels=labels).loss == base(ids, labels=labels).loss


# --- Training


@variants
def test_every_parameter_gets_a_gradient(variant):
    model, ids = random_model(**variant).train(), random_ids(2, 20)
    model(ids, labels=ids).loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name
        assert (parameter.grad != 0).any(), name


MASK = torch.ones(3, 20, dtype=torch.int64)
MASK[0, :3] = MASK[1, 15:] = MASK[2, 5:7] = 0
SAMPLES = {
    "short": (ESSMForCausalLM, {}, {"input_ids": random_ids(3, 5), "labels": random_ids(3, 5)}),
    "long": (ESSMForCausalLM, {}, {"input_ids": random_ids(3, 20), "labels": random_ids(3, 20)}),
    "classes": (
        ESSMForSequenceClassification,
        {"num_labels": 3},
        {"input_ids": random_ids(3, 20), "attention_mask": MASK, "labels": torch.arange(3)},
    ),
    "features": (
        ESSMForSequenceClassification,
        {"num_labels": 3, "num_input_features": 2},
        {
            "input_features": torch.randn(3, 5, 2).masked_fill(MASK[:, :5, None] == 0, torch.nan),
            "attention_mask": MASK[:, :5],
            "labels": torch.arange(3),
        },
    ),
}


@pytest.mark.parametrize("kind", SAMPLES)
@all_variants
def test_gradients_of_single_samples(variant, kind):
    """Shorter and longer than a chunk, 8, with masks, NaN behind them, and without: as by `backward`, row by row."""
    cls, fields, batch = SAMPLES[kind]
    model = random_model(cls, **variant | fields)
    weights = {name: p.detach() for name, p in model.named_parameters()}

    def loss(weights, row):
        return functional_call(model, weights, (), {name: value[None] for name, value in row.items()}).loss

    together = vmap(grad(loss), (None, 0))(weights, batch)
    for i in range(3):
        model.zero_grad()
        model(**{name: value[i : i + 1] for name, value in batch.items()}).loss.backward()
        for name, p in model.named_parameters():
            assert_close(together[name][i], torch.zeros_like(p) if p.grad is None else p.grad)


@pytest.mark.parametrize(
    ("variant", "reentrant"),
    [(VARIANTS["paper"], True), *((variant, False) for variant in WITH_GATES.values())],
    ids=["paper-reentrant", *WITH_GATES],
)
def test_gradient_checkpointing_changes_nothing(variant, reentrant):
    model, ids = random_model(**variant).train(), random_ids(2, 20)
    calls, gradients = [], []
    model.model.layers[0].mixer.register_forward_pre_hook(lambda *_: calls.append(1))
    for expected in (1, 2):  # the second time it recomputes
        model.zero_grad()
        calls.clear()
        model(ids, labels=ids, spectral_budget=7).loss.backward()
        assert len(calls) == expected
        gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    for plain, checkpointed in zip(*gradients, strict=True):
        assert_close(checkpointed, plain, atol=1e-6)


def test_gradient_checkpointing_refuses_a_cache():
    model, ids = random_model().train(), random_ids(2, 20)
    cache = model(ids, use_cache=True).past_key_values
    model.gradient_checkpointing_enable()
    for kwargs in ({"use_cache": True}, {"past_key_values": cache}):
        with pytest.raises(ValueError, match="advance the cache twice: train with use_cache=False"):
            model(ids, labels=ids, **kwargs)
    model(ids, labels=ids).loss.backward()  # the default is legal
    model.eval()(ids, use_cache=True)  # and so is inference


DROPOUTS = [(VARIANTS[b], f"{name}dropout") for b in ("paper", "elastic") for name in ("", "embedding_", "activation_")]
DROPOUTS += [
    (VARIANTS["paper"], "stochastic_depth"),
    (VARIANTS["elastic"], "stochastic_depth"),
    (HYBRID, "attention_dropout"),
]


@torch.no_grad()
@pytest.mark.parametrize(("block", "name"), DROPOUTS)
def test_dropout_and_stochastic_depth_act_in_training_only(name, block):
    model, ids = random_model(**block, **{name: 0.5}), random_ids(2, 20)
    assert torch.equal(model(ids).logits, random_model(**block)(ids).logits)
    assert not torch.equal(model.train()(ids).logits, model(ids).logits)


@torch.no_grad()
@pytest.mark.parametrize("block", [VARIANTS["paper"], VARIANTS["elastic"]], ids=["paper", "elastic"])
def test_dropout_is_where_its_name_says(block):
    """At a rate near 1 all of it is gone: the embedding, or what feed-forward layers add."""
    ids, almost = random_ids(2, 20), 1 - 1e-12
    model = random_model(**block, embedding_dropout=almost).train()
    assert torch.equal(model(ids, use_cache=False).logits, model(torch.zeros_like(ids), use_cache=False).logits)
    model = random_model(**block, activation_dropout=almost).train()
    dropped = model(ids, use_cache=False).logits
    for layer in model.model.layers:
        layer.ffn.down.weight.zero_()
    assert_close(dropped, model.eval()(ids).logits)


def test_stochastic_depth_leaves_out_samples_and_raises_the_others():
    layer = random_model(stochastic_depth=0.75).train().model.layers[0]
    added = layer.add(torch.zeros(64, 3, 2), torch.ones(64, 3, 2))
    assert added.unique().tolist() == [0, 4] and (added == added[:, :1, :1]).all()


def test_stochastic_depth_may_rise_over_the_blocks():
    for fields, expected in (
        ({"num_hidden_layers": 3, "stochastic_depth_ramp": True}, [0.0, 0.1, 0.2]),
        ({"num_hidden_layers": 1, "stochastic_depth_ramp": True}, [0.0]),
        ({}, [0.2, 0.2]),
    ):
        layers = random_model(stochastic_depth=0.2, **fields).model.layers
        assert [layer.stochastic_depth for layer in layers] == pytest.approx(expected)


# --- Precision


@pytest.mark.parametrize("autocast", [False, True], ids=["weights", "autocast"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@blocks
def test_16_bits_follow_fp32(block, dtype, autocast):
    """bf16 keeps 8 bits: an error of a few times 2^-8 of the logits' size, fp16 keeps 11. States stay in fp32."""
    model, ids = random_model(**block), random_ids(2, 101)
    half = model if autocast else copy.deepcopy(model).to(dtype)
    with torch.no_grad():
        expected = model(ids).logits
        with torch.autocast("cpu", dtype, enabled=autocast):
            outputs = half(ids[:, :100], use_cache=True)
            more = half(ids[:, 100:], past_key_values=outputs.past_key_values).logits
    assert outputs.logits.dtype == dtype
    for actual, exact in ((outputs.logits, expected[:, :100]), (more, expected[:, 100:])):
        assert (actual.float() - exact).norm() / exact.norm() < 8 * torch.finfo(dtype).eps
    kinds = {name.split(".")[1]: t.dtype for name, t in outputs.past_key_values.states.items()}
    assert all(found == torch.float32 for name, found in kinds.items() if name != "convolution")
    assert autocast or kinds.get("convolution", dtype) == dtype


def test_a_gate_in_bf16_is_computed_in_fp32():
    """Its scores are bf16; the alphas of 32 channels are then exact up to one rounding."""
    model, seen = random_model(scaling_exponent=0.0).to(torch.bfloat16), []
    mixer = model.model.layers[0].mixer
    mixer.gate_out.register_forward_hook(lambda module, args, output: seen.append(output.double()))
    with torch.no_grad():
        gates = mixer.gates(torch.randn(2, 9, 16, generator=torch.Generator().manual_seed(0)).bfloat16(), 32).double()
    (s,) = seen
    expected = (s * 32**0.5 / (s.norm(dim=-1, keepdim=True) + 1e-6)).softmax(-1)
    assert ((gates - expected).abs() / expected).max() < 1.01 * 2**-8


@blocks
def test_autocast_trains(block):
    model, ids = random_model(**block).train(), random_ids(2, 40)
    expected = model(ids, labels=ids).loss
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(ids, labels=ids).loss
    loss.backward()
    assert abs(loss - expected) < 0.02 * expected  # bf16 rounding
    assert all(p.grad.dtype == torch.float32 and p.grad.isfinite().all() for p in model.parameters())


def test_near_silence_does_not_shout_in_a_memory():
    """Keys of noise at 1e-7 would have unit length and gradients of 1e5, where silence has those of the rest."""
    fields = VARIANTS["memory"] | {"num_input_features": 3, "num_labels": 2}
    x, noise = (torch.randn(4, n, 3, generator=torch.Generator().manual_seed(n)) for n in (60, 30))
    norms = []
    for loudness in (0.0, 1e-7):
        x[:, 20:50] = loudness * noise
        torch.manual_seed(0)
        model = ESSMForSequenceClassification(tiny_config(**fields))
        model(input_features=x, labels=torch.tensor([0, 1, 0, 1])).loss.backward()
        norms.append(float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])))
    assert norms[1] < 3 * norms[0]


def test_training_weights_in_16_bits_warns_once():
    model = random_model()
    with captured_warnings() as messages:
        model.train().eval()
        assert not messages
        for _ in range(2):
            model.bfloat16().eval().train()
    (message,) = messages
    assert "dtype=torch.float32" in message
