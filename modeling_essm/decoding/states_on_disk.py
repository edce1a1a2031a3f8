# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""A conversation from one process to another: the states of a cache in a file with a checksum.

What is loaded is checked whole before a model reads it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ..budgets.fingerprint import Fingerprint, fingerprint
from ..cache_essm import ATTENTION_STATES, ESSMCache, check_cache, operator_of, recent_inputs, state_names
from ..cache_layers import PER_STATE, ESSMCacheLayer
from ..loading_essm import replacing
from ..spectral_budget import spectral_layers

_FORMAT, _FORMAT_WITHOUT_CHECKSUM = "essm-cache-2", "essm-cache-1"


def save_cache(cache: ESSMCache, path: str | os.PathLike, model: Any) -> None:
    """Write all states to one safetensors file, atomically.

    Args:
        model: the ES-SSM that made them; the file remembers which it was.
    Raises:
        ValueError: an empty cache, one of a model of another shape, or states that are not finite.
    """
    check_cache(cache, model.config, cache.require_states("save"))
    try:
        _check_states(cache.layers, model.config)
    except ValueError as error:
        raise ValueError(f"this cache would not be read again: {error}") from error
    tensors = {name: tensor.cpu().contiguous() for name, tensor in cache.states.items()}
    record: dict[str, Any] = {"shape": cache.model_shape(), "model": dataclasses.asdict(fingerprint(model))}
    record |= {"seen_tokens": cache.get_seq_length(), "layers": [[x.state_budget, x.filled] for x in cache.layers]}
    text = json.dumps(record)
    metadata = {"format": _FORMAT, "cache": text, "sha256": _checksum(text, tensors)}
    with replacing(Path(path)) as partial:
        save_file(tensors, partial, metadata=metadata)


