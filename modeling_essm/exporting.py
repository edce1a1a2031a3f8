# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""An ES-SSM at one budget as programs for other runtimes: torch.export, ONNX, ExecuTorch.

A language model becomes two programs: `prefill` reads any number of tokens, `step` one. Both take the recurrent states
and return the logits after each row's last token together with the new states, so that a long prompt may be read in
pieces and decoding goes on at constant memory. A classifier becomes one, `classify`. A program holds the weights of its
budget's channels and no others. Letters: B batch, L length, N states, D width, F input features, V vocabulary.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from .budget_allocation import spectral_mixers
from .cache_essm import ESSMCache
from .spectral_budget import SpectralBudget

_EXTERNAL_DATA_BYTES = 1 << 30  # a protobuf file ends at 2 GiB


@dataclass(frozen=True)
class TensorSpec:
    """An input or output of a program. shape: integers, and "batch" or "length" where any size will do."""

    name: str
    shape: tuple[int | str, ...]
    dtype: str


def export_programs(
    model: Any, spectral_budget: SpectralBudget = None, max_length: int | None = None, batch_size: int | None = None
) -> dict[str, ExportedProgram]:
    """The programs of a model at a fixed budget, on its device and in its dtype; the model stays as it is.

    A state is named "{layer}.{tensor}", as in `ESSMCache.layers[layer].tensors`, and has the batch as first dimension.
    Zeros, of `empty_states`, begin a sequence.

        prefill(input_ids (B, L) int64, attention_mask (B, L) int64, states) -> logits (B, V), states
        step(input_ids (B, 1) int64, states) -> logits (B, V), states
        classify(input_ids (B, L) int64 or input_features (B, L, F), attention_mask (B, L) int64) -> logits (B, labels)

    Padding is 0 in the mask, anywhere, and does not exist for the model; a row of padding only keeps its states, and
    its logits mean nothing.

    Args:
        model: ESSMForCausalLM or ESSMForSequenceClassification.
        spectral_budget: as in `forward`, except that all rows share it.
        max_length: the largest L of one call, by default config.filter_length.
        batch_size: the only B that the programs accept; by default any.
    Returns:
        {"prefill": .., "step": ..} or {"classify": ..}.
    Raises:
        ValueError: a bad budget, max_length or batch_size, quantised weights, or another kind of
            model; before any work.
    """
    causal = hasattr(model, "lm_head")
    if not causal and not hasattr(model, "score"):
        raise ValueError(f"model must be ESSMForCausalLM or ESSMForSequenceClassification, got {type(model).__name__}")
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
    for mixer in spectral_mixers(small):
        mixer.algorithm = "chunked"  # the others are not made of plain tensor operations of any length
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
        states = {name: torch.zeros_like(state) for name, state in _states_after(small, ids, budget.layers).items()}
        any_state = {name: {0: rows} for name in states}
        prefill_shapes = ({0: rows, 1: length}, {0: rows, 1: length}, any_state)
        return {
            "prefill": _export(_Prefill(small, budget.layers, max_length), (ids, mask, states), prefill_shapes),
            "step": _export(_Step(small, budget.layers, max_length), (ids[:, :1], states), ({0: rows}, any_state)),
        }


def empty_states(program: ExportedProgram, batch_size: int) -> dict[str, Tensor]:
    """The states before any token, zeros, by their names."""
    states = _example_states(program)
    return {name: torch.zeros(batch_size, *state.shape[1:], dtype=state.dtype) for name, state in states.items()}


def signature(program: ExportedProgram) -> tuple[list[TensorSpec], list[TensorSpec]]:
    """Inputs and outputs in order, by the names they have in ONNX: states come as past.* and return as present.*."""
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


def save_onnx(program: ExportedProgram, path: str | os.PathLike) -> None:
    """Write a program as ONNX, inputs and outputs named by `signature`; weights beyond 1 GiB go to a file beside it.

    Raises:
        ImportError: onnx or onnxscript is not installed.
    """
    try:
        import onnx_ir
        import onnxscript  # noqa: F401
        from onnx_ir.passes import common
    except ImportError as error:
        raise ImportError(f"ONNX needs `pip install onnx onnxscript`: {error}") from error
    inputs, outputs = signature(program)
    names: dict[str, Any] = {"input_names": [x.name for x in inputs], "output_names": [x.name for x in outputs]}
    exported = torch.onnx.export(program, dynamo=True, verbose=False, **names)
    assert exported is not None
    graph = exported.model.graph
    for specs, values in ((inputs, graph.inputs), (outputs, graph.outputs)):
        for spec, value in zip(specs, values, strict=True):
            value.shape = onnx_ir.Shape(spec.shape)
    common.DeduplicateInitializersPass(size_limit=1 << 40)(exported.model)  # layers share the basis
    common.ClearMetadataAndDocStringPass()(exported.model)  # stack traces
    size = sum(x.const_value.nbytes for x in graph.initializers.values() if x.const_value is not None)
    exported.save(path, external_data=size > _EXTERNAL_DATA_BYTES)


