# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Which model a script trains: ES-SSM, the paper's variants of it, or a baseline with as many parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from engine import _arg
from transformers import PreTrainedModel

from modeling_essm import ESSMConfig, ESSMForCausalLM, ESSMForSequenceClassification

_SIZES = "hidden_size num_hidden_layers num_spectral_channels filter_length scaling_exponent gating ar_order"


@dataclass
class ModelArguments:
    """The model's shape."""

    architecture: str = _arg(
        "essm",
        "'essm', or a baseline of baselines.py with as many parameters as an ES-SSM of these sizes: 'transformer', "
        "'mamba', 'mamba2', 's4d', and 'cnn' and 'tc_resnet' to classify features. A baseline has one budget, 1.",
    )
    hidden_size: int = _arg(128, "Model width D.")
    num_hidden_layers: int = _arg(4, "Number of blocks.")
    num_spectral_channels: int = _arg(32, "Capacity: the largest budget the model will be able to run.")
    filter_length: int = _arg(1024, "Longest sequence the filters cover; longer costs nothing.")
    gating: str = _arg("softmax", "The gate: 'softmax' (Eq. 8), or 'none' (Eq. 6).")
    ar_order: int = _arg(0, "2 adds the autoregressive and negative-filter terms of AR-STU.")
    scaling_exponent: float = _arg(0.25, "Power of sigma_k in Eq. (7).")
    dropout: float = _arg(0.0, "Dropout rate after each sub-layer.")
    stochastic_depth: float = _arg(0.0, "Rate of skipping a whole sub-layer.")

    @property
    def is_baseline(self) -> bool:
        return self.architecture != "essm"


def make_model(args: ModelArguments, budgets: Sequence[int], **fields: Any) -> PreTrainedModel:
    """A new language model or, with `num_labels` among the config's other fields, a new classifier.

    Args:
        budgets: those that will be trained.
    Raises:
        ValueError: sizes that cannot be, or an unknown architecture.
    """
    config = ESSMConfig(
        **{name: getattr(args, name) for name in (*_SIZES.split(), "dropout", "stochastic_depth")},
        trained_budgets=list(budgets),
        **fields,
    )
    cls = ESSMForSequenceClassification if "id2label" in fields else ESSMForCausalLM
    if not args.is_baseline:
        return cls(config)
    from baselines import BaselineForCausalLM, BaselineForSequenceClassification, matched_baseline

    with torch.device("meta"):
        target = sum(parameter.numel() for parameter in cls(config).parameters())
    baseline = BaselineForSequenceClassification if cls is ESSMForSequenceClassification else BaselineForCausalLM
    return baseline(
        matched_baseline(
            args.architecture,
            target,
            model_class=baseline,
            hidden_size=args.hidden_size,
            num_hidden_layers=args.num_hidden_layers,
            max_position_embeddings=args.filter_length,
            dropout=args.dropout,
            **fields,
        )
    )
