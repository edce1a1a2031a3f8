# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Which layers of a model can be made smaller, and by which tool."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from .pruning.masks import kept_modes
from .pruning.scores import exact_energy
from .systems import StateLayer, adapter_of, check_stable

_TOOLS = {
    "diagonal": ("prune", "balanced_truncate", "BalancedTruncationCallback"),
    "selective": ("prune with calibration",),
    "spectral": ("spectral_budget", "truncate"),
}


@dataclass(frozen=True)
class LayerReport:
    """One layer.

    Attributes:
        size: modes or states stored; the largest number of any channel. Channels of a spectral layer.
        modes: all of them, over channels. masked: those of them that `prune` masked.
        states: real numbers of the recurrent state: two for each stored mode.
        energy: sum over modes of their energy at the output, the conjugates included; None where it is not defined
            without data, inf with a mode on or outside of the unit circle.
        slowest: largest |lam|, None for layers whose recurrence depends on the input.
        tools: what can make it smaller.
    """

    name: str
    kind: str
    size: int
    modes: int
    masked: int = 0
    states: int = 0
    energy: float | None = None
    slowest: float | None = None
    tools: tuple[str, ...] = _TOOLS["diagonal"]

    def cells(self) -> tuple[str, ...]:
        """The layer as a row of the table."""
        energy = "-" if self.energy is None else f"{self.energy:.4g}"
        slowest = "-" if self.slowest is None else f"{self.slowest:.6f}"
        counts = (str(number) for number in (self.size, self.modes, self.masked, self.states))
        return (self.name, self.kind, *counts, energy, slowest, ", ".join(self.tools))


@dataclass(frozen=True)
class Report:
    """The layers of a model that can be made smaller, in their order; print it."""

    model: str
    layers: tuple[LayerReport, ...]

    def __str__(self) -> str:
        if not self.layers:
            return f"{self.model}: no layer that these tools make smaller"
        head = ("layer", "kind", "size", "modes", "masked", "states", "energy", "max |lam|", "tools")
        rows = [head, *(layer.cells() for layer in self.layers)]
        widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
        left = (0, 1, len(head) - 1)
        lines = [
            "  ".join(cell.ljust(w) if i in left else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths)))
            for row in rows
        ]
        modes, masked = (sum(getattr(layer, name) for layer in self.layers) for name in ("modes", "masked"))
        last = f"{len(self.layers)} layers, {modes} modes" + (f", {masked} of them masked" if masked else "")
        return "\n".join([self.model, *(line.rstrip() for line in lines), last])


def describe(model: nn.Module) -> Report:
    """Which layers of a model can be made smaller, how large they are, and by which tool.

    Diagonal SSMs, Mamba and Mamba-2 layers, layers of a registered class, and the spectral layers of an ES-SSM are
    listed. Nothing is computed on data, and the model stays as it is.
    """
    found = []
    for name, module in model.named_modules():
        if type(module).__name__ == "ESSMSpectralMixer":
            K = len(module.channel_mixing)  # type: ignore[arg-type]
            found.append(LayerReport(name, "spectral", K, K, tools=_TOOLS["spectral"]))
        elif (adapter := adapter_of(module)) is not None:
            found.append(_describe(StateLayer(name, module, adapter)))
    return Report(type(model).__name__, tuple(found))


def _describe(layer: StateLayer) -> LayerReport:
    adapter: Any = layer.adapter
    keep = kept_modes(layer.module)
    if adapter.selective:
        n = adapter.shape(layer.module)[-1]
        masked = 0 if keep is None else int((~keep).sum())
        states = n * adapter.channels(layer.module)
        return LayerReport(layer.name, layer.kind, n, n, masked, states, tools=_TOOLS["selective"])
    system = layer.read()
    there = system.lam.abs() > -1 if system.present is None else system.present
    masked = 0 if keep is None else int((~keep & there).sum())
    r = system.lam.abs()[there]
    try:
        check_stable(system)
        energy = float(exact_energy(system).where(there, 0).sum())
    except ValueError:
        energy = float("inf")
    slowest = float(r.max()) if r.numel() else None
    return LayerReport(layer.name, layer.kind, system.lam.shape[-1], len(r), masked, 2 * len(r), energy, slowest)
