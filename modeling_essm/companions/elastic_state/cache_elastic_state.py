# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""What an elastic state model keeps between calls: the committed latent, the objective's history, a backbone's cache.

The latent is (B, d); the history a nest of tensors whose first dimension is B, or None; the cache of a backbone is its
own, None without one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .objectives_elastic_state import tree_map


class ElasticStateCache:
    """For `past_key_values`; empty when it is new, updated in place by the model."""

    is_compileable = False

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.latent: Tensor | None = None
        self.history: Any = None
        self.backbone_cache: Any = None
        self._seen_tokens = 0

    def update(self, latent: Tensor, history: Any, num_tokens: int) -> None:
        """Take over what was committed last; tensors lose their graph."""
        self.latent = latent.detach()
        self.history = tree_map(lambda tensor: tensor.detach(), history)
        self._seen_tokens += num_tokens

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._seen_tokens

    @property
    def batch_size(self) -> int | None:
        return None if self.latent is None else len(self.latent)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Keep these rows (b,) int64, in this order."""
        if self.latent is None:
            return

        def take(tensor: Tensor) -> Tensor:
            return tensor.index_select(0, beam_idx.to(tensor.device))

        self.latent, self.history = take(self.latent), tree_map(take, self.history)
        if self.backbone_cache is not None:
            self.backbone_cache.reorder_cache(beam_idx)

    batch_select_indices = reorder_cache

    @property
    def num_bytes(self) -> int:
        """Bytes of latent and history, all rows, and of the backbone's cache where it tells them."""
        tensors = [t for t in pytree.tree_leaves([self.latent, self.history]) if isinstance(t, torch.Tensor)]
        own = sum(t.numel() * t.element_size() for t in tensors)
        return own + getattr(self.backbone_cache, "num_bytes", 0)

    def crop(self, max_length: int) -> None:
        """Raises ValueError: a recurrent state cannot forget its last tokens."""
        raise ValueError(
            f"ElasticStateCache cannot be cropped to {max_length}: a recurrent state cannot forget tokens. "
            "Keep a copy.deepcopy of the cache to return to."
        )


__all__ = ["ElasticStateCache"]
