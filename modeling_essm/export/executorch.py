# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Programs as ExecuTorch files."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor
from torch.export import ExportedProgram

from .programs import signature


def save_executorch(programs: Mapping[str, ExportedProgram], path: str | os.PathLike) -> None:
    """Write all programs as methods of one ExecuTorch file, on XNNPACK where it can run them.

    Raises:
        ImportError: executorch is not installed.
        ValueError: programs that were exported without a batch_size.
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


def _make_constants_contiguous(program: ExportedProgram) -> None:
    """ExecuTorch knows no transposed constants."""
    for name, value in program.constants.items():
        if isinstance(value, Tensor):
            program.constants[name] = value.contiguous()
    constants = program.graph_signature.inputs_to_lifted_tensor_constants
    for node in program.graph.nodes:
        if node.op == "placeholder" and node.name in constants:
            node.meta["val"] = node.meta["val"].contiguous()
