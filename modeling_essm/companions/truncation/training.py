# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Balanced truncation while a model trains, for any loop: when, on all processes alike, and what an optimizer is told.

    truncation = InTrainingTruncation(attempt_steps(4, "warmup", max_steps=N, warmup_steps=W), tau=0.1)
    for step in range(1, N + 1):
        ...; optimizer.step(); scheduler.step(); optimizer.zero_grad()
        truncation.after_step(model, optimizer, step)

The moments that AdamW has of a layer's tensors mean nothing in its new coordinates. They are deleted with their step
count: zero moments with an old count make the first update about three times too large. Groups, and so the schedule of
the learning rate, stay. All this is a function of the step and of the weights, so that a run resumed from a checkpoint
goes on as it would have; it must build the smaller model first (`resize_states`, or from_pretrained).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch.distributed as dist
from torch import nn

from ..wrappers import unwrap
from .balancing import Truncation
from .models import Replaced, TruncationReport, apply_truncation, plan_layer, truncatable


def attempt_steps(attempts: int, until: str | int | float, *, max_steps: int, warmup_steps: int = 0) -> tuple[int, ...]:
    """Steps, counted from 1, after which to attempt a truncation: round(j T / attempts) for j = 1..attempts.

    Args:
        until: T; "warmup" for warmup_steps, an integer for a step, a float in (0, 1] for a share of max_steps.
    Raises:
        ValueError: attempts below 1, or T that is not in [attempts, max_steps].
    """
    if attempts < 1:
        raise ValueError(f"attempts must be at least 1, got {attempts}")
    if until == "warmup":
        end, what = warmup_steps, "the warm-up's steps (until='warmup')"
    elif isinstance(until, (str, bool)) or (isinstance(until, float) and not 0.0 < until <= 1.0):
        raise ValueError(f"until must be 'warmup', a step or a share of all steps in (0, 1], got {until!r}")
    else:
        end, what = (round(until * max_steps) if isinstance(until, float) else until), f"the steps of until={until}"
    if not attempts <= end <= max_steps:
        raise ValueError(f"{what} must be in [{attempts}, {max_steps}] for {attempts} attempts, got {end}")
    return tuple(round(j * end / attempts) for j in range(1, attempts + 1))


class InTrainingTruncation:
    """Attempts a truncation after the given steps.

    Args:
        steps: after which, counted from 1. tau, min_reduction: as in `balanced_truncate`; a layer of n modes
            is only rewritten if it gets fewer than (1 - min_reduction) n.
    Attributes:
        history: of each attempt a dict that JSON can hold: step, before and after (modes), sizes, bounds,
            refused (by layer), seconds.
    """

    def __init__(self, steps: Collection[int], *, tau: float = 0.1, min_reduction: float = 0.05):
        if not 0.0 < tau < 1.0:
            raise ValueError(f"tau must be in (0, 1), got {tau}")
        if not 0.0 <= min_reduction < 1.0:
            raise ValueError(f"min_reduction must be in [0, 1), got {min_reduction}")
        self.steps, self.tau, self.min_reduction = frozenset(steps), tau, min_reduction
        self.history: list[dict[str, Any]] = []

    def after_step(self, model: nn.Module, optimizer: Any, step: int) -> TruncationReport | None:
        """If that step is one to attempt at: truncate, and tell the optimizer. All processes must call it.

        Gradients must have been used and cleared. DistributedDataParallel takes the new Parameters in (communication
        hooks have to be registered again); an average of the weights needs the report's `replaced`.

        Raises:
            ValueError: no diagonal layers, one that cannot be written, or a sharded model.
        """
        if step not in self.steps:
            return None
        started = time.perf_counter()
        inner = unwrap(model)
        layers = truncatable(inner)
        results = _from_first_process(lambda: [plan_layer(each, self.tau, None, self.min_reduction) for each in layers])
        report = apply_truncation(inner, layers, results)
        if report.replaced:
            substitute(optimizer, report.replaced)
        rows = report.layers
        self.history.append(
            {
                "step": step,
                "before": [layer.before for layer in rows],
                "after": [layer.after for layer in rows],
                "sizes": report.sizes,
                "bounds": [layer.bound for layer in rows],
                "refused": {layer.name: layer.refused for layer in rows if layer.refused},
                "seconds": round(time.perf_counter() - started, 3),
            }
        )
        return report

    def line(self) -> str:
        """The last attempt, for people."""
        last = self.history[-1]
        before, after = (", ".join(map(str, last[name])) for name in ("before", "after"))
        what = f"kept {before} modes" if before == after else f"truncated from {before} to {after} modes"
        kept = "".join(f"; {name} kept: {why}" for name, why in last["refused"].items())
        return f"update {last['step']}: {what} in {last['seconds']} s{kept}"


def _from_first_process(plan: Callable[[], list[Truncation]]) -> list[Truncation]:
    """What the first process computes, on all: eigenvectors may differ in their last bits, and ranks with them."""
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return plan()
    box: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            box = [plan()]
        except Exception as error:  # others wait for an answer
            box = [error]
    dist.broadcast_object_list(box, src=0)
    if isinstance(box[0], Exception):
        raise box[0]
    return box[0]


def substitute(optimizer: Any, replaced: Sequence[Replaced]) -> None:
    """Put new Parameters into the places of old ones in the optimizer's groups, and delete what it knew of the old."""
    while hasattr(optimizer, "optimizer"):  # Accelerate's wrapper
        optimizer = optimizer.optimizer
    new = {id(old): fresh for old, fresh in replaced}
    for group in optimizer.param_groups:
        group["params"] = [new.get(id(p), p) for p in group["params"]]
    for old, _ in replaced:
        optimizer.state.pop(old, None)
