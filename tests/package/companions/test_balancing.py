# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Hankel singular values against the block Hankel matrix, errors against bounds, and what models become."""

import dataclasses
import json

import pytest
import torch
from companion_layers import Recurrence
from recurrences import error_norm, impulse_response, random_system, regression

from modeling_essm.companions import (
    DiagonalSSMConfig,
    DiagonalSSMForSequenceClassification,
    DiagonalSSMModel,
    allocate,
    describe,
    hinf_norm,
    importance,
    prune,
    restore,
)
from modeling_essm.companions.systems import diagonal_layers
from modeling_essm.companions.truncation.balancing import (
    NotDiagonalisable,
    channels,
    diagonalise,
    equalise,
    gramians,
    hankel_singular_values,
    matrices,
    rank_by_discarded,
    truncate,
)
from modeling_essm.companions.truncation.models import balanced_truncate, resize_states

N = 12
SYSTEMS = {
    "mimo": random_system(N),
    "bidirectional": random_system(N, directions=2),
    "channels": random_system(n=5, channels=3),
    "bidirectional-channels": random_system(n=5, channels=3, directions=2),
}
systems = pytest.mark.parametrize("system", SYSTEMS.values(), ids=SYSTEMS)


def test_singular_values_are_those_of_the_block_hankel_matrix():
    """A block is C lam^(i + j) B, the outputs of both directions stacked. 100 lags leave 0.8^100 = 2e-10 of the last
    block out, which is second order in sigma; the square roots of eigenvalues add 1e-8 sigma_1."""
    system, lags = random_system(N, directions=2, r_max=0.8), 100
    response = impulse_response(*matrices(system), 2 * lags)
    at = torch.arange(lags)
    blocks = response[at[:, None] + at]  # (lags, lags, q, p)
    expected = torch.linalg.svdvals(blocks.transpose(1, 2).flatten(2).flatten(0, 1))[:12]
    sigma = hankel_singular_values(system)
    assert (sigma - expected).abs().max() < 1e-7 * sigma[0]


def test_padding_counts_as_nothing():
    """Whatever is stored there: also modes outside the unit circle."""
    system = SYSTEMS["channels"]
    present = torch.ones(3, 5, dtype=torch.bool)
    present[1, 2:] = False
    lam = torch.where(present, system.lam, 2.0)
    sigma = hankel_singular_values(dataclasses.replace(system, lam=lam, present=present))
    alone = dataclasses.replace(system, lam=system.lam[1:2, :2], B=system.B[1:2, :2], C=system.C[1:2, :2])
    torch.testing.assert_close(sigma[1, :2], hankel_singular_values(alone)[0], rtol=1e-9, atol=0)
    assert (sigma[1, 2:] == 0).all()
    assert (sigma[[0, 2]] > 0).all()


def test_scales_of_modes_do_not_matter():
    """b_i s_i and c_i / s_i are one system. Without the scaling in `balance`, 1e6 would cost the last half of them."""
    system = SYSTEMS["mimo"]
    scale = 10.0 ** torch.linspace(-6, 6, 12, dtype=torch.float64)
    other = dataclasses.replace(system, B=system.B * scale[:, None], C=system.C / scale)
    torch.testing.assert_close(hankel_singular_values(other), hankel_singular_values(system), rtol=1e-9, atol=0)


def test_a_mode_that_is_not_stable_has_no_gramian():
    for modulus in (1.0, float("nan")):
        lam = SYSTEMS["mimo"].lam.clone()
        lam[3] = modulus
        with pytest.raises(ValueError, match="must be below 1, got"):
            gramians(dataclasses.replace(SYSTEMS["mimo"], lam=lam))


# --- Rank -------------------------------------------------------------------------------------------------------------


def test_rank_by_discarded_share():
    """Shares of sums, not of squares: those of (.9, .3, .2, .1)^2 would give 2 at tau = 0.1. Rounding keeps all."""
    sigma = torch.tensor([4.01, 2.99, 2.01, 0.99])
    assert [rank_by_discarded(sigma, tau) for tau in (0.0, 0.05, 0.101, 0.59, 0.601, 0.999)] == [4, 4, 3, 2, 1, 1]
    assert [rank_by_discarded(torch.tensor([4.0, 3.0, 2.0, 1.0]), tau) for tau in (0.1, 0.3)] == [3, 2]
    assert rank_by_discarded(torch.full((1000,), 1e-3), 1e-9) == 1000


