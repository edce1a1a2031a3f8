# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""A gated delta memory beside the filters, whose keys and values come with the channels: what recalls.

    S(t) = exp(g(t)) (I - beta(t) k(t) k(t)^T) S(t-1) + beta(t) k(t) v(t)^T,   o(t) = S(t)^T q(t)

A layer has one S (K m, K e). Letters as in `elastic_essm`; m keys and e values a channel.
"""

from __future__ import annotations

import functools
import inspect
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init
from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

from .mixer_essm import ESSMPrefixLinear

_SLOW = 4.0  # a new memory keeps 0.98 a step
_SILENCE = 1e-6  # keys of less squared length fade out, as in the library's rule: else noise would write as loudly
_EXPORTED_CHUNK = 64  # a power of two
_MOST_KEYS = 256  # that flash-linear-attention's kernels take
# The library's own code. What it has imported may be a kernel of flash-linear-attention, for accelerators and 16 bits.
_plain_rule = inspect.unwrap(torch_chunk_gated_delta_rule)


class ESSMMemory(nn.Module):
    """The rule and its rates; queries, keys and values come from the mixer."""

    def __init__(self, config: Any, capacity: int):
        super().__init__()
        self.keys, self.longest = config.memory_key_size, config.filter_length
        self.offset = nn.Parameter(torch.zeros(2 * capacity * self.keys))  # of each channel m queries, then m keys
        self.rates = ESSMPrefixLinear(config.hidden_size, 2)  # log-decay and write strength, before their maps

    @torch.no_grad()
    def init_weights(self) -> None:
        init.zeros_(self.offset)
        init.normal_(self.rates.weight, std=self.rates.weight.shape[1] ** -0.5)
        init.zeros_(self.rates.bias)

    def forward(
        self,
        u: Tensor,
        keys: Tensor,
        v: Tensor,
        read: int | Tensor,
        written: Tensor | None,
        real: Tensor | None,
        state: Tensor | None,
        lengths: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """What is read of the memory (B, L, R e), and the memory (B, R m, R e) after the last step.

        Args:
            u: (B, L, D). keys: (B, L, R, 2 m), queries and keys of all heads of the room, convolved. v: (B, L, R, e).
            read: the budget, or (B,) that of each row. written: (B,) channels that each row writes, or None for all.
            real: (B, L) bool, positions that write. state: the memory before, or None.
        """
        B, L, R, e = v.shape
        q, k = F.silu(keys + self.offset[: 2 * R * self.keys].view(R, -1)).float().chunk(2, -1)
        if not isinstance(read, int) or read < R:
            q = q * _first(read, q)
        if written is not None:
            k, v = k * _first(written, k), v * _first(written, v)
        qk = torch.stack([q, k], 2).flatten(3)
        q, k = (qk * (qk.square().sum(-1, keepdim=True) + _SILENCE).rsqrt()).unbind(2)
        decay, beta = self.rates(u, 2).float().chunk(2, -1)
        decay, beta = F.logsigmoid(_SLOW - decay), beta.sigmoid()
        if real is not None:
            gone = ~real[..., None]
            decay, beta = decay.masked_fill(gone, 0.0), beta.masked_fill(gone, 0.0)
        if state is None:
            S = k.new_zeros(B, k.shape[2], R * e)
        else:  # copied where autograd would keep it, which it cannot of a tensor made under inference_mode
            S = state.to(k, copy=torch.is_grad_enabled())
        exported = torch.compiler.is_exporting() and not (isinstance(L, int) and L == 1)
        rule = functools.partial(_exported_rule, longest=self.longest) if exported else delta_rule
        autocast = u.device.type != "meta" and torch.is_autocast_enabled(u.device.type)
        with torch.autocast(u.device.type, enabled=False) if autocast else nullcontext():  # dtypes are chosen here
            o, last = rule(q, k, v.flatten(2), decay, beta, S)
            if real is None and lengths is not None:  # outputs go on where the state that is kept does not
                gone = (torch.arange(u.shape[1], device=u.device) >= lengths[:, None])[..., None]
                decay, beta = decay.masked_fill(gone, 0.0), beta.masked_fill(gone, 0.0)
                last = rule(q, k, v.flatten(2), decay, beta, S)[1]
        return o.to(v.dtype), last


def _first(channels: int | Tensor, x: Tensor) -> Tensor:
    """Which channels of x (B, L, R, n) are among the first so many, or (B,) of each row: bool, to multiply with x."""
    bound = channels if isinstance(channels, int) else channels.view(-1, 1, 1, 1)
    return torch.arange(x.shape[2], device=x.device)[:, None] < bound


def delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> tuple[Tensor, Tensor]:
    """o (B, L, e) of all steps, and S (B, n, e) after the last.

    Args:
        q, k: (B, L, n) fp32. v: (B, L, e). g, beta: (B, L, 1) fp32. S: (B, n, e) fp32 before the first step.
    """
    B, L, n = k.shape
    if L == 1:
        S = S * g.exp()
        S = torch.addcmul(S, k.mT, beta * (v.float() - k @ S))
        return q @ S, S
    if not B:  # which the library's function does not take
        return v, S
    kernels = v.is_cuda and v.dtype in (torch.bfloat16, torch.float16) and n <= _MOST_KEYS
    rule, dtype = (torch_chunk_gated_delta_rule, v.dtype) if kernels else (_plain_rule, torch.float32)
    o, S = rule(
        *((q * n**0.5).to(dtype)[:, :, None], k.to(dtype)[:, :, None], v.to(dtype)[:, :, None], g, beta),
        chunk_size=next(size for size in (16, 32, 64) if size >= min(L, 64)),
        initial_state=S[:, None],
        output_final_state=True,
    )
    return o.squeeze(2), S.squeeze(1)


def _exported_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor, longest: int
) -> tuple[Tensor, Tensor]:
    """`delta_rule` for torch.export, where L <= `longest` may be symbolic, so that no loop may depend on it.

    A chunk reads o = o_0 + R S of the state before it and leaves A S + M: first those of every chunk, then a scan over
    A and M in log2(longest / C) levels for the states. Letters: m chunks of C steps; X = (1 + T)^-1, see below.
    """
    _, L, n = k.shape
    C = _EXPORTED_CHUNK
    m = (L - 1) // C + 2  # one more than needed: never 1, which would be a case of its own
    i = torch.arange(C, device=k.device)
    position = torch.arange(m, device=k.device)[:, None] * C + i
    exists, source = (position < L)[..., None], position.clamp(max=L - 1)
    q, k, v = q[:, source], k[:, source], v[:, source].float()  # (B, m, C, ..)
    g, beta = g[:, source] * exists, beta[:, source] * exists
    # 1. Within chunks: X = (1 + T)^-1 of blocks of one step, then of two, and so on; T below the diagonal.
    c = g.cumsum(2)
    decay = (c - c.mT).clamp(max=0.0).exp()
    T = (beta * k) @ k.mT * decay
    X = torch.eye(C, device=k.device).expand_as(T)
    for s in (1 << j for j in range(C.bit_length() - 1)):
        below = ((i // s)[:, None] > i // s) & ((i // (2 * s))[:, None] == i // (2 * s))
        X = X - X @ (T * below) @ X
    new, old = X @ (beta * v), X @ (beta * k * c.exp())
    attention, end = q @ k.mT * decay * (i[:, None] >= i), c[:, :, -1:]
    o, R = attention @ new, q * c.exp() - attention @ old
    keys = (k * (end - c).exp()).mT
    A, M = end.exp() * torch.eye(n, device=k.device) - keys @ old, keys @ new
    # 2. Between chunks: the given state is what a first map leaves of any.
    A, M = F.pad(A, (0, 0, 0, 0, 1, 0)), torch.cat([S[:, None], M], 1)
    for step in (1 << j for j in range(((longest - 1) // C + 1).bit_length())):
        A_before, M_before = (F.pad(t, (0, 0, 0, 0, step, 0))[:, : m + 1] for t in (A, M))
        A, M = A @ A_before, M + A @ M_before
    o = o + R @ M[:, :m]
    return o.flatten(1, 2)[:, torch.arange(L, device=k.device)], M[:, m - 1]
