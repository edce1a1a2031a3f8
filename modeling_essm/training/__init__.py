# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""For training at random budgets: `BudgetDropoutCallback`, schedules and losses, and the byte-level tokenizer."""

from typing import Any

_OF_BUDGET_DROPOUT = ("BudgetDropoutCallback", "budget_losses", "budget_schedule")


def __getattr__(name: str) -> Any:
    """Imports a Trainer's callback when it is asked for; loading a model does not need it."""
    if name not in _OF_BUDGET_DROPOUT:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from . import budget_dropout

    return getattr(budget_dropout, name)
