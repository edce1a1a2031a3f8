# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Balanced truncation (CompreSSM, Chahine et al. 2025): from n modes to the r that matter most, and diagonal again.

    P = A P A^H + B B^H,    Q = A^H Q A + C^H C,    sigma_i = sqrt(eig_i(P Q))                              (Eq. 3-5)
    P_ij = (B B^H)_ij / (1 - lam_i conj(lam_j)),    Q_ij = (C^H C)_ij / (1 - conj(lam_i) lam_j)
    A_r = T^+ A T,  B_r = T^+ B,  C_r = C T,      A_r = W diag(mu) W^(-1),  B_d = W^(-1) B_r,  C_d = C_r W

The second line is the Gramians P and Q of A = diag(lam); the paper's Eq. 14 leaves the conjugations out. T of the
square-root algorithm spans the leading balanced directions. The error is ||G - G_r||_inf <= 2 sum_{i > r} sigma_i of
the complex system x, C x, whatever is taken of its output. Channels of a system with one recurrence each are reduced
one by one. Letters: n modes or states, p inputs, q outputs, H channels. All in complex128.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..systems import OUTPUTS, DiagonalSystem, check_stable

LARGEST_CONDITION = 1e6  # of the eigenvectors W
LARGEST_RADIUS = 1.0 - 1e-7
# P and Q are known to about eps ||P|| and eps ||Q||, hence sigma to about sqrt(eps) sigma_1: below is rounding.
NOISE = 1e-8


def matrices(system: DiagonalSystem) -> tuple[Tensor, Tensor, Tensor]:
    """lam (n,), B (n, p) and C (q, n), or one such triple for every channel: (H, n), (H, n, 1) and (H, 1, n).

    Outputs of two directions that share lam and B are stacked: (2 q, n) or (H, 2, n). Padding becomes modes of zeros,
    which no input reaches and no output shows.
    """
    system = system.without_padding()
    lam, B, C = system.lam, system.B, system.C
    if not system.siso:
        return lam, B, C.flatten(0, -2)
    return lam, B[..., None], C.movedim(0, 1) if system.bidirectional else C[:, None]


def gramians(system: DiagonalSystem) -> tuple[Tensor, Tensor]:
    """Controllability and observability Gramians P and Q, Hermitian, (n, n) or one for each channel (H, n, n).

    Raises:
        ValueError: a mode on or outside the unit circle, which has no Gramian.
    """
    check_stable(system)
    lam, B, C = matrices(system)
    lags = 1.0 - lam[..., :, None] * lam.conj()[..., None, :]
    return B @ B.mH / lags, C.mH @ C / lags.conj()


@dataclass(frozen=True)
class Balancing:
    """Hankel singular values sigma (..., n) float64, descending, how many are above rounding, `rank` (...), and T and
    T^+ before the division by sqrt(sigma): Lc V and U^H Lo^H, (..., n, n)."""

    sigma: Tensor
    lifted: Tensor
    reduced: Tensor
    rank: Tensor

    def transform(self, order: int) -> tuple[Tensor, Tensor]:
        """T (..., n, r) and T^+ (..., r, n) with T^+ T = I: the reduced system is T^+ A T, T^+ B, C T."""
        root = self.sigma[..., :order].sqrt()
        return self.lifted[..., :order] / root[..., None, :], self.reduced[..., :order, :] / root[..., None]


