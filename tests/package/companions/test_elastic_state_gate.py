# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""The gate: depths are monotone in the objective for any weights, and its three trainings send gradients their way."""

import pytest
import torch
from elastic_states import random_inputs, random_model, tiny

from modeling_essm.companions import ElasticStateModel
from modeling_essm.companions.models.gate_elastic_state import policy_loss

LOSSES = torch.logspace(-8, 4, 200, dtype=torch.float64)


def test_depths_are_monotone_and_in_range(seed=0):
    gate = random_model(seed=seed, max_refine_depth=4).gate
    with torch.no_grad():
        for parameter in gate.parameters():
            parameter.copy_(2 * random_inputs(*parameter.shape, seed=seed))
        gate.first.sub_(1.0)
        assert (gate.thresholds.diff() > 0).all()
        K = gate.depths(LOSSES)
        assert K.dtype == torch.int64 and 0 <= K.min() <= K.max() <= 4 and (K.diff() >= 0).all()
        assert len(K.unique()) >= 2
        s = gate.score(LOSSES)
        assert torch.equal(K, sum((s > tau).long() for tau in gate.thresholds))
        assert (gate.depths(LOSSES, 1.0) <= K).all() and (gate.depths(LOSSES, 1.0) < K).any()
        assert gate.depths(LOSSES, float("inf")).max() == 0 and gate.depths(LOSSES, -float("inf")).min() == 4
        assert gate.depths(torch.tensor([-1.0, 0.0, float("nan")], dtype=torch.float64)).tolist()[2] == 0


def test_a_new_gate_has_the_configured_thresholds():
    gate = ElasticStateModel(tiny(gate_first_threshold=-1.0, gate_threshold_gap=0.5)).gate
    torch.testing.assert_close(gate.thresholds, torch.tensor([-1.0, -0.5, 0.0]))
    torch.testing.assert_close(gate.score(torch.tensor([0.5])), torch.tensor([0.5]).log(), rtol=0, atol=3e-6)


def test_straight_through_is_hard_with_the_gradient_of_the_sigmoid():
    gate = random_model(gate_temperature=0.7).gate
    masks = gate.masks(LOSSES)
    torch.testing.assert_close(masks.sum(1), gate.depths(LOSSES).double())
    weights = random_inputs(*masks.shape)
    hard = torch.autograd.grad((weights * masks).sum(), list(gate.parameters()))
    p = (gate.margins(LOSSES) / 0.7).sigmoid()
    soft = torch.autograd.grad((weights * p).sum(), list(gate.parameters()))
    torch.testing.assert_close(hard, soft)
    assert all((g != 0).all() for g in hard)
    losses = LOSSES.clone().requires_grad_()
    gate.masks(losses).sum().backward()
    assert losses.grad is None  # proposals do not learn to look harder or easier


def test_relaxed_is_the_sigmoid_and_hardens():
    model = random_model(gate_training="relaxed")
    masks = model.gate.masks(LOSSES)
    assert ((masks > 0.05) & (masks < 0.95)).any()
    model.set_gate_temperature(1e-4)
    far = model.gate.margins(LOSSES).abs().min(1).values > 1e-2
    torch.testing.assert_close(model.gate.masks(LOSSES).sum(1)[far], model.gate.depths(LOSSES)[far].double())
    with pytest.raises(ValueError, match=r"temperature must be a number in \(0, inf\), got 0"):
        model.set_gate_temperature(0)


