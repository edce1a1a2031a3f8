# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Choosing budgets per layer leaves the model alone, reads every kind of input, refuses what it cannot use."""

import pytest
import torch
import torch.nn.functional as F
from allocations import text, white
from helpers import random_ids, random_model

from modeling_essm import ESSMForPairClassification, ESSMForSequenceClassification, ESSMModel
from modeling_essm.budgets import allocation as budget_allocation
from modeling_essm.budgets.allocation import (
    allocate_spectral_budget,
    calibration_loss,
    read_calibration,
)


def test_the_model_stays_as_it_is():
    model = random_model(dropout=0.5).train()
    model.model.layers[0].eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    stream = ({"input_ids": random_ids(2, 16, seed=i)} for i in range(2))  # read once, used many times
    first = allocate_spectral_budget(model, 20, "loss", stream)
    again = allocate_spectral_budget(model, 20, "loss", [{"input_ids": random_ids(2, 16, seed=i)} for i in range(2)])
    allocate_spectral_budget(model, 20, "distortion", text())
    assert first == again  # no dropout
    model.config.spectral_budget = 2  # the default of calls, not the capacity
    for method in budget_allocation.METHODS:
        found = allocate_spectral_budget(model, 20, method, text())
        model.config.spectral_budget = None
        assert found == allocate_spectral_budget(model, 20, method, text())
        model.config.spectral_budget = 2
    model.config.spectral_budget = None
    assert model.training and not model.model.layers[0].training
    assert all(parameter.grad is None for parameter in model.parameters())
    assert model.config.spectral_budget is None and not any(m._forward_hooks for m in model.modules())
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_the_loss_is_the_mean_over_all_targets():
    model, ids = random_model(), random_ids(3, 24)
    mask = (torch.arange(24) < torch.tensor([[24], [10], [5]])).long()
    parts = [{"input_ids": ids[:1]}, {"input_ids": ids[1:2, :10]}, {"input_ids": ids[2:, :5]}]
    with torch.no_grad():
        logits = model(ids, spectral_budget=[3, 9]).logits[:, :-1]
    expected = F.cross_entropy(logits.mT, ids[:, 1:], reduction="none")[mask[:, 1:].bool()].mean()
    for calibration in (parts, [{"input_ids": ids, "attention_mask": mask}]):
        found = calibration_loss(model, read_calibration(model, calibration), [3, 9])
        assert found == pytest.approx(float(expected), rel=1e-5)
    labels = torch.full_like(ids, -100)
    labels[:, 7] = 1  # given labels are the ones
    found = calibration_loss(model, read_calibration(model, [{"input_ids": ids, "labels": labels}]), [3, 9])
    assert found == pytest.approx(float(-logits[:, 6].log_softmax(-1)[:, 1].mean()), rel=1e-5)


def test_padding_does_not_count():
    model, ids = random_model(num_hidden_layers=3), random_ids(3, 24)
    mask = torch.ones_like(ids)
    padded = {"input_ids": F.pad(ids, (0, 40)), "attention_mask": F.pad(mask, (0, 40))}
    left = {"input_ids": F.pad(ids, (40, 0)), "attention_mask": F.pad(mask, (40, 0))}
    for method in ("loss", "distortion", "aire"):
        expected = allocate_spectral_budget(model, 21, method, [{"input_ids": ids}])
        assert allocate_spectral_budget(model, 21, method, [padded]) == expected
        assert allocate_spectral_budget(model, 21, method, [left]) == expected
    losses = [
        calibration_loss(model, read_calibration(model, [b]), [9] * 3) for b in ({"input_ids": ids}, padded, left)
    ]
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-5)


@pytest.mark.parametrize("method", budget_allocation.METHODS)
def test_classifiers_of_features(method):
    model = random_model(ESSMForSequenceClassification, num_input_features=2, num_labels=3)
    inputs = {"input_features": white(6, 20, 2), "attention_mask": torch.ones(6, 20, dtype=torch.long)}
    budgets = allocate_spectral_budget(model, 14, method, [inputs | {"labels": torch.arange(6) % 3}])
    assert sum(budgets) == 14
    if method != "loss":
        assert sum(allocate_spectral_budget(model, 14, method, [inputs])) == 14  # weights from the output's power


