# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""What of a model can be made smaller, layer by layer, and by which tool."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from .adapters import ElasticLayer, adapter_of
from .pruning.masks import masked_tensors
from .pruning.mode_values import check_stable, exact_energy

_TOOLS = {
    "diagonal": ("prune", "balanced_truncate", "BalancedTruncationCallback"),
    "selective": ("prune with calibration",),
    "spectral": ("spectral_budget", "truncate", "allocate_spectral_budget"),
}


@dataclass(frozen=True)
class LayerReport:
    """One layer.

    Attributes:
        size: modes or states stored; the largest number of any channel. Channels of a spectral layer.
        modes: all of them, over channels.
        masked: of those masked by `prune`.
        states: real numbers of the recurrent state: two for each stored mode of a real output.
        energy: sum over modes of their energy at the output, the conjugates included; None where it is not defined
            without data, inf with a mode on or outside of the unit circle.
        energies: of every mode, float64, as the layer's lam; None as energy.
        slowest: largest |lam|, None for layers whose recurrence depends on the input.
        tools: what can make it smaller.
    """

    name: str
    kind: str
    size: int
    modes: int
    masked: int
    states: int
    energy: float | None
    energies: Tensor | None
    slowest: float | None
    tools: tuple[str, ...]


@dataclass(frozen=True)
class ElasticReport:
    """The layers of a model that can be made smaller, in their order; print it."""

    model: str
    layers: tuple[LayerReport, ...]

    @property
    def sizes(self) -> list[int]:
        return [layer.size for layer in self.layers]

    @property
    def energies(self) -> list[Tensor | None]:
        return [layer.energies for layer in self.layers]

    def __str__(self) -> str:
        if not self.layers:
            return f"{self.model}: no layer that these tools make smaller"
        head = ("layer", "kind", "size", "modes", "masked", "states", "energy", "max |lam|", "tools")
        rows = [head, *(_cells(layer) for layer in self.layers)]
        widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
        left = (0, 1, len(head) - 1)
        lines = [
            "  ".join(cell.ljust(w) if i in left else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths)))
            for row in rows
        ]
        modes, masked = (sum(getattr(layer, name) for layer in self.layers) for name in ("modes", "masked"))
        last = f"{len(self.layers)} layers, {modes} modes" + (f", {masked} of them masked" if masked else "")
        return "\n".join([self.model, *(line.rstrip() for line in lines), last])


def _cells(layer: LayerReport) -> tuple[str, ...]:
    energy = "-" if layer.energy is None else f"{layer.energy:.4g}"
    slowest = "-" if layer.slowest is None else f"{layer.slowest:.6f}"
    counts = (str(number) for number in (layer.size, layer.modes, layer.masked, layer.states))
    return (layer.name, layer.kind, *counts, energy, slowest, ", ".join(layer.tools))


def describe(model: nn.Module) -> ElasticReport:
    """Which layers of a model can be made smaller, how large they are, and by which tool.

    Diagonal SSMs, Mamba and Mamba-2 layers, layers of a registered class, and the spectral layers of an ES-SSM are
    listed. Nothing is computed on data, and the model stays as it is.
    """
    found = []
    for name, module in model.named_modules():
        if type(module).__name__ == "ESSMSpectralMixer":
            K = len(module.channel_mixing)  # type: ignore[arg-type]
            found.append(LayerReport(name, "spectral", K, K, 0, 0, None, None, None, _TOOLS["spectral"]))
        elif (adapter := adapter_of(module)) is not None:
            found.append(_describe(ElasticLayer(name, module, adapter)))
    return ElasticReport(type(model).__name__, tuple(found))


def _describe(layer: ElasticLayer) -> LayerReport:
    steps = masked_tensors(layer.module)
    keep = steps[0][2].keep.cpu() if steps else None
    adapter: Any = layer.adapter
    if adapter.selective:
        n = adapter.shape(layer.module)[-1]
        masked = 0 if keep is None else int((~keep).sum())
        states = n * adapter.channels(layer.module)
        tools = _TOOLS["selective"]
        return LayerReport(layer.name, layer.kind, n, n, masked, states, None, None, None, tools)
    system = layer.read()
    gone = None if keep is None else ~keep if system.present is None else ~keep & system.present
    r = system.lam.abs() if system.present is None else system.lam.abs()[system.present]
    try:
        check_stable(system, layer.name)
        energies = exact_energy(system)
        energies = energies if system.present is None else energies.where(system.present, 0)
        energy: float | None = float(energies.sum())
    except ValueError:
        energies, energy = None, float("inf")
    n, modes = system.lam.shape[-1], system.modes
    masked = 0 if gone is None else int(gone.sum())
    slowest = float(r.max()) if r.numel() else None
    states = 2 * modes  # a complex number is two real ones
    return LayerReport(layer.name, layer.kind, n, modes, masked, states, energy, energies, slowest, _TOOLS["diagonal"])
