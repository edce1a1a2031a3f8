# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""An ES-SSM at fixed budgets as programs for other runtimes: torch.export, ONNX, ExecuTorch."""

from .executorch import save_executorch
from .onnx import WeightFile, save_onnx
from .programs import TensorSpec, empty_states, export_programs, signature

__all__ = ["TensorSpec", "WeightFile", "empty_states", "export_programs", "save_executorch", "save_onnx", "signature"]
