# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""What a model keeps between calls: the states of each spectral layer, and the keys and values of each attention layer.

The size of a spectral state depends on the budget and never on the context. The first forward pass stamps the cache: N
states are kept from then on, so the budget may fall and rise again up to that one. `ESSMCache(config, state_budget=K)`
makes more room, and `cache.shrink(K)` gives room back. A server takes rows out with `cache.select` and puts rows
together with `ESSMCache.merge`, whatever their budgets: each row keeps its own stamp.

Wherever states leave a cache, to a compiled step, an exported program or a file, they are one dict of named tensors:
"{layer}.{name}", layers in order, whose first dimension is the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache
from transformers.modeling_outputs import BaseModelOutputWithPast

from .spectral_budget import ResolvedBudget, SpectralBudget, spectral_layers
from .spectral_ops import SpectralOperator

# What the library calls the cache of a call, in outputs and in `generate`: "past_key_values" until 5.24.
CACHE = "cache" if hasattr(BaseModelOutputWithPast, "cache") else "past_key_values"
# What the meaning of states depends on; fields that a block lacks, or that only attention has, are None.
_SHAPE = (
    *("num_hidden_layers", "hidden_size", "block", "head_size", "memory_key_size", "memory_value_size"),
    *("conv_kernel_size", "filter_length", "layer_types", "num_key_value_heads", "head_dim", "sliding_window"),
    *("rope_parameters", "state_margin"),
)


def state_sizes(config: Any, budget: int) -> dict[str, tuple[int, int]]:
    """Shapes, without the batch, of a spectral layer's states that serve budgets up to K; smaller ones are prefixes."""
    K, N = budget, operator_of(config).num_states(budget)
    if config.block == "paper":
        return {"features": (N, config.hidden_size)}
    d, m, e, p = config.head_size, config.memory_key_size, config.memory_value_size, config.conv_kernel_size - 1
    sizes = {"features": (N, K * (d - e)), "convolution": (p, K * (d + 2 * m))}
    return sizes | {"memory": (K * m, K * e)} if m else sizes


class ESSMCacheLayer(CacheLayerMixin):
    """States of a spectral layer, as `state_sizes` names them: (B, ..) each.

    Attributes:
        state_budget: the budget to make room for, or None. filled: budgets that each row serves, where rows differ.
    """

    supports_early_init = False

    def __init__(self, config: Any, state_budget: int | None = None):
        super().__init__()
        self.config, self.state_budget = config, state_budget
        self.tensors: dict[str, Tensor] = {}
        self.filled: list[int] | None = None

    @property
    def room(self) -> int | None:
        """The largest budget that the states serve; None before the first update."""
        if not self.tensors:
            return None
        held, capacity = self.tensors["features"].shape[1:], self.config.num_spectral_channels
        return next(K for K in range(capacity, 0, -1) if state_sizes(self.config, K)["features"] == held)

    @property
    def batch_size(self) -> int | None:
        return next(iter(self.tensors.values())).shape[0] if self.tensors else None

    def update(self, **tensors: Tensor) -> None:  # type: ignore[override]
        self.tensors = dict(zip(tensors, map(Tensor.detach, tensors.values())))
        self.is_initialized = True

    def apply(self, function: Callable[[Tensor], Tensor]) -> None:
        """Replace every tensor by function(tensor)."""
        if self.tensors:
            self.update(**{name: function(tensor) for name, tensor in self.tensors.items()})

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.apply(lambda t: t.index_select(0, beam_idx.to(t.device)))
        if self.filled is not None:
            self.filled = [self.filled[row] for row in beam_idx.tolist()]

    batch_select_indices = reorder_cache

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.reorder_cache(torch.arange(self.batch_size or 0).repeat_interleave(repeats))

    def take(self, other: ESSMCacheLayer, rows: Tensor) -> None:
        """Become these rows of another layer, and no larger than they need."""
        self.update(**other.tensors)
        self.filled = other.filled
        self.batch_select_indices(rows)
        if self.filled is not None:
            self.shrink(max(self.filled))

    def join(self, parts: Sequence[Any]) -> None:
        """Become the rows of all parts, on the first one's device."""
        filled = [K for part in parts for K in part.filled or [part.room] * part.batch_size]
        device = parts[0].tensors["features"].device

        def widened(name: str, size: tuple[int, int]) -> Tensor:
            tensors = [part.tensors[name].to(device) for part in parts]
            return torch.cat([pad(t, (0, size[1] - t.shape[2], 0, size[0] - t.shape[1])) for t in tensors])

        sizes = state_sizes(self.config, max(part.room for part in parts))
        self.update(**{name: widened(name, size) for name, size in sizes.items()})
        self.filled = None if min(filled) == max(filled) else filled

    def shrink(self, budget: int) -> None:
        """Keep what budgets up to K read only, and free the rest."""
        if self.tensors:
            sizes = state_sizes(self.config, budget)
            self.update(**{name: _compact(self.tensors[name][:, :a, :b]) for name, (a, b) in sizes.items()})
        if self.filled is not None:
            self.filled = [min(held, budget) for held in self.filled]
            self.filled = None if min(self.filled) == max(self.filled) else self.filled

    def reset(self) -> None:
        self.tensors, self.filled = {}, None
        self.is_initialized = False

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None: ...

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
        if not self.tensors:
            super().update(**{name: tensor.clone() for name, tensor in tensors.items()})
            if not torch.compiler.is_compiling():
                for tensor in self.tensors.values():
                    torch._dynamo.mark_static_address(tensor)
            return
        for name, tensor in tensors.items():
            held = self.tensors[name]
            if held.shape == tensor.shape and held.device == tensor.device:
                held.copy_(tensor.detach())
            else:  # other rows or another device
                self.tensors[name] = tensor.detach().clone()


