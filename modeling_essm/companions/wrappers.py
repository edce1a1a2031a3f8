# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""What is wrapped around a model whose Parameters are replaced: DistributedDataParallel and torch.compile."""

from __future__ import annotations

import gc
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def unwrap(model: nn.Module) -> nn.Module:
    """The model inside of DistributedDataParallel and torch.compile's wrapper."""
    inner = model.module if isinstance(model, DistributedDataParallel) else getattr(model, "_orig_mod", None)
    return unwrap(inner) if isinstance(inner, nn.Module) else model


def rebuild_wrappers(model: nn.Module) -> None:
    """After Parameters of a model were replaced: DistributedDataParallel around it exchanges the new ones' gradients,
    and torch.compile's graphs of old shapes are dropped. transformers' Trainer keeps its wrapper to itself, so wrappers
    are found among the live objects, and made anew in place."""
    model = unwrap(model)
    if dist.is_available() and dist.is_initialized():
        for ddp in [o for o in gc.get_objects() if issubclass(type(o), DistributedDataParallel)]:
            if any(module is model for module in unwrap(ddp).modules()):
                _rebuild_ddp(ddp)
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()


def _rebuild_ddp(ddp: DistributedDataParallel) -> None:
    same = (
        "device_ids", "output_device", "dim", "broadcast_buffers", "process_group", "find_unused_parameters",
        "gradient_as_bucket_view", "static_graph", "mixed_precision",
    )  # fmt: skip
    training, module = ddp.training, ddp.module
    ddp.reducer = ddp.logger = None  # the old reducer takes its hooks off the Parameters that stay
    cap = None if getattr(ddp, "bucket_bytes_cap_default", False) else ddp.bucket_bytes_cap / 2**20
    DistributedDataParallel.__init__(ddp, module, bucket_cap_mb=cap, **{name: getattr(ddp, name) for name in same})
    ddp.train(training)
