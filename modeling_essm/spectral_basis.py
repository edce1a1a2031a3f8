# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""The ordered spectral basis of ES-SSM and the fixed linear recurrence that its filters obey.

phi_k, sigma_k are the eigenpairs, descending, of the Hankel matrix Z_ij = 2 / ((i+j)^3 - (i+j)), i, j = 1..H (Eq. 4).
Z itself is numerically hopeless (sigma_32 is 1e-17 of sigma_1), so it is never formed: Eq. (4) is an integral over
beta in [0, 1], its quadrature factors Z = F F^T, and the SVD of F holds sqrt(sigma) and the filters, filter k to about
eps * sqrt(sigma_1 / sigma_k).
The filters obey phi(tau+1) = phi(tau) A with one N x N matrix, so the features f(t) = (phi * u)(t) are their own state:

    f(t) = A^T f(t-1) + phi(0)^T u(t)                                                                               (R)

Letters: H filter length, K spectral channels, N >= K states, C chunk length, tau lag. Everything here is NumPy fp64:
independent of torch's default device, dtype, inference and tracing modes, and a pure function of its arguments.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import numpy as np

_EXACT_ROWS = 64  # lags kept one by one; longer lags are compressed, one block per octave
_BLOCK_NODES = 24  # Gauss nodes per octave of lags: exact for sums of polynomials up to degree 47
_PANEL_NODES = 16  # Gauss-Legendre nodes per octave of s = 1 - beta
_MAX_CHANNELS, _MAX_STATES = 64, 96
_RESOLUTION = 1e-5  # largest eps * sqrt(sigma_1 / sigma_k) served; the measured filter error is below a tenth of it

# Lags start..stop-1 and the rows of the compressed filter table that stand for them, block by block.
_Blocks = tuple[tuple[int, int, slice], ...]


@dataclass(frozen=True, eq=False)
class SpectralBasis:
    """The leading eigenpairs of the Hankel matrix and their transition matrix, fp64, read-only.

    Attributes:
        filter_length: H.
        sigma: (N,) eigenvalues of Z, descending.
        A: (N, N) transition matrix, phi(tau+1) = phi(tau) A. Its leading block is the transition matrix of the
            leading filters (a balanced truncation), so a smaller model uses a prefix of it.
        num_resolved: how many leading filters fp64 resolves at this H.
    """

    filter_length: int
    sigma: np.ndarray
    A: np.ndarray
    num_resolved: int
    _table: np.ndarray
    _lags: np.ndarray
    _blocks: _Blocks

    def filters(self, num_channels: int, lags: np.ndarray | None = None) -> np.ndarray:
        """phi_k(tau) for the first filters; signs as in `spectral_basis`.

        Args:
            num_channels: K, at most N.
            lags: (T,) lags in [0, H-1]; any real number from 63 on, integers below. Default: 0..H-1.
        Returns:
            (T, K) fp64 weights; the columns over all lags are orthonormal.
        """
        lags = np.arange(self.filter_length, dtype=np.float64) if lags is None else np.asarray(lags, np.float64)
        out = np.empty((len(lags), num_channels))
        exact = lags <= min(_EXACT_ROWS, self.filter_length) - 1
        out[exact] = self._table[lags[exact].astype(int), :num_channels]
        for start, stop, rows in self._blocks:
            inside = ~exact & (lags > start - 1) & (lags <= stop - 1)
            out[inside] = _lagrange(self._lags[rows], lags[inside]) @ self._table[rows, :num_channels]
        return out


@dataclass(frozen=True, eq=False)
class ChunkOperators:
    """(R) for N states, unrolled over a chunk of C steps, fp64.

    With x the (N, D) state before the chunk and u its (C, D) inputs, f(i) = readout[i] @ [u; x] for i = 0..C-1,
    where readout[i, n] = (phi_n(i), .., phi_n(0), 0, .., 0 | column n of A^{i+1}).

    Attributes:
        readout: (C, N, C + N).
        carry_powers: (24, N, N); carry = (A^C)^T moves a state over a chunk, entry j is carry^(2^j).
    """

    readout: np.ndarray
    carry_powers: np.ndarray


