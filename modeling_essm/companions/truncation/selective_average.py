# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Mamba's selective recurrence averaged over text: a time-invariant system, which has Gramians (CompreSSM, A.2).

    x_t = exp(delta_t A) x_{t-1} + delta_t B_t u_t,   y_t = C_t x_t
    lam = mean_t exp(delta_t A),   B = mean_t delta_t B_t,   C = mean_t C_t          (their Eq. 15-19)

Every channel has a recurrence of its own with N real modes. `truncate` reduces the average like any other system.
Letters: b batch, L steps, D channels, N states.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..adapters import adapter_of
from ..pruning.mamba_states import MambaAdapter
from ..systems import DiagonalSystem

LARGEST_MEAN = 1.0 - 1e-3  # what a mean outside the unit circle is scaled to


def selective_layers(model: nn.Module) -> dict[str, Any]:
    """The library's MambaMixers, by name: x_proj gives delta's factor, B and C; A_log is (D, N).

    Relatives that normalise delta, B or C behind x_proj (FalconMamba, Jamba) are not among them.
    """
    return {name: m for name, m in model.named_modules() if isinstance(adapter_of(m), MambaAdapter)}


def averaged_systems(model: nn.Module, calibration: Iterable[Any]) -> dict[str, DiagonalSystem]:
    """Of every selective layer, by name, the system of its mean lam, B and C over all tokens of the text.

    Args:
        model: runs in evaluation mode, without gradients, and comes back in the mode that it had.
        calibration: batches of input_ids (b, L), or of keyword arguments of the model, or a single one; positions
            where their attention_mask is 0 do not count.
    Returns:
        Systems of lam, B and C (D, N), with output "real".
    Raises:
        ValueError: no selective layer, or no token.
    """
    layers = selective_layers(model)
    if not layers:
        raise ValueError("the model has no selective layer like MambaMixer, so there is nothing to average")
    sums = {name: _Sums(layer) for name, layer in layers.items()}
    if isinstance(calibration, (Tensor, Mapping)):
        calibration = [calibration]
    counted: list[Tensor | None] = [None]

    def observer(name: str) -> Any:
        return lambda module, args, output: sums[name].add(output, counted[0])

    handles = [layer.x_proj.register_forward_hook(observer(name)) for name, layer in layers.items()]
    training = [module for module in model.modules() if module.training]
    device = next(model.parameters()).device
    model.eval()
    try:
        with torch.no_grad():
            for batch in calibration:
                arguments = dict(batch) if isinstance(batch, Mapping) else {"input_ids": batch}
                arguments = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in arguments.items()}
                counted[0] = arguments.get("attention_mask")
                model(**arguments)
    finally:
        for handle in handles:
            handle.remove()
        for module in training:
            module.training = True
    return {name: found.system() for name, found in sums.items()}


class _Sums:
    """Sums over tokens of one layer's exp(delta A), delta B and C, fp64."""

    def __init__(self, layer: Any):
        self.layer, self.tokens = layer, 0.0
        self.lam: Any = 0.0
        self.B: Any = 0.0
        self.C: Any = 0.0

    def add(self, projected: Tensor, mask: Tensor | None) -> None:
        """Take in what x_proj gave, (b, L, R + 2 N)."""
        layer, N = self.layer, self.layer.A_log.shape[1]
        rank, B, C = projected.split([layer.time_step_rank, N, N], dim=-1)
        delta = F.softplus(layer.dt_proj(rank).double())  # (b, L, D)
        weight = torch.ones_like(delta[..., 0]) if mask is None else mask.double()
        A = -layer.A_log.double().exp()
        for t in range(delta.shape[1]):  # (b, D, N) at a time
            self.lam += torch.einsum("b,bdn->dn", weight[:, t], (delta[:, t, :, None] * A).exp())
        self.B += torch.einsum("bl,bld,bln->dn", weight, delta, B.double())
        self.C += torch.einsum("bl,bln->n", weight, C.double())
        self.tokens += float(weight.sum())

    def system(self) -> DiagonalSystem:
        if not self.tokens:
            raise ValueError("calibration must hold at least one token, got none")
        lam, B, C = (total.cpu() / self.tokens for total in (self.lam, self.B, self.C))
        lam = torch.where(lam < 1.0, lam, LARGEST_MEAN)
        lam, B, C = (t.to(torch.complex128) for t in (lam, B, C.expand_as(lam).clone()))
        return DiagonalSystem(lam, B, C, "real")
