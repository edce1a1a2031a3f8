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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..systems import Adapter, StateLayer, padded_index, put


@dataclass(frozen=True)
class Steps:
    """The recurrence along a text, float64.

    Attributes:
        delta: (B, L, G, D) for G groups of D channels.
        A: (G, D, N), or (G, D, 1) where all states of a channel share it.
        B, C: (B, L, G, N); zero at tokens that do not count.
        counted: (B, L), 1 for tokens and 0 for padding.
    """

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

    def channel_width(self, layer: Any) -> int:
        """How many of the layer's channels have the same delta and A."""
        return 1

    def channels(self, layer: Any) -> int:
        """Channels that have the states."""
        return layer.intermediate_size


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
        first = layer.time_step_rank + layer.ssm_state_size
        rows = torch.ones(layer.x_proj.weight.shape[0], 1, dtype=torch.bool)
        rows[first:, 0] = keep
        return [(layer.x_proj, "weight", rows)]

    def shrink(self, layer: Any, keep: Tensor, size: int) -> None:
        index, real = padded_index(keep, size)
        R, N = layer.time_step_rank, layer.ssm_state_size
        rows = torch.cat([torch.arange(R), R + index, R + N + index])
        weight = _rows(layer.x_proj.weight, rows)
        weight[R + size :][~real] = 0
        put(layer.x_proj, "weight", weight)
        put(layer, "A_log", layer.A_log.detach()[:, index.to(layer.A_log.device)])
        layer.x_proj.out_features = len(rows)
        layer.ssm_state_size = size


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
        return _steps(
            delta, -layer.A_log.double().exp()[:, None], B.unflatten(-1, (G, N)), C.unflatten(-1, (G, N)), mask
        )

    def channel_width(self, layer: Any) -> int:
        return layer.head_dim

    def tensors(self, layer: Any) -> list[tuple[nn.Module, str]]:
        modules = (layer.conv1d, layer.in_proj)
        return [(m, name) for m in modules for name in ("weight", "bias") if getattr(m, name) is not None]

    def masks(self, layer: Any, keep: Tensor) -> list[tuple[nn.Module, str, Tensor]]:
        # C_t = act(conv(...)): without the filter's weight and bias it is act(0) = 0.
        if float(layer.act(torch.zeros(1))) != 0:
            raise ValueError(f"hidden_act must be 0 at 0 to silence a state, got {layer.activation!r}")
        rows = torch.ones(layer.conv_dim, dtype=torch.bool)
        rows[layer.intermediate_size + layer.n_groups * layer.ssm_state_size :] = keep.repeat(layer.n_groups)
        weight = (layer.conv1d, "weight", rows[:, None, None])
        return [weight] if layer.conv1d.bias is None else [weight, (layer.conv1d, "bias", rows)]

    def shrink(self, layer: Any, keep: Tensor, size: int) -> None:
        index, real = padded_index(keep, size)
        E, G, N = layer.intermediate_size, layer.n_groups, layer.ssm_state_size
        states = (torch.arange(G)[:, None] * N + index).flatten()  # of B, and of C after it
        channels = torch.cat([torch.arange(E), E + states, E + G * N + states])  # of conv1d
        silent = E + G * size + (~real).repeat(G).nonzero()[:, 0]
        conv = layer.conv1d
        for name in ("weight", "bias"):
            if getattr(conv, name) is not None:
                value = _rows(getattr(conv, name), channels)
                value[silent] = 0
                put(conv, name, value)
        heads = E + layer.conv_dim + torch.arange(layer.num_heads)
        rows = torch.cat([torch.arange(E), E + channels, heads])
        for name in ("weight", "bias"):
            if getattr(layer.in_proj, name) is not None:
                put(layer.in_proj, name, _rows(getattr(layer.in_proj, name), rows))
        layer.in_proj.out_features = len(rows)
        conv.in_channels = conv.out_channels = conv.groups = layer.conv_dim = len(channels)
        layer.ssm_state_size = size


def _rows(value: Tensor, rows: Tensor) -> Tensor:
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


Sums = defaultdict[str, Any]  # of what is added up over all tokens of a calibration set, by name


def add_energies(sums: Sums, steps: Steps, how: str) -> None:
    """Take one text in, for the energies "frozen" or "along"."""
    sums["tokens"] += float(steps.counted.sum())
    (_add_frozen if how == "frozen" else _add_along)(sums, steps)


