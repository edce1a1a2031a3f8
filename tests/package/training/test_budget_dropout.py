# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Budget dropout: which budgets each update trains, what their loss is, and how it gets into the Trainers."""

import math
import random
from collections import Counter
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import losses_by_hand, random_ids, random_model

from modeling_essm import ESSMForSequenceClassification
from modeling_essm.training.budget_dropout import (
    BUDGETS,
    SCHEDULES,
    BudgetDropoutCallback,
    SandwichRule,
    budget_losses,
    budget_schedule,
    clip_budgets,
)

# ---------------------------------------------------------------------------------------------------------------------
# Schedules.


def assert_drawn_as(counts: Counter, probabilities: dict[int, float]) -> None:
    """Pearson's chi-square is below its mean plus five standard deviations."""
    assert set(counts) == set(probabilities)
    draws = sum(counts.values())
    chi_square = sum((counts[K] - draws * p) ** 2 / (draws * p) for K, p in probabilities.items())
    freedom = len(probabilities) - 1
    assert chi_square < freedom + 5 * (2 * freedom) ** 0.5


def test_budgets_are_clipped_to_the_capacity():
    assert clip_budgets(BUDGETS, 32) == BUDGETS
    assert clip_budgets(BUDGETS, 20) == (2, 3, 4, 6, 8, 12, 16, 20)
    assert clip_budgets(BUDGETS, 1) == (1,)


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_train_the_budgets_they_name(name):
    for capacity in (1, 2, 3, 10, 32):
        schedule = budget_schedule(name, capacity, seed=0)
        expected = {"uniform": tuple(range(1, capacity + 1)), "full": (capacity,)}
        assert schedule.budgets == expected.get(name, clip_budgets(BUDGETS, capacity))
        drawn = [schedule(update) for update in range(500)]
        assert {K for budgets in drawn for K in budgets} == set(schedule.budgets)
        assert all(budgets == tuple(sorted(set(budgets), reverse=True)) for budgets in drawn)
        assert name == "sandwich" or all(len(budgets) == 1 for budgets in drawn)


@pytest.mark.parametrize("name", ["discrete", "uniform"])
def test_every_budget_is_equally_likely(name):
    schedule = budget_schedule(name, 32, seed=3)
    counts = Counter(schedule(update)[0] for update in range(10000))
    assert_drawn_as(counts, dict.fromkeys(schedule.budgets, 1 / len(schedule.budgets)))


def test_authors_recipe():
    schedule = budget_schedule("authors", 32, seed=5, full_budget_updates=100)
    assert {schedule(update) for update in range(100)} == {(32,)}
    assert {schedule(update) for update in range(104, 10000, 8)} == {(32,)}
    # K = 2 * 16^v is snapped where K crosses the midpoint of two budgets, and P(v <= x) = 1 - (1 - x)^0.6.
    middles = [math.log((a + b) / 4, 16) for a, b in pairwise(BUDGETS)]
    below = [0.0, *(1 - (1 - x) ** 0.6 for x in middles), 1.0]
    probabilities = {K: b - a for K, (a, b) in zip(BUDGETS, pairwise(below), strict=True)}
    counts = Counter(schedule(update)[0] for update in range(100, 10100) if update % 8)
    assert_drawn_as(counts, probabilities)


def test_sandwich_rule():
    for num_random, length in ((0, 2), (1, 3), (2, 4), (7, 9), (100, 9)):
        schedule = budget_schedule("sandwich", 32, seed=1, sandwich_random=num_random)
        drawn = [schedule(update) for update in range(100)]
        assert all(len(K) == len(set(K)) == length and K[0] == 32 and K[-1] == 2 for K in drawn)
    schedule = budget_schedule("sandwich", 32, seed=1)
    between = BUDGETS[1:-1]
    counts = Counter(K for update in range(10000) for K in schedule(update)[1:-1])
    # Drawn without replacement, so that counts vary less than assumed: the bound is on the safe side.
    assert_drawn_as(counts, dict.fromkeys(between, 1 / len(between)))
    pairs = Counter(schedule(update)[1:-1] for update in range(10000))
    assert_drawn_as(pairs, {(a, b): 1 / 21 for a in between for b in between if a > b})


