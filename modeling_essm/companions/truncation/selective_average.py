# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Mamba's selective recurrence averaged over text: a time-invariant system, which has Gramians (CompreSSM, A.2).

    x_t = exp(delta_t A) x_{t-1} + delta_t B_t u_t,   y_t = C_t x_t
    lam = mean_t exp(delta_t A),   B = mean_t delta_t B_t,   C = mean_t C_t          (their Eq. 15-19)

Every channel has a recurrence of its own with N real modes. `truncate` reduces the average like any other system.
Letters: b batch, L steps, D channels, N states.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from ..pruning.mamba import MambaAdapter, Steps, observe_steps
from ..systems import DiagonalSystem, StateLayer, adapter_of

LARGEST_MEAN = 1.0 - 1e-3  # what a mean outside the unit circle is scaled to


def selective_layers(model: nn.Module) -> dict[str, Any]:
    """The library's MambaMixers, by name: x_proj gives delta's factor, B and C; A_log is (D, N).

    Relatives that normalise delta, B or C behind x_proj (FalconMamba, Jamba) are not among them.
    """
    return {name: m for name, m in model.named_modules() if isinstance(adapter_of(m), MambaAdapter)}


def averaged_systems(model: nn.Module, calibration: Iterable[Any]) -> dict[str, DiagonalSystem]:
    """The system of every selective layer's mean lam, B and C over all tokens of the text, by the layer's name.

    Args:
        calibration: as of `pruning.mamba.observe_steps`.
    Returns:
        Systems of lam, B and C (D, N), with output "real".
    Raises:
        ValueError: no selective layer, or no token.
    """
    layers = [StateLayer(name, module, MambaAdapter()) for name, module in selective_layers(model).items()]
    if not layers:
        raise ValueError("the model has no selective layer like MambaMixer, so there is nothing to average")
    sums: dict[str, defaultdict[str, Any]] = {layer.name: defaultdict(float) for layer in layers}
    observe_steps(model, layers, calibration, lambda layer, steps: _add(sums[layer.name], steps))
    return {name: _mean(found) for name, found in sums.items()}


def _add(sums: defaultdict[str, Any], steps: Steps) -> None:
    delta, B, C, weight = steps.delta[:, :, 0], steps.B[:, :, 0], steps.C[:, :, 0], steps.counted
    for t in range(delta.shape[1]):  # (b, D, N) at a time
        sums["lam"] += torch.einsum("b,bdn->dn", weight[:, t], (delta[:, t, :, None] * steps.A[0]).exp())
    sums["B"] += torch.einsum("bl,bld,bln->dn", weight, delta, B)
    sums["C"] += torch.einsum("bl,bln->n", weight, C)
    sums["tokens"] += float(weight.sum())


def _mean(sums: defaultdict[str, Any]) -> DiagonalSystem:
    if not sums["tokens"]:
        raise ValueError("calibration must hold at least one token, got none")
    lam, B, C = (sums[name].cpu() / sums["tokens"] for name in ("lam", "B", "C"))
    lam = torch.where(lam < 1.0, lam, LARGEST_MEAN)
    lam, B, C = (t.to(torch.complex128) for t in (lam, B, C.expand_as(lam).clone()))
    return DiagonalSystem(lam, B, C, "real")
