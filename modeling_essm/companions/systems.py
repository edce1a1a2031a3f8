# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""A diagonal linear recurrence, all that pruning and truncation see of a layer, and how it is read and written.

    x_t = lam x_{t-1} + B u_t,    y_t = out(C x_t)

The skip D u_t has no modes and is not part of it. All arithmetic on systems is done in complex128.

These layers are known: those with `lti()` and `set_lti()`, such as the diagonal SSMs here and their remote copies, and
the library's MambaMixer and Mamba2Mixer. `register` adds a layer class of your own.
Letters: n modes, p inputs, q outputs, H channels.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from .wrappers import rebuild_wrappers

OUTPUTS = {"complex": 1.0, "real": 1.0, "twice_real": 2.0}  # y = C x, Re(C x), 2 Re(C x): factor of every norm bound


@dataclass(frozen=True)
class DiagonalSystem:
    """One layer's modes, discrete and with all factors of step or normalisation inside B.

    A system with many inputs and outputs (S5, LRU) has lam (n,); one recurrence per channel (S4D) has lam (H, n).

    Attributes:
        lam: eigenvalues, complex128, (n,) or (H, n); one of each conjugate pair is stored where `output` is real.
        B: (n, p), or (H, n).
        C: (q, n), or (H, n); with a first dimension of 2 where two directions share lam and B.
        output: "complex" for C x, "real" for Re(C x), "twice_real" for 2 Re(C x).
        present: bool like lam, False for padding of channels that have fewer modes than others; None: all are modes.
    Raises:
        ValueError: shapes that do not fit together, an unknown output, another dtype.
    """

    lam: Tensor
    B: Tensor
    C: Tensor
    output: str
    present: Tensor | None = None

    def __post_init__(self) -> None:
        if self.output not in OUTPUTS:
            raise ValueError(f"output must be one of {', '.join(OUTPUTS)}, got {self.output!r}")
        lam, B, C = tuple(self.lam.shape), tuple(self.B.shape), tuple(self.C.shape)
        if self.lam.ndim == 2:
            fits = lam == B and C in (lam, (2, *lam))
        else:
            fits = len(lam) == 1 and len(B) == 2 and B[:1] == lam and C[-1:] == lam and len(C) == 2 + (C[:-2] == (2,))
        if not fits or (self.present is not None and tuple(self.present.shape) != lam):
            raise ValueError(
                "lam, B and C must be (n,), (n, p) and (q, n) or (2, q, n), or (H, n), (H, n) and (H, n) or (2, H, n), "
                f"and present as lam, got {lam}, {B}, {C} and {None if self.present is None else self.present.shape}"
            )
        if {self.lam.dtype, self.B.dtype, self.C.dtype} != {torch.complex128}:
            raise ValueError(f"lam, B and C must be complex128, got {self.lam.dtype}, {self.B.dtype}, {self.C.dtype}")

    @property
    def siso(self) -> bool:
        """Whether every channel has its own recurrence with one input and one output."""
        return self.lam.ndim == 2

    @property
    def bidirectional(self) -> bool:
        return self.C.ndim == 3

    @property
    def directions(self) -> list[Tensor]:
        """C of every direction, (q, n) or (H, n) each."""
        return list(self.C) if self.bidirectional else [self.C]

    @property
    def there(self) -> Tensor:
        """bool like lam, False for padding."""
        return torch.ones_like(self.lam, dtype=torch.bool) if self.present is None else self.present

    @property
    def modes(self) -> int:
        """Stored modes, without padding."""
        return int(self.there.sum())

    def without_padding(self) -> DiagonalSystem:
        """Padding as modes of zeros, which no input reaches and no output shows."""
        if (there := self.present) is None:
            return self
        lam, C = (torch.where(there, x, 0) for x in (self.lam, self.C))
        return DiagonalSystem(lam, torch.where(there if self.siso else there[:, None], self.B, 0), C, self.output)


def check_stable(system: DiagonalSystem, where: str = "system") -> None:
    """Raises ValueError for modes on or outside of the unit circle, where sums over all lags do not exist."""
    r = system.lam.abs()[system.there]
    if unstable := int((~(r < 1)).sum()):
        largest = f"{float(r.max()):.9g} and {unstable} such modes of {r.numel()}"
        raise ValueError(f"{where}: |lam| must be below 1, got {largest}")


