# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""ES-SSM for pairs of documents: one encoder reads both, a head compares their codes (Long Range Arena's Retrieval).

    a, b = the pooled outputs of the encoder for each document, (B, D)
    logits = score(gelu(head([a, b, a * b, a - b])))
Letters: B pairs, L sequence, D width.
"""

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForSequenceClassification
from transformers.utils.generic import can_return_tuple

from modeling_essm import ESSMConfig, ESSMModel
from modeling_essm.modeling_essm import ESSMPreTrainedModel, ESSMSequenceClassifierOutput, refuse_unsupported
from modeling_essm.packing import PACKING_ARGUMENTS, pool
from modeling_essm.spectral_budget import SpectralBudget


@strict
class ESSMPairConfig(ESSMConfig):
    """An `ESSMConfig` for the encoder of both documents; `head_hidden_size`: of the head, by default `hidden_size`."""

    model_type = "essm_two_tower"
    auto_classes: ClassVar = {}  # no remote code: AutoModel finds the class where `essm_train` is installed

    head_hidden_size: int | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        if self.head_hidden_size is None:
            self.head_hidden_size = self.hidden_size

    def validate_head(self) -> None:
        """Raises ValueError for a width below 1."""
        if self.head_hidden_size is not None and self.head_hidden_size < 1:
            raise ValueError(f"head_hidden_size must be an integer of at least 1, got {self.head_hidden_size}")


def both_documents(input_ids: Tensor, attention_mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """(B, 2, L) ids and mask of pairs -> (2B, L) of their documents. Raises ValueError for another shape."""
    if input_ids.ndim != 3 or input_ids.shape[1] != 2:
        raise ValueError(f"input_ids must have shape (B, 2, L), the pairs' documents, got {tuple(input_ids.shape)}")
    if attention_mask is None:
        return input_ids.flatten(0, 1), None
    if attention_mask.shape != input_ids.shape:
        raise ValueError(f"attention_mask must be {tuple(input_ids.shape)}, got {tuple(attention_mask.shape)}")
    return input_ids.flatten(0, 1), attention_mask.flatten(0, 1)


def compare_documents(
    codes: Tensor, head: nn.Module, score: nn.Module, labels: Tensor | None
) -> tuple[Tensor | None, Tensor]:
    """The mean cross-entropy, with labels, and logits (B, classes) of pairs.

    Args:
        codes: (2B, D), both documents of the first pair, of the second, .. labels: (B,) int64, or None.
        head: (B, 4 D) to (B, hidden). score: (B, hidden) to (B, classes).
    """
    a, b = codes.unflatten(0, (-1, 2)).unbind(1)
    logits = score(F.gelu(head(torch.cat([a, b, a * b, a - b], -1))))
    return None if labels is None else F.cross_entropy(logits.float(), labels.to(logits.device)), logits


class ESSMForPairClassification(ESSMPreTrainedModel):
    """ES-SSM that reads both documents of a pair, pools each and classifies the pair; reads token ids."""

    config_class = ESSMPairConfig
    accepts_loss_kwargs = False

    def __init__(self, config: Any):
        super().__init__(config)
        if config.num_input_features is not None:
            raise ValueError(
                "ESSMForPairClassification reads token ids: num_input_features must be None, "
                f"got {config.num_input_features}"
            )
        self.num_labels = config.num_labels
        self.model = ESSMModel(config)
        self.head = nn.Linear(4 * config.hidden_size, config.head_hidden_size)
        self.score = nn.Linear(config.head_hidden_size, config.num_labels)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        spectral_budget: SpectralBudget = None,
        **kwargs: Any,
    ) -> ESSMSequenceClassifierOutput:
        """
        Args:
            input_ids: (B, 2, L) int64, both documents of each pair. attention_mask: (B, 2, L), 1 for real positions.
            labels: (B,) int64 classes.
            spectral_budget: as in `ESSMModel.forward`; budgets (B,) per pair count for both documents.
        Returns:
            ESSMSequenceClassifierOutput, logits (B, num_labels).
        Raises:
            ValueError: ids or a mask of another shape, packed sequences, and as `ESSMModel.forward`.
        """
        refuse_unsupported(kwargs)
        if any(kwargs.get(name) is not None for name in PACKING_ARGUMENTS):
            raise ValueError("a classifier pools whole rows: packed sequences have no place in it; pad them instead")
        documents, mask = both_documents(input_ids, attention_mask)
        budget = self.config.resolve_budget(spectral_budget, batch_size=len(input_ids))
        each = budget if budget.rows is None else budget.rows.repeat_interleave(2)
        outputs = self.model(documents, mask, use_cache=False, spectral_budget=each, return_dict=True)
        codes = pool(outputs.last_hidden_state, mask, self.config.classifier_pooling)
        loss, logits = compare_documents(codes, self.head, self.score, labels)
        return ESSMSequenceClassifierOutput(loss=loss, logits=logits, spectral_budget=budget.report())


ESSMPairConfig._auto_class = None  # its code is not copied beside a checkpoint
AutoConfig.register("essm_two_tower", ESSMPairConfig, exist_ok=True)
AutoModelForSequenceClassification.register(ESSMPairConfig, ESSMForPairClassification, exist_ok=True)
