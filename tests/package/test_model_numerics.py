# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Heads and losses, gradients, precision, and the bound on outputs."""

import copy

import pytest
import torch
import torch.nn.functional as F
from helpers import (
    CAPACITY,
    VARIANTS,
    assert_close,
    pad,
    random_ids,
    random_model,
    randomise,
    tiny_config,
    variants,
)

from modeling_essm import ESSMForSequenceClassification, ESSMModel
from modeling_essm.spectral_basis import spectral_basis

# --- Heads


def test_loss_is_next_token_cross_entropy():
    model, ids = random_model(), random_ids(2, 20)
    labels = ids.clone()
    labels[0, :5] = -100
    outputs = model(ids, labels=labels)
    expected = F.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    assert_close(outputs.loss, expected, atol=1e-6)


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


def test_embeddings_instead_of_ids():
    model, ids = random_model(), random_ids(2, 20)
    with torch.no_grad():
        assert torch.equal(model(inputs_embeds=model.model.embed_tokens(ids)).logits, model(ids).logits)


@pytest.mark.parametrize("pooling", ["mean", "last"])
@pytest.mark.parametrize("features", [None, 5], ids=["ids", "features"])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("block", ["paper", "gated", "gated-diagonal"])
def test_classifier_ignores_padding(pooling, features, side, block):
    fields = VARIANTS[block] | {"classifier_pooling": pooling, "num_input_features": features, "num_labels": 3}
    model, ids = random_model(ESSMForSequenceClassification, **fields), random_ids(3, 20)
    lengths = [20, 11, 1]
    padded, mask = pad(ids, lengths, side)
    encode = torch.randn(259, 5, generator=torch.Generator().manual_seed(0))

    def run(x, **kwargs):
        return model(**({"input_ids": x} if features is None else {"input_features": encode[x]}), **kwargs).logits

    with torch.no_grad():
        logits = run(padded, attention_mask=mask, spectral_budget=9)
        assert logits.shape == (3, 3)
        for i, n in enumerate(lengths):
            assert_close(logits[i : i + 1], run(ids[i : i + 1, :n], spectral_budget=9))


def test_pooling_modes_are_the_mean_and_the_last_position():
    ids = random_ids(2, 20)
    for pooling, pool in [("mean", lambda h: h.mean(1)), ("last", lambda h: h[:, -1])]:
        model = random_model(ESSMForSequenceClassification, classifier_pooling=pooling)
        hidden = model.model(ids).last_hidden_state
        assert_close(model(ids).logits, model.score(pool(hidden)), atol=1e-6)


@pytest.mark.parametrize(
    "fields, labels, loss",
    [
        ({"num_labels": 3}, torch.tensor([2, 0]), F.cross_entropy),
        ({"num_labels": 1}, torch.tensor([0.5, -1.0]), lambda x, y: F.mse_loss(x[:, 0], y)),
        (
            {"num_labels": 3, "problem_type": "multi_label_classification"},
            torch.tensor([[1.0, 0.0, 1.0], [0.0, 0.0, 1.0]]),
            F.binary_cross_entropy_with_logits,
        ),
    ],
    ids=["classes", "regression", "multi-label"],
)
@pytest.mark.parametrize("block", ["paper", "gated"])
def test_classifier_losses(fields, labels, loss, block):
    model = random_model(ESSMForSequenceClassification, **VARIANTS[block], **fields)
    outputs = model(random_ids(2, 9), labels=labels)
    assert_close(outputs.loss, loss(outputs.logits, labels), atol=1e-6)
    outputs.loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


# --- Training


@variants
def test_every_parameter_gets_a_gradient(variant):
    model, ids = random_model(**variant).train(), random_ids(2, 20)
    model(ids, labels=ids).loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name
        assert (parameter.grad != 0).any(), name


@variants
@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
def test_gradient_checkpointing_changes_nothing(variant, reentrant):
    model, ids = random_model(**variant).train(), random_ids(2, 20)
    calls = []
    model.model.layers[0].mixer.register_forward_hook(lambda *_: calls.append(1))

    def gradients():
        model.zero_grad()
        calls.clear()
        model(ids, labels=ids, spectral_budget=7).loss.backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    plain = gradients()
    assert len(calls) == 1
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    checkpointed = gradients()
    assert len(calls) == 2  # it did recompute
    assert plain.keys() == checkpointed.keys()
    for name in plain:
        assert_close(checkpointed[name], plain[name], atol=1e-6)


