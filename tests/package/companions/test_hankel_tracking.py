# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""tracking.py: distances and directions against the block Hankel matrix, assignment against all permutations."""

import dataclasses
import itertools
import json

import numpy as np
import pytest
import torch
from recurrences import RecurrentConfig, RecurrentModel, impulse_response, random_system, training_data

from modeling_essm.companions import DiagonalSSMConfig, DiagonalSSMModel
from modeling_essm.companions.systems import DiagonalSystem, diagonal_layers
from modeling_essm.companions.truncation.balancing import hankel_singular_values, matrices
from modeling_essm.companions.truncation.models import balanced_truncate
from modeling_essm.companions.truncation.tracking import (
    FIGURES,
    HankelTracker,
    count_swaps,
    direction_overlaps,
    hankel_distance,
    linear_assignment,
    plot_tracking,
)

# Moduli of at most 0.8: 60 lags leave out 0.8^60 = 2e-6, and its square of a sigma.
ONE, OTHER = random_system(5, r_max=0.8), random_system(7, r_max=0.8, seed=1)
LAGS = 60


def block_hankel(system):
    response = impulse_response(*matrices(system), 2 * LAGS)
    at = torch.arange(LAGS)
    return response[at[:, None] + at].transpose(1, 2).flatten(2).flatten(0, 1)


def nudged(system, size, seed=9):
    g = torch.Generator().manual_seed(seed)
    noise = [size * torch.randn(t.shape, generator=g, dtype=t.dtype) for t in (system.lam, system.B, system.C)]
    return dataclasses.replace(system, lam=system.lam + 0.1 * noise[0], B=system.B + noise[1], C=system.C + noise[2])


def test_distance_is_the_norm_of_the_difference():
    expected = torch.linalg.svdvals(block_hankel(ONE) - block_hankel(OTHER))[0]
    assert hankel_distance(ONE, OTHER) == pytest.approx(float(expected), rel=1e-7)
    reordered = dataclasses.replace(ONE, lam=ONE.lam.flip(0), B=ONE.B.flip(0), C=ONE.C.flip(1))
    # A difference of 0 is the root of rounding: 1e-8.
    assert hankel_distance(ONE, reordered) < 1e-6 * float(hankel_singular_values(ONE)[0])


@pytest.mark.parametrize("size", [1e-3, 1e-1])
def test_no_singular_value_moves_further(size):
    """Lemma 3.1, with the exact right-hand side; and one that is not idle: something moves by a tenth of it."""
    other = nudged(ONE, size)
    moved = (hankel_singular_values(ONE) - hankel_singular_values(other)).abs().max()
    assert 0.1 * hankel_distance(ONE, other) < moved <= hankel_distance(ONE, other)


def test_distance_refuses_channels():
    with pytest.raises(ValueError, match="takes systems of lam"):
        hankel_distance(random_system(3, channels=2), random_system(3, channels=2))


