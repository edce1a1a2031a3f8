# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""balancing.py and models.py: errors against their bound, refusals, and what a model becomes."""

import dataclasses
import json

import numpy as np
import pytest
import torch
from recurrences import (
    RecurrentConfig,
    RecurrentModel,
    error_norm,
    frequency_response,
    impulse_response,
    random_system,
)

from modeling_essm.companions.systems import DiagonalSystem, diagonal_layers
from modeling_essm.companions.truncation import balancing as bt
from modeling_essm.companions.truncation.balancing import (
    NotDiagonalisable,
    balance,
    channels,
    diagonalise,
    equalise,
    gramians,
    matrices,
    rank_by_discarded,
    stack_channels,
    truncate,
)
from modeling_essm.companions.truncation.models import balanced_truncate, resize_states

N = 12


# --- Rank -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tau", "rank"), [(0.0, 4), (0.05, 4), (0.1, 3), (0.101, 3), (0.3, 2), (0.59, 2), (0.601, 1), (0.999, 1)]
)
def test_rank_by_discarded_share(tau, rank):
    """Of sums, not of squares: those of (.9, .3, .2, .1)^2 would give 2 at tau = 0.1."""
    sigma = torch.tensor([4.0, 3.0, 2.0, 1.0]) if tau in (0.1, 0.3) else torch.tensor([4.01, 2.99, 2.01, 0.99])
    assert rank_by_discarded(sigma, tau) == rank


def test_rank_where_rounding_keeps_sums_below():
    """The rule of the released code, argmax(sums >= share) + 1, gives 1 where no sum in fp32 reaches the share."""
    sigma = np.full(1000, 1e-3, dtype=np.float32)
    assert int(np.argmax(np.cumsum(sigma) >= 1.0 - 1e-9)) + 1 == 1
    assert rank_by_discarded(torch.from_numpy(sigma), 1e-9) == 1000


# --- Errors and bounds ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("output", ["complex", "real", "twice_real"])
@pytest.mark.parametrize("directions", [1, 2])
@pytest.mark.parametrize("size", [3, 11])
def test_errors_are_below_the_bound(output, directions, size):
    for seed in range(3):
        system = random_system(N, output=output, directions=directions, seed=seed)
        result = truncate(system, size=size)
        modes = result.system.modes
        assert modes == size
        assert (result.system.lam.abs() < 1).all()
        assert result.system.output == output
        assert result.system.C.shape == (*system.C.shape[:-1], modes)
        assert error_norm(system, result.system) <= result.bound
        factor = 2 * directions * (2 if output == "twice_real" else 1)
        assert result.bound == pytest.approx(factor * float(result.hankel[size:].sum()), rel=1e-9)


@pytest.mark.parametrize("size", [1, 3, 5])
def test_errors_are_not_far_below_the_bound(size):
    """No system of r modes is closer than sigma_{r+1} (Adamyan, Arov and Krein 1971); the grid misses 0.1% of it."""
    system = random_system(6, p=1, q=1, seed=2)
    result = truncate(system, size=size)
    assert 0.999 * float(result.hankel[size]) < error_norm(system, result.system, 20000) <= result.bound


def test_two_directions_need_twice_the_bound():
    """Each direction's error is below 2 sum sigma of the stacked outputs; at w the output adds one's at w and the
    other's at -w."""
    system = random_system(6, p=1, q=1, seed=0)
    both = dataclasses.replace(system, C=torch.stack([system.C, system.C.conj()]), lam=system.lam.real + 0j,
                               B=system.B.real + 0j)  # fmt: skip
    result = truncate(both, size=5)
    assert error_norm(both, result.system, 4000) <= result.bound
    assert result.bound == pytest.approx(4 * float(result.hankel[-1]), rel=1e-9)


@pytest.mark.parametrize("output", ["complex", "real", "twice_real"])
def test_full_size_and_no_share_leave_the_system_alone(output):
    system = random_system(output=output)
    for limit in ({"tau": 0.0}, {"size": N}):
        result = truncate(system, **limit)
        assert result.system is system
        assert (result.bound, result.refused) == (0.0, "")


