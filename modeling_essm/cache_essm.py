# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""The recurrent-state cache: for each layer the spectral features at the last step, an (N, D) state per row.

Its size depends on the budget and never on the context. The first forward pass stamps it: N states are kept from
then on, so that the budget may fall and rise again up to that one. Ask for more room when the cache is made, with
`ESSMCache(config, state_budget=K)`; give room back with `cache.shrink(K)`.

A server takes rows out with `cache.select` and puts rows together with `ESSMCache.merge`, whatever their budgets: each
row keeps its own stamp. `cache.save` and `ESSMCache.load` carry a conversation from one process to another, in a file
with a checksum; what is loaded is checked whole before a model reads it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache

from .fingerprint import Fingerprint, fingerprint
from .spectral_budget import SpectralBudget
from .spectral_ops import SpectralOperator

_FORMAT, _FORMAT_WITHOUT_CHECKSUM = "essm-cache-2", "essm-cache-1"
# What states mean depends on these alone; in files of the paper's block only the first are named.
_SHAPE = ("num_hidden_layers", "hidden_size", "filter_length", "ar_order")
_SHAPE_OF_GATED = (*_SHAPE, "inner_size", "conv_kernel_size")
_PER_STATE = ("features", "negative")  # tensors (B, N, D), of which a smaller budget reads the first rows