class ESSMAttentionCacheLayer(ESSMCacheLayer):
    """Rotated "keys" and "values" (B, H, T, d) of an attention layer, and "lengths" (B,), tokens read by each row.

    Rows end together: before the keys of a row that has read fewer than T tokens stand others, which mean nothing.
    """

    is_sliding = False  # to the library: masks and windows are made by attention_essm
    _ragged: bool | None = None

    def update(self, **tensors: Tensor) -> None:  # type: ignore[override]
        super().update(**tensors)
        self._ragged = None

    @property
    def is_ragged(self) -> bool:
        """Whether there may be such rows."""
        if self._ragged is None:
            self._ragged = bool((self.tensors["lengths"] < self.tensors["keys"].shape[2]).any())
        return self._ragged

    def extend(self, keys: Tensor, values: Tensor, read: Tensor | None, window: int | None) -> tuple[Tensor, Tensor]:
        """All keys and values that a call of L positions attends to: (B, H, T, d) those held, then (B, H, L, d) new.

        Args:
            read: (B,) int64, how many of the new ones are kept of each row, the first; None for all.
            window: positions that a query sees, its own included; None for all.
        """
        B, _, L, _ = keys.shape
        ragged, lengths = False, torch.zeros(B, dtype=torch.int64, device=keys.device)
        if self.tensors:
            ragged = self.is_ragged
            keys = torch.cat([self.tensors["keys"].to(keys), keys], 2)
            values = torch.cat([self.tensors["values"].to(values), values], 2)
            lengths = self.tensors["lengths"].to(keys.device)
        T = most = keys.shape[2]
        held = keys, values
        if read is None:
            lengths = lengths + L
        else:
            read = read.to(keys.device)
            lengths = lengths + read
            source = torch.arange(T, device=keys.device) - (L - read)[:, None]  # below 0 any position will do
            source = source.clamp(min=0)[:, None, :, None].expand_as(keys)
            held = keys.gather(2, source), values.gather(2, source)
            most = int(lengths.max()) if B else 0
        if window is not None:
            most = min(most, window - 1)
        if most < T:
            held = _compact(held[0][:, :, T - most :]), _compact(held[1][:, :, T - most :])
        self.update(keys=held[0], values=held[1], lengths=lengths)
        self._ragged = None if read is not None else ragged
        return keys, values

    def take(self, other: ESSMCacheLayer, rows: Tensor) -> None:
        super().take(other, rows)
        start = max(0, self.tensors["keys"].shape[2] - int(self.tensors["lengths"].max()))
        cut = {name: _compact(self.tensors[name][:, :, start:]) for name in ("keys", "values")}
        self.update(**(self.tensors | cut))

    def join(self, parts: Sequence[Any]) -> None:
        T, device = max(part.tensors["keys"].shape[2] for part in parts), parts[0].tensors["keys"].device

        def widened(t: Tensor) -> Tensor:
            return (t if t.ndim == 1 else pad(t, (0, 0, T - t.shape[2], 0))).to(device)

        names = parts[0].tensors
        self.update(**{name: torch.cat([widened(part.tensors[name]) for part in parts]) for name in names})

    def shrink(self, budget: int) -> None: ...


