# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""The classes of labelled data and those of a trained head."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import datasets
import numpy as np

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
        check_vocabulary(args, config, reader.name, fields["vocab_size"], reader.tokenizer is None)
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


def read_label(value: Any, column: str, where: str) -> int:
    if isinstance(value, (bool, int, np.integer)):
        return int(value)
    raise ValueError(
        f"{where}: label_column {column!r} must hold integers from 0, got {value!r}; text is numbered where all of the "
        "data is text and read whole, without --streaming (else by `datasets.Dataset.class_encode_column`)"
    )


def check_label(label: int, num_labels: int, where: str) -> None:
    """Raises ValueError for a label outside of the range."""
    if not 0 <= label < num_labels:
        raise ValueError(f"{where}: labels must be in [0, {num_labels - 1}], got {label}")


def check_labels(labels: np.ndarray, num_labels: int, source: str) -> None:
    for row in np.flatnonzero((labels < 0) | (labels >= num_labels))[:1]:
        check_label(int(labels[row]), num_labels, f"row {row} of {source}")


def number_labels(
    rows: datasets.Dataset, column: str, names: Sequence[str] | None, source: str
) -> tuple[datasets.Dataset, Sequence[str] | None]:
    """Labels that are text as a `ClassLabel` of those names, by default of all values, sorted; and the names.

    Raises:
        ValueError: a row without a label, or with another one; names the row.
    """
    if getattr(rows.features[column], "dtype", None) not in ("string", "large_string"):
        return rows, names
    labels = rows.with_format("arrow")[column].to_pylist()
    names = sorted({label for label in labels if label is not None}) if names is None else list(names)
    known = set(names)
    for row, label in enumerate(labels):
        if label not in known:
            raise ValueError(f"row {row} of {source}: label_column {column!r} must be one of {names}, got {label!r}")
    return rows.cast_column(column, datasets.ClassLabel(names=names)), names


def count_labels(args: Any, feature: Any, labels: np.ndarray | None, source: str) -> tuple[int, list[str] | None]:
    """How many classes, and their names."""
    names = list(feature.names) if isinstance(feature, datasets.ClassLabel) and feature.names else None
    if args.num_labels is not None:
        count = args.num_labels
    elif names is not None:
        count = len(names)
    elif labels is None:
        raise ValueError(f"streaming needs num_labels: {source} does not say how many classes it has")
    else:
        count = int(labels.max()) + 1
        if count > max(2, len(labels)):
            raise ValueError(
                f"{source}: labels go up to {count - 1} in {len(labels)} rows; number the classes from 0, or give "
                "num_labels"
            )
    if count < 2:
        raise ValueError(f"num_labels must be at least 2, got {count} from {source}")
    return count, names if names is not None and len(names) == count else None