# --- Errors and bounds ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("output", "directions"), [("complex", 1), ("real", 2), ("twice_real", 1), ("twice_real", 2)])
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


def test_full_size_and_no_share_leave_the_system_alone():
    system, empty = random_system(N), random_system(n=0)
    assert truncate(empty, tau=0.1).system is empty
    for limit in ({"tau": 0.0}, {"size": N}):
        result = truncate(system, **limit)
        assert result.system is system and (result.bound, result.refused) == (0.0, "")


# --- Channels ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("directions", [1, 2])
def test_channels_are_truncated_one_by_one(directions):
    system = random_system(6, channels=4, output="twice_real", directions=directions, r_max=0.9)
    strong = system.B.clone()
    strong[2, 1:] *= 1e-4  # of the third channel one mode matters
    system = dataclasses.replace(system, B=strong)
    result = truncate(system, tau=0.05)
    torch.testing.assert_close(hankel_singular_values(system), result.hankel, rtol=0, atol=1e-8)
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


# --- Refusals ---------------------------------------------------------------------------------------------------------


def test_an_eigenvalue_at_the_circle_keeps_the_layer():
    """The strongest mode is one that training has driven to 1 - 5e-8: parameters of an LRU cannot hold it."""
    system = random_system(N)
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


def test_a_system_that_does_nothing():
    system = random_system(N, output="real")
    for name in ("B", "C"):
        silent = dataclasses.replace(system, **{name: torch.zeros_like(getattr(system, name))})
        for limit in ({"tau": 0.1}, {"size": 5}):
            result = truncate(silent, **limit).system
            assert result.modes == 1 and not result.C.any()


def test_rounding_is_not_kept():
    """Modes that no output shows have sigma = 0: a size that would keep them does not."""
    system = random_system(N, output="real")
    C = system.C.clone()
    C[:, 4:] = 0
    system = dataclasses.replace(system, C=C)
    result = truncate(system, size=9)
    assert result.system.modes == 4
    assert error_norm(system, result.system) < 1e-6 * hinf_norm(system)


def test_bad_arguments():
    for options, message in [
        ({}, "exactly one of tau and size"),
        ({"tau": 0.1, "size": 3}, "exactly one of tau and size"),
        ({"size": 13}, r"size must be an integer in \[1, 12\], got 13"),
    ]:
        with pytest.raises(ValueError, match=message):
            truncate(random_system(N), **options)
    with pytest.raises(ValueError, match=r"needs layers with lti\(\) and set_lti\(\), Linear has none"):
        balanced_truncate(torch.nn.Linear(2, 2), tau=0.1)
    model = regression(8, 8)
    for options, message in [
        ({"sizes": [4]}, r"sizes must be one number or 2, .* got \[4\]"),
        ({"sizes": 2.5}, "sizes must be one integer or a list of integers, got 2.5"),
        ({"tau": 0.1, "min_reduction": 1}, r"min_reduction must be in \[0, 1\), got 1"),
    ]:
        with pytest.raises(ValueError, match=message):
            balanced_truncate(model, **options)


def test_layers_that_cannot_be_written_are_refused_before_any_is():
    model = DiagonalSSMModel(DiagonalSSMConfig(state_size=4, num_hidden_layers=2))
    before = [*model.parameters()]
    model.last = Recurrence(random_system())
    assert [layer.tools[1:2] for layer in describe(model).layers] == [("balanced_truncate",)] * 2 + [()]
    with pytest.raises(ValueError, match=r"last: balanced truncation needs RecurrenceAdapter\.write"):
        balanced_truncate(model, sizes=2)
    del model.last
    prune(model, allocate(importance(model), amount=0.5))
    with pytest.raises(ValueError, match=r"layers\.0\.mixer has parametrized tensors: remove its masks"):
        balanced_truncate(model, sizes=2)
    with pytest.raises(ValueError, match=r"layers\.0\.mixer has parametrized tensors: remove its masks"):
        resize_states(model, [2, 2])
    restore(model)
    assert all(a is b for a, b in zip(before, model.parameters(), strict=True))


