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


@pytest.mark.parametrize("B, L, D, num_taps", [(2, 9, 3, 4), (1, 1, 5, 4), (2, 7, 4, 1)])
def test_outputs_and_gradients_are_those_of_the_definition(B, L, D, num_taps):
    u, taps, dy = make_inputs(B, L, D, num_taps)
    y, expected = short_convolution(u, taps), definition(u, taps)
    torch.testing.assert_close(y, expected)
    for actual, exact in zip(
        torch.autograd.grad(y, (u, taps), dy), torch.autograd.grad(expected, (u, taps), dy), strict=True
    ):
        torch.testing.assert_close(actual, exact)


def test_gradients_can_be_differentiated():
    u, taps, _ = make_inputs(2, 5, 3, 4)
    assert torch.autograd.gradgradcheck(short_convolution, (u, taps))


@pytest.mark.parametrize("frozen", ["u", "taps"])
def test_what_is_frozen_gets_no_gradient_and_the_other_its_own(frozen):
    inputs = dict(zip(("u", "taps", "dy"), make_inputs(2, 5, 3, 4), strict=True))
    dy = inputs.pop("dy")
    inputs[frozen] = inputs[frozen].detach()
    free = next(t for name, t in inputs.items() if name != frozen)

    def derivatives(function):
        (first,) = torch.autograd.grad(function(**inputs), free, dy)
        (graph,) = torch.autograd.grad(function(**inputs).square(), free, dy, create_graph=True)
        return first, graph, *torch.autograd.grad(graph.sum(), free)

    torch.testing.assert_close(derivatives(short_convolution), derivatives(definition))


def test_tangents_and_hessians_are_those_of_the_definition():
    u, taps, dy = make_inputs(2, 5, 3, 4)
    tangent = torch.ones_like(taps)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(taps.detach(), tangent)
        moved = forward_ad.unpack_dual(short_convolution(u.detach(), dual)).tangent
    torch.testing.assert_close(moved, definition(u, tangent))
    hessian = torch.func.hessian(lambda t: (short_convolution(u, t) ** 2 * dy).sum())(taps)
    torch.testing.assert_close(hessian, torch.func.hessian(lambda t: (definition(u, t) ** 2 * dy).sum())(taps))