class ESSMCacheLayer(CacheLayerMixin):
    """State of one layer: named tensors whose first dimension is the batch. "features" (B, N, D) is always there.

    Attributes:
        state_budget: the budget to make room for, or None. room: states that each row has filled, where rows differ.
    """

    is_compileable = False
    supports_early_init = False

    def __init__(self, state_budget: int | None = None):
        super().__init__()
        self.state_budget = state_budget
        self.tensors: dict[str, Tensor] = {}
        self.room: list[int] | None = None

    @property
    def num_states(self) -> int | None:
        """N, the stamp; None before the first update."""
        return self.tensors["features"].shape[1] if self.tensors else None

    def update(self, **tensors: Tensor) -> None:  # type: ignore[override]
        self.tensors = {name: tensor.detach() for name, tensor in tensors.items()}
        self.is_initialized = True

    def apply(self, function: Callable[[Tensor], Tensor]) -> None:
        """Replace every tensor by function(tensor)."""
        self.tensors = {name: function(tensor) for name, tensor in self.tensors.items()}

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.apply(lambda t: t.index_select(0, beam_idx.to(t.device)))
        if self.room is not None:
            self.room = [self.room[row] for row in beam_idx.tolist()]

    def batch_select_indices(self, indices: Tensor) -> None:
        self.reorder_cache(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.apply(lambda t: t.repeat_interleave(repeats, 0))
        if self.room is not None:
            self.room = [held for held in self.room for _ in range(repeats)]

    def shrink(self, num_states: int) -> None:
        """Keep the first states only, and free the others."""
        for name in _PER_STATE:
            if name in self.tensors:
                self.tensors[name] = self.tensors[name][:, :num_states].clone()
        if self.room is not None:
            self.room = [min(held, num_states) for held in self.room]
            self.room = None if min(self.room) == self.num_states else self.room

    def reset(self) -> None:
        self.tensors, self.room = {}, None
        self.is_initialized = False

    def offload(self) -> None:
        self.apply(lambda t: t.to("cpu"))

    def prefetch(self) -> None:  # the mixer moves states to its own device when it reads them
        pass

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        pass

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def get_seq_length(self) -> int:
        return 0  # a state has no sequence dimension; ESSMCache counts tokens

    def get_max_length(self) -> int:
        return -1


class ESSMStaticCacheLayer(ESSMCacheLayer):
    """The same, written in place once it is filled: compiled steps and CUDA graphs find states where they were."""

    is_compileable = True

    def update(self, **tensors: Tensor) -> None:  # type: ignore[override]
        if self.tensors:
            self._write(tensors)
            return
        super().update(**{name: tensor.clone() for name, tensor in tensors.items()})
        if not torch.compiler.is_compiling():
            for tensor in self.tensors.values():
                torch._dynamo.mark_static_address(tensor)

    def apply(self, function: Callable[[Tensor], Tensor]) -> None:
        self._write({name: function(tensor) for name, tensor in self.tensors.items()})

    def _write(self, tensors: dict[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            held = self.tensors[name]
            if held.shape == tensor.shape and held.device == tensor.device:
                held.copy_(tensor.detach())
            else:  # other rows or another device
                self.tensors[name] = tensor.detach().clone()


class ElasticCache(Cache):
    """What the two kinds of cache share; arguments and errors as of `ESSMCache`."""

    _layer_class: type[ESSMCacheLayer] = ESSMCacheLayer

    def __init__(self, config: Any, state_budget: SpectralBudget = None):
        if state_budget is None:
            budgets: tuple[int | None, ...] = (None,) * config.num_hidden_layers
        else:
            budgets = config.resolve_budget(state_budget).layers
        Cache.__init__(self, layers=[self._layer_class(budget) for budget in budgets])
        self.config = config
        self._seen_tokens: int | Tensor = 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return int(self._seen_tokens)

    def advance(self, num_tokens: int) -> None:
        """Count tokens that every layer has read."""
        self._seen_tokens += num_tokens

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        return self.get_seq_length() > 0

    @property
    def num_bytes(self) -> int:
        """Bytes held by all layers, all rows."""
        return sum(t.numel() * t.element_size() for layer in self.layers for t in layer.tensors.values())

    @property
    def batch_size(self) -> int | None:
        tensors = self.layers[0].tensors
        return tensors["features"].shape[0] if tensors else None

    def reset(self) -> None:
        super().reset()
        self._seen_tokens = 0

    def crop(self, max_length: int) -> None:
        """Raises ValueError: a recurrent state cannot forget its last tokens."""
        raise ValueError(
            f"ESSMCache cannot be cropped to {max_length}: a recurrent state cannot forget tokens. "
            "Keep a copy.deepcopy of the cache to return to."
        )

    def to(self, device: torch.device | str) -> ESSMCache:
        """Move all states; this cache. (A model moves what it reads by itself, once per call.)"""
        for layer in self.layers:
            layer.apply(lambda t: t.to(device))
        return self

    def select(self, rows: Sequence[int] | Sequence[bool] | Tensor) -> ESSMCache:
        """A new cache of these rows, in this order; also to evict the others.

        Args:
            rows: integers, or a boolean for each of the B rows, true for those to keep.
        Raises:
            ValueError: an empty cache, no rows, rows out of range, fractions, or a mask of another length.
        """
        held = self._require_states("select rows of")
        indices = torch.as_tensor(rows).flatten().cpu()
        if indices.dtype == torch.bool and len(indices) == held:
            indices = indices.nonzero().flatten()
        integers = indices.dtype in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
        if not integers or not len(indices) or not 0 <= int(indices.min()) <= int(indices.max()) < held:
            raise ValueError(
                f"rows must be integers in [0, {held - 1}], at least one, or a mask of {held} booleans, "
                f"got {torch.as_tensor(rows).tolist()}"
            )
        indices = indices.long()
        selected = self._like(self.get_seq_length())
        for new, old in zip(selected.layers, self.layers):
            new.update(**old.tensors)
            new.room = old.room
            new.batch_select_indices(indices)
            if new.room is not None:
                new.shrink(max(new.room))
        return selected

    @staticmethod
    def merge(caches: Sequence[ESSMCache]) -> ESSMCache:
        """A new cache with the rows of all, on the first one's device; get_seq_length is that of the longest.

        Caches of smaller budgets are widened; their rows still serve no more than they did.
        Raises:
            ValueError: no caches, empty ones, or caches of models of different shape.
        """
        if not caches:
            raise ValueError("merge needs at least one cache, got none")
        first = caches[0]
        for cache in caches:
            cache._require_states("merge")
            if cache._shape() != first._shape():
                raise ValueError(f"caches of different models cannot be merged: {first._shape()} and {cache._shape()}")
        merged = first._like(max(cache.get_seq_length() for cache in caches))
        for i, new in enumerate(merged.layers):
            parts = [cache.layers[i] for cache in caches]
            rooms = [part.room or [part.num_states] * len(part.tensors["features"]) for part in parts]
            N, device = max(part.num_states for part in parts), parts[0].tensors["features"].device
            new.update(
                **{
                    name: torch.cat([_widened(name, part.tensors[name].to(device), N) for part in parts])
                    for name in parts[0].tensors
                }
            )
            room = [held for part in rooms for held in part]
            new.room = None if min(room) == N else room
        return merged

    def shrink(self, spectral_budget: SpectralBudget) -> ESSMCache:
        """Give back the states that a smaller budget does not read; larger ones are refused from now on. This cache.

        Raises:
            ValueError: a bad budget. Layers of less room already, held or asked for, stay as they are.
        """
        budgets = self.config.resolve_budget(spectral_budget).layers
        operator = _operator(self.config)
        for layer, K in zip(self.layers, budgets):
            if layer.state_budget is not None:
                layer.state_budget = min(layer.state_budget, K)
            layer.shrink(operator.num_states(K))
        return self

    def save(self, path: str | os.PathLike, model: Any) -> None:
        """Write all states to one safetensors file, atomically.

        Args:
            model: the ES-SSM that made them; the file remembers which it was.
        Raises:
            ValueError: an empty cache, one of a model of another shape, or states that are not finite.
        """
        check_cache(self, model.config, self._require_states("save"))
        try:
            _check_states(self.layers, model.config)
        except ValueError as error:
            raise ValueError(f"this cache would not be read again: {error}") from error
        tensors = {
            f"{i}.{name}": tensor.cpu().contiguous()
            for i, layer in enumerate(self.layers)
            for name, tensor in layer.tensors.items()
        }
        record: dict[str, Any] = {"shape": self._shape(), "model": dataclasses.asdict(fingerprint(model))}
        record |= {"seen_tokens": self.get_seq_length(), "layers": [[x.state_budget, x.room] for x in self.layers]}
        text = json.dumps(record)
        metadata = {"format": _FORMAT, "cache": text, "sha256": _checksum(text, tensors)}
        path = Path(path)
        partial = path.with_name(f".partial-{path.name}")
        try:
            save_file(tensors, partial, metadata=metadata)
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)

    @staticmethod
    def load(path: str | os.PathLike, model: Any) -> ESSMCache:
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
        if shape != cache._shape():
            raise ValueError(f"{path} is of another model: {shape}, and this one has {cache._shape()}")
        if difference:
            raise ValueError(f"{path} is of another model: {difference}")
        try:
            if type(seen_tokens) is not int or not 0 <= seen_tokens < 1 << 63:
                raise ValueError(f"its count of tokens must be an integer in [0, 2^63), got {seen_tokens!r}")
            cache._seen_tokens = seen_tokens
            cache._fill(layers, tensors)
            _check_states(cache.layers, model.config)
        except ValueError as error:
            raise ValueError(f"{path} is not a whole cache: {error}") from error
        return cache

    def _fill(self, layers: Any, tensors: dict[str, Tensor]) -> None:
        """Take over what a file holds. Raises ValueError for a record or names of tensors of another structure."""
        num_layers, names = len(self.layers), _state_names(self.config)
        if not isinstance(layers, list) or len(layers) != num_layers:
            raise ValueError(f"its record must describe {num_layers} layers, got {layers!r:.100}")
        expected = {f"{i}.{name}" for i in range(num_layers) for name in names}
        if tensors.keys() != expected:
            raise ValueError(f"tensors missing or not expected: {sorted(tensors.keys() ^ expected)[:10]}")
        for i, (layer, described) in enumerate(zip(self.layers, layers)):
            if not isinstance(described, list) or len(described) != 2:
                raise ValueError(f"layer {i} must be described by [state_budget, room], got {described!r:.100}")
            layer.state_budget, layer.room = described
            layer.update(**{name: tensors[f"{i}.{name}"] for name in names})

    def _require_states(self, what: str) -> int:
        if self.batch_size is None:
            raise ValueError(f"cannot {what} an empty cache: run the model with it first")
        return self.batch_size

    def _like(self, seen_tokens: int) -> ESSMCache:
        """An empty cache of the same model and room."""
        cache = ESSMCache(self.config)
        cache._seen_tokens = seen_tokens
        for new, old in zip(cache.layers, self.layers):
            new.state_budget = old.state_budget
        return cache

    def _shape(self) -> dict[str, int]:
        """What two models must share for one to read the other's states."""
        names = _SHAPE if self.config.block == "paper" else _SHAPE_OF_GATED
        return {name: getattr(self.config, name) for name in names}


class ESSMCache(ElasticCache, DynamicCache):
    """Constant-size cache of an ES-SSM, for `past_key_values`: to the library a dynamic one, never compiled by itself.

    Args:
        config: the model's ESSMConfig.
        state_budget: the largest budget the cache must serve (an int, a list per layer, or a preset); by default the
            budget of the first forward pass.
    Raises:
        ValueError: state_budget out of range.
    """


class ESSMStaticCache(ElasticCache):
    """An `ESSMCache` whose tensors stay where they are, for torch.compile: what `cache_implementation="static"` makes.

    `generate` compiles its steps by itself with such a cache, on accelerators or as its compile_config says. One batch
    size; `select`, `merge` and `load` give ordinary caches. Arguments and errors as of `ESSMCache`.
    """

    _layer_class = ESSMStaticCacheLayer

    def advance(self, num_tokens: int) -> None:
        if isinstance(self._seen_tokens, Tensor):  # of which a compiled step makes no constant
            self._seen_tokens += num_tokens
        else:
            device = self.layers[0].tensors["features"].device
            self._seen_tokens = torch.tensor(self._seen_tokens + num_tokens, device=device)
            torch._dynamo.mark_static_address(self._seen_tokens)


def _operator(config: Any) -> SpectralOperator:
    return SpectralOperator(config.filter_length, config.state_margin, config.chunk_size)


def _recent_inputs(config: Any) -> dict[str, int]:
    """Tensors (B, p, D) of a layer that hold the last p inputs or outputs, and p."""
    names = ("inputs", "outputs") if config.ar_order else ()
    return dict.fromkeys(names, config.ar_order) | (
        {"convolution": config.conv_kernel_size - 1} if config.conv_kernel_size else {}
    )


def _state_names(config: Any) -> tuple[str, ...]:
    """Names of a layer's tensors, in the order in which the mixer makes them."""
    return ("features", *(("negative",) if config.ar_order else ()), *_recent_inputs(config))


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
    D, recent, B = config.inner_size, _recent_inputs(config), 0
    operator = _operator(config)
    least, most = operator.num_states(1), operator.num_states(config.filter_length)
    for i, layer in enumerate(layers):
        features = layer.tensors.get("features")
        if features is None or features.ndim != 3 or not least <= features.shape[1] <= most or not len(features):
            got = "none" if features is None else tuple(features.shape)
            raise ValueError(f"features of layer {i} must have shape (B, N in [{least}, {most}], {D}), got {got}")
        B, N = B or len(features), features.shape[1]
        for name in _state_names(config):
            tensor, shape = layer.tensors.get(name), (B, recent.get(name, N), D)
            if tensor is None or tuple(tensor.shape) != shape:
                got = "none" if tensor is None else tuple(tensor.shape)
                raise ValueError(f"{name} of layer {i} must have shape {shape}, got {got}")
            dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.float64)
            if name not in _PER_STATE:
                dtypes += (torch.bfloat16, torch.float16)
            if tensor.dtype not in dtypes:
                raise ValueError(f"{name} of layer {i} must be of one of {dtypes}, got {tensor.dtype}")
            if not bool(tensor.isfinite().all()):
                raise ValueError(f"{name} of layer {i} is not finite")
        K, room = layer.state_budget, layer.room
        if K is not None and (type(K) is not int or not 1 <= K <= config.filter_length):
            raise ValueError(
                f"state_budget of layer {i} must be None or in [1, {config.filter_length}], got {K!r:.100}"
            )
        if room is not None and (
            not isinstance(room, list)
            or len(room) != B
            or any(type(held) is not int or not least <= held <= N for held in room)
        ):
            raise ValueError(f"room of layer {i} must be None or {B} integers in [{least}, {N}], got {room!r:.100}")


def _widened(name: str, tensor: Tensor, num_states: int) -> Tensor:
    """(B, N, D) -> (B, num_states, D) with zeros; tensors without a state dimension as they are."""
    if name not in _PER_STATE:
        return tensor
    return torch.nn.functional.pad(tensor, (0, 0, 0, num_states - tensor.shape[1]))


def check_room(cache: ESSMCache, budgets: Sequence[int], rows: Tensor | None, operator: SpectralOperator) -> None:
    """Raises ValueError if a stamped layer, or one of its rows, holds fewer states than its budget needs.

    Args:
        budgets: K of each layer. rows: (B,) K of each row, or None.
    """
    own = None
    for i, (layer, budget) in enumerate(zip(cache.layers, budgets)):
        held, asked = layer.num_states, [budget]
        room = [held]
        if layer.room is not None:
            own = rows.tolist() if rows is not None and own is None else own
            room = layer.room
            asked = [budget] * len(room) if own is None else [min(K, budget) for K in own]
        for row, (states, K) in enumerate(zip(room, asked)):
            if states is not None and states < operator.num_states(K):
                where = f"layer {i}" if layer.room is None else f"row {row} of layer {i}"
                raise ValueError(
                    f"spectral_budget {K} needs {operator.num_states(K)} states in {where}, but this cache holds "
                    f"{states}: it was made for a smaller budget. Make it with ESSMCache(config, state_budget={K}) and "
                    "pass it as past_key_values"
                )


def check_cache(cache: Any, config: Any, batch_size: int) -> None:
    """Raises ValueError for another kind of cache, or one of a model of another shape or batch."""
    if not hasattr(cache, "num_bytes"):  # not isinstance: model and cache may come from two copies of the code
        raise ValueError(f"past_key_values must be an ESSMCache, got {type(cache).__name__}")
    num_layers = config.num_hidden_layers
    if len(cache.layers) != num_layers:
        raise ValueError(f"past_key_values has {len(cache.layers)} layers, but the model has {num_layers}")
    for name in _SHAPE_OF_GATED:
        made_for, own = getattr(cache.config, name), getattr(config, name)
        if made_for != own:
            raise ValueError(f"past_key_values is of a model of {name} {made_for}, but this one has {own}")
    if cache.batch_size not in (None, batch_size):
        raise ValueError(f"past_key_values holds {cache.batch_size} rows, but the input has {batch_size}")