@systems
def test_equal_scales(system):
    lam, B, C = matrices(equalise(system))
    gamma = (1 - lam.abs() ** 2).sqrt()
    torch.testing.assert_close(B.norm(dim=-1) / gamma, C.norm(dim=-2), rtol=1e-12, atol=0)
    _, B_0, C_0 = matrices(system)
    products = [torch.einsum("...qn,...np->...nqp", *pair) for pair in ((C, B), (C_0, B_0))]
    torch.testing.assert_close(*products, rtol=1e-12, atol=1e-12)


# --- Models -----------------------------------------------------------------------------------------------------------


def test_a_model_shrinks_and_loads_again(tmp_path):
    model = regression(10, 8)
    x = torch.randn(2, 9, 4, generator=torch.Generator().manual_seed(0))
    before = model(input_features=x).logits
    old = dict(model.named_parameters())
    model.mixers[0].C.note = "mine"
    report = balanced_truncate(model, sizes=[6, 8])
    new = dict(model.named_parameters())
    assert report.sizes == model.config.state_sizes == [6, 8]
    rewritten = {name for name in new if new[name] is not old[name]}
    first = "model.layers.0.mixer"
    assert rewritten == {f"{first}.{name}" for name in ("nu_log", "theta_log", "gamma_log", "B", "C")}
    assert {id(p) for pair in report.replaced for p in pair} == {id(p[name]) for p in (old, new) for name in rewritten}
    assert new[f"{first}.C"].note == "mine" and not hasattr(new[f"{first}.B"], "note")
    assert report.layers[1].bound == 0.0 < report.layers[0].bound
    assert f"{first}: 10 -> 6 modes" in str(report)
    logits = model(input_features=x).logits
    assert 0 < (logits - before).abs().max() < 0.2 * before.abs().max()  # something was discarded, and little
    model.save_pretrained(tmp_path)
    again = DiagonalSSMForSequenceClassification.from_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["state_sizes"] == [6, 8]
    assert torch.equal(again(input_features=x).logits, logits)


def test_what_is_written_is_the_reduced_system():
    """To the rounding of fp32 parameters, 1e-7 each, times 1 / (1 - |lam|) = 100."""
    model = regression(10, 8)
    systems = [layer.read() for layer in diagonal_layers(model)]
    with pytest.raises(ValueError, match="exactly one of tau and sizes, got tau=None, sizes=None"):
        balanced_truncate(model)
    report = balanced_truncate(model, tau=0.1)
    for layer, system, row in zip(diagonal_layers(model), systems, report.layers):
        expected = truncate(system, tau=0.1).system
        assert row.after == expected.modes < row.before
        a, b = (impulse_response(*matrices(s), 30).real for s in (layer.read(), expected))
        assert (a - b).norm() < 1e-4 * b.norm()


def test_layers_that_are_kept():
    """Unstable ones, ones with NaN, and those that would lose no more than `min_reduction`."""
    model = regression(8, 10, 8)
    lam, *others = model.mixers[0].lti()
    model.mixers[0].lti = lambda: (lam * 2, *others)
    with torch.no_grad():
        model.mixers[2].B[0, 0, 0] = float("nan")
    assert balanced_truncate(model, sizes=8, min_reduction=0.2).sizes == [8, 10, 8]
    report = balanced_truncate(model, sizes=8, min_reduction=0.19)
    assert report.sizes == [8, 8, 8] and report.layers[1].bound > 0
    assert report.layers[2].refused == "its modes hold NaN or infinite values"
    assert "must be below 1" in report.layers[0].refused
    assert "(kept: " in str(report)


def test_shapes_of_a_checkpoint():
    model = regression(10, 8)
    smaller = regression(3, 8, seed=1)
    replaced = resize_states(model, [3, 8])
    assert len(replaced) == 5
    assert model.config.state_sizes == [3, 8]
    with pytest.raises(ValueError, match=r"sizes must be in \[0, 3\], got 4"):
        resize_states(model, [4, 2])
    assert model.config.state_sizes == [3, 8]
    model.load_state_dict(smaller.state_dict())
