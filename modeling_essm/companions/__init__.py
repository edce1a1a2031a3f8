# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Companions of the elastic model: diagonal state spaces, their pruning after training and truncation during it."""

from typing import Any

# Truncation, imported when asked for: the callback needs a Trainer, which needs accelerate.
_TRUNCATION = {
    "BalancedTruncationCallback": "truncation_callback",
    "HankelTracker": "hankel_tracking",
    "InTrainingTruncation": "truncation_training",
    "TruncationReport": "truncated_models",
    "attempt_steps": "truncation_training",
    "averaged_systems": "selective_average",
    "balanced_truncate": "truncated_models",
    "hankel_singular_values": "gramians",
    "plot_tracking": "hankel_tracking",
    "resize_states": "truncated_models",
    "truncate": "balanced_truncation",
}


def __getattr__(name: str) -> Any:
    if name not in _TRUNCATION:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f".{_TRUNCATION[name]}", __name__), name)
