# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""The classes of labelled data and those of a trained head."""

from __future__ import annotations

from typing import Any

from essm_train.data.arguments import ClassificationArguments
from essm_train.data.readers import Reader, TextReader
from essm_train.models import check_vocabulary, holds_head
from modeling_essm import ESSMConfig, ESSMForSequenceClassification

_HINTS = {
    "num_input_features": " (None reads token ids)",
    "num_labels": ": give num_labels if the data merely shows fewer, or start from weights without a head",
}


def check_weights(
    args: ClassificationArguments, config: ESSMConfig, reader: Reader, num_labels: int, label_names: list[str] | None
) -> None:
    """Raises ValueError if the weights read other inputs than the data's, or hold a head for other classes.

    Args:
        reader, num_labels, label_names: of the data.
    """
    asked: dict[str, Any] = {"num_input_features": reader.config_fields.get("num_input_features")}
    if holds_head(config, ESSMForSequenceClassification):
        asked |= {"num_labels": num_labels, "classifier_pooling": args.classifier_pooling or config.classifier_pooling}
        asked |= {"id2label": dict(enumerate(label_names))} if label_names and trained_labels(config) else {}
    for field, value in asked.items():
        if (found := getattr(config, field)) != value:
            raise ValueError(
                f"{field} of {args.model_name_or_path!r} must be {value!r} for column {reader.column!r}, got {found!r}"
                + _HINTS.get(field, "")
            )
    if isinstance(reader, TextReader):
        check_vocabulary(args, config, reader.name, reader.config_fields["vocab_size"], reader.is_bytes)


def trained_labels(config: ESSMConfig) -> list[str] | None:
    """The names of the classes of a trained head; None if there is no such head, or it has none."""
    names = class_names(config)
    return names if holds_head(config, ESSMForSequenceClassification) and names != unnamed_labels(len(names)) else None


def class_names(config: ESSMConfig) -> list[str]:
    return [config.id2label[i] for i in range(config.num_labels)]


def unnamed_labels(count: int) -> list[str]:
    return [f"LABEL_{i}" for i in range(count)]
