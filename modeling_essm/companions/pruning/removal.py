# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Takes masked modes out of a model: smaller tensors, and a config that says so."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..adapters import Adapter, ElasticLayer, check_plain, elastic_layers, record_sizes
from .masks import masked_tensors, restore


@torch.no_grad()
def remove(model: nn.Module) -> list[int]:
    """Remove the modes that `prune` masked, in place.

    The model computes what the masked one did, with smaller weights and states, and save_pretrained and from_pretrained
    work on it. An optimizer that held the old parameters must be built again, and so must caches.

    A layer with modes per channel stores as many for each as the channel with most has; others are padded, with C zero.
    The layers of a Mamba model have one state_size in common, that of the layer with most states; layers with
    fewer are padded likewise. Both become smaller everywhere with granularity="mode_index" and scope="uniform".

    Returns:
        The number of modes that each layer now stores per channel.
    Raises:
        ValueError: the model has no masks, or a tensor that would shrink is not the module's own, as under PEFT.
    """
    layers = elastic_layers(model)
    masks = [_kept(layer) for layer in layers]
    if all(keep is None for keep in masks):
        raise ValueError(
            f"model must be pruned before modes can be removed, got a {type(model).__name__} without masks"
        )
    for layer, keep in zip(layers, masks):
        if keep is not None:
            check_plain(layer, layer.adapter.tensors(layer.module))
    restore(model)
    sizes = []
    for layer, keep in zip(layers, masks):
        stored = layer.adapter.shape(layer.module)[-1]
        sizes.append(stored if keep is None else int(keep.sum(-1).max()) if keep.numel() else 0)
    groups: dict[type[Adapter], list[int]] = {}
    for i, layer in enumerate(layers):
        groups.setdefault(type(layer.adapter), []).append(i)
    for members in groups.values():
        adapter = layers[members[0]].adapter
        if adapter.uniform:
            common = max(1, *(sizes[i] for i in members))
            for i in members:
                sizes[i] = common
        for i in members:
            if (keep := masks[i]) is not None:
                adapter.shrink(layers[i].module, keep, sizes[i])
    record_sizes(model, layers, sizes)
    return sizes


def _kept(layer: ElasticLayer) -> Tensor | None:
    """The mask over a layer's modes, None without one."""
    steps = masked_tensors(layer.module)
    return steps[0][2].keep.cpu() if steps else None
