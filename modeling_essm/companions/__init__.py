# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Companions of the elastic model: diagonal state spaces, their pruning after training and truncation during it, and
states that are refined at inference.

Importing this, which `import modeling_essm` does not do, makes the Auto classes know the companions' models.
"""

from typing import Any

from . import diagonal_ssm, elastic_state
from .adapters import Adapter, elastic_layers, register
from .diagonal_ssm import (
    DiagonalSSMConfig,
    DiagonalSSMForCausalLM,
    DiagonalSSMForSequenceClassification,
    DiagonalSSMModel,
)
from .elastic_state import (
    ElasticStateCache,
    ElasticStateConfig,
    ElasticStateModel,
    distillation_loss,
    register_objective,
)
from .pruning.certificates import certificate, end_to_end_bound, hinf_norm
from .pruning.masks import is_pruned, prune, restore
from .pruning.plans import Plan, allocate
from .pruning.removal import remove
from .pruning.scores import Importance, importance
from .report import ElasticReport, describe
from .systems import DiagonalSystem
from .truncation.balancing import truncate
from .truncation.gramians import hankel_singular_values
from .truncation.models import TruncationReport, balanced_truncate, resize_states
from .truncation.selective_average import averaged_systems
from .truncation.tracking import HankelTracker, plot_tracking
from .truncation.training import InTrainingTruncation, attempt_steps

__all__ = [
    "Adapter",
    "BalancedTruncationCallback",
    "DiagonalSSMConfig",
    "DiagonalSSMForCausalLM",
    "DiagonalSSMForSequenceClassification",
    "DiagonalSSMModel",
    "DiagonalSystem",
    "ElasticReport",
    "ElasticStateCache",
    "ElasticStateConfig",
    "ElasticStateModel",
    "HankelTracker",
    "Importance",
    "InTrainingTruncation",
    "Plan",
    "TruncationReport",
    "allocate",
    "attempt_steps",
    "averaged_systems",
    "balanced_truncate",
    "certificate",
    "describe",
    "diagonal_ssm",
    "distillation_loss",
    "elastic_layers",
    "elastic_state",
    "end_to_end_bound",
    "hankel_singular_values",
    "hinf_norm",
    "importance",
    "is_pruned",
    "plot_tracking",
    "prune",
    "register",
    "register_objective",
    "remove",
    "resize_states",
    "restore",
    "truncate",
]


def __getattr__(name: str) -> Any:
    """Imports the callback when it is asked for: it needs a Trainer, and with that accelerate."""
    if name != "BalancedTruncationCallback":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .truncation.callback import BalancedTruncationCallback

    return BalancedTruncationCallback
