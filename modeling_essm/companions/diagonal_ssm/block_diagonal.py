# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""The residual block of S5 and LRU: norm, mixer, GELU, gated linear unit. Letters: B batch, L sequence, H width."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from .configuration_diagonal_ssm import DiagonalSSMConfig
from .parameterizations_diagonal import MIXERS


class DiagonalSSMBatchNorm(nn.BatchNorm1d):
    """Batch normalisation of (B, L, H) over the real positions, without weights."""

    def __init__(self, hidden_size: int, eps: float):
        super().__init__(hidden_size, eps=eps, affine=False)

    def forward(self, x: Tensor, real: Tensor | None = None) -> Tensor:
        if real is None or not self.training:
            return super().forward(x.flatten(0, 1)).view_as(x)
        return torch.zeros_like(x).index_put((real,), super().forward(x[real]))


class DiagonalSSMLayerNorm(nn.LayerNorm):
    """Layer normalisation of (B, L, H), which padding does not touch."""

    def forward(self, x: Tensor, real: Tensor | None = None) -> Tensor:
        return super().forward(x)


def make_norm(config: DiagonalSSMConfig) -> nn.Module:
    """The norm that the configuration asks for, of (B, L, H) and `real` (B, L) or None."""
    norm = DiagonalSSMLayerNorm if config.norm == "layer" else DiagonalSSMBatchNorm
    return norm(config.hidden_size, eps=config.layer_norm_eps)


class DiagonalSSMLayer(GradientCheckpointingLayer):
    """Residual block: x + drop(GLU(W drop(GELU(mixer(norm(x))))))."""

    def __init__(self, config: DiagonalSSMConfig, state_size: int):
        super().__init__()
        self.norm = make_norm(config)
        self.mixer = MIXERS[config.parameterization](config, state_size)
        self.mix = nn.Linear(config.hidden_size, 2 * config.hidden_size)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, hidden_states: Tensor, state: Tensor | None, real: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """(B, L, H) to (B, L, H) and the state after it; state and real as of `DiagonalMixer.forward`."""
        y, state = self.mixer(self.norm(hidden_states, real), state, real)
        branch = F.glu(self.mix(self.dropout(F.gelu(y))), dim=-1)
        return hidden_states + self.dropout(branch), state


__all__ = ["DiagonalSSMLayer", "make_norm"]
