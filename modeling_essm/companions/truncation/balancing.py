# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Balanced truncation (CompreSSM, Chahine et al. 2025): from n modes to the r that matter most, and diagonal again.

    A_r = T^+ A T,  B_r = T^+ B,  C_r = C T,      A_r = W diag(mu) W^(-1),  B_d = W^(-1) B_r,  C_d = C_r W

with T of the square-root algorithm in gramians.py. The error is ||G - G_r||_inf <= 2 sum_{i > r} sigma_i. Two variants:
"complex" is the paper's, on the complex system x, C x, whatever is taken of its output. "real" is ours: an output
Re(C x) is that of a real system of 2 n states, which is reduced as such, so that one stored mode is a conjugate pair or
a real eigenvalue. Channels of a system with one recurrence each are reduced one by one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..systems import OUTPUTS, DiagonalSystem
from .gramians import Balancing, DenseSystem, balance, dense_gramians, gramians, matrices

VARIANTS = ("complex", "real")
LARGEST_CONDITION = 1e6  # of the eigenvectors W
LARGEST_RADIUS = 1.0 - 1e-7


class NotDiagonalisable(ValueError):
    """The reduced system has no eigenvectors to compute with, or an eigenvalue at the unit circle."""


@dataclass(frozen=True)
class Truncation:
    """What became of a system.

    Attributes:
        system: the reduced one, or the one given.
        hankel: Hankel singular values before, descending: (n,) or (H, n); of the variant "real" (2 n,) or (H, 2 n).
        bound: of the largest singular value of the error at any frequency, for the system's kind of output.
        refused: why the system, or some of its channels, stayed larger than asked for; "" if nothing did.
    """

    system: DiagonalSystem
    hankel: Tensor
    bound: float
    refused: str = ""


def rank_by_discarded(sigma: Tensor, tau: float) -> int:
    """r = min{k: sum_{i <= k} sigma_i >= (1 - tau) sum_i sigma_i}: the smallest order that discards a share of tau.

    Args:
        sigma: (n,) Hankel singular values, descending. tau: share of their sum, not of their squares; 0 keeps all.
    Returns:
        In [1, n], and n where rounding keeps the sums below the threshold.
    Raises:
        ValueError: tau outside [0, 1).
    """
    _check_tau(tau)
    kept = sigma.double().cumsum(0)
    enough = (kept >= (1.0 - tau) * kept[-1]).nonzero()
    return len(sigma) if tau == 0 or len(enough) == 0 else max(1, int(enough[0]) + 1)


def _check_tau(tau: float) -> None:
    if not 0.0 <= tau < 1.0:
        raise ValueError(f"tau, the share of the Hankel singular values to discard, must be in [0, 1), got {tau}")


def truncate(
    system: DiagonalSystem, *, tau: float | None = None, size: int | None = None, variant: str = "complex"
) -> Truncation:
    """The system with fewer modes: as many as discard at most a share `tau`, or at most `size`.

    A system that cannot be made diagonal again in its smaller form is returned as it is, with the reason. Hankel
    singular values that are rounding (below 1e-8 of the largest) are never kept.

    Args:
        size: stored modes; of systems with a recurrence for each channel, of every channel.
        variant: "complex" or "real".
    Raises:
        ValueError: not exactly one of tau and size, one that is out of range, an unknown variant, "real" for a system
            with a complex output, or a mode on or outside the unit circle.
    """
    if (tau is None) == (size is None):
        raise ValueError(f"give exactly one of tau and size, got tau={tau!r}, size={size!r}")
    if tau is not None:
        _check_tau(tau)
    width = system.lam.shape[-1]
    if size is not None and not 1 <= size <= width:
        raise ValueError(f"size must be an integer in [1, {width}], got {size!r}")
    if variant not in VARIANTS:
        raise ValueError(f"variant must be one of {', '.join(VARIANTS)}, got {variant!r}")
    if variant == "real" and system.output == "complex":
        raise ValueError("variant 'real' needs output 'real' or 'twice_real', got 'complex'")
    one = _truncate_complex if variant == "complex" else _truncate_real
    if not system.siso:
        return one(system, tau, size)
    parts = [one(channel, tau, None if size is None else min(size, channel.modes)) for channel in channels(system)]
    refused = [f"channel {h}: {part.refused}" for h, part in enumerate(parts) if part.refused]
    hankel = torch.nn.utils.rnn.pad_sequence([part.hankel for part in parts], batch_first=True)
    # Channels do not meet, so that the error at a frequency is diagonal, and its norm that of the worst channel.
    return Truncation(
        stack_channels([part.system for part in parts]), hankel, max(p.bound for p in parts), "; ".join(refused)
    )


