# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Which budget to run, by the profile of a model."""

from __future__ import annotations

from typing import Any

import torch

from ..loading_essm import PROFILE_NAME
from .profile import BudgetProfile
from .profile_file import budget_profile


def choose_budget(
    model: Any,
    *,
    profile: BudgetProfile | None = None,
    max_latency_ms: float | None = None,
    max_quality_drop: float | None = None,
    phase: str | None = None,
    batch_size: int = 1,
    device: str | torch.device | None = None,
) -> int:
    """The budget that keeps to limits of time, quality or both; only budgets that were measured are considered.

    Args:
        model: an ES-SSM. profile: its own, by default read from where the model was loaded from.
        max_latency_ms: median time of a call, per decoded token or per prompt: the best budget that keeps to it, of
            equals the smallest. The times are those of `forward`; `generate` adds some of its own to every token.
        max_quality_drop: relative to the full budget, 0.02 is 2%: the smallest budget that keeps to it. With both
            limits the smallest that keeps to both.
        phase: "decode" or "prefill"; by default decode, where it was measured.
        batch_size: one that was measured. device: name of one that was measured, by default the model's; where only one
            was measured, that one, with a warning.
    Returns:
        K, for `spectral_budget`.
    Raises:
        ValueError: no profile, a bad argument, or limits that no budget keeps to: the error names the best possible.
    """
    if profile is None:
        profile = budget_profile(model)
    if profile is None:
        raise ValueError(
            f"choose_budget needs {PROFILE_NAME} beside the model, and there is none at {model.name_or_path!r}: "
            "write it with essm-calibrate (train/calibrate.py)"
        )
    return profile.choose(
        max_latency_ms=max_latency_ms,
        max_quality_drop=max_quality_drop,
        phase=phase,
        batch_size=batch_size,
        device=model.device if device is None else device,
    )
