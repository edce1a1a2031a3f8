# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Pruned modes as masks over C, which `restore` takes off again, and their removal: smaller tensors.

A mode whose column of C is zero adds nothing to the output. C stays a parameter with its values; where it is read, the
pruned columns are zero and get no gradient. `state_dict` holds the masked values under the usual names, so a masked
model is saved and loaded as any other. Nothing is lost until `remove`.
"""

from __future__ import annotations

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
        self.hooks: list[Any] = []
        self.followers: list[str] = []  # parameters of the module that come after the masked one

    def forward(self, value: Tensor) -> Tensor:
        return value.masked_fill(~self.mask, 0)


def matched(model: nn.Module, plan: Plan) -> list[StateLayer]:
    """The model's layers that a plan is for, in its order. Raises ValueError where they do not fit."""
    layers = {layer.name: layer for layer in state_layers(model)}
    for own in plan.layers:
        if own.name not in layers:
            raise ValueError(f"the plan is for a layer {own.name!r}, the model has {', '.join(layers)}")
        layer = layers[own.name]
        if (shape := layer.adapter.shape(layer.module)) != tuple(own.keep.shape):
            raise ValueError(f"{own.name}: the plan is for modes {tuple(own.keep.shape)}, the model has {shape}")
    return [layers[own.name] for own in plan.layers]


def masks_of(module: nn.Module) -> list[tuple[str, ModeMask]]:
    """The masked parameters of a module itself, and their masks."""
    lists = module.parametrizations.items() if parametrize.is_parametrized(module) else ()  # type: ignore[operator, union-attr]
    return [(name, step) for name, steps in lists for step in steps if isinstance(step, ModeMask)]


def kept_modes(layer: nn.Module) -> Tensor | None:
    """The mask over a layer's modes, bool, True for those that stay; None for a layer without masks."""
    masks = (mask for module in layer.modules() for _, mask in masks_of(module))
    return next((mask.keep.cpu() for mask in masks), None)


def is_pruned(model: nn.Module) -> bool:
    """Whether modes of a model or layer are masked."""
    return kept_modes(model) is not None


def prune(model: nn.Module, plan: Plan) -> None:
    """Mask the modes that a plan does not keep, in place. A mask that is there already is replaced.

    An optimizer goes on: C remains the same parameter. A masked model is saved by its state, save_pretrained included;
    torch does not pickle parametrized modules as such.

    Raises:
        ValueError: a plan for another model, a C that is parametrized otherwise or wrapped, as under PEFT.
    """
    layers = matched(model, plan)
    restore(model)
    todo = []
    for layer, own in zip(layers, plan.layers):
        for module, name, mask in layer.adapter.masks(layer.module, own.keep):
            if parametrize.is_parametrized(module, name):
                raise ValueError(f"{layer.name}: {name} must be a plain parameter, but it is parametrized")
            check_plain(layer, module, name)
            todo.append((module, name, ModeMask(mask, own.keep)))
    for module, name, step in todo:
        names = list(module._parameters)
        step.followers = names[names.index(name) + 1 :]
        step.hooks = [
            module.register_state_dict_post_hook(_usual_names),
            module.register_load_state_dict_pre_hook(_own_names),
        ]
        parametrize.register_parametrization(module, name, step.to(getattr(module, name).device))


def restore(model: nn.Module) -> None:
    """Take all masks off, in place: every weight is what it was. A model without masks stays as it is."""
    found = [(module, name, step) for module in model.modules() for name, step in masks_of(module)]
    for module, name, step in found:
        for hook in step.hooks:
            hook.remove()
        # The class is shared with deep copies of the module, which keep their masks.
        cls = type(module)
        own = {key: value for key, value in vars(cls).items() if key not in ("__dict__", "__weakref__")}
        module.__class__ = type(cls.__name__, cls.__bases__, own)
        parametrize.remove_parametrizations(module, name, leave_parametrized=False)
        for behind in step.followers:  # optimizers count parameters in their order
            if behind in module._parameters:
                module._parameters[behind] = module._parameters.pop(behind)


@torch.no_grad()
def remove(model: nn.Module) -> list[int]:
    """Take the modes that `prune` masked out of the weights, in place.

    The model computes what the masked one did, and save_pretrained and from_pretrained work on it. Optimizers and
    caches must be built again. A layer with modes per channel stores as many for each as the channel with most has; the
    layers of a Mamba model have one state_size, that of the layer with most states. The rest is padding, with C zero.
    Both become smaller everywhere with granularity="mode_index" and scope="uniform".

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


def _usual_names(module: nn.Module, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
    for name, step in masks_of(module):
        if (key := f"{prefix}parametrizations.{name}.original") in state:
            state[f"{prefix}{name}"] = step(state.pop(key))


def _own_names(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    for name, step in masks_of(module):
        if (value := state.pop(f"{prefix}{name}", None)) is not None:
            own = module.parametrizations[name].original  # type: ignore[index, union-attr]
            if value.shape == own.shape:  # zeros of a masked state say nothing about the values below the mask
                below = ~step.mask.to(value.device) & (value == 0)
                value = torch.where(below, own.detach().to(value), value)
            state[f"{prefix}parametrizations.{name}.original"] = value
