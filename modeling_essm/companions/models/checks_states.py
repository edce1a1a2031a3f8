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
    """Raises ValueError unless exactly one input is given, of the kind, shape and range that the model reads."""
    reads = "input_ids" if config.num_input_features is None else "input_features"
    given = {"input_ids": input_ids, "input_features": features, "inputs_embeds": inputs_embeds}
    names = [name for name, x in given.items() if x is not None]
    if names not in ([reads], ["inputs_embeds"]):
        raise ValueError(f"give exactly one of {reads} and inputs_embeds, got {' and '.join(names) or 'none'}")
    name, x = names[0], given[names[0]]
    width = {"input_ids": (), "input_features": (config.num_input_features,), "inputs_embeds": (config.hidden_size,)}
    if x.shape[2:] != width[name] or x.ndim < 2 or x.shape[1] == 0:
        wanted = ", ".join(map(str, ("B", "L", *width[name])))
        raise ValueError(f"{name} must have shape ({wanted}) with at least one position, got {tuple(x.shape)}")
    if name == "input_ids" and x.device.type == "cpu" and x.numel():
        low, high = torch.aminmax(x)
        if low < 0 or high >= config.vocab_size:
            raise ValueError(f"input_ids must be in [0, {config.vocab_size - 1}], got {int(low)} to {int(high)}")


def read_mask(attention_mask: Any, B: int, L: int, past: int) -> Tensor | None:
    """(B, L) bool of the positions that are read, None if all are. Raises ValueError for another shape.

    Args:
        attention_mask: (B, L), or (B, past + L) with the cached positions, which a state does not forget.
    """
    if attention_mask is None:
        return None
    attention_mask = torch.as_tensor(attention_mask)
    if (shape := tuple(attention_mask.shape)) not in ((B, L), (B, past + L)):
        raise ValueError(f"attention_mask must have shape ({B}, {L}), or ({B}, {past + L}) with a cache, got {shape}")
    real = attention_mask[:, -L:].bool()
    return None if bool(real.all()) else real


def check_cache(cache: Any, batch_size: int, sizes: list[int]) -> None:
    """Raises ValueError for another kind of cache, or one whose states are of other rows or sizes."""
    if not hasattr(cache, "states"):  # not isinstance: model and cache may come from two copies of the code
        raise ValueError(f"past_key_values must be a StateCache, got {type(cache).__name__}")
    held = [(len(state), state.shape[-1]) for state in cache.states]
    if held and held != (needed := [(batch_size, n) for n in sizes]):
        raise ValueError(f"past_key_values holds states of (rows, size) {held}, but the call needs {needed}")
