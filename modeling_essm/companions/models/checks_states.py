# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""What a configuration and a call of a model with states may give. Letters: B batch, L sequence, H width."""

from __future__ import annotations

import dataclasses
import math
import os
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


class SavedConfig:
    """How both configurations are read and written."""

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any):
        """As in transformers; fields given beside the dictionary are checked as if they stood in it."""
        names = {field.name for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
        names -= {"dtype", "backbone_config"}  # which may be "auto", and a part of the backbone's
        given = {name: kwargs.pop(name) for name in names & kwargs.keys()}
        fields = config_dict | given
        if {"state_size", "num_hidden_layers"} & given.keys() and "state_sizes" not in given:
            fields.pop("state_sizes", None)
        return super().from_dict(fields, **kwargs)  # type: ignore[misc]

    def to_json_file(self, json_file_path: Any, use_diff: bool = True) -> None:
        """As in transformers; the file names only code that lies beside it, as a model saves it."""
        folder = os.path.dirname(json_file_path)
        both: tuple[Any, Any] = (self, getattr(self, "backbone_config", None))
        configs = [config for config in both if hasattr(config, "auto_map")]
        named = [config.auto_map for config in configs]

        def is_there(place: Any) -> bool:  # or in another repository
            return "--" in place or os.path.isfile(os.path.join(folder, f"{place.split('.')[0]}.py"))

        try:
            for config, code in zip(configs, named):
                config.auto_map = {n: at for n, at in code.items() if not isinstance(at, str) or is_there(at)}
            super().to_json_file(json_file_path, use_diff)  # type: ignore[misc]
        finally:
            for config, code in zip(configs, named):
                config.auto_map = code


def check_inputs(config: Any, input_ids: Tensor | None, inputs_embeds: Tensor | None, features: Any) -> tuple[int, int]:
    """B and L. Raises ValueError unless there is one input, of the kind, shape and range that the model reads."""
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
    readable = x.device.type == "cpu" and not torch._C._are_functorch_transforms_active()  # which hide values
    if name == "input_ids" and readable and x.numel():
        low, high = torch.aminmax(x)
        if low < 0 or high >= config.vocab_size:
            raise ValueError(f"input_ids must be in [0, {config.vocab_size - 1}], got {int(low)} to {int(high)}")
    return x.shape[0], x.shape[1]


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


def refuse_packing(arguments: dict[str, Any], B: int, L: int, real: Tensor | None) -> None:
    """Raises ValueError for what tells of packed sequences, which would run into each other: position_ids that do
    not go on by one between real positions (B, L), and rise across others. Arguments of other names pass."""
    for name, value in arguments.items():
        if value is None or not name.startswith(("position_ids", "seq_idx", "cu_seq")):
            continue
        packed = name != "position_ids"
        if not packed:
            if tuple(value.shape) not in ((B, L), (1, L)):
                raise ValueError(f"{name} must have shape ({B}, {L}), got {tuple(value.shape)}")
            ids = value.cpu().expand(B, L)
            there = torch.ones(B, L, dtype=torch.bool) if real is None else real.cpu()
            before = ids.masked_fill(~there, -1).cummax(1).values
            jumps = there[:, :-1] & (ids[:, 1:] != ids[:, :-1] + 1)
            packed = bool((there[:, 1:] & (jumps | (ids[:, 1:] <= before[:, :-1]))).any())
        if packed:
            raise ValueError(f"{name} tells of packed sequences, which are not supported: pad them instead")


def the_cache(cache: Any, past_key_values: Any) -> Any:
    """The cache of a call under either of its names. Raises ValueError if it has both."""
    if cache is not None and past_key_values is not None:
        raise ValueError("give past_key_values or cache, two names of one argument, not both")
    return past_key_values if cache is None else cache


def check_cache(cache: Any, made_for: dict[str, Any], batch_size: int) -> None:
    """Raises ValueError for another kind of cache, or one of another model or of other rows."""
    if not hasattr(cache, "made_for"):  # not isinstance: model and cache may come from two copies of the code
        raise ValueError(f"past_key_values must be a StateCache, got {type(cache).__name__}")
    for name, here in made_for.items():
        if (there := cache.made_for.get(name, here)) != here:
            raise ValueError(f"past_key_values is of a model of {name} {there}, but this one has {here}")
    if cache.states and len(cache.states[0]) != batch_size:
        raise ValueError(f"past_key_values holds {len(cache.states[0])} rows, but the input has {batch_size}")


def check_mode(model: Any, why: str) -> None:
    """Raises ValueError in training mode, where a call with a cache has no gradients to learn from: it decodes."""
    if model.training and not torch.is_grad_enabled():
        raise ValueError(f"the model is in training mode, where {why}: call model.eval() before decoding")
