# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Which modes stay: a share, a number or a threshold, over all layers or equally in each.

Ties are broken by (score, layer, index), and a target number is met exactly. A threshold keeps every mode whose score
reaches it, ties included.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..._files import write_text
from ..systems import DiagonalSystem

if TYPE_CHECKING:
    from .scores import Importance, LayerImportance

SCOPES = ("global", "uniform")
FORMAT_VERSION = 1


@dataclass(frozen=True)
class LayerPlan:
    """Which modes of a layer stay: `keep` is a bool tensor (n,) or (H, n), padding False in it and in `present`."""

    name: str
    kind: str
    keep: Tensor
    present: Tensor
    system: DiagonalSystem | None = None

    @property
    def kept(self) -> int:
        """Modes that stay."""
        return int(self.keep.sum())

    @property
    def modes(self) -> int:
        """Modes that there were."""
        return int(self.present.sum())

    @property
    def size(self) -> int:
        """Modes to store per channel: the largest number of any channel."""
        return int(self.keep.sum(-1).max()) if self.keep.numel() else 0


@dataclass(frozen=True)
class Plan:
    """Which modes of a model stay. `prune` masks the others, `remove` then takes them out."""

    layers: tuple[LayerPlan, ...]
    method: str
    scope: str

    @property
    def sizes(self) -> list[int]:
        """Modes that each layer needs to store; with modes per channel the largest number of any.

        What `remove` returns, except that all layers of a Mamba store as many as the one that needs most.
        """
        return [layer.size for layer in self.layers]

    @property
    def kept(self) -> list[int]:
        """Modes that stay per layer, over all channels."""
        return [layer.kept for layer in self.layers]

    @property
    def keep(self) -> list[Tensor]:
        """Masks of the modes that stay, one per layer."""
        return [layer.keep for layer in self.layers]

    @property
    def total(self) -> int:
        """Modes that stay."""
        return sum(self.kept)

    @property
    def pruned_share(self) -> float:
        """Share of the modes that go, in [0, 1]."""
        modes = sum(layer.modes for layer in self.layers)
        return 1 - self.total / modes if modes else 0.0

    def certificate(self, model: nn.Module | None = None) -> list[dict[str, float]]:
        """Bounds on the H-infinity norm of what each layer loses: `certificates.certificate` of every layer.

        Args:
            model: the model before pruning; only a plan that was read from a file needs it.
        Raises:
            ValueError: a plan from a file without a model, a model with masks, a selective layer, an unstable mode.
        """
        from .certificates import certificate
        from .masks import is_pruned, matched

        plan = self
        if model is not None:
            if is_pruned(model):
                raise ValueError("a certificate needs the model before pruning, got one with masks: restore it first")
            pairs = zip(self.layers, matched(model, self))
            plan = replace(self, layers=tuple(replace(own, system=layer.read()) for own, layer in pairs))
        for layer in plan.layers:
            if layer.system is None:
                raise ValueError(
                    f"{layer.name} ({layer.kind}) has no modes at hand to certify: give the model before pruning, "
                    "certificate(model); layers whose parameters depend on the input have no certificate"
                )
        return [certificate(layer.system, layer.keep, layer.name) for layer in plan.layers if layer.system is not None]

    def save(self, path: str | os.PathLike) -> None:
        """Write the plan as JSON, in one move."""
        record = {
            "format_version": FORMAT_VERSION,
            "method": self.method,
            "scope": self.scope,
            "layers": [
                {
                    "name": layer.name,
                    "kind": layer.kind,
                    "keep": _to_rows(layer.keep),
                    "present": _to_rows(layer.present),
                }
                for layer in self.layers
            ],
        }
        write_text(Path(path), json.dumps(record, indent=1) + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike) -> Plan:
        """Read a plan that `save` wrote.

        Raises:
            FileNotFoundError: there is none.
            ValueError: not such a file; the message names the field.
        """
        path = Path(path)
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
        except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
            raise ValueError(f"{path} must be JSON: {error}") from error
        version = record.get("format_version") if isinstance(record, dict) else None
        if type(version) is not int or version != FORMAT_VERSION:
            raise ValueError(f"{path}: format_version must be {FORMAT_VERSION}, got {version!r}")
        scope, layers = record.get("scope"), record.get("layers")
        if scope not in SCOPES:
            raise ValueError(f"{path}: scope must be one of {', '.join(SCOPES)}, got {scope!r}")
        if not isinstance(layers, list) or not layers:
            raise ValueError(f"{path}: layers must be a list of at least one layer, got {layers!r}")
        read = tuple(_read_layer(layer, f"{path}: layers[{i}]") for i, layer in enumerate(layers))
        return cls(read, _text(record, "method", str(path)), scope)


