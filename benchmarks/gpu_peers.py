# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Layers of other linear models around their own kernels, of as many parameters as a gated ES-SSM block: 6 D^2.

Mamba-2 runs `mamba_chunk_scan_combined` of mamba_ssm, simple GLA (a scalar decay for each head and step) runs
`chunk_simple_gla` of flash-linear-attention. Both are for speed beside ES-SSM: blocks as published, without tricks at
the borders, and are imported only when one is made.
"""

from __future__ import annotations

import importlib.util
import sys
import types
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from modeling_essm.mixer_essm import short_convolution


def ssd_kernel() -> Callable[..., Tensor]:
    """`mamba_chunk_scan_combined` without the package's __init__, which needs CUDA code. Raises ImportError."""
    spec = importlib.util.find_spec("mamba_ssm")
    if spec is None or spec.submodule_search_locations is None:
        raise ImportError("mamba_ssm is not installed")
    if "mamba_ssm" not in sys.modules:
        package = types.ModuleType("mamba_ssm")
        package.__path__ = list(spec.submodule_search_locations)
        sys.modules["mamba_ssm"] = package
    from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

    return mamba_chunk_scan_combined


class Mamba2Block(nn.Module):
    """Norm, projections, short convolution, SSD, gated norm: (B, L, D) -> (B, L, D)."""

    def __init__(self, width: int, state: int = 128, head: int = 64, taps: int = 4):
        super().__init__()
        self.scan = ssd_kernel()
        self.inner, self.state, self.head = 2 * width, state, head
        self.heads, self.taps = self.inner // head, taps
        convolved = self.inner + 2 * state
        self.norm, self.mixer_norm = nn.RMSNorm(width), nn.RMSNorm(self.inner)
        self.in_proj = nn.Linear(width, self.inner + convolved + self.heads, bias=False)
        self.convolution = nn.Parameter(torch.randn(taps, convolved) / taps)
        self.dt_bias = nn.Parameter(torch.full((self.heads,), -4.0))
        self.log_decay = nn.Parameter(torch.arange(1.0, self.heads + 1).log())
        self.skip = nn.Parameter(torch.ones(self.heads))
        self.out_proj = nn.Linear(self.inner, width, bias=False)

    def forward(self, u: Tensor) -> Tensor:
        B, L, _ = u.shape
        z, xbc, dt = self.in_proj(self.norm(u)).split([self.inner, self.inner + 2 * self.state, self.heads], -1)
        xbc = F.silu(short_convolution(F.pad(xbc, (0, 0, self.taps - 1, 0)), self.convolution))
        x, b, c = xbc.split([self.inner, self.state, self.state], -1)
        y = self.scan(
            x.reshape(B, L, self.heads, self.head),
            dt,
            -self.log_decay.float().exp(),
            b.reshape(B, L, 1, self.state),
            c.reshape(B, L, 1, self.state),
            256,
            D=self.skip,
            dt_bias=self.dt_bias,
            dt_softplus=True,
        )
        return u + self.out_proj(self.mixer_norm(y.flatten(2)) * F.silu(z))


class SimpleGLABlock(nn.Module):
    """Keys and queries of 3/4 D, values, output gate and output of 3/2 D, a decay a head: (B, L, D) -> (B, L, D)."""

    def __init__(self, width: int, head: int = 64):
        super().__init__()
        from fla.ops.simple_gla import chunk_simple_gla

        self.attend = chunk_simple_gla
        self.heads = max(1, 3 * width // 4 // head)
        self.keys, self.values = 3 * width // 4, 3 * width // 2
        self.norm, self.mixer_norm = nn.RMSNorm(width), nn.RMSNorm(self.values)
        self.in_proj = nn.Linear(width, 2 * self.keys + 2 * self.values + self.heads, bias=False)
        self.out_proj = nn.Linear(self.values, width, bias=False)

    def forward(self, u: Tensor) -> Tensor:
        sizes = [self.keys, self.keys, self.values, self.values, self.heads]
        q, k, v, z, decay = self.in_proj(self.norm(u)).split(sizes, -1)
        q, k, v = (t.unflatten(-1, (self.heads, -1)) for t in (q, k, v))
        y, _ = self.attend(q, k, v, g=F.logsigmoid(decay.float()) / 16)
        return u + self.out_proj(self.mixer_norm(y.flatten(2)) * F.silu(z))


PEERS = {"Mamba-2": Mamba2Block, "simple GLA": SimpleGLABlock}
