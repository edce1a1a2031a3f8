# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""How the tools reach the modes inside a layer, and the one list of layers that have modes.

An adapter reads a layer's modes as a `DiagonalSystem`, says which tensors to mask so that a mode is silent, and takes
modes out of the tensors. Known without registration: layers with `lti()` and `set_lti()` (the diagonal SSMs here and
their remote copies) and the library's MambaMixer and Mamba2Mixer. `register` adds a layer class of your own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from .systems import DiagonalSystem


class Adapter:
    """The modes of one kind of layer.

    A subclass must have `read`. Where the layer's tensors are divided into modes, `mode_dims` and `output_names`, of
    the layer or of the adapter, are enough for the rest; other layers need `write`, and `masks` to be masked.

    Attributes:
        granularities: what can be pruned by itself, the default first: "mode", "mode_index" or "state".
        selective: whether lam, B and C depend on the input, so that energies are measured on calibration text: an
            adapter of such a layer is a `mamba_states.SelectiveAdapter`.
        uniform: whether all layers of a model must have equally many modes to be saved and loaded.
    """

    granularities: tuple[str, ...] = ("mode", "mode_index")
    selective = False
    uniform = False

    def kind(self, layer: nn.Module) -> str:
        """A short name for tables."""
        return parametrize.type_before_parametrizations(layer).__name__

    def read(self, layer: nn.Module) -> DiagonalSystem:
        """The layer's modes, complex128; tools read them through `ElasticLayer.read`, without gradients."""
        raise NotImplementedError(f"{type(self).__name__}.read")

    def write(self, layer: nn.Module, system: DiagonalSystem) -> None:
        """Replace the layer's modes, in number too."""
        raise NotImplementedError(f"{type(self).__name__}.write")

    def mode_dims(self, layer: nn.Module) -> Mapping[str, int]:
        """For every parameter or buffer that is divided into modes the dimension that counts them.

        Where every channel has modes of its own, channels are the dimension before it.
        """
        return getattr(layer, "mode_dims", {})

    def output_names(self, layer: nn.Module) -> Sequence[str]:
        """The parameters among `mode_dims` that are C."""
        return tuple(getattr(layer, "output_names", ()))

    def tensors(self, layer: nn.Module) -> list[tuple[nn.Module, str]]:
        """What `shrink` replaces by name: (module, name of a parameter or buffer of it)."""
        return [owner(layer, name) for name in self.mode_dims(layer)]

    def shape(self, layer: nn.Module) -> tuple[int, ...]:
        """Shape of a mask over the layer's modes: (n,) or (H, n)."""
        return tuple(self.read(layer).lam.shape)

    def masks(self, layer: nn.Module, keep: Tensor) -> list[tuple[nn.Module, str, Tensor]]:
        """What silences the modes that are not kept: (module, parameter name, bool mask that broadcasts to it)."""
        names = self.output_names(layer)
        if not names:
            raise ValueError(f"{type(self).__name__} must have output_names or masks of its own, to mask {type(layer)}")
        found = []
        for name in names:
            module, attribute = owner(layer, name)
            value = getattr(module, attribute)
            found.append((module, attribute, _along(keep, value, self.mode_dims(layer)[name])))
        return found

    def shrink(self, layer: nn.Module, keep: Tensor, size: int) -> None:
        """Take the modes that are not kept out of the layer.

        Args:
            keep: bool, (n,) or (H, n).
            size: modes stored afterwards, at least the (largest) number kept. The rest is padding: C is zero there.
        """
        index, real = padded_index(keep, size)
        dims = self.mode_dims(layer)
        if not dims:
            return self.write(layer, select(self.read(layer), index, real))
        outputs = self.output_names(layer)
        for name, dim in dims.items():
            module, attribute = owner(layer, name)
            value = getattr(module, attribute)
            taken = take(value.detach(), index.to(value.device), dim)
            if name in outputs:
                taken = taken.masked_fill(~_along(real.to(value.device), taken, dim), 0)
            replace(module, attribute, taken)

    def update_config(self, config: Any, layers: Sequence[nn.Module], sizes: Sequence[int]) -> None:
        """Write the new numbers of modes of all layers of this adapter into a config that is around them, if it has
        a field for them."""


class DiagonalAdapter(Adapter):
    """Layers with `lti()`, `set_lti()`, `select_modes()`, `mode_dims` and `output_names`."""

    def kind(self, layer: nn.Module) -> str:
        return super().kind(layer).removesuffix("Mixer").lower()

    def read(self, layer: nn.Module) -> DiagonalSystem:
        return DiagonalSystem(*layer.lti())  # type: ignore[operator]

    def write(self, layer: nn.Module, system: DiagonalSystem) -> None:
        padding = {} if system.present is None else {"present": system.present}
        layer.set_lti(system.lam, system.B, system.C, **padding)  # type: ignore[operator]

    def shrink(self, layer: nn.Module, keep: Tensor, size: int) -> None:
        index, real = padded_index(keep, size)
        padding = {"present": real} if keep.ndim == 2 else {}
        layer.select_modes(index, **padding)  # type: ignore[operator]

    def update_config(self, config: Any, layers: Sequence[nn.Module], sizes: Sequence[int]) -> None:
        if getattr(config, "state_sizes", None) is not None:
            config.state_sizes = list(sizes)


