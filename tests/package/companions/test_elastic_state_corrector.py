# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""The inner step: natural gradient, trust region, drift, retraction, acceptance; each row on its own, counted."""

import pytest
import torch
from elastic_states import Counting, random_inputs, random_model
from torch import nn

from modeling_essm.companions.models.corrector_elastic_state import InnerWork


@torch.no_grad()
def quadratic(model, seed=3):
    """l(z) = 1/2 (z - c)^T G (z - c) with the model's own metric as the Hessian, and its minimiser c."""
    G, c = model.corrector.metric.matrix(), random_inputs(6, seed=seed)

    def evaluate(z, rows):
        return 0.5 * torch.einsum("bi,ij,bj->b", z - c, G, z - c)

    return evaluate, c


def refined(model, z0, depths, objective, work):
    """z_K (B, d) of proposals z0 (B, d), each row with its depth, on objective(z, rows) -> (B,); y is z."""

    def evaluate(z, rows):
        return z, objective(z, rows)

    start = model.corrector.judge(z0, evaluate, None, work, differentiable=True)
    end = model.corrector.refine(start, depths, evaluate, work)
    assert torch.equal(end.y, end.z) and end.losses.shape == (len(z0),)
    return end.z


def refine(model, z0, depth, objective):
    """Without gradients; values of the proposals themselves are not counted."""
    depths = torch.full((len(z0),), depth) if isinstance(depth, int) else depth
    work = InnerWork()
    with torch.no_grad():
        z = refined(model, z0, depths, objective, work)
    work.values -= len(z0)
    return z, work


@pytest.mark.parametrize("metric", ["cholesky", "diagonal", "low_rank"])
def test_newton_reaches_the_minimiser_in_one_step(metric):
    model = random_model(metric=metric)
    model.corrector.log_step_size.data.fill_(0.5)  # alpha is at most 1
    evaluate, c = quadratic(model)
    z, work = refine(model, random_inputs(4, 6), 1, evaluate)
    torch.testing.assert_close(z, c.expand(4, 6), rtol=0, atol=1e-10)  # fp64
    assert work.gradients == work.values == work.kept == 4


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
        # 1e-12 under the roots work where kappa is about 1e-6
        torch.testing.assert_close(corrector.metric.norm(v), expected, rtol=1e-5, atol=0)
        assert (corrector.metric.norm(v) <= 0.3 * (1 + 1e-5)).all()
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


@pytest.mark.parametrize("acceptance", ["reject", "backtrack"])
def test_accepted_steps_never_raise_the_objective(acceptance):
    z0 = random_inputs(40, 6)
    taken, _ = refine(random_model(acceptance="none", step_size=1.0), z0, 1, wavy)
    raised = wavy(taken, None) > wavy(z0, None)
    assert 5 < raised.sum() < 40  # there is something to reject, and something to accept
    z, work = refine(random_model(acceptance=acceptance, step_size=1.0), z0, 1, wavy)
    assert (wavy(z, None) <= wavy(z0, None)).all() and torch.equal(z[~raised], taken[~raised])
    kept = (z == z0).all(1)
    assert work.gradients == 40 and work.kept == 40 - kept.sum()
    if acceptance == "reject":
        assert torch.equal(kept, raised) and work.values == 40
    else:
        assert kept.sum() < raised.sum() and 40 + raised.sum() < work.values <= 40 + 2 * raised.sum()


def test_a_shorter_step_is_half_of_the_longer():
    """alpha 1, 1/2 and 1/4 on l = c z^2 / 2, which falls for alpha c < 2, with G = I."""
    model = random_model(metric="diagonal", acceptance="backtrack")
    with torch.no_grad():
        model.corrector.metric.delta.fill_(model.corrector.metric.one)
        model.corrector.log_step_size.fill_(0.0)
    c, z0 = torch.tensor([1.5, 3.0, 7.0, 9.0], dtype=torch.float64), random_inputs(4, 6)

    def evaluate(z, rows):
        return 0.5 * (c if rows is None else c[rows]) * z.square().sum(1)

    z, work = refine(model, z0, 1, evaluate)
    factor = 1 - c * torch.tensor([1.0, 0.5, 0.25, 0.0])
    torch.testing.assert_close(z, factor[:, None] * z0)
    assert work.values == 4 + 3 + 2 and work.kept == 3


def test_a_nan_is_not_accepted():
    z, work = refine(random_model(), random_inputs(2, 6), 2, lambda z, rows: z.sum(1) / 0 - z.sum(1) / 0)
    assert torch.equal(z, random_inputs(2, 6)) and work.kept == 0


@pytest.mark.parametrize("acceptance", ["reject", "backtrack"])
def test_rows_are_refined_on_their_own_and_only_as_often_as_they_ask(acceptance):
    """A batch with depths 0 to 3 is its rows one by one; gradients are computed for sum K rows."""
    model, depths = random_model(acceptance=acceptance, step_size=1.0), torch.tensor([2, 0, 3, 1, 0, 3])
    z0, scales, seen = random_inputs(6, 6), torch.tensor([0.1, 1.0, 0.6, 2.0, 0.3, 1.5]), []

    def objective(z, rows):  # of its own for every row
        return (scales[rows, None] * z).sin().square().sum(1) + (scales[rows, None] * z).square().sum(1)

    def counted(z, rows):
        rows = torch.arange(6) if rows is None else rows
        seen.append(rows.tolist())
        return objective(z, rows)

    z, work = refine(model, z0, depths, counted)
    steps = [[0, 2, 3, 5], [0, 2, 5], [2, 5]]
    if acceptance == "reject":  # before a step, for the rows that take it, and after it
        assert seen == [[*range(6)], *(rows for step in steps for rows in (step, step))]
    assert work.gradients == int(depths.sum())
    for i in range(6):
        alone, _ = refine(model, z0[[i]], int(depths[i]), lambda z, rows, i=i: objective(z, torch.tensor([i])))
        torch.testing.assert_close(z[[i]], alone, rtol=0, atol=1e-13)
    assert (work.values > 2 * work.gradients) == (acceptance == "backtrack")  # there is something to halve
    assert torch.equal(z[depths == 0], z0[depths == 0])
    assert not torch.equal(z[3], z0[3]) or acceptance == "reject"


def test_training_holds_the_inner_gradient_fixed():
    """d z_1 / d z_0 of one step is 1: what the step adds is data."""
    model = random_model(step_size=0.5).train()
    evaluate, _ = quadratic(model)
    z0 = random_inputs(1, 6).requires_grad_()
    z = refined(model, z0, torch.tensor([1]), evaluate, InnerWork())
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
