# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Gate and mixer, Eq. (7-8): the only part of a block that looks along the sequence.

Letters: B batch, L sequence, D inner width, K budget, G groups of the width with a gate each, N states.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init
from transformers.activations import ACT2FN

from .cache_essm import operator_of
from .cache_layers import ESSMCacheLayer
from .configuration_essm import ESSMConfig
from .quantized_weights import dequantize, is_quantized
from .short_convolution import short_convolution
from .spectral_constants import state_dtype
from .spectral_feedback import autoregression, delayed, last_steps, negative_filters

_GATE_EPS = 1e-6  # eps of Eq. (8)


class ESSMPrefixLinear(nn.Module):
    """Scores of the first channels only: (.., D_in), n -> (.., n), or (.., n, G) for G heads; reads n of the weights.

    Not an nn.Linear, which tools replace by layers that know nothing of n. The mixer initialises it.
    """

    def __init__(self, in_features: int, channels: int, heads: int = 1):
        super().__init__()
        shape = (channels,) if heads == 1 else (channels, heads)
        self.weight = nn.Parameter(torch.empty(*shape, in_features))
        self.bias = nn.Parameter(torch.empty(*shape))

    def forward(self, x: Tensor, num_outputs: int) -> Tensor:
        weight, bias = self.weight[:num_outputs], self.bias[:num_outputs]
        scores = F.linear(x, weight.view(-1, weight.shape[-1]), bias.flatten())
        return scores if bias.ndim == 1 else scores.unflatten(-1, bias.shape)


def at_unit_scale(linear: nn.Linear) -> nn.Linear:
    """Marked to start at 1 / sqrt(its inputs) in the gated block, where it reads what a norm has scaled."""
    linear.starts_at_unit_scale = True  # type: ignore[assignment]
    return linear