def test_full_rank_round_trip():
    """Balanced and diagonal again without truncation: the same eigenvalues and impulse response."""
    system = random_system()
    lam, B, C = matrices(system)
    T, reduced = balance(*gramians(system)).transform(N)
    mu, B_d, C_d = diagonalise(reduced * lam @ T, reduced @ B, C @ T)
    assert (mu[:, None] - lam).abs().min(0).values.max() < 1e-10
    expected = impulse_response(lam, B, C, 50)
    assert (impulse_response(mu, B_d, C_d, 50) - expected).norm() < 1e-10 * expected.norm()  # cond(W)^2 roundings


@pytest.mark.parametrize("size", [3, 8])
def test_diagonal_again_is_the_truncated_system(size):
    system = random_system()
    lam, B, C = matrices(system)
    T, reduced = balance(*gramians(system)).transform(size)
    expected = impulse_response(reduced * lam @ T, reduced @ B, C @ T, 50)
    found = impulse_response(*matrices(truncate(system, size=size).system), 50)
    assert (found - expected).norm() < 1e-12 * expected.norm()


@pytest.mark.parametrize("seed", range(3))
def test_a_root_without_conjugation_is_worse(seed):
    """svd(Lo^T Lc), which the released code has for its Cholesky roots, misses the balanced directions."""
    system, r = random_system(32, p=2, q=2, r_min=0.9, r_max=0.99, seed=seed), 16
    lam, B, C = matrices(system)
    Lc, Lo = (torch.linalg.cholesky(gramian) for gramian in gramians(system))
    U, sigma, Vh = torch.linalg.svd(Lo.mT @ Lc)
    T, reduced = Lc @ Vh.mH[:, :r] / sigma[:r].sqrt(), U[:, :r].mH @ Lo.mT / sigma[:r].sqrt()[:, None]
    mu, B, C = diagonalise(reduced * lam @ T, reduced @ B, C @ T)
    assert error_norm(system, DiagonalSystem(mu, B, C, "complex")) > 1.5 * error_norm(
        system, truncate(system, size=r).system
    )


# --- Channels ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("directions", [1, 2])
def test_channels_are_truncated_one_by_one(directions):
    system = random_system(6, channels=4, output="twice_real", directions=directions, r_max=0.9)
    strong = system.B.clone()
    strong[2, 1:] *= 1e-4  # of the third channel one mode matters
    system = dataclasses.replace(system, B=strong)
    result = truncate(system, tau=0.05)
    sizes = [len(channel.lam) for channel in channels(result.system)]
    assert sizes[2] == 1 < max(sizes)
    assert result.system.lam.shape == (4, max(sizes))
    assert result.system.modes == sum(sizes)
    for tensor in (result.system.lam, result.system.B, *result.system.C.reshape(-1, *system.lam.shape[:1], max(sizes))):
        assert (tensor[~result.system.present] == 0).all()
    worst = 0.0
    for one, other in zip(channels(system), channels(result.system)):
        alone = truncate(one, tau=0.05)
        torch.testing.assert_close(alone.system.lam, other.lam)
        assert error_norm(one, other) <= alone.bound
        worst = max(worst, alone.bound)
    assert result.bound == worst


@pytest.mark.parametrize("directions", [1, 2])
def test_channels_and_back(directions):
    system = random_system(5, channels=3, directions=directions)
    again = stack_channels(channels(system))
    assert again.present is None
    for name in ("lam", "B", "C"):
        assert torch.equal(getattr(again, name), getattr(system, name))
    present = torch.tensor([[True, False, True, True, False], [True] * 5, [False, True, False, False, False]])
    ragged = stack_channels(channels(dataclasses.replace(system, present=present)))
    assert ragged.present.sum(1).tolist() == [3, 5, 1]
    assert torch.equal(ragged.lam[ragged.present], system.lam[present])
    assert torch.equal(ragged.C[..., ragged.present], system.C[..., present])


# --- Refusals ---------------------------------------------------------------------------------------------------------


def test_an_eigenvalue_at_the_circle_keeps_the_layer():
    """The strongest mode is one that training has driven to 1 - 5e-8: parameters of an LRU cannot hold it."""
    system = random_system()
    lam = system.lam.clone()
    lam[0] = 1 - 5e-8
    result = truncate(dataclasses.replace(system, lam=lam), size=6)
    assert "modulus below 1 - 1e-7" in result.refused
    assert result.system.modes == N
    assert result.bound == 0.0


