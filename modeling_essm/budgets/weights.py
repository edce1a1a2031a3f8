# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Which weights a profile was measured on, or a saved state belongs to."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence

import torch
from transformers import PreTrainedModel

from ..loading_essm import channel_blocks, layer_of, leading
from ..spectral_budget import spectral_layers


def checksum(tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    """SHA-256 over names, dtypes, shapes and bytes of tensors, in the given order."""
    digest = hashlib.sha256()
    for name, tensor in tensors:
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\0".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def weights_checksum(model: PreTrainedModel) -> str | None:
    """What tells whether two models have the same weights, see `same_weights`; None if some are offloaded or sharded.

    A SHA-256 of all weights but those of channels 2, 3, ..; then for each layer a "-" and 8 hex digits for each of
    these channels, of which a truncated model has the first. Values are rounded to bf16, so that casts between fp32 and
    bf16 change nothing.
    """
    tensors = sorted(model.state_dict().items())
    if any(tensor.is_meta or hasattr(tensor, "full_tensor") for _, tensor in tensors):
        return None
    blocks, held = channel_blocks(model.config), dict(zip(spectral_layers(model.config), model.config.capacities))
    first: list[tuple[str, torch.Tensor]] = []
    later: dict[int, list[list[tuple[str, torch.Tensor]]]] = {i: [[] for _ in range(1, K)] for i, K in held.items()}
    for name, tensor in tensors:
        if type(tensor) is not torch.Tensor and hasattr(tensor, "dequantize"):  # torchao's
            tensor = tensor.dequantize()
        tensor = tensor.bfloat16() if tensor.is_floating_point() else tensor
        layer, inside = layer_of(name)
        if layer in held and (block := blocks.get(inside)):
            for k, parts in enumerate(later[layer], start=1):
                parts += [("", tensor[own]) for own in _of_channel(block, k)]
            tensor = tensor[leading(block, 1)]
        first.append((name, tensor))
    channels = ["".join(checksum(parts)[:8] for parts in layer) for _, layer in sorted(later.items())]
    return "-".join([checksum(first), *channels])


def _of_channel(block: Sequence[int], k: int) -> Iterator[tuple[slice, ...]]:
    """What the first k + 1 channels of a tensor hold and the first k do not, in parts."""
    for i, size in enumerate(block):
        if size:
            yield *leading(block[:i], k), slice(size * k, size * (k + 1)), *leading(block[i + 1 :], k + 1)


def same_weights(one: str | None, other: str | None) -> bool:
    """Whether two of `weights_checksum` are of the same weights, as far as both models have channels.

    None, of weights that are offloaded or sharded, cannot be told from any."""
    if one is None or other is None:
        return True
    pairs = zip(one.split("-"), other.split("-"))
    return one.count("-") == other.count("-") and all(a.startswith(b) or b.startswith(a) for a, b in pairs)
