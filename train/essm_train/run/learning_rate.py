# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""The learning rate: a schedule of transformers, once more for every time that a run is extended."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from transformers import get_scheduler

Spans = Sequence[tuple[int, Callable[[int], float]]]


def rate_factor(update: int, warmup_steps: int, spans: Spans) -> float:
    """Share of the peak rate at an update, counted from 0.

    Spans, one for the run as it was started and one for each extension, are a first update s and a schedule f. An
    extension of w = warmup_steps begins at the rate r of the span before it at s:

        r + (1 - r) (n - s) / w       for n < s + w
        f(n - s)                      from there on, and all along the first span, whose f has a warm-up of its own
    """
    *earlier, (first, schedule) = spans
    if earlier and update < first + warmup_steps:
        if update < first:
            return rate_factor(update, warmup_steps, earlier)
        start = rate_factor(first, warmup_steps, earlier)
        return start + (1 - start) * (update - first) / warmup_steps
    return schedule(update - first)


def make_scheduler(
    optimizer: torch.optim.Optimizer,
    warmup_steps: int,
    plan: Sequence[Sequence[int]],
    name: str = "cosine",
    min_lr_rate: float | None = None,
) -> torch.optim.lr_scheduler.LambdaLR:
    """Steps once per update.

    Args:
        plan: first update and end of the run as it was started and of each extension. name: of `get_scheduler`.
        min_lr_rate: with "cosine_with_min_lr", the last rate over the peak.
    """
    own = None if min_lr_rate is None else {"min_lr_rate": min_lr_rate}
    stand_in = torch.optim.SGD([torch.zeros(1)], optimizer.defaults["lr"])  # get_scheduler changes what it is given
    schedules = (get_scheduler(name, stand_in, warmup_steps, end - first, own) for first, end in plan)
    spans = [(first, schedule.lr_lambdas[0]) for (first, _), schedule in zip(plan, schedules)]
    return torch.optim.lr_scheduler.LambdaLR(optimizer, partial(rate_factor, warmup_steps=warmup_steps, spans=spans))


def apply_plan(scheduler: torch.optim.lr_scheduler.LambdaLR) -> None:
    """The rate of the next update by the scheduler's own plan, where state of another plan was loaded."""
    rates = [base * rate(scheduler.last_epoch) for base, rate in zip(scheduler.base_lrs, scheduler.lr_lambdas)]
    scheduler._last_lr = rates
    for group, rate in zip(scheduler.optimizer.param_groups, rates):
        group["lr"] = rate
