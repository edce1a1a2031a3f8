# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Programs as ONNX files, whose matrices stand in one file of weights for all budgets.

A budget is a prefix: its part of a matrix that is cut by rows is the beginning of that matrix. One that is cut by
columns is stored transposed. So a program of any budget refers to its matrices by offset and length. What is cut
otherwise is small (coefficients and gates of channels) and stands in the programs themselves, with norms and basis.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.export import ExportedProgram

from ..loading_essm import channel_parameters
from .programs import signature, without_stack_traces

_EXTERNAL_DATA_BYTES = 1 << 30  # a protobuf file holds at most 2 GiB
_ALIGNMENT = 64


class _Place(NamedTuple):
    """Where a matrix stands in a file of weights: `offset`, and `scale` that of its scales, if it is int8."""

    offset: int
    scale: int | None
    transposed: bool


class WeightFile:
    """A new file with the matrices of a model: weights of linear layers and embeddings, and dense M_k.

    With `int8` they are rounded, in the model too: w = scale * q, q in [-127, 127], with a scale for each output of a
    linear layer and each token. So the model computes what the programs compute.

    Args:
        model: ESSMForCausalLM or ESSMForSequenceClassification in fp32. path: of the file, in the programs' folder.
    """

    def __init__(self, model: nn.Module, path: str | os.PathLike, int8: bool = False):
        self.path, self.int8 = Path(path), int8
        self._places: dict[str, _Place] = {}
        blocks = {id(value): block for _, block, _, _, value in channel_parameters(model)}
        written: dict[int, _Place] = {}
        with open(path, "wb") as file:

            def write(values: torch.Tensor) -> int:
                file.write(bytes(-file.tell() % _ALIGNMENT))
                offset = file.tell()
                file.write(np.ascontiguousarray(values.numpy()).data)
                return offset

            for module_name, module in model.named_modules():
                for name, value in module.named_parameters(recurse=False):
                    block = blocks.get(id(value), ())
                    dense = isinstance(module, (nn.Linear, nn.Embedding)) or value.ndim == 3
                    transposed = len(block) == 2 and not block[0]
                    if value.ndim < 2 or not dense or (len(block) > 1 and not transposed):
                        continue
                    if id(value) not in written:  # embedding and head may be one
                        stored, scale = value.detach().cpu(), None
                        if int8:
                            scale = (stored.abs().amax(1, keepdim=True) / 127).clamp(min=torch.finfo(stored.dtype).tiny)
                            rounded = (stored / scale).round()
                            value.data.copy_(rounded * scale)
                            stored = rounded.to(torch.int8)
                        offset = write(stored.T if transposed else stored)
                        at = None if scale is None else write(scale.T if transposed else scale)
                        written[id(value)] = _Place(offset, at, transposed)
                    self._places[f"model.{module_name}.{name}"] = written[id(value)]

    def __contains__(self, name: object) -> bool:
        return name in self._places

    def refer(self, graph: Any) -> int:
        """Let a program read these weights instead of its own; how many bytes it reads."""
        import onnx_ir as ir

        read, nodes = 0, []

        def stored(name: str, offset: int, shape: tuple[int, ...], dtype: Any) -> Any:
            nonlocal read
            length = int(np.prod(shape) * dtype.itemsize)
            read += length
            at = ir.ExternalTensor(
                self.path.name, offset, length, dtype, shape=ir.Shape(shape), name=name, base_dir=self.path.parent
            )
            value = ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(dtype), const_value=at)
            graph.register_initializer(value)
            return value

        for name in [name for name in graph.initializers if name in self]:
            old, place = graph.initializers.pop(name), self._places[name]
            shape = tuple(old.shape.numpy())
            shape = shape[::-1] if place.transposed else shape
            new = stored(name, place.offset, shape, ir.DataType.INT8 if self.int8 else old.dtype)
            if place.scale is not None:  # runtimes fold what reads constants alone when they load a program
                one = (1 if place.transposed else shape[0], shape[1] if place.transposed else 1, *shape[2:])
                scale = stored(f"{name}.scale", place.scale, one, old.dtype)
                nodes.append(ir.node("Cast", [new], {"to": old.dtype}))
                nodes.append(ir.node("Mul", [nodes[-1].outputs[0], scale]))
                new = nodes[-1].outputs[0]
            if place.transposed:
                nodes.append(ir.node("Transpose", [new], {"perm": [1, 0]}))
                new = nodes[-1].outputs[0]
            ir.convenience.replace_all_uses_with(old, new)
        graph.insert_before(graph[0], nodes)
        return read


def save_onnx(program: ExportedProgram, path: str | os.PathLike, weights: WeightFile | None = None) -> int:
    """Write a program as ONNX, with the names of `signature`.

    Args:
        weights: the file of weights beside it that it reads; by default it holds its own, beyond 1 GiB in a file.
    Returns:
        how many bytes of the file of weights it reads.
    Raises:
        ImportError: onnx or onnxscript is not installed.
    """
    try:
        import onnx_ir
        from onnx_ir.passes import common
        from onnxscript.optimizer import fold_constants
    except ImportError as error:
        raise ImportError(f"ONNX needs `pip install onnx onnxscript`: {error}") from error
    inputs, outputs = signature(program)
    names: dict[str, Any] = {"input_names": [x.name for x in inputs], "output_names": [x.name for x in outputs]}
    # Its rewriting takes a third of the time and leaves a program that is no faster in onnxruntime.
    with without_stack_traces():
        exported = torch.onnx.export(program, dynamo=True, verbose=False, optimize=False, **names)
    assert exported is not None
    model, graph = exported.model, exported.model.graph

    def reads_weights(node: Any) -> bool | None:
        return False if weights and any(x is not None and x.name in weights for x in node.inputs) else None

    fold_constants(model, should_fold=reads_weights)
    for cleaning in (
        common.RemoveUnusedNodesPass(),
        common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
        common.DeduplicateInitializersPass(size_limit=1 << 40),  # layers share the basis
        common.CommonSubexpressionEliminationPass(),
        common.OutputFixPass(),
        common.ClearMetadataAndDocStringPass(),  # stack traces
    ):
        cleaning(model)
    for specs, values in ((inputs, graph.inputs), (outputs, graph.outputs)):
        for spec, value in zip(specs, values, strict=True):
            value.shape = onnx_ir.Shape(spec.shape)
    read = 0 if weights is None else weights.refer(graph)
    common.NameFixPass()(model)
    if weights is None:
        size = sum(x.const_value.nbytes for x in graph.initializers.values() if x.const_value is not None)
        exported.save(path, external_data=size > _EXTERNAL_DATA_BYTES)
    else:
        onnx_ir.save(model, path)
    return read
