# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""What a configuration and a call of a model with states may give. Letters: B batch, L sequence, H width."""

from __future__ import annotations

import math
from typing import Any

import torch
from huggingface_hub.dataclasses import validated_field
from torch import Tensor

MOST = 2**24  # generous, and small enough that whatever is made from a legal value is made at once


def integer(low: int, default: Any = None) -> Any:
    """A field that holds an integer of at least `low`, or a list of such; None passes where its type lets it."""

    def check(value: Any) -> None:
        for n in value if isinstance(value, (list, tuple)) else [value]:
            if n is not None and (isinstance(n, bool) or not low <= n <= MOST):
                raise ValueError(f"must be an integer in [{low}, {MOST}], got {n!r}")

    return validated_field(check, default=default)


def number(default: float | None, low: float = 0.0, high: float = math.inf, closed: str = "") -> Any:
    """A field that holds a number in (low, high); `closed` names the ends that belong to it, "[", "]" or "[]"."""
    left, right = "[" if "[" in closed else "(", "]" if "]" in closed else ")"

    def check(value: Any) -> None:
        inside = value is None or (not isinstance(value, bool) and low <= value <= high and math.isfinite(value))
        if not inside or (value == low and left == "(") or (value == high and right == ")"):
            raise ValueError(f"must be a number in {left}{low:g}, {high:g}{right}, got {value!r}")

    return validated_field(check, default=default)


def check_inputs(config: Any, input_ids: Tensor | None, inputs_embeds: Tensor | None, features: Any) -> None:
    """Raises ValueError unless exactly one input is given, of the kind, shape, dtype and range that the model reads."""
    given = [x for x in (input_ids, inputs_embeds, features) if x is not None]
    if len(given) != 1:
        raise ValueError("give exactly one of input_ids, inputs_embeds and input_features")
    if not isinstance(given[0], Tensor):
        raise ValueError(f"inputs must be tensors, got {type(given[0]).__name__}")
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
        raise ValueError(f"input_ids must be int64 or int32 of shape (B, L), got {given[0].dtype} of shape {shape}")
    if shape[1] == 0:
        raise ValueError(f"a sequence needs at least one position, got shape {shape[:2]}")
    if input_ids is not None and input_ids.device.type == "cpu" and input_ids.numel():
        low, high = torch.aminmax(input_ids)
        if low < 0 or high >= config.vocab_size:
            raise ValueError(
                f"input_ids must be in [0, {config.vocab_size - 1}], got values from {int(low)} to {int(high)}"
            )


def read_mask(attention_mask: Any, B: int, L: int, past: int) -> Tensor | None:
    """(B, L) bool of the positions that are read, None if all are.

    Args:
        attention_mask: (B, L), or (B, past + L) with the cached positions, which a state does not forget.
    Raises:
        ValueError: another shape.
    """
    if attention_mask is None:
        return None
    attention_mask = torch.as_tensor(attention_mask)
    if tuple(attention_mask.shape) not in ((B, L), (B, past + L)):
        raise ValueError(
            f"attention_mask must have shape ({B}, {L}), or ({B}, {past + L}) with the cached positions, "
            f"got {tuple(attention_mask.shape)}"
        )
    real = attention_mask[:, -L:].bool()
    return None if bool(real.all()) else real


def check_cache(cache: Any, batch_size: int, sizes: list[int]) -> None:
    """Raises ValueError for another kind of cache, or one whose states are of other rows or sizes."""
    if not hasattr(cache, "states"):  # not isinstance: model and cache may come from two copies of the code
        raise ValueError(f"past_key_values must be a StateCache, got {type(cache).__name__}")
    held = [(len(state), state.shape[-1]) for state in cache.states]
    if held and held != (needed := [(batch_size, n) for n in sizes]):
        raise ValueError(f"past_key_values holds states of (rows, size) {held}, but the call needs {needed}")
