# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""The readable Eq. (7-8) is what the models' blocks compute, at every budget, and what loops over every index give.

So are the memory's rule and the short convolution what their definitions give.
"""

import math

import pytest
import torch
import torch.nn.functional as F
from helpers import random_ids, random_model
from torch.utils.flop_counter import FlopCounterMode

from modeling_essm import ESSMCache, spectral_chunked
from modeling_essm.memory_essm import delta_rule
from modeling_essm.mixer_essm import LayerCall, short_convolution
from modeling_essm.reference import elastic_mixer, mix_channels, spectral_features, spectral_mixer
from modeling_essm.spectral_basis import spectral_basis

# In fp64 these differ by rounding, and the recurrence by the 4e-6 to which its states reproduce the filters.
TOLERANCE = {"fft": 1e-10, "naive": 1e-10, "chunked": 1e-5}


@torch.no_grad()
@pytest.mark.parametrize("algorithm", ["fft", "chunked"])
def test_the_mixer_of_a_model_is_eq_7_and_8(algorithm):
    model, seen = random_model(spectral_algorithm=algorithm).double(), []
    mixer = model.model.layers[1].mixer
    mixer.register_forward_hook(lambda module, args, output: seen.append((args[0], output)))
    gate = mixer.gate_in.weight, mixer.gate_in.bias, mixer.gate_out.weight, mixer.gate_out.bias
    for K in (1, 2, 7, 16, 31, 32):
        model(random_ids(2, 37), spectral_budget=K)
        u, y = seen.pop()
        expected = spectral_mixer(u, gate, mixer.channel_mixing, mixer.skip.weight, 512, K)
        error = (y - expected).norm() / expected.norm()
        assert error < TOLERANCE[algorithm], (K, float(error))


@torch.no_grad()
def test_without_a_gate_it_is_eq_6():
    mixer, basis = random_model(gating="none").double().model.layers[0].mixer, spectral_basis(512)
    u = torch.randn(2, 21, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for K in (1, 5, 32):
        phi, weights = torch.tensor(basis.filters(K)[:21]), torch.tensor(basis.sigma[:K]) ** 0.25
        spectral = mix_channels(spectral_features(u, phi), weights.expand(2, 21, K), mixer.channel_mixing)
        torch.testing.assert_close(mixer(u, LayerCall(K)), u @ mixer.skip.weight.T + spectral, rtol=1e-5, atol=1e-5)


def elastic_layer(layer, x, config, K):
    """x + mixer(norm(x)) and then, with a feed-forward layer, + sum_{j<=K} down_j (silu(a_j) b_j); and the states."""

    def norm(x, scale):
        return x / (x.square().mean(-1, keepdim=True) + config.layer_norm_eps).sqrt() * scale.weight

    y, states = elastic_mixer(norm(x, layer.input_norm), dict(layer.mixer.named_parameters()), config, K)
    x = x + y
    if f := config.intermediate_size // config.num_spectral_channels:
        ab = norm(x, layer.ffn_norm) @ layer.ffn.up.weight[: 2 * f * K].T
        a, b = ab.view(*x.shape[:2], K, 2, f).unbind(3)
        x = x + (a * a.sigmoid() * b).flatten(2) @ layer.ffn.down.weight[:, : f * K].T
    return x, states


MEMORY, FEED_FORWARD = {"memory_key_size": 3, "memory_value_size": 2}, {"intermediate_size": 15}
SHAPES = {  # odd sizes; chunks of filters have 8 steps, those of the memory 64
    "plain-1": (1, {"head_size": 1, "conv_kernel_size": 1}),
    "plain-21": (21, {"head_size": 3, "conv_kernel_size": 1}),
    "feed-forward-13": (13, {"head_size": 5, "conv_kernel_size": 4} | FEED_FORWARD),
    "memory-1": (1, {"head_size": 5, "conv_kernel_size": 2} | MEMORY),
    "memory-69": (69, {"head_size": 3, "conv_kernel_size": 1} | MEMORY),
    "all-9": (
        9,
        {"head_size": 7, "conv_kernel_size": 3, "hidden_act": "silu", "gating": "softmax"} | MEMORY | FEED_FORWARD,
    ),
}


@pytest.mark.parametrize("algorithm", ["naive", "chunked", "chunked by heads"])
@pytest.mark.parametrize("L, fields", SHAPES.values(), ids=SHAPES)
def test_the_elastic_block_is_what_it_says(L, fields, algorithm, monkeypatch):
    """Outputs, states, and gradients by the input and every weight, at every budget."""
    if algorithm == "chunked by heads":  # as nested ones are in long texts
        monkeypatch.setattr(spectral_chunked, "_GROUP_BYTES_CPU", 1)
        algorithm = "chunked"
    sizes = {"hidden_size": 9, "num_spectral_channels": 5, "gate_hidden_size": 10, "scaling_exponent": 0.25}
    model = random_model(block="elastic", **sizes, **fields, num_hidden_layers=1, spectral_algorithm=algorithm).double()
    layer, generator = model.model.layers[0], torch.Generator().manual_seed(L)
    x, weight = torch.randn(2, 2, L, 9, dtype=torch.float64, generator=generator).unbind()
    inputs = {"x": x.requires_grad_(), **dict(layer.named_parameters())}
    tolerance = max(TOLERANCE[algorithm], 1e-5 if "memory_key_size" in fields else 0)  # a memory is computed in fp32

    def compare(name, actual, expected, factor=1):
        assert actual.shape == expected.shape, name
        assert (actual - expected).norm() <= factor * tolerance * expected.norm().clamp(min=1), name

    for K in range(1, 6):
        cache = ESSMCache(model.config).layers[0]
        y, (expected, states) = layer(x, LayerCall(K), cache), elastic_layer(layer, x, model.config, K)
        compare("output", y, expected)
        assert cache.tensors.keys() == states.keys()
        for name, state in states.items():
            compare(name, cache.tensors[name][:, :K] if name == "features" else cache.tensors[name], state)
        gradients = (torch.autograd.grad((out * weight).sum(), inputs.values()) for out in (y, expected))
        for name, actual, expected in zip(inputs, *gradients):
            compare((K, name), actual, expected, factor=5)  # sums over positions cancel


@torch.no_grad()
def test_nested_heads_cost_less(monkeypatch):
    """A model whose heads mix the filters up to their own computes no others."""
    monkeypatch.setattr(spectral_chunked, "_GROUP_BYTES_CPU", 1)
    found = []
    for gating in ("nested", "softmax"):
        model = random_model(block="elastic", num_spectral_channels=4, gating=gating)
        with FlopCounterMode(display=False) as counted:
            model(random_ids(1, 100))
        found.append(counted.get_total_flops())
    assert found[0] < found[1]


def test_loops_over_every_index_give_the_same():
    """4 x 6 matrices, K = 3 of 4 channels, beyond the filters' length."""
    B, L, H, K, D, E = 2, 7, 5, 3, 4, 6
    generator = torch.Generator().manual_seed(6)

    def random(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    u, W1, b1, W2, b2 = gate = random(B, L, D), random(5, D), random(5), random(4, 5), random(4)
    M, skip = random(4, D, E), random(E, D)
    basis = spectral_basis(H)
    phi, sigma = basis.filters(K), basis.sigma
    expected = torch.zeros(B, L, E, dtype=torch.float64)
    for b in range(B):
        for t in range(L):
            expected[b, t] = skip @ u[b, t]
            a = W1 @ u[b, t] + b1
            hidden = a * (1 + torch.erf(a / math.sqrt(2))) / 2
            s = [float(W2[k] @ hidden + b2[k]) for k in range(K)]
            scale = math.sqrt(K) / (math.hypot(*s) + 1e-6)
            total = sum(math.exp(scale * s_k) for s_k in s)
            for k in range(K):
                feature = sum(phi[t - j, k] * u[b, j] for j in range(t + 1) if t - j < H)
                expected[b, t] += math.exp(scale * s[k]) / total * sigma[k] ** 0.25 * (feature @ M[k])
    y = spectral_mixer(u, gate[1:], M, skip, H, K)
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-13)
    single = spectral_mixer(u.float(), gate[1:], M, skip, H, K)
    torch.testing.assert_close(single, expected.float())  # of the dtype of u


