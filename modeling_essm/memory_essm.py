# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""A gated delta memory beside the filters, whose keys and values come with the channels: what recalls.

    S(t) = exp(g(t)) (I - beta(t) k(t) k(t)^T) S(t-1) + beta(t) k(t) v(t)^T,   o(t) = S(t)^T q(t)

A layer has one S (K m, K e). Letters as in `elastic_essm`; m keys and e values a channel.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init
from transformers.models.qwen3_next.modeling_qwen3_next import (
    torch_chunk_gated_delta_rule,
    torch_recurrent_gated_delta_rule,
)

from .mixer_essm import at_unit_scale, last_steps, prefix_linear, short_convolution

_SLOW = 4.0  # a new memory keeps 0.98 a step


class ESSMMemory(nn.Module):
    """Keys, queries and rates of a memory; values come from the mixer."""

    def __init__(self, config: Any, capacity: int):
        super().__init__()
        # Rows and columns of each channel: m of its queries, then m of its keys.
        self.keys, self.taps = config.memory_key_size, config.conv_kernel_size
        self.in_proj = at_unit_scale(nn.Linear(config.hidden_size, 2 * capacity * self.keys, bias=False))
        self.convolution = nn.Parameter(torch.empty(self.taps, 2 * capacity * self.keys))
        self.offset = nn.Parameter(torch.zeros(2 * capacity * self.keys))
        self.rates = at_unit_scale(nn.Linear(config.hidden_size, 2))  # log-decay and write strength, before their maps

    @torch.no_grad()
    def init_weights(self) -> None:
        init.uniform_(self.convolution, -(self.taps**-0.5), self.taps**-0.5)
        init.zeros_(self.offset)

    def forward(
        self,
        u: Tensor,
        v: Tensor,
        read: int | Tensor,
        written: Tensor | None,
        real: Tensor | None,
        past: Mapping[str, Tensor],
        lengths: Tensor | None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """What is read of the memory (B, L, R e), and its tensors after the last step.

        Args:
            u: (B, L, D). v: (B, L, R, e), values of all heads of the room. read: the budget, or (B,) that of each row.
            written: (B,) channels that each row writes, or None for all. real: (B, L) bool, positions that write.
        """
        B, L, R, _ = v.shape
        qk = prefix_linear(self.in_proj, u, 2 * R * self.keys)
        p, before = self.taps - 1, past.get("keys")
        qk = torch.cat([qk.new_zeros(B, p, qk.shape[2]) if before is None else before.to(qk), qk], 1)
        tail = last_steps(qk, p, lengths)
        qk = short_convolution(qk, self.convolution[:, : qk.shape[2]].to(qk.dtype)) + self.offset[: qk.shape[2]]
        q, k = F.silu(qk).float().unflatten(-1, (R, 2, self.keys)).unbind(-2)
        channel = torch.arange(R, device=u.device)[:, None]
        q = q * (channel < (read if isinstance(read, int) else read.view(-1, 1, 1, 1)))
        if written is not None:
            live = channel < written.view(-1, 1, 1, 1)
            k, v = k * live, v * live
        q, k = F.normalize(q.flatten(2), dim=-1), F.normalize(k.flatten(2), dim=-1)
        q = q * q.shape[-1] ** 0.5  # which the library divides by
        decay, beta = self.rates(u).float().unbind(-1)
        decay, beta = -F.softplus(decay - _SLOW), beta.sigmoid()
        if real is not None:
            decay, beta = decay.masked_fill(~real, 0.0), beta.masked_fill(~real, 0.0)
        rule = torch_recurrent_gated_delta_rule if L == 1 else torch_chunk_gated_delta_rule
        state = past.get("memory")
        if not B:  # the library's functions take no empty batch
            return v.flatten(2), {"keys": tail, "memory": k.new_zeros(0, R * self.keys, v.shape[2] * v.shape[3])}
        o, state = rule(
            *(t.unsqueeze(2) for t in (q, k, v.flatten(2).float(), decay, beta)),
            initial_state=None if state is None else state.to(u.device).unsqueeze(1),
            output_final_state=True,
        )
        return o.squeeze(2).to(v.dtype), {"keys": tail, "memory": state.squeeze(1)}
