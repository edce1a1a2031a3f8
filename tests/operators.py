# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Inputs of the spectral operator, and all that an algorithm returns for them."""

import torch

from modeling_essm.spectral_constants import state_dtype

H = 1024
# The recurrence reproduces the filters to 4e-6 (tests/package/test_spectral_basis.py), which bounds fp64. fp32 adds
# rounding that the state scan amplifies for high channels: step by step up to 1e-4 within the 200 steps of these tests,
# up to 1e-3 over a whole filter of 512 at K = 32. bf16 operands carry 8 bits.
TOLERANCE = {torch.float64: 1e-5, torch.float32: 2e-4, torch.bfloat16: 2e-2}


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    difference = (actual.detach().double() - expected.detach().double()).norm()
    return float(difference / expected.detach().double().norm().clamp(min=1e-12))


def make_inputs(B, L, K, D=12, E=8, dtype=torch.float64, capacity=None, seed=0):
    generator = torch.Generator().manual_seed(seed)
    u = torch.randn(B, L, D, generator=generator, dtype=torch.float64).to(dtype)
    gates = torch.rand(B, L, K, generator=generator, dtype=torch.float64).to(dtype)
    M = (0.1 * torch.randn(capacity or K, D, E, generator=generator, dtype=torch.float64)).to(dtype)
    return u, gates, M


def make_heads(B, L, K, D=12, G=3, dtype=torch.float64):
    """Diagonal M_k, (K, D), and a gate for each of G parts of the width; one more channel than the budget."""
    generator = torch.Generator().manual_seed(0)
    u = torch.randn(B, L, D, generator=generator, dtype=torch.float64).to(dtype)
    gates = torch.rand(B, L, K, G, generator=generator, dtype=torch.float64).to(dtype)
    M = (0.3 * torch.randn(K + 1, D, generator=generator, dtype=torch.float64)).to(dtype)
    return u, gates, M


def reachable_state(operator, K, D, B, dtype, seed=1):
    """A state that some input has produced: the features of 100 random steps."""
    u, gates, M = make_inputs(B, 100, K, D=D, seed=seed)
    return operator(u, gates, M, algorithm="naive")[1].to(state_dtype(dtype))


def run(operator, algorithm, u, gates, M, x0, lengths, nested=False):
    """Outputs, the K leading states, and gradients of a fixed random functional of both."""
    leaves = [t.clone().requires_grad_() for t in (u, gates, M)]
    x0 = None if x0 is None else x0.clone().requires_grad_()
    y, state = operator(*leaves, x0, lengths, algorithm=algorithm, nested=nested)
    K = gates.shape[2]
    generator = torch.Generator().manual_seed(2)
    wy = torch.randn(y.shape, generator=generator, dtype=torch.float64).to(y.device)
    ws = torch.randn(state[:, :K].shape, generator=generator, dtype=torch.float64).to(y.device)
    ((y.double() * wy).sum() + (state[:, :K].double() * ws).sum()).backward()
    results = {"y": y.detach(), "state": state[:, :K].detach()}
    results |= {name: leaf.grad for name, leaf in zip(("du", "dgates", "dM"), leaves)}
    if x0 is not None:
        results["dx0"] = x0.grad[:, :K]
    return results