class ESSMScale(nn.Module):
    """A factor for each channel of the width: (.., D) -> (.., D)."""

    def __init__(self, size: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class ESSMSpectralMixer(nn.Module):
    """Eq. (7-8): y(t) = D u(t) + sum_{k<=K} alpha_k(t) sigma_k^{1/4} M_k (phi_k * u)(t); channels > K are not read.

    With `gating="none"` alpha is 1, Eq. (6). With `ar_order=2` the terms of AR-STU (Agarwal et al. 2023) are added:
    negative filters (-1)^tau phi_k, direct terms in u(t-0..2) and feedback of y(t-1), y(t-2). `ar_negative_filters`
    leaves out the first, and `ar_feature_shift=2` puts (phi_k * u)(t-2) in place of (phi_k * u)(t), both signs.

    In the gated block u is SiLU of a short causal convolution of the input, the matrix D is diagonal, M_k consists of
    blocks of `mixing_size` on the diagonal, and each of `num_heads` groups of the width has an alpha of its own.
    """

    def __init__(self, config: ESSMConfig, capacity: int):
        super().__init__()
        D, K, D_g, d = config.inner_size, capacity, config.gate_hidden_size, config.mixing_size
        self.operator = operator_of(config)
        self.algorithm, self.scaling_exponent = config.spectral_algorithm, config.scaling_exponent
        self.gated, self.ar_order = config.gating == "softmax", config.ar_order
        self.negative, self.shift = bool(self.ar_order) and config.ar_negative_filters, config.ar_feature_shift
        self.gate_bias = config.gate_bias  # 0 would amplify noise to unit scale
        self.taps, self.num_heads = config.conv_kernel_size, config.num_heads
        self.skip = nn.Linear(D, D, bias=False) if config.block == "paper" else ESSMScale(D)
        self.mixing_heads = None if d == D else (D // d, d)
        self.channel_mixing = nn.Parameter(torch.empty(K, D, d))  # blocks of M_k one below the other
        if self.taps:
            self.convolution = nn.Parameter(torch.empty(self.taps, D))  # the last row is that of u(t)
        if self.gated:
            self.gate_in = nn.Linear(D, D_g) if config.block == "paper" else at_unit_scale(nn.Linear(D, D_g))
            self.gate_out = ESSMPrefixLinear(D_g, K, self.num_heads)
            self.gate_act = ACT2FN[config.hidden_act]
        if self.negative:
            self.channel_mixing_negative = nn.Parameter(torch.empty(K, D, D))
        if self.ar_order:
            self.input_mixing = nn.Parameter(torch.empty(self.ar_order, D, D))  # u(t-1), u(t-2); u(t) is the skip term
            self.output_mixing = nn.Parameter(torch.empty(self.ar_order, D, D))  # y(t-1), y(t-2)

    @torch.no_grad()
    def init_weights(self, std: float) -> None:
        """Start the weights that are no linear layer's."""
        d = self.channel_mixing.shape[2]
        paper = isinstance(self.skip, nn.Linear)
        init.normal_(self.channel_mixing, mean=0.0, std=1e-3 if paper else d**-0.5)
        if self.taps:
            init.uniform_(self.convolution, -(self.taps**-0.5), self.taps**-0.5)
        if self.gated:
            unit = getattr(self.gate_in, "starts_at_unit_scale", False)
            init.normal_(self.gate_out.weight, mean=0.0, std=self.gate_in.out_features**-0.5 if unit else std)
            init.constant_(self.gate_out.bias, self.gate_bias)
        if self.negative:
            init.normal_(self.channel_mixing_negative, mean=0.0, std=1e-3)
        if self.ar_order:
            init.normal_(self.input_mixing, mean=0.0, std=std)
            init.zeros_(self.output_mixing)

    def gates(self, u: Tensor, budget: int, rows: Tensor | None = None) -> Tensor:
        """alpha_k(t) sigma_k^{1/4} of Eq. (7-8), normalised over the active prefix only.

        Args:
            u: (B, L, D). budget: K, the largest of any row. rows: (B,) K of each row, or None.
        Returns:
            (B, L, K), or (B, L, K, G) for G heads, in u's dtype; zero beyond a row's own K.
        """
        scale = self.operator.sigma(budget, self.scaling_exponent, u)
        heads = () if self.num_heads == 1 or not self.gated else (1,)
        scale, inactive = scale.view(budget, *heads), None
        if rows is not None:
            inactive = (torch.arange(budget, device=u.device) >= rows[:, None]).view(-1, 1, budget, *heads)
        if not self.gated:
            gates = scale.expand(*u.shape[:2], budget)
            return gates if inactive is None else gates.masked_fill(inactive, 0.0)
        s = self.gate_out(self.gate_act(self.gate_in(u)), budget)
        s = s.to(state_dtype(s.dtype))
        K: Tensor | int = budget if rows is None else rows.view(-1, 1, 1, *heads)
        if inactive is not None:
            s = s.masked_fill(inactive, 0.0)
        s = s * (K**0.5 / (torch.linalg.vector_norm(s, dim=2, keepdim=True) + _GATE_EPS))
        if inactive is not None:
            s = s.masked_fill(inactive, -math.inf)
        return s.softmax(2).to(u.dtype) * scale

    def mixing_matrices(self, budget: int, dtype: torch.dtype) -> Tensor:
        """M_k as `SpectralOperator` takes them: (>= K, D, D), which may be quantised, or (>= K, h, d, d)."""
        mixing: Tensor = self.channel_mixing
        if self.mixing_heads is None:
            return mixing
        if is_quantized(mixing):
            mixing = dequantize(mixing, budget, dtype)
        return mixing.unflatten(1, self.mixing_heads)

    def operator_inputs(self, u: Tensor) -> Tensor:
        """What gates and operator read of a whole sequence (B, L, D): in the gated block its convolution."""
        return self.convolve(u, None, None)[0] if self.taps else u

    def forward(
        self,
        u: Tensor,
        budget: int,
        rows: Tensor | None = None,
        lengths: Tensor | None = None,
        cache: ESSMCacheLayer | None = None,
    ) -> Tensor:
        """(B, L, D) -> (B, L, D), reading and updating the layer's state; `lengths` (B,) as in `SpectralOperator`."""
        past = {} if cache is None else {name: t.to(u.device) for name, t in cache.tensors.items()}
        convolved = {}
        if self.taps:
            u, convolved["convolution"] = self.convolve(u, past.get("convolution"), lengths)
        gates = self.gates(u, budget, rows)
        num_states = None
        if cache is not None:
            num_states = cache.num_states or self.operator.num_states(max(budget, cache.state_budget or 0))
        mixing = self.mixing_matrices(budget, u.dtype)
        x = delayed(u, past.get("inputs"), self.shift) if self.shift else u

        def filtered(x: Tensor, M: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
            return self.operator(x, gates, M, state, lengths, self.algorithm, num_states)

        y, features = filtered(x, mixing, past.get("features"))
        y = y + self.skip(u)
        state = {"features": features} | convolved
        if self.negative:
            M, before = self.channel_mixing_negative, past.get("negative")
            negative, state["negative"] = negative_filters(x, lambda signed: filtered(signed, M, before), lengths)
            y = y + negative
        if self.ar_order:
            feedback = self.input_mixing, self.output_mixing
            y, recent = autoregression(u, y, *feedback, past, lengths, self.operator.filter_length)
            state |= recent
        if cache is not None:
            cache.update(**state)
        return y

    def convolve(self, u: Tensor, past: Tensor | None, lengths: Tensor | None) -> tuple[Tensor, Tensor]:
        """SiLU of the causal convolution of each channel, and the last taps - 1 inputs (B, taps - 1, D).

        There is no bias: silence stays silence, so that left padding changes nothing.
        """
        p = self.taps - 1
        past = u.new_zeros(u.shape[0], p, u.shape[2]) if past is None else past.to(u.dtype)
        u_all = torch.cat([past, u], 1)
        return F.silu(short_convolution(u_all, self.convolution.to(u.dtype))), last_steps(u_all, p, lengths)