def test_sampled_depths_follow_the_policy():
    """Frequencies and probabilities of K against products of p_j and 1 - p_j; the probabilities of all K sum to one."""
    gate = random_model().gate
    torch.manual_seed(0)
    losses = torch.full((20000,), 0.7, dtype=torch.float64)
    with torch.no_grad():
        sample, p = gate.sample(losses), gate.margins(losses[:1])[0].sigmoid()
        stop = torch.cat([1 - p, torch.ones(1)])
        exact = torch.cat([torch.ones(1), p.cumprod(0)]) * stop
        assert abs(float(exact.sum()) - 1) < 1e-12
        found = torch.bincount(sample.depths, minlength=4) / len(losses)
        assert (found - exact).abs().max() < 5 * 0.5 / len(losses) ** 0.5  # five standard deviations, at most
        torch.testing.assert_close(sample.log_prob, exact.log()[sample.depths])
        assert gate.sample(losses, most=1).depths.max() == 1
        each = -(p * p.log() + (1 - p) * (1 - p).log())
        reached = torch.cat([torch.ones(1), p.cumprod(0)[:-1]])
        expected = (reached * each).sum()  # the entropy of decisions that are made, averaged over how many are
        torch.testing.assert_close(sample.entropy.mean(), expected, rtol=0.02, atol=0)
        torch.testing.assert_close(expected, -(exact * exact.log()).sum())


def test_the_policy_gradient_is_that_of_the_expected_cost():
    """Averaged over draws: d/d tau of the mean discounted cost, where the cost at t is c(K_t)."""
    model = random_model(max_refine_depth=1, policy_discount=0.5, policy_entropy=0.0)
    gate, cost = model.gate, torch.tensor([3.0, 1.0], dtype=torch.float64)
    B, L, losses = 4000, 3, torch.tensor(0.6, dtype=torch.float64)
    torch.manual_seed(0)
    samples = [gate.sample(losses.expand(B)) for _ in range(L)]
    costs = torch.stack([cost[sample.depths] for sample in samples], 1)
    log_prob, entropy = (torch.stack([getattr(s, name) for s in samples], 1) for name in ("log_prob", "entropy"))
    real = torch.ones(B, L, dtype=torch.bool)
    (found,) = torch.autograd.grad(policy_loss(costs, log_prob, entropy, real, model.config), gate.first)
    p = gate.margins(losses[None]).sigmoid().sum()
    (exact,) = torch.autograd.grad((1 - p) * cost[0] + p * cost[1], gate.first)
    # an advantage of about 1.2 times 0.5 for each draw, five standard deviations: 5 * 0.6 / sqrt(12,000)
    assert abs(float(exact)) > 0.3 and abs(float(found - exact)) < 0.03
    with pytest.raises(ValueError, match="at least 2 rows"):
        policy_loss(costs[:1], log_prob[:1], entropy[:1], real[:1], model.config)


def test_the_policy_gradient_counts_later_costs_against_the_other_rows():
    """Advantages by hand: costs to come, discounted by 1/2, less those of the only other row; a row that ended."""
    config = random_model(policy_discount=0.5, policy_entropy=0.25).config
    costs = torch.tensor([[0.0, 1.0, 7.0], [0.0, 2.0, 0.0]])
    real = torch.tensor([[True, True, False], [True, True, True]])
    log_prob, entropy = torch.zeros(2, 3, requires_grad=True), torch.zeros(2, 3, requires_grad=True)
    policy_loss(costs, log_prob, entropy, real, config).backward()
    assert torch.equal(log_prob.grad * 5, torch.tensor([[-0.5, -1.0, 0.0], [0.5, 1.0, 0.0]]))
    assert torch.equal(entropy.grad * 5, -0.25 * real)


@pytest.mark.parametrize("gate_training", ["straight_through", "relaxed"])
def test_the_loss_reaches_the_gate_and_a_penalty_lowers_the_depth(gate_training):
    """What lambda adds to a step of descent raises thresholds; without it the gate sees the objective alone."""
    grads = {}
    for penalty in (0.0, 1.0):
        model = random_model(gate_training=gate_training, compute_penalty=penalty).train()
        model(random_inputs(4, 3, 5)).loss.backward()
        grads[penalty] = torch.cat([parameter.grad.flatten() for parameter in model.gate.parameters()])
    assert (grads[0.0] != 0).all()  # the gate sees how much each step lowers the objective
    change = -(grads[1.0] - grads[0.0])  # of a descent step, due to lambda
    names = [name for name, p in model.gate.named_parameters() for _ in range(p.numel())]
    direction = dict(zip(names, change.tolist()))
    assert direction["first"] > 0 and direction["bias"] < 0 and direction["gaps"] > 0