class Adapter:
    """The modes of one kind of layer.

    A subclass must have `read`. Where the layer's tensors are divided into modes, `mode_dims` and `output_names`, of
    the layer or of the adapter, are enough to prune it; other layers need `masks`, `tensors` and `shrink`. Balanced
    truncation, which mixes modes, needs `write` of every layer. An adapter is `selective` if lam, B and C depend on the
    input, and then a `mamba.SelectiveAdapter`.
    """

    selective = False

    def kind(self, layer: nn.Module) -> str:
        """A short name for tables."""
        return parametrize.type_before_parametrizations(layer).__name__

    def read(self, layer: nn.Module) -> DiagonalSystem:
        """The layer's modes, complex128; tools read them through `StateLayer.read`, without gradients."""
        raise NotImplementedError(f"{type(self).__name__}.read")

    def write(self, layer: nn.Module, system: DiagonalSystem) -> None:
        """Replace the layer's modes, in number too."""
        raise NotImplementedError(f"{type(self).__name__}.write")

    @property
    def can_write(self) -> bool:
        """Whether a subclass has `write`."""
        return type(self).write is not Adapter.write

    def mode_dims(self, layer: nn.Module) -> Mapping[str, int]:
        """The dimension that counts modes, for every parameter or buffer that is divided into modes.

        Where every channel has modes of its own, channels are the dimension before it.
        """
        return getattr(layer, "mode_dims", {})

    def output_names(self, layer: nn.Module) -> Sequence[str]:
        """The parameters among `mode_dims` that are C."""
        return tuple(getattr(layer, "output_names", ()))

    def _parts(self, layer: nn.Module) -> Iterator[tuple[nn.Module, str, int, bool]]:
        """Of every tensor in `mode_dims` its module, name there, the dimension of modes, and whether it is C."""
        for name, dim in self.mode_dims(layer).items():
            path, _, attribute = name.rpartition(".")
            yield layer.get_submodule(path), attribute, dim, name in self.output_names(layer)

    def tensors(self, layer: nn.Module) -> list[tuple[nn.Module, str]]:
        """What `shrink` replaces by name: (module, name of a parameter or buffer of it)."""
        found = [(module, name) for module, name, *_ in self._parts(layer)]
        if not found and type(self).shrink is Adapter.shrink:
            raise self._lacks_dims(layer)
        return found

    def shape(self, layer: nn.Module) -> tuple[int, ...]:
        """Shape of a mask over the layer's modes: (n,) or (H, n)."""
        return tuple(self.read(layer).lam.shape)

    def masks(self, layer: nn.Module, keep: Tensor) -> list[tuple[nn.Module, str, Tensor]]:
        """What silences the modes that are not kept: (module, parameter name, bool mask that broadcasts to it)."""
        found = [
            (module, name, spread(keep, getattr(module, name).ndim, dim).to(getattr(module, name).device))
            for module, name, dim, output in self._parts(layer)
            if output
        ]
        if not found:
            raise self._lacks_dims(layer)
        return found

    def _lacks_dims(self, layer: nn.Module) -> ValueError:
        return ValueError(
            f"{type(self).__name__} must have mode_dims and output_names, or masks, tensors and shrink of its own, "
            f"to prune {type(layer)}"
        )

    def shrink(self, layer: nn.Module, keep: Tensor, size: int) -> None:
        """Take the modes that are not kept out of the layer.

        Args:
            keep: bool, (n,) or (H, n).
            size: modes stored afterwards, at least the (largest) number kept. The rest is padding: C is zero there.
        """
        index, real = padded_index(keep, size)
        for module, name, dim, output in self._parts(layer):
            value = getattr(module, name).detach()
            taken = take(value, index.to(value.device), dim)
            if output or value.dtype == torch.bool:
                taken = taken.masked_fill(~spread(real.to(value.device), taken.ndim, dim), 0)
            put(module, name, taken)


class DiagonalAdapter(Adapter):
    """Layers with `lti()` and `set_lti()`, of this package or of a checkpoint's own code."""

    def kind(self, layer: nn.Module) -> str:
        return super().kind(layer).removesuffix("Mixer").lower()

    def read(self, layer: nn.Module) -> DiagonalSystem:
        return DiagonalSystem(*layer.lti())  # type: ignore[operator]

    def write(self, layer: nn.Module, system: DiagonalSystem) -> None:
        padding = {} if system.present is None else {"present": system.present}
        layer.set_lti(system.lam, system.B, system.C, **padding)  # type: ignore[operator]


_REGISTERED: dict[type, Adapter | None] = {}
_LIBRARY = {  # by the class's name, since importing it takes seconds: the adapter's class in pruning/mamba.py
    "transformers.models.mamba.modeling_mamba.MambaMixer": "MambaAdapter",
    "transformers.models.mamba2.modeling_mamba2.Mamba2Mixer": "Mamba2Adapter",
}


def register(layer_class: type[nn.Module], adapter: Adapter | None) -> None:
    """Make every tool work on a layer class and its subclasses; with None no tool."""
    _REGISTERED[layer_class] = adapter


def adapter_of(layer: nn.Module) -> Adapter | None:
    """The adapter of a layer, None if it has no modes that are known."""
    for cls in type(layer).__mro__:
        if cls in _REGISTERED:
            return _REGISTERED[cls]
        if (name := _LIBRARY.get(f"{cls.__module__}.{cls.__qualname__}")) is not None:
            return getattr(import_module(".pruning.mamba", __package__), name)()
    own = type(layer)  # of the class: wrappers, torch.compile's among them, pass on what the layer inside them has
    return DiagonalAdapter() if hasattr(own, "lti") and hasattr(own, "set_lti") else None


