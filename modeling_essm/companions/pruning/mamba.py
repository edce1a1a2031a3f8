# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""The states of the library's Mamba and Mamba-2 layers, whose recurrence depends on the input.

    h_t = a_t h_{t-1} + delta_t B_t u_t,   y_t = C_t h_t,   a_t = exp(delta_t A)

Channel d and state i have A[d, i] < 0; delta_t is one number per channel, B_t and C_t are common to a group of
channels. Neither AIRE-Prune nor its code has a formula for such layers. These energies, means over calibration text,
are ours:

    frozen  mean_t(delta_t^2 B_t^2) mean_t(C_t^2) mean_t(1 / (1 - a_t^2))
    along   mean_s(delta_s^2 B_s^2 W_s),   W_s = C_s^2 + a_{s+1}^2 W_{s+1}, W = 0 after the text

"along" is the summed squared response to an impulse at s, over the text that follows, averaged over s. With constant
parameters and a text much longer than the memory both are the same. B_t and C_t serve all channels, so a state goes
for all channels or stays, and its energy is the sum over channels. A head of Mamba-2 is head_dim equal channels.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..systems import Adapter, StateLayer, padded_index, put


@dataclass(frozen=True)
class Steps:
    """The recurrence along a text, float64: delta (B, L, G, D) for G groups of D channels; A (G, D, N), or (G, D, 1)
    where all states of a channel share it; B and C (B, L, G, N), zero at tokens that are not counted (B, L)."""

    delta: Tensor
    A: Tensor
    B: Tensor
    C: Tensor
    counted: Tensor


class SelectiveAdapter(Adapter):
    """What Mamba and Mamba-2 have in common: one state_size for all layers, energies on calibration text."""

    selective = True

    def shape(self, layer: Any) -> tuple[int, ...]:
        return (layer.ssm_state_size,)

    def read(self, layer: nn.Module) -> Any:
        raise TypeError(f"{type(layer).__name__} is no fixed linear system: lam, B and C depend on its input")

    def steps(self, layer: Any, hidden: Tensor, mask: Tensor | None) -> Steps:
        """delta, A, B and C of a layer for an input (B, L, hidden_size)."""
        raise NotImplementedError

    def channels(self, layer: Any) -> int:
        """How many channels have a state of that shape each."""
        return int(layer.intermediate_size)

    def channel_width(self, layer: Any) -> int:
        """How many of them have the same delta and A."""
        return 1


class MambaAdapter(SelectiveAdapter):
    """transformers' MambaMixer: A_log (D, N); x_proj gives delta's factor, B and C, in this order."""

    def kind(self, layer: nn.Module) -> str:
        return "mamba"

    def steps(self, layer: Any, hidden: Tensor, mask: Tensor | None) -> Steps:
        N = layer.ssm_state_size
        x = layer.in_proj(_masked(hidden, mask))[..., : layer.intermediate_size]
        x = _masked(_convolved(layer, x), mask)
        rank, B, C = layer.x_proj(x).split([layer.time_step_rank, N, N], dim=-1)
        delta = F.softplus(layer.dt_proj(rank).double())
        return _steps(delta, -layer.A_log.double().exp(), B.unsqueeze(2), C.unsqueeze(2), mask)

    def tensors(self, layer: Any) -> list[tuple[nn.Module, str]]:
        return [(layer.x_proj, "weight"), (layer, "A_log")]

    def masks(self, layer: Any, keep: Tensor) -> list[tuple[nn.Module, str, Tensor]]:
        rows = torch.ones(layer.x_proj.weight.shape[0], 1, dtype=torch.bool)
        rows[-len(keep) :, 0] = keep
        return [(layer.x_proj, "weight", rows)]

    def shrink(self, layer: Any, keep: Tensor, size: int) -> None:
        index, real = padded_index(keep, size)
        R, N = layer.time_step_rank, layer.ssm_state_size
        weight = _take(layer.x_proj.weight, _rows(R + 2 * N, [R, R + N], N, index))
        weight[-size:][~real] = 0
        put(layer.x_proj, "weight", weight)
        put(layer, "A_log", layer.A_log.detach()[:, index.to(layer.A_log.device)])
        layer.x_proj.out_features, layer.ssm_state_size = len(weight), size


