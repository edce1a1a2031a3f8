# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Balanced truncation of a model's diagonal layers: read each as a system, reduce it, write it back with new sizes.

A layer takes part if it has `lti()`, which gives the fields of its DiagonalSystem, and `set_lti(lam, B, C, present)`,
which takes a smaller system over, or if its class is registered with an adapter that reads and writes. Parameters are
new objects then: an optimizer must be told of them, as training.py does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from ..adapters import Adapter, ElasticLayer, adapter_of, record_sizes
from ..systems import DiagonalSystem
from .balancing import Truncation, equalise, truncate
from .gramians import check_stable

Replaced = tuple[nn.Parameter, nn.Parameter]  # a Parameter that was, and the one in its place


@dataclass(frozen=True)
class LayerTruncation:
    """What became of a layer.

    Attributes:
        name: of its module. before, after: modes, of all channels. size: modes stored now, where channels have modes
            of their own the largest number of any.
        bound: of the error's largest singular value at any frequency, without the skip; 0 for an untouched layer.
        hankel: Hankel singular values before, as in `Truncation`; None for a layer without modes or unstable.
        refused: why it is larger than asked for; "" if it is not.
    """

    name: str
    before: int
    after: int
    size: int
    bound: float
    hankel: Tensor | None = field(repr=False)
    refused: str = ""


@dataclass(frozen=True)
class TruncationReport:
    """What became of a model's layers.

    Attributes:
        layers: in the order of the model. replaced: (old, new) Parameters.
    """

    layers: tuple[LayerTruncation, ...]
    replaced: tuple[Replaced, ...] = field(default=(), repr=False)

    @property
    def sizes(self) -> list[int]:
        """Modes stored for each layer, as in config.state_sizes; where channels differ, the largest of them."""
        return [layer.size for layer in self.layers]

    def certificate(self) -> dict[str, float]:
        """Of each layer, by name, the bound 2 sum sigma of its error's H-infinity norm."""
        return {layer.name: layer.bound for layer in self.layers}

    def __str__(self) -> str:
        rows = [f"{row.name}: {row.before} -> {row.after} modes, error <= {row.bound:.3g}" for row in self.layers]
        return "\n".join(
            text + (f" (kept: {row.refused})" if row.refused else "") for text, row in zip(rows, self.layers)
        )


def diagonal_layers(model: nn.Module) -> dict[str, Any]:
    """The layers that can be truncated, by name."""
    adapters = ((name, module, adapter_of(module)) for name, module in model.named_modules())
    return {name: module for name, module, adapter in adapters if adapter is not None and not adapter.selective}


def read_layer(layer: Any) -> DiagonalSystem:
    """The layer's modes, as `ElasticLayer.read`."""
    return ElasticLayer("", layer, _adapter(layer)).read()


def _adapter(layer: nn.Module) -> Adapter:
    adapter = adapter_of(layer)
    assert adapter is not None  # as of `diagonal_layers`
    return adapter


def write_layer(layer: Any, system: DiagonalSystem) -> list[Replaced]:
    """Give the layer these modes; which of its Parameters are new objects.

    They keep what was set on the old ones: requires_grad, and attributes such as `_no_weight_decay`.

    Raises:
        ValueError: a layer whose tensors are masked or otherwise parametrized.
        RuntimeError: the layer has other Parameters than before, by name.
    """
    if is_parametrized(layer):
        raise ValueError("a layer with parametrized tensors cannot be truncated: remove its masks first")
    before = dict(layer.named_parameters())
    device = next(iter(before.values())).device
    with torch.no_grad():
        _adapter(layer).write(layer, _to(system, device))
    after = dict(layer.named_parameters())
    if before.keys() != after.keys():
        raise RuntimeError(f"set_lti must keep the names of Parameters, {sorted(before)}, and left {sorted(after)}")
    replaced = [(old, after[name]) for name, old in before.items() if after[name] is not old]
    for old, new in replaced:
        new.requires_grad_(old.requires_grad)
        new.__dict__.update({name: value for name, value in vars(old).items() if name not in vars(new)})
    return replaced


def _to(system: DiagonalSystem, device: torch.device) -> DiagonalSystem:
    present = None if system.present is None else system.present.to(device)
    return replace(system, lam=system.lam.to(device), B=system.B.to(device), C=system.C.to(device), present=present)


