# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""The short causal convolution of the gated block, each channel of the width by itself.

Of plain tensor operations autograd would make a zero-filled gradient for every tap's slice of the input, which costs
more than all else in the convolution: five times the time of the gradients written out here. Where something else
looks at the operations (a compiler, torch.func, forward-mode AD, second derivatives), it gets the plain ones.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .tracing import is_transformed


def short_convolution(u: Tensor, taps: Tensor) -> Tensor:
    """y(t) = sum_i taps[i] u(t + i), (B, p + L, D) by (p + 1, D) -> (B, L, D): u begins p steps before y."""
    if torch.compiler.is_compiling() or is_transformed(u, taps):
        return _plain(u, taps)
    if u.shape[1] == len(taps):  # a single step, the shortest way
        return (u * taps).sum(1, keepdim=True)
    return _ShortConvolution.apply(u, taps)


def _plain(u: Tensor, taps: Tensor) -> Tensor:
    L = u.shape[1] - len(taps) + 1
    y = u[:, :L] * taps[0]
    for i in range(1, len(taps)):
        y = torch.addcmul(y, u[:, i : i + L], taps[i])
    return y


class _ShortConvolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx, u: Tensor, taps: Tensor) -> Tensor:
        ctx.save_for_backward(u, taps)
        L = u.shape[1] - len(taps) + 1
        y = u[:, :L] * taps[0]
        for i in range(1, len(taps)):
            y.addcmul_(u[:, i : i + L], taps[i])
        return y

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor, ...]:
        u, taps = ctx.saved_tensors
        if torch.is_grad_enabled():  # the gradient is to be differentiated itself
            return torch.autograd.grad(_plain(u, taps), (u, taps), dy, create_graph=True)
        L, du, dtaps, product = dy.shape[1], torch.zeros_like(u), torch.empty_like(taps), torch.empty_like(dy)
        for i, tap in enumerate(taps):
            du[:, i : i + L].addcmul_(dy, tap)
            torch.sum(torch.mul(dy, u[:, i : i + L], out=product), (0, 1), out=dtaps[i])
        return du, dtaps