class Mamba2Adapter(SelectiveAdapter):
    """transformers' Mamba2Mixer: one A per head; in_proj gives gate, x, B, C and delta; conv1d runs over x, B and C.

    A state is an index i in all n_groups groups.
    """

    def kind(self, layer: nn.Module) -> str:
        return "mamba2"

    def steps(self, layer: Any, hidden: Tensor, mask: Tensor | None) -> Steps:
        G, N = layer.n_groups, layer.ssm_state_size
        projected = layer.in_proj(_masked(hidden, mask))
        _, x, delta = projected.split([layer.intermediate_size, layer.conv_dim, layer.num_heads], dim=-1)
        x = _masked(_convolved(layer, x), mask)
        _, B, C = x.split([layer.intermediate_size, G * N, G * N], dim=-1)
        delta = F.softplus(delta.double() + layer.dt_bias.double()).clamp(*layer.time_step_limit)
        A = -layer.A_log.double().exp()[:, None]
        return _steps(delta, A, B.unflatten(-1, (G, N)), C.unflatten(-1, (G, N)), mask)

    def channel_width(self, layer: Any) -> int:
        return layer.head_dim

    def tensors(self, layer: Any) -> list[tuple[nn.Module, str]]:
        modules = (layer.conv1d, layer.in_proj)
        return [(m, name) for m in modules for name in ("weight", "bias") if getattr(m, name) is not None]

    def masks(self, layer: Any, keep: Tensor) -> list[tuple[nn.Module, str, Tensor]]:
        """C_t = act(conv(..)): without the filter's weight and bias it is act(0) = 0."""
        rows = torch.ones(layer.conv_dim, dtype=torch.bool)
        rows[-layer.n_groups * len(keep) :] = keep.repeat(layer.n_groups)
        weight = (layer.conv1d, "weight", rows[:, None, None])
        return [weight] if layer.conv1d.bias is None else [weight, (layer.conv1d, "bias", rows)]

    def shrink(self, layer: Any, keep: Tensor, size: int) -> None:
        index, real = padded_index(keep, size)
        E, G, N, conv = layer.intermediate_size, layer.n_groups, layer.ssm_state_size, layer.conv1d
        for module, name in self.tensors(layer):
            value = getattr(module, name)
            first = E if module is conv else 2 * E
            value = _take(value, _rows(len(value), range(first, first + 2 * G * N, N), N, index))
            if module is conv:
                value[-G * size :][~real.repeat(G)] = 0
            put(module, name, value)
        layer.in_proj.out_features = len(layer.in_proj.weight)
        conv.in_channels = conv.out_channels = conv.groups = layer.conv_dim = len(conv.weight)
        layer.ssm_state_size = size


def _rows(count: int, starts: Sequence[int], N: int, index: Tensor) -> Tensor:
    """All of `count` rows, but of the N states in the block that begins at each of `starts` those of `index` alone."""
    rows, at = [], 0
    for start in starts:
        rows += [torch.arange(at, start), start + index]
        at = start + N
    return torch.cat([*rows, torch.arange(at, count)])


def _take(value: Tensor, rows: Tensor) -> Tensor:
    return value.detach().index_select(0, rows.to(value.device))


def _masked(value: Tensor, mask: Tensor | None) -> Tensor:
    return value if mask is None else value * mask[..., None].to(value.dtype)


def _convolved(layer: Any, x: Tensor) -> Tensor:
    """The layer's causal filter and activation of (B, L, channels)."""
    return layer.act(layer.conv1d(x.transpose(1, 2))[..., : x.shape[1]]).transpose(1, 2)


