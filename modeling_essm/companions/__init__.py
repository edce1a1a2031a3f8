# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Companions of the elastic model: diagonal state spaces, their pruning after training and truncation during it."""

# Pruning after training
from .adapters import Adapter, elastic_layers, register
from .certificates import certificate, end_to_end_bound, hinf_norm
from .masks import is_pruned, prune, restore
from .plans import Plan, allocate
from .removal import remove
from .report import ElasticReport, describe
from .scores import Importance, importance
from .systems import DiagonalSystem

__all__ = [
    "Adapter",
    "DiagonalSystem",
    "ElasticReport",
    "Importance",
    "Plan",
    "allocate",
    "certificate",
    "describe",
    "elastic_layers",
    "end_to_end_bound",
    "hinf_norm",
    "importance",
    "is_pruned",
    "prune",
    "register",
    "remove",
    "restore",
]
