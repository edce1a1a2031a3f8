# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""An ES-SSM at one budget as torch.export programs.

A language model becomes two programs: `prefill` reads any number of tokens, `step` reads one. Both take the recurrent
states and return the logits after each row's last token together with the new states. So a long prompt may be read in
pieces, and memory stays constant. A classifier becomes one program, `classify`. A program holds the weights of its
budget's channels and no others. Letters: B batch, L length, N states, D width, F input features, V vocabulary.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx.config
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from ..cache_essm import CACHE, ESSMCache
from ..packing import pool
from ..spectral_budget import SpectralBudget, is_hybrid


@dataclass(frozen=True)
class TensorSpec:
    """An input or output of a program. Its shape has integers, and "batch" or "length" where any size is accepted."""

    name: str
    shape: tuple[int | str, ...]
    dtype: str


def export_programs(
    model: Any, spectral_budget: SpectralBudget = None, max_length: int | None = None, batch_size: int | None = None
) -> dict[str, ExportedProgram]:
    """The programs of a model at a fixed budget, on its device and in its dtype; the model stays as it is.

    States are those of `ESSMCache.states`: named "{layer}.{tensor}", with the batch as first dimension. A sequence
    begins with zeros, which `empty_states` makes.

        prefill(input_ids (B, L) int64, attention_mask (B, L) int64, states) -> logits (B, V), states
        step(input_ids (B, 1) int64, states) -> logits (B, V), states
        classify(input_ids (B, L) int64 or input_features (B, L, F), attention_mask (B, L) int64) -> logits (B, labels)

    Padding is 0 in the mask and may stand anywhere: masked positions are skipped. A row of padding only keeps its
    states, and its logits are undefined.

    Args:
        model: ESSMForCausalLM or ESSMForSequenceClassification.
        spectral_budget: as in `forward`, except that all rows share it.
        max_length: the largest L of one call, by default config.filter_length.
        batch_size: the only B that the programs accept; by default any.
    Returns:
        {"prefill": .., "step": ..} or {"classify": ..}.
    Raises:
        ValueError: before any work, for a bad budget, max_length or batch_size, a hybrid language model, quantised
            weights, or another kind of model.
    """
    causal = hasattr(model, "lm_head")
    if not causal and not hasattr(model, "score"):
        raise ValueError(f"model must be ESSMForCausalLM or ESSMForSequenceClassification, got {type(model).__name__}")
    if causal and is_hybrid(model.config):
        raise ValueError(
            "a hybrid language model cannot be exported: a program's states have one size, and the keys of attention "
            "layers grow with the text; export a model whose layers are all spectral, or a classifier"
        )
    if getattr(model, "is_quantized", False):
        raise ValueError("a quantised model cannot be exported: export it in full precision")
    budget, longest = model.config.resolve_budget(spectral_budget), model.config.filter_length
    if budget.rows is not None:
        raise ValueError(f"spectral_budget of a program must be the same for all rows, got {spectral_budget!r}")
    max_length = longest if max_length is None else max_length
    if not 2 <= max_length <= longest:
        raise ValueError(f"max_length must be in [2, {longest}] (filter_length), got {max_length}")
    if batch_size is not None and batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    small = copy.deepcopy(model).eval().truncate(list(budget.layers))
    for layer in small.model.layers:
        if hasattr(layer, "mixer"):
            layer.mixer.algorithm = "chunked"  # the only one made of plain tensor operations at any length
    rows: Any = Dim("batch", min=1) if batch_size is None else None
    length = Dim("length", min=1, max=max_length)
    B, L, device = batch_size or 2, min(5, max_length), small.device
    mask = torch.ones(B, L, dtype=torch.int64, device=device)
    with torch.no_grad():
        if not causal:
            F = small.config.num_input_features
            values = torch.zeros_like(mask) if F is None else torch.zeros(B, L, F, dtype=small.dtype, device=device)
            classify = (_ClassifyIds if F is None else _ClassifyFeatures)(small, budget.layers, max_length)
            return {"classify": _export(classify, (values, mask), ({0: rows, 1: length}, {0: rows, 1: length}))}
        ids = torch.zeros_like(mask)
        past = small(ids, use_cache=True, spectral_budget=list(budget.layers))[CACHE]
        states = {name: torch.zeros_like(state) for name, state in past.states.items()}
        any_state = {name: {0: rows} for name in states}
        prefill_shapes = ({0: rows, 1: length}, {0: rows, 1: length}, any_state)
        return {
            "prefill": _export(_Prefill(small, budget.layers, max_length), (ids, mask, states), prefill_shapes),
            "step": _export(_Step(small, budget.layers, max_length), (ids[:, :1], states), ({0: rows}, any_state)),
        }