def channels(system: DiagonalSystem) -> list[DiagonalSystem]:
    """The recurrences of a system of lam (H, n) as H systems of one input and one output, without padding."""
    found = []
    for h in range(len(system.lam)):
        there = slice(None) if system.present is None else system.present[h].nonzero()[:, 0]
        lam, B = system.lam[h, there], system.B[h, there, None]
        C = system.C[..., h, :][..., there].unsqueeze(-2)  # (1, n), or (2, 1, n)
        found.append(DiagonalSystem(lam, B, C, system.output))
    return found


def stack_channels(systems: list[DiagonalSystem]) -> DiagonalSystem:
    """The inverse of `channels`: padded to the largest, with `present` None where all have as many modes.

    Padding has lam = 0, B = 0 and C = 0.
    """
    sizes = [len(system.lam) for system in systems]
    pad = torch.nn.utils.rnn.pad_sequence
    lam = pad([system.lam for system in systems], batch_first=True)
    B = pad([system.B[:, 0] for system in systems], batch_first=True)
    C = pad([system.C[..., 0, :].mT if system.bidirectional else system.C[0] for system in systems], batch_first=True)
    C = C.permute(2, 0, 1) if systems[0].bidirectional else C  # (H, n, 2) to (2, H, n)
    present = torch.arange(max(sizes), device=lam.device) < torch.tensor(sizes, device=lam.device)[:, None]
    return DiagonalSystem(lam, B, C, systems[0].output, None if min(sizes) == max(sizes) else present)


def _order(balancing: Balancing, tau: float | None, size: int | None) -> int:
    """How many balanced states to keep; 0 of a system that does nothing."""
    wanted = rank_by_discarded(balancing.sigma, tau) if tau is not None else size
    assert wanted is not None
    return min(wanted, int(balancing.rank))


def _truncate_complex(system: DiagonalSystem, tau: float | None, size: int | None) -> Truncation:
    lam, B, C = matrices(system)
    n, balancing = len(lam), balance(*gramians(system))
    if tau == 0 or size == n or n == 0:
        return Truncation(system, balancing.sigma, 0.0)
    order = _order(balancing, tau, size)
    if order == 0:
        return Truncation(_silent(system), balancing.sigma, 0.0)
    if order == n:
        return Truncation(system, balancing.sigma, 0.0)
    T, reduced = balancing.transform(order)
    try:
        mu, B, C = diagonalise(DenseSystem(reduced * lam @ T, reduced @ B, C @ T))
    except NotDiagonalisable as error:
        return Truncation(system, balancing.sigma, 0.0, str(error))
    bound = _tail(balancing.sigma, order, system) * OUTPUTS[system.output]
    return Truncation(_like(system, mu, B, C), balancing.sigma, bound)


def _tail(sigma: Tensor, order: int, system: DiagonalSystem) -> float:
    """2 sum_{i > order} sigma_i, for each of the directions whose outputs are added."""
    return 2.0 * float(sigma[order:].sum()) * (2.0 if system.bidirectional else 1.0)


def _like(system: DiagonalSystem, mu: Tensor, B: Tensor, C: Tensor) -> DiagonalSystem:
    """A system with many inputs and outputs, of the same kind."""
    C = C.unflatten(0, system.C.shape[:-1]) if system.bidirectional else C
    return DiagonalSystem(mu, B, C, system.output)


def _silent(system: DiagonalSystem) -> DiagonalSystem:
    """One mode of a system whose output is 0 whatever its input, which it stays."""
    return replace(system, lam=system.lam[:1], B=system.B[:1], C=torch.zeros_like(system.C[..., :1]))


def diagonalise(system: DenseSystem) -> tuple[Tensor, Tensor, Tensor]:
    """Eigenvalues mu (r,), B_d (r, p) and C_d (q, r) of the same recurrence with A = diag(mu).

    Raises:
        NotDiagonalisable: cond(W) above 1e6, an eigenvalue of modulus 1 - 1e-7 or more, or NaN.
    """
    if not bool(torch.isfinite(torch.view_as_real(system.A)).all()):
        raise NotDiagonalisable("the reduced A holds NaN or infinite values")
    mu, W = torch.linalg.eig(system.A)
    _check_eigen(mu, W)
    return mu, torch.linalg.solve(W, system.B), system.C @ W


def _check_eigen(mu: Tensor, W: Tensor) -> None:
    spread = torch.linalg.svdvals(W)
    condition = float(spread[0] / spread[-1])
    if not condition <= LARGEST_CONDITION:
        raise NotDiagonalisable(f"the eigenvectors' condition number must be at most {LARGEST_CONDITION:.0e}, got "
                                f"{condition:.1e}")  # fmt: skip
    radius = float(mu.abs().max())
    if not radius < LARGEST_RADIUS:
        raise NotDiagonalisable(f"eigenvalues must have a modulus below 1 - 1e-7, got 1 - {1.0 - radius:.1e}")


# --- The variant "real" -----------------------------------------------------------------------------------------------


