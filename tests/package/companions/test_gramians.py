# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""gramians.py: against the equations they solve, and Hankel singular values against the block Hankel matrix."""

import dataclasses

import pytest
import torch
from recurrences import impulse_response, random_system

from modeling_essm.companions.truncation.balancing import balance, gramians, hankel_singular_values, matrices

SYSTEMS = {
    "mimo": random_system(),
    "bidirectional": random_system(directions=2),
    "channels": random_system(n=5, channels=3),
    "bidirectional-channels": random_system(n=5, channels=3, directions=2),
}
systems = pytest.mark.parametrize("system", SYSTEMS.values(), ids=SYSTEMS)
# A closed form has a few roundings of 1e-16 each, times 1 / (1 - 0.95^2) = 10.
RESIDUAL = 1e-13


def residuals(lam, B, C, P, Q):
    """Of both Lyapunov equations, relative to their solutions."""
    A = torch.diag_embed(lam)
    of_P, of_Q = P - A @ P @ A.mH - B @ B.mH, Q - A.mH @ Q @ A - C.mH @ C
    return float(of_P.norm() / P.norm()), float(of_Q.norm() / Q.norm())


@systems
def test_gramians_solve_the_lyapunov_equations(system):
    assert max(residuals(*matrices(system), *gramians(system))) < RESIDUAL


def test_without_conjugations_they_do_not():
    """Eq. 14 as the paper prints it: a_i a_j, and C C^T where C^H C belongs."""
    lam, B, C = matrices(SYSTEMS["mimo"])
    plain = 1 / (1 - lam[:, None] * lam)
    P, Q = (B @ B.mH) * plain, (C.mT @ C) * plain
    assert min(residuals(lam, B, C, P, Q)) > 0.1
    assert (P - P.mH).norm() > 0.1 * P.norm()


@pytest.mark.parametrize("name", ["mimo", "bidirectional"])
def test_singular_values_are_those_of_the_block_hankel_matrix(name):
    """A block is C lam^(i + j) B, the outputs of both directions stacked. 300 lags leave 0.95^300 = 2e-7 of the last
    block out, which is second order in sigma; the square roots of eigenvalues add 1e-8 sigma_1."""
    system, lags = SYSTEMS[name], 300
    response = impulse_response(*matrices(system), 2 * lags)
    at = torch.arange(lags)
    blocks = response[at[:, None] + at]  # (lags, lags, q, p)
    expected = torch.linalg.svdvals(blocks.transpose(1, 2).flatten(2).flatten(0, 1))[:12]
    sigma = hankel_singular_values(system)
    assert (sigma - expected).abs().max() < 1e-7 * sigma[0]


@pytest.mark.parametrize("directions", [1, 2])
def test_channels_have_their_own(directions):
    system = SYSTEMS["channels" if directions == 1 else "bidirectional-channels"]
    sigma = hankel_singular_values(system)
    assert sigma.shape == (3, 5)
    for h in range(3):
        one = dataclasses.replace(
            system, lam=system.lam[h], B=system.B[h, :, None], C=system.C[..., h, :].unsqueeze(-2)
        )
        torch.testing.assert_close(sigma[h], hankel_singular_values(one), rtol=0, atol=1e-7 * float(sigma[h, 0]))


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


def test_padding_of_many_inputs():
    system = SYSTEMS["mimo"]
    present = torch.arange(12) < 7
    padded = hankel_singular_values(dataclasses.replace(system, present=present))
    cut = dataclasses.replace(system, lam=system.lam[:7], B=system.B[:7], C=system.C[:, :7])
    torch.testing.assert_close(padded[:7], hankel_singular_values(cut), rtol=1e-9, atol=0)


def test_scales_of_modes_do_not_matter():
    """b_i s_i and c_i / s_i are one system. Without the scaling in `balance`, 1e6 would cost the last half of them."""
    system = SYSTEMS["mimo"]
    scale = 10.0 ** torch.linspace(-6, 6, 12, dtype=torch.float64)
    other = dataclasses.replace(system, B=system.B * scale[:, None], C=system.C / scale)
    torch.testing.assert_close(hankel_singular_values(other), hankel_singular_values(system), rtol=1e-9, atol=0)


@systems
def test_balancing(system):
    """T^+ T = I, and in the new coordinates both Gramians are diag(sigma)."""
    P, Q = gramians(system)
    balancing = balance(P, Q)
    n = system.lam.shape[-1]
    T, reduced = balancing.transform(n)
    sigma = torch.diag_embed(balancing.sigma).to(torch.complex128)
    for found, expected in (
        (reduced @ T, torch.eye(n, dtype=torch.complex128)),
        (reduced @ P @ reduced.mH / balancing.sigma[..., :1, None], sigma / balancing.sigma[..., :1, None]),
        (T.mH @ Q @ T / balancing.sigma[..., :1, None], sigma / balancing.sigma[..., :1, None]),
    ):
        # Coordinates of a sigma of s sigma_1 are known to 1e-16 / s; here s > 1e-4.
        assert (found - expected).abs().max() < 1e-9


def test_rank_leaves_rounding_out():
    """Two modes at one place that read and show the same are one."""
    system = random_system(n=2, p=1, q=1)
    twice = [system.lam[:1].repeat(2), system.B[:1].repeat(2, 1), system.C[:, :1].repeat(1, 2)]
    system = dataclasses.replace(system, lam=twice[0], B=twice[1], C=twice[2])
    balancing = balance(*gramians(system))
    assert int(balancing.rank) == 1
    with pytest.raises(ValueError, match=r"order must be an integer in \[1, 1\], got 2"):
        balancing.transform(2)


@pytest.mark.parametrize("modulus", [1.0, 1.5, float("nan")])
def test_a_mode_that_is_not_stable_has_no_gramian(modulus):
    system = SYSTEMS["mimo"]
    lam = system.lam.clone()
    lam[3] = modulus
    bad = dataclasses.replace(system, lam=lam)
    with pytest.raises(ValueError, match="must be below 1, got"):
        gramians(bad)
