# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Companions of the ES-SSM: diagonal state spaces, their pruning after training and truncation during it, and states
that are refined at inference.

Importing this, which `import modeling_essm` does not do, makes the Auto classes know the companions' models.
"""

from typing import Any

from .models import (
    DiagonalSSMConfig,
    DiagonalSSMForCausalLM,
    DiagonalSSMForSequenceClassification,
    DiagonalSSMModel,
    ElasticStateConfig,
    ElasticStateModel,
)
from .models.cache_states import StateCache
from .models.modeling_elastic_state import distillation_loss
from .models.objectives_elastic_state import register_objective
from .pruning.certificates import certificate, certify, hinf_norm
from .pruning.masks import is_pruned, prune, remove, restore
from .pruning.plans import Plan, allocate
from .pruning.scores import Importance, importance
from .report import Report, describe
from .systems import Adapter, DiagonalSystem, register, state_layers
from .truncation.balancing import hankel_singular_values, truncate
from .truncation.models import TruncationReport, balanced_truncate, resize_states
from .truncation.training import InTrainingTruncation, attempt_steps

__all__ = [
    "Adapter",
    "BalancedTruncationCallback",
    "DiagonalSSMConfig",
    "DiagonalSSMForCausalLM",
    "DiagonalSSMForSequenceClassification",
    "DiagonalSSMModel",
    "DiagonalSystem",
    "ElasticStateConfig",
    "ElasticStateModel",
    "Importance",
    "InTrainingTruncation",
    "Plan",
    "Report",
    "StateCache",
    "TruncationReport",
    "allocate",
    "attempt_steps",
    "balanced_truncate",
    "certificate",
    "certify",
    "describe",
    "distillation_loss",
    "hankel_singular_values",
    "hinf_norm",
    "importance",
    "is_pruned",
    "prune",
    "register",
    "register_objective",
    "remove",
    "resize_states",
    "restore",
    "state_layers",
    "truncate",
]


def __getattr__(name: str) -> Any:
    """Imports the callback when it is asked for: it needs a Trainer, and with that accelerate."""
    if name != "BalancedTruncationCallback":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .truncation.callback import BalancedTruncationCallback

    return BalancedTruncationCallback
