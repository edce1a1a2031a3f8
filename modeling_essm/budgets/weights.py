# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Which weights a profile was measured on, or a saved state belongs to."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch
from transformers import PreTrainedModel

from ..loading_essm import channel_capacity


def checksum(tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    """SHA-256 over names, dtypes, shapes and bytes of tensors, in the given order."""
    digest = hashlib.sha256()
    for name, tensor in tensors:
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\0".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def weights_checksum(model: PreTrainedModel) -> str | None:
    """What tells whether two models have the same weights, see `same_weights`; None if some are offloaded or sharded.

    One checksum of everything but later channels; then, after a "-" for each layer, 8 digits of each later channel, of
    which a model that was truncated, or read as a prefix, has the first. Values are rounded to bf16, so that casts
    between fp32 and bf16 change nothing.
    """
    layers = range(model.config.num_hidden_layers)
    tensors = sorted(model.state_dict().items())
    if any(tensor.is_meta or hasattr(tensor, "full_tensor") for _, tensor in tensors):
        return None
    first: list[tuple[str, torch.Tensor]] = []
    divided: dict[int, list[torch.Tensor]] = {}
    for name, tensor in tensors:
        if type(tensor) is not torch.Tensor and hasattr(tensor, "dequantize"):  # torchao's
            tensor = tensor.dequantize()
        tensor = tensor.bfloat16() if tensor.is_floating_point() else tensor
        if (layer := channel_capacity(name, layers)) is not None:
            divided.setdefault(layer, []).append(tensor)
            tensor = tensor[:1]
        first.append((name, tensor))
    channels = [
        "".join(checksum(("", tensor[k]) for tensor in found)[:8] for k in range(1, len(found[0])))
        for _, found in sorted(divided.items())
    ]
    return "-".join([checksum(first), *channels])


def same_weights(one: str | None, other: str | None) -> bool:
    """Whether two of `weights_checksum` are of the same weights, as far as both models have channels."""
    if one is None or other is None:
        return False
    pairs = zip(one.split("-"), other.split("-"))
    return one.count("-") == other.count("-") and all(a.startswith(b) or b.startswith(a) for a, b in pairs)
