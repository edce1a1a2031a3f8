# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""The models that ES-SSM is compared with, by one config and behind one pair of heads.

    config = matched_baseline("mamba2", 2_700_000, hidden_size=128, num_hidden_layers=4)      # of sizes.py
    model = BaselineForCausalLM(config)

All but TC-ResNet read the same embedding or linear encoder, end in the same heads and get the same dropout after each
sub-layer, so that what differs are the blocks, of backbones.py. They run over whole sequences: there is no cache
and no generation. MatMamba has budgets, the others have one size. Letters: B batch, L sequence, D width, F features.
"""

from __future__ import annotations

from typing import Any, ClassVar, Self, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedModel,
)
from transformers import initialization as init
from transformers.modeling_outputs import CausalLMOutput, SequenceClassifierOutput
from transformers.models.auto import modeling_auto

from essm_train.baselines.backbones import make_backbone
from essm_train.baselines.config import CAUSAL, BaselineConfig
from essm_train.baselines.convolutions import TemporalConv
from essm_train.baselines.mamba import NestedMamba2Mixer, leading
from essm_train.baselines.state_spaces import StateSpaceMixer
from essm_train.pairs import both_documents, compare_documents
from modeling_essm.packing import pool
from modeling_essm.spectral_budget import of_each_layer


class BaselineEncoder(nn.Module):
    """Embedding or linear encoder, then the backbone."""

    def __init__(self, config: BaselineConfig, causal: bool):
        super().__init__()
        self.config = config
        if config.num_input_features is None:
            self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        elif config.architecture != "tc_resnet":
            self.embed_features = nn.Linear(config.num_input_features, config.hidden_size)
        self.backbone = make_backbone(config, causal)

    def forward(
        self,
        input_ids: Tensor | None,
        features: Tensor | None,
        attention_mask: Tensor | None,
        use_cache: Any = None,
        spectral_budget: int | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Ids (B, L) or features (B, L, F), and mask (B, L) -> (B, L, D), for "tc_resnet" (B, ceil(L / 8), D), and the
        mask of these, or None."""
        if use_cache:
            raise ValueError(f"use_cache must be False or None, got {use_cache}: baselines run over whole sequences")
        capacity = self.config.num_spectral_channels
        budget = capacity if spectral_budget is None else of_each_layer(spectral_budget, (capacity,))[0]
        inputs, other, name = input_ids, features, "input_ids (B, L)"
        if self.config.num_input_features is not None:
            inputs, other, name = features, input_ids, f"input_features (B, L, {self.config.num_input_features})"
        if inputs is None or other is not None:
            raise ValueError(f"this model reads {name} and nothing else")
        if features is not None and attention_mask is not None:  # what stands behind it, NaN too, is not read
            inputs = features.masked_fill(~attention_mask.to(features.device).bool()[..., None], 0.0)
        if self.config.architecture == "tc_resnet":
            return self.backbone(inputs.to(next(self.backbone.parameters()).dtype), attention_mask)
        if inputs is input_ids:
            hidden_states = self.embed_tokens(inputs)
        else:
            hidden_states = self.embed_features(inputs.to(self.embed_features.weight.dtype))
        hidden_states = F.dropout(hidden_states, self.config.embedding_dropout, self.training)
        smaller = {"spectral_budget": budget} if budget < capacity else {}
        outputs = self.backbone(inputs_embeds=hidden_states, attention_mask=attention_mask, **smaller)
        return outputs.last_hidden_state, attention_mask


