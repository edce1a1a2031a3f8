# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Companions of the elastic model: diagonal state spaces, their pruning after training and truncation during it.

Importing this, which `import modeling_essm` does not do, makes the Auto classes know the companions' models.
"""

# Models
from . import diagonal_ssm

# Pruning after training, truncation
from .adapters import Adapter, elastic_layers, register
from .balanced_truncation import truncate
from .certificates import certificate, end_to_end_bound, hinf_norm
from .diagonal_ssm import (
    DiagonalSSMConfig,
    DiagonalSSMForCausalLM,
    DiagonalSSMForSequenceClassification,
    DiagonalSSMModel,
)
from .masks import is_pruned, prune, restore
from .plans import Plan, allocate
from .removal import remove
from .report import ElasticReport, describe
from .scores import Importance, importance
from .systems import DiagonalSystem
from .truncated_models import TruncationReport, balanced_truncate

__all__ = [
    "Adapter",
    "DiagonalSSMConfig",
    "DiagonalSSMForCausalLM",
    "DiagonalSSMForSequenceClassification",
    "DiagonalSSMModel",
    "DiagonalSystem",
    "ElasticReport",
    "Importance",
    "Plan",
    "TruncationReport",
    "allocate",
    "balanced_truncate",
    "certificate",
    "describe",
    "diagonal_ssm",
    "elastic_layers",
    "end_to_end_bound",
    "hinf_norm",
    "importance",
    "is_pruned",
    "prune",
    "register",
    "remove",
    "restore",
    "truncate",
]
