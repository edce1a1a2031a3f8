# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""How much a layer's map changes at most when modes go.

A certificate bounds the H-infinity norm of what goes, G_P(z) = sum_{i in P} c_i b_i / (1 - lam_i / z). With r_i =
|lam_i|, the energy E_i and phi = max_P sqrt((1 + r_i) / (1 - r_i)):

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
from dataclasses import replace

import torch
from torch import Tensor, nn

from ..systems import OUTPUTS, DiagonalSystem, check_stable
from ..truncation.balancing import channels, hankel_singular_values
from .masks import is_pruned, matched
from .plans import Plan

BOUNDS = ("sum_of_peaks", "paper_16", "paper_17", "hankel")


def certify(plan: Plan, model: nn.Module) -> list[dict[str, float]]:
    """Bounds on the H-infinity norm of what each layer loses, by name; the least of them is "best".

    Raises:
        ValueError: another model, or one with masks; a selective layer, which has no certificate; an unstable mode.
    """
    if is_pruned(model):
        raise ValueError("a certificate needs the model before pruning, got one with masks: restore it first")
    layers = matched(model, plan)
    if any(layer.adapter.selective for layer in layers):
        raise ValueError("layers whose parameters depend on the input have no certificate")
    return [certificate(layer.read(), own.keep, layer.name) for layer, own in zip(layers, plan.layers)]


@torch.no_grad()
def certificate(system: DiagonalSystem, keep: Tensor, where: str = "system") -> dict[str, float]:
    """Bounds on the H-infinity norm of the modes of a layer that are not kept (bool like lam), and "best", the least.

    Raises:
        ValueError: a pruned mode with |lam| >= 1, a mask of another shape.
    """
    if keep.dtype != torch.bool or keep.shape != system.lam.shape:
        raise ValueError(f"{where}: keep must be bool {tuple(system.lam.shape)}, got {keep.dtype} {tuple(keep.shape)}")
    pruned = ~keep.to(system.lam.device) & system.there
    check_stable(replace(system, present=pruned), where)
    found = dict.fromkeys(BOUNDS, 0.0)
    for block in _blocks(system, pruned):
        for name, bound in _bounds(block).items():
            found[name] = max(found[name], OUTPUTS[system.output] * bound)
    return {**found, "best": min(found.values())}


def _blocks(system: DiagonalSystem, modes: Tensor) -> list[DiagonalSystem]:
    """The chosen modes, where there are any: of the whole layer, or of every channel."""
    return [block for block in channels(replace(system, present=modes)) if len(block.lam)]


def _bounds(block: DiagonalSystem) -> dict[str, float]:
    r, b, Cs = block.lam.abs(), block.B.norm(dim=1), block.directions
    norms = [C.norm(dim=0) for C in Cs]
    peaks = sum(norms) * b / (1 - r)
    # len(Cs) = 2 is the factor sqrt(2) of the summed energy.
    roots = (len(Cs) * sum(norm.square() for norm in norms) / ((1 - r) * (1 + r))).sqrt() * b
    phi = ((1 + r) / (1 - r)).sqrt().max()
    hankel = (hankel_singular_values(replace(block, C=C, output="complex")) for C in Cs)
    return {
        "sum_of_peaks": float(peaks.sum()),
        "paper_16": float(phi * roots.sum()),
        "paper_17": float(phi * (len(r) * roots.square().sum()).sqrt()),
        "hankel": 2 * sum(float(sigma.sum()) for sigma in hankel),
    }


@torch.no_grad()
def hinf_norm(system: DiagonalSystem, modes: Tensor | None = None) -> float:
    """Largest gain of a layer's modes (bool like lam; None: all) over all frequencies, on a grid: a lower estimate.

    Raises ValueError for modes on or outside of the unit circle, whose gain has no bound.

    Beside 512 uniform frequencies the grid has 65 around every pole and its conjugate, between 1e-3 and 1e3
    half-widths 1 - |lam| of its resonance.
    """
    wanted = system.there if modes is None else modes & system.there
    check_stable(replace(system, present=wanted), "hinf_norm")
    largest = 0.0
    for block in _blocks(system, wanted):
        for omega in _grid(block.lam).split(1024):
            G = _response(omega, block)
            if system.output != "complex":  # the real map's, from the conjugate's at the opposite frequency
                G = (G + _response(-omega, block).conj()) * (OUTPUTS[system.output] / 2)
            largest = max(largest, float(torch.linalg.matrix_norm(G, ord=2).max()))
    return largest


def _grid(lam: Tensor) -> Tensor:
    uniform = torch.arange(512, dtype=torch.float64) * (2 * math.pi / 512)
    steps = torch.logspace(-3, 3, 32, dtype=torch.float64)
    steps = torch.cat([-steps, torch.zeros(1, dtype=torch.float64), steps])
    near = (lam.angle()[:, None] + (1 - lam.abs())[:, None] * steps).flatten()
    return torch.cat([uniform, near, -near])


def _response(omega: Tensor, block: DiagonalSystem) -> Tensor:
    """G(e^{jw}), (W, q, p): lags forwards for the first direction, backwards for the second."""
    each = []
    for C, sign in zip(block.directions, (-1, 1)):
        gains = 1 / (1 - block.lam * torch.exp(1j * sign * omega)[:, None])
        each.append(torch.einsum("qm,wm,mp->wqp", C, gains, block.B))
    return each[0] if len(each) == 1 else each[0] + each[1]
