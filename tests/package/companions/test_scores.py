# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Values of modes against sums over their impulse responses, and the rules that make scores of them."""

import dataclasses

import pytest
import torch
from companion_layers import LAGS, Recurrence, Stack, impulse_responses
from recurrences import random_system
from torch import nn

from modeling_essm.companions import DiagonalSystem, hinf_norm, importance, state_layers
from modeling_essm.companions.pruning.scores import METHODS, energy, exact_energy, mode_values, prefix_scores

EXACT = dict(rtol=1e-12, atol=0.0)  # sums of some hundred positive numbers in fp64
kinds = pytest.mark.parametrize("channels", [None, 3], ids=["mimo", "siso"])
directions = pytest.mark.parametrize("count", [1, 2], ids=["one_direction", "two_directions"])


def summed_energy(system, lags=LAGS):
    responses = impulse_responses(system, lags).abs().square()
    return responses.flatten(system.lam.ndim).sum(-1)


@kinds
@directions
def test_exact_energy_is_that_of_the_impulse_response(channels, count):
    for output in ("complex", "real", "twice_real"):
        system = random_system(output=output, directions=count, channels=channels)
        torch.testing.assert_close(exact_energy(system), summed_energy(system), **EXACT)
        torch.testing.assert_close(exact_energy(system, horizon=7), summed_energy(system, 7), **EXACT)


@kinds
def test_energy_is_that_of_the_complex_map(channels):
    system = random_system(output="twice_real", channels=channels)
    of_complex = dataclasses.replace(system, output="complex")
    torch.testing.assert_close(energy(system), summed_energy(of_complex), **EXACT)
    torch.testing.assert_close(energy(system, horizon=3), summed_energy(of_complex, 3), **EXACT)


@kinds
def test_two_directions(channels):
    system = random_system(directions=2, channels=channels)
    first, second = (dataclasses.replace(system, C=C) for C in system.C)
    torch.testing.assert_close(energy(system, "paper"), (energy(first) + energy(second)) / 2, **EXACT)
    torch.testing.assert_close(energy(system, "exact"), summed_energy(system), **EXACT)
    norms = [C.abs() if channels else C.norm(dim=0) for C in system.C]
    b, r = system.B.abs() if channels else system.B.norm(dim=1), system.lam.abs()
    released = (norms[0] + norms[1]) / 4 * b**2
    torch.testing.assert_close(energy(system, "released"), released / (1 - r**2 + 1e-8), **EXACT)
    torch.testing.assert_close(mode_values(system, "hinf", "released"), released / ((1 - r) ** 2 + 1e-8), **EXACT)
    torch.testing.assert_close(mode_values(system, "hinf", "exact"), ((sum(norms)) * b / (1 - r)) ** 2, **EXACT)
    averaged = (mode_values(first, "hinf") + mode_values(second, "hinf")) / 2
    torch.testing.assert_close(mode_values(system, "hinf"), averaged, **EXACT)


def test_peak_hankel_and_magnitude():
    system = random_system()
    for i in range(5):
        alone = torch.arange(5) == i
        peak = hinf_norm(system, alone) ** 2  # the grid holds the pole's angle, where the largest gain is
        assert mode_values(system, "hinf")[i] == pytest.approx(peak, rel=1e-12)
        row = system.C[:, i, None] * system.B[i]
        powers = system.lam[i] ** (torch.arange(LAGS)[:, None] + torch.arange(LAGS))
        largest = torch.linalg.matrix_norm(powers, ord=2) * torch.linalg.matrix_norm(row, ord=2)
        assert mode_values(system, "hankel")[i] == pytest.approx(float(largest), rel=1e-10)
    expected = system.lam.abs() * system.C.norm(dim=0) * system.B.norm(dim=1)
    torch.testing.assert_close(mode_values(system, "magnitude"), expected, **EXACT)


def test_horizon_on_and_outside_of_the_circle():
    lam = torch.tensor([1.0, -1.0, 1.5, 0.0, 1j], dtype=torch.complex128)
    ones = torch.ones(5, 1, dtype=torch.complex128)
    for output in ("complex", "twice_real"):
        system = DiagonalSystem(lam, ones, ones.T, output)
        torch.testing.assert_close(exact_energy(system, 6), summed_energy(system, 6), **EXACT)


def test_unstable_modes_are_refused():
    for method, r in [("aire", 1.0), ("aire_exact", 1.2), ("last", float("nan")), ("hankel", 1.0)]:
        stable = random_system()
        lam = stable.lam.clone()
        lam[2] = r
        with pytest.raises(ValueError, match=r"layers\.0: \|lam\| must be below 1, got .* 1 such modes of 5"):
            importance(Stack(dataclasses.replace(stable, lam=lam)), method)


def test_horizon_ranks_unstable_modes():
    lam = torch.tensor([1.2, 0.5], dtype=torch.complex128)
    model = Stack(dataclasses.replace(random_system(n=2), lam=lam))
    assert torch.isfinite(importance(model, "aire", horizon=8).scores[0]).all()
    with pytest.raises(ValueError, match=r"energy of mode 0 must be finite, got inf"):
        importance(model, "aire", horizon=10**5)