def test_a_defective_matrix_is_refused():
    """Two equal eigenvalues with one eigenvector; 1e-14 apart, two that are next to parallel."""
    eye = torch.eye(2, dtype=torch.complex128)
    for apart in (0.0, 1e-14):
        A = torch.tensor([[0.5, 1.0], [0.0, 0.5 + apart]], dtype=torch.complex128)
        with pytest.raises(NotDiagonalisable, match=r"condition number must be at most 1e\+06"):
            diagonalise(A, eye, eye)
    with pytest.raises(NotDiagonalisable, match="NaN"):
        diagonalise(A * float("nan"), eye, eye)


def test_a_refused_channel_says_which(monkeypatch):
    system = random_system(6, channels=3)
    lam = system.lam.clone()
    lam[1, 0] = 1 - 5e-8
    result = truncate(dataclasses.replace(system, lam=lam), size=3)
    assert result.refused.startswith("channel 1: ")
    assert [len(channel.lam) for channel in channels(result.system)] == [3, 6, 3]
    monkeypatch.setattr(bt, "LARGEST_CONDITION", 1.0 - 1e-6)  # no matrix has less
    assert truncate(system, size=3).refused.count("condition number") == 3


def test_a_system_that_does_nothing():
    system = random_system(output="real")
    silent = dataclasses.replace(system, C=torch.zeros_like(system.C))
    result = truncate(silent, tau=0.1)
    assert result.system.modes == 1
    assert not result.system.C.any()
    assert truncate(dataclasses.replace(system, B=torch.zeros_like(system.B)), size=5).system.modes == 1


def test_rounding_is_not_kept():
    """Modes that no output shows have sigma = 0: a size that would keep them does not."""
    system = random_system(output="real")
    C = system.C.clone()
    C[:, 4:] = 0
    system = dataclasses.replace(system, C=C)
    result = truncate(system, size=9)
    assert result.system.modes == 4
    assert error_norm(system, result.system) < 1e-6 * float(frequency_response(system).abs().max())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "exactly one of tau and size"),
        ({"tau": 0.1, "size": 3}, "exactly one of tau and size"),
        ({"size": 0}, r"size must be an integer in \[1, 12\], got 0"),
        ({"size": 13}, r"size must be an integer in \[1, 12\], got 13"),
    ],
)
def test_bad_arguments(options, message):
    with pytest.raises(ValueError, match=message):
        truncate(random_system(), **options)


def test_no_modes():
    empty = random_system(n=0)
    assert truncate(empty, tau=0.1).system is empty


# --- Dense systems and scales -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "system",
    [random_system(directions=2), random_system(n=4, channels=3), random_system(n=4, channels=3, directions=2)],
    ids=["mimo", "channels", "bidirectional-channels"],
)
def test_equal_scales(system):
    lam, B, C = matrices(equalise(system))
    gamma = (1 - lam.abs() ** 2).sqrt()
    torch.testing.assert_close(B.norm(dim=-1) / gamma, C.norm(dim=-2), rtol=1e-12, atol=0)
    _, B_0, C_0 = matrices(system)
    products = [torch.einsum("...qn,...np->...nqp", *pair) for pair in ((C, B), (C_0, B_0))]
    torch.testing.assert_close(*products, rtol=1e-12, atol=1e-12)


# --- Models -----------------------------------------------------------------------------------------------------------


def test_a_model_shrinks_and_loads_again(tmp_path):
    model = RecurrentModel(RecurrentConfig(state_sizes=[10, 8]))
    u = torch.randn(2, 9, 4, generator=torch.Generator().manual_seed(0))
    before = model(u)["logits"]
    old = dict(model.named_parameters())
    report = balanced_truncate(model, sizes=[6, 8])
    new = dict(model.named_parameters())
    assert report.sizes == model.config.state_sizes == [6, 8]
    assert {name for name in new if new[name] is not old[name]} == {
        f"layers.0.{name}" for name in ("nu", "theta", "gamma", "B", "C")
    }
    assert {id(p) for pair in report.replaced for p in pair} == {
        id(names[f"layers.0.{name}"]) for names in (old, new) for name in ("nu", "theta", "gamma", "B", "C")
    }
    assert new["layers.0.nu"]._no_weight_decay
    assert not hasattr(new["layers.0.theta"], "_no_weight_decay")
    assert report.layers[1].bound == 0.0 < report.layers[0].bound
    assert "layers.0: 10 -> 6 modes" in str(report)
    logits = model(u)["logits"]
    assert 0 < (logits - before).abs().max() < 0.2 * before.abs().max()  # something was discarded, and little
    model.save_pretrained(tmp_path)
    again = RecurrentModel.from_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["state_sizes"] == [6, 8]
    assert torch.equal(again(u)["logits"], logits)


