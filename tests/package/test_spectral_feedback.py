# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""spectral_feedback.py: AR-STU's mixer against its equation in plain loops, fp64."""

import pytest
import torch
from helpers import random_model
from operators import relative_error

from modeling_essm import ESSMModel
from modeling_essm.cache_layers import ESSMCacheLayer
from modeling_essm.spectral_basis import spectral_basis
from modeling_essm.spectral_ops import ALGORITHMS

VARIANTS = {
    f"{gating}-{'both' if negative else 'positive'}-shift{shift}": {
        "ar_order": 2,
        "gating": gating,
        "ar_negative_filters": negative,
        "ar_feature_shift": shift,
    }
    for gating in ("none", "softmax")
    for negative in (True, False)
    for shift in (0, 2)
}
variants = pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
K, L = 5, 19
TOLERANCE = 1e-5  # the recurrence reproduces the filters to 4e-6 (test_spectral_basis.py)


def make_mixer(variant, algorithm="chunked"):
    """Width 16, H = 512, C = 8, in fp64; weights so large that every term shows in the outputs."""
    model = random_model(ESSMModel, num_hidden_layers=1, spectral_algorithm=algorithm, **variant).double()
    mixer = model.layers[0].mixer
    with torch.no_grad():
        for weight in (mixer.output_mixing, getattr(mixer, "channel_mixing_negative", mixer.output_mixing)):
            weight.mul_(4)
    return mixer


def make_inputs(B=2):
    return torch.randn(B, L, 16, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def by_loops(mixer, variant, u):
    """Outputs (B, L, D) and states after the last step, of whole sequences, as the module's equation has it."""
    phi, gates, shift = torch.from_numpy(spectral_basis(512).filters(K)), mixer.gates(u, K), mixer.shift
    ys, M = [], mixer.channel_mixing
    for t in range(L):
        positive, negative = (
            sum((sign**j * phi[j, :, None] * u[:, None, t - shift - j] for j in range(t - shift + 1)), u.new_zeros(1))
            for sign in (1, -1)
        )
        positive, negative = (f.expand(len(u), K, 16) for f in (positive, negative))
        y = u[:, t] @ mixer.skip.weight.T
        for k in range(K):
            y = y + gates[:, t, k, None] * (positive[:, k] @ M[k])
            if variant["ar_negative_filters"]:
                y = y + gates[:, t, k, None] * (negative[:, k] @ mixer.channel_mixing_negative[k])
        for i in (1, 2):
            if t >= i:
                y = y + u[:, t - i] @ mixer.input_mixing[i - 1] + ys[t - i] @ mixer.output_mixing[i - 1]
        ys.append(y)
    states = {"features": positive} | ({"negative": negative} if variant["ar_negative_filters"] else {})
    return torch.stack(ys, 1), states | {"inputs": u[:, -2:], "outputs": torch.stack(ys[-2:], 1)}


def assert_states(cache, expected):
    assert list(cache.tensors) == list(expected)
    for name, state in expected.items():
        assert relative_error(cache.tensors[name][:, : state.shape[1]], state) < TOLERANCE, name


@variants
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_outputs_states_and_gradients_are_those_of_the_equation(variant, algorithm):
    mixer, cache, u = make_mixer(variant, algorithm), ESSMCacheLayer(), make_inputs().requires_grad_()
    leaves = {"u": u} | {name: p for name, p in mixer.named_parameters()}
    outputs, found = mixer(u, K, cache=cache), by_loops(mixer, variant, u)
    assert relative_error(outputs, found[0]) < TOLERANCE
    assert_states(cache, found[1])
    w = torch.randn(outputs.shape, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    actual, expected = (torch.autograd.grad((y * w).sum(), [*leaves.values()]) for y in (outputs, found[0]))
    for name, a, b in zip(leaves, actual, expected):
        assert float(b.norm()) > 0 and relative_error(a, b) < TOLERANCE, name


@variants
@pytest.mark.parametrize("pieces", [(8, 11), (1,) * L, (1, 2, 1, 10, 5)], ids=["8+11", "steps", "1+2+1+10+5"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_pieces_are_the_whole(variant, pieces, algorithm):
    mixer, cache, u = make_mixer(variant, algorithm), ESSMCacheLayer(), make_inputs()
    with torch.no_grad():
        outputs = torch.cat([mixer(piece, K, cache=cache) for piece in u.split(pieces, 1)], 1)
        expected, states = by_loops(mixer, variant, u)
    assert relative_error(outputs, expected) < TOLERANCE
    assert_states(cache, states)


@variants
def test_rows_of_different_length(variant):
    """The state is taken after each row's own steps; a row of none keeps the state it came with."""
    mixer, cache, u = make_mixer(variant), ESSMCacheLayer(), make_inputs(4)
    lengths = torch.tensor([L - 3, 1, 0, 10])
    with torch.no_grad():
        mixer(u[:, :3], K, cache=cache)
        mixer(u[:, 3:], K, lengths=lengths, cache=cache)
        for i, n in enumerate(lengths.tolist()):
            alone = ESSMCacheLayer()
            mixer(u[i : i + 1, : 3 + n], K, cache=alone)
            for name, state in alone.tensors.items():
                assert relative_error(cache.tensors[name][i], state[0]) < TOLERANCE, name


def test_the_variants_differ():
    """Neither field is without effect, and a shift of two leaves the features of the first two steps silent."""
    u = make_inputs()
    outputs = [make_mixer(variant)(u, K) for variant in VARIANTS.values()]
    assert all(relative_error(a, b) > 1e-2 for i, a in enumerate(outputs) for b in outputs[:i])
    mixer = make_mixer(VARIANTS["softmax-both-shift2"])
    direct = u[:, :2] @ mixer.skip.weight.T
    direct[:, 1] += u[:, 0] @ mixer.input_mixing[0] + direct[:, 0] @ mixer.output_mixing[0]
    assert relative_error(mixer(u[:, :2], K), direct) < 1e-12