def real_realisation(system: DiagonalSystem) -> tuple[tuple[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]:
    """The real system of 2 n states sqrt(2) (Re x, Im x), whose output needs no real part taken, and its Gramians.

    It is diag(lam, conj(lam)), (B, conj(B)), k (C, conj(C)) in other coordinates, J = [[I, I], [-iI, iI]] / sqrt(2),
    with k = 1/2 for the output Re(C x) and k = 1 for 2 Re(C x).

    Returns:
        A (2n, 2n), B (2n, p), C (q, 2n); P and Q (2n, 2n); all float64.
    """
    lam, B, C = matrices(system)
    k = 0.5 * OUTPUTS[system.output]
    both = DiagonalSystem(torch.cat([lam, lam.conj()]), torch.cat([B, B.conj()]), k * torch.cat([C, C.conj()], 1),
                          "complex")  # fmt: skip
    eye = torch.eye(len(lam), dtype=lam.dtype, device=lam.device)
    J = torch.cat([torch.cat([eye, eye], 1), torch.cat([-1j * eye, 1j * eye], 1)]) / 2.0**0.5
    P, Q = gramians(both)
    realisation = ((J * both.lam @ J.mH).real, (J @ both.B).real, (both.C @ J.mH).real)
    return realisation, ((J @ P @ J.mH).real, (J @ Q @ J.mH).real)


def _truncate_real(system: DiagonalSystem, tau: float | None, size: int | None) -> Truncation:
    """`size` counts stored modes: one for a conjugate pair, one for a real eigenvalue, which may take part of a pair's
    place. The largest real order that fits is taken."""
    n = len(system.lam)
    (A, B, C), (P, Q) = real_realisation(system)
    balancing = balance(P, Q)
    rank = int(balancing.rank)
    if tau == 0 or size == n or n == 0:
        return Truncation(system, balancing.sigma, 0.0)
    if rank == 0:
        return Truncation(_silent(system), balancing.sigma, 0.0)
    T, reduced = balancing.transform(rank)
    A, B, C = reduced @ A @ T, reduced @ B, C @ T  # balanced: the leading blocks are the truncated systems
    if tau is not None:
        size = _slots(A, min(rank_by_discarded(balancing.sigma, tau), rank))
    assert size is not None
    if size >= n:
        return Truncation(system, balancing.sigma, 0.0)
    order = next(m for m in range(min(2 * size, rank), 0, -1) if _slots(A, m) <= size)
    r = slice(order)
    try:
        mu, B, C = _one_of_each_pair(A[r, r], B[r], C[:, r], system.output)
    except NotDiagonalisable as error:
        return Truncation(system, balancing.sigma, 0.0, str(error))
    return Truncation(_like(system, mu, B, C), balancing.sigma, _tail(balancing.sigma, order, system))


def _slots(A: Tensor, order: int) -> int:
    """Conjugate pairs and real eigenvalues of the leading block of that order."""
    return int((torch.linalg.eigvals(A[:order, :order]).imag >= 0).sum())


def _one_of_each_pair(A: Tensor, B: Tensor, C: Tensor, output: str) -> tuple[Tensor, Tensor, Tensor]:
    """mu, B_d, C_d with real eigenvalues and those above the real axis, such that out(C_d x) is the real output.

    A pair's states give c x + conj(c x) = Re(2 c x), a real eigenvalue's c x = Re(c x). Raises NotDiagonalisable.
    """
    mu, W = torch.linalg.eig(A)  # pairs are exact conjugates, real eigenvalues have an imaginary part of exactly 0
    _check_eigen(mu, W)
    B, C = torch.linalg.solve(W, B.to(W.dtype)), C.to(W.dtype) @ W
    stored = mu.imag >= 0
    mu, B, C = mu[stored], B[stored], C[:, stored]
    return mu, B, C * torch.where(mu.imag > 0, 2.0, 1.0) / OUTPUTS[output]


# --- Recurrences that are dense, and scales ---------------------------------------------------------------------------


def truncate_dense(
    system: DenseSystem, *, tau: float | None = None, size: int | None = None
) -> tuple[DenseSystem, Tensor, float]:
    """The same for a dense A, without making it diagonal.

    Returns:
        The system of r states, Hankel singular values (n,) of the one given, and the bound 2 sum_{i > r} sigma_i.
    Raises:
        ValueError: not exactly one of tau and size, one out of range, or an eigenvalue outside the unit circle.
    """
    n = len(system.A)
    if (tau is None) == (size is None):
        raise ValueError(f"give exactly one of tau and size, got tau={tau!r}, size={size!r}")
    if size is not None and not 1 <= size <= n:
        raise ValueError(f"size must be an integer in [1, {n}], got {size!r}")
    balancing = balance(*dense_gramians(system))
    order = n if tau == 0 else _order(balancing, tau, size)
    if order in (0, n):
        return system, balancing.sigma, 0.0
    T, reduced = balancing.transform(order)
    smaller = DenseSystem(reduced @ system.A @ T, reduced @ system.B, system.C @ T)
    return smaller, balancing.sigma, 2.0 * float(balancing.sigma[order:].sum())


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
