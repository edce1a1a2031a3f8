# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Balanced truncation of a model's diagonal layers: read each as a system, reduce it, write it back with new sizes.

Parameters are new objects then: an optimizer must be told of them, as training.py does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from ..pruning.masks import is_pruned
from ..systems import DiagonalSystem, StateLayer, check_stable, diagonal_layers, record_sizes
from .balancing import Truncation, equalise, truncate

Replaced = tuple[nn.Parameter, nn.Parameter]  # a Parameter that was, and the one in its place


@dataclass(frozen=True)
class LayerTruncation:
    """What became of a layer: modes of all channels before and after; `size`, modes stored now, the largest number of
    any channel; bound, before weights are rounded, and refused as of `Truncation`, bound 0 for an untouched layer."""

    name: str
    before: int
    after: int
    size: int
    bound: float
    refused: str = ""

    def __str__(self) -> str:
        kept = f" (kept: {self.refused})" if self.refused else ""
        return f"{self.name}: {self.before} -> {self.after} modes, error <= {self.bound:.3g}{kept}"


@dataclass(frozen=True)
class TruncationReport:
    """What became of a model's layers, in its order, and the Parameters (old, new) that were replaced."""

    layers: tuple[LayerTruncation, ...]
    replaced: tuple[Replaced, ...] = field(default=(), repr=False)

    @property
    def sizes(self) -> list[int]:
        """Modes stored for each layer, as in config.state_sizes; where channels differ, the largest of them."""
        return [layer.size for layer in self.layers]

    def __str__(self) -> str:
        return "\n".join(map(str, self.layers))


def write_layer(layer: StateLayer, system: DiagonalSystem) -> list[Replaced]:
    """Give the layer these modes; which of its Parameters are new objects. They keep requires_grad, and attributes such
    as `_no_weight_decay`."""
    before = dict(layer.module.named_parameters())
    device = next(iter(before.values())).device
    lam, B, C = (x.to(device) for x in (system.lam, system.B, system.C))
    present = None if system.present is None else system.present.to(device)
    with torch.no_grad():
        layer.adapter.write(layer.module, DiagonalSystem(lam, B, C, system.output, present))
    after = dict(layer.module.named_parameters())
    replaced = [(old, after[name]) for name, old in before.items() if after[name] is not old]
    for old, new in replaced:
        new.requires_grad_(old.requires_grad)
        new.__dict__.update({name: value for name, value in vars(old).items() if name not in vars(new)})
    return replaced


def balanced_truncate(
    model: nn.Module,
    *,
    tau: float | None = None,
    sizes: int | Sequence[int] | None = None,
    min_reduction: float = 0.0,
) -> TruncationReport:
    """Reduce the diagonal layers of a model in place, and its config.state_sizes with them. Optimizers do not follow.

    Args:
        tau: every layer discards at most that share of the sum of its Hankel singular values.
        sizes: or the modes that each layer keeps, at most; one number for all.
        min_reduction: a layer that would not lose more than that share of its modes stays as it is.
    Returns:
        Per layer the sizes, the bound of the error, and why a layer was kept.
    Raises:
        ValueError: no diagonal layer, one that cannot be written, not exactly one of tau and sizes, or values out of
            range.
    """
    if not 0.0 <= min_reduction < 1.0:
        raise ValueError(f"min_reduction must be in [0, 1), got {min_reduction}")
    if (tau is None) == (sizes is None):
        raise ValueError(f"give exactly one of tau and sizes, got tau={tau!r}, sizes={sizes!r}")
    layers = truncatable(model)
    each = list(sizes) if isinstance(sizes, Sequence) else [sizes] * len(layers)
    if wrong := [size for size in each if size is not None and type(size) is not int]:
        raise ValueError(f"sizes must be one integer or a list of integers, got {wrong[0]!r}")
    if len(each) != len(layers):
        raise ValueError(f"sizes must be one number or {len(layers)}, one for each diagonal layer, got {sizes}")
    plan = [plan_layer(layer, tau, size, min_reduction) for layer, size in zip(layers, each)]
    return apply_truncation(model, layers, plan)