@dataclass(frozen=True)
class StateLayer:
    """A layer of a model that has modes: its name in the model, the module and the adapter."""

    name: str
    module: nn.Module
    adapter: Adapter

    @property
    def kind(self) -> str:
        return self.adapter.kind(self.module)

    def read(self) -> DiagonalSystem:
        """The layer's modes, without gradients, on the CPU: other devices have slow complex128 or none."""
        with torch.no_grad():
            system = self.adapter.read(self.module)
        lam, B, C = (x.detach().cpu() for x in (system.lam, system.B, system.C))
        return DiagonalSystem(lam, B, C, system.output, None if system.present is None else system.present.cpu())


def state_layers(model: nn.Module) -> list[StateLayer]:
    """All layers of a model that have modes, in the order of its modules.

    Raises:
        ValueError: there is none.
    """
    found = list(_layers(model))
    if not found:
        raise ValueError(
            f"model must hold layers with modes (a diagonal SSM, MambaMixer, Mamba2Mixer or a registered class), got a "
            f"{type(model).__name__} without any"
        )
    return found


def diagonal_layers(model: nn.Module) -> list[StateLayer]:
    """Those whose modes do not depend on the input, which can be truncated; there may be none."""
    return [layer for layer in _layers(model) if not layer.adapter.selective]


def _layers(model: nn.Module) -> Iterator[StateLayer]:
    for name, module in model.named_modules():
        if (adapter := adapter_of(module)) is not None:
            yield StateLayer(name, module, adapter)


def record_sizes(model: nn.Module, layers: Sequence[StateLayer], sizes: Sequence[int]) -> None:
    """After layers were rewritten: their numbers of modes into every configuration around them, which is given those of
    its own layers, and their new Parameters to live wrappers.

    A model can be built around another one, and either configuration, or both, can tell the sizes. They become copies:
    other models may have the same ones.
    """
    copies: dict[int, Any] = {}  # one of each, which a copy of what holds it holds, too
    for module in model.modules():
        if vars(module).get("config") is not None:
            module.config = copy.deepcopy(module.config, copies)
    seen = set()
    for name, module in model.named_modules():
        config = getattr(module, "config", None)
        if config is None or id(config) in seen:
            continue
        seen.add(id(config))
        sizes_of: dict[bool, list[int]] = {True: [], False: []}  # of selective layers, and of the others
        for layer, size in zip(layers, sizes):
            if layer.name.startswith(f"{name}." if name else ""):
                sizes_of[layer.adapter.selective].append(size)
        if sizes_of[False] and getattr(config, "state_sizes", None) is not None:
            config.state_sizes = sizes_of[False]
        if sizes_of[True] and hasattr(config, "state_size"):
            config.state_size = sizes_of[True][0]
    rebuild_wrappers(model)


def check_plain(layer: StateLayer, module: nn.Module, name: str) -> None:
    """Raises ValueError for a tensor that is not the module's own, as where PEFT has wrapped a projection."""
    own = name in module._parameters or name in module._buffers
    if not own and not parametrize.is_parametrized(module, name):
        raise ValueError(
            f"{layer.name}: {name} must be a tensor of a plain module, but {type(module).__name__} wraps it: merge "
            "adapters into the model first (PEFT: merge_and_unload)"
        )


def put(module: nn.Module, name: str, value: Tensor) -> None:
    """Put a tensor of another shape in the place of a parameter or buffer. Optimizers do not follow."""
    old = getattr(module, name)
    new = nn.Parameter(value.contiguous(), old.requires_grad) if isinstance(old, nn.Parameter) else value.contiguous()
    vars(new).update(vars(old))  # what users and mixers note on a parameter, e.g. that it does not decay
    setattr(module, name, new)


def padded_index(keep: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Where the kept modes are, then as many others as fill up to `size`: (index, whether it is kept), (..., size)."""
    index = torch.argsort((~keep).int(), dim=-1, stable=True)[..., :size]
    return index, keep.gather(-1, index)


def take(value: Tensor, index: Tensor, dim: int) -> Tensor:
    """The modes `index` (m,) along a dimension, or (H, m) with channels in the dimension before it."""
    dim %= value.ndim
    if index.ndim == 1:
        return value.index_select(dim, index)
    shape = [*value.shape[:dim], index.shape[-1], *value.shape[dim + 1 :]]
    return value.gather(dim, spread(index, value.ndim, dim).expand(shape))


def spread(modes: Tensor, ndim: int, dim: int) -> Tensor:
    """View of (n,) or (H, n) that broadcasts over a tensor whose dimension `dim` counts modes."""
    dim %= ndim
    shape = [1] * ndim
    shape[dim] = modes.shape[-1]
    if modes.ndim == 2:
        shape[dim - 1] = modes.shape[0]
    return modes.reshape(shape)
