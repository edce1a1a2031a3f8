# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""The spectral budget K: one name and one meaning from the config to the command line.

None means the config's default, then the full capacity. An int holds for every layer, a list names one budget per
layer, a (B,) integer tensor one per row of the batch, a str a preset of the config. Everything else is refused with
the value and the legal range, before any compute.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Union

import numpy as np
import torch

SpectralBudget = Union[None, int, str, Sequence[int], torch.Tensor]


@dataclass(frozen=True)
class ResolvedBudget:
    """What runs: K per layer, and per row where rows differ.

    Attributes:
        layers: K of each layer; with `rows`, the largest row's K in every layer.
        rows: (B,) int64 budgets, or None when all rows share `layers`.
    """

    layers: tuple[int, ...]
    rows: torch.Tensor | None = None

    def report(self) -> tuple[int, ...] | torch.Tensor:
        """The budget in the form in which model outputs carry it."""
        return self.layers if self.rows is None else self.rows


def resolve_budget(
    value: SpectralBudget,
    *,
    capacity: int,
    num_layers: int,
    presets: Mapping[str, int | Sequence[int]] | None = None,
    default: SpectralBudget = None,
    batch_size: int | None = None,
) -> ResolvedBudget:
    """Turn any accepted form of `spectral_budget` into the budgets that run.

    Args:
        value: what the caller asked for. default: what the config says, used when value is None.
        capacity: number of channels the weights hold. num_layers, batch_size: legal lengths of a list and a tensor.
        presets: names a str may take.
    Returns:
        ResolvedBudget.
    Raises:
        ValueError: anything else, naming the value and the legal range.
    """
    if value is None:
        value = default
    if value is None:
        return ResolvedBudget((capacity,) * num_layers)
    if isinstance(value, str):
        presets = presets or {}
        if value not in presets:
            known = ", ".join(map(repr, presets)) or "none are stored in config.budget_presets"
            raise ValueError(f"unknown spectral_budget preset {value!r}; known presets: {known}")
        return resolve_budget(presets[value], capacity=capacity, num_layers=num_layers)
    if isinstance(value, torch.Tensor) and value.ndim > 0:
        return _resolve_rows(value, capacity, num_layers, batch_size)
    if isinstance(value, (list, tuple)):
        if len(value) != num_layers:
            raise ValueError(
                f"spectral_budget as a list needs one integer for each of the {num_layers} layers, "
                f"got {len(value)}: {list(value)!r}"
            )
        return ResolvedBudget(tuple(_check(k, capacity) for k in value))
    return ResolvedBudget((_check(value, capacity),) * num_layers)


def _check(value: object, capacity: int) -> int:
    """A plain budget as int; NumPy integers and integer tensors of one element pass, bool and float do not."""
    if isinstance(value, torch.Tensor) and not value.is_floating_point() and value.dtype != torch.bool:
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or not 1 <= value <= capacity:
        raise ValueError(f"spectral_budget must be an integer in [1, {capacity}], got {value!r}")
    return tuple(range(capacity + 1))[value]  # an index is a constant to torch.compile: one graph per budget


def _resolve_rows(value: torch.Tensor, capacity: int, num_layers: int, batch_size: int | None) -> ResolvedBudget:
    if value.is_floating_point() or value.is_complex() or value.dtype == torch.bool:
        raise ValueError(f"spectral_budget as a tensor must hold integers in [1, {capacity}], got dtype {value.dtype}")
    if value.ndim != 1 or (batch_size is not None and value.shape[0] != batch_size):
        rows = "batch_size" if batch_size is None else batch_size
        raise ValueError(f"spectral_budget as a tensor must have shape ({rows},), got {tuple(value.shape)}")
    low, high = (int(x) for x in torch.aminmax(value))
    if low < 1 or high > capacity:
        raise ValueError(f"spectral_budget must hold integers in [1, {capacity}], got values from {low} to {high}")
    rows_differ = low != high
    return ResolvedBudget((high,) * num_layers, value.long() if rows_differ else None)
