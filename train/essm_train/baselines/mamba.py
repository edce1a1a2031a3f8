# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""The library's Mamba and Mamba-2 mixers, quick where their CUDA kernels are not installed.

There the library walks through the positions of Mamba one by one, with a backward pass of order L^2, and repeats B, C
and their products for every head of Mamba-2. Here both work in chunks, Mamba-2 in matrix products that its heads share.
Weights are the library's, and so is every call with a cache.

A nested Mamba-2 is MatMamba's (Shukla et al. 2024, arXiv 2410.06718): budget K of capacity K̄ runs the leading K / K̄ of
the heads, with their rows of z, x and dt, channels of the convolution, columns of the output and weights of the gated
norm, which divides by the root mean square of these units alone, as theirs does. B and C are whole at every budget.
Letters: b batch, L sequence, D width, I inner width, N state; h heads of width p.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from transformers.models.mamba.modeling_mamba import MambaMixer
from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer
from transformers.utils.import_utils import is_mamba_2_ssm_available, is_mamba_ssm_available

from modeling_essm.companions.systems import register
from modeling_essm.mixer_essm import short_convolution


def _recur(state: Tensor, decays: Iterable[Tensor], inputs: Iterable[Tensor]) -> list[Tensor]:
    """The state, and those that follow: each decayed, plus the next input."""
    states = [state]
    for decay, added in zip(decays, inputs):
        states.append(decay * states[-1] + added)
    return states


def selective_scan(u: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor) -> Tensor:
    """h_l = exp(dt_l A) h_{l-1} + dt_l B_l u_l, y_l = C_l h_l, in 2 sqrt(L) steps (Gu and Dao 2023, Algorithm 2).

    Chunks of m ~ sqrt(L) positions advance side by side from h = 0; then the states at their ends are carried over.
    u and dt (b, L, I), A (I, N), negative, B and C (b, L, N) -> (b, L, I).
    """
    L = u.shape[1]
    m = math.isqrt(L - 1) + 1
    chunks = math.ceil(L / m)
    u, dt, B, C = (F.pad(x, (0, 0, 0, chunks * m - L)).unflatten(1, (chunks, m)) for x in (u, dt, B, C))
    decay = (dt[..., None] * A).exp()  # (b, chunks, m, I, N)
    inputs = (dt * u)[..., None] * B[..., None, :]
    h = torch.stack(_recur(inputs[:, :, 0], decay.unbind(2)[1:], inputs.unbind(2)[1:]), 2)
    since_start = (dt.cumsum(2)[..., None] * A).exp()  # decay of what a chunk started with
    starts = _recur(torch.zeros_like(h[:, 0, 0]), since_start[:, :-1, -1].unbind(1), h[:, :-1, -1].unbind(1))
    h = h + since_start * torch.stack(starts, 1)[:, :, None]
    return (h * C[..., None, :]).sum(-1).flatten(1, 2)[:, :L]


def has_cache(arguments: dict[str, Any]) -> bool:
    """Whether the library gave its mixer a cache, which it calls `cache_params` until 5.24."""
    return any(arguments.get(name) is not None for name in ("cache", "cache_params"))


class ChunkedMambaMixer(MambaMixer):
    """The library's mixer; without a cache and where its CUDA kernels are not installed, with `selective_scan`."""

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None, **kwargs: Any) -> Tensor:
        """(b, L, D) -> (b, L, D) in the same dtype, the scan in fp32; attention_mask (b, L), 1 for real positions."""
        if has_cache(kwargs) or (hidden_states.is_cuda and is_mamba_ssm_available()):
            return super().forward(hidden_states, attention_mask=attention_mask, **kwargs)
        u = hidden_states
        real = None if attention_mask is None else attention_mask[..., None].to(u.dtype)
        u = u if real is None else u * real
        u, gate = self.in_proj(u).chunk(2, -1)
        u = self.act(self.conv1d(u.mT)[..., : u.shape[1]]).mT
        u = u if real is None else u * real
        dt, B, C = self.x_proj(u).split([self.time_step_rank, self.ssm_state_size, self.ssm_state_size], -1)
        dt = F.softplus(self.dt_proj(dt).float())
        y = selective_scan(u.float(), dt, -self.A_log.float().exp(), B.float(), C.float()) + self.D.float() * u
        return self.out_proj((y * F.silu(gate)).to(hidden_states.dtype))


def chunked_scan(x: Tensor, log_decay: Tensor, B: Tensor, C: Tensor, chunk_size: int) -> Tensor:
    """H_t = exp(a_t) H_{t-1} + x_t B_t^T, y_t = H_t C_t of every head, by chunks (Dao and Gu 2024, section 6).

    Inside a chunk y = (exp(sum of a from s to t) C_t . B_s) x as a product of matrices, and what was before it comes
    through the states at the ends of chunks. Sums of a are taken in fp64: their differences are small where decays are
    strong. x (b, L, h, p), fp32 or fp64, a (b, L, h), at most 0, B and C (b, L, N) -> (b, L, h, p) in x's dtype.
    """
    L, heads, dtype = x.shape[1], x.shape[2:], x.dtype
    chunk_size = min(chunk_size, L)
    x, log_decay, B, C = (F.pad(t, (0, 0) * (t.ndim - 2) + (0, -L % chunk_size)) for t in (x, log_decay, B, C))
    x, log_decay, B, C = (t.unflatten(1, (-1, chunk_size)) for t in (x, log_decay, B, C))  # (b, chunks, chunk, ..)
    total = log_decay.double().cumsum(2)
    by_head = total.movedim(-1, 2)  # (b, chunks, h, chunk)
    later = torch.ones(chunk_size, chunk_size, dtype=torch.bool, device=x.device).triu(1)
    decay = (by_head[..., :, None] - by_head[..., None, :]).to(dtype).masked_fill(later, -torch.inf).exp()
    y = ((decay * (C @ B.mT)[:, :, None]) @ x.transpose(2, 3)).transpose(2, 3)
    to_the_end = (total[:, :, -1:] - total).to(dtype).exp()[..., None]
    added = (x * to_the_end).flatten(3).mT @ B  # (b, chunks, h p, N)
    total = total.to(dtype)
    whole = total[:, :, -1].exp()[..., None, None]
    added = added.unflatten(2, heads)
    states = _recur(torch.zeros_like(added[:, 0]), whole[:, :-1].unbind(1), added[:, :-1].unbind(1))
    before = torch.stack(states, 1).flatten(2, 3)
    y = y + (C @ before.mT).unflatten(-1, heads) * total.exp()[..., None]
    return y.flatten(1, 2)[:, :L]


