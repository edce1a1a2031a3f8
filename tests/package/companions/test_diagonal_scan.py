# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Every view of the recurrence against its definition: states, outputs, gradients, odd lengths, initial states."""

import numpy as np
import pytest
import torch

from modeling_essm.companions.diagonal_ssm import diagonal_scan as scans

LENGTHS = (1, 2, 3, 15, 16, 17, 70)
lengths = pytest.mark.parametrize("L", LENGTHS, ids=lambda L: f"L{L}")
initial = pytest.mark.parametrize("has_state", [False, True], ids=["zero", "state"])


def numbers(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, 2, generator=generator, dtype=torch.float64).view(*shape, 2)


def complexes(*shape, seed=0):
    return torch.view_as_complex(numbers(*shape, seed=seed)).clone()


def eigenvalues(*shape):
    """Moduli from 0.6 to 0.999, phases all around."""
    u = torch.rand(*shape, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return torch.polar(0.6 + 0.399 * u[..., 0], 6.28 * u[..., 1])


def compare(actual, expected, leaves):
    """Values and gradients to 1e-11: sums of at most 70 terms of size 10, in fp64, differ by less than 1e-12."""
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-11)

    def loss(outputs):
        return sum((complexes(*y.shape, seed=7).conj() * y).real.sum() for y in outputs)

    grads = [torch.autograd.grad(loss(outputs), leaves) for outputs in (actual, expected)]
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-9)  # of lam up to L times the outputs


@lengths
@initial
def test_the_definition_is_a_sum_of_powers(L, has_state):
    lam, v, x0 = (x.numpy() for x in (eigenvalues(3), complexes(2, L, 3), complexes(2, 3)))
    expected = np.zeros((2, L, 3), dtype=complex)
    for t in range(L):
        expected[:, t] = sum(lam ** (t - j) * v[:, j] for j in range(t + 1)) + has_state * lam ** (t + 1) * x0
    states = scans.naive_scan(*map(torch.from_numpy, (lam, v)), torch.from_numpy(x0) if has_state else None)
    np.testing.assert_allclose(states.numpy(), expected, rtol=0, atol=1e-12)


@lengths
@initial
@pytest.mark.parametrize("M", [(3,), (2, 2)], ids=["modes", "channels"])
@pytest.mark.parametrize(
    "scan",
    [scans.parallel_scan, lambda *x: scans.parallel_scan(*x, chunk=2), scans.fft_scan],
    ids=["parallel", "many-levels", "fft"],
)
def test_scans(scan, M, L, has_state):
    leaves = [eigenvalues(*M), complexes(2, L, *M), *([complexes(2, *M)] if has_state else [])]
    leaves = [leaf.requires_grad_() for leaf in leaves]
    compare([scan(*leaves)], [scans.naive_scan(*leaves)], leaves)


@lengths
@initial
@pytest.mark.parametrize(
    "scan",
    [scans.siso_parallel, lambda *x: scans.siso_parallel(*x, chunk=4), scans.siso_fft],
    ids=["parallel", "short-chunks", "fft"],
)
def test_scans_of_channels(scan, L, has_state):
    """Outputs, last states, and gradients through both."""
    H, n = 3, 2
    u = numbers(2, L, H)[..., 0].clone()
    leaves = [eigenvalues(H, n), complexes(H, n), complexes(H, n, seed=3), u]
    leaves = [leaf.requires_grad_() for leaf in [*leaves, *([complexes(2, H, n)] if has_state else [])]]
    compare(scan(*leaves), scans.siso_naive(*leaves), leaves)


def test_channels_are_modes_that_read_and_are_read_alone():
    lam, B, C, u = eigenvalues(3, 2), complexes(3, 2), complexes(3, 2, seed=3), numbers(2, 9, 3)[..., 0]
    y, last = scans.siso_naive(lam, B, C, u)
    for h in range(3):
        x = scans.naive_scan(lam[h], u[:, :, h, None] * B[h])
        torch.testing.assert_close(y[:, :, h], (x @ C[h]).real, rtol=0, atol=1e-13)
        torch.testing.assert_close(last[:, h], x[:, -1], rtol=0, atol=1e-13)


@pytest.mark.parametrize("name", ["parallel", "fft"])
def test_fp32_over_a_thousand_steps(name):
    """lam^L is off by about L rounding errors of 6e-8, and so is any state, relative to the largest."""
    lam, v = torch.polar(torch.full((3,), 0.999), torch.tensor([0.0, 0.1, 3.0])), complexes(1, 1000, 3)
    expected = scans.naive_scan(lam.to(torch.complex128), v)
    states = scans.SCANS[name](lam, v.to(torch.complex64))
    assert states.dtype == torch.complex64
    assert (states - expected).abs().max() < 1000 * 6e-8 * expected.abs().max()


def test_powers():
    lam = torch.tensor([0.5 + 0.5j, 0.0, -0.9], dtype=torch.complex128, requires_grad=True)
    powers = scans.powers_of(lam, 11)
    expected = np.stack([lam.detach().numpy() ** k for k in range(11)])
    np.testing.assert_allclose(powers.detach().numpy(), expected, rtol=0, atol=1e-15)
    (grad,) = torch.autograd.grad(powers.real.sum(), lam)
    assert grad[1] == 1.0 and torch.view_as_real(grad).isfinite().all()  # only lam^1 moves at zero
    exponents = torch.tensor([0, 1, 6, 10])
    rows = scans.power_of_rows(lam.detach(), exponents)
    np.testing.assert_allclose(rows.numpy(), expected[exponents], rtol=0, atol=1e-15)


def test_choice():
    assert [scans.choose("auto", L, siso=False) for L in (1, 8, 9)] == ["naive", "naive", "parallel"]
    assert [scans.choose("auto", L, siso=True) for L in (1, 2, 3)] == ["naive", "naive", "fft"]
    assert scans.choose("fft", 1, siso=False) == "fft"
    with pytest.raises(ValueError, match=r"algorithm must be one of .*'fft'\), got 'quick'"):
        scans.choose("quick", 4, siso=True)
