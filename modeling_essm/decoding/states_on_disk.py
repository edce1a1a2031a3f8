# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""A conversation from one process to another: the states of a cache in one safetensors file.

The file says which model made the states and has a checksum over all it holds. A damaged file and another model are
refused before any state is read.
"""

from __future__ import annotations

import hashlib
import json
import os
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from .._files import replacing
from ..budgets.weights import checksum, same_weights, weights_checksum
from ..cache_essm import ESSMCache, check_cache, model_shape

_FORMAT = "essm-cache-4"


def save_cache(cache: ESSMCache, path: str | os.PathLike, model: Any) -> None:
    """Write all states to one safetensors file, in one move.

    Args:
        model: the ES-SSM that made them; the file remembers which it was.
    Raises:
        ValueError: an empty cache, one of a model of another shape, states that are not finite, or a path that holds
            something other than a saved cache.
    """
    if os.path.exists(path) and not _is_cache(path):
        raise ValueError(f"{path} holds something other than a saved cache, and is not replaced")
    check_cache(cache, model.config, cache.require_states("save"))
    tensors = {name: tensor.cpu().contiguous() for name, tensor in cache.states.items()}
    for name, tensor in tensors.items():
        if not tensor.isfinite().all():
            raise ValueError(f"states {name} of this cache are not finite: nothing could be decoded from them")
    record = {
        "shape": model_shape(cache.config),
        "weights": weights_checksum(model),
        "seen_tokens": cache.get_seq_length(),
        "layers": [[layer.state_budget, layer.filled] for layer in cache.layers],
        "names": list(tensors),  # safetensors sorts them
    }
    text = json.dumps(record)
    with replacing(path) as partial:
        save_file(tensors, partial, metadata={"format": _FORMAT, "cache": text, "sha256": _digest(text, tensors)})


def load_cache(path: str | os.PathLike, model: Any) -> ESSMCache:
    """Read a saved cache, on the CPU.

    Args:
        model: the ES-SSM that will read on: the one that saved it, perhaps truncated, or cast between fp32 and bf16.
            If weights are offloaded or sharded, only the model's shape is compared. A truncated model with a memory
            reads on as from a cache that was shrunk.
    Raises:
        FileNotFoundError: no such file.
        ValueError: not a cache, damaged, or of another model; the message begins with the file's name.
    """
    if os.path.isdir(path):
        raise ValueError(f"{path} is a folder, and no saved cache")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in list(file.keys())}
    except (SafetensorError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is truncated or corrupt ({error!r})") from error
    if metadata.get("format") != _FORMAT:
        raise ValueError(f"{path} is not a cache of this version, {_FORMAT}, but {metadata.get('format')!r}")
    text = metadata.get("cache", "")
    if metadata.get("sha256") != _digest(text, tensors):
        raise ValueError(f"{path} is truncated or corrupt: its contents do not match its checksum")
    record, cache = json.loads(text), ESSMCache(model.config)
    if record["shape"] != (shape := model_shape(cache.config)):
        raise ValueError(f"{path} is of another model: {record['shape']}, and this one has {shape}")
    made_by, here = record["weights"], weights_checksum(model)
    if not same_weights(made_by, here):
        raise ValueError(f"{path} is of another model of this shape, with other weights")
    cache.set_states({name: tensors[name] for name in record["names"]})
    for layer, (state_budget, filled) in zip(cache.layers, record["layers"]):
        layer.state_budget, layer.filled = state_budget, filled
    cache.advance(record["seen_tokens"])
    return cache.shrink([*model.config.capacities])  # of a truncated model


def _is_cache(path: str | os.PathLike) -> bool:
    """Whether it is a cache's, of this version or another, damaged or not; an empty file counts too."""
    if not os.path.isfile(path):
        return False
    with open(path, "rb") as file:
        head = file.read(1 << 20)
    return not head or b'"essm-cache-' in head


def _digest(record: str, tensors: dict[str, Tensor]) -> str:
    return hashlib.sha256((record + checksum(sorted(tensors.items()))).encode()).hexdigest()
