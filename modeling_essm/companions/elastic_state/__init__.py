# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Elastic state models for transformers: compute that follows difficulty. Importing this makes the Auto classes know
them.

Every other file of this folder is what a saved model carries, and imports nothing but the others.
"""

from transformers import AutoConfig, AutoModel

from .cache_elastic_state import ElasticStateCache
from .configuration_elastic_state import ElasticStateConfig
from .corrector_elastic_state import ElasticStateCorrector
from .gate_elastic_state import ElasticStateGate
from .metrics_elastic_state import METRICS, ElasticStateMetric
from .modeling_elastic_state import ElasticStateModel, ElasticStatePreTrainedModel
from .objectives_elastic_state import OBJECTIVES, register_objective
from .outputs_elastic_state import ElasticStateOutput, distillation_loss

AutoConfig.register("elastic_state", ElasticStateConfig, exist_ok=True)
AutoModel.register(ElasticStateConfig, ElasticStateModel, exist_ok=True)
ElasticStateConfig.register_for_auto_class()
ElasticStateModel.register_for_auto_class("AutoModel")

__all__ = [
    "METRICS",
    "OBJECTIVES",
    "ElasticStateCache",
    "ElasticStateConfig",
    "ElasticStateCorrector",
    "ElasticStateGate",
    "ElasticStateMetric",
    "ElasticStateModel",
    "ElasticStateOutput",
    "ElasticStatePreTrainedModel",
    "distillation_loss",
    "register_objective",
]
