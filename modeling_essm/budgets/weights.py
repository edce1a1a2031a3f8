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
    """A checksum that tells whether two models have the same weights; None if some are offloaded or sharded.

    It is taken of the values rounded to bf16, and of the first channel where a tensor is divided into channels. So it
    is the same for a model that was cast between fp32 and bf16, or truncated, or read as a prefix.
    """
    layers = range(model.config.num_hidden_layers)
    tensors = model.state_dict()
    if any(tensor.is_meta or hasattr(tensor, "full_tensor") for tensor in tensors.values()):
        return None

    def rounded(name: str, tensor: torch.Tensor) -> torch.Tensor:
        if type(tensor) is not torch.Tensor and hasattr(tensor, "dequantize"):  # torchao's
            tensor = tensor.dequantize()
        tensor = tensor if channel_capacity(name, layers) is None else tensor[:1]
        return tensor.bfloat16() if tensor.is_floating_point() else tensor

    return checksum((name, rounded(name, tensor)) for name, tensor in sorted(tensors.items()))