def _text(record: Any, name: str, where: str) -> str:
    value = record.get(name) if isinstance(record, dict) else None
    if not isinstance(value, str):
        raise ValueError(f"{where}: {name} must be text, got {value!r}")
    return value


def _read_layer(record: Any, where: str) -> LayerPlan:
    name, kind = _text(record, "name", where), _text(record, "kind", where)
    keep, present = (_from_rows(record.get(field), f"{where}: {field}") for field in ("keep", "present"))
    if keep.shape != present.shape or bool((keep & ~present).any()):
        raise ValueError(f"{where}: keep must be a part of present, got shapes {keep.shape} and {present.shape}")
    return LayerPlan(name, kind, keep, present)


def _to_rows(mask: Tensor) -> Any:
    """(n,) as text of 0 and 1, (H, n) as a list of such."""
    if mask.ndim == 2:
        return [_to_rows(row) for row in mask]
    return "".join("01"[bit] for bit in mask.int().tolist())


def _from_rows(rows: Any, where: str) -> Tensor:
    each = rows if isinstance(rows, list) else [rows]
    if not each or not all(isinstance(row, str) and set(row) <= set("01") and len(row) == len(each[0]) for row in each):
        raise ValueError(f"{where} must be text of 0 and 1, or a list of such of one length, got {rows!r}")
    mask = torch.tensor([[bit == "1" for bit in row] for row in each], dtype=torch.bool).reshape(len(each), -1)
    return mask if isinstance(rows, list) else mask[0]


def allocate(
    importance: Importance,
    *,
    amount: float | None = None,
    total: int | None = None,
    threshold: float | None = None,
    scope: str = "global",
    min_keep: int = 1,
) -> Plan:
    """Choose the modes that stay. Give one of `amount`, `total` and `threshold`.

    Args:
        importance: scores of all modes.
        amount: share of the units to prune, in [0, 1]; round(amount * units) of them go, fewer where min_keep forbids.
        total: units that stay in the whole model, exactly.
        threshold: the least score that stays.
        scope: "global" compares scores of all layers; "uniform" prunes every layer by the same share.
        min_keep: units of each layer that stay whatever their score. 0 lets a whole layer go, which then computes its
            skip D u alone; scores with the prefix rule need `eps_rel` or `eps` for that, as each layer's first is 1
            without it.
    Returns:
        A plan. A unit is what the importance scores: a stored mode, a rank of modes ("mode_index") or a state.
    Raises:
        ValueError: anything out of range, or a combination that means nothing.
    """
    given = {name: value for name, value in (("amount", amount), ("total", total), ("threshold", threshold))}
    if sum(value is not None for value in given.values()) != 1:
        raise ValueError(f"give exactly one of amount, total and threshold, got {given}")
    if scope not in SCOPES:
        raise ValueError(f"scope must be one of {', '.join(SCOPES)}, got {scope!r}")
    if isinstance(min_keep, bool) or not isinstance(min_keep, int) or min_keep < 0:
        raise ValueError(f"min_keep must be an integer of at least 0, got {min_keep!r}")
    if min_keep == 0 and importance.prefix and not importance.eps > 0:
        raise ValueError(
            "min_keep=0 needs scores that can tell an idle layer: importance(..., eps_rel=1e-3), got eps 0, with which "
            "the first score of every layer is 1"
        )
    scores = [layer.unit_scores() for layer in importance.layers]
    counts = [len(values) for values in scores]
    least = [min(min_keep, count) for count in counts]
    order = [torch.sort(values, descending=True, stable=True).indices for values in scores]
    if threshold is not None:
        if scope == "uniform":
            raise ValueError("threshold compares scores of all layers: scope must be global, got 'uniform'")
        if isinstance(threshold, bool) or not isinstance(threshold, (int, float)) or math.isnan(threshold):
            raise ValueError(f"threshold must be a number, got {threshold!r}")
        sizes = [max(low, int((values >= threshold).sum())) for low, values in zip(least, scores)]
    else:
        target = _target(amount, total, sum(counts), sum(least))
        sizes = (_proportional if scope == "uniform" else _largest)(scores, target, least)
    layers = []
    for layer, size, ranked in zip(importance.layers, sizes, order):
        units = torch.zeros(len(ranked), dtype=torch.bool)
        units[ranked[:size]] = True
        layers.append(LayerPlan(layer.name, layer.kind, *_modes(layer, units), layer.system))
    return Plan(tuple(layers), importance.method, scope)


