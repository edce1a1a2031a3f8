# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""The recurrent-state cache: for each layer the spectral features at the last step, an (N, D) state per row.

Its size depends on the budget and never on the context. The first forward pass stamps it: N states are kept from
then on, so that the budget may fall and rise again up to that one. Ask for more room when the cache is made, with
`ESSMCache(config, state_budget=K)`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from .spectral_budget import SpectralBudget


class ESSMCacheLayer(CacheLayerMixin):
    """State of one layer: named tensors whose first dimension is the batch. "features" (B, N, D) is always there."""

    is_compileable = False
    supports_early_init = False

    def __init__(self, state_budget: int | None = None):
        super().__init__()
        self.state_budget = state_budget
        self.tensors: dict[str, Tensor] = {}

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

    def batch_select_indices(self, indices: Tensor) -> None:
        self.apply(lambda t: t[indices.to(t.device)])

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.apply(lambda t: t.repeat_interleave(repeats, 0))

    def reset(self) -> None:
        self.tensors = {}
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


class ESSMCache(Cache):
    """Constant-size cache of an ES-SSM, for `past_key_values`.

    Args:
        config: the model's ESSMConfig.
        state_budget: the largest budget the cache must serve (an int, a list per layer, or a preset); by default the
            budget of the first forward pass.
    Raises:
        ValueError: state_budget out of range.
    """

    def __init__(self, config: Any, state_budget: SpectralBudget = None):
        if state_budget is None:
            budgets: tuple[int | None, ...] = (None,) * config.num_hidden_layers
        else:
            budgets = config.resolve_budget(state_budget).layers
        super().__init__(layers=[ESSMCacheLayer(budget) for budget in budgets])
        self._seen_tokens = 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._seen_tokens

    def advance(self, num_tokens: int) -> None:
        """Count tokens that every layer has read."""
        self._seen_tokens += num_tokens

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        return self._seen_tokens > 0

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


def check_room(layer: ESSMCacheLayer, budget: int, needed: int, layer_idx: int) -> None:
    """Raises ValueError if a stamped layer holds fewer states than the budget needs."""
    held = layer.num_states
    if held is not None and held < needed:
        raise ValueError(
            f"spectral_budget {budget} needs {needed} states in layer {layer_idx}, but this cache holds {held}: it was "
            f"made for a smaller budget. Make it with ESSMCache(config, state_budget={budget}) and pass it as "
            "past_key_values"
        )


def check_cache(cache: Any, num_layers: int, batch_size: int) -> None:
    """Raises ValueError for another kind of cache, or one of another model or batch."""
    if not hasattr(cache, "num_bytes"):  # not isinstance: model and cache may come from two copies of the code
        raise ValueError(f"past_key_values must be an ESSMCache, got {type(cache).__name__}")
    if len(cache.layers) != num_layers:
        raise ValueError(f"past_key_values has {len(cache.layers)} layers, but the model has {num_layers}")
    if cache.batch_size not in (None, batch_size):
        raise ValueError(f"past_key_values holds {cache.batch_size} rows, but the input has {batch_size}")
