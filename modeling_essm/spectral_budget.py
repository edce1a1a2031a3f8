# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""The spectral budget K: one name and one meaning from the config to the command line.

None means the config's default, then the full capacity. An int holds for every layer, a list of them names one budget
per layer, a (B,) integer tensor one per row of the batch. A str is a preset of the config, a list of them one per row.
Where layers differ in capacity, a layer with less than an int or a row's budget runs all it has. Everything else is
refused with the value and the legal range, before any compute. Attention layers have no budget; lists of budgets skip
them.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeGuard, Union

import numpy as np
import torch

SpectralBudget = Union[None, int, str, Sequence[int], Sequence[str], torch.Tensor]
SPECTRAL_LAYER: Final = "linear_attention"  # what the library's `layer_types` calls one


def spectral_layers(config: Any) -> tuple[int, ...]:
    """Which layers of a model are spectral, in order; the others attend. Budgets and capacities count these only."""
    return tuple(i for i, kind in enumerate(config.layer_types) if kind == SPECTRAL_LAYER)


def is_hybrid(config: Any) -> bool:
    """Whether some layers of a model attend."""
    kinds = config.layer_types or ()
    return kinds.count(SPECTRAL_LAYER) < len(kinds)


@dataclass(frozen=True)
class ResolvedBudget:
    """What runs: K per layer, and per row where rows differ.

    Attributes:
        layers: K of each layer; with `rows`, the largest row's K in every layer.
        rows: (B,) int64 budgets, or None when all rows share `layers`; a layer with less capacity runs all it has.
        of_rows: the values of `rows`, read once.
    """

    layers: tuple[int, ...]
    rows: torch.Tensor | None = None
    of_rows: tuple[int, ...] | None = None

    def report(self) -> tuple[int, ...] | torch.Tensor:
        """The budget in the form in which model outputs carry it."""
        return self.layers if self.rows is None else self.rows


def resolve_budget(
    value: SpectralBudget,
    *,
    capacities: Sequence[int],
    presets: Mapping[str, int | Sequence[int]] | None = None,
    default: SpectralBudget = None,
    batch_size: int | None = None,
) -> ResolvedBudget:
    """Turn any accepted form of `spectral_budget` into the budgets that run.

    Args:
        value: what the caller asked for. default: what the config says, used when value is None.
        capacities: number of channels that each layer holds. batch_size: legal length of a tensor.
        presets: names a str may take.
    Returns:
        ResolvedBudget.
    Raises:
        ValueError: anything else, naming the value and the legal range.
    """
    if value is None:
        value = default
    if value is None:
        return ResolvedBudget(tuple(capacities))
    if isinstance(value, str):
        return ResolvedBudget(of_each_layer(_preset(value, presets), capacities))
    if _are_names(value):
        of_rows = {name: _preset(name, presets) for name in value}
        if lists := {name: K for name, K in of_rows.items() if isinstance(K, (list, tuple))}:
            raise ValueError(f"a row has one budget for all layers, and these presets have one for each: {lists}")
        if batch_size not in (None, len(value)):
            rows = f"one for each of the {batch_size} rows, got {len(value)}: {list(value)}"
            raise ValueError(f"spectral_budget as a list of names needs {rows}")
        value = torch.tensor([of_rows[name] for name in value])
    if isinstance(value, torch.Tensor) and value.ndim > 0:
        return _resolve_rows(value, capacities, batch_size)
    return ResolvedBudget(of_each_layer(value, capacities))


def _preset(name: str, presets: Mapping[str, int | Sequence[int]] | None) -> int | Sequence[int]:
    presets = presets or {}
    if name not in presets:
        known = ", ".join(map(repr, presets)) or "none are stored in config.budget_presets, essm-calibrate finds them"
        raise ValueError(f"unknown spectral_budget preset {name!r}; known presets: {known}")
    return presets[name]


def _are_names(value: object) -> TypeGuard[Sequence[str]]:
    return isinstance(value, (list, tuple)) and bool(value) and all(isinstance(name, str) for name in value)


def of_each_layer(value: object, capacities: Sequence[int], name: str = "spectral_budget") -> tuple[int, ...]:
    """An integer for every layer, cut to what each layer holds, or a list with one integer for each layer.

    Raises:
        ValueError: anything else, under that name, with the legal range.
    """
    if not isinstance(value, (list, tuple)):
        K = _check(value, max(capacities), name)
        return tuple(min(K, held) for held in capacities)
    if len(value) != len(capacities):
        raise ValueError(
            f"{name} as a list needs one integer for each of the {len(capacities)} spectral layers, "
            f"got {len(value)}: {reprlib.repr(list(value))}; one for each row of a batch is a tensor"
        )
    return tuple(_check(K, held, name, f" for layer {i}") for i, (K, held) in enumerate(zip(value, capacities)))


def _check(value: object, capacity: int, name: str = "spectral_budget", where: str = "") -> int:
    """A plain budget as int; NumPy integers and integer tensors of one element pass, bool and float do not."""
    if isinstance(value, torch.Tensor) and _holds_integers(value) and value.numel() == 1:
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or not 1 <= value <= capacity:
        raise ValueError(f"{name} must be an integer in [1, {capacity}], got {value!r}{where}")
    return tuple(range(capacity + 1))[value]  # torch.compile takes a tuple's element as a constant: a graph per budget


def _holds_integers(value: torch.Tensor) -> bool:
    return not (value.is_floating_point() or value.is_complex() or value.dtype == torch.bool)


def _resolve_rows(value: torch.Tensor, capacities: Sequence[int], batch_size: int | None) -> ResolvedBudget:
    capacity = max(capacities)
    if not _holds_integers(value):
        raise ValueError(f"spectral_budget as a tensor must hold integers in [1, {capacity}], got dtype {value.dtype}")
    if value.ndim != 1 or (batch_size is not None and value.shape[0] != batch_size):
        rows = "batch_size" if batch_size is None else batch_size
        raise ValueError(f"spectral_budget as a tensor must have shape ({rows},), got {tuple(value.shape)}")
    if value.numel() == 0:  # an empty batch: its cache has room for any
        return ResolvedBudget(tuple(capacities))
    of_rows = tuple(value.tolist())
    low, high = min(of_rows), max(of_rows)
    if low < 1 or high > capacity:
        raise ValueError(f"spectral_budget must hold integers in [1, {capacity}], got values from {low} to {high}")
    layers = tuple(min(high, held) for held in capacities)
    return ResolvedBudget(layers) if low == high else ResolvedBudget(layers, value.long(), of_rows)


def rows_of_samples(budget: SpectralBudget, samples: int) -> SpectralBudget:
    """A (b,) tensor or b names for every one of the beams or samples of its row; anything else as it is."""
    if _are_names(budget):
        return [name for name in budget for _ in range(samples)]
    return budget.repeat_interleave(samples) if isinstance(budget, torch.Tensor) and budget.ndim == 1 else budget
