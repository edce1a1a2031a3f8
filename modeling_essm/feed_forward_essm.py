# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""The feed-forward layers of the two blocks: (B, L, D) to it, each position by itself."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from transformers.activations import ACT2FN

from .mixer_spectral import at_unit_scale


class ESSMFeedForward(nn.Module):
    """(B, L, D) -> (B, L, D) through one hidden layer of width intermediate_size."""

    def __init__(self, config: Any):
        super().__init__()
        self.up = nn.Linear(config.hidden_size, config.intermediate_size)
        self.down = nn.Linear(config.intermediate_size, config.hidden_size)
        self.act = ACT2FN[config.hidden_act]
        self.dropout = nn.Dropout(config.activation_dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.dropout(self.act(self.up(x))))


class ESSMGatedFeedForward(nn.Module):
    """(B, L, D) -> (B, L, D) through a hidden layer of width intermediate_size, half of whose inputs are SiLU gates."""

    def __init__(self, config: Any):
        super().__init__()
        self.up = at_unit_scale(nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=False))
        self.down = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.dropout = nn.Dropout(config.activation_dropout)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.up(x).chunk(2, -1)
        return self.down(self.dropout(F.silu(gate) * value))
