# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""What a model with states keeps between calls, whatever the context's length.

A diagonal model keeps one complex state for each layer: (B, n), with a recurrence per channel (B, H, n). An elastic
state model keeps its latent (B, d), the objective's history, and the cache of a backbone that is not its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree
from transformers.cache_utils import Cache, DynamicCache
from transformers.modeling_outputs import BaseModelOutputWithPast

# What the library calls the cache of a call, in outputs and in `generate`: "past_key_values" until 5.24.
CACHE = "cache" if hasattr(BaseModelOutputWithPast, "cache") else "past_key_values"


def tree_map(function: Callable[..., Tensor], *trees: Any) -> Any:
    """A nest of the same form with function(tensors) for tensors; None stays None."""
    return None if trees[0] is None else pytree.tree_map(function, *trees)


class StateCache(DynamicCache):
    """For `past_key_values`: empty when it is new, updated in place by the model. To the library it is a dynamic cache.

    Attributes:
        states: tensors whose first dimension is B; none before the first update.
        history: a nest of such tensors, or None. backbone: another model's cache, or None.
        made_for: what a model must have in common with that which wrote here last, by name.
    """

    def __init__(self) -> None:
        Cache.__init__(self, layers=[])
        self.reset()

    def reset(self) -> None:
        self.states: list[Tensor] = []
        self.history: Any = None
        self.backbone: Any = None
        self.made_for: dict[str, Any] = {}
        self._seen_tokens = 0

    def update(  # type: ignore[override]
        self, states: Sequence[Tensor], num_tokens: int, made_for: dict[str, Any], history: Any = None
    ) -> None:
        """Take over what was computed last; tensors lose their graph."""
        self.states = [state.detach() for state in states]
        self.history = tree_map(Tensor.detach, history)
        self.made_for = self.made_for | made_for
        self._seen_tokens += num_tokens

    def __len__(self) -> int:
        return len(self.states)

    @property
    def is_linear(self) -> list[bool]:
        """Not as a linear attention's cache, which `generate` gives the whole text again."""
        return [False]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._seen_tokens

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        return self._seen_tokens > 0

    @property
    def num_bytes(self) -> int:
        """Bytes of states and history, all rows, and of the backbone's cache where it tells them."""
        own = sum(tensor.nbytes for tensor in pytree.tree_leaves([self.states, self.history]) if tensor is not None)
        return own + getattr(self.backbone, "num_bytes", 0)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Keep these rows (b,) int64, in this order."""
        self._apply(lambda tensor: tensor.index_select(0, beam_idx.to(tensor.device)))
        if self.backbone is not None:
            self.backbone.reorder_cache(beam_idx)

    batch_select_indices = reorder_cache

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._apply(lambda tensor: tensor.repeat_interleave(repeats, 0))
        if self.backbone is not None:
            self.backbone.batch_repeat_interleave(repeats)

    def _apply(self, function: Callable[[Tensor], Tensor]) -> None:
        self.states, self.history = list(map(function, self.states)), tree_map(function, self.history)

    def crop(self, *args: Any, **kwargs: Any) -> None:
        """Raises ValueError: a recurrent state cannot forget its last tokens."""
        raise ValueError("a recurrent state cannot be cropped: keep a copy.deepcopy to return to")