def load_cache(path: str | os.PathLike, model: Any) -> ESSMCache:
    """Read a saved cache, on the CPU.

    Args:
        model: the ES-SSM that will read on: the one that saved it, cast or truncated perhaps.
    Raises:
        FileNotFoundError: no such file. ValueError: not a cache, damaged, of another model, or of contents that no
            model could have saved: the message begins with the file's name.
    """
    cache = ESSMCache(model.config)
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in list(file.keys())}
    except (SafetensorError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is truncated or corrupt ({error!r})") from error
    written = metadata.get("format")
    if written not in (_FORMAT, _FORMAT_WITHOUT_CHECKSUM):
        raise ValueError(f"{path} is not a cache of this version, {_FORMAT}, but {written!r}")
    text = metadata.get("cache", "")
    if written == _FORMAT and metadata.get("sha256") != _checksum(text, tensors):
        raise ValueError(f"{path} is truncated or corrupt: its contents do not match its checksum")
    try:
        record = json.loads(text)
        shape, seen_tokens, layers = record["shape"], record["seen_tokens"], record["layers"]
        difference = _check_fingerprint(record["model"]).difference(fingerprint(model))
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ValueError(f"{path} is truncated or corrupt ({error!r})") from error
    if shape != cache.model_shape():
        raise ValueError(f"{path} is of another model: {shape}, and this one has {cache.model_shape()}")
    if difference:
        raise ValueError(f"{path} is of another model: {difference}")
    try:
        if type(seen_tokens) is not int or not 0 <= seen_tokens < 1 << 63:
            raise ValueError(f"its count of tokens must be an integer in [0, 2^63), got {seen_tokens!r}")
        _fill(cache, layers, tensors)
        _check_states(cache.layers, model.config)
    except ValueError as error:
        raise ValueError(f"{path} is not a whole cache: {error}") from error
    cache.advance(seen_tokens)
    return cache


def _fill(cache: ESSMCache, layers: Any, tensors: dict[str, Tensor]) -> None:
    """Take over what a file holds. Raises ValueError for a record or names of tensors of another structure."""
    num_layers, names, spectral = len(cache.layers), state_names(cache.config), spectral_layers(cache.config)
    if not isinstance(layers, list) or len(layers) != num_layers:
        raise ValueError(f"its record must describe {num_layers} layers, got {layers!r:.100}")
    held = [names if i in spectral else ATTENTION_STATES for i in range(num_layers)]
    expected = [f"{i}.{name}" for i in range(num_layers) for name in held[i]]
    if tensors.keys() != set(expected):
        raise ValueError(f"tensors missing or not expected: {sorted(tensors.keys() ^ set(expected))[:10]}")
    for i, (layer, described) in enumerate(zip(cache.layers, layers)):
        if not isinstance(described, list) or len(described) != 2:
            raise ValueError(f"layer {i} must be described by [state_budget, filled], got {described!r:.100}")
        layer.state_budget, layer.filled = described
    cache.set_states({name: tensors[name] for name in expected})


def _checksum(record: str, tensors: dict[str, Tensor]) -> str:
    """SHA-256 over a record and over names, dtypes, shapes and bytes of (contiguous, CPU) tensors."""
    digest = hashlib.sha256(record.encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"\0{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _check_fingerprint(record: dict[str, Any]) -> Fingerprint:
    """The fingerprint of a record. Raises ValueError or TypeError for one that no model has."""
    made_by = Fingerprint(**record)
    values = [value for sample in made_by.samples.values() for value in sample]
    if not all(math.isfinite(value) for value in values):  # NaN would equal every model's
        raise ValueError("a sample of the model is not finite")
    return made_by


def _check_states(layers: Sequence[ESSMCacheLayer], config: Any) -> None:
    """Raises ValueError unless all layers hold what one call of a model of this shape leaves, finite throughout."""
    D, recent, B = config.inner_size, recent_inputs(config), 0
    operator = operator_of(config)
    least, most = operator.num_states(1), operator.num_states(config.filter_length)
    attends: int | None = None  # the first layer that does
    for i, layer in enumerate(layers):
        if i not in spectral_layers(config):
            B = _check_keys(layer, i, config, B)
            attends = i if attends is None else attends
            lengths, others = (each.tensors["lengths"].tolist() for each in (layer, layers[attends]))
            if lengths != others:
                raise ValueError(
                    f"lengths of layer {i} must be those of layer {attends}, {others!r:.100}, got {lengths!r:.100}"
                )
            continue
        features = layer.tensors.get("features")
        if features is None or features.ndim != 3 or not least <= features.shape[1] <= most or not len(features):
            got = "none" if features is None else tuple(features.shape)
            raise ValueError(f"features of layer {i} must have shape (B, N in [{least}, {most}], {D}), got {got}")
        B, N = B or len(features), features.shape[1]
        for name in state_names(config):
            tensor, shape = layer.tensors.get(name), (B, recent.get(name, N), D)
            if tensor is None or tuple(tensor.shape) != shape:
                got = "none" if tensor is None else tuple(tensor.shape)
                raise ValueError(f"{name} of layer {i} must have shape {shape}, got {got}")
            dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.float64)
            if name not in PER_STATE:
                dtypes += (torch.bfloat16, torch.float16)
            if tensor.dtype not in dtypes:
                raise ValueError(f"{name} of layer {i} must be of one of {dtypes}, got {tensor.dtype}")
            if not bool(tensor.isfinite().all()):
                raise ValueError(f"{name} of layer {i} is not finite")
        K, filled = layer.state_budget, layer.filled
        if K is not None and (type(K) is not int or not 1 <= K <= config.filter_length):
            raise ValueError(
                f"state_budget of layer {i} must be None or in [1, {config.filter_length}], got {K!r:.100}"
            )
        if filled is not None and (
            not isinstance(filled, list)
            or len(filled) != B
            or any(type(held) is not int or not least <= held <= N for held in filled)
        ):
            raise ValueError(f"filled of layer {i} must be None or {B} integers in [{least}, {N}], got {filled!r:.100}")


def _check_keys(layer: ESSMCacheLayer, i: int, config: Any, B: int) -> int:
    """B, which is 0 where it is not known yet. Raises ValueError for what an attention layer cannot hold."""
    keys, values, lengths = (layer.tensors.get(name) for name in ATTENTION_STATES)
    heads, d = config.num_key_value_heads, config.head_dim
    if keys is None or values is None or lengths is None:
        raise ValueError(f"layer {i} must hold {ATTENTION_STATES}, got {[*layer.tensors]}")
    B = B or len(lengths)
    if lengths.dtype != torch.int64 or lengths.shape != (B,) or not B or bool((lengths < 0).any()):
        raise ValueError(
            f"lengths of layer {i} must be {B} int64 of at least 0, got {lengths.dtype} {lengths.tolist()!r:.100}"
        )
    least, most = int(lengths.max()), math.inf  # beams may leave more than the longest row has
    if config.layer_types[i] == "sliding_attention":
        least, most = min(least, config.sliding_window - 1), config.sliding_window - 1
    for name, tensor in (("keys", keys), ("values", values)):
        shape = tuple(tensor.shape)
        if len(shape) != 4 or shape != (B, heads, shape[2], d) or not least <= shape[2] <= most:
            raise ValueError(
                f"{name} of layer {i} must have shape ({B}, {heads}, T in [{least}, {most}], {d}), got {shape}"
            )
        if not tensor.is_floating_point() or not bool(tensor.isfinite().all()):
            raise ValueError(f"{name} of layer {i} must be finite floating-point numbers, got {tensor.dtype}")
    if values.shape != keys.shape:
        raise ValueError(f"values of layer {i} must have the shape of its keys, {tuple(keys.shape)}")
    if [layer.state_budget, layer.filled] != [None, None]:
        raise ValueError(f"layer {i} attends and has no state budget, got {[layer.state_budget, layer.filled]!r:.100}")
    return B
