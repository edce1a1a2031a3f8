# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""How much a layer's map can change at most when modes go: bounds on the H-infinity norm of the pruned part.

G_P(z) = sum_{i in P} c_i b_i / (1 - lam_i / z) is what goes, r_i = |lam_i|, E_i the energy, phi = max_P
sqrt((1 + r_i) / (1 - r_i)):

    sum_of_peaks  sum_P ||c_i|| ||b_i|| / (1 - r_i) = sum_P sqrt(E_i) sqrt((1 + r_i) / (1 - r_i))        (Eq. 13, 14)
    paper_16      phi sum_P sqrt(E_i)                                                                         (Eq. 16)
    paper_17      phi sqrt(|P| sum_P E_i)                                                                     (Eq. 17)
    hankel        2 sum of the Hankel singular values of G_P, as of any stable system
    best          the least of them

sum_of_peaks <= paper_16 <= paper_17 always (each peak has its own factor; Cauchy-Schwarz), so the paper's minimum of
(16) and (17) is (16), and LAST's sum of peaks is never worse. A real output 2 Re(C x) loses a mode and its conjugate:
all bounds count twice. Two directions add up: ||c|| is ||c1|| + ||c2|| in the peaks and sqrt(2) times the root of the
summed energy in (16) and (17); with averaged energies (16) would be wrong by up to 2.
Channels with modes of their own are the blocks of a block-diagonal map, whose norm is the largest channel's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..systems import OUTPUTS, DiagonalSystem
from ..truncation.gramians import hankel_singular_values
from .mode_values import check_stable

BOUNDS = ("sum_of_peaks", "paper_16", "paper_17", "hankel")


@torch.no_grad()
def certificate(system: DiagonalSystem, keep: Tensor, where: str = "system") -> dict[str, float]:
    """Bounds on the H-infinity norm of the modes that are not kept, by name, and "best", the least.

    Args:
        system: all modes of a layer.
        keep: bool like lam.
    Raises:
        ValueError: a pruned mode with |lam| >= 1, a mask of another shape.
    """
    pruned = _pruned(system, keep, where)
    check_stable(DiagonalSystem(system.lam, system.B, system.C, system.output, pruned), where)
    found = dict.fromkeys(BOUNDS, 0.0)
    for lam, B, Cs in _blocks(system, pruned):
        for name, bound in _block_bounds(lam, B, Cs).items():
            found[name] = max(found[name], OUTPUTS[system.output] * bound)
    return {**found, "best": min(found.values())}


def _pruned(system: DiagonalSystem, keep: Tensor, where: str) -> Tensor:
    if keep.dtype != torch.bool or keep.shape != system.lam.shape:
        raise ValueError(f"{where}: keep must be bool {tuple(system.lam.shape)}, got {keep.dtype} {tuple(keep.shape)}")
    pruned = ~keep.to(system.lam.device)
    return pruned if system.present is None else pruned & system.present


def _blocks(system: DiagonalSystem, modes: Tensor) -> list[tuple[Tensor, Tensor, list[Tensor]]]:
    """(lam (m,), B (m, p), C (q, m) of each direction) of the chosen modes: the whole layer, or every channel."""
    directions = list(system.C) if system.bidirectional else [system.C]
    if not system.siso:
        return [(system.lam[modes], system.B[modes], [C[:, modes] for C in directions])]
    return [
        (system.lam[h][row], system.B[h][row][:, None], [C[h][row][None] for C in directions])
        for h, row in enumerate(modes)
    ]


def _block_bounds(lam: Tensor, B: Tensor, Cs: Sequence[Tensor]) -> dict[str, float]:
    if not len(lam):
        return dict.fromkeys(BOUNDS, 0.0)
    r = lam.abs()
    b, norms = B.norm(dim=1), [C.norm(dim=0) for C in Cs]
    peaks = sum(norms) * b / (1 - r)
    # len(Cs) = 2 is the factor sqrt(2) of the summed energy.
    roots = (len(Cs) * sum(norm.square() for norm in norms) / ((1 - r) * (1 + r))).sqrt() * b
    phi = ((1 + r) / (1 - r)).sqrt().max()
    return {
        "sum_of_peaks": float(peaks.sum()),
        "paper_16": float(phi * roots.sum()),
        "paper_17": float(phi * (len(lam) * roots.square().sum()).sqrt()),
        "hankel": 2 * sum(float(hankel_singular_values(DiagonalSystem(lam, B, C, "complex")).sum()) for C in Cs),
    }