def test_a_budget_that_the_weights_do_not_have():
    u, gate = torch.zeros(1, 3, 2), (torch.zeros(3, 2), torch.zeros(3), torch.zeros(4, 3), torch.zeros(4))
    model = random_model(block="elastic", num_spectral_channels=4)
    weights = dict(model.model.layers[0].mixer.named_parameters())
    for budget in (0, 5):
        for call in (
            lambda K: spectral_mixer(u, gate, torch.zeros(4, 2, 2), torch.zeros(2, 2), 16, K),
            lambda K: elastic_mixer(torch.zeros(1, 3, 16), weights, model.config, K),
        ):
            with pytest.raises(ValueError, match=rf"budget must be an integer in \[1, 4\], got {budget}"):
                call(budget)


# --- The memory's rule at extreme rates


def by_definition(q, k, v, g, beta, S):
    """S(t) = exp(g) (I - beta k k^T) S(t-1) + beta k v^T and o(t) = S(t)^T q(t)."""
    eye, read = torch.eye(k.shape[2], dtype=k.dtype), []
    for t in range(k.shape[1]):
        key, b = k[:, t, :, None], beta[:, t, :, None]
        S = g[:, t, :, None].exp() * (eye - b * key * key.mT) @ S + b * key * v[:, t, None]
        read.append((S.mT @ q[:, t, :, None]).squeeze(2))
    return torch.stack(read, 1), S


