# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""The recurrent-state cache: for each layer the spectral features at the last step, an (N, D) state per row.

Its size depends on the budget and never on the context; only the attention layers of a hybrid hold keys and values,
which grow. The first forward pass stamps it: N states are kept from then on, so that the budget may fall and rise again
up to that one. Ask for more room when the cache is made, with `ESSMCache(config, state_budget=K)`; give room back with
`cache.shrink(K)`.

A server takes rows out with `cache.select` and puts rows together with `ESSMCache.merge`, whatever their budgets: each
row keeps its own stamp.

Wherever states leave a cache, to a compiled step, an exported program or a file, they are one dict of named tensors:
"{layer}.{name}" of shape (B, .., D), layers in order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache

from .cache_layers import ESSMAttentionCacheLayer, ESSMCacheLayer, ESSMStaticCacheLayer
from .spectral_budget import SpectralBudget, is_hybrid, spectral_layers
from .spectral_ops import SpectralOperator

# What states mean depends on these alone; in files of the paper's block only the first are named.
_SHAPE = ("num_hidden_layers", "hidden_size", "filter_length", "ar_order")
_SHAPE_OF_GATED = (*_SHAPE, "inner_size", "conv_kernel_size")
_SHAPE_OF_HYBRID = ("layer_types", "num_key_value_heads", "head_dim", "sliding_window", "rope_parameters")
_SHAPE_OF_AR_STU = {"ar_negative_filters": True, "ar_feature_shift": 0}  # named where they differ from what they were
ATTENTION_STATES = ("keys", "values", "lengths")  # (B, H, T, d) twice, and (B,) int64


def recent_inputs(config: Any) -> dict[str, int]:
    """Tensors (B, p, D) of a layer that hold the last p inputs or outputs, and p."""
    of_feedback = {"inputs": config.ar_order, "outputs": config.ar_order} if config.ar_order else {}
    return of_feedback | ({"convolution": config.conv_kernel_size - 1} if config.conv_kernel_size else {})


def state_names(config: Any) -> tuple[str, ...]:
    """Names of a layer's tensors, in the order in which the mixer makes them."""
    negative = config.ar_order and getattr(config, "ar_negative_filters", True)
    return ("features", *(("negative",) if negative else ()), *recent_inputs(config))


class ElasticCache(Cache):
    """What the two kinds of cache share; arguments and errors as of `ESSMCache`."""

    _layer_class: type[ESSMCacheLayer] = ESSMCacheLayer

    def __init__(self, config: Any, state_budget: SpectralBudget = None):
        spectral = spectral_layers(config)
        budgets = None if state_budget is None else config.resolve_budget(state_budget).layers
        room = dict(zip(spectral, budgets or (None,) * len(spectral)))
        self.config = config
        kinds = range(config.num_hidden_layers)
        Cache.__init__(self, layers=[self._layer_class(room[i]) if i in room else self._attention(i) for i in kinds])
        self._seen_tokens: int | Tensor = 0

    def _attention(self, layer: int) -> ESSMCacheLayer:
        """The cache of an attention layer."""
        return ESSMAttentionCacheLayer()

    @property
    def spectral_layers(self) -> list[ESSMCacheLayer]:
        return [self.layers[i] for i in spectral_layers(self.config)]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return int(self._seen_tokens)

    def advance(self, num_tokens: int) -> None:
        """Count tokens that every layer has read."""
        self._seen_tokens += num_tokens

    @property
    def states(self) -> dict[str, Tensor]:
        """All states by name; none before the first update."""
        return states_of(self.layers)

    def set_states(self, states: Mapping[str, Tensor]) -> None:
        """Take over states of the form of `states`, those of every layer."""
        for i, tensors in enumerate(_by_layer(states, len(self.layers))):
            self.layers[i].update(**tensors)

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        return self.get_seq_length() > 0

    @property
    def num_bytes(self) -> int:
        """Bytes held by all layers, all rows."""
        return sum(t.numel() * t.element_size() for t in self.states.values())

    @property
    def batch_size(self) -> int | None:
        return self.layers[0].batch_size

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
            if cache.model_shape() != first.model_shape():
                raise ValueError(
                    f"caches of different models cannot be merged: {first.model_shape()} and {cache.model_shape()}"
                )
        merged = first._like(max(cache.get_seq_length() for cache in caches))
        for i, new in enumerate(merged.layers):
            new.join([cache.layers[i] for cache in caches])
        return merged

    def shrink(self, spectral_budget: SpectralBudget) -> ESSMCache:
        """Give back the states that a smaller budget does not read; larger ones are refused from now on. This cache.

        Raises:
            ValueError: a bad budget. Layers of less room already, held or asked for, stay as they are.
        """
        budgets = self.config.resolve_budget(spectral_budget).layers
        operator = operator_of(self.config)
        for layer, K in zip(self.spectral_layers, budgets):
            if layer.state_budget is not None:
                layer.state_budget = min(layer.state_budget, K)
            layer.shrink(operator.num_states(K))
        return self

    def require_states(self, what: str) -> int:
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

    def model_shape(self) -> dict[str, Any]:
        """What two models must share for one to read the other's states."""
        names = _SHAPE if self.config.block == "paper" else _SHAPE_OF_GATED
        shape = {name: getattr(self.config, name) for name in names}
        if is_hybrid(self.config):
            shape |= {name: getattr(self.config, name) for name in _SHAPE_OF_HYBRID}
        others = {name: getattr(self.config, name, default) for name, default in _SHAPE_OF_AR_STU.items()}
        return shape | {name: value for name, value in others.items() if value != _SHAPE_OF_AR_STU[name]}


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
        if not isinstance(self._seen_tokens, Tensor):  # of which a compiled step makes no constant
            self._seen_tokens = torch.tensor(self._seen_tokens, device=self.layers[0].tensors["features"].device)
            torch._dynamo.mark_static_address(self._seen_tokens)
        super().advance(num_tokens)