def _compact(part: Tensor) -> Tensor:
    """A copy laid out by its own shape: a plain clone keeps, at a size of 1, the stride of what it was cut from."""
    return part.clone(memory_format=torch.contiguous_format)


class ElasticCache(Cache):
    """What the two kinds of cache share; arguments and errors as of `ESSMCache`."""

    _layer_class: type[ESSMCacheLayer] = ESSMCacheLayer

    def __init__(self, config: Any, state_budget: SpectralBudget = None):
        spectral = spectral_layers(config)
        budgets = None if state_budget is None else config.resolve_budget(state_budget).layers
        room = dict(zip(spectral, budgets or (None,) * len(spectral)))
        self.config = config
        every = range(config.num_hidden_layers)
        layers = [self._layer_class(config, room[i]) if i in room else self._attention(i) for i in every]
        Cache.__init__(self, layers=layers)
        self._seen_tokens: int | Tensor = 0

    def _attention(self, layer: int) -> ESSMCacheLayer:
        """The cache of an attention layer."""
        return ESSMAttentionCacheLayer(self.config)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return int(self._seen_tokens)

    def advance(self, num_tokens: int) -> None:
        """Count tokens that every layer has read."""
        self._seen_tokens += num_tokens

    @property
    def states(self) -> dict[str, Tensor]:
        """All states by name; none before the first update."""
        return {f"{i}.{name}": tensor for i, layer in enumerate(self.layers) for name, tensor in layer.tensors.items()}

    def set_states(self, states: Mapping[str, Tensor]) -> None:
        """Take over states of the form of `states`, those of every layer."""
        for i, tensors in enumerate(_by_layer(states, len(self.layers))):
            self.layers[i].update(**tensors)

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        return self.get_seq_length() > 0

    @property
    def num_bytes(self) -> int:
        """Bytes held by all layers, all rows."""
        return sum(t.nbytes for t in self.states.values())

    @property
    def batch_size(self) -> int | None:
        return self.layers[0].batch_size

    def reset(self) -> None:
        super().reset()
        self._seen_tokens = 0

    def crop(self, *args: Any, **kwargs: Any) -> None:
        """Raises ValueError: a recurrent state cannot forget its last tokens."""
        raise ValueError(
            "an ESSMCache cannot be cropped: a recurrent state cannot forget tokens. Keep a copy.deepcopy of the cache "
            "to return to"
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
        held = self.require_states("select rows of")
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
            new.take(old, indices)
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
            cache.require_states("merge")
            if (other := model_shape(cache.config)) != (shape := model_shape(first.config)):
                raise ValueError(f"caches of different models cannot be merged: {shape} and {other}")
        widest = max(caches, key=lambda cache: cache.config.num_spectral_channels)  # others are of truncated models
        merged = widest._like(max(cache.get_seq_length() for cache in caches))
        for i, new in enumerate(merged.layers):
            new.join([cache.layers[i] for cache in caches])
        return merged

    def shrink(self, spectral_budget: SpectralBudget) -> ESSMCache:
        """Give back the states that a smaller budget does not read; larger ones are refused from now on. This cache.

        An empty cache without a `state_budget` has nothing to give back: the first pass decides.

        With a memory, what a smaller budget then writes differs: a token is written to all keys that there is room for.

        Raises:
            ValueError: a bad budget. Layers of less room already, held or asked for, stay as they are.
        """
        budgets = self.config.resolve_budget(spectral_budget).layers
        for i, K in zip(spectral_layers(self.config), budgets):
            layer = self.layers[i]
            if layer.state_budget is not None:
                layer.state_budget = min(layer.state_budget, K)
            layer.shrink(K)
        return self

    def require_states(self, what: str) -> int:
        """The number of rows. Raises ValueError for an empty cache."""
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


class ESSMCache(ElasticCache, DynamicCache):
    """Cache of an ES-SSM, constant in size but for attention; to the library a dynamic one, never compiled by itself.

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
    size; `select`, `merge` and `load_cache` give ordinary caches. Arguments and errors as of `ESSMCache`; ValueError
    for a hybrid, whose keys grow with the text.
    """

    _layer_class = ESSMStaticCacheLayer

    def _attention(self, layer: int) -> ESSMCacheLayer:
        raise ValueError(
            f"a static cache holds states of constant size, but layer {layer} is {self.config.layer_types[layer]!r}, "
            'whose keys grow: leave out cache_implementation="static"'
        )

    def advance(self, num_tokens: int) -> None:
        if not isinstance(self._seen_tokens, Tensor):  # a compiled step must not make a constant of it
            self._seen_tokens = torch.tensor(self._seen_tokens, device=self.layers[0].tensors["features"].device)
            if not torch.compiler.is_compiling():
                torch._dynamo.mark_static_address(self._seen_tokens)
        super().advance(num_tokens)


def _by_layer(states: Mapping[str, Tensor], num_layers: int) -> list[dict[str, Tensor]]:
    layers: list[dict[str, Tensor]] = [{} for _ in range(num_layers)]
    for name, tensor in states.items():
        layer, _, kind = name.partition(".")
        layers[int(layer)][kind] = tensor
    return layers


def operator_of(config: Any) -> SpectralOperator:
    """What all layers of a model compute Eq. (7) with."""
    return SpectralOperator(config.filter_length, config.state_margin, config.chunk_size)


def model_shape(config: Any) -> dict[str, Any]:
    """What two models must share for one to read the other's states."""
    return {name: getattr(config, name, None) for name in _SHAPE}


def the_cache(cache: Any, past_key_values: Any) -> Any:
    """The cache of a call under either of its names. Raises ValueError if it has both."""
    if cache is not None and past_key_values is not None:
        raise ValueError("give past_key_values or cache, two names of one argument, not both")
    return past_key_values if cache is None else cache


def check_cache(cache: Any, config: Any, batch_size: int) -> None:
    """Raises ValueError for another kind of cache, or one of a model of another shape or batch."""
    if not hasattr(type(cache), "set_states"):  # not isinstance: model and cache may come from two copies of the code
        raise ValueError(f"past_key_values must be an ESSMCache, got {type(cache).__name__}")
    if cache.config is not config and (made_for := model_shape(cache.config)) != (here := model_shape(config)):
        name = next(name for name in _SHAPE if made_for[name] != here[name])
        raise ValueError(f"past_key_values is of a model of {name} {made_for[name]}, but this one has {here[name]}")
    if cache.batch_size not in (None, batch_size):
        raise ValueError(f"past_key_values holds {cache.batch_size} rows, but the input has {batch_size}")
    if config.block != "paper" and cache.config is not config:  # a paper's state needs no weights of its channels
        for i, capacity in zip(spectral_layers(config), config.capacities):
            room = max(cache.layers[i].room or 0, cache.layers[i].state_budget or 0)
            if room > capacity:
                raise ValueError(
                    f"past_key_values keeps {room} channels in layer {i}, of which this model holds {capacity}: call "
                    f"past_key_values.shrink({[*config.capacities]})"
                )


def check_room(cache: ESSMCache, layers: Sequence[int], budgets: ResolvedBudget) -> None:
    """Raises ValueError if the states of a spectral layer, or of a row there, do not serve its budget."""
    checked = None
    for i, budget in zip(layers, budgets.layers):
        layer = cache.layers[i]
        if (held := layer.tensors.get("features")) is None:
            continue
        if layer.filled is None:
            if checked == (budget, held.shape):
                continue
            checked = (budget, held.shape)
            if state_sizes(cache.config, budget)["features"] == held.shape[1:]:  # room for just that
                continue
        serves, asked = [layer.room], [budget]
        if layer.filled is not None:
            serves = layer.filled
            asked = [min(K, budget) for K in budgets.of_rows or [budget] * len(serves)]
        for row, (room, K) in enumerate(zip(serves, asked)):
            if room < K:
                where = f"layer {i}" if layer.filled is None else f"row {row} of layer {i}"
                needed, states = map(operator_of(cache.config).num_states, (K, room))
                raise ValueError(
                    f"spectral_budget {K} needs {needed} states in {where}, but this cache holds {states}: it was made "
                    f"for budgets up to {room}. Make it with ESSMCache(config, state_budget={K}) and pass it as "
                    "past_key_values"
                )


def stamp_rows(cache: ESSMCache, layers: Sequence[int], budgets: ResolvedBudget) -> None:
    """Rows of a new memory without a room serve the budgets that they begin with, since each is written at its own."""
    for i, budget in zip(layers, budgets.layers):
        layer = cache.layers[i]
        if cache.config.memory_key_size and layer.state_budget is None and not layer.tensors:
            layer.filled = None if budgets.of_rows is None else [min(K, budget) for K in budgets.of_rows]
