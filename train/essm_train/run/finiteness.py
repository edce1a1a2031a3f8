# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""NaN and infinity, found before they are saved.

The loss of an update is computed before its step, so a finite loss says nothing about the weights that the step leaves.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from accelerate import Accelerator
from torch import Tensor, nn


def local(tensor: Tensor) -> Tensor:
    """This process's part of a tensor that may be sharded (a DTensor under FSDP2)."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def non_finite(
    accelerator: Accelerator, model: nn.Module, optimizer: torch.optim.Optimizer, average: Iterable[Tensor]
) -> list[str]:
    """Which of weights, averaged weights and optimizer state hold NaN or infinity, on any process. All must call it.

    Args:
        average: tensors of the weights' average, shard by shard; empty without one.
    """
    buffers = [  # those that are saved: the others may well hold -inf, as masks do
        buffer
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False)
        if name not in module._non_persistent_buffers_set
    ]
    states = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    parts = {
        "the weights": [*model.parameters(), *buffers],
        "the averaged weights": [*average],
        "the optimizer's state": states,
    }
    broken = torch.stack([_count(tensors, accelerator.device) for tensors in parts.values()])
    return [name for name, count in zip(parts, accelerator.reduce(broken, "sum").tolist()) if count]


@torch.no_grad()
def _count(tensors: Iterable[Tensor], device: torch.device) -> Tensor:
    """How many of the tensors hold NaN or infinity: () int64, without waiting for the device."""
    total = torch.zeros((), dtype=torch.int64, device=device)
    for tensor in map(local, tensors):
        if tensor.is_floating_point() or tensor.is_complex():
            total += (~tensor.isfinite().all()).to(total)
    return total