class ChunkedMamba2Mixer(Mamba2Mixer):
    """The library's mixer; without a cache and where its CUDA kernels are not installed, with `chunked_scan`."""

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None, **kwargs: Any) -> Tensor:
        """(b, L, D) -> (b, L, D) in the same dtype, the scan in fp32; attention_mask (b, L), 1 for real positions."""
        kernels = hidden_states.is_cuda and is_mamba_2_ssm_available()
        if kernels or has_cache(kwargs) or self.n_groups != 1:
            return super().forward(hidden_states, attention_mask=attention_mask, **kwargs)
        u = hidden_states
        real = None if attention_mask is None else attention_mask[..., None].to(u.dtype)
        u = u if real is None else u * real
        N, taps = self.ssm_state_size, self.conv1d.weight.squeeze(1).mT
        gate, u, dt = self.in_proj(u).split([self.intermediate_size, self.conv_dim, self.num_heads], -1)
        u = short_convolution(F.pad(u, (0, 0, len(taps) - 1, 0)), taps.to(u.dtype))
        u = self.act(u if self.conv1d.bias is None else u + self.conv1d.bias)
        u = u if real is None else u * real
        x, B, C = u.float().split([self.intermediate_size, N, N], -1)
        x = x.unflatten(-1, (self.num_heads, self.head_dim))
        dt = F.softplus(dt.float() + self.dt_bias).clamp(*self.time_step_limit)
        y = chunked_scan(x * dt[..., None], -dt * self.A_log.float().exp(), B, C, self.chunk_size)
        y = y + self.D[:, None] * x
        return self.out_proj(self.norm(y.flatten(2), gate).to(hidden_states.dtype))


def by_chunks(model: nn.Module) -> nn.Module:
    """The same model, its weights untouched, with a `ChunkedMamba2Mixer` for each of the library's Mamba-2 mixers."""
    for module in model.modules():
        if type(module) is Mamba2Mixer:
            module.__class__ = ChunkedMamba2Mixer
    return model


class NestedMamba2Mixer(ChunkedMamba2Mixer):
    """A mixer whose budget K runs what `leading` gives of each tensor and nothing else; at its capacity it is plain."""

    capacity: int
    shells: dict[int, nn.Module]  # without weights: the mixer of a budget

    def forward(  # type: ignore[override]
        self, hidden_states: Tensor, *args: Any, spectral_budget: int | None = None, **kwargs: Any
    ) -> Tensor:
        """(b, L, D) -> (b, L, D); a cache belongs to one budget."""
        K = self.capacity if spectral_budget is None else spectral_budget
        if K not in self.shells:
            return super().forward(hidden_states, *args, **kwargs)
        weights = {name: leading(self, name, weight, K) for name, weight in self.named_parameters()}
        return functional_call(self.shells[K].train(self.training), weights, (hidden_states, *args), kwargs)


register(NestedMamba2Mixer, None)  # no tool for Mamba-2 knows what its budgets read


def leading(mixer: NestedMamba2Mixer, name: str, weight: Tensor, K: int) -> Tensor:
    """What budget K reads of a parameter of that name, as a plain mixer of that size has it."""
    heads, inner = (n * K // mixer.capacity for n in (mixer.num_heads, mixer.intermediate_size))
    whole, shared = mixer.intermediate_size, mixer.conv_dim - mixer.intermediate_size
    if name == "in_proj.weight":  # rows of z, x, B and C, dt
        z, x, BC, dt = weight.split([whole, whole, shared, mixer.num_heads])
        return torch.cat([z[:inner], x[:inner], BC, dt[:heads]])
    if name.startswith("conv1d."):
        return torch.cat([weight[:inner], weight[whole:]])
    if name == "out_proj.weight":
        return weight[:, :inner]
    return weight[: inner if name == "norm.weight" else heads]


def nest(model: nn.Module, capacity: int) -> nn.Module:
    """The same model, a `Mamba2Model` of one group and whole heads a channel, with nested mixers of that capacity."""
    mixers = [module for module in model.modules() if isinstance(module, Mamba2Mixer)]
    shells = dict(_shells(model.config, mixers[0], capacity))  # to make one for each layer takes seconds
    for mixer in mixers:
        mixer.__class__ = NestedMamba2Mixer
        mixer.capacity, mixer.shells = capacity, copy.deepcopy(shells)
        for shell in mixer.shells.values():
            shell.layer_idx = mixer.layer_idx
    return model


def _shells(config: Any, mixer: Mamba2Mixer, capacity: int) -> Iterator[tuple[int, nn.Module]]:
    for K in range(1, capacity):
        smaller = type(config).from_dict(config.to_dict() | {"num_heads": mixer.num_heads * K // capacity})
        with torch.device("meta"):
            yield K, ChunkedMamba2Mixer(smaller, mixer.layer_idx, initialize_mixer_weights=False)
