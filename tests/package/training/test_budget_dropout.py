# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Budget dropout: which budgets each update trains, what their loss is, and how it gets into the Trainers."""

import math
import random
from collections import Counter
from itertools import pairwise, permutations
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import VARIANTS, random_ids, random_model

from modeling_essm import ESSMForSequenceClassification
from modeling_essm.training.budget_dropout import (
    BUDGETS,
    SCHEDULES,
    BudgetDropoutCallback,
    Part,
    budget_losses,
    budget_schedule,
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


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_train_the_budgets_they_name(name):
    clipped = {1: (1,), 3: (2, 3), 20: (2, 3, 4, 6, 8, 12, 16, 20), 32: BUDGETS}
    for capacity, expected in clipped.items():
        schedule = budget_schedule(name, capacity, seed=0)
        family = tuple(sorted({1, *expected}))
        named = {"uniform": tuple(range(1, capacity + 1)), "full": (capacity,), "family": family, "rows": family}
        assert schedule.budgets == named.get(name, expected)
        drawn = [schedule(update) for update in range(500)]
        assert {K for budgets in drawn for K in budgets} == set(schedule.budgets)
        assert all(len(budgets) == len(set(budgets)) for budgets in drawn)
        assert name == "rows" or all(budgets[0] == max(budgets) for budgets in drawn)
        assert name in ("sandwich", "rows", "family") or all(len(budgets) == 1 for budgets in drawn)
        warm = budget_schedule(name, capacity, seed=0, full_budget_updates=20)
        assert [warm(update) for update in range(60)] == [(capacity,)] * 20 + drawn[20:60]


@pytest.mark.parametrize("name", ["discrete", "uniform"])
def test_every_budget_is_equally_likely(name):
    schedule = budget_schedule(name, 32, seed=3)
    counts = Counter(schedule(update)[0] for update in range(10000))
    assert_drawn_as(counts, dict.fromkeys(schedule.budgets, 1 / len(schedule.budgets)))


def test_authors_recipe():
    schedule = budget_schedule("authors", 32, seed=5)
    assert {schedule(update) for update in range(0, 10000, 8)} == {(32,)}
    # K = 2 * 16^v is snapped where K crosses the midpoint of two budgets, and P(v <= x) = 1 - (1 - x)^0.6.
    middles = [math.log((a + b) / 4, 16) for a, b in pairwise(BUDGETS)]
    below = [0.0, *(1 - (1 - x) ** 0.6 for x in middles), 1.0]
    probabilities = {K: b - a for K, (a, b) in zip(BUDGETS, pairwise(below), strict=True)}
    assert_drawn_as(Counter(schedule(update)[0] for update in range(10000) if update % 8), probabilities)


def test_sandwich_rule():
    for num_random, length in ((0, 2), (1, 3), (2, 4), (7, 9), (100, 9)):
        schedule = budget_schedule("sandwich", 32, seed=1, sandwich_random=num_random)
        drawn = [schedule(update) for update in range(100)]
        assert all(len(K) == len(set(K)) == length and K[0] == 32 and K[-1] == 2 for K in drawn)
    schedule, between = budget_schedule("sandwich", 32, seed=1), BUDGETS[1:-1]
    pairs = Counter(schedule(update)[1:-1] for update in range(10000))
    assert_drawn_as(pairs, {(a, b): 1 / 21 for a in between for b in between if a > b})


def test_a_family_shares_its_rows_out():
    """The full budget and the cheap ones have all rows; each row one of the others, as in accumulated batches."""
    schedule = budget_schedule("family", 8, seed=1, updates=3)
    orders = Counter(schedule(update)[1:] for update in range(12000))
    assert_drawn_as(orders, dict.fromkeys(permutations((1, 2, 3, 4, 6)), 1 / 120))
    for update, count, of_smaller in ((0, 1, 1 / 4), (1, 4, 1 / 2), (2, 5, 1), (3, 12, 2), (4, 3, 2)):
        of_full, each = 1 / (1 + of_smaller), of_smaller / (1 + of_smaller) / 3
        *whole, together = schedule.parts(update, count, together=True)
        assert [(part.budget, part.rows, part.share) for part in whole] == [
            (K, slice(None), 1.0) for K in (8, *(K for K in schedule(update) if K < 3))
        ]
        assert [part.weight for part in whole] == pytest.approx([of_full, each, each])
        order = [K for K in schedule(update) if K in (3, 4, 6)]
        assert together.budget == tuple(order[r % 3] for r in range(count)) and together.share == 1
        parts = schedule.parts(update, count)
        assert parts[:3] == (*whole,) and {part.weight for part in parts[3:]} == {together.weight} == {whole[1].weight}
        of_row = {r: part.budget for part in parts[3:] for r in range(count)[part.rows]}
        assert tuple(of_row[r] for r in range(count)) == together.budget
        assert tuple(schedule.parts(update, 1, r)[-1].budget for r in range(count)) == together.budget
        assert sum(part.share * part.weight for part in parts) == pytest.approx(1)
    assert budget_schedule("family", 8, seed=1).parts(9, 1)[0].weight == pytest.approx(1 / (1 + 0.5**0.5))
    for capacity, expected in ((1, [1]), (2, [2, 1]), (4, [4, 1, (2, 3)])):
        parts = budget_schedule("family", capacity, seed=1).parts(0, 2, together=True)
        assert [tuple(sorted(K)) if isinstance(K := part.budget, tuple) else K for part in parts] == expected
        assert sum(part.share * part.weight for part in parts) == pytest.approx(1)


def test_rows_share_all_budgets():
    schedule = budget_schedule("rows", 4, seed=1)
    orders = Counter(schedule(update) for update in range(12000))
    assert_drawn_as(orders, dict.fromkeys(permutations((1, 2, 3, 4)), 1 / 24))
    for update, count in ((0, 1), (1, 3), (2, 9)):
        order, (together,) = schedule(update), schedule.parts(update, count, together=True)
        assert together == Part(tuple(order[r % 4] for r in range(count)), slice(None), 1.0, 1.0)
        parts = schedule.parts(update, count, first=2)
        of_row = {r: part.budget for part in parts for r in range(count)[part.rows]}
        assert [of_row[r] for r in range(count)] == [order[(2 + r) % 4] for r in range(count)]
        assert sum(part.share for part in parts) == pytest.approx(1) and {part.weight for part in parts} == {1.0}
    assert budget_schedule("rows", 1, seed=1).parts(0, 2, together=True) == (Part(1, slice(None), 1.0, 1.0),)


# The format: checkpoints made on any machine, by any process, resume with these budgets.
GOLDEN = {
    "discrete": [(2,), (2,), (3,), (12,), (4,), (4,), (4,), (24,), (12,), (32,), (2,), (32,)],
    "uniform": [(22,), (14,), (6,), (32,), (16,), (14,), (31,), (5,), (26,), (27,), (16,), (6,)],
    "authors": [(32,), (24,), (2,), (24,), (24,), (6,), (32,), (8,), (32,), (6,), (24,), (8,)],
    "sandwich": [(32, 16, 3, 2), (32, 16, 4, 2), (32, 16, 12, 2), (32, 16, 3, 2), (32, 16, 8, 2), (32, 8, 6, 2)],
    "full": [(32,)] * 4,
    "rows": [(32, 4, 3, 2, 8, 1, 6, 16, 24, 12), (8, 24, 3, 1, 6, 4, 32, 16, 12, 2)],
    "family": [(32, 1, 8, 4, 12, 2, 24, 3, 6, 16), (32, 1, 4, 2, 6, 8, 12, 16, 3, 24)],
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_budgets_depend_on_seed_and_update_only(name):
    schedule, first = budget_schedule(name, 32, seed=0), GOLDEN[name]
    assert [schedule(update) for update in range(len(first))] == first
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(123)
    states = [torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()]
    assert [schedule(update) for update in reversed(range(len(first)))] == first[::-1]  # out of order, other seeds
    assert states == [torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()]
    other = budget_schedule(name, 32, seed=1)
    assert name == "full" or [other(update) for update in range(50)] != [schedule(update) for update in range(50)]


@pytest.mark.parametrize(
    ("name", "capacity", "fields", "message"),
    [
        ("cosine", 32, {}, r"budget_schedule must be one of .*'discrete'.*, got 'cosine'"),
        ("uniform", 0, {}, "capacity must be at least 1, got 0"),
        ("authors", 32, {"full_budget_updates": -1}, "full_budget_updates must be at least 0, got -1"),
        ("sandwich", 32, {"sandwich_random": -2}, "sandwich_random must be at least 0, got -2"),
    ],
    ids=str,
)
def test_bad_schedules_are_refused(name, capacity, fields, message):
    with pytest.raises(ValueError, match=message):
        budget_schedule(name, capacity, seed=0, **fields)


# ---------------------------------------------------------------------------------------------------------------------
# Losses.


def on_all_rows(budgets):
    return [Part(K, slice(None), 1.0, 1 / len(budgets)) for K in budgets]


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("num_items", [None, 40])
def test_losses_of_a_family(num_items, together):
    """Rows at smaller budgets of their own, half on labels and half on the full model's logits, by hand."""
    model, ids, weight = random_model(**VARIANTS["elastic"], num_spectral_channels=8).train(), random_ids(7, 12), 0.5
    schedule, kwargs = budget_schedule("family", 8, seed=0), {} if num_items is None else {"num_items_in_batch": 40}

    def forward(part):
        own, budget = ids[part.rows], part.budget
        return model(own, labels=own, spectral_budget=torch.tensor(budget) if together else budget, **kwargs)

    parts = schedule.parts(0, 7, together=together)
    losses = budget_losses(forward, parts, labels=ids, distillation_weight=weight, **kwargs)
    full = model(ids).logits.detach().log_softmax(-1)
    pick = lambda logits: -logits[:, :-1].gather(-1, ids[:, 1:, None])[..., 0]  # noqa: E731
    of_full = parts[0].weight
    expected, order = pick(full).sum() * of_full, [K for K in schedule(0) if K in (3, 4, 6)]
    for rows in (torch.full((7,), 1), torch.full((7,), 2), torch.tensor([order[r % 3] for r in range(7)])):
        small = model(ids, spectral_budget=rows).logits.log_softmax(-1)
        kl = F.kl_div(small[:, :-1], full[:, :-1], reduction="none", log_target=True).sum(-1)
        expected = expected + ((1 - weight) * pick(small) + weight * kl).sum() * (1 - of_full) / 3
    torch.testing.assert_close(sum(losses), expected / (num_items or ids[:, 1:].numel()), rtol=1e-5, atol=1e-6)


def test_labels_may_be_shifted_before():
    model, ids, found = random_model(), random_ids(2, 9), []
    labels = ids.masked_fill(torch.arange(9) == 3, -100)
    shifted = {"labels": labels, "shift_labels": F.pad(labels[:, 1:], (0, 1), value=-100)}
    for given in (shifted, {"labels": labels}):
        parts = budget_losses(
            lambda part, given=given: model(ids, **given, spectral_budget=part.budget),
            on_all_rows((8, 3)),
            distillation_weight=0.5,
            **given,
        )
        found.append([part.item() for part in parts])
    assert found[0] == found[1]


def test_losses_of_a_classifier():
    model, budgets = random_model(ESSMForSequenceClassification, num_labels=5), (32, 4)
    ids, labels = random_ids(3, 8), torch.tensor([0, 4, 2])
    full, small = (model(ids, labels=labels, spectral_budget=K) for K in budgets)
    kl = F.kl_div(small.logits.log_softmax(-1), full.logits.softmax(-1), reduction="batchmean")
    assert kl > 1e-4
    for given in (labels, None):
        losses = budget_losses(
            lambda part: model(ids, labels=labels, spectral_budget=part.budget),
            on_all_rows(budgets),
            labels=given,
            distillation_weight=0.25,
        )
        expected = torch.stack([full.loss / 2, (0.75 * small.loss + 0.25 * kl) / 2])
        torch.testing.assert_close(torch.stack(list(losses)), expected)


def test_forward_runs_when_its_loss_is_asked_for():
    ran = []

    def forward(part):
        ran.append(part.budget)
        return SimpleNamespace(loss=torch.tensor(float(part.budget)), logits=torch.zeros(1, 2))

    losses = budget_losses(forward, on_all_rows((8, 2)))
    assert ran == []
    assert next(losses) == 4.0 and ran == [8]
    assert next(losses) == 1.0 and ran == [8, 2]
    assert next(losses, None) is None


@pytest.mark.parametrize(
    ("budgets", "output", "options", "message"),
    [
        ((8, 2), {}, {"distillation_weight": -0.1}, r"distillation_weight must be in \[0, 1\], got"),
        ((8, 2), {}, {"distillation_weight": math.nan}, r"distillation_weight must be in \[0, 1\], got"),
        ((), {}, {}, "at least one budget"),
        ((2, 8), {}, {"distillation_weight": 0.5}, r"largest budget first, got \[2, 8\]"),
        ((8, 2), {}, {"distillation_weight": 0.5}, r"logits of shape \(1, 3, 2\) needs labels"),
        ((8, 2), {}, {"distillation_weight": 0.5, "labels": torch.zeros(1, 3)}, r"integer type, got torch\.float32"),
        ((8, 2), {"loss": None}, {}, "returned no loss"),
    ],
)
def test_bad_losses_are_refused(budgets, output, options, message):
    made = SimpleNamespace(**{"loss": torch.tensor(1.0), "logits": torch.zeros(1, 3, 2)} | output)
    with pytest.raises(ValueError, match=message):
        list(budget_losses(lambda part: made, on_all_rows(budgets), **options))
    with pytest.raises(ValueError, match=r"distillation_weight must be in \[0, 1\], got"):
        BudgetDropoutCallback(budget_schedule("full", 8, seed=0), 1.5)


def test_rows_that_share_no_output_are_not_distilled():
    rows, message = budget_schedule("rows", 8, seed=0), "largest budget on all rows, got"
    for update in range(8):  # whichever budget has the first rows
        parts = sorted(rows.parts(update, 6), key=lambda part: -part.budget)
        with pytest.raises(ValueError, match=f"{message} it on 0.167 of them"):
            budget_losses(None, parts, distillation_weight=0.5)
    with pytest.raises(ValueError, match=f"{message} 'rows', distillation_weight=0.5"):
        BudgetDropoutCallback(rows, 0.5)
    BudgetDropoutCallback(rows)
