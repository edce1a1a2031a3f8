# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""What a diagonal model keeps between calls: one complex state per layer and row, whatever the context's length.

The state of a layer is (B, n), of S4D (B, H, n), complex64 (complex128 in fp64), empty where a layer has no modes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache


class DiagonalSSMCacheLayer(CacheLayerMixin):
    """The state of one layer, None before the first update."""

    is_compileable = False
    supports_early_init = False

    def __init__(self) -> None:
        super().__init__()
        self.state: Tensor | None = None

    def update(self, state: Tensor) -> None:  # type: ignore[override]
        self.state = state.detach()
        self.is_initialized = True

    def apply(self, function: Callable[[Tensor], Tensor]) -> None:
        """Replace the state by function(state)."""
        if self.state is not None:
            self.update(function(self.state))

    @property
    def batch_size(self) -> int | None:
        return None if self.state is None else self.state.shape[0]

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.apply(lambda state: state.index_select(0, beam_idx.to(state.device)))

    batch_select_indices = reorder_cache

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.apply(lambda state: state.repeat_interleave(repeats, 0))

    def reset(self) -> None:
        self.state, self.is_initialized = None, False

    def offload(self) -> None:
        self.apply(lambda state: state.to("cpu"))

    def prefetch(self) -> None: ...  # the mixer moves a state to its own device when it reads it

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None: ...

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def get_seq_length(self) -> int:
        return 0  # a state has no sequence dimension; the cache counts tokens

    def get_max_length(self) -> int:
        return -1


class DiagonalSSMCache(DynamicCache):
    """Constant-size cache of a diagonal model, for `past_key_values`: to the library a dynamic one.

    Args:
        config: the model's DiagonalSSMConfig.
    """

    def __init__(self, config: Any):
        Cache.__init__(self, layers=[DiagonalSSMCacheLayer() for _ in range(config.num_hidden_layers)])
        self.state_sizes = list(config.state_sizes)
        self._seen_tokens = 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._seen_tokens

    def advance(self, num_tokens: int) -> None:
        """Count tokens that every layer has read."""
        self._seen_tokens += num_tokens

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        return self._seen_tokens > 0

    @property
    def states(self) -> list[Tensor]:
        """The states of all layers; none before the first update."""
        return [layer.state for layer in self.layers if layer.state is not None]

    @property
    def batch_size(self) -> int | None:
        return self.layers[0].batch_size

    @property
    def num_bytes(self) -> int:
        """Bytes held by all layers, all rows."""
        return sum(state.numel() * state.element_size() for state in self.states)

    def reset(self) -> None:
        super().reset()
        self._seen_tokens = 0

    def crop(self, max_length: int) -> None:
        """Raises ValueError: a recurrent state cannot forget its last tokens."""
        raise ValueError(
            f"DiagonalSSMCache cannot be cropped to {max_length}: a recurrent state cannot forget tokens. "
            "Keep a copy.deepcopy of the cache to return to."
        )


__all__ = ["DiagonalSSMCache"]