def test_what_is_written_is_the_reduced_system():
    """To the rounding of fp32 parameters, 1e-7 each, times 1 / (1 - |lam|) = 100."""
    model = RecurrentModel(RecurrentConfig(state_sizes=[10, 8]))
    systems = [layer.read() for layer in diagonal_layers(model)]
    report = balanced_truncate(model, tau=0.1)
    for layer, system, row in zip(diagonal_layers(model), systems, report.layers):
        expected = truncate(system, tau=0.1).system
        assert row.after == expected.modes < row.before
        a, b = (impulse_response(*matrices(s), 30).real for s in (layer.read(), expected))
        assert (a - b).norm() < 1e-4 * b.norm()


def test_a_reduction_that_is_too_small_is_none():
    """A layer at 8 of 10 modes has lost 0.2 of them, which is not more than 0.2."""
    for min_reduction, after in ((0.2, 10), (0.19, 8)):
        model = RecurrentModel(RecurrentConfig(state_sizes=[10, 10]))
        report = balanced_truncate(model, sizes=8, min_reduction=min_reduction)
        assert report.sizes == [after, after]
        assert (report.layers[0].bound > 0) == (after == 8)


def test_an_unstable_layer_is_kept():
    model = RecurrentModel(RecurrentConfig())
    layer = model.layers[0]
    lam, B, C, output = layer.lti()
    layer.lti = lambda: (lam * 2, B, C, output)
    report = balanced_truncate(model, sizes=4)
    assert report.sizes == [8, 4]
    assert "must be below 1" in report.layers[0].refused
    assert "(kept: " in str(report)


def test_a_layer_with_nan_is_kept():
    model = RecurrentModel(RecurrentConfig())
    with torch.no_grad():
        model.layers[1].B[0, 0, 0] = float("nan")
    report = balanced_truncate(model, sizes=4)
    assert report.sizes == [4, 8]
    assert report.layers[1].refused == "its modes hold NaN or infinite values"


def test_a_masked_layer_is_refused():
    """Its Parameters are not where `set_lti` puts them."""
    model = RecurrentModel(RecurrentConfig())
    torch.nn.utils.parametrize.register_parametrization(model.layers[0], "C", torch.nn.Identity())
    with pytest.raises(ValueError, match="remove its masks first"):
        balanced_truncate(model, sizes=4)


def test_bad_arguments_of_models():
    model = RecurrentModel(RecurrentConfig())
    with pytest.raises(ValueError, match="no layer with lti"):
        balanced_truncate(torch.nn.Linear(2, 2), tau=0.1)
    with pytest.raises(ValueError, match=r"sizes must be one number or 2, .* got \[4\]"):
        balanced_truncate(model, sizes=[4])
    with pytest.raises(ValueError, match=r"min_reduction must be in \[0, 1\), got 1"):
        balanced_truncate(model, tau=0.1, min_reduction=1)
    with pytest.raises(ValueError, match="exactly one of tau and size"):
        balanced_truncate(model)


def test_shapes_of_a_checkpoint():
    model = RecurrentModel(RecurrentConfig(state_sizes=[10, 8]))
    smaller = RecurrentModel(RecurrentConfig(state_sizes=[3, 8], seed=1))
    replaced = resize_states(model, [3, 8])
    assert len(replaced) == 5
    assert model.config.state_sizes == [3, 8]
    model.load_state_dict(smaller.state_dict())
    with pytest.raises(ValueError, match=r"sizes must be in \[0, 3\] for this layer, got 4"):
        resize_states(model, [4, 8])
    with pytest.raises(ValueError, match="sizes must be 2"):
        resize_states(model, [3])