def balanced_truncate(
    model: nn.Module,
    *,
    tau: float | None = None,
    sizes: int | Sequence[int] | None = None,
    variant: str = "complex",
    min_reduction: float = 0.0,
) -> TruncationReport:
    """Reduce the diagonal layers of a model in place, and its config.state_sizes with them.

    Args:
        tau: every layer discards at most that share of the sum of its Hankel singular values.
        sizes: or the modes that each layer keeps, at most; one number for all.
        variant: "complex", the paper's, or "real"; see balancing.py.
        min_reduction: a layer that would not lose more than that share of its modes stays as it is.
    Returns:
        Per layer the sizes, the bound of the error, and why a layer was kept.
    Raises:
        ValueError: no diagonal layer, not exactly one of tau and sizes, or values out of range.
    """
    layers = diagonal_layers(model)
    results = plan_truncation(layers, tau=tau, sizes=sizes, variant=variant, min_reduction=min_reduction)
    return apply_truncation(model, layers, results)


def plan_truncation(
    layers: dict[str, Any],
    *,
    tau: float | None = None,
    sizes: int | Sequence[int] | None = None,
    variant: str = "complex",
    min_reduction: float = 0.0,
) -> list[Truncation | str]:
    """What `balanced_truncate` would do, layer by layer: a truncation, or why there is none. Arguments as there."""
    if not layers:
        raise ValueError("the model has no layer with lti() and set_lti(), so nothing can be truncated")
    if not 0.0 <= min_reduction < 1.0:
        raise ValueError(f"min_reduction must be in [0, 1), got {min_reduction}")
    if sizes is not None:
        sizes = [sizes] * len(layers) if isinstance(sizes, int) else list(sizes)
        if len(sizes) != len(layers):
            raise ValueError(f"sizes must be one number or {len(layers)}, one for each diagonal layer, got {sizes}")
    each = sizes if sizes is not None else [None] * len(layers)
    return [
        _plan_layer(layer, tau, size, variant, min_reduction) for layer, size in zip(layers.values(), each, strict=True)
    ]


def _plan_layer(
    layer: Any, tau: float | None, size: int | None, variant: str, min_reduction: float
) -> Truncation | str:
    system = read_layer(layer)
    if system.modes == 0:
        return ""
    if not all(bool(torch.isfinite(torch.view_as_real(t)).all()) for t in (system.lam, system.B, system.C)):
        return "its modes hold NaN or infinite values"
    try:
        check_stable(system.lam if system.present is None else system.lam[system.present])
    except ValueError as error:
        return str(error)
    if type(size) is int:
        size = min(size, system.lam.shape[-1])
    result = truncate(system, tau=tau, size=size, variant=variant)
    if result.system.modes < (1.0 - min_reduction) * system.modes:
        return replace(result, system=equalise(result.system))
    return replace(result, system=system, bound=0.0)


def apply_truncation(model: nn.Module, layers: dict[str, Any], results: Sequence[Truncation | str]) -> TruncationReport:
    """Write the planned systems, and the sizes of all layers into config.state_sizes."""
    rows, replaced = [], []
    for (name, layer), result in zip(layers.items(), results, strict=True):
        system = read_layer(layer)
        if isinstance(result, str):
            after, bound, hankel, refused = system, 0.0, None, result
        else:
            after, bound, hankel, refused = result.system, result.bound, result.hankel, result.refused
        if after.modes < system.modes:
            replaced += write_layer(layer, after)
        rows.append(LayerTruncation(name, system.modes, after.modes, after.lam.shape[-1], bound, hankel, refused))
    if replaced:
        _record(model, layers)
    return TruncationReport(tuple(rows), tuple(replaced))


def _record(model: nn.Module, layers: dict[str, Any]) -> None:
    """What is stored for each layer, padding included, into the configs that tell it."""
    found = [ElasticLayer(name, layer, _adapter(layer)) for name, layer in layers.items()]
    record_sizes(model, found, [read_layer(layer).lam.shape[-1] for layer in layers.values()])


def resize_states(model: nn.Module, sizes: Sequence[int]) -> list[Replaced]:
    """Give the layers fewer modes each, the first of theirs: the shapes of a checkpoint that was truncated further.

    For resuming, before the optimizer is made and the checkpoint loaded. Raises ValueError for a size that is not in
    [0, present size], or a wrong number of sizes.
    """
    layers, replaced = diagonal_layers(model), []
    if len(sizes) != len(layers):
        raise ValueError(f"sizes must be {len(layers)}, one for each diagonal layer, got {list(sizes)}")
    for layer, size in zip(layers.values(), sizes, strict=True):
        system = read_layer(layer)
        width = system.lam.shape[-1]
        if not 0 <= size <= width:
            raise ValueError(f"sizes must be in [0, {width}] for this layer, got {size}")
        if size < width:
            present = None if system.present is None else system.present[:, :size]
            B = system.B[..., :size] if system.siso else system.B[:size]
            smaller = replace(system, lam=system.lam[..., :size], B=B, C=system.C[..., :size], present=present)
            replaced += write_layer(layer, smaller)
    _record(model, layers)
    return replaced
