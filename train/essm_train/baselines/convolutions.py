# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""The two convolutional networks: a residual stack, and TC-ResNet. Letters: B batch, L sequence, D width."""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from essm_train.baselines.config import BaselineConfig


class CNNLayer(GradientCheckpointingLayer):
    """(B, L, D) -> (B, L, D): x + W GELU(convolution over 9 positions of LayerNorm(x)), positions on both sides."""

    def __init__(self, config: BaselineConfig):
        super().__init__()
        D, inner = config.hidden_size, config.intermediate_size
        self.norm = nn.LayerNorm(D, eps=config.norm_eps)
        self.conv = nn.Conv1d(D, inner, 9, padding="same")
        self.out = nn.Linear(inner, D)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, hidden_states: Tensor, padding: Tensor | None = None) -> Tensor:
        """`padding` (B, L, 1), True where there is nothing, reads as the zeros beyond the ends."""
        x = self.norm(hidden_states)
        if padding is not None:
            x = x.masked_fill(padding, 0.0)
        return hidden_states + self.dropout(self.out(F.gelu(self.conv(x.mT).mT)))


class TemporalConv(nn.Module):
    """Convolution over time without bias, then batch normalisation over real positions, which leaves padding zero.

    A stride of 2 keeps positions 0, 2, 4, ..
    """

    def __init__(self, in_channels: int, out_channels: int, kernel_size: int, stride: int = 1):
        super().__init__()
        self.conv = nn.Conv1d(in_channels, out_channels, kernel_size, stride, kernel_size // 2, bias=False)
        self.norm = nn.BatchNorm1d(out_channels)

    def forward(self, x: Tensor, real: Tensor | None) -> Tensor:
        """(B, C_in, L) -> (B, C_out, ceil(L / stride)); `real` is bool, (B, ceil(L / stride)), or None."""
        x = self.conv(x)
        if real is None:
            return self.norm(x)
        y = torch.zeros_like(x.mT)
        y[real] = self.norm(x.mT[real]).to(y.dtype)
        return y.mT


class TCResNetBlock(nn.Module):
    """Two temporal convolutions over 9 positions beside a convolution over one; halves the length."""

    def __init__(self, in_channels: int, out_channels: int):
        super().__init__()
        self.first = TemporalConv(in_channels, out_channels, 9, stride=2)
        self.second = TemporalConv(out_channels, out_channels, 9)
        self.shortcut = TemporalConv(in_channels, out_channels, 1, stride=2)

    def forward(self, x: Tensor, real: Tensor | None) -> Tensor:
        """(B, C_in, L) -> (B, C_out, ceil(L / 2)); `real` is of the output."""
        y = self.second(F.relu(self.first(x, real)), real)
        return F.relu(y + F.relu(self.shortcut(x, real)))


class TCResNet(nn.Module):
    """TC-ResNet8 (Choi et al. 2019): frequency bands are channels, and everything is a convolution over time."""

    def __init__(self, num_input_features: int, hidden_size: int):
        super().__init__()
        channels = [max(1, hidden_size * c // 48) for c in (16, 24, 32, 48)]
        self.first = TemporalConv(num_input_features, channels[0], 3)
        self.layers = nn.ModuleList(TCResNetBlock(*pair) for pair in itertools.pairwise(channels))

    def forward(self, input_features: Tensor, attention_mask: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """(B, L, F), zero where (B, L) is 0 -> (B, ceil(L / 8), D) and which of these are real, bool, or None."""
        x, real = input_features.mT, None if attention_mask is None else attention_mask.bool()
        x = F.relu(self.first(x, real))
        for block in self.layers:
            real = None if real is None else real[:, ::2]
            x = block(x, real)
        return x.mT, real