def test_gradient_checkpointing_refuses_a_cache():
    model, ids = random_model().train(), random_ids(2, 20)
    cache = model(ids, use_cache=True).past_key_values
    model.gradient_checkpointing_enable()
    for kwargs in ({"use_cache": True}, {"past_key_values": cache}):
        with pytest.raises(ValueError, match="advance the cache twice: train with use_cache=False"):
            model(ids, labels=ids, **kwargs)
    model(ids, labels=ids).loss.backward()  # the default is legal
    model.eval()(ids, use_cache=True)  # and so is inference


def test_dropout_and_stochastic_depth_act_in_training_only():
    ids = random_ids(2, 20)
    for block in ({}, {"block": "gated", "intermediate_size": 16}):
        for name in ("dropout", "embedding_dropout", "activation_dropout", "stochastic_depth"):
            check_dropout(ids, block, name)


def check_dropout(ids, block, name):
    model = random_model(**block, **{name: 0.5})
    with torch.no_grad():
        expected = random_model(**block)(ids).logits
        assert torch.equal(model(ids).logits, expected)
        model.train()
        assert not torch.equal(model(ids).logits, model(ids).logits)


def test_dropout_is_where_its_name_says():
    """At a rate near 1 all of it is gone: the embedding, or what feed-forward layers add."""
    ids, almost = random_ids(2, 20), 1 - 1e-12
    with torch.no_grad():
        model = random_model(embedding_dropout=almost).train()
        assert torch.equal(model(ids, use_cache=False).logits, model(torch.zeros_like(ids), use_cache=False).logits)
        for block in ({}, {"block": "gated", "intermediate_size": 16}):
            model = random_model(**block, activation_dropout=almost).train()
            dropped = model(ids, use_cache=False).logits
            for layer in model.model.layers:
                layer.ffn.down.weight.zero_()
            assert_close(dropped, model.eval()(ids).logits)


def test_stochastic_depth_may_rise_over_the_blocks():
    for depth, expected in ((3, [0.0, 0.1, 0.2]), (1, [0.0])):
        model = random_model(num_hidden_layers=depth, stochastic_depth=0.2, stochastic_depth_ramp=True)
        assert [layer.stochastic_depth for layer in model.model.layers] == pytest.approx(expected)
    assert [layer.stochastic_depth for layer in random_model(stochastic_depth=0.2).model.layers] == [0.2, 0.2]


def test_the_gate_starts_at_its_bias_and_at_equal_weights():
    for block in ("paper", "gated"):
        mixer = ESSMModel(tiny_config(block=block, gate_bias=-2.0, scaling_exponent=0.0)).layers[0].mixer
        assert bool((mixer.gate_out.bias == -2.0).all())
        with torch.no_grad():
            mixer.gate_out.weight.zero_()
            u = torch.randn(1, 5, mixer.gate_in.in_features)
            assert_close(mixer.gates(u, 4), torch.full_like(mixer.gates(u, 4), 0.25))


# --- Precision


@pytest.mark.parametrize("K", [2, 16, 32], ids=lambda K: f"K{K}")
def test_bf16_follows_fp32(K):
    """bf16 keeps 8 bits: an error of a few times 2^-8 of the logits' size. States stay in fp32."""
    model, ids = random_model(), random_ids(2, 100)
    half = copy.deepcopy(model).to(torch.bfloat16)
    with torch.no_grad():
        expected = model(ids, spectral_budget=K).logits
        outputs = half(ids, spectral_budget=K, use_cache=True)
        assert outputs.logits.dtype == torch.bfloat16
        assert (outputs.logits.float() - expected).norm() / expected.norm() < 0.03
        # decoding goes on from the same state
        more = half(ids[:, :1], past_key_values=outputs.past_key_values, spectral_budget=K).logits.float()
        longer = model(torch.cat([ids, ids[:, :1]], 1), spectral_budget=K).logits[:, -1:]
        assert (more - longer).norm() / longer.norm() < 0.03
    for layer in outputs.past_key_values.layers:
        assert layer.tensors["features"].dtype == torch.float32


def test_fp64_is_the_limit_of_fp32():
    model, ids = random_model(), random_ids(2, 100)
    with torch.no_grad():
        exact = copy.deepcopy(model).double()(ids).logits
        assert exact.dtype == torch.float64
        assert_close(model(ids).logits.double(), exact)


