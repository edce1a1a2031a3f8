# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Statistics that budgets per layer are chosen by: closed forms against measurement."""

import pytest
import torch
import torch.nn.functional as F
from allocations import CASES, GATED, cases, everywhere, matrices, text, white
from helpers import assert_close, random_ids, random_model

from modeling_essm import ESSMModel
from modeling_essm.budgets.allocation import (
    LayerStatistics,
    channel_energies,
    distortions,
    gate_moments,
    layer_statistics,
    read_calibration,
    spectral_mixers,
)
from modeling_essm.spectral_basis import spectral_basis


@pytest.fixture(scope="module", params=CASES.values(), ids=CASES)
def monte_carlo(request):
    """A mixer, its statistics in closed form, and its spectral branch at several K for white u and gates of another v.

    H = 1024; the first 1024 steps, in which the filters have not seen their whole length, are left out.
    """
    sizes = {"num_hidden_layers": 1, "filter_length": 1024, "scaling_exponent": 0.25}  # energies that fall with k
    (mixer,) = spectral_mixers(random_model(**sizes, **request.param))
    with torch.no_grad():
        if mixer.gated:
            mixer.gate_out.weight.mul_(10.0)  # gates that move
        u, v = white(4, 3072, 16, seed=1), white(4, 3072, 16, seed=2)
        budgets = (2, 4, 8, 16, 32)
        y = {K: mixer.operator(u, mixer.gates(v, K), matrices(mixer), algorithm="fft")[0] for K in budgets}
    found = LayerStatistics(channel_energies(mixer), *gate_moments(mixer, v[:, 1024:], everywhere(v[:, 1024:])))
    return mixer, u, found, {K: x[:, 1024:].double() for K, x in y.items()}


def test_distortions_are_those_measured(monte_carlo):
    mixer, _, found, y = monte_carlo
    B1, B2 = distortions(found, gain_free=False), distortions(found)
    power = float((found.square[-1] * found.energies).sum())
    assert power == pytest.approx(float(y[32].square().sum(-1).mean()), rel=0.05)
    for K in (2, 4, 8, 16):
        measured = float((y[32] - y[K]).square().sum(-1).mean())
        gain = float((y[32] * y[K]).sum() / y[K].square().sum())
        gain_free = float((y[32] - gain * y[K]).square().sum(-1).mean())
        # Slow filters leave about 200 independent samples; the rounding of fp32 shows below 1e-10 of the power.
        rel = 0.05 if mixer.num_heads == 1 else 0.1  # outputs of heads are sums of fewer independent terms
        assert float(B1[K - 1]) == pytest.approx(measured, rel=rel, abs=1e-10 * power)
        assert float(B2[K - 1]) == pytest.approx(gain_free, rel=rel, abs=1e-10 * power)
        tail = float((found.square[-1] * found.energies)[K:].sum())  # over channels, and over gates of heads
        if mixer.gated:  # dropping channels raises the gates of the others
            assert B1[K - 1] > 10 * tail and B1[K - 1] > 1.5 * B2[K - 1]
        else:
            assert float(B1[K - 1]) == pytest.approx(tail) and float(B2[K - 1]) == pytest.approx(tail)
    # Three fp64 sums of 32 terms that add up to `power` cancel: 4 * 32 eps = 3e-14 of it may stay.
    assert B1[-1] <= 1e-12 * power and B2[-1] <= 1e-12 * power


def test_powers_of_channels_add_up():
    (mixer,) = spectral_mixers(random_model(num_hidden_layers=1).double())
    basis, M, a = spectral_basis(512), mixer.channel_mixing.detach(), white(32, seed=3).double()
    phi = torch.from_numpy(basis.filters(32))
    weights = a * torch.from_numpy(basis.sigma[:32] ** mixer.scaling_exponent)

    def power(covariance_of_u):  # of sum_k a_k sigma_k^p (phi_k * u) M_k, all cross terms included
        features = phi.T @ covariance_of_u @ phi
        return float(torch.einsum("k,j,kj,kde,jde->", weights, weights, features, M, M))

    e = float((a**2 * channel_energies(mixer)).sum())
    assert power(torch.eye(512, dtype=torch.float64)) == pytest.approx(e, rel=1e-10)
    lags = torch.arange(512)
    coloured = 0.95 ** (lags[:, None] - lags).abs().double()
    assert abs(power(coloured) / e - 1) > 0.1  # so it is the whiteness that makes them add up