def rule_inputs(L, g, beta, n=6, e=4):
    """q, k, v, decays around exp(g), write strengths around sigmoid(beta), and a state; fp64, B = 2."""
    generator = torch.Generator().manual_seed(L)
    q, k, v, a, b, S = (
        torch.randn(2, *size, generator=generator, dtype=torch.float64)
        for size in ((L, n), (L, n), (L, e), (L, 1), (L, 1), (n, e))
    )
    q, k = (torch.nn.functional.normalize(t, dim=-1) for t in (q, k))
    return q, k, v, -torch.nn.functional.softplus(a + g), (b + beta).sigmoid(), S


@pytest.mark.parametrize("g, beta", [(-50.0, 50.0), (50.0, 50.0), (50.0, -50.0)])
def test_long_sequences_stay_finite(g, beta):
    """200 steps without decay, and with one of e^-50 a step, whose product over a chunk is 0 in fp32."""
    exact = rule_inputs(200, g, beta)
    single = [t.float().requires_grad_() for t in exact]
    o, S = delta_rule(*single)
    grads = torch.autograd.grad(o.sum() + S.sum(), single)
    assert all(t.isfinite().all() for t in (o, S, *grads))
    torch.testing.assert_close((o, S), tuple(t.float() for t in by_definition(*exact)), rtol=1e-4, atol=1e-4)


# --- The short convolution against torch's own


@pytest.mark.parametrize("frozen", [None, 0, 1], ids=["nothing", "u", "taps"])
@pytest.mark.parametrize("shape", [(2, 9, 3, 4), (1, 1, 5, 4), (2, 7, 4, 1)], ids=str)
def test_the_short_convolution_and_its_derivatives(shape, frozen):
    """Its derivatives of first and second order, in both modes, are those of finite differences."""
    (B, L, D, num_taps), generator = shape, torch.Generator().manual_seed(sum(shape))
    u = torch.randn(B, L + num_taps - 1, D, generator=generator, dtype=torch.float64)
    taps = torch.randn(num_taps, D, generator=generator, dtype=torch.float64)
    torch.testing.assert_close(short_convolution(u, taps), F.conv1d(u.mT, taps.T.unsqueeze(1), groups=D).mT)
    inputs = [tensor.requires_grad_(i != frozen) for i, tensor in enumerate((u, taps))]
    assert torch.autograd.gradcheck(short_convolution, inputs, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(short_convolution, inputs, check_fwd_over_rev=True)