def num_states(num_channels: int, state_margin: int) -> int:
    """States N that hold K filters: K plus a margin that small budgets need less of.

    A margin of min(16, 2K + 4) reproduces all K filters to 4e-6 relative l2 at every H from 64 to 2^20 (tested).
    """
    return num_channels + min(state_margin, 2 * num_channels + 4)


def max_spectral_channels(filter_length: int) -> int:
    """The largest capacity K that fp64 resolves at this filter length (at most 64): 22 at H = 64, 32 from H = 512."""
    return spectral_basis(filter_length).num_resolved


@functools.lru_cache(maxsize=16)
def spectral_basis(filter_length: int) -> SpectralBasis:
    """Build (once per process) the basis of filter length H with as many states as are ever used.

    Signs are part of the checkpoint format, since M_k multiplies phi_k: the LAST sample of phi_k has the sign of
    (-1)^(k-1). Z is totally positive, so phi_k has exactly k-1 sign changes and its first samples are then positive.

    Args:
        filter_length: H >= 1, an int.
    Returns:
        SpectralBasis with at most 96 states, fewer where fp64 resolves fewer.
    Raises:
        ValueError: filter_length is not an integer in [1, 2^24].
    """
    if not isinstance(filter_length, int) or isinstance(filter_length, bool) or not 1 <= filter_length <= 2**24:
        raise ValueError(f"filter_length must be an integer in [1, {2**24}], got {filter_length!r}")
    s, s_weights = _panel_nodes(filter_length)
    lags, lag_weights, blocks = _lag_nodes(filter_length)

    # F[i, n] = sqrt(w_n) (1 - beta_n) beta_n^i with beta = 1 - s; log1p(-s) keeps beta exact near 1.
    def F(tau: np.ndarray) -> np.ndarray:
        return np.exp(tau[:, None] * np.log1p(-s)) * (np.sqrt(s_weights) * s)

    # The rows of F fall by orders of magnitude, and a Householder SVD keeps the small entries of U accurate relative
    # to their rows. That is why the filters are read from U and not, through division by sqrt(sigma), from V.
    U, S, Vh = np.linalg.svd(np.sqrt(lag_weights)[:, None] * F(lags), full_matrices=False)
    error = np.finfo(np.float64).eps * S[0] / np.maximum(S, np.finfo(np.float64).tiny)
    num_resolved = min(int(np.count_nonzero(error <= _RESOLUTION)), _MAX_CHANNELS)
    N = min(int(np.count_nonzero(error <= 1.0)), _MAX_STATES)  # the rest is noise even as a margin
    U, S, V = U[:, :N], S[:N], Vh[:N].T
    signs = np.sign(U[-1]) * (-1.0) ** np.arange(N)
    table = U * signs / np.sqrt(lag_weights)[:, None]
    noisy = SpectralBasis(filter_length, S**2, np.empty((N, N)), num_resolved, table, lags, blocks)
    # U is orthonormal under the weights, so least squares phi(1:) ~ phi(:-1) A is a projection, column by column:
    # every leading block solves its own least-squares problem. Only the step past H-1 has to be continued through V.
    past_end = lags + 1 > filter_length - 1
    shifted = noisy.filters(N, np.where(past_end, 0.0, lags + 1))
    shifted[past_end] = F(lags[past_end] + 1) @ (V * signs / S)
    A = (lag_weights[:, None] * table).T @ shifted
    # In exact arithmetic every leading block is stable. Noise in the last state makes it grow at H = 107 and 108.
    N = next(n for n in range(N, 0, -1) if np.abs(np.linalg.eigvals(A[:n, :n])).max() < 1)
    basis = SpectralBasis(filter_length, S[:N] ** 2, A[:N, :N].copy(), num_resolved, table[:, :N].copy(), lags, blocks)
    for array in (basis.A, basis.sigma, basis._table, lags):
        array.setflags(write=False)
    return basis


