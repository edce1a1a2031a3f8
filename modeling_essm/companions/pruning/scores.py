# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""How important every mode of a model is: AIRE-Prune, LAST and what they are compared with.

Mode i of x_t = lam x_{t-1} + B u_t, y = C x has the impulse response c_i lam_i^k b_i, k = 0, 1, ... With r = |lam_i|:

    energy     sum_k ||c_i lam_i^k b_i||_F^2 = ||c_i||^2 ||b_i||^2 / (1 - r^2)                       (AIRE-Prune, Eq. 8)
    up to T    ||c_i||^2 ||b_i||^2 (1 - r^(2T)) / (1 - r^2), lags 0 .. T-1                           (Eq. 7)
    hinf       the square of sup_w ||c_i b_i / (1 - lam_i e^(-jw))|| = ||c_i|| ||b_i|| / (1 - r)     (LAST, Eq. 13)
    hankel     ||c_i|| ||b_i|| / (1 - r^2)
    magnitude  r ||c_i|| ||b_i||, an assumption: the papers' text does not have theirs

All are those of the complex map; `exact_energy` is that of the real one, where a stored mode stands for a conjugate
pair. METHODS names a value and a rule: scores are the raw values, or those of a layer in descending order over their
prefix sums, score_(r) = v_(r) / (sum_{j<=r} v_(j) + eps)                                     (AIRE-Prune, Eq. 11)
Letters: n modes, p inputs, q outputs, H channels; c1, c2 the columns of C for the two directions.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..systems import OUTPUTS, DiagonalSystem, StateLayer, check_stable, state_layers

METHODS = {  # method: (value, whether the rule is prefix)
    "aire": ("energy", True),
    "aire_exact": ("exact_energy", True),
    "last": ("hinf", True),
    "lamp": ("magnitude", True),
    "magnitude": ("magnitude", False),
    "energy": ("energy", False),
    "hinf": ("hinf", False),
    "hankel": ("hankel", False),
    "random": ("random", False),
}
DIRECTIONS = ("paper", "exact", "released")
GRANULARITIES = ("mode", "mode_index")
_RELEASED_EPS = 1e-8  # what the authors' code adds to the denominators of energy and peak
_ENERGY_FACTORS = {"complex": 1.0, "real": 0.5, "twice_real": 2.0}  # of a pair's real output, without its cross term


def _input_energy(system: DiagonalSystem) -> Tensor:
    """||b_i||^2."""
    power = system.B.abs().square()
    return power if system.siso else power.sum(1)


def _output_dot(system: DiagonalSystem, left: Tensor, right: Tensor) -> Tensor:
    """sum over outputs of left * right; both are one direction's (q, n) or (H, n)."""
    return left * right if system.siso else (left * right).sum(0)


def _output_energy(system: DiagonalSystem, bidirectional: str) -> Tensor:
    """What stands for ||c_i||^2 in products of norms. With two directions the mean of the squares ("paper");
    (||c1|| + ||c2||)^2, which no gain exceeds ("exact"); (||c1|| + ||c2||) / 4, as the authors compute it ("released").
    """
    norms = [_output_dot(system, C.conj(), C).real.sqrt() for C in system.directions]
    if len(norms) == 1 or bidirectional == "paper":
        return sum(norm.square() for norm in norms) / len(norms)  # type: ignore[return-value]
    return (norms[0] + norms[1]).square() if bidirectional == "exact" else (norms[0] + norms[1]) / 4


def _decay(z: Tensor, horizon: int) -> Tensor:
    """sum_{k < horizon} z^k. expm1 of the logarithm keeps the digits that 1 - z^T loses near z = 1, whose sum is T."""
    log = torch.log(z)
    powers = torch.expm1(horizon * log) / torch.expm1(log)
    return torch.where(z == 1, horizon, torch.where(z == 0, 1, powers))


def energy(system: DiagonalSystem, bidirectional: str = "paper", horizon: int | None = None) -> Tensor:
    """Energy of each mode's complex impulse response (Eq. 8; Eq. 7 with a horizon), float64, shape of lam.

    Two directions share lam and B: "paper" averages them, "released" is the authors' code, "exact" is the energy of
    their sum, in which lag 0 is counted by both: (||c1||^2 + ||c2||^2) ||b||^2 / (1 - r^2) + 2 Re(c1^H c2) ||b||^2.
    """
    b, r = _input_energy(system), system.lam.abs()
    eps = _RELEASED_EPS if bidirectional == "released" else 0.0
    decay = 1 / ((1 - r) * (1 + r) + eps) if horizon is None else _decay(r.square(), horizon)
    if not (system.bidirectional and bidirectional == "exact"):
        return _output_energy(system, bidirectional) * b * decay
    first, second = system.directions
    both = 2 * _output_energy(system, "paper") * decay
    return ((both + 2 * _output_dot(system, first.conj(), second).real) * b).clamp(min=0)