def states_of(layers: Sequence[ESSMCacheLayer]) -> dict[str, Tensor]:
    """The states of all layers as one dict, see the module."""
    return {f"{i}.{name}": tensor for i, layer in enumerate(layers) for name, tensor in layer.tensors.items()}


def layers_with(states: Mapping[str, Tensor], budgets: Sequence[int], config: Any) -> list[ESSMCacheLayer]:
    """Layers that hold these states, for a call at these budgets."""
    room = dict(zip(spectral_layers(config), budgets))
    kinds = range(config.num_hidden_layers)
    layers = [ESSMCacheLayer(room[i]) if i in room else ESSMAttentionCacheLayer() for i in kinds]
    for layer, tensors in zip(layers, _by_layer(states, len(layers))):
        if tensors:  # an attention layer begins without
            layer.update(**tensors)
    return layers


def _by_layer(states: Mapping[str, Tensor], num_layers: int) -> list[dict[str, Tensor]]:
    layers: list[dict[str, Tensor]] = [{} for _ in range(num_layers)]
    for name, tensor in states.items():
        layer, _, kind = name.partition(".")
        layers[int(layer)][kind] = tensor
    return layers


def operator_of(config: Any) -> SpectralOperator:
    """What all layers of a model compute Eq. (7) with."""
    return SpectralOperator(config.filter_length, config.state_margin, config.chunk_size)


def check_room(cache: ESSMCache, budgets: Sequence[int], rows: Tensor | None, operator: SpectralOperator) -> None:
    """Raises ValueError if a stamped layer, or one of its rows, holds fewer states than its budget needs.

    Args:
        budgets: K of each layer. rows: (B,) K of each row, or None.
    """
    differ = any(layer.filled is not None for layer in cache.layers)
    budget_of_row = rows.tolist() if rows is not None and differ else None
    for i, budget in zip(spectral_layers(cache.config), budgets):
        layer = cache.layers[i]
        filled, asked = [layer.num_states], [budget]
        if layer.filled is not None:
            filled = layer.filled
            asked = [min(K, budget) for K in budget_of_row or [budget] * len(filled)]
        for row, (states, K) in enumerate(zip(filled, asked)):
            if states is not None and states < operator.num_states(K):
                where = f"layer {i}" if layer.filled is None else f"row {row} of layer {i}"
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
    compared = _SHAPE_OF_GATED + (_SHAPE_OF_HYBRID if is_hybrid(config) else ())
    for name, default in (dict.fromkeys(compared) | _SHAPE_OF_AR_STU).items():
        made_for, here = getattr(cache.config, name, default), getattr(config, name, default)
        if made_for != here:
            raise ValueError(f"past_key_values is of a model of {name} {made_for}, but this one has {here}")
    if cache.batch_size not in (None, batch_size):
        raise ValueError(f"past_key_values holds {cache.batch_size} rows, but the input has {batch_size}")
