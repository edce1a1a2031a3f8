# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""The classes of labelled data and those of a trained head."""

from __future__ import annotations

from essm_train.data.arguments import ClassificationArguments
from essm_train.data.readers import Reader, TextReader
from essm_train.models import check_vocabulary, holds_head
from modeling_essm import ESSMConfig, ESSMForSequenceClassification


def check_weights(
    args: ClassificationArguments, config: ESSMConfig, reader: Reader, num_labels: int, label_names: list[str] | None
) -> None:
    """Raises ValueError if the weights read other inputs than the data's, or hold a head for other classes.

    Args:
        reader, num_labels, label_names: of the data.
    """
    name, fields = repr(args.model_name_or_path), reader.config_fields
    width = fields.get("num_input_features")
    if config.num_input_features != width:
        raise ValueError(
            f"num_input_features of {name} must be {width} for column {reader.column!r}, got "
            f"{config.num_input_features} (None reads token ids)"
        )
    if isinstance(reader, TextReader):
        check_vocabulary(args, config, reader.name, fields["vocab_size"], reader.is_bytes)
    if not holds_head(config, ESSMForSequenceClassification):
        return
    if config.num_labels != num_labels:
        raise ValueError(
            f"the head of {name} has {config.num_labels} labels, and the data {num_labels}: give num_labels "
            f"{config.num_labels} if the data merely shows fewer, or start from weights without a head"
        )
    names = class_names(config)
    if label_names is not None and names != unnamed_labels(len(names)) and names != label_names:
        raise ValueError(f"the labels of {name} are {names}, and those of the data {label_names}")
    if args.classifier_pooling not in (None, config.classifier_pooling):
        raise ValueError(
            f"classifier_pooling must be {config.classifier_pooling!r}, with which the head of {name} was trained, got "
            f"{args.classifier_pooling!r}"
        )


def trained_labels(config: ESSMConfig) -> list[str] | None:
    """The names of the classes of a trained head; None if there is no such head, or it has none."""
    names = class_names(config)
    return names if holds_head(config, ESSMForSequenceClassification) and names != unnamed_labels(len(names)) else None


def class_names(config: ESSMConfig) -> list[str]:
    return [config.id2label[i] for i in range(config.num_labels)]


def unnamed_labels(count: int) -> list[str]:
    return [f"LABEL_{i}" for i in range(count)]
