# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""The learning rate: linear warm-up, then half a cosine down to 0; again for every time that a run is extended."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

Plan = Sequence[Sequence[int]]


def rate_factor(update: int, warmup_steps: int, plan: Plan) -> float:
    """Share of the peak rate at an update, counted from 0.

    A plan lists spans (first update, end), one for the run as it was started and one for each extension. Within a span
    of first update s and end N, with w = warmup_steps and the rate r of the span before it at s (0 in the first span):

        r + (1 - r) (n - s) / w                                for n < s + w
        (1 + cos(pi (n - s - w) / (N - s - w))) / 2            from there on
    """
    *earlier, (first, end) = plan
    if earlier and update < first:
        return rate_factor(update, warmup_steps, earlier)
    done = update - first
    if done < warmup_steps:
        start = rate_factor(first, warmup_steps, earlier) if earlier else 0.0
        return start + (1 - start) * done / warmup_steps
    progress = (done - warmup_steps) / max(1, end - first - warmup_steps)
    return max(0.0, 0.5 * (1.0 + math.cos(math.pi * progress)))


def make_scheduler(
    optimizer: torch.optim.Optimizer, warmup_steps: int, plan: Plan
) -> torch.optim.lr_scheduler.LambdaLR:
    """Steps once per update."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, partial(rate_factor, warmup_steps=warmup_steps, plan=plan))


def apply_plan(scheduler: torch.optim.lr_scheduler.LambdaLR) -> None:
    """The rate of the next update by the scheduler's own plan, where state of another plan was loaded."""
    rates = [base * rate(scheduler.last_epoch) for base, rate in zip(scheduler.base_lrs, scheduler.lr_lambdas)]
    scheduler._last_lr = rates
    for group, rate in zip(scheduler.optimizer.param_groups, rates):
        group["lr"] = rate


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """AdamW's groups: matrices decay; norms, biases and embeddings (with the tied head) do not, nor what its author
    marked `_no_weight_decay`, as the state matrices of Mamba."""
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    parameters = [p for p in model.parameters() if p.requires_grad]
    exempt = [p.ndim < 2 or id(p) in embeddings or getattr(p, "_no_weight_decay", False) for p in parameters]
    decayed = [p for p, is_exempt in zip(parameters, exempt) if not is_exempt]
    others = [p for p, is_exempt in zip(parameters, exempt) if is_exempt]
    return [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
