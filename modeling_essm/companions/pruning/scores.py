# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""How important every mode of a model is: AIRE-Prune, LAST and what they are compared with.

A method is a value of a mode (see `mode_values`) and a rule:

    raw     the value itself, over all layers or, with allocate(scope="uniform"), by rank within each
    prefix  values of a layer in descending order v_(1) >= v_(2) >= ..., score_(r) = v_(r) / (sum_{j<=r} v_(j) + eps)
                                                                                             (AIRE-Prune, Eq. 11)

    | method | value | rule |
    | --- | --- | --- |
    | aire | energy as published, frozen-time energy of a selective layer | prefix |
    | aire_exact | energy with the conjugate and both directions, energy along the text of a selective layer | prefix |
    | last | square of the H-infinity norm | prefix |
    | lamp | square of the magnitude | prefix |
    | energy, hinf, magnitude, hankel | as they say, hinf squared | raw |
    | random | U(0, 1) | raw |

The prefix rule takes squares of magnitude and Hankel singular value. The lost definition of the papers' magnitude is
an assumption, see `mode_values.magnitude`.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..adapters import ElasticLayer, elastic_layers
from ..systems import DiagonalSystem
from .mode_values import DIRECTIONS, mode_values, output_factor

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
GRANULARITIES = ("mode", "mode_index", "state")
_SQUARED = ("magnitude", "hankel")  # under the prefix rule, as LAMP squares weights


@dataclass(frozen=True)
class LayerImportance:
    """Values of a layer's modes and scores of its units.

    Attributes:
        raw: the value of every mode, float64, (n,) or (H, n); of a state (n,) over all channels.
        scores: what ranks the units, float64: shape of raw, or (n,) for ranks of modes.
        present: bool like raw, None where all are modes.
        order: (H, n), the modes of each channel by descending value, where a unit is a rank.
        system: the modes themselves, None for a selective layer.
    """

    name: str
    kind: str
    raw: Tensor
    scores: Tensor
    present: Tensor | None = None
    order: Tensor | None = None
    system: DiagonalSystem | None = None

    def unit_scores(self) -> Tensor:
        """Scores of the units, flat and without padding."""
        return self.scores if self.order is not None or self.present is None else self.scores[self.present]

    def __post_init__(self) -> None:
        if self.order is None and self.present is None:
            object.__setattr__(self, "present", torch.ones_like(self.raw, dtype=torch.bool))


@dataclass(frozen=True)
class Importance:
    """Scores of all modes of a model, one `LayerImportance` per layer, and how they came about."""

    layers: tuple[LayerImportance, ...]
    method: str
    value: str
    prefix: bool
    eps: float

    @property
    def raw(self) -> list[Tensor]:
        return [layer.raw for layer in self.layers]

    @property
    def scores(self) -> list[Tensor]:
        return [layer.scores for layer in self.layers]


