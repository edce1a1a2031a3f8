# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""What a call may give, checked before any compute. Letters: B batch, L sequence, F input features."""

from __future__ import annotations

import math
from numbers import Integral
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .objectives_elastic_state import tree_map


def check_features(features: Tensor, width: int) -> None:
    """Raises ValueError unless (B, L, width) with L >= 1."""
    shape = tuple(features.shape) if isinstance(features, Tensor) else type(features).__name__
    if isinstance(shape, str) or len(shape) != 3 or shape[-1] != width or shape[1] == 0:
        raise ValueError(f"input_features must be a tensor of shape (B, L, {width}) with L >= 1, got {shape}")


def check_cache(cache: Any, batch_size: int, latent_size: int) -> None:
    """Raises ValueError for another kind of cache, or one of another batch or width."""
    if not hasattr(cache, "backbone_cache"):  # not isinstance: model and cache may come from two copies of the code
        raise ValueError(f"past_key_values must be an ElasticStateCache, got {type(cache).__name__}")
    if cache.latent is not None and tuple(cache.latent.shape) != (batch_size, latent_size):
        raise ValueError(
            f"past_key_values holds latents of shape {tuple(cache.latent.shape)}, but the call needs "
            f"({batch_size}, {latent_size})"
        )


def check_observations(observations: Any, B: int, L: int) -> None:
    """Raises ValueError for a leaf of the nest that is not a tensor (B, L, ..)."""
    for leaf in pytree.tree_leaves(observations):
        if not isinstance(leaf, Tensor) or tuple(leaf.shape[:2]) != (B, L):
            found = f"shape {tuple(leaf.shape)}" if isinstance(leaf, Tensor) else type(leaf).__name__
            raise ValueError(
                f"observations must be tensors, one for each position of input_features, ({B}, {L}, ..), got {found}"
            )


def blank(tree: Any, real: Tensor) -> Any:
    """The nest (B, L, ..) with zeros at positions that are not real (B, L)."""
    return tree_map(lambda x: x.masked_fill(~real.view(*real.shape, *(1,) * (x.ndim - 2)), 0), tree)


def read_mask(attention_mask: Tensor | None, B: int, L: int, past: int) -> Tensor | None:
    """(B, L) bool, True where a position is real; None if all are.

    Raises:
        ValueError: a mask of another shape than (B, L) or (B, past + L).
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


def read_depths(refine_depth: Any, most: int, B: int, L: int, device: torch.device) -> Tensor | None:
    """(B, L) int64 of an int, or of integers (B,) or (B, L); None stays None.

    Raises:
        ValueError: depths that are no integers in [0, most], or of another shape.
    """
    if refine_depth is None:
        return None
    try:
        depths = torch.as_tensor(refine_depth)
    except (TypeError, ValueError, RuntimeError) as error:  # such as a ragged list
        raise ValueError(f"refine_depth must be integers in [0, {most}], got {refine_depth!r}") from error
    legal = not (depths.is_floating_point() or depths.is_complex() or depths.dtype == torch.bool)
    if not legal or (depths.numel() and not 0 <= int(depths.min()) <= int(depths.max()) <= most):
        raise ValueError(f"refine_depth must be integers in [0, {most}], got {refine_depth!r}")
    if tuple(depths.shape) not in ((), (B,), (B, L)):
        raise ValueError(f"refine_depth must have shape (), ({B},) or ({B}, {L}), got {tuple(depths.shape)}")
    return depths.long().to(device).view(-1, L if depths.ndim == 2 else 1).expand(B, L)


def read_cap(max_refine_depth: int | None, most: int) -> int:
    """The cap of a call. Raises ValueError unless an integer in [0, most], or None."""
    if max_refine_depth is None:
        return most
    whole = isinstance(max_refine_depth, Integral) and not isinstance(max_refine_depth, bool)
    if not whole or not 0 <= max_refine_depth <= most:
        raise ValueError(f"max_refine_depth must be an integer in [0, {most}], got {max_refine_depth!r}")
    return int(max_refine_depth)


def check_shift(gate_threshold_shift: float) -> None:
    """Raises ValueError for a NaN; infinities close the gate, or open it."""
    shift = gate_threshold_shift
    if isinstance(shift, bool) or not isinstance(shift, (int, float, np.number)) or math.isnan(shift):
        raise ValueError(f"gate_threshold_shift must be a number, got {shift!r}")
