# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""What a mode is worth by itself: its energy, its largest gain, its Hankel singular value, its magnitude.

Mode i of x_t = lam x_{t-1} + B u_t, y = C x has the impulse response c_i lam_i^k b_i, k = 0, 1, ... With r = |lam_i|:

    energy     sum_k ||c_i lam_i^k b_i||_F^2 = ||c_i||^2 ||b_i||^2 / (1 - r^2)                       (AIRE-Prune, Eq. 8)
    up to T    ||c_i||^2 ||b_i||^2 (1 - r^(2T)) / (1 - r^2), lags 0 .. T-1                           (Eq. 7)
    peak       sup_w ||c_i b_i / (1 - lam_i e^(-jw))|| = ||c_i|| ||b_i|| / (1 - r)                   (LAST, Eq. 13)
    hankel     ||c_i|| ||b_i|| / (1 - r^2)
    magnitude  r ||c_i|| ||b_i||

All are those of the complex map; `exact_energy` is that of the real one, where a stored mode stands for a conjugate
pair. Energies are in the square of the signal's unit, and so are peaks, because LAST ranks their squares.
Letters: n modes, p inputs, q outputs, H channels; c1, c2 the columns of C for the two directions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..systems import OUTPUTS, DiagonalSystem

DIRECTIONS = ("paper", "exact", "released")
_RELEASED_EPS = 1e-8  # what the authors' code adds to the denominators of energy and peak
_ENERGY_FACTORS = {"complex": 1.0, "real": 0.5, "twice_real": 2.0}  # of a pair's real output, without its cross term


def _input_energy(system: DiagonalSystem) -> Tensor:
    """||b_i||^2, shape of lam."""
    power = system.B.abs().square()
    return power if system.siso else power.sum(1)


def _output_dot(system: DiagonalSystem, left: Tensor, right: Tensor) -> Tensor:
    """sum over outputs of left * right, shape of lam; both are one direction's (q, n) or (H, n)."""
    return left * right if system.siso else (left * right).sum(0)


def _directions(system: DiagonalSystem) -> list[Tensor]:
    """C of every direction, (q, n) or (H, n) each."""
    return list(system.C) if system.bidirectional else [system.C]


def _output_norms(system: DiagonalSystem) -> list[Tensor]:
    """||c_i|| of every direction, float64, shape of lam each."""
    return [_output_dot(system, C.conj(), C).real.sqrt() for C in _directions(system)]


def _output_energy(system: DiagonalSystem, bidirectional: str) -> Tensor:
    """What stands for ||c_i||^2 in products of norms, shape of lam.

    Of two directions: the mean of the squares ("paper"); (||c1|| + ||c2||)^2, which no gain exceeds ("exact"); and
    (||c1|| + ||c2||) / 4 ("released"), as the operators of the authors' code bind.
    """
    norms = _output_norms(system)
    if not system.bidirectional:
        return norms[0].square()
    if bidirectional == "paper":
        return (norms[0].square() + norms[1].square()) / 2
    return (norms[0] + norms[1]).square() if bidirectional == "exact" else (norms[0] + norms[1]) / 4


def _geometric(z: Tensor, horizon: int | None) -> Tensor:
    """sum_{k < horizon} z^k, or all of it: real or complex, elementwise.

    expm1 of the logarithm keeps the digits that 1 - z^T loses near z = 1, whose sum is T.
    """
    if horizon is None:
        return 1 / (1 - z)
    log = torch.log(z)
    powers = torch.expm1(horizon * log) / torch.expm1(log)
    return torch.where(z == 1, horizon, torch.where(z == 0, 1, powers))


def _decay(system: DiagonalSystem, horizon: int | None, eps: float = 0.0) -> Tensor:
    """sum_k r^(2k), shape of lam."""
    r = system.lam.abs()
    return _geometric(r.square(), horizon) if horizon is not None else 1 / ((1 - r) * (1 + r) + eps)


def energy(system: DiagonalSystem, bidirectional: str = "paper", horizon: int | None = None) -> Tensor:
    """Energy of each mode's complex impulse response, float64, shape of lam (Eq. 8; Eq. 7 with a horizon).

    Two directions share lam and B: "paper" averages them, "released" is the authors' code, "exact" is the energy of
    their sum, in which lag 0 is counted by both: (||c1||^2 + ||c2||^2) ||b||^2 / (1 - r^2) + 2 Re(c1^H c2) ||b||^2.
    """
    b = _input_energy(system)
    if not (system.bidirectional and bidirectional == "exact"):
        eps = _RELEASED_EPS if bidirectional == "released" else 0.0
        return _output_energy(system, bidirectional) * b * _decay(system, horizon, eps)
    first, second = _directions(system)
    both = sum(norm.square() for norm in _output_norms(system)) * _decay(system, horizon)
    return ((both + 2 * _output_dot(system, first.conj(), second).real) * b).clamp(min=0)