def test_first_updates_can_train_the_full_budget():
    for name in SCHEDULES:
        warm, plain = (budget_schedule(name, 32, seed=2, full_budget_updates=n) for n in (20, 0))
        assert [warm(update) for update in range(20)] == [(32,)] * 20
        assert [warm(update) for update in range(20, 60)] == [plain(update) for update in range(20, 60)]
        assert warm.budgets == plain.budgets


# The format: checkpoints made on any machine, by any process, resume with these budgets.
GOLDEN = {
    "discrete": [(2,), (2,), (3,), (12,), (4,), (4,), (4,), (24,), (12,), (32,), (2,), (32,)],
    "uniform": [(22,), (14,), (6,), (32,), (16,), (14,), (31,), (5,), (26,), (27,), (16,), (6,)],
    "authors": [(32,), (24,), (2,), (24,), (24,), (6,), (32,), (8,), (32,), (6,), (24,), (8,)],
    "sandwich": [(32, 16, 3, 2), (32, 16, 4, 2), (32, 16, 12, 2), (32, 16, 3, 2), (32, 16, 8, 2), (32, 8, 6, 2)],
    "full": [(32,)] * 4,
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_budgets_depend_on_seed_and_update_only(name):
    schedule = budget_schedule(name, 32, seed=0)
    first = GOLDEN[name]
    assert [schedule(update) for update in range(len(first))] == first
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(123)
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    assert [schedule(update) for update in reversed(range(len(first)))] == first[::-1]  # out of order, other seeds
    assert torch.equal(torch.get_rng_state(), states[0]) and random.getstate() == states[1]
    assert (np.random.get_state()[1] == states[2]).all()
    other = budget_schedule(name, 32, seed=1)
    assert name == "full" or [other(update) for update in range(50)] != [schedule(update) for update in range(50)]


def test_bad_schedules_are_refused():
    with pytest.raises(ValueError, match=r"budget_schedule must be one of .*'discrete'.*, got 'cosine'"):
        budget_schedule("cosine", 32, seed=0)
    with pytest.raises(ValueError, match=r"capacity must be at least 1, got 0"):
        budget_schedule("uniform", 0, seed=0)
    with pytest.raises(ValueError, match=r"full_budget_updates must be at least 0, got -1"):
        budget_schedule("authors", 32, seed=0, full_budget_updates=-1)
    with pytest.raises(ValueError, match=r"sandwich_random must be at least 0, got -2"):
        budget_schedule("sandwich", 32, seed=0, sandwich_random=-2)


# ---------------------------------------------------------------------------------------------------------------------
# Losses.


def gradients(model) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize(("weight", "num_items"), [(0.0, None), (0.3, 40), (1.0, None)])
def test_losses_of_a_language_model(weight, num_items):
    model, budgets = random_model().train(), (32, 6, 2)
    ids = random_ids(2, 12)
    labels = ids.clone()
    labels[0, :5] = labels[1, -3:] = -100
    inputs = {"input_ids": ids, "labels": labels}
    kwargs = {} if num_items is None else {"num_items_in_batch": num_items}
    by_hand = losses_by_hand(model, inputs, budgets, weight, num_items)
    sum(by_hand).backward()
    expected = gradients(model)
    model.zero_grad()

    def forward(K):
        return model(**inputs, **kwargs, spectral_budget=K)

    values = []
    for loss in budget_losses(forward, budgets, labels=labels, distillation_weight=weight, **kwargs):
        loss.backward()  # one graph at a time
        values.append(loss.detach())
    # fp32 against fp64 sums of some 30 numbers of size 5
    torch.testing.assert_close(torch.stack(values).double(), torch.stack(by_hand).detach(), rtol=1e-5, atol=1e-6)
    one_by_one = gradients(model)
    for name, gradient in expected.items():
        torch.testing.assert_close(one_by_one[name], gradient, rtol=1e-4, atol=1e-6, msg=name)
    model.zero_grad()
    sum(budget_losses(forward, budgets, labels=labels, distillation_weight=weight, **kwargs)).backward()
    for name, gradient in gradients(model).items():  # another order of sums
        torch.testing.assert_close(gradient, one_by_one[name], rtol=1e-4, atol=1e-6, msg=name)


def test_labels_may_be_shifted_before():
    model, ids = random_model(), random_ids(2, 9)
    labels = ids.masked_fill(torch.arange(9) == 3, -100)
    shifted = {"labels": labels, "shift_labels": F.pad(labels[:, 1:], (0, 1), value=-100)}

    def losses(**inputs):
        parts = budget_losses(
            lambda K: model(ids, **inputs, use_cache=False, spectral_budget=K),
            (8, 3),
            distillation_weight=0.5,
            **inputs,
        )
        return [part.item() for part in parts]

    assert losses(**shifted) == losses(labels=labels)


def test_losses_of_a_classifier():
    model, budgets = random_model(ESSMForSequenceClassification, num_labels=5), (32, 4)
    ids, labels = random_ids(3, 8), torch.tensor([0, 4, 2])
    full, small = (model(ids, labels=labels, spectral_budget=K) for K in budgets)
    kl = F.kl_div(small.logits.log_softmax(-1), full.logits.softmax(-1), reduction="batchmean")
    assert kl > 1e-4
    for given in (labels, None):
        losses = budget_losses(
            lambda K: model(ids, labels=labels, spectral_budget=K), budgets, labels=given, distillation_weight=0.25
        )
        expected = torch.stack([full.loss / 2, (0.75 * small.loss + 0.25 * kl) / 2])
        torch.testing.assert_close(torch.stack(list(losses)), expected)


def test_forward_runs_when_its_loss_is_asked_for():
    ran = []

    def forward(K):
        ran.append(K)
        return SimpleNamespace(loss=torch.tensor(float(K)), logits=torch.zeros(1, 2))

    losses = budget_losses(forward, (8, 2))
    assert ran == []
    assert next(losses) == 4.0 and ran == [8]
    assert next(losses) == 1.0 and ran == [8, 2]
    assert next(losses, None) is None


def test_bad_losses_are_refused():
    def forward(K):
        return SimpleNamespace(loss=torch.tensor(1.0), logits=torch.zeros(1, 3, 2))

    for weight in (-0.1, 1.5, math.nan):
        with pytest.raises(ValueError, match=r"distillation_weight must be in \[0, 1\], got"):
            budget_losses(forward, (8, 2), distillation_weight=weight)
        with pytest.raises(ValueError, match=r"distillation_weight must be in \[0, 1\], got"):
            BudgetDropoutCallback(SandwichRule((2, 8)), weight)
    with pytest.raises(ValueError, match="at least one budget"):
        budget_losses(forward, ())
    with pytest.raises(ValueError, match=r"largest budget first, got \(2, 8\)"):
        budget_losses(forward, (2, 8), distillation_weight=0.5)
    with pytest.raises(ValueError, match=r"logits of shape \(1, 3, 2\) needs labels"):
        list(budget_losses(forward, (8, 2), distillation_weight=0.5))
    with pytest.raises(ValueError, match=r"integer type, got torch\.float32"):
        list(budget_losses(forward, (8, 2), labels=torch.zeros(1, 3), distillation_weight=0.5))
    with pytest.raises(ValueError, match="returned no loss"):
        list(budget_losses(lambda K: SimpleNamespace(loss=None), (8, 2)))


def test_channels_above_the_budget_get_a_gradient_of_zero():
    """And not None: AdamW goes on moving them by their momentum and shrinks them."""
    model, ids = random_model().train(), random_ids(2, 16)
    model(ids, labels=ids, spectral_budget=2).loss.backward()
    per_channel = {n: p for n, p in model.named_parameters() if p.shape[0] == 32 and ("mixing" in n or "gate_out" in n)}
    assert len(per_channel) == 6  # two layers of gate weight and bias, and M
    for name, p in per_channel.items():
        assert not p.grad[2:].any() and p.grad[:2].any(), name