def _add_frozen(sums: Sums, steps: Steps) -> None:
    for t in range(steps.delta.shape[1]):
        delta = steps.delta[:, t, :, :, None]
        sums["input"] = sums["input"] + (delta * steps.B[:, t, :, None]).square().sum(0)
        sums["output"] = sums["output"] + steps.C[:, t].square().sum(0)[:, None]
        lost = -torch.expm1(2 * delta * steps.A)  # 1 - a^2
        memory = torch.where(lost > 0, 1 / lost, 0)  # delta = 0 takes nothing in: its infinite memory is empty
        sums["memory"] = sums["memory"] + (memory * steps.counted[:, t, None, None, None]).sum(0)


def _add_along(sums: Sums, steps: Steps) -> None:
    W: Any = 0.0
    for s in reversed(range(steps.delta.shape[1])):
        delta = steps.delta[:, s, :, :, None]
        W = steps.C[:, s, :, None].square() + W
        sums["energy"] = sums["energy"] + ((delta * steps.B[:, s, :, None]).square() * W).sum(0)
        W = W * torch.exp(2 * delta * steps.A)


def mean_energies(sums: Sums, how: str) -> Tensor:
    """Energy of every channel and state, float64, (G, D, N). Raises ValueError if no token was taken in."""
    if not sums["tokens"]:
        raise ValueError("calibration must hold at least one token, got none")
    if how == "frozen":
        means = [sums[name] / sums["tokens"] for name in ("input", "output", "memory")]
        return means[0] * means[1] * means[2]
    return sums["energy"] / sums["tokens"]


def measure_energies(
    model: nn.Module, layers: Sequence[StateLayer], calibration: Iterable[Any], how: str
) -> dict[str, Tensor]:
    """Energies of the states of selective layers while a model reads calibration text.

    Args:
        calibration: as of `observe_steps`. how: "frozen" or "along".
    Returns:
        For every layer's name the energies (N,), float64, summed over channels, on the CPU.
    Raises:
        ValueError: no text.
    """
    sums: dict[str, Sums] = {layer.name: defaultdict(float) for layer in layers}
    observe_steps(model, layers, calibration, lambda layer, steps: add_energies(sums[layer.name], steps, how))
    energies = {}
    for layer in layers:
        adapter: Any = layer.adapter
        summed = mean_energies(sums[layer.name], how).sum((0, 1))
        energies[layer.name] = (summed * adapter.channel_width(layer.module)).cpu()
    return energies


def observe_steps(
    model: nn.Module,
    layers: Sequence[StateLayer],
    calibration: Iterable[Any],
    observe: Callable[[StateLayer, Steps], None],
) -> None:
    """Call observe(layer, steps) for every selective layer whenever the model reads a batch of calibration text.

    Args:
        calibration: batches of input_ids (B, L), or of keyword arguments of the model, or a single one; with an
            attention_mask, padding does not count. The model runs in evaluation mode, without gradients, and comes
            back in its own mode.
    Raises:
        TypeError: a batch that is neither a tensor nor keyword arguments.
    """

    def hook(layer: StateLayer) -> Any:
        adapter: Any = layer.adapter

        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            hidden = args[0] if args else kwargs["hidden_states"]
            observe(layer, adapter.steps(module, hidden, kwargs.get("attention_mask")))

        return layer.module.register_forward_pre_hook(before, with_kwargs=True)

    handles = [hook(layer) for layer in layers]
    training = [module for module in model.modules() if module.training]
    model.eval()
    device = next(model.parameters()).device
    try:
        with torch.no_grad():
            for batch in [calibration] if isinstance(calibration, (Tensor, Mapping)) else calibration:
                model(**_arguments(batch, device))
    finally:
        for handle in handles:
            handle.remove()
        for module in training:
            module.training = True


def _arguments(batch: Any, device: torch.device) -> dict[str, Any]:
    if isinstance(batch, Tensor):
        batch = {"input_ids": batch}
    if not isinstance(batch, Mapping):
        raise TypeError(f"a batch of calibration must be input_ids or keyword arguments, got {type(batch).__name__}")
    return {name: value.to(device) if isinstance(value, Tensor) else value for name, value in batch.items()}
