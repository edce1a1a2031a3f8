# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""A model whose calls are on parts of sequences."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from ..modeling_essm import check_inputs, check_token_ids
from ..packing import PACKING_ARGUMENTS
from ..spectral_budget import SPECTRAL_LAYER, ResolvedBudget
from .segments import ORDERS, Order, group_of
from .sequence_shard import SequenceShard, refuse

_INPUTS = ("input_ids", "inputs_embeds", "input_features")


@contextmanager
def context_parallel(model: nn.Module, group: Any, order: Order | None = None) -> Iterator[None]:
    """While it lasts, every call of the model is on this process's part of the sequences, as `shard_batch` cuts them.

    All processes of the group call the model equally often, with inputs of one shape and at the same budgets. Outputs
    and loss are those of the process's own positions. The backward pass may follow after the context, also with
    gradient checkpointing. Afterwards each process has its part of every parameter's gradient: their sum over the
    group is the gradient of the sum of its losses. DDP and FSDP average gradients instead, which `shard_batch` reckons
    with.

    Args:
        model: ESSMForCausalLM or ESSMModel, wrapped or not.
        group: ProcessGroup, or DeviceMesh of one dimension.
        order: "plain", "head_tail", or None to read it from position_ids, see `SequenceShard`.
    Raises:
        ValueError: `check_context_parallel`'s. In calls: no position_ids, another description of packed sequences,
            a cache, state_lengths, padding, stochastic depth in training, or as `SequenceShard`; on all processes, also
            if it is one's arguments alone that are refused.
    """
    base = check_context_parallel(model)
    if order not in (*ORDERS, None):
        raise ValueError(f"order must be one of {ORDERS} or None, got {order!r}")
    group = group_of(group)
    names = tuple(inspect.signature(type(base).forward).parameters)[1:]

    def cut(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        return (), _arguments(module, dict(zip(names, args)) | kwargs, group, order)

    handle = base.register_forward_pre_hook(cut, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def check_context_parallel(model: nn.Module) -> Any:
    """The ESSMModel in a model whose sequences may be spread over processes. Raises ValueError for any other model."""
    base: Any = next((module for module in model.modules() if hasattr(module, "run_layers")), None)
    head = next((module for module in model.modules() if getattr(module, "model", None) is base), None)
    if base is None or (head is not None and not hasattr(head, "lm_head")):
        name = type(model if head is None else head).__name__
        raise ValueError(f"sequences of an ESSMForCausalLM or ESSMModel can be spread over processes, got {name}")
    if base.config.ar_order:
        raise ValueError(
            f"ar_order must be 0 where sequences are spread over processes, got {base.config.ar_order}: AR-STU feeds "
            "outputs back, whose effect on later positions is no fixed matrix"
        )
    if base.is_hybrid:
        raise ValueError(
            f"layer_types must all be {SPECTRAL_LAYER!r} where sequences are spread over processes: attention layers "
            f"read keys that lie on others, got {sorted({*base.config.layer_types})}"
        )
    return base


def _arguments(model: Any, given: dict[str, Any], group: Any, order: Order | None) -> dict[str, Any]:
    """Arguments of a call, with a `SequenceShard` in place of what describes its sequences. Raises ValueError."""
    num_facts = 1 + model.config.num_hidden_layers
    try:
        positions, padded, budget = _described(model, given)
    except Exception:  # of whatever kind: all others wait for this process
        refuse(num_facts, group, next(model.parameters()).device)
        raise
    agree, rows = (padded, *budget.layers), budget.rows
    if rows is None:  # as if given for each row
        rows = positions.new_full(positions.shape[:1], max(budget.layers))
    shard = SequenceShard(positions, group, order, agree, ", padding (0: none) and budgets", rows)
    if padded:
        raise ValueError("padding has no place in sequences spread over processes: pack them, with position_ids")
    left = {name: value for name, value in given.items() if name not in ("position_ids", "attention_mask")}
    return left | {"packing": shard}


def _described(model: Any, given: Mapping[str, Any]) -> tuple[Tensor, bool, ResolvedBudget]:
    """A call's positions (B, L), where its inputs are, whether it has padding, and its budgets. Raises ValueError."""
    for name in ("past_key_values", "use_cache", "state_lengths"):
        if given.get(name) is not None and given[name] is not False:
            raise ValueError(f"{name} has no place in a call on parts of sequences: a state lies on no one process")
    for name in PACKING_ARGUMENTS:
        if name != "position_ids" and given.get(name) is not None:
            raise ValueError(f"{name} does not tell where documents begin in a part: give position_ids instead")
    positions = given.get("position_ids")
    if positions is None:
        raise ValueError("a call on parts of sequences needs position_ids, as shard_batch gives them")
    if model.training and any(layer.stochastic_depth for layer in model.layers):
        raise ValueError("stochastic_depth must be 0: processes would drop different branches of one sequence")
    inputs = [given.get(name) for name in _INPUTS]
    check_inputs(model.config, *inputs)
    if inputs[0] is not None:
        check_token_ids(inputs[0], model.config.vocab_size, model.training)
    x = next(tensor for tensor in inputs if tensor is not None)
    B, L = x.shape[:2]
    if tuple(positions.shape) not in ((B, L), (1, L)):
        raise ValueError(f"position_ids must have shape ({B}, {L}), got {tuple(positions.shape)}")
    mask = given.get("attention_mask")
    budget = model.config.resolve_budget(given.get("spectral_budget"), batch_size=B)
    return positions.expand(B, L).to(x.device), mask is not None and not bool(mask.all()), budget