def truncatable(model: nn.Module) -> list[StateLayer]:
    """The diagonal layers of a model.

    Raises ValueError if there are none, if one has no `write` or tensors that are masked or otherwise parametrized, or
    if this process has parts of them only.
    """
    layers = diagonal_layers(model)
    if not layers:
        raise ValueError(f"balanced truncation needs layers with lti() and set_lti(), {type(model).__name__} has none")
    for layer in layers:
        if not layer.adapter.can_write:
            raise ValueError(f"{layer.name}: balanced truncation needs {type(layer.adapter).__name__}.write")
        if is_parametrized(layer.module) or is_pruned(layer.module):
            raise ValueError(f"{layer.name} has parametrized tensors: remove its masks before it is truncated")
    if any(hasattr(p, "placements") for layer in layers for p in layer.module.parameters()):
        raise ValueError("balanced truncation needs whole layers on every process, got sharded ones (FSDP)")
    return layers


def plan_layer(layer: StateLayer, tau: float | None, size: int | None, min_reduction: float) -> Truncation:
    """What `balanced_truncate` would do to a layer."""
    system = layer.read()
    whole = Truncation(system, torch.zeros(0, dtype=torch.float64), 0.0)
    if system.modes == 0:
        return whole
    if not all(bool(torch.isfinite(torch.view_as_real(t)).all()) for t in (system.lam, system.B, system.C)):
        return replace(whole, refused="its modes hold NaN or infinite values")
    try:
        check_stable(system, layer.name)
    except ValueError as error:
        return replace(whole, refused=str(error))
    result = truncate(system, tau=tau, size=None if size is None else min(size, system.lam.shape[-1]))
    if result.system.modes < (1.0 - min_reduction) * system.modes:
        return replace(result, system=equalise(result.system))
    return replace(result, system=system, bound=0.0)


def apply_truncation(model: nn.Module, layers: Sequence[StateLayer], results: Sequence[Truncation]) -> TruncationReport:
    """Write the planned systems, and the sizes of all layers into config.state_sizes."""
    rows, replaced = [], []
    for layer, result in zip(layers, results, strict=True):
        before, after = layer.read().modes, result.system
        if after.modes < before:
            replaced += write_layer(layer, after)
        size = after.lam.shape[-1]
        rows.append(LayerTruncation(layer.name, before, after.modes, size, result.bound, result.refused))
    report = TruncationReport(tuple(rows), tuple(replaced))
    if replaced:
        record_sizes(model, layers, report.sizes)
    return report


def resize_states(model: nn.Module, sizes: Sequence[int]) -> list[Replaced]:
    """Give the layers fewer modes each, the first of theirs: the shapes of a checkpoint that was truncated further.

    For resuming, before the optimizer is made and the checkpoint loaded. Raises ValueError for more than a layer has,
    and where `balanced_truncate` cannot write layers, as under masks.
    """
    layers, replaced = truncatable(model), []
    systems = [layer.read() for layer in layers]
    for layer, system, size in zip(layers, systems, sizes, strict=True):
        if not 0 <= size <= system.lam.shape[-1]:
            raise ValueError(f"{layer.name}: sizes must be in [0, {system.lam.shape[-1]}], got {size}")
    for layer, system, size in zip(layers, systems, sizes, strict=True):
        if size < system.lam.shape[-1]:
            present = None if system.present is None else system.present[..., :size]
            B = system.B[..., :size] if system.siso else system.B[:size]
            smaller = replace(system, lam=system.lam[..., :size], B=B, C=system.C[..., :size], present=present)
            replaced += write_layer(layer, smaller)
    record_sizes(model, layers, sizes)
    return replaced