@functools.lru_cache(maxsize=4)  # what is kept is what tensors are made of
def chunk_operators(filter_length: int, N: int, chunk_size: int) -> ChunkOperators:
    """(R) restricted to the first N states, unrolled over C = chunk_size steps.

    Every entry comes from (R) itself, so a sequence cut into chunks and steps in any way gives the same features.
    """
    basis = spectral_basis(filter_length)
    A, phi0, C = basis.A[:N, :N], basis._table[0, :N], chunk_size
    rows, powers = [phi0], [A]
    for _ in range(C - 1):
        rows.append(rows[-1] @ A)
        powers.append(powers[-1] @ A)
    impulse = np.stack(rows)  # (C, N): phi(0) A^i
    readout = np.zeros((C, N, C + N))
    for i in range(C):
        readout[i, :, : i + 1] = impulse[i::-1].T
        readout[i, :, C:] = powers[i].T
    carries = [powers[-1].T]
    for _ in range(23):
        carries.append(carries[-1] @ carries[-1])
    return ChunkOperators(readout, np.stack(carries))


def _panel_nodes(filter_length: int) -> tuple[np.ndarray, np.ndarray]:
    """Quadrature over s = 1 - beta in [0, 1]: octaves down to s = 1/(2H), then one panel to 0. Nodes and weights."""
    octaves = math.ceil(math.log2(filter_length)) + 1
    edges = np.append(2.0 ** -np.arange(octaves + 1), 0.0)
    x, w = np.polynomial.legendre.leggauss(_PANEL_NODES)
    width = edges[:-1] - edges[1:]
    return (edges[1:, None] + width[:, None] * (x + 1) / 2).ravel(), (width[:, None] * w / 2).ravel()


def _lag_nodes(filter_length: int) -> tuple[np.ndarray, np.ndarray, _Blocks]:
    """Quadrature for sums over lags 0..H-1: single lags first, then Gauss nodes per octave. Nodes, weights, blocks."""
    head = np.arange(min(_EXACT_ROWS, filter_length), dtype=np.float64)
    lags, weights, blocks = [head], [np.ones_like(head)], []
    start = first = len(head)
    while start < filter_length:
        stop = 2 * start
        if filter_length - stop < start // 2:  # a short remainder joins the octave before it
            stop = filter_length
        x, w = _gauss_sum(stop - start)
        lags.append(start + x)
        weights.append(w)
        blocks.append((start, stop, slice(first, first + len(x))))
        start, first = stop, first + len(x)
    return np.concatenate(lags), np.concatenate(weights), tuple(blocks)


def _gauss_sum(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Gauss quadrature of sum_{i<count} f(i) from the recurrence of the Gram polynomials (Golub-Welsch)."""
    if count <= _BLOCK_NODES:
        return np.arange(count, dtype=np.float64), np.ones(count)
    k = np.arange(1, _BLOCK_NODES, dtype=np.float64)
    off_diagonal = k / 2 * np.sqrt((count**2 - k**2) / (4 * k**2 - 1))
    x, v = np.linalg.eigh(np.diag(off_diagonal, 1) + np.diag(off_diagonal, -1))
    return x + (count - 1) / 2, count * v[0] ** 2


def _lagrange(nodes: np.ndarray, x: np.ndarray) -> np.ndarray:
    """(T, n) matrix that evaluates at x the polynomial through values at the nodes (barycentric formula)."""
    scale = (nodes[-1] - nodes[0]) / 4 or 1.0
    gaps = (nodes[:, None] - nodes[None]) / scale
    np.fill_diagonal(gaps, 1.0)
    distance = (x[:, None] - nodes[None]) / scale
    hit = np.abs(distance) < 1e-12
    terms = 1.0 / (gaps.prod(1) * np.where(hit, 1.0, distance))
    return np.where(hit.any(1, keepdims=True), hit, terms / terms.sum(1, keepdims=True))
