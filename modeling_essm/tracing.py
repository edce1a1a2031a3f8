# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Who looks at the operations of a call: code with a gradient of its own asks, to show plain tensor operations then."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad


def is_transformed(*tensors: Tensor | None) -> bool:
    """Whether torch.func or forward-mode AD looks at these tensors."""
    if torch.compiler.is_compiling():
        return False
    if torch._C._are_functorch_transforms_active():
        return True
    level = forward_ad._current_level
    return level >= 0 and any(t is not None and forward_ad.unpack_dual(t).tangent is not None for t in tensors)
