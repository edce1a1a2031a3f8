# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Elastic Spectral State Space Models for transformers: one set of weights, any spectral budget."""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

from . import reference
from .budgets.profile import save_profile
from .cache_essm import ESSMCache
from .configuration_essm import ESSMConfig
from .loading_essm import ElasticPreTrainedModel
from .modeling_essm import ESSMForCausalLM, ESSMForSequenceClassification, ESSMModel
from .training.byte_tokenizer import build_byte_tokenizer

# With the package imported, the Auto classes need no trust_remote_code; save_pretrained copies the code either way.
AutoConfig.register("essm", ESSMConfig, exist_ok=True)
AutoModel.register(ESSMConfig, ESSMModel, exist_ok=True)
AutoModelForCausalLM.register(ESSMConfig, ESSMForCausalLM, exist_ok=True)
AutoModelForSequenceClassification.register(ESSMConfig, ESSMForSequenceClassification, exist_ok=True)
ElasticPreTrainedModel.save_beside = save_profile  # type: ignore[assignment]
ESSMConfig.register_for_auto_class()
ESSMModel.register_for_auto_class("AutoModel")
ESSMForCausalLM.register_for_auto_class("AutoModelForCausalLM")
ESSMForSequenceClassification.register_for_auto_class("AutoModelForSequenceClassification")

__all__ = [
    "ESSMCache",
    "ESSMConfig",
    "ESSMForCausalLM",
    "ESSMForSequenceClassification",
    "ESSMModel",
    "build_byte_tokenizer",
    "reference",
]
__version__ = "0.1.0"