def empty_states(program: ExportedProgram, batch_size: int) -> dict[str, Tensor]:
    """The states before any token: zeros, by name."""
    states = _example_states(program)
    return {name: state.new_zeros(batch_size, *state.shape[1:]) for name, state in states.items()}


def signature(program: ExportedProgram) -> tuple[list[TensorSpec], list[TensorSpec]]:
    """Inputs and outputs in order, by their names in ONNX: states come in as past.* and return as present.*."""
    states = _example_states(program)
    inputs = [name for name in program.graph_signature.user_inputs if isinstance(name, str)]
    outputs = [name for name in program.graph_signature.user_outputs if isinstance(name, str)]
    input_names = inputs[: len(inputs) - len(states)] + [f"past.{name}" for name in states]
    output_names = ["logits", *(f"present.{name}" for name in states)]
    values = {node.name: node.meta["val"] for node in program.graph.nodes if isinstance(node.meta.get("val"), Tensor)}
    return (
        [_spec(name, values[node]) for name, node in zip(input_names, inputs, strict=True)],
        [_spec(name, values[node]) for name, node in zip(output_names, outputs, strict=True)],
    )


# ---------------------------------------------------------------------------------------------------------------------
# What is exported.


class _Program(nn.Module):
    """A model at a budget. Slicing `positions` fails beyond max_length in runtimes that would not check a length."""

    model: Any
    positions: Tensor

    def __init__(self, model: Any, budgets: tuple[int, ...], max_length: int):
        super().__init__()
        self.model, self.budgets = model, list(budgets)
        self.register_buffer("positions", torch.ones(max_length, dtype=torch.bool), persistent=False)

    def real(self, attention_mask: Tensor) -> Tensor:
        """(B, L) bool."""
        return attention_mask.bool() & self.positions.to(attention_mask.device)[: attention_mask.shape[1]]


class _Prefill(_Program):
    def forward(self, input_ids: Tensor, attention_mask: Tensor, states: dict[str, Tensor]):
        real, cache = self.real(attention_mask), ESSMCache(self.model.config)
        cache.set_states(states)
        options = {"past_key_values": cache, "use_cache": True, "spectral_budget": self.budgets}
        hidden_states = self.model.model(input_ids=input_ids, attention_mask=real, **options).last_hidden_state
        return self.model.lm_head(pool(hidden_states, real, "last")), cache.states


class _Step(_Program):
    def forward(self, input_ids: Tensor, states: dict[str, Tensor]):
        return self.model.step(input_ids, self.budgets, states)


class _ClassifyIds(_Program):
    def forward(self, input_ids: Tensor, attention_mask: Tensor):
        real = self.real(attention_mask)
        return self.model(input_ids=input_ids, attention_mask=real, spectral_budget=self.budgets).logits


class _ClassifyFeatures(_Program):
    def forward(self, input_features: Tensor, attention_mask: Tensor):
        real = self.real(attention_mask)
        return self.model(input_features=input_features, attention_mask=real, spectral_budget=self.budgets).logits


def _export(module: nn.Module, inputs: tuple, dynamic_shapes: tuple) -> ExportedProgram:
    with without_stack_traces():
        program = torch.export.export(module, inputs, dynamic_shapes=dynamic_shapes)
    for node in program.graph.nodes:
        node.meta.pop("stack_trace", None)  # it holds paths of this machine
    return program


@contextlib.contextmanager
def without_stack_traces() -> Iterator[None]:
    """Torch notes for every operation where it was called, which takes a third of an export's time."""
    config = torch.fx.config
    before = getattr(config, "do_not_emit_stack_traces", False)
    config.do_not_emit_stack_traces = True  # no setting of torch 2.11, which goes on noting them
    try:
        yield
    finally:
        config.do_not_emit_stack_traces = before


def _example_states(program: ExportedProgram) -> dict[str, Tensor]:
    assert program.example_inputs is not None
    last = program.example_inputs[0][-1]
    return last if isinstance(last, dict) else {}


def _spec(name: str, value: Tensor) -> TensorSpec:
    sizes = tuple(n if isinstance(n, int) else ("length" if axis else "batch") for axis, n in enumerate(value.shape))
    return TensorSpec(name, sizes, str(value.dtype).removeprefix("torch."))