def prefix_scores(values: Tensor, eps: float = 0.0) -> Tensor:
    """v_(r) / (v_(1) + ... + v_(r) + eps) at each value's own place, float64; ties by index.

    Non-increasing in r. 0 / 0 is 0, but 1 for the first of a layer, as of any other layer without eps.

    Args:
        values: at least 0, (n,).
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
    granularity: str | None = None,
    horizon: int | None = None,
    eps: float = 0.0,
    eps_rel: float = 0.0,
    prefix: bool | None = None,
) -> Importance:
    """Score every mode of every layer of a model that has modes.

    Args:
        model: holds diagonal SSMs, MambaMixer, Mamba2Mixer or layers of a registered class.
        method: one of METHODS.
        calibration: batches of input_ids (B, L), or of keyword arguments of the model. Energies of selective layers
            (Mamba) are measured on them; the others need none.
        seed: of method "random".
        bidirectional: what two directions that share lam and B count. "paper" averages their energies, "exact" takes
            the energy (or a bound of the gain) of their sum, "released" is the authors' code, with its power of C and
            the 1e-8 in its denominators. "aire_exact" always counts exactly.
        granularity: "mode" (default) scores every stored mode; "mode_index", for layers with modes per channel, sums
            the r-th best of all channels, so that tensors stay rectangular; "state" is what a Mamba layer has: a
            state for all its channels.
        horizon: T: energies of the first T lags (Eq. 7), finite for |lam| >= 1 too. None: of all.
        eps: absolute epsilon of the prefix rule, which the papers give no value for.
        eps_rel: the same as a multiple of the median over layers of a layer's sum of values, our definition: it says
            how idle a whole layer must be to go, independently of the scale of the weights.
        prefix: replaces the method's rule, e.g. importance("hankel", prefix=True).
    Returns:
        Values and scores in float64, from systems in complex128. Without the prefix rule, scores are the values times
        the factor between a layer's real and complex output, so that layers of different kinds compare.
    Raises:
        ValueError: anything out of range or unknown, no layers, calibration that is missing, a method that a selective
            layer has no formula for, eigenvalues with |lam| >= 1 where all lags are summed.
    """
    value, rule = _checked(method, bidirectional, granularity, horizon, eps, eps_rel)
    prefix = rule if prefix is None else bool(prefix)
    layers = elastic_layers(model)
    measured = _measured(model, layers, value, calibration, horizon)
    generator = torch.Generator().manual_seed(seed)
    found = []
    for layer in layers:
        system = None if layer.adapter.selective else layer.read()
        if value == "random":
            shape = layer.adapter.shape(layer.module) if system is None else system.lam.shape
            raw = torch.rand(shape, dtype=torch.float64, generator=generator)
        elif system is None:
            raw = measured[layer.name]
        else:
            raw = mode_values(system, value, bidirectional, horizon, layer.name)
        present = None if system is None else system.present
        if present is not None:
            raw = torch.where(present, raw, 0)
        own = LayerImportance(layer.name, layer.kind, raw, raw, present, system=system)
        found.append(_in_units(own, _granularity(layer, granularity)))
    if prefix:
        found = [replace(layer, scores=layer.scores.square()) for layer in found] if value in _SQUARED else found
        if eps_rel:
            eps = eps_rel * statistics.median(float(layer.unit_scores().sum()) for layer in found)
        found = [_with_prefix(layer, eps) for layer in found]
    else:
        found = [_comparable(layer, value) for layer in found]
    return Importance(tuple(found), method, value, prefix, eps)


def _checked(method: str, bidirectional: str, granularity: Any, horizon: Any, eps: float, eps_rel: float) -> Any:
    if method not in METHODS:
        raise ValueError(f"method must be one of {', '.join(METHODS)}, got {method!r}")
    if bidirectional not in DIRECTIONS:
        raise ValueError(f"bidirectional must be one of {', '.join(DIRECTIONS)}, got {bidirectional!r}")
    if granularity is not None and granularity not in GRANULARITIES:
        raise ValueError(f"granularity must be None or one of {', '.join(GRANULARITIES)}, got {granularity!r}")
    if horizon is not None and (isinstance(horizon, bool) or not isinstance(horizon, int) or horizon < 1):
        raise ValueError(f"horizon must be None or an integer of at least 1, got {horizon!r}")
    for name, number in (("eps", eps), ("eps_rel", eps_rel)):
        if isinstance(number, bool) or not isinstance(number, (int, float)) or not 0 <= number < math.inf:
            raise ValueError(f"{name} must be a finite number of at least 0, got {number!r}")
    if eps and eps_rel:
        raise ValueError(f"give eps or eps_rel, got {eps} and {eps_rel}")
    return METHODS[method]


def _granularity(layer: ElasticLayer, wanted: str | None) -> str:
    legal = layer.adapter.granularities
    if wanted is not None and wanted not in legal:
        raise ValueError(f"{layer.name} ({layer.kind}): granularity must be one of {', '.join(legal)}, got {wanted!r}")
    return legal[0] if wanted is None else wanted


def _measured(
    model: nn.Module, layers: list[ElasticLayer], value: str, calibration: Any, horizon: int | None
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
        raise ValueError(f"{first} has parameters that depend on the input: give calibration, e.g. a few input_ids")
    from .mamba_states import measure_energies

    return measure_energies(model, selective, calibration, "along" if value == "exact_energy" else "frozen")


def _in_units(layer: LayerImportance, granularity: str) -> LayerImportance:
    if granularity != "mode_index" or layer.raw.ndim == 1:
        return layer
    present = layer.present
    assert present is not None
    order = torch.argsort(torch.where(present, layer.raw, -1), dim=-1, descending=True, stable=True)
    ranked = layer.raw.gather(-1, order)
    width = int(present.sum(-1).max()) if present.numel() else 0
    return replace(layer, scores=ranked.sum(0)[:width], order=order[:, :width])


def _with_prefix(layer: LayerImportance, eps: float) -> LayerImportance:
    scores = prefix_scores(layer.unit_scores(), eps)
    if layer.order is not None:
        return replace(layer, scores=scores)
    assert layer.present is not None
    return replace(layer, scores=torch.zeros_like(layer.raw).masked_scatter(layer.present, scores))


def _comparable(layer: LayerImportance, value: str) -> LayerImportance:
    factor = 1.0 if layer.system is None else output_factor(layer.system.output, value)
    return replace(layer, scores=layer.scores * factor)
