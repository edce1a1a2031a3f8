# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Budget dropout: every update trains at its own spectral budget K, drawn from a set of budgets.

K is a pure function of (seed, update index). It touches no random generator, so that it is the same on every process,
after every resume and in every version of torch, and can be looked up for any update without replaying the others.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass

BUDGETS = (2, 3, 4, 6, 8, 12, 16, 24, 32)


def clip_budgets(budgets: Iterable[int], capacity: int) -> tuple[int, ...]:
    """The budgets that a model of that capacity K̄ can run, ascending; larger ones become the capacity itself."""
    return tuple(sorted({min(budget, capacity) for budget in budgets}))


@dataclass(frozen=True)
class BudgetDropout:
    """Uniform over `budgets`, independent for every update.

    Attributes:
        budgets: the distinct budgets to draw from.
        seed: any integer.
    """

    budgets: tuple[int, ...]
    seed: int = 0

    def __call__(self, update: int) -> int:
        """K of that update (counted from 0)."""
        digest = hashlib.blake2b(f"budget {self.seed} {update}".encode(), digest_size=8).digest()
        return self.budgets[int.from_bytes(digest, "big") % len(self.budgets)]


def _discrete(capacity: int, seed: int) -> BudgetDropout:
    return BudgetDropout(clip_budgets(BUDGETS, capacity), seed)


def _uniform(capacity: int, seed: int) -> BudgetDropout:
    return BudgetDropout(tuple(range(1, capacity + 1)), seed)


# A schedule is anything with `budgets` (the set that it trains) and a call from the update index to K.
SCHEDULES: dict[str, Callable[[int, int], BudgetDropout]] = {"discrete": _discrete, "uniform": _uniform}


def budget_schedule(name: str, capacity: int, seed: int) -> BudgetDropout:
    """The schedule of that name for a model of that capacity: "discrete" draws from BUDGETS, "uniform" from 1..K̄.

    Raises:
        ValueError: unknown name.
    """
    if name not in SCHEDULES:
        raise ValueError(f"budget_schedule must be one of {tuple(SCHEDULES)}, got {name!r}")
    return SCHEDULES[name](capacity, seed)