@pytest.mark.parametrize("method", budget_allocation.METHODS)
def test_pairs_of_documents(method, monkeypatch):
    model, ids = random_model(ESSMForPairClassification, num_labels=2), random_ids(3, 2, 20)
    mask = (torch.arange(20) < torch.tensor([[20, 5], [9, 20], [20, 20]])[..., None]).long()
    for inputs in ({"input_ids": ids}, {"input_ids": ids, "attention_mask": mask}):
        batch = [inputs | {"labels": torch.tensor([0, 1, 1])}]
        assert sum(allocate_spectral_budget(model, 14, method, batch)) == 14


def test_autoregression_is_measured_only():
    model = random_model(ar_order=2)
    assert sum(allocate_spectral_budget(model, 14, calibration=text())) == 14
    for method, calibration in (("distortion", text()), ("aire", None)):
        with pytest.raises(ValueError, match="ar_order = 2"):
            allocate_spectral_budget(model, 14, method, calibration)


REFUSED = {
    "total-low": ({"total": 3}, r"total must be an integer in \[4, 64\].*got 3"),
    "total-high": ({"total": 65}, r"total must be an integer in \[4, 64\].*got 65"),
    "total-float": ({"total": 8.0}, r"total must be an integer in \[4, 64\].*got 8.0"),
    "total-bool": ({"total": True, "min_budget": 1}, r"total must be an integer in \[2, 64\].*got True"),
    "min-budget": ({"min_budget": 33}, r"min_budget must be an integer in \[1, 32\].*got 33"),
    "min-budget-zero": ({"min_budget": 0}, r"min_budget must be an integer in \[1, 32\].*got 0"),
    "min-budget-bool": ({"min_budget": True}, r"min_budget must be an integer in \[1, 32\].*got True"),
    "method": ({"method": "magic"}, r"method must be one of \('loss', 'distortion', 'aire'\), got 'magic'"),
    "loss-without-data": ({"method": "loss"}, "'loss' needs calibration.*got None"),
    "distortion-without-data": ({"method": "distortion"}, "'distortion' needs calibration.*got None"),
    "empty": ({"calibration": []}, "must hold a batch"),
    "only-padding": (
        {"calibration": [{"input_ids": torch.ones(1, 4).long(), "attention_mask": torch.zeros(1, 4)}]},
        "must hold a batch",
    ),
    "one-token": ({"calibration": [{"input_ids": torch.ones(1, 1).long()}]}, "must hold a batch"),
    "a-single-dict": ({"calibration": {"input_ids": torch.ones(1, 4).long()}}, "iterable of dicts.*got a dict of str"),
    "tensor": ({"calibration": torch.ones(2, 4).long()}, "iterable of dicts.*got a Tensor of Tensor"),
    "list-of-tensors": ({"calibration": [torch.ones(2, 4).long()]}, "iterable of dicts.*list of Tensor"),
    "no-inputs": ({"calibration": [{"labels": torch.ones(1, 4).long()}]}, r"must hold input_ids.*\['labels'\]"),
}


@pytest.mark.parametrize("arguments, message", REFUSED.values(), ids=REFUSED.keys())
def test_bad_input_is_refused_before_any_compute(arguments, message):
    model = random_model()
    model.register_forward_pre_hook(lambda *args: pytest.fail("the model ran"))
    with pytest.raises(ValueError, match=message):
        allocate_spectral_budget(model, **{"total": 12, **arguments})


def test_labels_are_asked_for():
    classifier = random_model(ESSMForSequenceClassification, num_labels=3)
    classifier.register_forward_pre_hook(lambda *args: pytest.fail("the model ran"))
    with pytest.raises(ValueError, match=r"'loss' needs labels in every batch .* got only \['input_ids'\]"):
        allocate_spectral_budget(classifier, 12, calibration=text())
    with pytest.raises(ValueError, match="needs a model with a loss, got a ESSMModel"):
        allocate_spectral_budget(random_model(ESSMModel), 12, calibration=text())
    with pytest.raises(ValueError, match="ESSMSpectralMixer layers, got a Linear"):
        allocate_spectral_budget(torch.nn.Linear(2, 2), 12)


def test_a_loss_that_is_not_finite_is_refused():
    model = random_model()
    with torch.no_grad():
        model.model.norm.weight[0] = torch.nan
    with pytest.raises(ValueError, match=r"calibration loss at spectral_budget \[32, 32\] must be finite, got nan"):
        allocate_spectral_budget(model, 12, calibration=text())