@cases
def test_energies_of_given_inputs_are_those_of_single_channels(fields):
    model = random_model(num_hidden_layers=1, **fields)
    (mixer,) = spectral_mixers(model)
    u = white(3, 40, 16).cumsum(1) @ white(16, 16, seed=1)  # coloured in time and across the width
    real = torch.arange(40) < torch.tensor([[40], [25], [1]])
    found = channel_energies(mixer, u, real)
    scale = mixer.operator.sigma(32, mixer.scaling_exponent, u)
    with torch.no_grad():
        for k in range(32):
            gates = F.one_hot(torch.tensor(k), 32) * scale
            y, _ = mixer.operator(u, gates.expand(3, 40, 32), matrices(mixer), algorithm="naive")
            power = y[real].square().unflatten(-1, (*found.shape[1:], -1)).sum(-1).mean(0)  # of each gate's outputs
            torch.testing.assert_close(found[k], power.double(), rtol=1e-4, atol=0.0)  # fp32 products


@cases
def test_statistics_average_over_real_positions_of_all_batches(fields):
    model, ids = random_model(**fields), random_ids(4, 20)
    mask = (torch.arange(20) < torch.tensor([[20], [20], [12], [3]])).long()
    whole = [{"input_ids": ids, "attention_mask": mask}]
    parts = [{"input_ids": ids[:1]}, {"input_ids": ids[1:2]}, {"input_ids": ids[2:3, :12]}, {"input_ids": ids[3:, :3]}]
    one, many = (layer_statistics(model, read_calibration(model, batches)) for batches in (whole, parts))
    for a, b in zip(one, many):
        for name in ("energies", "square", "cross"):
            torch.testing.assert_close(getattr(a, name), getattr(b, name), rtol=1e-4, atol=0.0)
        assert a.weight == pytest.approx(b.weight, rel=1e-4)
    mixer, (gated, *_) = spectral_mixers(model)[0], one
    u = []
    hook = mixer.register_forward_pre_hook(lambda module, args: u.append(args[0]))
    with torch.no_grad():
        model(ids[:1])
        hook.remove()
        alpha = mixer.gates(mixer.operator_inputs(u[0]), 5).movedim(2, -1)
        alpha = (alpha / mixer.operator.sigma(5, mixer.scaling_exponent, u[0])).movedim(-1, 2)
    if mixer.gated:
        assert_close(alpha.sum(2), torch.ones_like(alpha[:, :, 0]))
    first = layer_statistics(model, read_calibration(model, parts[:1]))[0]
    assert_close(first.square[4, :5], alpha[0].square().mean(0).double(), atol=1e-6)
    assert (gated.square[4, 5:] == 0).all() and (gated.cross[4, 5:] == 0).all()


@pytest.mark.parametrize("fields, frozen", [({}, False), ({}, True), (GATED, False)], ids=str)
def test_weights_are_the_gradients_of_the_loss(fields, frozen):
    model, ids = random_model(**fields).requires_grad_(not frozen), random_ids(3, 20)
    mask = (torch.arange(20) < torch.tensor([[20], [14], [9]])).long()
    batches = read_calibration(model, [{"input_ids": ids, "attention_mask": mask}])
    with torch.no_grad():  # a caller's mode does not matter
        found = layer_statistics(model, batches)
    shifts = [torch.zeros(3, 20, 16, requires_grad=True) for _ in found]
    for mixer, shift in zip(spectral_mixers(model), shifts):
        mixer.register_forward_hook(lambda module, args, y, shift=shift: y + shift)
    logits = model(ids, attention_mask=mask).logits[:, :-1]
    losses = F.cross_entropy(logits.mT, ids[:, 1:], reduction="none")
    losses[mask[:, 1:].bool()].sum().backward()
    for s, shift in zip(found, shifts):
        assert s.weight == pytest.approx(float(shift.grad.square().sum(-1)[mask.bool()].mean() / 16), rel=1e-3)
    assert all(parameter.grad is None for parameter in model.parameters()) or not frozen
    plain = random_model(ESSMModel)  # without a loss: the output's power
    y = []
    spectral_mixers(plain)[1].register_forward_hook(lambda module, args, out: y.append(out.detach()))
    weight = layer_statistics(plain, read_calibration(plain, text()))[1].weight
    assert weight == pytest.approx(1 / float(y[0].square().sum(-1).mean()), rel=1e-4)
