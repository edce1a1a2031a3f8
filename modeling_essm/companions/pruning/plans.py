# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Which modes stay: a share or a number, over all layers or equally in each.

Ties are broken by (score, layer, index), and a target number is met exactly.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ..._files import write_text
from .scores import METHODS, Importance, LayerImportance

SCOPES = ("global", "uniform")


@dataclass(frozen=True)
class LayerPlan:
    """Which modes of a layer stay: `keep` is a bool tensor (n,) or (H, n), padding False in it and in `present`."""

    name: str
    kind: str
    keep: Tensor
    present: Tensor

    @property
    def modes(self) -> int:
        """Modes that there were."""
        return int(self.present.sum())


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
        return [int(keep.sum(-1).max()) if keep.numel() else 0 for keep in self.keep]

    @property
    def kept(self) -> list[int]:
        """Modes that stay per layer, over all channels."""
        return [int(keep.sum()) for keep in self.keep]

    @property
    def keep(self) -> list[Tensor]:
        """Masks of the modes that stay, one per layer."""
        return [layer.keep for layer in self.layers]

    def save(self, path: str | os.PathLike) -> None:
        """Write the plan as JSON, in one move."""
        rows = [
            {"name": own.name, "kind": own.kind, "keep": own.keep.int().tolist(), "present": own.present.int().tolist()}
            for own in self.layers
        ]
        record = {"method": self.method, "scope": self.scope, "layers": rows}
        write_text(Path(path), json.dumps(record) + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike) -> Plan:
        """Read a plan that `save` wrote. Raises FileNotFoundError, or ValueError for another file."""
        try:
            record = json.loads(Path(path).read_text(encoding="utf-8"))
            layers = []
            for row in record["layers"]:
                keep, present = (torch.tensor(row[name]).bool() for name in ("keep", "present"))
                if keep.shape != present.shape:
                    raise ValueError(f"keep {tuple(keep.shape)} is not of the shape of present {tuple(present.shape)}")
                layers.append(LayerPlan(row["name"], row["kind"], keep, present))
            return cls(tuple(layers), record["method"], record["scope"])
        except (ValueError, KeyError, TypeError, RuntimeError) as error:  # the last from torch, of other types
            raise ValueError(f"{path} must be a plan that `save` wrote: {error!r}") from error


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
        threshold: the least score that stays, over all layers (AIRE-Prune's theta).
        scope: "global" compares scores of all layers; "uniform" prunes every layer by the same share.
        min_keep: units of each layer that stay whatever their score. 0 lets a whole layer go, which then computes its
            skip D u alone; scores with the prefix rule need `eps` for that, as each layer's first is 1 without it.
    Returns:
        A plan. A unit is what the importance scores: a stored mode, a rank of modes ("mode_index") or a state.
    Raises:
        ValueError: anything out of range, or arguments that exclude each other.
    """
    if [amount, total, threshold].count(None) != 2:
        raise ValueError(f"give exactly one of amount, total and threshold, got {amount}, {total} and {threshold}")
    if threshold is not None and (scope != "global" or isinstance(threshold, bool) or not math.isfinite(threshold)):
        raise ValueError(f'threshold must be a finite number, with scope="global", got {threshold} and {scope!r}')
    if scope not in SCOPES:
        raise ValueError(f"scope must be one of {', '.join(SCOPES)}, got {scope!r}")
    if type(min_keep) is not int or min_keep < 0:
        raise ValueError(f"min_keep must be an integer of at least 0, got {min_keep!r}")
    if min_keep == 0 and METHODS[importance.method][1] and not importance.eps > 0:
        raise ValueError(
            "min_keep=0 needs scores that can tell an idle layer: importance(..., eps=1e-6), got eps 0, with which "
            "the first score of every layer is 1"
        )
    scores = [layer.scores for layer in importance.layers]
    units, least = sum(map(len, scores)), [min(min_keep, len(values)) for values in scores]
    if threshold is not None:
        total = sum(max(low, int((values >= threshold).sum())) for low, values in zip(least, scores))
    elif total is None:
        if not isinstance(amount, (int, float)) or isinstance(amount, bool) or not 0 <= amount <= 1:
            raise ValueError(f"amount must be the share of modes to prune, a number in [0, 1], got {amount!r}")
        total = max(sum(least), units - round(amount * units))
    elif type(total) is not int or not sum(least) <= total <= units:
        raise ValueError(f"total must be an integer in [{sum(least)}, {units}], got {total!r}")
    sizes = (_proportional if scope == "uniform" else _largest)(scores, total, least)
    layers = []
    for layer, size in zip(importance.layers, sizes):
        stay = torch.zeros(len(layer.scores), dtype=torch.bool)
        stay[torch.sort(layer.scores, descending=True, stable=True).indices[:size]] = True
        layers.append(LayerPlan(layer.name, layer.kind, _modes(layer, stay), layer.present))
    return Plan(tuple(layers), importance.method, scope)


def _largest(scores: Sequence[Tensor], target: int, least: Sequence[int]) -> list[int]:
    """How many of each layer are among the `target` best of all, once each layer has its `least` best."""
    free = [torch.sort(values, descending=True, stable=True).values[low:] for values, low in zip(scores, least)]
    layer_of = torch.cat([torch.full((len(rest),), i) for i, rest in enumerate(free)])
    # Within a layer the order is by (-score, index) already, so a stable sort breaks ties by (layer, index).
    best = torch.sort(torch.cat(free), descending=True, stable=True).indices[: target - sum(least)]
    return [low + int((layer_of[best] == i).sum()) for i, low in enumerate(least)]


def _proportional(scores: Sequence[Tensor], target: int, least: Sequence[int]) -> list[int]:
    """`target` distributed as the layers' sizes are, by largest remainder, with at least `least` each."""
    counts = [len(values) for values in scores]
    quotas = [target * count / max(sum(counts), 1) for count in counts]
    sizes = [min(count, max(low, math.floor(quota))) for count, low, quota in zip(counts, least, quotas)]
    while (short := target - sum(sizes)) != 0:
        step = 1 if short > 0 else -1
        free = [i for i, size in enumerate(sizes) if (size < counts[i] if step > 0 else size > least[i])]
        sizes[max(free, key=lambda i: step * (quotas[i] - sizes[i]))] += step
    return sizes


def _modes(layer: LayerImportance, units: Tensor) -> Tensor:
    """The mask of the modes that stay, (n,) or (H, n), from that of the units."""
    keep = torch.zeros_like(layer.present)
    if layer.order is None:
        keep[layer.present] = units
        return keep
    return keep.scatter(-1, layer.order, units.expand(layer.order.shape)) & layer.present
