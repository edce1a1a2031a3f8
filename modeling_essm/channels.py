# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Which tensors of a model are divided into spectral channels; of all others a budget reads the whole.

The channel is the first dimension, so a budget is a prefix, in memory and in a file.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import nn

QUANTIZED_TENSOR = "channel_mixing"  # the one that quantised weights hold in small form
CHANNEL_TENSORS = (QUANTIZED_TENSOR, "channel_mixing_negative", "gate_out.weight", "gate_out.bias")  # of a mixer
_IN_QUANTIZED_FILE = re.compile(f"_{QUANTIZED_TENSOR}_(qdata|scale|zero_point)")


def spectral_mixers(model: nn.Module) -> list[Any]:
    """The spectral mixers in order of their layers, by name: the model may be a remote copy of this code."""
    mixers = [module for module in model.modules() if type(module).__name__ == "ESSMSpectralMixer"]
    if not mixers:
        raise ValueError(f"model must hold ESSMSpectralMixer layers, got a {type(model).__name__} without any")
    return mixers


def channel_parameters(mixer: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    """The weights of a mixer that are divided into channels: (module, attribute, value)."""
    for name in CHANNEL_TENSORS:
        path, _, attribute = name.rpartition(".")
        module: Any = getattr(mixer, path, None) if path else mixer
        if (value := getattr(module, attribute, None)) is not None:
            yield module, attribute, value


def num_parameters_per_channel(mixer: nn.Module) -> int:
    """Weights that only one spectral channel reads."""
    return sum(value.numel() // len(value) for _, _, value in channel_parameters(mixer))


def truncate_channels(mixer: nn.Module, capacity: int) -> None:
    """Keep the first channels of a mixer only, and free the others."""
    for module, name, value in list(channel_parameters(mixer)):
        kept = value.detach()[:capacity].clone()
        setattr(module, name, nn.Parameter(kept, requires_grad=value.requires_grad))


def channel_capacity(name: str, capacities: Sequence[int] | Mapping[int, int]) -> int | None:
    """How many slices of the tensor of that name in a file stay; None for one that is not divided into channels.

    Args:
        capacities: by layer.
    """
    parts = name.split(".")
    if "mixer" not in parts:
        return None
    mixer = parts.index("mixer")
    tensor = ".".join(parts[mixer + 1 :])
    if tensor not in CHANNEL_TENSORS and not _IN_QUANTIZED_FILE.fullmatch(tensor):
        return None
    return capacities[int(parts[mixer - 1])]
