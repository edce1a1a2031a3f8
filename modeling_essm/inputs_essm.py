# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""What a call may give: its arguments are checked before any compute, and each error names value and legal range.

Letters: B batch, L sequence, D width, F input features.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.utils import logging

from .packing import PACKING_ARGUMENTS, Packing
from .spectral_budget import ResolvedBudget

logger = logging.get_logger(__name__)


def refuse_unsupported(kwargs: dict[str, Any]) -> None:
    """Extra arguments pass silently, as the library's losses need; those that would change the result must not."""
    for name, value in kwargs.items():
        if "budget" in name or name.startswith("spectral"):
            raise TypeError(f"unknown argument {name!r}; the budget of a call is spectral_budget")
        if value is not None and name.startswith(("seq_", "cu_seq")) and name not in PACKING_ARGUMENTS:
            raise ValueError(f"unknown argument {name!r}; packed sequences are described by {PACKING_ARGUMENTS}")


def check_inputs(config: Any, input_ids: Tensor | None, inputs_embeds: Tensor | None, features: Tensor | None) -> None:
    """Raises ValueError unless exactly one input is given, of the kind, shape and dtype that the model reads."""
    given = [x for x in (input_ids, inputs_embeds, features) if x is not None]
    if len(given) != 1:
        raise ValueError("give exactly one of input_ids, inputs_embeds and input_features")
    shape, D, width = tuple(given[0].shape), config.hidden_size, config.num_input_features
    if inputs_embeds is not None:
        if len(shape) != 3 or shape[-1] != D:
            raise ValueError(f"inputs_embeds must have shape (B, L, {D}), got {shape}")
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


def check_token_ids(input_ids: Tensor, vocab_size: int, training: bool) -> None:
    """Raises ValueError for ids outside the vocabulary; on an accelerator only where a synchronisation is cheap."""
    if torch.compiler.is_compiling() or input_ids.numel() == 0:
        return
    if input_ids.device.type == "cpu" or (input_ids.shape[1] > 1 and not training):
        low, high = torch.aminmax(input_ids)
        if low < 0 or high >= vocab_size:
            raise ValueError(f"input_ids must be in [0, {vocab_size - 1}], got values from {int(low)} to {int(high)}")


def check_mask(attention_mask: Tensor | None, B: int, L: int, past: int) -> None:
    """Raises ValueError for a mask of another shape; not in a compiled graph, which does not know `past`."""
    if attention_mask is None or torch.compiler.is_compiling():
        return
    if tuple(attention_mask.shape) not in ((B, L), (B, past + L)):
        raise ValueError(
            f"attention_mask must have shape ({B}, {L}), or ({B}, {past + L}) with the cached positions, "
            f"got {tuple(attention_mask.shape)}"
        )


def check_state_lengths(state_lengths: Tensor, B: int, L: int, cache: Any, attention_mask: Tensor | None) -> None:
    """Raises ValueError for lengths that are no integers in [0, L]; a compiled graph does not wait for the device."""
    if attention_mask is not None or cache is None or state_lengths.shape != (B,):
        raise ValueError(
            f"state_lengths must have shape ({B},) and come with a cache and without attention_mask, "
            f"got shape {tuple(state_lengths.shape)}"
        )
    if torch.compiler.is_compiling():
        return
    integers = f"state_lengths must be integers in [0, {L}], got"
    if state_lengths.is_floating_point() or state_lengths.is_complex() or state_lengths.dtype == torch.bool:
        raise ValueError(f"{integers} {state_lengths.dtype}")
    if state_lengths.numel():
        low, high = torch.aminmax(state_lengths.long())
        if low < 0 or high > L:
            raise ValueError(f"{integers} values from {int(low)} to {int(high)}")


def wants_cache(model: Any, use_cache: bool | None, cache: Any, packing: Packing | None) -> bool:
    """Whether the call returns a cache. Raises ValueError where it cannot have one."""
    if packing is not None:
        if use_cache or cache is not None:
            raise ValueError(
                "packed sequences leave no single state: call with use_cache=False, without past_key_values"
            )
        return False
    if use_cache is None:
        use_cache = model.config.use_cache and not model.training
    recomputing = model.training and model.gradient_checkpointing and torch.is_grad_enabled()
    if recomputing and (use_cache or cache is not None):
        raise ValueError(
            "gradient checkpointing runs layers twice, which would advance the cache twice: "
            "train with use_cache=False and without past_key_values"
        )
    return use_cache


def warn_once_of(config: Any, budget: ResolvedBudget, num_tokens: int) -> None:
    """Tell of a sequence beyond filter_length, and of budgets that were never trained."""
    if torch.compiler.is_compiling():
        return
    if num_tokens > config.filter_length:
        logger.warning_once(
            f"a sequence has passed filter_length {config.filter_length}: beyond it the recurrence is no "
            "longer the trained convolution. Train with a filter_length at least as long as your sequences."
        )
    if config.trained_budgets is not None:
        ran = set(budget.layers) if budget.rows is None else set(budget.rows.tolist())
        unseen = sorted(ran - set(config.trained_budgets))
        if unseen:
            logger.warning_once(
                f"spectral_budget {unseen} was never trained; trained budgets: {sorted(config.trained_budgets)}"
            )
