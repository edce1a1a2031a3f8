# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Which layers of a model can be made smaller, and by which tool."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from .pruning.mamba import SelectiveAdapter
from .pruning.masks import kept_modes
from .pruning.scores import exact_energy
from .systems import StateLayer, adapter_of

_TOOLS = {
    "diagonal": ("prune", "balanced_truncate", "BalancedTruncationCallback"),
    "selective": ("prune with calibration",),
    "spectral": ("spectral_budget", "truncate"),
}


@dataclass(frozen=True)
class LayerReport:
    """One layer: `size` modes or states stored (the largest number of any channel; channels of a spectral layer),
    `modes` over channels, how many are `masked`, `states` real numbers of the recurrent state, `energy` at the output
    (None where it is not defined without data, inf with an unstable mode), `slowest` |lam|, and the tools to use."""

    name: str
    kind: str
    size: int
    modes: int
    masked: int = 0
    states: int = 0
    energy: float | None = None
    slowest: float | None = None
    tools: tuple[str, ...] = _TOOLS["diagonal"]


@dataclass(frozen=True)
class Report:
    """The layers of a model that can be made smaller, in their order; print it."""

    model: str
    layers: tuple[LayerReport, ...]

    def __str__(self) -> str:
        if not self.layers:
            return f"{self.model}: no layer that these tools make smaller"
        row = "{:<{}}  {:<9}  {:>5}  {:>6}  {:>6}  {:>8}  {:>10}  {:>9}  {}"
        width = max(5, *(len(layer.name) for layer in self.layers))
        lines = [
            row.format("layer", width, "kind", "size", "modes", "masked", "states", "energy", "max |lam|", "tools")
        ]
        for each in self.layers:
            energy = "-" if each.energy is None else f"{each.energy:.4g}"
            slowest = "-" if each.slowest is None else f"{each.slowest:.6f}"
            counts = (each.size, each.modes, each.masked, each.states)
            lines.append(row.format(each.name, width, each.kind, *counts, energy, slowest, ", ".join(each.tools)))
        modes, masked = (sum(getattr(layer, name) for layer in self.layers) for name in ("modes", "masked"))
        last = f"{len(self.layers)} layers, {modes} modes" + (f", {masked} of them masked" if masked else "")
        return "\n".join([self.model, *lines, last])


def describe(model: nn.Module) -> Report:
    """Which layers of a model can be made smaller, how large they are, and by which tool.

    Diagonal SSMs, Mamba and Mamba-2 layers, layers of a registered class, and the spectral layers of an ES-SSM are
    listed. Nothing is computed on data, and the model stays as it is.
    """
    found = []
    for name, module in model.named_modules():
        if {"ESSMSpectralMixer", "ESSMElasticMixer"} & {cls.__name__ for cls in type(module).__mro__}:
            K = len(module.channel_mixing)  # type: ignore[arg-type]
            found.append(LayerReport(name, "spectral", K, K, tools=_TOOLS["spectral"]))
        elif (adapter := adapter_of(module)) is not None:
            found.append(_describe(StateLayer(name, module, adapter)))
    return Report(type(model).__name__, tuple(found))


def _describe(layer: StateLayer) -> LayerReport:
    keep, module = kept_modes(layer.module), layer.module
    if isinstance(layer.adapter, SelectiveAdapter):
        n = layer.adapter.shape(module)[-1]
        masked = 0 if keep is None else int((~keep).sum())
        states = n * layer.adapter.channels(module)
        return LayerReport(layer.name, layer.kind, n, n, masked, states, tools=_TOOLS["selective"])
    system = layer.read()
    masked = 0 if keep is None else int((~keep & system.there).sum())
    r = system.lam.abs()[system.there]
    stable = bool((r < 1).all())
    energy = float(exact_energy(system).where(system.there, 0).sum()) if stable else float("inf")
    slowest = float(r.max()) if r.numel() else None
    tools = _TOOLS["diagonal"] if layer.adapter.can_write else ("prune",)
    size, modes = system.lam.shape[-1], len(r)
    return LayerReport(layer.name, layer.kind, size, modes, masked, 2 * modes, energy, slowest, tools)
