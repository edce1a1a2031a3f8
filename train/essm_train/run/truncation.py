# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Balanced truncation of a diagonal_ssm in the training loop: whether, when, and sizes that a checkpoint remembers.

Everything about it is in modeling_essm/companions/truncation_training.py; checkpoints hold the modes of every layer
and what was done so far, so that a run that was killed builds the smaller model before it loads its weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from essm_train.arguments import RunArguments
from modeling_essm.companions.truncated_models import TruncationReport, diagonal_layers, resize_states
from modeling_essm.companions.truncation_training import InTrainingTruncation, attempt_steps, check_whole


def make_truncation(
    args: RunArguments, network: nn.Module, max_steps: int, saved: Mapping[str, Any]
) -> InTrainingTruncation | None:
    """What the arguments ask for, if anything; the network gets the sizes of a checkpoint's run state first.

    Raises:
        ValueError: a schedule that does not fit the run, a model without diagonal layers, or averaged weights.
    """
    if args.truncation_tau is None:
        return None
    layers = diagonal_layers(network)
    if not layers:
        raise ValueError(f"truncation_tau is for a diagonal_ssm, {type(network).__name__} has no layer to truncate")
    if args.ema_decay:
        raise ValueError(f"truncation_tau changes shapes, so ema_decay must be 0, got {args.ema_decay}")
    check_whole(layers.values())
    until = args.truncation_until
    end: str | int | float = until if until == "warmup" else float(until) if "." in until else int(until)
    steps = attempt_steps(args.truncation_attempts, end, max_steps=max_steps, warmup_steps=args.warmup_steps)
    truncation = InTrainingTruncation(steps, tau=args.truncation_tau, variant=args.truncation_variant)
    if (found := saved.get("truncation")) is not None:
        resize_states(network, found["sizes"])
        truncation.history = list(found["history"])
    return truncation


def truncation_state(truncation: InTrainingTruncation | None, network: Any) -> dict[str, Any]:
    """What a checkpoint says of it."""
    if truncation is None:
        return {}
    return {"truncation": {"sizes": list(network.config.state_sizes), "history": truncation.history}}


def truncation_line(report: TruncationReport, update: int, seconds: float) -> str:
    """One line for people."""
    before, after = ([getattr(layer, name) for layer in report.layers] for name in ("before", "after"))
    what = f"truncated from {before} to {after} modes" if report.replaced else f"kept {before} modes"
    refused = "".join(f"; {layer.name} kept: {layer.refused}" for layer in report.layers if layer.refused)
    return f"update {update}: {what} in {seconds} s{refused}"