def exact_energy(system: DiagonalSystem, horizon: int | None = None) -> Tensor:
    """Energy of what each stored mode adds to the output, both directions and the conjugate included, shape of lam.

    2 Re(c x): 2 E + 2 Re[(c^T c)(b b^T) / (1 - lam^2)], transposes without conjugation; Re(c x) is a quarter of it.
    """
    E = energy(system, "exact", horizon)
    if system.output == "complex":
        return E
    b = system.B.square() if system.siso else system.B.square().sum(1)
    each = _directions(system)
    cross = sum(_output_dot(system, C, C) for C in each) * _geometric(system.lam.square(), horizon)
    if system.bidirectional:
        cross = cross + 2 * _output_dot(system, *each)
    return (_ENERGY_FACTORS[system.output] * (E + (cross * b).real)).clamp(min=0)


def squared_peak(system: DiagonalSystem, bidirectional: str = "paper") -> Tensor:
    """Square of each mode's H-infinity norm, which is LAST's h_i, float64, shape of lam."""
    eps = _RELEASED_EPS if bidirectional == "released" else 0.0
    denominator = (1 - system.lam.abs()).square() + eps
    return _output_energy(system, bidirectional) * _input_energy(system) / denominator


def hankel(system: DiagonalSystem, bidirectional: str = "paper") -> Tensor:
    """Hankel singular value of each mode alone, float64, shape of lam."""
    norms = (_output_energy(system, bidirectional) * _input_energy(system)).sqrt()
    return norms * _decay(system, None)


def magnitude(system: DiagonalSystem, bidirectional: str = "paper") -> Tensor:
    """r ||c_i|| ||b_i||, float64, shape of lam. It is an assumption: the papers' text does not have theirs."""
    return system.lam.abs() * (_output_energy(system, bidirectional) * _input_energy(system)).sqrt()


VALUES = ("energy", "exact_energy", "hinf", "hankel", "magnitude")


def mode_values(
    system: DiagonalSystem, value: str, bidirectional: str = "paper", horizon: int | None = None, where: str = "system"
) -> Tensor:
    """One of VALUES of every mode, float64, shape of lam; 0 for padding.

    Raises:
        ValueError: a mode whose value is infinite or not a number, an eigenvalue with |lam| >= 1 above all; with a
            horizon the energies of such modes are finite. The message starts with `where`.
    """
    if system.present is not None:  # nothing of padding counts, whatever its numbers
        nothing = {name: torch.where(system.present, getattr(system, name), 0) for name in ("lam", "C")}
        B = torch.where(system.present if system.siso else system.present[:, None], system.B, 0)
        system = DiagonalSystem(nothing["lam"], B, nothing["C"], system.output)
    if value in ("energy", "exact_energy"):
        check_stable(system, where, horizon)
        found = exact_energy(system, horizon) if value == "exact_energy" else energy(system, bidirectional, horizon)
    else:
        if value != "magnitude":
            check_stable(system, where)
        found = {"hinf": squared_peak, "hankel": hankel, "magnitude": magnitude}[value](system, bidirectional)
    if not torch.isfinite(found).all():
        index = int((~torch.isfinite(found)).flatten().nonzero()[0])
        raise ValueError(f"{where}: {value} of mode {index} must be finite, got {float(found.flatten()[index])}")
    return found


def check_stable(system: DiagonalSystem, where: str, horizon: int | None = None) -> None:
    """Refuse eigenvalues on or outside of the unit circle, where sums over all lags do not exist."""
    r = system.lam.abs() if system.present is None else system.lam.abs()[system.present]
    unstable = int((~(r < 1)).sum())
    if unstable and (horizon is None or not torch.isfinite(r).all()):
        raise ValueError(
            f"{where}: |lam| must be below 1, got {float(r.max()):.9g} and {unstable} such modes of {r.numel()}; "
            "energies over the first T lags exist: horizon=T"
        )


def output_factor(output: str, value: str) -> float:
    """What makes values of layers with different outputs comparable: the real map's value over the complex one's."""
    if value == "energy":
        return _ENERGY_FACTORS[output]
    if value == "hinf":
        return OUTPUTS[output] ** 2
    return OUTPUTS[output] if value in ("hankel", "magnitude") else 1.0
