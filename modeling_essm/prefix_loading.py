# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Capacity: keep, or read from a checkpoint, only the first channels of an ES-SSM.

A budget is a prefix, in memory and in the file: the tensors that belong to channels have them as first dimension, so a
model of capacity 6 is the first 6 slices of each, and computes what the large one computes at budget 6.
"""

from __future__ import annotations

import copy
import json
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any, Union

import numpy as np
import torch
from safetensors import safe_open
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file

SpectralCapacity = Union[int, Sequence[int]]

# Arguments of from_pretrained that say where files are, for `cached_file`.
HUB_ARGUMENTS = (
    *("cache_dir", "force_download", "proxies", "token", "local_files_only", "revision", "subfolder"),
    *("repo_type", "user_agent", "_commit_hash"),
)
# Tensors of a mixer whose first dimension is the channel.
_PER_CHANNEL = ("channel_mixing", "channel_mixing_negative", "gate_out.weight", "gate_out.bias")
_QUANTIZED_PER_CHANNEL = re.compile("_channel_mixing_(qdata|scale|zero_point)")


def resolve_capacity(value: Any, capacities: Sequence[int]) -> tuple[int, ...]:
    """The capacity of each layer that `value` asks for.

    Args:
        value: an int for every layer (those that hold less keep what they have), or one int per layer.
        capacities: what each layer holds.
    Raises:
        ValueError: anything else, naming the value and the legal range.
    """
    if isinstance(value, (list, tuple)):
        if len(value) != len(capacities):
            raise ValueError(
                f"spectral_capacity as a list needs one integer for each of the {len(capacities)} layers, "
                f"got {len(value)}: {list(value)!r}"
            )
        return tuple(_check(K, held, f" in layer {i}") for i, (K, held) in enumerate(zip(value, capacities)))
    K = _check(value, max(capacities), "")
    return tuple(min(K, held) for held in capacities)


def _check(value: Any, highest: int, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or not 1 <= value <= highest:
        raise ValueError(f"spectral_capacity must be an integer in [1, {highest}]{where}, got {value!r}")
    return int(value)


def truncated_config(config: Any, capacities: Sequence[int]) -> Any:
    """A copy of an ESSMConfig with these capacities; defaults and presets that no longer fit are left out."""
    small = copy.deepcopy(config)
    small.num_spectral_channels = max(capacities)
    small.spectral_capacities = None if len(set(capacities)) == 1 else list(capacities)
    if small.trained_budgets is not None:
        small.trained_budgets = [K for K in small.trained_budgets if budget_fits(K, small)]
    if small.budget_presets is not None:
        small.budget_presets = {name: K for name, K in small.budget_presets.items() if budget_fits(K, small)}
    if not budget_fits(small.spectral_budget, small):
        small.spectral_budget = None
    return small


def budget_fits(budget: Any, config: Any) -> bool:
    """Whether a stored budget is one that the model of that config can run."""
    try:
        config.resolve_budget(budget)
    except ValueError:
        return False
    return True


def channel_capacity(name: str, capacities: Sequence[int]) -> int | None:
    """How many slices of the tensor of that name stay; None for one that is not divided into channels."""
    parts = name.split(".")
    if "mixer" not in parts:
        return None
    own = ".".join(parts[parts.index("mixer") + 1 :])
    if own not in _PER_CHANNEL and not _QUANTIZED_PER_CHANNEL.fullmatch(own):
        return None
    return capacities[int(parts[parts.index("mixer") - 1])]


def read_prefix(source: Any, capacities: Sequence[int], where: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The weights of a checkpoint, of channels only the first `capacities`; nothing else is read.

    Args:
        source: folder or Hub name of a safetensors checkpoint, in one file or in shards.
        where: those of HUB_ARGUMENTS that the caller gave, and `variant`.
    Returns:
        tensors by their names in the checkpoint, on the CPU, in its dtypes.
    Raises:
        ValueError: no safetensors file. OSError: a shard is not there. SafetensorError: a file is damaged.
    """
    weights: dict[str, torch.Tensor] = {}
    for path in _weight_files(source, dict(where)):
        with safe_open(path, framework="pt") as file:
            for name in list(file.keys()):
                kept = channel_capacity(name, capacities)
                weights[name] = file.get_tensor(name) if kept is None else file.get_slice(name)[:kept]
    return weights


def read_metadata(source: Any, where: Mapping[str, Any]) -> dict[str, str]:
    """What the safetensors files say of their tensors; arguments as in `read_prefix`."""
    metadata: dict[str, str] = {}
    for path in _weight_files(source, dict(where)):
        with safe_open(path, framework="pt") as file:
            metadata |= file.metadata() or {}
    return metadata


def _weight_files(source: Any, where: dict[str, Any]) -> list[str]:
    variant = where.pop("variant", None)

    def find(name: str) -> str | None:
        stem, end = name.rsplit(".", 1)  # model.fp16.safetensors, and model.safetensors.index.fp16.json
        name = name if variant is None else f"{stem}.{variant}.{end}"
        return cached_file(source, name, **where, _raise_exceptions_for_missing_entries=False)

    single = find(SAFE_WEIGHTS_NAME)
    if single is not None:
        return [single]
    index = find(SAFE_WEIGHTS_INDEX_NAME)
    if index is None:
        raise ValueError(
            f"spectral_capacity reads a prefix of a safetensors checkpoint, and {str(source)!r} holds no "
            f"{SAFE_WEIGHTS_NAME}; load it whole and call model.truncate"
        )
    with open(index) as file:
        try:
            names = sorted(set(json.load(file)["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{index} is not an index of a sharded checkpoint: {error!r}") from error
    return [str(cached_file(source, os.path.basename(name), **where)) for name in names]