_REGISTERED: dict[type, Adapter] = {}
_LIBRARY = {  # by the class's name, since importing it takes seconds: the adapter's module beside this one and class
    "transformers.models.mamba.modeling_mamba.MambaMixer": ("pruning.mamba_states", "MambaAdapter"),
    "transformers.models.mamba2.modeling_mamba2.Mamba2Mixer": ("pruning.mamba_states", "Mamba2Adapter"),
}


def register(layer_class: type[nn.Module], adapter: Adapter) -> None:
    """Make every tool work on a layer class and its subclasses.

    Raises:
        TypeError: not a module class, or not an adapter.
    """
    if not (isinstance(layer_class, type) and issubclass(layer_class, nn.Module)):
        raise TypeError(f"layer_class must be a subclass of torch.nn.Module, got {layer_class!r}")
    if not isinstance(adapter, Adapter):
        raise TypeError(f"adapter must be an Adapter, got {type(adapter).__name__}")
    _REGISTERED[layer_class] = adapter


def adapter_of(layer: nn.Module) -> Adapter | None:
    """The adapter of a layer, None if it has no modes that are known."""
    for cls in type(layer).__mro__:
        if cls in _REGISTERED:
            return _REGISTERED[cls]
        if (where := _LIBRARY.get(f"{cls.__module__}.{cls.__qualname__}")) is not None:
            return getattr(import_module(f".{where[0]}", __package__), where[1])()
    own = type(layer)  # of the class: wrappers, torch.compile's among them, pass on what the layer inside them has
    return DiagonalAdapter() if hasattr(own, "lti") and hasattr(own, "set_lti") else None


@dataclass(frozen=True)
class ElasticLayer:
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


def elastic_layers(model: nn.Module) -> list[ElasticLayer]:
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


def _layers(model: nn.Module) -> Iterator[ElasticLayer]:
    for name, module in model.named_modules():
        if (adapter := adapter_of(module)) is not None:
            yield ElasticLayer(name, module, adapter)


def record_sizes(model: nn.Module, layers: Sequence[ElasticLayer], sizes: Sequence[int]) -> None:
    """Write the numbers of modes into every configuration around the layers, which is given those of its own layers.

    A model can be built around another one, and either configuration, or both, can tell the sizes.
    """
    around: dict[tuple[int, type[Adapter]], tuple[Any, list[int]]] = {}
    for i, layer in enumerate(layers):
        path = layer.name.split(".")
        modules = [model, *(model.get_submodule(".".join(path[:n])) for n in range(1, len(path)))]
        for config in {id(c): c for m in modules if (c := getattr(m, "config", None)) is not None}.values():
            around.setdefault((id(config), type(layer.adapter)), (config, []))[1].append(i)
    for config, own in around.values():
        layers[own[0]].adapter.update_config(config, [layers[i].module for i in own], [sizes[i] for i in own])


def owner(layer: nn.Module, name: str) -> tuple[nn.Module, str]:
    """The module that holds a tensor of a layer, and the tensor's name in it."""
    path, _, attribute = name.rpartition(".")
    return layer.get_submodule(path), attribute


def check_plain(layer: ElasticLayer, tensors: Sequence[tuple[nn.Module, str]]) -> None:
    """Raises ValueError for a tensor that is not the module's own, as where PEFT has wrapped a projection."""
    for module, name in tensors:
        own = name in module._parameters or name in module._buffers
        if not own and not parametrize.is_parametrized(module, name):
            raise ValueError(
                f"{layer.name}: {name} must be a tensor of a plain module, but {type(module).__name__} wraps it: merge "
                "adapters into the model first (PEFT: merge_and_unload)"
            )


def replace(module: nn.Module, name: str, value: Tensor) -> None:
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
    return value.gather(dim, _spread(index, value.ndim, dim).expand(shape))


def _spread(modes: Tensor, ndim: int, dim: int) -> Tensor:
    """View of (n,) or (H, n) that broadcasts over a tensor whose dimension `dim` counts modes."""
    dim %= ndim
    shape = [1] * ndim
    shape[dim] = modes.shape[-1]
    if modes.ndim == 2:
        shape[dim - 1] = modes.shape[0]
    return modes.reshape(shape)


def _along(keep: Tensor, value: Tensor, dim: int) -> Tensor:
    return _spread(keep, value.ndim, dim).to(value.device)


def select(system: DiagonalSystem, index: Tensor, real: Tensor) -> DiagonalSystem:
    """The modes `index` of a system, (m,) or (H, m), silent where `real` is False."""
    lam, C = take(system.lam, index, -1), take(system.C, index, -1)
    B = take(system.B, index, -1 if system.siso else 0)
    present = None if bool(real.all()) else real
    return DiagonalSystem(lam, B, C.masked_fill(~_along(real, C, -1), 0), system.output, present)
