# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""The memory's rule against its definition, cut in any pieces, at extreme rates and in every precision."""

import pytest
import torch
from helpers import VARIANTS, random_ids, random_model

from modeling_essm.memory_essm import delta_rule


def by_definition(q, k, v, g, beta, S):
    """S(t) = exp(g) (I - beta k k^T) S(t-1) + beta k v^T and o(t) = S(t)^T q(t)."""
    eye, read = torch.eye(k.shape[2], dtype=k.dtype), []
    for t in range(k.shape[1]):
        key, b = k[:, t, :, None], beta[:, t, :, None]
        S = g[:, t, :, None].exp() * (eye - b * key * key.mT) @ S + b * key * v[:, t, None]
        read.append((S.mT @ q[:, t, :, None]).squeeze(2))
    return torch.stack(read, 1), S


def rule_inputs(L, g, beta, n=6, e=4):
    """q, k, v, decays around exp(g), write strengths around sigmoid(beta), and a state; fp64, B = 2."""
    generator = torch.Generator().manual_seed(L)
    q, k, v, a, b, S = (
        torch.randn(2, *size, generator=generator, dtype=torch.float64)
        for size in ((L, n), (L, n), (L, e), (L, 1), (L, 1), (n, e))
    )
    q, k = (torch.nn.functional.normalize(t, dim=-1) for t in (q, k))
    return q, k, v, -torch.nn.functional.softplus(a + g), (b + beta).sigmoid(), S


@pytest.mark.parametrize("pieces", [(1,), (2,), (17, 1, 15), (33, 70, 1)], ids=str)
def test_the_rule_is_its_definition_in_any_pieces(pieces):
    """Outputs, the state, and gradients by all inputs and by the state before the first step."""
    exact = [t.requires_grad_() for t in rule_inputs(sum(pieces), -3.0, 0.0)]
    single = [t.detach().float().requires_grad_() for t in exact]
    expected, last = by_definition(*exact)
    outputs, S = [], single[-1]
    for part in zip(*(t.split(pieces, 1) for t in single[:-1])):
        o, S = delta_rule(*part, S)
        outputs.append(o)
    torch.testing.assert_close((torch.cat(outputs, 1), S), (expected.float(), last.float()), rtol=1e-5, atol=1e-5)
    grads = [torch.autograd.grad(o.sum() + S.square().sum(), inputs) for o, S, inputs in
             ((expected, last, exact), (torch.cat(outputs, 1), S, single))]  # fmt: skip
    torch.testing.assert_close(grads[1], tuple(t.float() for t in grads[0]), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("g, beta", [(-50.0, 50.0), (50.0, 50.0), (50.0, -50.0), (0.0, 0.0)])
def test_long_sequences_stay_finite(g, beta):
    """5,000 steps without decay, and with one of e^-50 a step, whose product over a chunk is 0 in fp32."""
    exact = rule_inputs(5000, g, beta)
    single = [t.float().requires_grad_() for t in exact]
    o, S = delta_rule(*single)
    grads = torch.autograd.grad(o.sum() + S.sum(), single)
    assert all(t.isfinite().all() for t in (o, S, *grads))
    torch.testing.assert_close((o, S), tuple(t.float() for t in by_definition(*exact)), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_memory_in_16_bits(dtype):
    """Weights in 16 bits and autocast: near fp32, prompt and step; the memory's own state is in fp32."""
    model, ids = random_model(**VARIANTS["memory"]), random_ids(2, 20)

    def run(model, **options):
        with torch.no_grad(), torch.autocast("cpu", dtype, **options):
            prompt = model(ids[:, :-1], use_cache=True)
            step = model(ids[:, -1:], past_key_values=prompt.past_key_values)
            return torch.cat([prompt.logits, step.logits], 1).float(), prompt.past_key_values.states["0.memory"]

    expected, memory = run(model, enabled=False)
    tolerance = 8 * torch.finfo(dtype).eps
    for logits, S in (run(model), run(model.to(dtype), enabled=False)):
        assert S.dtype == torch.float32
        assert (S - memory).norm() < tolerance * memory.norm()
        assert (logits - expected).norm() < tolerance * expected.norm()
