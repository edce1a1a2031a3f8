# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""The short causal convolution of the gated block, each channel of the width by itself.

From plain tensor operations autograd would make a zero-filled gradient for every tap's slice of the input, which costs
more than all else in the convolution: five times the time of the gradients written out here. Where something else
looks at the operations (a compiler, torch.func, forward-mode AD, second derivatives), it gets the plain ones.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .tracing import is_transformed


def short_convolution(u: Tensor, taps: Tensor) -> Tensor:
    """y(t) = sum_i taps[i] u(t + i), so that the last tap is that of the present step.

    Args:
        u: (B, p + L, D), L >= 1, begins p steps before y. taps: (p + 1, D), of u's dtype.
    Returns:
        (B, L, D), in the same dtype.
    """
    if torch.compiler.is_compiling() or is_transformed(u, taps):
        return _plain(u, taps)
    if u.shape[1] == len(taps):  # a single step, the shortest way
        return (u * taps).sum(1, keepdim=True)
    return _ShortConvolution.apply(u, taps)


def _plain(u: Tensor, taps: Tensor) -> Tensor:
    L = u.shape[1] - len(taps) + 1
    y = u[:, :L] * taps[0]
    for i in range(1, len(taps)):
        y.addcmul_(u[:, i : i + L], taps[i])
    return y


class _ShortConvolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx, u: Tensor, taps: Tensor) -> Tensor:
        ctx.save_for_backward(u, taps)
        return _plain(u, taps)

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor | None, ...]:
        u, taps = ctx.saved_tensors
        of_u, of_taps = ctx.needs_input_grad
        if torch.is_grad_enabled():  # the gradient is to be differentiated itself
            wanted = [t for t in (u, taps) if t.requires_grad]
            found = iter(torch.autograd.grad(_plain(u, taps), wanted, dy, create_graph=True))
            return next(found) if of_u else None, next(found) if of_taps else None
        L, p = dy.shape[1], len(taps) - 1
        du, dtaps = None, None
        if of_u:
            du = torch.zeros_like(u)
            for i in range(p + 1):
                du[:, i : i + L].addcmul_(dy, taps[i])
        if of_taps:
            dtaps, product = torch.empty_like(taps), torch.empty_like(dy)
            for i in range(p + 1):
                torch.sum(torch.mul(dy, u[:, i : i + L], out=product), (0, 1), out=dtaps[i])
        return du, dtaps