def test_overlaps_are_those_of_singular_vectors():
    (_, _, V), (_, _, W) = (torch.linalg.svd(block_hankel(s), full_matrices=False) for s in (ONE, OTHER))
    expected = (V[:5].conj() @ W[:7].mT).abs() ** 2
    torch.testing.assert_close(direction_overlaps(ONE, OTHER), expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(direction_overlaps(ONE, ONE), torch.eye(5, dtype=torch.float64), rtol=0, atol=1e-7)


def test_assignment_is_the_best_of_all():
    generator = np.random.default_rng(0)
    for trial in range(20):
        n, m = 5, 5 + trial % 2
        scores = generator.normal(size=(n, m))
        if trial % 3 == 0:
            scores = scores.round()  # ties
        best = max(sum(scores[i, j] for i, j in enumerate(p)) for p in itertools.permutations(range(m), n))
        found = linear_assignment(scores)
        assert len(set(found.tolist())) == n
        assert scores[np.arange(n), found].sum() == pytest.approx(best, abs=1e-12)


def test_assignment_finds_what_was_planted():
    generator = np.random.default_rng(1)
    planted = generator.permutation(40)
    scores = 0.4 * generator.random((40, 40))
    scores[np.arange(40), planted] += 0.41
    assert (linear_assignment(scores) == planted).all()


@pytest.mark.parametrize("scores", [np.ones((3, 2)), np.array([[np.nan]])])
def test_assignment_refuses(scores):
    with pytest.raises(ValueError, match="finite and of no more rows than columns"):
        linear_assignment(scores)


@pytest.mark.parametrize(("order", "swaps"), [([0, 1, 2], 0), ([1, 0, 2], 1), ([2, 1, 0], 3), ([2, 0, 1], 2)])
def test_swaps(order, swaps):
    assert count_swaps(order) == swaps


class Layer(torch.nn.Module):
    """Two modes that do not meet, sigma_i = gains_i / (1 - 0.25)."""

    def __init__(self, *gains):
        super().__init__()
        self.set(*gains)

    def set(self, *gains):
        n = len(gains)
        lam, eye = torch.full((n,), 0.5, dtype=torch.complex128), torch.eye(n, dtype=torch.complex128)
        self.system = DiagonalSystem(lam, eye * torch.tensor(gains)[:, None], eye, "real")

    def lti(self):
        s = self.system
        return s.lam, s.B, s.C, s.output

    def set_lti(self, lam, B, C, present=None):
        raise AssertionError("tracking reads only")


def test_directions_are_followed_through_a_crossing():
    model = torch.nn.Sequential(Layer(3.0, 2.0, 1.0))
    tracker = HankelTracker(model, bottom=0.34)
    for step, gains in enumerate([(3.0, 2.0, 1.0), (3.0, 2.4, 1.0), (3.0, 3.2, 1.0), (0.5, 3.2, 1.0)]):
        model[0].set(*gains)
        tracker(step)
    figures = tracker.figures["0"]
    assert figures["swaps"][1:] == [0, 1, 1]
    close = {"rel": 1e-6}  # roots of rounding
    assert figures["movement"][1:] == pytest.approx([0.4 / 0.75, 0.6 / 0.75, 2.0 / 0.75], **close)
    assert figures["distance"][1:] == pytest.approx([0.4 / 0.75, 0.8 / 0.75, 2.5 / 0.75], **close)
    assert figures["gap"] == pytest.approx([1 / 0.75, 0.6 / 0.75, 0.2 / 0.75, 0.5 / 0.75], **close)
    assert figures["bottom_share"] == pytest.approx([1 / 6, 1 / 6.4, 1 / 7.2, 0.5 / 4.7], **close)
    assert all(np.isnan(figures[name][0]) for name in ("swaps", "movement", "distance"))


@pytest.fixture(scope="module")
def tracked():
    """Six updates, with a truncation after the third."""
    model = RecurrentModel(RecurrentConfig(state_sizes=[6, 5]))
    batch = {name: torch.stack([row[name] for row in training_data(8)]) for name in ("u", "labels")}
    tracker = HankelTracker(model)
    tracker(0)
    for step in range(1, 7):
        if step == 4:
            balanced_truncate(model, sizes=4)
        optimizer = torch.optim.SGD(model.parameters(), 0.05)
        optimizer.zero_grad()
        model(**batch)["loss"].backward()
        optimizer.step()
        tracker(step)
    return tracker


def test_training_keeps_to_the_lemma(tracked):
    for figures in tracked.figures.values():
        movement, distance = np.array(figures["movement"]), np.array(figures["distance"])
        known = [1, 2, 3, 5, 6]
        assert (movement[known] <= distance[known]).all()
        assert (movement[known] > 0).all()
        assert np.isnan(movement[[0, 4]]).all()


def test_arrays_can_be_saved(tracked, tmp_path):
    arrays = tracked.arrays()
    assert arrays["layers.0/sigma"].shape == (7, 6)
    assert np.isnan(arrays["layers.0/sigma"][4:, 4:]).all()
    assert not np.isnan(arrays["layers.1/sigma"][4:, :4]).any()
    assert set(arrays) == {"steps"} | {f"layers.{i}/{name}" for i in (0, 1) for name in ("sigma", *FIGURES)}
    tracked.save(tmp_path / "tracked.npz")
    tracked.save(tmp_path / "tracked.json")
    with np.load(tmp_path / "tracked.npz") as saved:
        for name, array in arrays.items():
            np.testing.assert_array_equal(saved[name], array)
    rows = json.loads((tmp_path / "tracked.json").read_text())
    np.testing.assert_array_equal(np.array(rows["layers.1/sigma"], dtype=float), arrays["layers.1/sigma"])
    assert rows["layers.1/swaps"][0] is None
    with pytest.raises(ValueError, match=r"must end with \.npz or \.json"):
        tracked.save(tmp_path / "tracked.csv")


def test_plot(tracked):
    pytest.importorskip("matplotlib")
    figure = plot_tracking(tracked.arrays(), "layers.0")
    top, middle, bottom = figure.axes[:3]
    assert len(top.lines) == 6
    assert len(middle.lines) == 3
    np.testing.assert_array_equal(bottom.lines[0].get_ydata(), tracked.arrays()["layers.0/swaps"])


def test_models_that_cannot_be_tracked():
    with pytest.raises(ValueError, match="the model has none"):
        HankelTracker(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"bottom must be in \(0, 1\), got 1"):
        HankelTracker(RecurrentModel(RecurrentConfig()), bottom=1)


def test_a_layer_that_has_lost_all_is_followed_still():
    torch.manual_seed(0)
    model = DiagonalSSMModel(DiagonalSSMConfig(parameterization="lru", state_size=4, num_hidden_layers=2, vocab_size=9))
    tracker = HankelTracker(model)
    tracker(0)
    first = diagonal_layers(model)[0]
    first.adapter.shrink(first.module, torch.zeros(4, dtype=torch.bool), 0)
    tracker(1)
    figures = next(iter(tracker.figures.values()))
    assert all(np.isnan(values[1]) for values in figures.values())
    assert not np.isnan([*tracker.figures.values()][1]["movement"][1])
