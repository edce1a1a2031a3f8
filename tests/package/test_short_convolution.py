# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""The short convolution against torch's own, with its gradients, in every way of looking at them."""

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import forward_ad

from modeling_essm.mixer_essm import short_convolution


def definition(u, taps):
    """F.conv1d of each channel by itself."""
    return F.conv1d(u.mT, taps.T.unsqueeze(1), groups=u.shape[2]).mT


def make_inputs(B, L, D, num_taps):
    generator = torch.Generator().manual_seed(B + 10 * L + 100 * num_taps)
    u = torch.randn(B, L + num_taps - 1, D, generator=generator, dtype=torch.float64)
    taps = torch.randn(num_taps, D, generator=generator, dtype=torch.float64)
    return u.requires_grad_(), taps.requires_grad_(), torch.randn(B, L, D, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("frozen", [None, 0, 1], ids=["nothing", "u", "taps"])
@pytest.mark.parametrize("shape", [(2, 9, 3, 4), (1, 1, 5, 4), (2, 7, 4, 1)], ids=str)
def test_outputs_and_gradients_are_those_of_the_definition(shape, frozen):
    """Second ones too."""
    *inputs, dy = make_inputs(*shape)
    free = [tensor for i, tensor in enumerate(inputs) if i != frozen]
    if frozen is not None:
        inputs[frozen].requires_grad_(False)

    def derivatives(function):
        y = function(*inputs)
        first = torch.autograd.grad(y, free, dy)
        graph = torch.autograd.grad(function(*inputs).square(), free, dy, create_graph=True)
        return y, *first, *graph, *torch.autograd.grad(sum(part.sum() for part in graph), free)

    for actual, expected in zip(derivatives(short_convolution), derivatives(definition), strict=True):
        torch.testing.assert_close(actual, expected)


def test_tangents_and_hessians_are_those_of_the_definition():
    u, taps, dy = make_inputs(2, 5, 3, 4)
    tangent = torch.ones_like(taps)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(taps.detach(), tangent)
        moved = forward_ad.unpack_dual(short_convolution(u.detach(), dual)).tangent
    torch.testing.assert_close(moved, definition(u, tangent))
    hessian = torch.func.hessian(lambda t: (short_convolution(u, t) ** 2 * dy).sum())(taps)
    torch.testing.assert_close(hessian, torch.func.hessian(lambda t: (definition(u, t) ** 2 * dy).sum())(taps))
