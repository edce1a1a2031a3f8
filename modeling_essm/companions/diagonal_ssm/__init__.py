# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Diagonal state space models (S5, S4D, LRU) for transformers. Importing this makes the Auto classes know them.

Every other file of this folder is what a saved model carries, and imports nothing but the others.
"""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

from .cache_diagonal import DiagonalSSMCache
from .configuration_diagonal_ssm import DiagonalSSMConfig
from .mixer_diagonal import DiagonalLTI, DiagonalMixer
from .modeling_diagonal_ssm import (
    DiagonalSSMForCausalLM,
    DiagonalSSMForSequenceClassification,
    DiagonalSSMModel,
    DiagonalSSMPreTrainedModel,
)
from .parameterizations_diagonal import MIXERS, LRUMixer, S4DMixer, S5Mixer

AutoConfig.register("diagonal_ssm", DiagonalSSMConfig, exist_ok=True)
AutoModel.register(DiagonalSSMConfig, DiagonalSSMModel, exist_ok=True)
AutoModelForCausalLM.register(DiagonalSSMConfig, DiagonalSSMForCausalLM, exist_ok=True)
AutoModelForSequenceClassification.register(DiagonalSSMConfig, DiagonalSSMForSequenceClassification, exist_ok=True)
DiagonalSSMConfig.register_for_auto_class()
DiagonalSSMModel.register_for_auto_class("AutoModel")
DiagonalSSMForCausalLM.register_for_auto_class("AutoModelForCausalLM")
DiagonalSSMForSequenceClassification.register_for_auto_class("AutoModelForSequenceClassification")

__all__ = [
    "MIXERS",
    "DiagonalLTI",
    "DiagonalMixer",
    "DiagonalSSMCache",
    "DiagonalSSMConfig",
    "DiagonalSSMForCausalLM",
    "DiagonalSSMForSequenceClassification",
    "DiagonalSSMModel",
    "DiagonalSSMPreTrainedModel",
    "LRUMixer",
    "S4DMixer",
    "S5Mixer",
]
