# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Solving with a metric is solving with its dense matrix, which stays positive definite whatever is learned."""

import copy
import pickle

import pytest
import torch
from elastic_states import random_inputs, random_model, tiny

from modeling_essm.companions import ElasticStateModel
from modeling_essm.companions.models.corrector_elastic_state import METRICS

metrics = pytest.mark.parametrize("metric", METRICS)


@metrics
def test_solve_and_norm_are_those_of_the_dense_matrix(metric):
    G = random_model(metric=metric, metric_rank=2).corrector.metric
    with torch.no_grad():
        for parameter in G.parameters():
            parameter.add_(random_inputs(*parameter.shape, seed=1))  # far from the identity
        dense, g = G.matrix(), random_inputs(4, 6, seed=2)
        torch.testing.assert_close(dense, dense.mT, rtol=0, atol=1e-14)
        # fp64, condition numbers below 1e3
        torch.testing.assert_close(G.solver()(g), torch.linalg.solve(dense, g.mT).mT, rtol=1e-10, atol=1e-11)
        torch.testing.assert_close(G.norm(g), torch.stack([(row @ dense @ row).sqrt() for row in g]))


def test_a_new_metric_is_the_identity():
    """With "low_rank" up to U U^T: two columns with entries of about 0.01."""
    torch.manual_seed(0)
    for metric, atol in {"cholesky": 1e-6, "diagonal": 1e-6, "low_rank": 2 * 0.05**2}.items():
        G = ElasticStateModel(tiny(metric=metric, metric_rank=2)).corrector.metric.matrix()
        torch.testing.assert_close(G, torch.eye(6), rtol=0, atol=atol)


@metrics
def test_eigenvalues_stay_above_epsilon(metric):
    """After 1,000 steps in random directions, whose sum reaches far into the negative weights."""
    torch.manual_seed(0)
    metric = random_model(metric=metric, metric_rank=2, metric_epsilon=0.01).corrector.metric
    start = {name: parameter.clone() for name, parameter in metric.named_parameters()}
    optimizer = torch.optim.SGD(metric.parameters(), lr=0.3)
    for _ in range(1000):
        for parameter in metric.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
    assert all((parameter - start[name]).abs().max() > 3 for name, parameter in metric.named_parameters())
    eigenvalues = torch.linalg.eigvalsh(metric.matrix().detach())
    assert eigenvalues.min() >= 0.01 * (1 - 1e-9) - 1e-12 * float(eigenvalues.max())  # rounding of fp64
    assert metric.solver()(random_inputs(2, 6)).isfinite().all()


def test_a_kept_factor_follows_the_weights():
    """A stream factors G once; an optimizer's step, loading, another dtype and a copy make it anew."""
    model = random_model(metric="cholesky")
    metric, g = model.corrector.metric, random_inputs(3, 6)
    with torch.no_grad():
        first = metric.factor()
        assert metric.factor() is first
        with torch.inference_mode():
            assert metric.factor() is first
        copied = copy.deepcopy(model).corrector.metric
        pickle.loads(pickle.dumps(metric))
        metric.lower.add_(0.5)
        torch.testing.assert_close(metric.solver()(g), torch.linalg.solve(metric.matrix(), g.mT).mT)
        assert not torch.equal(metric.factor(), first)
        torch.testing.assert_close(copied.factor(), first)
        metric.load_state_dict(copied.state_dict())
        torch.testing.assert_close(metric.factor(), first)
        assert metric.float().factor().dtype == torch.float32
        before = metric.factor()
        metric.lower.data.mul_(3)  # as averages of weights are swapped in: no version tells
        assert not torch.equal(metric.factor(), before)
    assert metric.factor().requires_grad and metric.factor() is not metric.factor()