@torch.no_grad()
def hinf_norm(system: DiagonalSystem, modes: Tensor | None = None, points: int = 512) -> float:
    """Largest gain of a layer's modes over all frequencies, on a grid: a lower estimate to judge bounds by.

    Args:
        modes: bool like lam, the modes that count; None: all.
        points: of the uniform grid. Around every pole and its conjugate 65 more lie between 1e-3 and 1e3 half-widths
            1 - |lam| of its resonance, on both sides, and on it.
    """
    wanted = torch.ones_like(system.lam, dtype=torch.bool) if modes is None else modes
    if system.present is not None:
        wanted = wanted & system.present
    largest = 0.0
    for lam, B, Cs in _blocks(system, wanted):
        if not len(lam):
            continue
        real = system.output != "complex"
        for omega in _grid(lam, points).split(1024):
            G = _response(omega, lam, B, Cs)
            if real:  # the real map's response, from the conjugate's at the opposite frequency
                G = (G + _response(-omega, lam, B, Cs).conj()) * (OUTPUTS[system.output] / 2)
            largest = max(largest, float(torch.linalg.matrix_norm(G, ord=2).max()))
    return largest


def _grid(lam: Tensor, points: int) -> Tensor:
    uniform = torch.arange(points, dtype=torch.float64) * (2 * math.pi / points)
    steps = torch.logspace(-3, 3, 32, dtype=torch.float64)
    steps = torch.cat([-steps, torch.zeros(1, dtype=torch.float64), steps])
    near = (lam.angle()[:, None] + (1 - lam.abs())[:, None] * steps).flatten()
    return torch.cat([uniform, near, -near])


def _response(omega: Tensor, lam: Tensor, B: Tensor, Cs: Sequence[Tensor]) -> Tensor:
    """G(e^{jw}), (W, q, p): lags forwards for the first direction, backwards for the second."""
    total: Tensor | float = 0.0
    for C, sign in zip(Cs, (-1, 1)):
        gains = 1 / (1 - lam * torch.exp(1j * sign * omega)[:, None])
        total = total + torch.einsum("qm,wm,mp->wqp", C, gains, B)
    assert isinstance(total, Tensor)
    return total


def end_to_end_bound(
    errors: Sequence[float],
    gains: Sequence[float],
    inputs: Sequence[float],
    lipschitz: Sequence[float] | None = None,
    norm_lipschitz: Sequence[float] | None = None,
) -> float:
    """Bound on the change of the last residual stream when every layer of a stack is pruned. To report, not to rely on.

    For blocks x + psi_l(G_l N_l(x)): sum_l prod_{m > l} (1 + L_m nu_m g_m) L_l e_l ||N_l(x_l)||, which is valid but
    grows with a product over layers, and holds only where the norms N_l are Lipschitz.

    Args:
        errors: e_l, bounds on the H-infinity norm of what layer l loses.
        gains: g_m, H-infinity norms of the pruned layers, their skips included.
        inputs: ||N_l(x_l)||_2 of the layers' inputs.
        lipschitz: L_l of what follows the layer in its block; None: 1.
        norm_lipschitz: nu_l of the norms; None: 1. A LayerNorm has at most 1 / sqrt(its epsilon).
    Raises:
        ValueError: lists of different lengths, a negative number.
    """
    ones = [1.0] * len(errors)
    lists = [errors, gains, inputs, ones if lipschitz is None else lipschitz, norm_lipschitz or ones]
    if len({len(values) for values in lists}) != 1:
        raise ValueError(f"all lists must have one number per layer, got lengths {[len(values) for values in lists]}")
    if not all(number >= 0 for values in lists for number in values):
        raise ValueError("all numbers must be at least 0")
    change = 0.0
    for error, gain, norm, L, nu in zip(*lists):
        change = (1 + L * nu * gain) * change + L * error * norm
    return change
