# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""The basis is exact: properties that a noisy eigendecomposition cannot have, and a 60-digit oracle."""

import mpmath
import numpy as np
import pytest

from modeling_essm.spectral_basis import max_spectral_channels, num_states, spectral_basis

LENGTHS = [1024, 1030, 65536]


def sign_changes(phi: np.ndarray) -> np.ndarray:
    return (np.sign(phi[1:]) * np.sign(phi[:-1]) < 0).sum(0)


def unroll(A: np.ndarray, phi0: np.ndarray, length: int) -> np.ndarray:
    """phi(0) A^tau for tau = 0..length-1, by doubling."""
    rows, power = phi0[None], A
    while len(rows) < length:
        rows, power = np.concatenate([rows, rows @ power]), power @ power
    return rows[:length]


@pytest.mark.parametrize("H", LENGTHS)
def test_filters_are_orthonormal_eigenvectors_that_oscillate(H):
    """Z is totally positive, so phi_k has exactly k-1 sign changes, and noise adds some. Signs are the format's."""
    basis = spectral_basis(H)
    phi = basis.filters(32)
    assert np.array_equal(sign_changes(phi), np.arange(32))
    assert np.array_equal(np.sign(phi[-1]), (-1.0) ** np.arange(32))
    assert (phi[0] > 0).all()  # follows from k-1 sign changes, where phi_k(0) is as small as 1e-8
    assert np.abs(phi.T @ phi - np.eye(32)).max() < 1e-11  # fp64 rounding over H terms
    # Z phi_k = sigma_k phi_k, Z applied as a convolution so that H = 65536 needs no H x H matrix. fp64 products of Z
    # carry an absolute error near 1e-16, so only channels with sigma_k well above it can be checked in relative terms.
    s = np.arange(2, 2 * H + 1, dtype=np.float64)
    kernel = 2.0 / ((s - 1) * s * (s + 1))
    n = 1 << (3 * H).bit_length()
    for k in range(8):
        product = np.fft.irfft(np.fft.rfft(kernel, n) * np.fft.rfft(phi[::-1, k], n), n)[H - 1 : 2 * H - 1]
        error = np.linalg.norm(product - basis.sigma[k] * phi[:, k]) / basis.sigma[k]
        assert error < 1e-14 / basis.sigma[k], k


@pytest.mark.parametrize("H", [16, 32])
def test_against_60_digits(H):
    with mpmath.workdps(60):
        Z = mpmath.matrix(H, H)
        for i in range(H):
            for j in range(H):
                Z[i, j] = mpmath.mpf(2) / ((i + j + 2) ** 3 - (i + j + 2))
        values, vectors = mpmath.eigsy(Z)
        order = sorted(range(H), key=lambda i: -values[i])
        K = max_spectral_channels(H)
        sigma = np.array([float(values[i]) for i in order[:K]])
        phi = np.array([[float(vectors[r, i]) for i in order[:K]] for r in range(H)])
    phi *= np.sign(phi[-1]) * (-1.0) ** np.arange(K)
    basis = spectral_basis(H)
    # The served channels are those whose fp64 error estimate is below 1e-5; the error itself is below a tenth of it.
    assert np.abs(basis.filters(K) - phi).max() < 1e-6
    assert np.abs(basis.sigma[:K] / sigma - 1).max() < 1e-6
    assert np.abs(basis.filters(8) - phi[:, :8]).max() < 1e-12


@pytest.mark.parametrize(
    ("H", "capacity"), [(1, 1), (2, 2), (16, 15), (64, 22), (107, 25), (512, 32), (1024, 35), (4096, 41)]
)
def test_capacity_is_what_fp64_resolves(H, capacity):
    """And all states together are stable, also at 107, where noise would make the last one grow."""
    assert max_spectral_channels(H) == capacity
    basis = spectral_basis(H)
    assert np.array_equal(sign_changes(basis.filters(capacity)), np.arange(capacity))
    assert np.abs(np.linalg.eigvals(basis.A)).max() < 1.0


@pytest.mark.parametrize("H", [512, 4096, 65536])
def test_prefix_of_A_reproduces_the_filters(H):
    basis = spectral_basis(H)
    for K in (2, 8, 32):
        N = min(num_states(K, 16), len(basis.sigma))
        A, phi = basis.A[:N, :N], basis.filters(N)
        error = np.linalg.norm(unroll(A, phi[0], H)[:, :K] - phi[:, :K], axis=0)
        assert error.max() < 4e-6, f"K = {K}: relative l2 error {error.max():.1e}"
        assert np.abs(np.linalg.eigvals(A)).max() < 1.0


def test_longest_filter_length():
    basis = spectral_basis(2**20)
    lags = np.unique(np.geomspace(1, 2**20 - 1, 4000).astype(int))
    phi = basis.filters(32, lags)
    assert (sign_changes(phi) <= np.arange(32)).all()  # a subset of the samples cannot show more
    row = basis.filters(48, np.array([500_000])) @ basis.A[:48, :48]
    np.testing.assert_allclose(row[0, :32], basis.filters(32, np.array([500_001]))[0], rtol=0, atol=1e-8)


def test_one_read_only_object_of_a_legal_length():
    basis = spectral_basis(1024)
    assert spectral_basis(1024) is basis
    with pytest.raises(ValueError, match="read-only"):
        basis.A[0, 0] = 1.0
    for H in (0, -1, 2**24 + 1, 512.0, True, None):
        with pytest.raises(ValueError, match=r"filter_length must be an integer in \[1, 16777216\], got"):
            spectral_basis(H)
