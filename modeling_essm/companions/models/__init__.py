# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Models for transformers: diagonal state spaces (S5, S4D, LRU), and elastic state models, whose compute follows
difficulty. Importing this makes the Auto classes know them.

A saved model carries those of the other files that it needs; they import nothing but each other.
"""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

from .configuration_diagonal_ssm import DiagonalSSMConfig
from .configuration_elastic_state import ElasticStateConfig
from .modeling_diagonal_ssm import DiagonalSSMForCausalLM, DiagonalSSMForSequenceClassification, DiagonalSSMModel
from .modeling_elastic_state import ElasticStateModel

_DIAGONAL = {
    AutoModel: DiagonalSSMModel,
    AutoModelForCausalLM: DiagonalSSMForCausalLM,
    AutoModelForSequenceClassification: DiagonalSSMForSequenceClassification,
}
for config, classes in ((DiagonalSSMConfig, _DIAGONAL), (ElasticStateConfig, {AutoModel: ElasticStateModel})):
    AutoConfig.register(config.model_type, config, exist_ok=True)
    config.register_for_auto_class()
    for auto, model in classes.items():
        auto.register(config, model, exist_ok=True)
        model.register_for_auto_class(auto.__name__)
