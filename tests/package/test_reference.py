# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""The readable Eq. (7-8) is what the models' mixers compute, at every budget, and what loops over every index give."""

import math

import pytest
import torch
import torch.nn.functional as F
from helpers import VARIANTS, random_ids, random_model

from modeling_essm.reference import spectral_mixer
from modeling_essm.spectral_basis import spectral_basis

BLOCKS = {"paper": {}, "elastic": VARIANTS["memory"] | {"scaling_exponent": 0.25}}
# In fp64 the FFT differs by rounding, and the recurrence by the 4e-6 to which its states reproduce the filters.
TOLERANCE = {"fft": 1e-10, "chunked": 1e-5}


def weights_of(mixer: torch.nn.Module) -> dict:
    """The module's weights, as `spectral_mixer` takes them."""
    skip, mixing, diagonal = mixer.skip.weight, mixer.channel_mixing, mixer.channel_mixing.shape[2] == 1
    return {
        "gate": (mixer.gate_in.weight, mixer.gate_in.bias, mixer.gate_out.weight, mixer.gate_out.bias),
        "channel_mixing": mixing[..., 0] if diagonal else mixing,
        "skip": torch.diag(skip) if skip.ndim == 1 else skip,
        "filter_length": mixer.operator.filter_length,
        "scaling_exponent": mixer.scaling_exponent,
    }


@torch.no_grad()
@pytest.mark.parametrize("algorithm", TOLERANCE)
@pytest.mark.parametrize("fields", BLOCKS.values(), ids=BLOCKS)
def test_the_mixer_of_a_model_is_eq_7_and_8(fields, algorithm):
    """In the gated block it reads SiLU of a causal convolution."""
    model, seen = random_model(spectral_algorithm=algorithm, **fields).double(), []
    mixer = model.model.layers[1].mixer
    mixer.register_forward_hook(lambda module, args, output: seen.append((args[0], output)))
    for K in (1, 2, 7, 16, 31, 32):
        model(random_ids(2, 37), spectral_budget=K)
        u, y = seen.pop()
        if fields.get("block") == "elastic":
            u = F.silu(F.conv1d(F.pad(u.mT, (2, 0)), mixer.convolution.T[:, None], groups=24).mT)
        expected = spectral_mixer(u, budget=K, **weights_of(mixer))
        error = (y - expected).norm() / expected.norm()
        assert error < TOLERANCE[algorithm], (K, float(error))


@pytest.mark.parametrize("diagonal", [False, True], ids=["dense", "diagonal"])
def test_loops_over_every_index_give_the_same(diagonal):
    """Dense 4 x 6 matrices with one gate or diagonal ones with two, K = 3 of 4 channels, beyond the filters' length."""
    B, L, H, K, D = 2, 7, 5, 3, 4
    G, E = (2, D) if diagonal else (1, 6)
    generator = torch.Generator().manual_seed(6)

    def random(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    u, W1, b1, W2, b2 = random(B, L, D), random(5, D), random(5), random(4, G, 5), random(4, G)
    M, skip = random(4, D) if diagonal else random(4, D, E), random(E, D)
    basis = spectral_basis(H)
    phi, sigma = basis.filters(K), basis.sigma
    expected = torch.zeros(B, L, E, dtype=torch.float64)
    for b in range(B):
        for t in range(L):
            expected[b, t] = skip @ u[b, t]
            a = W1 @ u[b, t] + b1
            hidden = a * (1 + torch.erf(a / math.sqrt(2))) / 2
            for g in range(G):
                own = slice(g * E // G, (g + 1) * E // G)  # columns of this gate
                s = [float(W2[k, g] @ hidden + b2[k, g]) for k in range(K)]
                scale = math.sqrt(K) / (math.hypot(*s) + 1e-6)
                total = sum(math.exp(scale * s_k) for s_k in s)
                for k in range(K):
                    feature = sum(phi[t - j, k] * u[b, j] for j in range(t + 1) if t - j < H)
                    alpha = math.exp(scale * s[k]) / total
                    mixed = feature * M[k] if diagonal else feature @ M[k]
                    expected[b, t, own] += alpha * sigma[k] ** 0.25 * mixed[own]
    gate = (W1, b1, W2, b2) if diagonal else (W1, b1, W2[:, 0], b2[:, 0])
    y = spectral_mixer(u, gate, M, skip, H, K)
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-13)
    single = spectral_mixer(u.float(), gate, M, skip, H, K)
    torch.testing.assert_close(single, expected.float())  # of the dtype of u


def test_a_budget_that_the_weights_do_not_have():
    u, gate = torch.zeros(1, 3, 2), (torch.zeros(3, 2), torch.zeros(3), torch.zeros(4, 3), torch.zeros(4))
    for budget in (0, 5):
        with pytest.raises(ValueError, match=rf"budget must be an integer in \[1, 4\], got {budget}"):
            spectral_mixer(u, gate, torch.zeros(4, 2, 2), torch.zeros(2, 2), 16, budget)