class BaselinePreTrainedModel(PreTrainedModel):
    config_class = BaselineConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _supports_context_parallel = False

    def __init__(self, config: BaselineConfig, causal: bool):
        super().__init__(config)
        self.supports_gradient_checkpointing = config.architecture != "tc_resnet"
        if config.num_input_features is not None:
            self.main_input_name = "input_features"  # what Trainers count and pass to metrics
        self.model = BaselineEncoder(config, causal)

    def post_init(self) -> None:
        super().post_init()
        # What FSDP wraps; it refuses names of classes that a model does not have.
        layers = self.model.backbone.get_submodule("layers").children()
        self._no_split_modules = {type(layer).__name__ for layer in layers}

    @torch.no_grad()
    def truncate(self, spectral_budget: int) -> Self:
        """A model of its own with the weights that a budget K runs, of capacity K and the same outputs.

        Raises:
            ValueError: K is not an integer in [1, capacity].
        """
        capacity = self.config.num_spectral_channels
        K = of_each_layer(spectral_budget, (capacity,))[0]
        sizes = {"num_spectral_channels": K, "intermediate_size": self.config.intermediate_size * K // capacity}
        config = self.config.from_dict(self.config.to_dict() | sizes)
        model = cast(Any, type(self))(config).to(self.device, self.dtype)
        weights = self.state_dict()
        for prefix, mixer in self.named_modules():
            if isinstance(mixer, NestedMamba2Mixer):
                for name, weight in mixer.named_parameters():
                    weights[f"{prefix}.{name}"] = leading(mixer, name, weight, K)
        model.load_state_dict(weights)
        return model.train(self.training)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """New weights of everything but the library's backbones, which initialise themselves."""
        super()._init_weights(module)
        if isinstance(module, StateSpaceMixer):
            module.reset_state_space()
        elif isinstance(module, TemporalConv):
            init.xavier_uniform_(module.conv.weight)


class BaselineForCausalLM(BaselinePreTrainedModel):
    """A causal baseline with a language-model head that is tied to its embedding."""

    _tied_weights_keys: ClassVar = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: BaselineConfig):
        if config.architecture not in CAUSAL:
            raise ValueError(f"a language model has an architecture of {CAUSAL}, got {config.architecture!r}")
        super().__init__(config, causal=True)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        spectral_budget: int | None = None,
    ) -> CausalLMOutput:
        """
        Args:
            input_ids: (B, L) int64. attention_mask: (B, L), 1 for real positions.
            labels: (B, L) int64 next-token targets before shifting, -100 to ignore.
            spectral_budget: K in [1, capacity], by default all; other values raise ValueError.
        Returns:
            CausalLMOutput with logits (B, L, vocab_size) and, with labels, the mean cross-entropy in nats.
        """
        logits = self.lm_head(
            self.model(input_ids, None, attention_mask, use_cache, spectral_budget)[0].to(self.lm_head.weight.dtype)
        )
        loss = None if labels is None else self.loss_function(logits, labels, self.config.vocab_size)
        return CausalLMOutput(loss=loss, logits=logits)


class BaselineForSequenceClassification(BaselinePreTrainedModel):
    """A baseline that pools its real positions and classifies: token ids, continuous features, or pairs of documents.

    `num_input_features` makes it read features; `head_hidden_size` gives it the head of `ESSMForPairClassification`.
    """

    def __init__(self, config: BaselineConfig):
        super().__init__(config, causal=False)
        self.num_labels, width = config.num_labels, config.head_hidden_size
        if width is not None:
            self.head = nn.Linear(4 * config.hidden_size, width)
        self.score = nn.Linear(width or config.hidden_size, config.num_labels, bias=width is not None)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        input_features: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        spectral_budget: int | None = None,
    ) -> SequenceClassifierOutput:
        """
        Args:
            input_ids: (B, L) int64, or (B, 2, L) of pairs; or input_features: (B, L, F).
            attention_mask: (B, L) or (B, 2, L), 1 for real positions.
            labels: (B,) int64 classes.
            spectral_budget: K in [1, capacity], by default all; other values raise ValueError.
        Returns:
            SequenceClassifierOutput with logits (B, num_labels) and, with labels, the loss.
        """
        pairs = self.config.head_hidden_size is not None
        if pairs and input_ids is not None:
            input_ids, attention_mask = both_documents(input_ids, attention_mask)
        hidden_states, real = self.model(input_ids, input_features, attention_mask, use_cache, spectral_budget)
        pooled = pool(hidden_states, real, self.config.classifier_pooling)
        if pairs:
            loss, logits = compare_documents(pooled, self.head, self.score, labels)
            return SequenceClassifierOutput(loss=loss, logits=logits)
        if self.config.architecture == "tc_resnet":
            pooled = F.dropout(pooled, self.config.dropout, self.training)
        logits = self.score(pooled)
        loss = None if labels is None else F.cross_entropy(logits.float(), labels)
        return SequenceClassifierOutput(loss=loss, logits=logits)


AutoConfig.register(BaselineConfig.model_type, BaselineConfig, exist_ok=True)
modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[BaselineConfig.model_type] = "BaselineForCausalLM"  # Trainers look here
AutoModelForCausalLM.register(BaselineConfig, BaselineForCausalLM, exist_ok=True)
AutoModelForSequenceClassification.register(BaselineConfig, BaselineForSequenceClassification, exist_ok=True)
