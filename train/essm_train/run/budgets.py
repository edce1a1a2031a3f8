# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Which budgets the updates of a run train, and which its validations read."""

from __future__ import annotations

from essm_train.arguments import RunArguments
from modeling_essm.training.budget_dropout import BudgetSchedule, budget_schedule


def make_schedule(args: RunArguments, capacity: int) -> BudgetSchedule:
    """The schedule that the arguments name, for a model of that capacity. Raises ValueError as `budget_schedule`."""
    return budget_schedule(
        args.budget_schedule,
        capacity,
        args.seed,
        full_budget_updates=args.full_budget_updates or 0,
        sandwich_random=args.sandwich_random,
    )


def eval_budgets(args: RunArguments, schedule: BudgetSchedule, capacity: int) -> tuple[int, ...]:
    """Budgets to validate at, ascending. Raises ValueError for one outside [1, capacity]."""
    trained = schedule.budgets
    chosen = args.eval_budgets or (trained[0], trained[len(trained) // 2], trained[-1])
    for K in chosen:
        if not 1 <= K <= capacity:
            raise ValueError(f"eval_budgets must be integers in [1, {capacity}], got {K}")
    return tuple(sorted(set(chosen)))
