# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Every bound against the gain on a dense grid, and what holds between the bounds."""

import dataclasses

import pytest
import torch
from companion_layers import Stack, impulse_responses
from recurrences import random_system

from modeling_essm.companions import DiagonalSystem, allocate, certificate, certify, hinf_norm, importance, prune
from modeling_essm.companions.pruning.certificates import BOUNDS

layouts = pytest.mark.parametrize("channels", [None, 3], ids=["mimo", "siso"])
ROUNDING = 1 + 1e-10


@layouts
@pytest.mark.parametrize(("output", "count"), [("complex", 1), ("real", 2), ("twice_real", 1), ("twice_real", 2)])
def test_bounds_bound(channels, output, count):
    for seed in range(6):
        low, high = (0.2, 0.99) if seed % 2 else (0.9, 0.999)
        system = random_system(6, 3, 3, output, low, high, seed, channels, count)
        keep = torch.rand(system.lam.shape, generator=torch.Generator().manual_seed(seed)) < 0.4
        found = certificate(system, keep)
        gain = hinf_norm(system, ~keep)
        assert gain > 0
        for name in BOUNDS:
            assert gain <= found[name] * ROUNDING, (seed, name)
        assert found["sum_of_peaks"] <= found["paper_16"] * ROUNDING
        assert found["paper_16"] <= found["paper_17"] * ROUNDING
        assert found["best"] == min(found[name] for name in BOUNDS)


@layouts
@pytest.mark.parametrize(("output", "count"), [("complex", 1), ("real", 2), ("twice_real", 2)])
def test_the_grid_s_gain_is_that_of_the_impulse_response(channels, output, count):
    """Summed over lags at 8192 frequencies: the peaks are wider than 100 of their steps."""
    system = random_system(4, 2, 3, output, channels=channels, directions=count)
    kernel = impulse_responses(system)
    kernel = kernel.sum(1)[:, None, None] if channels else kernel.sum(0)
    gains = torch.linalg.matrix_norm(torch.fft.fft(kernel, 8192).movedim(-1, -3), ord=2)
    assert hinf_norm(system) == pytest.approx(float(gains.max()), rel=1e-3)


def test_two_directions_need_their_own_factor():
    """lam = 0.9, c1 = c2 = b = 1: a gain of 20. The averaged energy in (16) would promise 10, the summed one 14.1."""
    one = torch.ones(1, 1, dtype=torch.complex128)
    system = DiagonalSystem(0.9 * one[0], one, one.expand(2, 1, 1), "complex")
    found = certificate(system, torch.zeros(1, dtype=torch.bool))
    assert [hinf_norm(system), found["sum_of_peaks"], found["paper_16"]] == pytest.approx([20.0] * 3)


def test_nothing_pruned_changes_nothing():
    system = dataclasses.replace(random_system(), lam=torch.full((5,), 1.5, dtype=torch.complex128))
    assert set(certificate(system, torch.ones(5, dtype=torch.bool)).values()) == {0.0}
    assert hinf_norm(system, torch.zeros(5, dtype=torch.bool)) == 0
    with pytest.raises(ValueError, match=r"here: \|lam\| must be below 1, got 1\.5 and 1 such modes of 1"):
        certificate(system, torch.arange(5) != 2, "here")
    with pytest.raises(ValueError, match=r"hinf_norm: \|lam\| must be below 1, got 1\.5"):
        hinf_norm(system)
    with pytest.raises(ValueError, match=r"keep must be bool \(5,\), got torch\.bool \(4,\)"):
        certificate(system, torch.ones(4, dtype=torch.bool))


def test_padding_is_not_pruned():
    system = random_system(n=3, channels=2)
    present = torch.tensor([[True, True, False], [True, True, True]])
    keep = torch.tensor([[True, False, False], [True, True, True]])
    lam = torch.where(present, system.lam, 2.0)
    padded = dataclasses.replace(system, lam=lam, present=present)
    assert certificate(padded, keep) == certificate(system, keep | ~present)


def test_a_plan_certifies_each_layer():
    """A masked model has nothing left to certify."""
    model = Stack(random_system(), random_system(output="real", seed=1))
    plan = allocate(importance(model, "last"), amount=0.5)
    found = certify(plan, model)
    for own, layer, keep in zip(found, model.layers, plan.keep):
        system = DiagonalSystem(*layer.complex(), layer.output)
        assert own == pytest.approx(certificate(system, keep), rel=1e-12)  # C is laid out otherwise
        assert 0 < hinf_norm(system, ~keep) <= own["best"] * ROUNDING
    prune(model, plan)
    with pytest.raises(ValueError, match="got one with masks"):
        certify(plan, model)
