# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""What a call may give, and how padding is moved out of the way. Letters: B batch, L sequence, H width."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def refuse_packing(kwargs: dict[str, Any]) -> None:
    """Extra arguments pass silently, as the library's losses need; packed sequences would run into each other.

    Raises:
        ValueError: an argument of packed sequences.
    """
    for name, value in kwargs.items():
        if value is not None and name.startswith(("seq_idx", "cu_seq")):
            raise ValueError(f"unknown argument {name!r}: packed sequences are not supported, pad them instead")


def check_inputs(config: Any, input_ids: Tensor | None, inputs_embeds: Tensor | None, features: Tensor | None) -> None:
    """Raises ValueError unless exactly one input is given, of the kind, shape, dtype and range that the model reads."""
    given = [x for x in (input_ids, inputs_embeds, features) if x is not None]
    if len(given) != 1:
        raise ValueError("give exactly one of input_ids, inputs_embeds and input_features")
    shape, width = tuple(given[0].shape), config.num_input_features
    if inputs_embeds is not None:
        if len(shape) != 3 or shape[-1] != config.hidden_size:
            raise ValueError(f"inputs_embeds must have shape (B, L, {config.hidden_size}), got {shape}")
    elif features is not None:
        if width is None:
            raise ValueError("this model reads input_ids; input_features need config.num_input_features")
        if len(shape) != 3 or shape[-1] != width:
            raise ValueError(f"input_features must have shape (B, L, {width}), got {shape}")
    elif width is not None:
        raise ValueError(f"this model reads input_features of shape (B, L, {width}), got input_ids")
    elif len(shape) != 2 or given[0].dtype not in (torch.int64, torch.int32):
        raise ValueError(
            f"input_ids must be int64 or int32 integers of shape (B, L), got {given[0].dtype} of shape {shape}"
        )
    if shape[1] == 0:
        raise ValueError(f"a sequence needs at least one position, got shape {shape[:2]}")
    if input_ids is not None and input_ids.device.type == "cpu" and input_ids.numel():
        low, high = torch.aminmax(input_ids)
        if low < 0 or high >= config.vocab_size:
            raise ValueError(
                f"input_ids must be in [0, {config.vocab_size - 1}], got values from {int(low)} to {int(high)}"
            )


def read_mask(attention_mask: Tensor | None, B: int, L: int, past: int) -> Tensor | None:
    """(B, L) bool of the positions that are read, None if all are.

    Args:
        attention_mask: (B, L), or (B, past + L) with the cached positions, which a state does not forget.
    Raises:
        ValueError: another shape.
    """
    if attention_mask is None:
        return None
    if tuple(attention_mask.shape) not in ((B, L), (B, past + L)):
        raise ValueError(
            f"attention_mask must have shape ({B}, {L}), or ({B}, {past + L}) with the cached positions, "
            f"got {tuple(attention_mask.shape)}"
        )
    real = attention_mask[:, -L:].bool()
    return None if bool(real.all()) else real


def real_last(real: Tensor) -> tuple[Tensor, Tensor]:
    """How to bring the real positions of each row to its end, in their order, and back.

    Args:
        real: (B, L) bool.
    Returns:
        order (B, L) int64: the position that goes to each place. place (B, L): where each position has gone; one that
        is not real is where the last real one before it is, or at the beginning if there is none.
    """
    L = real.shape[1]
    order = real.long().argsort(dim=1, stable=True)
    place = L - real.sum(1, keepdim=True) + real.cumsum(1) - 1
    return order, place.clamp(min=0)


def reorder(x: Tensor, place: Tensor) -> Tensor:
    """(B, L, H) with the position that place (B, L) names at each."""
    return x.gather(1, place[..., None].expand_as(x))


def check_cache(cache: Any, config: Any, batch_size: int) -> None:
    """Raises ValueError for another kind of cache, or one of a model of another shape or batch."""
    if not hasattr(cache, "state_sizes"):  # not isinstance: model and cache may come from two copies of the code
        raise ValueError(f"past_key_values must be a DiagonalSSMCache, got {type(cache).__name__}")
    if cache.state_sizes != config.state_sizes:
        raise ValueError(
            f"past_key_values is of a model of state_sizes {cache.state_sizes}, but this one has {config.state_sizes}"
        )
    if cache.batch_size not in (None, batch_size):
        raise ValueError(f"past_key_values holds {cache.batch_size} rows, but the input has {batch_size}")


def wants_cache(model: Any, use_cache: bool | None, cache: Any) -> bool:
    """Whether the call returns a cache. Raises ValueError where it cannot have one."""
    if model.config.bidirectional:
        if use_cache or cache is not None:
            raise ValueError(
                "a bidirectional model reads whole sequences: call with use_cache=False, without past_key_values"
            )
        return False
    if use_cache is None:
        use_cache = model.config.use_cache and not model.training
    recomputing = model.training and model.gradient_checkpointing and torch.is_grad_enabled()
    if recomputing and (use_cache or cache is not None):
        raise ValueError(
            "gradient checkpointing keeps no states: train with use_cache=False and without past_key_values"
        )
    return use_cache