def save_executorch(programs: Mapping[str, ExportedProgram], path: str | os.PathLike) -> None:
    """Write all programs as methods of one ExecuTorch file, with XNNPACK where it can. They need a batch_size.

    Raises:
        ImportError: executorch is not installed. ValueError: programs of any batch size.
    """
    try:
        from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
        from executorch.exir import to_edge_transform_and_lower
    except ImportError as error:
        raise ImportError(f"ExecuTorch needs `pip install executorch`: {error}") from error
    programs = {name: copy.copy(program) for name, program in programs.items()}
    for program in programs.values():
        if any(spec.shape[0] == "batch" for spec in signature(program)[0]):
            raise ValueError("XNNPACK has no tensors of two dynamic dimensions: export with batch_size=1")
        _make_constants_contiguous(program)
    manager = to_edge_transform_and_lower(programs, partitioner=[XnnpackPartitioner()])
    Path(path).write_bytes(manager.to_executorch().buffer)


# ---------------------------------------------------------------------------------------------------------------------
# What is exported.


class _Program(nn.Module):
    """A model at a budget. `room` makes runtimes that know no largest length fail on a longer one."""

    model: Any
    room: Tensor

    def __init__(self, model: Any, budgets: tuple[int, ...], max_length: int):
        super().__init__()
        self.model, self.budgets = model, list(budgets)
        self.register_buffer("room", torch.ones(max_length, dtype=torch.bool), persistent=False)

    def real(self, attention_mask: Tensor) -> Tensor:
        """(B, L) bool."""
        return attention_mask.bool() & self.room.to(attention_mask.device)[: attention_mask.shape[1]]

    def run(self, input_ids: Tensor, real: Tensor | None, states: Mapping[str, Tensor]) -> tuple[Tensor, dict]:
        """Hidden states (B, L, D) and the new states."""
        cache = ESSMCache(self.model.config)
        for i, layer in enumerate(cache.layers):
            prefix = f"{i}."
            layer.update(**{name.removeprefix(prefix): t for name, t in states.items() if name.startswith(prefix)})
        options = {"past_key_values": cache, "use_cache": True, "spectral_budget": self.budgets}
        outputs = self.model.model(input_ids=input_ids, attention_mask=real, **options)
        return outputs.last_hidden_state, _named_states(cache)


class _Prefill(_Program):
    def forward(self, input_ids: Tensor, attention_mask: Tensor, states: dict[str, Tensor]):
        real = self.real(attention_mask)
        hidden_states, states = self.run(input_ids, real, states)
        B, L, _ = hidden_states.shape
        last = (real * torch.arange(L, device=real.device)).amax(1)
        return self.model.lm_head(hidden_states[torch.arange(B, device=real.device), last]), states


class _Step(_Program):
    def forward(self, input_ids: Tensor, states: dict[str, Tensor]):
        hidden_states, states = self.run(input_ids, None, states)
        return self.model.lm_head(hidden_states[:, 0]), states


class _ClassifyIds(_Program):
    def forward(self, input_ids: Tensor, attention_mask: Tensor):
        real = self.real(attention_mask)
        return self.model(input_ids=input_ids, attention_mask=real, spectral_budget=self.budgets).logits


class _ClassifyFeatures(_Program):
    def forward(self, input_features: Tensor, attention_mask: Tensor):
        real = self.real(attention_mask)
        return self.model(input_features=input_features, attention_mask=real, spectral_budget=self.budgets).logits


def _export(module: nn.Module, inputs: tuple, dynamic_shapes: tuple) -> ExportedProgram:
    module(*inputs)  # makes the basis, which the tracer else records in fp64 with its conversion
    program = torch.export.export(module, inputs, dynamic_shapes=dynamic_shapes)
    for node in program.graph.nodes:
        node.meta.pop("stack_trace", None)  # paths of this machine
    return program


def _states_after(model: Any, input_ids: Tensor, budgets: tuple[int, ...]) -> dict[str, Tensor]:
    return _named_states(model(input_ids, use_cache=True, spectral_budget=list(budgets)).past_key_values)


def _named_states(cache: ESSMCache) -> dict[str, Tensor]:
    return {f"{i}.{name}": tensor for i, layer in enumerate(cache.layers) for name, tensor in layer.tensors.items()}


def _example_states(program: ExportedProgram) -> dict[str, Tensor]:
    assert program.example_inputs is not None
    last = program.example_inputs[0][-1]
    return last if isinstance(last, dict) else {}


def _spec(name: str, value: Tensor) -> TensorSpec:
    sizes = tuple(
        size if isinstance(size, int) else ("length" if axis else "batch") for axis, size in enumerate(value.shape)
    )
    return TensorSpec(name, sizes, str(value.dtype).removeprefix("torch."))


def _make_constants_contiguous(program: ExportedProgram) -> None:
    """ExecuTorch knows no transposed constants."""
    for name, value in program.constants.items():
        if isinstance(value, Tensor):
            program.constants[name] = value.contiguous()
    constants = program.graph_signature.inputs_to_lifted_tensor_constants
    for node in program.graph.nodes:
        if node.op == "placeholder" and node.name in constants:
            node.meta["val"] = node.meta["val"].contiguous()


__all__ = ["TensorSpec", "empty_states", "export_programs", "save_executorch", "save_onnx", "signature"]