def _target(amount: float | None, total: int | None, units: int, least: int) -> int:
    if total is not None:
        if isinstance(total, bool) or not isinstance(total, int) or not least <= total <= units:
            raise ValueError(f"total must be an integer in [{least}, {units}], got {total!r}")
        return total
    if isinstance(amount, bool) or not isinstance(amount, (int, float)) or not 0 <= amount <= 1:
        raise ValueError(f"amount must be the share of modes to prune, a number in [0, 1], got {amount!r}")
    return max(least, units - round(amount * units))


def _largest(scores: Sequence[Tensor], target: int, least: Sequence[int]) -> list[int]:
    """How many of each layer are among the `target` best of all, once each layer has its `least` best."""
    sizes = list(least)
    free, layer_of = [], []
    for i, values in enumerate(scores):
        rest = torch.sort(values, descending=True, stable=True).values[least[i] :]
        free.append(rest)
        layer_of.append(torch.full((len(rest),), i))
    # Within a layer the order is by (-score, index) already, so a stable sort breaks ties by (layer, index).
    best = torch.sort(torch.cat(free), descending=True, stable=True).indices[: target - sum(least)]
    for i in torch.cat(layer_of)[best].tolist():
        sizes[i] += 1
    return sizes


def _proportional(scores: Sequence[Tensor], target: int, least: Sequence[int]) -> list[int]:
    """`target` distributed as the layers' sizes are, by largest remainder, with at least `least` each."""
    counts = [len(values) for values in scores]
    quotas = [target * count / max(sum(counts), 1) for count in counts]
    sizes = [min(count, max(low, math.floor(quota))) for count, low, quota in zip(counts, least, quotas)]
    while sum(sizes) < target:
        i = max((i for i in range(len(sizes)) if sizes[i] < counts[i]), key=lambda i: quotas[i] - sizes[i])
        sizes[i] += 1
    while sum(sizes) > target:
        i = min((i for i in range(len(sizes)) if sizes[i] > least[i]), key=lambda i: quotas[i] - sizes[i])
        sizes[i] -= 1
    return sizes


def _modes(layer: LayerImportance, units: Tensor) -> tuple[Tensor, Tensor]:
    """Masks over modes, (n,) or (H, n): which stay, which there are."""
    present = torch.ones_like(layer.raw, dtype=torch.bool) if layer.present is None else layer.present
    if layer.order is not None:  # a unit is a rank: of every channel the mode in that place
        keep = torch.zeros_like(present).scatter(-1, layer.order, units.expand(layer.order.shape))
        return keep & present, present
    keep = torch.zeros_like(present)
    keep[present] = units
    return keep, present
