# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Programs as ONNX files."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch.export import ExportedProgram

from .programs import signature

_EXTERNAL_DATA_BYTES = 1 << 30  # a protobuf file holds at most 2 GiB


def save_onnx(program: ExportedProgram, path: str | os.PathLike) -> None:
    """Write a program as ONNX, with the names of `signature`. Weights beyond 1 GiB go to a file beside it.

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