def exact_energy(system: DiagonalSystem, horizon: int | None = None) -> Tensor:
    """Energy of what each stored mode adds to the output, both directions and the conjugate included.

    2 Re(c x): 2 E + 2 Re[(c^T c)(b b^T) / (1 - lam^2)], transposes without conjugation; Re(c x) is a quarter of it.
    """
    E = energy(system, "exact", horizon)
    if system.output == "complex":
        return E
    b, square = (system.B.square() if system.siso else system.B.square().sum(1)), system.lam.square()
    decay = 1 / (1 - square) if horizon is None else _decay(square, horizon)
    cross = sum(_output_dot(system, C, C) for C in system.directions) * decay
    if system.bidirectional:
        cross = cross + 2 * _output_dot(system, *system.directions)
    return (_ENERGY_FACTORS[system.output] * (E + (cross * b).real)).clamp(min=0)


def mode_values(
    system: DiagonalSystem, value: str, bidirectional: str = "paper", horizon: int | None = None, where: str = "system"
) -> Tensor:
    """The value that a method of METHODS names, of every mode, float64, shape of lam; 0 for padding.

    Raises:
        ValueError: a mode whose value is infinite or not a number, an eigenvalue with |lam| >= 1 above all; with a
            horizon the energies of such modes are finite. The message starts with `where`.
    """
    system = system.without_padding()  # nothing of padding counts, whatever its numbers
    if value != "magnitude" and not (horizon is not None and value in ("energy", "exact_energy")):
        try:
            check_stable(system, where)
        except ValueError as error:
            raise ValueError(f"{error}; energies over the first T lags exist: method='aire', horizon=T") from None
    r, both = system.lam.abs(), _output_energy(system, bidirectional) * _input_energy(system)
    if value == "exact_energy":
        found = exact_energy(system, horizon)
    elif value == "energy":
        found = energy(system, bidirectional, horizon)
    elif value == "hinf":
        found = both / ((1 - r).square() + (_RELEASED_EPS if bidirectional == "released" else 0.0))
    elif value == "hankel":
        found = both.sqrt() * (1 / ((1 - r) * (1 + r)))
    else:
        found = r * both.sqrt()
    if (bad := ~torch.isfinite(found)).any():
        index = int(bad.flatten().nonzero()[0])
        raise ValueError(f"{where}: {value} of mode {index} must be finite, got {float(found.flatten()[index])}")
    return found


def _output_factor(output: str, value: str) -> float:
    """What makes values of layers with different outputs comparable: the real map's value over the complex one's."""
    norm = OUTPUTS[output]
    factors = {"energy": _ENERGY_FACTORS[output], "hinf": norm**2, "hankel": norm, "magnitude": norm}
    return factors.get(value, 1.0)


@dataclass(frozen=True)
class LayerImportance:
    """Values of a layer's modes and scores of its units.

    Attributes:
        raw: the value of every mode, float64, (n,) or (H, n); of a state (n,) over all channels.
        present: bool like raw, False for padding.
        scores: what ranks the units, float64, (units,), without padding.
        order: (H, n), the modes of each channel by descending value, where a unit is a rank; None where it is a mode.
    """

    name: str
    kind: str
    raw: Tensor
    present: Tensor
    scores: Tensor
    order: Tensor | None = None


@dataclass(frozen=True)
class Importance:
    """Scores of all modes of a model, one `LayerImportance` per layer, and how they came about."""

    layers: tuple[LayerImportance, ...]
    method: str
    eps: float

    @property
    def raw(self) -> list[Tensor]:
        return [layer.raw for layer in self.layers]

    @property
    def scores(self) -> list[Tensor]:
        return [layer.scores for layer in self.layers]


def prefix_scores(values: Tensor, eps: float = 0.0) -> Tensor:
    """v_(r) / (v_(1) + ... + v_(r) + eps) of values (n,) >= 0, each at its own place, float64; ties by index.

    Non-increasing in r. 0 / 0 is 0, but 1 for the first of a layer, as of any other layer without eps.
    """
    ranked, index = torch.sort(values, descending=True, stable=True)
    scores = torch.where(ranked > 0, ranked / (ranked.cumsum(0) + eps), 0)
    if eps == 0:
        scores[:1] = 1
    return torch.empty_like(scores).scatter(0, index, scores)


