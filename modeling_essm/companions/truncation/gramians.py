# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Gramians and Hankel singular values of linear recurrences: how well inputs reach a state, and outputs show it.

    P = A P A^H + B B^H,    Q = A^H Q A + C^H C,    sigma_i = sqrt(eig_i(P Q))        (Chahine et al. 2025, Eq. 3-5)

With A = diag(lam) both are closed forms, which need their conjugations (the paper's Eq. 14 leaves them out):

    P_ij = (B B^H)_ij / (1 - lam_i conj(lam_j)),    Q_ij = (C^H C)_ij / (1 - conj(lam_i) lam_j)

Letters: n modes or states, p inputs, q outputs, H channels. All in complex128.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..systems import DiagonalSystem

# P and Q are known to about eps ||P|| and eps ||Q||, hence sigma to about sqrt(eps) sigma_1: below is rounding.
NOISE = 1e-8


@dataclass(frozen=True)
class DenseSystem:
    """A recurrence whose states mix: x_t = A x_{t-1} + B u_t, y_t = C x_t.

    Attributes:
        A: (n, n). B: (n, p). C: (q, n). All complex128.
    Raises:
        ValueError: shapes that do not fit together, another dtype.
    """

    A: Tensor
    B: Tensor
    C: Tensor

    def __post_init__(self) -> None:
        n = self.A.shape[-1]
        if self.A.shape != (n, n) or self.B.shape[:1] != (n,) or self.C.shape[1:] != (n,) or self.B.ndim != 2:
            shapes = ", ".join(str(tuple(t.shape)) for t in (self.A, self.B, self.C))
            raise ValueError(f"A, B, C must be (n, n), (n, p), (q, n), got {shapes}")
        for name in ("A", "B", "C"):
            if getattr(self, name).dtype != torch.complex128:
                raise ValueError(f"{name} must be complex128, got {getattr(self, name).dtype}")


def matrices(system: DiagonalSystem) -> tuple[Tensor, Tensor, Tensor]:
    """lam (n,), B (n, p) and C (q, n), or one such triple for every channel: (H, n), (H, n, 1) and (H, 1, n).

    Outputs of two directions that share lam and B are stacked: (2 q, n) or (H, 2, n). Padding becomes modes of zeros,
    which no input reaches and no output shows.
    """
    lam, B, C = system.lam, system.B, system.C
    if system.present is not None:
        lam, B, C = (torch.where(mask, t, 0.0) for mask, t in zip(_masks(system), (lam, B, C)))
    if not system.siso:
        return lam, B, C.flatten(0, -2)
    return lam, B[..., None], C.movedim(0, 1) if system.bidirectional else C[:, None]


def _masks(system: DiagonalSystem) -> tuple[Tensor, Tensor, Tensor]:
    present = system.present
    assert present is not None
    return present, present if system.siso else present[:, None], present


def gramians(system: DiagonalSystem) -> tuple[Tensor, Tensor]:
    """Controllability and observability Gramians P and Q, Hermitian, (n, n) or one for each channel (H, n, n).

    Raises:
        ValueError: a mode on or outside the unit circle, which has no Gramian.
    """
    lam, B, C = matrices(system)
    check_stable(lam)
    return cross_gramian(lam, B, lam, B), cross_gramian(lam.conj(), C.mH, lam.conj(), C.mH)


def cross_gramian(lam: Tensor, B: Tensor, other_lam: Tensor, other_B: Tensor) -> Tensor:
    """X_ij = (B B'^H)_ij / (1 - lam_i conj(lam'_j)), that is X = sum_k lam^k B B'^H conj(lam')^k: (..., n, n')."""
    return B @ other_B.mH / (1.0 - lam[..., :, None] * other_lam.conj()[..., None, :])


def check_stable(lam: Tensor) -> None:
    """Raises ValueError for an eigenvalue that is not inside the unit circle, or not finite."""
    radius = float(lam.abs().max()) if lam.numel() else 0.0
    if not radius < 1.0:
        raise ValueError(f"all eigenvalues must be inside the unit circle, got one of modulus {radius}")


def dense_gramians(system: DenseSystem) -> tuple[Tensor, Tensor]:
    """P and Q (n, n) of a dense recurrence.

    Raises:
        ValueError: an eigenvalue of A on or outside the unit circle.
    """
    check_stable(torch.linalg.eigvals(system.A))
    return stein(system.A, system.B @ system.B.mH), stein(system.A.mH, system.C.mH @ system.C)


def stein(A: Tensor, W: Tensor) -> Tensor:
    """X = A X A^H + W for a stable A by doubling: after j steps X holds the first 2^j terms of sum_k A^k W A^kH.

    Args:
        A: (n, n), spectral radius below 1. W: (n, n), Hermitian.
    """
    X = W
    for _ in range(64):  # 2^64 terms: the radius next to 1 needs 2^59
        term = A @ X @ A.mH
        X = X + term
        A = A @ A
        if torch.linalg.matrix_norm(term) <= 1e-17 * torch.linalg.matrix_norm(X):
            break
    return 0.5 * (X + X.mH)


@dataclass(frozen=True)
class Balancing:
    """Hankel singular values, and the transform to the leading directions of the balanced coordinates.

    Attributes:
        sigma: (..., n) float64, descending.
        lifted: Lc V, (..., n, n). reduced: U^H Lo^H, (..., n, n); T and T^+ before the division by sqrt(sigma).
        rank: how many of sigma are above rounding, (...) integers.
    """

    sigma: Tensor
    lifted: Tensor
    reduced: Tensor
    rank: Tensor

    def transform(self, order: int) -> tuple[Tensor, Tensor]:
        """T (..., n, r) and T^+ (..., r, n) with T^+ T = I: the reduced system is T^+ A T, T^+ B, C T.

        Raises:
            ValueError: order outside [1, rank].
        """
        if not 1 <= order <= int(self.rank.min()):
            raise ValueError(f"order must be an integer in [1, {int(self.rank.min())}], got {order!r}")
        root = self.sigma[..., :order].sqrt()
        return self.lifted[..., :order] / root[..., None, :], self.reduced[..., :order, :] / root[..., None]


def balance(P: Tensor, Q: Tensor) -> Balancing:
    """The square-root algorithm: P = Lc Lc^H, Q = Lo Lo^H, U Sigma V^H = svd(Lo^H Lc), T = Lc V Sigma^(-1/2).

    The roots come from Hermitian eigendecompositions, in which eigenvalues below n eps times the largest count as 0,
    and no n x n matrix is inverted. Modes are scaled to P_ii = Q_ii first, which changes nothing but rounding.

    Args:
        P, Q: (..., n, n), Hermitian (or real symmetric) and non-negative.
    """
    reached, shown = P.diagonal(dim1=-2, dim2=-1).real, Q.diagonal(dim1=-2, dim2=-1).real
    scale = torch.where((reached > 0) & (shown > 0), shown / reached, 1.0) ** 0.25
    Lc = _root(P * scale[..., :, None] * scale[..., None, :])
    Lo = _root(Q / scale[..., :, None] / scale[..., None, :])
    U, sigma, Vh = torch.linalg.svd(Lo.mH @ Lc)
    rank = ((sigma > NOISE * sigma[..., :1]) & (sigma > 0)).sum(-1)
    return Balancing(sigma, Lc @ Vh.mH / scale[..., :, None], U.mH @ Lo.mH * scale[..., None, :], rank)


def _root(gramian: Tensor) -> Tensor:
    """L with L L^H = gramian, without the directions of eigenvalues that are rounding, which may be negative."""
    values, vectors = torch.linalg.eigh(gramian)
    rounding = values.shape[-1] * torch.finfo(values.dtype).eps * values[..., -1:].clamp(min=0.0)
    return vectors * torch.where(values > rounding, values, 0.0).sqrt()[..., None, :]


def hankel_singular_values(system: DiagonalSystem | DenseSystem) -> Tensor:
    """sigma (n,), or (H, n) with the channels' own; float64, descending, 0 for padding.

    They are those of y = C x. Two directions that share lam and B count as one system with stacked outputs. Raises
    ValueError as `gramians`.
    """
    P, Q = dense_gramians(system) if isinstance(system, DenseSystem) else gramians(system)
    return balance(P, Q).sigma
