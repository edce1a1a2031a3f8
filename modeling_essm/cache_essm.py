# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""The recurrent-state cache: for each layer the spectral features at the last step, an (N, D) state per row.

Its size depends on the budget and never on the context. The first forward pass stamps it: N states are kept from
then on, so that the budget may fall and rise again up to that one. Ask for more room when the cache is made, with
`ESSMCache(config, state_budget=K)`; give room back with `cache.shrink(K)`.

A server takes rows out with `cache.select` and puts rows together with `ESSMCache.merge`, whatever their budgets: each
row keeps its own stamp. `cache.save` and `ESSMCache.load` carry a conversation from one process to another.
"""

from __future__ import annotations

import dataclasses
import json
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

_FORMAT = "essm-cache-1"
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

    def select(self, rows: Sequence[int] | Tensor) -> ESSMCache:
        """A new cache of these rows, in this order; also to evict the others.

        Raises:
            ValueError: an empty cache, no rows, or rows out of range.
        """
        held = self._require_states("select rows of")
        indices = torch.as_tensor(rows, dtype=torch.int64).flatten().cpu()
        if len(indices) == 0 or not 0 <= int(indices.min()) <= int(indices.max()) < held:
            raise ValueError(f"rows must be integers in [0, {held - 1}], at least one, got {indices.tolist()}")
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
            ValueError: a bad budget. Layers that hold less already stay as they are.
        """
        budgets = self.config.resolve_budget(spectral_budget).layers
        operator = _operator(self.config)
        for layer, K in zip(self.layers, budgets):
            layer.state_budget = K
            layer.shrink(operator.num_states(K))
        return self

    def save(self, path: str | os.PathLike, model: Any) -> None:
        """Write all states to one safetensors file, atomically.

        Args:
            model: the ES-SSM that made them; the file remembers which it was.
        Raises:
            ValueError: an empty cache, or one of a model of another shape.
        """
        check_cache(self, model.config, self._require_states("save"))
        tensors = {
            f"{i}.{name}": tensor.contiguous()
            for i, layer in enumerate(self.layers)
            for name, tensor in layer.tensors.items()
        }
        record: dict[str, Any] = {"shape": self._shape(), "model": dataclasses.asdict(fingerprint(model))}
        record |= {"seen_tokens": self.get_seq_length(), "layers": [[x.state_budget, x.room] for x in self.layers]}
        path = Path(path)
        partial = path.with_name(f".partial-{path.name}")
        try:
            save_file(tensors, partial, metadata={"format": _FORMAT, "cache": json.dumps(record)})
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)

    @staticmethod
    def load(path: str | os.PathLike, model: Any) -> ESSMCache:
        """Read a saved cache, on the CPU.

        Args:
            model: the ES-SSM that will read on: the one that saved it, cast or truncated perhaps.
        Raises:
            FileNotFoundError: no such file. ValueError: not a cache, damaged, or of another model.
        """
        cache = ESSMCache(model.config)
        try:
            with safe_open(path, framework="pt") as file:
                metadata = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in list(file.keys())}
            if metadata.get("format") != _FORMAT:
                raise ValueError(f"{path} is not a cache of this version, {_FORMAT}, but {metadata.get('format')!r}")
            record = json.loads(metadata["cache"])
            shape, made_by = record["shape"], Fingerprint(**record["model"])
            layers, seen_tokens = record["layers"], record["seen_tokens"]
        except (SafetensorError, json.JSONDecodeError, KeyError, TypeError) as error:
            raise ValueError(f"{path} is truncated or corrupt ({error!r})") from error
        if shape != cache._shape():
            raise ValueError(f"{path} is of another model: {shape}, and this one has {cache._shape()}")
        if difference := made_by.difference(fingerprint(model)):
            raise ValueError(f"{path} is of another model: {difference}")
        for i, (layer, (state_budget, room)) in enumerate(zip(cache.layers, layers)):
            layer.state_budget, layer.room = state_budget, room
            layer.update(**{name.split(".")[1]: t for name, t in tensors.items() if name.startswith(f"{i}.")})
        cache._seen_tokens = seen_tokens
        return cache

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
        names = ("num_hidden_layers", "hidden_size", "filter_length", "ar_order")
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
    if cache.batch_size not in (None, batch_size):
        raise ValueError(f"past_key_values holds {cache.batch_size} rows, but the input has {batch_size}")
    features = cache.layers[0].tensors.get("features")
    if features is not None and features.shape[2] != config.hidden_size:
        raise ValueError(
            f"past_key_values is of a model of hidden_size {features.shape[2]}, but this one has {config.hidden_size}"
        )
