# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Every view of the recurrence against its definition: states, outputs, gradients, odd lengths, initial states."""

import numpy as np
import pytest
import torch

from modeling_essm.companions.models import scan_diagonal as scans

lengths = pytest.mark.parametrize("L", [1, 16, 17, 259], ids=lambda L: f"L{L}")  # the last in three levels of chunks


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
    """Values and gradients to 1e-11: sums of at most 259 terms of size 10, in fp64, differ by less than 1e-12."""
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-11)

    def loss(outputs):
        return sum((complexes(*y.shape, seed=7).conj() * y).real.sum() for y in outputs)

    grads = [torch.autograd.grad(loss(outputs), leaves) for outputs in (actual, expected)]
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-9)  # of lam up to L times the outputs


@lengths
def test_the_parallel_scan(L, n=3):
    for start in ([], [complexes(2, n)]):
        leaves = [leaf.requires_grad_() for leaf in (eigenvalues(n), complexes(2, L, n), *start)]
        compare([scans.parallel_scan(*leaves)], [scans.naive_scan(*leaves)], leaves)


@lengths
def test_channels(L):
    """Outputs, last states, and gradients through both."""
    H, n = 3, 2
    for start in ([], [complexes(2, H, n)]):
        u = numbers(2, L, H)[..., 0].clone()
        leaves = [eigenvalues(H, n), complexes(H, n), complexes(H, n, seed=3), u, *start]
        leaves = [leaf.requires_grad_() for leaf in leaves]
        compare(scans.fft_of_channels(*leaves), scans.naive_of_channels(*leaves), leaves)


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
