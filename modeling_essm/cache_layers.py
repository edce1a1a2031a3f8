# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""What a layer keeps between calls: spectral states of a constant size, or the keys and values of attention."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

PER_STATE = ("features", "negative")  # tensors (B, N, D), of which a smaller budget reads the first rows


class ESSMCacheLayer(CacheLayerMixin):
    """State of one layer: named tensors whose first dimension is the batch. "features" (B, N, D) is always there.

    Attributes:
        state_budget: the budget to make room for, or None. filled: states that each row has, where rows differ.
    """

    is_compileable = False
    supports_early_init = False

    def __init__(self, state_budget: int | None = None):
        super().__init__()
        self.state_budget = state_budget
        self.tensors: dict[str, Tensor] = {}
        self.filled: list[int] | None = None

    @property
    def num_states(self) -> int | None:
        """N, the stamp; None before the first update."""
        return self.tensors["features"].shape[1] if self.tensors else None

    def update(self, **tensors: Tensor) -> None:  # type: ignore[override]
        self.tensors = {name: tensor.detach() for name, tensor in tensors.items()}
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

    @property
    def batch_size(self) -> int | None:
        return next(iter(self.tensors.values())).shape[0] if self.tensors else None

    def take(self, other: ESSMCacheLayer, rows: Tensor) -> None:
        """Become these rows of another layer, and no larger than they need."""
        self.update(**other.tensors)
        self.filled = other.filled
        self.batch_select_indices(rows)
        if self.filled is not None:
            self.shrink(max(self.filled))

    def join(self, parts: Sequence[Any]) -> None:
        """Become the rows of all parts, on the first one's device."""
        filled = [n for part in parts for n in part.filled or [part.num_states] * len(part.tensors["features"])]
        N, device = max(part.num_states for part in parts), parts[0].tensors["features"].device
        tensors = {name: [part.tensors[name].to(device) for part in parts] for name in parts[0].tensors}
        self.update(**{name: torch.cat([_widened(name, t, N) for t in rows]) for name, rows in tensors.items()})
        self.filled = None if min(filled) == N else filled

    def shrink(self, num_states: int) -> None:
        """Keep the first states only, and free the others."""
        for name in self.tensors.keys() & PER_STATE:
            self.tensors[name] = _compact(self.tensors[name][:, :num_states])
        if self.filled is not None:
            self.filled = [min(held, num_states) for held in self.filled]
            self.filled = None if min(self.filled) == self.num_states else self.filled

    def reset(self) -> None:
        self.tensors, self.filled = {}, None
        self.is_initialized = False

    def offload(self) -> None:
        self.apply(lambda t: t.to("cpu"))

    def prefetch(self) -> None: ...  # the mixer moves states to its own device when it reads them

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None: ...

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def get_seq_length(self) -> int:
        return 0  # a state has no sequence dimension; ESSMCache counts tokens

    def get_max_length(self) -> int:
        return -1


class ESSMAttentionCacheLayer(ESSMCacheLayer):
    """Rotated "keys" and "values" (B, H, T, d) of an attention layer, and "lengths" (B,), tokens read by each row.

    Rows end together: before the keys of a row that has read fewer than T tokens stand others, which mean nothing.
    Attributes:
        is_ragged: whether there may be such rows.
    """

    keys: Any
    values: Any
    is_sliding = False  # to the library: masks and windows are made by attention_essm
    _ragged: bool | None = None

    def update(self, **tensors: Tensor) -> None:  # type: ignore[override]
        super().update(**tensors)
        self.keys, self.values, self._ragged = self.tensors["keys"], self.tensors["values"], None

    @property
    def is_ragged(self) -> bool:
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
            past = {name: tensor.to(keys.device) for name, tensor in self.tensors.items()}
            keys, values = torch.cat([past["keys"], keys], 2), torch.cat([past["values"], values], 2)
            lengths = past["lengths"]
        T = most = keys.shape[2]
        held = keys, values
        if read is None:
            lengths = lengths + L
        else:
            read = read.to(keys.device)
            lengths = lengths + read
            source = torch.arange(T, device=keys.device) - (L - read)[:, None]
            held = ends_together(keys, source), ends_together(values, source)
            most = int(lengths.max()) if B else 0
        if window is not None:
            most = min(most, window - 1)
        if most < T:
            held = _compact(held[0][:, :, T - most :]), _compact(held[1][:, :, T - most :])
        self.update(keys=held[0], values=held[1], lengths=lengths)
        self._ragged = None if read is not None else ragged
        return keys, values

    def reset(self) -> None:
        super().reset()
        self.keys = self.values = None

    def take(self, other: ESSMCacheLayer, rows: Tensor) -> None:
        super().take(other, rows)
        start = max(0, self.tensors["keys"].shape[2] - int(self.tensors["lengths"].max()))
        cut = {name: _compact(self.tensors[name][:, :, start:]) for name in ("keys", "values")}
        self.update(**(self.tensors | cut))

    def join(self, parts: Sequence[Any]) -> None:
        device = parts[0].tensors["keys"].device
        self.update(**joined_rows([{name: t.to(device) for name, t in part.tensors.items()} for part in parts]))

    def shrink(self, num_states: int) -> None: ...


def ends_together(x: Tensor, source: Tensor) -> Tensor:
    """(B, H, T, d) with the position that source (B, T) names at each place; below 0 it does not matter which."""
    return x.gather(2, source.clamp(min=0)[:, None, :, None].expand_as(x))


def joined_rows(parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The rows of all parts, each the tensors of an attention layer; in front of shorter ones stand zeros."""
    T = max(part["keys"].shape[2] for part in parts)
    padded = [
        {name: t if t.ndim == 1 else torch.nn.functional.pad(t, (0, 0, T - t.shape[2], 0)) for name, t in part.items()}
        for part in parts
    ]
    return {name: torch.cat([part[name] for part in padded]) for name in parts[0]}


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


def _compact(part: Tensor) -> Tensor:
    """A copy laid out by its own shape: a plain clone keeps, at a size of 1, the stride of what it was cut from."""
    return part.clone(memory_format=torch.contiguous_format)


def _widened(name: str, tensor: Tensor, num_states: int) -> Tensor:
    """(B, N, D) -> (B, num_states, D) with zeros; tensors without a state dimension as they are."""
    if name not in PER_STATE:
        return tensor
    return torch.nn.functional.pad(tensor, (0, 0, 0, num_states - tensor.shape[1]))
