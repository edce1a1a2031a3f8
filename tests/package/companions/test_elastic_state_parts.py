# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""The parts of an elastic state model: the gate, which asks for steps, the metric G, and the corrector, which takes
them: natural gradient, trust region, drift, retraction, acceptance, each row on its own, and counted."""

import pytest
import torch
from elastic_states import Counting, random_inputs, random_model, tiny
from huggingface_hub.errors import StrictDataclassError
from torch import nn

from modeling_essm.companions import ElasticStateModel
from modeling_essm.companions.models.corrector_elastic_state import METRICS, InnerWork
from modeling_essm.companions.models.gate_elastic_state import policy_loss

# --- The gate: depths are monotone in the objective for any weights, and its trainings send gradients their way

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
        s = torch.nn.functional.softplus(gate.weight) * (LOSSES + 1e-6).log() + gate.bias
        assert torch.equal(K, sum((s > tau).long() for tau in gate.thresholds))
        assert (gate.depths(LOSSES, 1.0) <= K).all() and (gate.depths(LOSSES, 1.0) < K).any()
        assert gate.depths(LOSSES, float("inf")).max() == 0 and gate.depths(LOSSES, -float("inf")).min() == 4
        assert gate.depths(torch.tensor([-1.0, 0.0, float("nan")], dtype=torch.float64)).tolist()[2] == 0


def test_a_new_gate_has_the_configured_thresholds():
    gate = ElasticStateModel(tiny(gate_first_threshold=-1.0, gate_threshold_gap=0.5)).gate
    torch.testing.assert_close(gate.thresholds, torch.tensor([-1.0, -0.5, 0.0]))
    at_one_half = torch.tensor([0.5]).log() - gate.thresholds
    torch.testing.assert_close(gate.margins(torch.tensor([0.5]))[0], at_one_half, rtol=0, atol=3e-6)


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
    with pytest.raises(StrictDataclassError, match=r"must be a number in \(0, inf\), got 0"):
        model.set_gate_temperature(0)


def test_sampled_depths_follow_the_policy():
    """Frequencies and probabilities of K against products of p_j and 1 - p_j; the probabilities of all K sum to one."""
    gate = random_model().gate
    torch.manual_seed(0)
    losses = torch.full((20000,), 0.7, dtype=torch.float64)
    with torch.no_grad():
        (depths, log_prob, entropy), p = gate.sample(losses), gate.margins(losses[:1])[0].sigmoid()
        stop = torch.cat([1 - p, torch.ones(1)])
        exact = torch.cat([torch.ones(1), p.cumprod(0)]) * stop
        assert abs(float(exact.sum()) - 1) < 1e-12
        found = torch.bincount(depths, minlength=4) / len(losses)
        assert (found - exact).abs().max() < 5 * 0.5 / len(losses) ** 0.5  # five standard deviations, at most
        torch.testing.assert_close(log_prob, exact.log()[depths])
        assert gate.sample(losses, most=1)[0].max() == 1
        each = -(p * p.log() + (1 - p) * (1 - p).log())
        reached = torch.cat([torch.ones(1), p.cumprod(0)[:-1]])
        expected = (reached * each).sum()  # the entropy of decisions that are made, averaged over how many are
        torch.testing.assert_close(entropy.mean(), expected, rtol=0.02, atol=0)
        torch.testing.assert_close(expected, -(exact * exact.log()).sum())


def test_the_policy_gradient_counts_later_costs_against_the_other_rows():
    """Advantages by hand: costs to come, discounted by 1/2, less those of the only other row; a row that ended."""
    config = random_model(policy_discount=0.5, policy_entropy=0.25).config
    costs = torch.tensor([[0.0, 1.0, 7.0], [0.0, 2.0, 0.0]])
    real = torch.tensor([[True, True, False], [True, True, True]])
    log_prob, entropy = torch.zeros(2, 3, requires_grad=True), torch.zeros(2, 3, requires_grad=True)
    policy_loss(costs, log_prob, entropy, real, config).backward()
    assert torch.equal(log_prob.grad * 5, torch.tensor([[-0.5, -1.0, 0.0], [0.5, 1.0, 0.0]]))
    assert torch.equal(entropy.grad * 5, -0.25 * real)
    log_prob.grad = None
    policy_loss(costs[:1], log_prob[:1], entropy[:1], real[:1], config).backward()
    assert torch.equal(log_prob.grad[0] * 2, torch.tensor([0.5, 1.0, 0.0]))  # by itself: its costs to come


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


# --- The metric: solving is that of its dense matrix, which stays positive definite whatever is learned


@pytest.mark.parametrize("metric", METRICS)
def test_solving_is_that_of_the_dense_matrix(metric):
    """Far from the identity on both sides; eigenvalues stay above epsilon."""
    G, g = random_model(metric=metric, metric_rank=2, metric_epsilon=0.01).corrector.metric, random_inputs(4, 6, seed=2)
    with torch.no_grad():
        for shift in (0.0, -9.0):
            for parameter in G.parameters():
                parameter.add_(random_inputs(*parameter.shape, seed=1) + shift)
            dense = G.matrix()
            torch.testing.assert_close(dense, dense.mT, rtol=0, atol=1e-12)
            assert torch.linalg.eigvalsh(dense).min() >= 0.01 - 1e-15 * dense.norm()
            expected = torch.linalg.solve(dense, g.mT).mT  # fp64, condition numbers up to 1e6
            torch.testing.assert_close(G.solver()(g), expected, rtol=1e-9, atol=1e-9)


def test_a_new_metric_is_the_identity():
    """With "low_rank" up to U U^T: two columns with entries of about 0.01."""
    torch.manual_seed(0)
    for metric, atol in {"cholesky": 1e-6, "diagonal": 1e-6, "low_rank": 2 * 0.05**2}.items():
        G = ElasticStateModel(tiny(metric=metric, metric_rank=2)).corrector.metric.matrix()
        torch.testing.assert_close(G, torch.eye(6), rtol=0, atol=atol)


# --- The corrector


def refined(model, z0, depths, objective, work):
    """z_K (B, d) of proposals z0 (B, d), each row with its depth, on objective(z, rows) -> (B,); y is z."""

    def evaluate(z, rows):
        return z, objective(z, rows)

    start = model.corrector.judge(z0, evaluate, None, differentiable=True)
    end = model.corrector.refine(start, depths, evaluate, work)
    assert torch.equal(end.y, end.z) and end.losses.shape == (len(z0),)
    return end.z


def refine(model, z0, depth, objective):
    """Without gradients."""
    depths = torch.full((len(z0),), depth) if isinstance(depth, int) else depth
    work = InnerWork()
    with torch.no_grad():
        z = refined(model, z0, depths, objective, work)
    return z, work


def test_steps_stay_in_the_trust_region():
    """Short gradients pass unchanged; long ones end at rho, whatever their length."""
    corrector = random_model(trust_radius=0.3).corrector
    with torch.no_grad():
        g = random_inputs(50, 6) * torch.logspace(-3, 6, 50, dtype=torch.float64)[:, None]
        solve = corrector.metric.solver()
        v = corrector.direction(g, solve)
        kappa = (g * solve(g)).sum(1)
        expected = kappa.sqrt().clamp(max=0.3)
        assert (kappa.sqrt() < 0.15).any() and (kappa.sqrt() > 0.6).any()
        length = torch.einsum("bi,ij,bj->b", v, corrector.metric.matrix(), v).sqrt()
        torch.testing.assert_close(length, expected, rtol=1e-5, atol=0)  # 1e-12 under the roots, where kappa is 1e-6
        cosine = -(v * solve(g)).sum(1) / v.norm(dim=1) / solve(g).norm(dim=1)
        torch.testing.assert_close(cosine, torch.ones_like(cosine))  # descent, in the natural gradient's direction


def test_drift_pulls_back_and_keeps_its_fixed_point():
    model = random_model(drift=0.25, acceptance="none", retraction="ball", retraction_radius=100.0)
    z0, z = random_inputs(3, 6), random_inputs(3, 6, seed=1)
    flat, _ = refine(model, z0, 3, lambda z, rows: (z * 0).sum(1) + 1)
    assert torch.equal(flat, z0)
    with torch.no_grad():
        moved = model.corrector.move(z, z0, torch.zeros_like(z))
    torch.testing.assert_close(moved, z + 0.25 * (z0 - z))


@pytest.mark.parametrize("retraction", ["ball", "none"])
def test_retraction(retraction):
    corrector = random_model(retraction=retraction, retraction_radius=2.0).corrector
    z = random_inputs(20, 6) * torch.linspace(0.01, 3, 20)[:, None]
    assert (z.norm(dim=1) < 2).any() and (z.norm(dim=1) > 2).any()
    norms = {"ball": z.norm(dim=1).clamp(max=2.0), "none": z.norm(dim=1)}
    retracted = corrector.retract(z)
    torch.testing.assert_close(retracted.norm(dim=1), norms[retraction].double())
    torch.testing.assert_close(nn.functional.cosine_similarity(retracted, z), torch.ones(20, dtype=torch.float64))
    with torch.no_grad():
        start, v = retracted, random_inputs(20, 6, seed=7)
        moved, free = corrector.move(start, start, v), start + corrector.step_size * v
    torch.testing.assert_close(moved, corrector.retract(free))  # steps end there too
    assert torch.equal(moved, free) == (retraction == "none")


def wavy(z, rows):
    """Steep and oscillating: full steps often go up."""
    return (3 * z).sin().square().sum(1) + z.square().sum(1)


def test_accepted_steps_never_raise_the_objective():
    z0 = random_inputs(40, 6)
    taken, _ = refine(random_model(acceptance="none", step_size=1.0), z0, 1, wavy)
    raised = wavy(taken, None) > wavy(z0, None)
    assert 5 < raised.sum() < 40  # there is something to reject, and something to accept
    z, work = refine(random_model(acceptance="reject", step_size=1.0), z0, 1, wavy)
    assert torch.equal(z, torch.where(raised[:, None], z0, taken))
    assert work.gradients == 40


def test_a_shorter_step_is_half_of_the_longer():
    """alpha 1, 1/2 and 1/4 on l = c z^2 / 2, which falls for alpha c < 2, with G = I."""
    model = random_model(metric="diagonal", acceptance="backtrack")
    with torch.no_grad():
        model.corrector.metric.reset_parameters()
        model.corrector.log_step_size.fill_(0.0)
    c, z0 = torch.tensor([1.5, 3.0, 7.0, 9.0], dtype=torch.float64), random_inputs(4, 6)

    def evaluate(z, rows):
        return 0.5 * (c if rows is None else c[rows]) * z.square().sum(1)

    z, _ = refine(model, z0, 1, evaluate)
    factor = 1 - c * torch.tensor([1.0, 0.5, 0.25, 0.0])
    torch.testing.assert_close(z, factor[:, None] * z0)


def test_a_nan_is_not_accepted():
    z, _ = refine(random_model(), random_inputs(2, 6), 2, lambda z, rows: z.sum(1) / 0 - z.sum(1) / 0)
    assert torch.equal(z, random_inputs(2, 6))


def test_training_holds_the_inner_gradient_fixed():
    """d z_1 / d z_0 of one step is 1: what the step adds is data."""
    model, z0 = random_model(step_size=0.5).train(), random_inputs(1, 6).requires_grad_()
    z = refined(model, z0, torch.tensor([1]), lambda z, rows: z.square().sum(1), InnerWork())
    (grad,) = torch.autograd.grad(z[0, 0], z0)
    torch.testing.assert_close(grad[0], torch.eye(6, dtype=torch.float64)[0], rtol=0, atol=1e-12)


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.enable_grad])
def test_weights_get_no_gradient(mode):
    model, objective = random_model(), Counting()
    model.set_objective(objective)
    flags = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    model.readout[0].bias.requires_grad_(False)
    for parameter in model.gate.parameters():
        parameter.grad = torch.full_like(parameter, 7.0)  # of a call before
    with mode():
        output = model(random_inputs(2, 4, 5), refine_depth=2)
    assert objective.gradients >= output.gradient_calls == 16
    for name, parameter in model.named_parameters():
        assert (parameter.grad == 7.0).all() if name.startswith("gate.") else parameter.grad is None
        assert parameter.requires_grad == (flags[name] and name != "readout.0.bias")