def test_prefix_scores():
    assert prefix_scores(torch.ones(4, dtype=torch.float64)).tolist() == [1, 1 / 2, 1 / 3, 1 / 4]
    scores = prefix_scores(torch.tensor([1.0, 4.0, 0.0, 3.0], dtype=torch.float64))
    assert scores.tolist() == [1 / 8, 1, 0, 3 / 7]
    assert prefix_scores(torch.zeros(3, dtype=torch.float64)).tolist() == [1, 0, 0]
    assert prefix_scores(torch.zeros(3, dtype=torch.float64), eps=1e-6).tolist() == [0, 0, 0]
    assert len(prefix_scores(torch.zeros(0, dtype=torch.float64))) == 0
    values = torch.rand(50, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    ranked = prefix_scores(values)[values.argsort(descending=True)]
    assert (ranked.diff() < 0).all() and ranked[0] == 1


def test_methods_are_values_and_rules():
    model = Stack(random_system(seed=1), random_system(n=7, seed=2))
    systems = [layer.read() for layer in state_layers(model)]
    expected = {
        "aire": [prefix_scores(energy(s)) for s in systems],
        "aire_exact": [prefix_scores(exact_energy(s)) for s in systems],
        "last": [prefix_scores(mode_values(s, "hinf")) for s in systems],
        "lamp": [prefix_scores(mode_values(s, "magnitude") ** 2) for s in systems],
        **{name: [mode_values(s, name) for s in systems] for name in ("magnitude", "energy", "hinf", "hankel")},
    }
    assert set(expected) | {"random"} == set(METHODS)
    for method, scores in expected.items():
        found = importance(model, method)
        assert all(torch.equal(*pair) for pair in zip(found.scores, scores)), method


def test_random_is_seeded():
    model = Stack(random_system(), random_system())
    first, again, other = (importance(model, "random", seed=seed).scores for seed in (3, 3, 4))
    assert all(map(torch.equal, first, again)) and not torch.equal(first[0], other[0])
    assert not torch.equal(first[0], first[1]) and all(((u >= 0) & (u < 1)).all() for u in first)


def test_raw_values_of_different_outputs_compare():
    model = Stack(*(random_system(output=output) for output in ("complex", "real", "twice_real")))
    for method, factors in (("energy", (1, 0.5, 2)), ("hinf", (1, 1, 4)), ("hankel", (1, 1, 2)), ("aire", (1, 1, 1))):
        found = importance(model, method)
        for scores, factor in zip(found.scores, factors):
            assert torch.equal(scores, found.scores[0] * factor), method
        assert all(torch.equal(raw, found.raw[0]) for raw in found.raw)


def test_padding_has_no_score():
    system = random_system(n=4, channels=2)
    present = torch.tensor([[True, True, False, True], [True, False, True, True]])
    lam = system.lam.clone()
    lam[~present] = 3.0  # whatever it holds
    found = importance(Stack(dataclasses.replace(system, lam=lam, present=present)), "aire")
    layer = found.layers[0]
    assert len(layer.scores) == 6 and not layer.raw[~present].any() and (layer.raw[present] > 0).all()
    torch.testing.assert_close(layer.scores, prefix_scores(energy(system)[present]), **EXACT)


def test_mode_index_sums_ranks_over_channels():
    system = random_system(n=4, channels=3)
    layer = importance(Stack(system), "energy", granularity="mode_index").layers[0]
    torch.testing.assert_close(layer.scores, energy(system).sort(descending=True).values.sum(0), **EXACT)
    layer = importance(Stack(system), "lamp", granularity="mode_index").layers[0]
    squares = mode_values(system, "magnitude").square().sort(descending=True).values.sum(0)
    torch.testing.assert_close(layer.scores, prefix_scores(squares), **EXACT)
    ragged = dataclasses.replace(system, present=torch.arange(4) < torch.tensor([[2], [1], [3]]))
    layer = importance(Stack(ragged), "energy", granularity="mode_index").layers[0]
    assert layer.scores.shape == (3,)
    expected = energy(system).masked_fill(~ragged.present, 0).sort(descending=True).values.sum(0)[:3]
    torch.testing.assert_close(layer.scores, expected, **EXACT)


def test_bad_arguments():
    for arguments, message in [
        (dict(method="l2"), "method must be one of aire, .*, got 'l2'"),
        (dict(bidirectional="mean"), "bidirectional must be one of paper, exact, released, got 'mean'"),
        (dict(granularity="state"), "granularity must be one of mode, mode_index, got 'state'"),
        (dict(horizon=0), "horizon must be None or an integer of at least 1, got 0"),
        (dict(horizon=True), "horizon must be None or an integer of at least 1, got True"),
        (
            dict(method="last", horizon=3),
            "horizon is of energies, .*, got 3 with 'last'",
        ),
        (dict(method="energy", eps=1.0), "eps is of the prefix rule, which method 'energy' does not use, got 1.0"),
        (dict(eps=-1.0), "eps must be a finite number of at least 0, got -1.0"),
    ]:
        with pytest.raises(ValueError, match=message):
            importance(Stack(random_system()), **arguments)


def test_layers_are_found_by_class_and_subclass():
    class Derived(Recurrence):
        pass

    model = nn.Sequential(
        nn.Linear(3, 3), Derived(random_system()), nn.ModuleDict({"deep": Recurrence(random_system())})
    )
    assert [layer.name for layer in state_layers(model)] == ["1", "2.deep"]
    assert [layer.kind for layer in state_layers(model)] == ["Derived", "Recurrence"]
    with pytest.raises(ValueError, match="got a Linear without any"):
        importance(nn.Linear(2, 2))
