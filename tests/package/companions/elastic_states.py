# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Tiny elastic state models, objectives that count and that have a past, and a stream that is hard in places."""

import torch
from torch import nn

from modeling_essm.companions import ElasticStateConfig, ElasticStateModel

FIELDS = ("readouts", "latents", "proposals", "proposal_losses", "losses", "refine_depths")


def tiny(**fields):
    """Width 6, three modes, a small MLP as the readout, and no drift or trust region to hide a step."""
    defaults = {"num_input_features": 5, "latent_size": 6, "hidden_size": 7, "readout_hidden_size": 12}
    defaults |= {"objective": "squared_error", "max_refine_depth": 3, "trust_radius": None, "drift": 0.0}
    return ElasticStateConfig(**(defaults | fields))


def random_model(seed=0, dtype=torch.float64, **fields):
    """A model whose gate, metric and recurrence are moved away from where they start, in eval mode.

    The gate's thresholds lie where the objective of random inputs does, so that depths differ.
    """
    torch.manual_seed(seed)
    model = ElasticStateModel(tiny(**({"gate_first_threshold": -0.5, "gate_threshold_gap": 0.4} | fields)))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model.to(dtype).eval()


def random_inputs(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def run(model, *args, **kwargs):
    with torch.no_grad():
        return model(*args, **kwargs)


def assert_same(one, other, atol=1e-12):
    for name in FIELDS:
        torch.testing.assert_close(one[name], other[name], rtol=0, atol=atol)


def smooth(y, observation, history):
    """The squared error, plus distance from committed readouts that are real."""
    past = (y[:, None] - history["readouts"]).square().mean(-1) * history["real"]
    return (y - observation).square().mean(-1) + past.sum(1)


class CountBackward(torch.autograd.Function):
    """The identity, that calls `told` with the number of rows whenever a gradient passes."""

    @staticmethod
    def forward(ctx, x, told):
        ctx.told = told
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        ctx.told(len(grad))
        return grad, None


class Counting(nn.Module):
    """The squared error, or `sign` times it, that counts rows: values, and gradients that were really computed."""

    def __init__(self, sign=1.0):
        super().__init__()
        self.sign, self.gradients, self.values = sign, 0, 0

    def _count(self, rows):
        self.gradients += rows

    def forward(self, y, observation, history):
        self.values += len(y)
        return self.sign * (CountBackward.apply(y, self._count) - observation).square().mean(-1)


def hard_stream(B, L, F, generator):
    """Features (B, L, F), observations (B, L, F), hard (B, L) bool.

    What is observed is a smooth signal. Features are the same, but zero at hard positions, where a proposal cannot know
    it and refinement can.
    """
    signal = torch.randn(B, L, F, generator=generator)
    hard = torch.rand(B, L, generator=generator) < 0.3
    return signal.masked_fill(hard[..., None], 0.0), signal, hard
