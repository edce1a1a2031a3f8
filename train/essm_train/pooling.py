# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""One vector for a sequence."""

from __future__ import annotations

import torch
from torch import Tensor


def pool(hidden_states: Tensor, real: Tensor | None, how: str) -> Tensor:
    """(B, L, D) -> (B, D): the "mean" of the positions where `real` (B, L) is not 0, or the "last" of them."""
    if real is None:
        return hidden_states.mean(1) if how == "mean" else hidden_states[:, -1]
    real = real.to(hidden_states.device).bool()
    if how == "mean":
        total = hidden_states.masked_fill(~real[..., None], 0.0).sum(1)
        return total / real.sum(1, keepdim=True).clamp(min=1).to(total.dtype)
    last = (real * torch.arange(real.shape[1], device=real.device)).amax(1)
    return hidden_states[torch.arange(len(last), device=last.device), last]