def importance(
    model: nn.Module,
    method: str = "aire",
    calibration: Iterable[Tensor | Mapping[str, Any]] | None = None,
    seed: int = 0,
    *,
    bidirectional: str = "paper",
    granularity: str = "mode",
    horizon: int | None = None,
    eps: float = 0.0,
) -> Importance:
    """Score every mode of every layer of a model that has modes.

    Args:
        model: holds diagonal SSMs, MambaMixer, Mamba2Mixer or layers of a registered class. method: one of METHODS.
        calibration: batches of input_ids (B, L), or of keyword arguments of the model. Energies of selective layers
            (Mamba) are measured on them; the others need none.
        seed: of method "random".
        bidirectional: what two directions that share lam and B count. "paper" averages their energies, "exact" takes
            the energy (or a bound of the gain) of their sum, "released" is the authors' code, with its power of C and
            the 1e-8 in its denominators. "aire_exact" always counts exactly.
        granularity: "mode" (default) scores every stored mode, of a Mamba layer every state for all its channels;
            "mode_index", for layers with modes per channel, sums the r-th best of all channels, so that tensors stay
            rectangular.
        horizon: T: energies of the first T lags (Eq. 7), finite for |lam| >= 1 too. None: of all.
        eps: epsilon of the prefix rule, which the papers give no value for. Layers whose values are far below it can
            lose all of their modes.
    Returns:
        Values and scores in float64, from systems in complex128. Without the prefix rule, scores are the values times
        the factor between a layer's real and complex output, so that layers of different kinds compare.
    Raises:
        ValueError: anything out of range or unknown, no layers, calibration that is missing, a method that a selective
            layer has no formula for, eigenvalues with |lam| >= 1 where all lags are summed.
    """
    legal = {"method": METHODS, "bidirectional": DIRECTIONS, "granularity": GRANULARITIES}
    for name, given in (("method", method), ("bidirectional", bidirectional), ("granularity", granularity)):
        if given not in legal[name]:
            raise ValueError(f"{name} must be one of {', '.join(legal[name])}, got {given!r}")
    if horizon is not None and (type(horizon) is not int or horizon < 1):
        raise ValueError(f"horizon must be None or an integer of at least 1, got {horizon!r}")
    if not 0 <= eps < math.inf:
        raise ValueError(f"eps must be a finite number of at least 0, got {eps!r}")
    value, prefix = METHODS[method]
    if horizon is not None and value not in ("energy", "exact_energy"):
        raise ValueError(f"horizon is of energies, method aire, aire_exact or energy, got {horizon} with {method!r}")
    if eps and not prefix:
        raise ValueError(f"eps is of the prefix rule, which method {method!r} does not use, got {eps}")
    layers = state_layers(model)
    measured = _measured(model, layers, value, calibration, horizon)
    generator = torch.Generator().manual_seed(seed)
    found = []
    for layer in layers:
        system = None if layer.adapter.selective else layer.read()
        if value == "random":
            raw = torch.rand(layer.adapter.shape(layer.module), dtype=torch.float64, generator=generator)
        elif system is None:
            raw = measured[layer.name]
        else:
            raw = mode_values(system, value, bidirectional, horizon, layer.name)
        present = torch.ones_like(raw, dtype=torch.bool) if system is None else system.there
        raw = torch.where(present, raw.square() if method == "lamp" else raw, 0)
        own = _in_units(layer, raw, present, granularity)
        if prefix:
            scores = prefix_scores(own.scores, eps)
        else:
            scores = own.scores * (1.0 if system is None else _output_factor(system.output, value))
        found.append(replace(own, scores=scores))
    return Importance(tuple(found), method, eps)


def _measured(
    model: nn.Module, layers: list[StateLayer], value: str, calibration: Any, horizon: int | None
) -> dict[str, Tensor]:
    """Energies of the selective layers' states, by layer name."""
    selective = [layer for layer in layers if layer.adapter.selective]
    if not selective or value == "random":
        return {}
    first = f"{selective[0].name} ({selective[0].kind})"
    if value not in ("energy", "exact_energy"):
        raise ValueError(
            f"{value} of {first} is not defined, because its parameters depend on the input: method must be "
            "aire, aire_exact, energy or random"
        )
    if horizon is not None:
        raise ValueError(f"horizon must be None where {first} is measured on calibration text, got {horizon}")
    if calibration is None:
        raise ValueError(
            f"{first} has parameters that depend on the input: give calibration, e.g. a few input_ids (essm-prune: "
            "--calibration_files)"
        )
    from .mamba import measure_energies

    return measure_energies(model, selective, calibration, "along" if value == "exact_energy" else "frozen")


def _in_units(layer: StateLayer, raw: Tensor, present: Tensor, granularity: str) -> LayerImportance:
    """The layer with what its units are worth as scores."""
    if granularity != "mode_index" or raw.ndim == 1:
        return LayerImportance(layer.name, layer.kind, raw, present, raw[present])
    order = torch.argsort(torch.where(present, raw, -1), dim=-1, descending=True, stable=True)
    width = int(present.sum(-1).max()) if present.numel() else 0
    scores = raw.gather(-1, order).sum(0)[:width]
    return LayerImportance(layer.name, layer.kind, raw, present, scores, order[:, :width])