def balance(P: Tensor, Q: Tensor) -> Balancing:
    """The square-root algorithm of Hermitian P, Q (..., n, n): P = Lc Lc^H, Q = Lo Lo^H, U Sigma V^H = svd(Lo^H Lc).

    The roots come from Hermitian eigendecompositions, in which eigenvalues below n eps times the largest count as 0.
    Modes are scaled to P_ii = Q_ii first, which changes nothing but rounding.
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


def hankel_singular_values(system: DiagonalSystem) -> Tensor:
    """sigma (n,), or (H, n) with the channels' own; float64, descending, 0 for padding.

    They are those of y = C x. Two directions that share lam and B count as one system with stacked outputs. Raises
    ValueError as `gramians`.
    """
    return balance(*gramians(system)).sigma


# --- Truncation -------------------------------------------------------------------------------------------------------


class NotDiagonalisable(ValueError):
    """The reduced system has no eigenvectors to compute with, or an eigenvalue at the unit circle."""


@dataclass(frozen=True)
class Truncation:
    """What became of a system: the reduced one, or the one given; Hankel singular values before, descending, (n,) or
    (H, n); the bound of the error's largest singular value at any frequency; and why the system, or some of its
    channels, stayed larger than asked for, "" if nothing did."""

    system: DiagonalSystem
    hankel: Tensor
    bound: float
    refused: str = ""


def rank_by_discarded(sigma: Tensor, tau: float) -> int:
    """r = min{k: sum_{i <= k} sigma_i >= (1 - tau) sum_i sigma_i}, of sigma (n,) descending; tau 0 keeps all.

    In [1, n], and n where rounding keeps the sums below the threshold. Shares are of the sum, not of squares.
    """
    kept = sigma.double().cumsum(0)
    enough = (kept >= (1.0 - tau) * kept[-1]).nonzero()
    return len(sigma) if tau == 0 or len(enough) == 0 else max(1, int(enough[0]) + 1)


def truncate(system: DiagonalSystem, *, tau: float | None = None, size: int | None = None) -> Truncation:
    """The system with fewer modes: as many as discard at most a share `tau`, or at most `size`.

    A system that cannot be made diagonal again in its smaller form is returned as it is, with the reason. Hankel
    singular values that are rounding (below 1e-8 of the largest) are never kept.

    Args:
        size: stored modes; of systems with a recurrence for each channel, of every channel.
    Raises:
        ValueError: not exactly one of tau and size, one that is out of range, or a mode on or outside the unit circle.
    """
    if (tau is None) == (size is None):
        raise ValueError(f"give exactly one of tau and size, got tau={tau!r}, size={size!r}")
    if tau is not None and not 0.0 <= tau < 1.0:
        raise ValueError(f"tau, the share of the Hankel singular values to discard, must be in [0, 1), got {tau}")
    width = system.lam.shape[-1]
    if size is not None and not 1 <= size <= width:
        raise ValueError(f"size must be an integer in [1, {width}], got {size!r}")
    if not system.siso:
        return _truncate(system, tau, size)
    parts = [_truncate(each, tau, None if size is None else min(size, each.modes)) for each in channels(system)]
    refused = [f"channel {h}: {part.refused}" for h, part in enumerate(parts) if part.refused]
    hankel = torch.nn.utils.rnn.pad_sequence([part.hankel for part in parts], batch_first=True)
    # Channels do not meet, so that the error at a frequency is diagonal, and its norm that of the worst channel.
    stacked, bound = stack_channels([part.system for part in parts]), max(part.bound for part in parts)
    return Truncation(stacked, hankel, bound, "; ".join(refused))


def _truncate(system: DiagonalSystem, tau: float | None, size: int | None) -> Truncation:
    """The same for a system with many inputs and outputs."""
    lam, B, C = matrices(system)
    n, balancing = len(lam), balance(*gramians(system))
    sigma, order = balancing.sigma, n
    if n and tau != 0 and size != n:
        order = rank_by_discarded(sigma, tau) if size is None else size  # type: ignore[arg-type]
        order = min(order, int(balancing.rank))
    if order == n:
        return Truncation(system, sigma, 0.0)
    if order == 0:  # one mode that stays silent whatever its input
        C = torch.zeros_like(system.C[..., :1])
        silent = DiagonalSystem(system.lam[:1], system.B[:1], C, system.output)
        return Truncation(silent, sigma, 0.0)
    T, reduced = balancing.transform(order)
    try:
        mu, B, C = diagonalise(reduced * lam @ T, reduced @ B, C @ T)
    except NotDiagonalisable as error:
        return Truncation(system, sigma, 0.0, str(error))
    bound = 2.0 * float(sigma[order:].sum()) * len(system.directions) * OUTPUTS[system.output]
    C = C.unflatten(0, system.C.shape[:-1]) if system.bidirectional else C
    return Truncation(DiagonalSystem(mu, B, C, system.output), sigma, bound)


def channels(system: DiagonalSystem) -> list[DiagonalSystem]:
    """A system of lam (H, n) as H systems of one input and one output, another one as itself; without padding."""
    if not system.siso:
        there = system.there
        return [DiagonalSystem(system.lam[there], system.B[there], system.C[..., there], system.output)]
    found = []
    for h, there in enumerate(system.there):
        C = system.C[..., h, there].unsqueeze(-2)  # (1, n), or (2, 1, n)
        found.append(DiagonalSystem(system.lam[h, there], system.B[h, there, None], C, system.output))
    return found


def stack_channels(systems: list[DiagonalSystem]) -> DiagonalSystem:
    """The inverse of `channels`: padded to the largest, with `present` None where all have as many modes.

    Padding has lam = 0, B = 0 and C = 0.
    """
    sizes = [len(system.lam) for system in systems]
    pad = functools.partial(torch.nn.utils.rnn.pad_sequence, batch_first=True)
    lam, B = pad([system.lam for system in systems]), pad([system.B[:, 0] for system in systems])
    C = pad([system.C[..., 0, :].mT if system.bidirectional else system.C[0] for system in systems])
    C = C.permute(2, 0, 1) if systems[0].bidirectional else C  # (H, n, 2) to (2, H, n)
    present = torch.arange(max(sizes), device=lam.device) < torch.tensor(sizes, device=lam.device)[:, None]
    return DiagonalSystem(lam, B, C, systems[0].output, None if min(sizes) == max(sizes) else present)


def diagonalise(A: Tensor, B: Tensor, C: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Eigenvalues mu (r,), B_d (r, p) and C_d (q, r) of the same recurrence with A = diag(mu).

    Raises:
        NotDiagonalisable: cond(W) above 1e6, an eigenvalue of modulus 1 - 1e-7 or more, or NaN.
    """
    if not bool(torch.isfinite(torch.view_as_real(A)).all()):
        raise NotDiagonalisable("the reduced A holds NaN or infinite values")
    mu, W = torch.linalg.eig(A)
    spread = torch.linalg.svdvals(W)
    condition, radius = float(spread[0] / spread[-1]), float(mu.abs().max())
    if not condition <= LARGEST_CONDITION:
        limit = f"at most {LARGEST_CONDITION:.0e}"
        raise NotDiagonalisable(f"the eigenvectors' condition number must be {limit}, got {condition:.1e}")
    if not radius < LARGEST_RADIUS:
        raise NotDiagonalisable(f"eigenvalues must have a modulus below 1 - 1e-7, got 1 - {1.0 - radius:.1e}")
    return mu, torch.linalg.solve(W, B), C @ W


def equalise(system: DiagonalSystem) -> DiagonalSystem:
    """The same input-output map with ||b_i|| / sqrt(1 - |lam_i|^2) = ||c_i|| for every mode.

    Eigenvectors are known up to a factor s_i each: b_i s_i and c_i / s_i are one system. LAPACK's factor is arbitrary;
    with this one B / gamma and C of a fresh layer have comparable entries, which AdamW moves by equal steps.
    """
    lam, B, C = matrices(system)
    reached, shown = torch.linalg.vector_norm(B, dim=-1), torch.linalg.vector_norm(C, dim=-2)
    gamma = (1.0 - lam.abs().square()).clamp(min=0.0).sqrt()
    usable = (reached > 0) & (shown > 0) & (gamma > 0)
    scale = torch.where(usable, gamma * shown / reached, 1.0).sqrt()
    B = system.B * (scale if system.siso else scale[:, None])
    return replace(system, B=B, C=system.C / scale)
