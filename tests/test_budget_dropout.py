# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Budget dropout: which budget each update trains at."""

import random
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "train"))

from budget_dropout import BUDGETS, budget_schedule, clip_budgets


def test_budgets_are_clipped_to_the_capacity():
    assert clip_budgets(BUDGETS, 32) == BUDGETS
    assert clip_budgets(BUDGETS, 20) == (2, 3, 4, 6, 8, 12, 16, 20)
    assert clip_budgets(BUDGETS, 1) == (1,)


def test_schedules_train_the_budgets_they_name():
    assert budget_schedule("discrete", 32, seed=0).budgets == BUDGETS
    assert budget_schedule("discrete", 10, seed=0).budgets == (2, 3, 4, 6, 8, 10)
    assert budget_schedule("uniform", 5, seed=0).budgets == (1, 2, 3, 4, 5)
    with pytest.raises(ValueError, match=r"budget_schedule must be one of .*'discrete'.*, got 'sandwich'"):
        budget_schedule("sandwich", 32, seed=0)


@pytest.mark.parametrize("name", ["discrete", "uniform"])
def test_every_budget_is_equally_likely(name):
    schedule = budget_schedule(name, 32, seed=3)
    draws = 20000
    counts = Counter(map(schedule, range(draws)))
    assert set(counts) == set(schedule.budgets)
    expected = draws / len(schedule.budgets)
    assert max(abs(count - expected) for count in counts.values()) < 5 * expected**0.5  # five standard deviations


def test_budget_depends_on_seed_and_update_only():
    schedule = budget_schedule("discrete", 32, seed=0)
    forwards = [schedule(update) for update in range(50)]
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(123)
    state = torch.get_rng_state()
    assert [schedule(update) for update in reversed(range(50))] == forwards[::-1]
    assert torch.equal(torch.get_rng_state(), state)
    assert [budget_schedule("discrete", 32, seed=1)(update) for update in range(50)] != forwards
    # The format: checkpoints made on any machine resume with these budgets.
    assert forwards[:12] == [2, 2, 3, 12, 4, 4, 4, 24, 12, 32, 2, 32]