def test_autocast_trains():
    model, ids = random_model().train(), random_ids(2, 40)
    expected = model(ids, labels=ids).loss
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(ids, labels=ids).loss
    loss.backward()
    assert abs(loss - expected) < 0.02 * expected  # bf16 rounding
    assert all(p.grad.dtype == torch.float32 and p.grad.isfinite().all() for p in model.parameters())


# --- Stability: Appendix C


def _mixer(**sizes):
    """A mixer of a model: one built by itself has memory for weights, not yet weights."""
    return randomise(ESSMModel(tiny_config(**sizes)).layers[0].mixer, seed=3)


def _bound(mixer, K, alpha=None):
    """||D|| + sum_k alpha_k sigma_k^{1/4} ||M_k|| ||phi_k||_1; without alpha its largest value over the simplex."""
    basis = spectral_basis(512)
    phi_1 = torch.from_numpy(abs(basis.filters(K)).sum(0))
    gain = torch.from_numpy(basis.sigma[:K] ** 0.25) * torch.linalg.matrix_norm(mixer.channel_mixing[:K].double(), 2)
    gain = gain * phi_1
    skip = torch.linalg.matrix_norm(mixer.skip.weight.double(), 2)
    return skip + (gain.max() if alpha is None else (alpha.double() * gain).sum())


def _matched_inputs(mixer, K, L=512):
    """(2K, L, D): for every k <= K, unit inputs that drive channel k hardest at the last step, in two directions."""
    phi = torch.from_numpy(spectral_basis(512).filters(K)[:L]).float()
    signs = torch.where(phi.flip(0) >= 0, 1.0, -1.0).T  # (K, L)
    top = torch.linalg.svd(mixer.channel_mixing[:K])[0][:, :, 0]  # y = f M: the left singular vector
    drive = signs[..., None] * top[:, None]
    return torch.cat([drive, -drive])


@torch.no_grad()
def test_outputs_stay_within_the_bound_at_every_budget():
    """|u(t)|_2 <= U implies |y(t)|_2 <= bound U, at every K, for random, constant and adversarial inputs."""
    mixer = _mixer()
    noise = torch.randn(4, 512, 16, generator=torch.Generator().manual_seed(1))
    constant = noise[:, :1].expand(-1, 512, -1)
    for K in range(1, CAPACITY + 1):
        u = F.normalize(torch.cat([noise, constant, _matched_inputs(mixer, K)]), dim=-1)
        for U in (0.5, 4.0):
            y = mixer(U * u, K)
            alpha = mixer.gates(U * u, K) / mixer.operator.sigma(K, 0.25, u)
            torch.testing.assert_close(alpha.sum(-1), torch.ones(alpha.shape[:2]))
            measured = y.double().norm(dim=-1).max() / U
            assert measured <= _bound(mixer, K, alpha.amax((0, 1))) * (1 + 1e-5), K  # fp32 rounding
            assert measured <= _bound(mixer, K) * (1 + 1e-5), K


@torch.no_grad()
@pytest.mark.parametrize("gating, floor", [("softmax", 0.75), ("none", 0.45)])
def test_the_bound_is_not_vacuous(gating, floor):
    """With one strong channel, an aligned skip term and matched inputs, the output comes near the bound.

    softmax: the gate can put between 0.88 (K=2) and 0.9 (K=32) of its weight on one channel, and all of it at K=1.
    none: alpha is 1 for every channel, so the bound is the sum, of which the strong channel is a part.
    """
    ratios = []
    for K in range(1, CAPACITY + 1):
        mixer = _mixer(gating=gating)
        mixer.channel_mixing[K - 1] *= 20.0
        mixer.skip.weight.copy_(0.5 * mixer.channel_mixing[K - 1].T)
        if gating == "softmax":
            mixer.gate_out.weight.zero_()
            mixer.gate_out.bias.fill_(-1.0 if K == 2 else 0.0)
            mixer.gate_out.bias[K - 1] = 1.0
        measured = mixer(_matched_inputs(mixer, K), K).double().norm(dim=-1).max()
        bound = _bound(mixer, K, None if gating == "softmax" else torch.ones(K))
        ratios.append(float(measured / bound))
    print("measured / bound for K = 1..32:", [round(ratio, 2) for ratio in ratios])
    assert floor < min(ratios) and max(ratios) <= 1 + 1e-5