def _steps(delta: Tensor, A: Tensor, B: Tensor, C: Tensor, mask: Tensor | None) -> Steps:
    """Channels in their groups: delta (B, L, channels), A (channels, N or 1), B and C (B, L, G, N)."""
    G = B.shape[2]
    counted = torch.ones(B.shape[:2], dtype=torch.float64, device=B.device) if mask is None else mask.double()
    each = counted[..., None, None]
    return Steps(delta.unflatten(-1, (G, -1)), A.unflatten(0, (G, -1)), B.double() * each, C.double() * each, counted)


class Energies:
    """Energies of a layer's states, "frozen" or "along", from texts that are added one by one."""

    def __init__(self, how: str):
        self.how, self.sums = how, defaultdict[str, Any](float)

    def add(self, steps: Steps) -> None:
        sums, length = self.sums, steps.delta.shape[1]
        sums["tokens"] += float(steps.counted.sum())
        W: Any = 0.0
        for t in range(length) if self.how == "frozen" else reversed(range(length)):
            delta = steps.delta[:, t, :, :, None]
            taken_in = (delta * steps.B[:, t, :, None]).square()
            if self.how == "along":
                W = steps.C[:, t, :, None].square() + W
                sums["energy"] = sums["energy"] + (taken_in * W).sum(0)
                W = W * torch.exp(2 * delta * steps.A)
                continue
            sums["input"] = sums["input"] + taken_in.sum(0)
            sums["output"] = sums["output"] + steps.C[:, t].square().sum(0)[:, None]
            lost = -torch.expm1(2 * delta * steps.A)  # 1 - a^2
            memory = torch.where(lost > 0, 1 / lost, 0)  # delta = 0 takes nothing in: its infinite memory is empty
            sums["memory"] = sums["memory"] + (memory * steps.counted[:, t, None, None, None]).sum(0)

    def mean(self) -> Tensor:
        """Of every channel and state, float64, (G, D, N). Raises ValueError if no token was added."""
        if not self.sums["tokens"]:
            raise ValueError("calibration must hold at least one token, got none")
        if self.how == "along":
            return self.sums["energy"] / self.sums["tokens"]
        means = [self.sums[name] / self.sums["tokens"] for name in ("input", "output", "memory")]
        return means[0] * means[1] * means[2]


@torch.no_grad()
def measure_energies(
    model: nn.Module, layers: Sequence[StateLayer], calibration: Iterable[Any], how: str
) -> dict[str, Tensor]:
    """Energies of the states of selective layers while a model reads calibration text.

    Args:
        calibration: batches of input_ids (B, L), or of keyword arguments of the model, or a single one; with an
            attention_mask, padding does not count. The model runs in evaluation mode, without gradients, and comes
            back in its own mode.
        how: "frozen" or "along".
    Returns:
        For every layer's name the energies (N,), float64, summed over channels, on the CPU.
    Raises:
        ValueError: no text. TypeError: a batch that is neither a tensor nor keyword arguments.
    """
    found = {layer.name: Energies(how) for layer in layers}
    training = [module for module in model.modules() if module.training]
    device = next(model.parameters()).device
    handles = [_observe(layer, found[layer.name]) for layer in layers]
    model.eval()
    try:
        for batch in [calibration] if isinstance(calibration, (Tensor, Mapping)) else calibration:
            batch = {"input_ids": batch} if isinstance(batch, Tensor) else batch
            if not isinstance(batch, Mapping):
                raise TypeError(f"a batch of calibration must be input_ids or a dict, got {type(batch).__name__}")
            model(**{name: value.to(device) if isinstance(value, Tensor) else value for name, value in batch.items()})
    finally:
        for handle in handles:
            handle.remove()
        for module in training:
            module.training = True
    width = {layer.name: layer.adapter.channel_width(layer.module) for layer in layers}  # type: ignore[attr-defined]
    return {name: (energies.mean().sum((0, 1)) * width[name]).cpu() for name, energies in found.items()}


def _observe(layer: StateLayer, energies: Energies) -> Any:
    adapter: Any = layer.adapter

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden = args[0] if args else kwargs["hidden_states"]
        energies.add(adapter.steps(module, hidden, kwargs.get("attention_mask")))

    return layer.module.register_forward_pre_hook(before, with_kwargs=True)
