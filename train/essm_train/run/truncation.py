# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Balanced truncation of a diagonal_ssm, as the arguments of a training script name it."""

from __future__ import annotations

from torch import nn

from essm_train.arguments import RunArguments
from modeling_essm.companions.truncation.training import InTrainingTruncation, attempt_steps, truncatable


def make_truncation(args: RunArguments, network: nn.Module, max_steps: int) -> InTrainingTruncation:
    """When and how a run of so many updates truncates, with `truncation_tau` given.

    Raises:
        ValueError: a schedule that does not fit the run, or a model without diagonal layers.
    """
    assert args.truncation_tau is not None
    truncatable(network)
    until = args.truncation_until
    end: str | int | float = until if until == "warmup" else float(until) if "." in until else int(until)
    steps = attempt_steps(args.truncation_attempts, end, max_steps=max_steps, warmup_steps=args.warmup_steps)
    return InTrainingTruncation(steps, tau=args.truncation_tau)
