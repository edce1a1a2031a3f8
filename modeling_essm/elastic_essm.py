# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""The elastic mixer: channel k is filter k with a head, gates, coefficients and memory keys of its own.

A budget K runs the leading block of every tensor. Letters: B batch, L sequence, D model width, K budget, d width of a
head, w = d - e of it through the filters and e through the memory, N states.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init
from transformers.activations import ACT2FN

from .cache_essm import ESSMCacheLayer, operator_of
from .mixer_essm import (
    LayerCall,
    at_unit_scale,
    beyond,
    causal_convolution,
    nested_gates,
    prefix_linear,
    quieter_by_channel,
    softmax_gates,
)


class ESSMElasticMixer(nn.Module):
    """Eq. (7-8) with a head for every channel; (B, L, D) of unit scale to (B, L, D).

    z_j, v_j = in_j u;  v_j = silu(conv_j v_j);  y_j = skip_j v_j + sum_{k<=j} alpha_kj sigma_k^p M_kj (phi_k * v_j);
    out = sum_{j<=K} out_j (norm_j(y_j) silu(z_j)). With `gating="softmax"` every head mixes all K filters.
    """

    def __init__(self, config: Any, capacity: int):
        super().__init__()
        D, d, e = config.hidden_size, config.head_size, config.memory_value_size
        self.gate_units = config.gate_hidden_size // config.num_spectral_channels
        self.operator, self.algorithm = operator_of(config), config.spectral_algorithm
        self.nested = config.gating == "nested"
        self.head_size, self.filtered, self.scaling_exponent = d, d - e, config.scaling_exponent
        self.taps, self.gate_bias, self.eps = config.conv_kernel_size, config.gate_bias, config.layer_norm_eps
        self.convolved = d + 2 * config.memory_key_size  # of each channel: d of v, then the memory's queries and keys
        self.in_proj = at_unit_scale(nn.Linear(D, capacity * (d + self.convolved), bias=False))  # after d of z
        self.convolution = nn.Parameter(torch.empty(self.taps, capacity * self.convolved))  # the last row is of v(t)
        self.gate_in = at_unit_scale(nn.Linear(D, capacity * self.gate_units))
        self.gate_weight = nn.Parameter(torch.empty(capacity, capacity, capacity * self.gate_units))  # filter, head
        self.gate_offset = nn.Parameter(torch.empty(capacity, capacity))
        self.gate_act = ACT2FN[config.hidden_act]
        self.channel_mixing = nn.Parameter(torch.empty(capacity, capacity * self.filtered))
        self.skip = nn.Parameter(torch.ones(capacity * self.filtered))
        self.norm = nn.Parameter(torch.ones(capacity * d))
        self.out_proj = quieter_by_channel(nn.Linear(capacity * d, D, bias=False), capacity)
        self.memory: Any = None
        if e:
            from .memory_essm import ESSMMemory  # imports flash-linear-attention where that is installed

            self.memory = ESSMMemory(config, capacity)

    @torch.no_grad()
    def init_weights(self, std: float) -> None:
        init.normal_(self.channel_mixing, mean=0.0, std=1.0)
        init.uniform_(self.convolution, -(self.taps**-0.5), self.taps**-0.5)
        init.normal_(self.gate_weight, mean=0.0, std=self.gate_in.out_features**-0.5)
        init.constant_(self.gate_offset, self.gate_bias)
        init.ones_(self.skip)
        init.ones_(self.norm)
        if self.memory is not None:
            self.memory.init_weights()

    def gates(self, u: Tensor, K: int, rows: Tensor | None) -> Tensor:
        """(B, L, K, K): alpha_kj(t) sigma_k^p of filter k for head j, normalised over those that j mixes."""
        h = self.gate_act(prefix_linear(self.gate_in, u, K * self.gate_units))
        n = h.shape[-1]
        if rows is not None:
            h = h.masked_fill(beyond(rows * self.gate_units, n), 0.0)
        s = F.linear(h, self.gate_weight[:K, :K, :n].reshape(K * K, n)).unflatten(-1, (K, K)) + self.gate_offset[:K, :K]
        alpha = nested_gates(s, self.operator.filter_length) if self.nested else softmax_gates(s, K, rows)
        alpha = alpha.to(u.dtype)
        if not self.scaling_exponent:
            return alpha
        return alpha * self.operator.sigma(K, self.scaling_exponent, u).view(K, 1)

    def forward(self, u: Tensor, call: LayerCall, cache: ESSMCacheLayer | None = None) -> Tensor:
        real = None
        if call.padding is not None:
            u, real = u.masked_fill(call.padding, 0.0), ~call.padding[..., 0]
        if call.packing is not None:
            return call.packing.apply(self, u, call)
        K, d, w = call.budget, self.head_size, self.filtered
        past = {} if cache is None else cache.tensors
        state, num_states, room = past.get("features"), None, K
        if state is not None:
            num_states, room, state = state.shape[1], state.shape[2] // w, state.to(u.device)
        elif cache is not None:
            room = max(K, cache.state_budget or 0)
            num_states = self.operator.num_states(room)
        n = self.convolved
        z, v = prefix_linear(self.in_proj, u, room * (d + n)).unflatten(-1, (room, d + n)).split_with_sizes((d, n), -1)
        v, tail = causal_convolution(v.flatten(-2), self.convolution, past.get("convolution"), call.lengths)
        v, keys = v.unflatten(-1, (room, n)).split_with_sizes((d, n - d), -1)
        gates = self.gates(u, K, call.rows)
        if room > K:  # whose heads only keep their state
            gates = F.pad(gates, (0, room - K))
        v = F.silu(v)
        f = v[..., :w].flatten(-2)
        weights = self.channel_mixing[:, : room * w]
        y, features = self.operator(f, gates, weights, state, call.lengths, self.algorithm, num_states, self.nested)
        y = (y[..., : K * w] + self.skip[: K * w] * f[..., : K * w]).unflatten(-1, (K, w))
        kept: dict[str, Tensor] = {}
        if self.memory is not None:
            written = call.rows if cache is None else cache.filled
            written = None if written is None else torch.as_tensor(written, device=u.device)
            read = K if call.rows is None else call.rows
            o, kept["memory"] = self.memory(u, keys, v[..., w:], read, written, real, past.get("memory"), call.lengths)
            y = torch.cat([y, o[:, :, : K * (d - w)].unflatten(-1, (K, d - w))], -1)
        y = F.rms_norm(y, (d,), eps=self.eps) * self.norm[: K * d].view(K, d)
        y = y * F.silu(z[..., :K, :])
        if call.rows is not None:
            y = y.masked_fill(beyond(call.rows, K)[..., None], 0.0)
        if cache is not None:
            cache.update(features=features, convolution=tail, **kept)
        y = y.to(z.dtype)  # while it has heads: a compiler then computes it by heads, and not one element at a time
        return prefix_linear(self.out_proj, y.flatten(-2))
