# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Pruned modes as masks over C, which `restore` takes off again, and their removal: smaller tensors.

A mode whose column of C is zero adds nothing to the output. C stays a parameter with its values, its name and its place
among the others; where it is read, the pruned columns are zero and get no gradient. `state_dict` holds the masked
values, so a masked model is saved and loaded as any other. Nothing is lost until `remove`.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ..systems import StateLayer, check_plain, record_sizes, state_layers
from .plans import Plan


class ModeMask(nn.Module):
    """Zeros where a mode is pruned: `mask`, bool, broadcasts to the tensor; `keep`, (n,) or (H, n), is the layer's."""

    mask: Tensor
    keep: Tensor

    def __init__(self, mask: Tensor, keep: Tensor) -> None:
        super().__init__()
        self.register_buffer("mask", mask, persistent=False)
        self.register_buffer("keep", keep, persistent=False)

    def forward(self, value: Tensor) -> Tensor:
        return value.masked_fill(~self.mask, 0)


class _Masked:
    """Stands before the class of a module that reads parameters through masks."""

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)  # type: ignore[misc]
        for name, mask in masks_of(self):
            destination[prefix + name] = mask(destination[prefix + name])

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *others: Any) -> None:
        for name, mask in masks_of(self):
            value, own = state.get(prefix + name), self._parameters[name]  # type: ignore[attr-defined]
            if value is not None and value.shape == own.shape:  # zeros of a masked state do not tell what they hide
                below = ~mask.mask.to(value.device) & (value == 0)
                state[prefix + name] = torch.where(below, own.detach().to(value), value)
        super()._load_from_state_dict(state, prefix, *others)  # type: ignore[misc]

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return _empty, (type(self).__bases__[1], tuple(name for name, _ in masks_of(self))), self.__dict__


@functools.cache
def _masked_class(cls: type, names: tuple[str, ...]) -> type:
    """The class whose parameters of these names are read through their masks."""

    def masked(name: str) -> property:
        return property(lambda module: module._modules[f"mask_of_{name}"](module._parameters[name]))

    return type(cls.__name__, (_Masked, cls), {name: masked(name) for name in names})


def _empty(cls: type, names: tuple[str, ...]) -> Any:
    return object.__new__(_masked_class(cls, names))


def matched(model: nn.Module, plan: Plan) -> list[StateLayer]:
    """The model's layers that a plan is for, in its order. Raises ValueError where they do not fit."""
    layers = {layer.name: layer for layer in state_layers(model)}
    for own in plan.layers:
        if own.name not in layers:
            raise ValueError(f"the plan is for a layer {own.name!r}, the model has {', '.join(layers)}")
        layer = layers[own.name]
        if (shape := layer.adapter.shape(layer.module)) != tuple(own.keep.shape):
            raise ValueError(f"{own.name}: the plan is for modes {tuple(own.keep.shape)}, the model has {shape}")
        if not layer.adapter.selective and not torch.equal(own.present, layer.read().there):
            raise ValueError(f"{own.name}: the plan is for other modes of this shape, as they were before a removal")
    return [layers[own.name] for own in plan.layers]


def masks_of(module: Any) -> list[tuple[str, ModeMask]]:
    """The masked parameters of a module itself, and their masks."""
    children = module._modules.items()
    return [(name.removeprefix("mask_of_"), mask) for name, mask in children if isinstance(mask, ModeMask)]


def kept_modes(layer: nn.Module) -> Tensor | None:
    """The mask over a layer's modes, bool, True for those that stay; None for a layer without masks."""
    masks = (mask for module in layer.modules() for _, mask in masks_of(module))
    return next((mask.keep.cpu() for mask in masks), None)


def is_pruned(model: nn.Module) -> bool:
    """Whether modes of a model or layer are masked."""
    return kept_modes(model) is not None


def prune(model: nn.Module, plan: Plan) -> None:
    """Mask the modes that a plan does not keep, in place. A mask that is there already is replaced.

    An optimizer goes on, and one that is built afterwards has its order: C remains the same parameter, in its place.

    Raises:
        ValueError: a plan for another model, a C that is parametrized otherwise or wrapped, as under PEFT.
    """
    layers = matched(model, plan)
    todo: dict[nn.Module, dict[str, ModeMask]] = {}
    for layer, own in zip(layers, plan.layers):
        for module, name, mask in layer.adapter.masks(layer.module, own.keep):
            if parametrize.is_parametrized(module, name):
                raise ValueError(f"{layer.name}: {name} must be a plain parameter, but it is parametrized")
            check_plain(layer, module, name)
            todo.setdefault(module, {})[name] = ModeMask(mask, own.keep).to(getattr(module, name).device)
    restore(model)
    for module, masks in todo.items():
        for name, step in masks.items():
            module.add_module(f"mask_of_{name}", step)
        module.__class__ = _masked_class(type(module), tuple(masks))  # type: ignore[arg-type]


def restore(model: nn.Module) -> None:
    """Take all masks off, in place: every weight is what it was. A model without masks stays as it is.

    An optimizer's steps under the masks move what these hide, too: by weight decay and by the momentum from before.

    Raises:
        ValueError: a masked module has become one of another class, as by a parametrization or by FSDP.
    """
    masked = {name: module for name, module in model.named_modules() if masks_of(module)}
    for name, module in masked.items():
        if type(module).__bases__[0] is not _Masked:
            raise ValueError(f"{name}: its masks can be taken off once the module is of the class that they made again")
    for module in masked.values():
        for name, _ in masks_of(module):
            del module._modules[f"mask_of_{name}"]
        module.__class__ = type(module).__bases__[1]


@torch.no_grad()
def remove(model: nn.Module) -> list[int]:
    """Take the modes that `prune` masked out of the weights, in place.

    The model computes what the masked one did, and save_pretrained and from_pretrained work on it. Optimizers and
    caches must be built again; DistributedDataParallel around the model takes the new Parameters in, if all processes
    call this. A layer with modes per channel stores as many for each as the channel with most has; the layers of a
    Mamba model have one state_size, that of the layer with most states. The rest is padding, with C zero. Both become
    smaller everywhere with granularity="mode_index" and scope="uniform".

    Returns:
        The number of modes that each layer now stores per channel.
    Raises:
        ValueError: the model has no masks, or a tensor that would shrink is not the module's own, as under PEFT.
    """
    layers = state_layers(model)
    masks = [kept_modes(layer.module) for layer in layers]
    if not is_pruned(model):
        raise ValueError(f"model must be pruned before modes can be removed, got {type(model).__name__} without masks")
    for layer in layers:
        for module, name in layer.adapter.tensors(layer.module):
            check_plain(layer, module, name)
    restore(model)
    shapes = [layer.adapter.shape(layer.module) for layer in layers]
    keeps = [torch.ones(shape, dtype=torch.bool) if keep is None else keep for keep, shape in zip(masks, shapes)]
    sizes = [int(keep.sum(-1).max()) if keep.numel() else 0 for keep in keeps]
    common = max([1, *(size for layer, size in zip(layers, sizes) if layer.adapter.selective)])
    sizes = [common if layer.adapter.selective else size for layer, size in zip(layers, sizes)]
    for layer, keep, size in zip(layers, keeps, sizes):
        layer.adapter.shrink(layer.module, keep, size)
    record_sizes(model, layers, sizes)
    return sizes
