# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Labelled sequences: text as tokens, or flat features (pixels, mu-law codes, ..), frames of features, or sound.

A row of the data is a sequence in one column, or numbers in many, and a label in another: an integer, or text, whose
sorted values are the classes. Everything that can be wrong with a row is checked before training, in a stream when the
row is met, and the error names the row. What is read stays in Arrow files on disk.
"""

from __future__ import annotations

import fnmatch
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, cast

import datasets
import numpy as np
import torch

from essm_train.data.arguments import ClassificationArguments
from essm_train.data.documents import (
    check_folders,
    describe_files,
    features_of,
    items_of,
    load_splits,
    open_files,
    reading,
    stream_digest,
)
from essm_train.data.readers import FEATURES, FeatureReader, Reader, TextReader, as_array, read_record
from essm_train.data.rows import LabelledData, Rows, Split, collate
from essm_train.data.samples import HELD_OUT_FRACTION, MapSamples, SampleSource, StreamSamples, at_most, hold_out
from essm_train.data.tokens import choose_tokenizer, digest_of, file_of
from essm_train.models import check_vocabulary, holds_head
from modeling_essm import ESSMConfig, ESSMForSequenceClassification

_HINTS = {
    "num_input_features": " (None reads token ids)",
    "num_labels": ": give num_labels if the data merely shows fewer, or start from weights without a head",
}


@dataclass
class ClassificationData(LabelledData):
    """Labelled sequences, and how they are read; label_names are None where the data gives none."""

    reader: Reader
    num_labels: int
    label_names: list[str] | None


class _Opened(NamedTuple):
    """The rows of a split, what errors call them, the first one, what the two columns hold, names of classes, and those
    of the columns that a pattern stands for."""

    rows: Any
    source: str
    first: dict[str, Any]
    features: datasets.Features
    names: list[str]
    columns: list[str]


def load_classification(args: Any, label_names: Sequence[str] | None = None) -> ClassificationData:
    """The data that the arguments (`ClassificationArguments`) name, checked.

    Args:
        label_names: in which order labels with names are the classes; by default sorted where they are text.
    Raises:
        ValueError: anything about it that cannot work, naming the file, column or row.
    """
    held_out = [*(args.validation_file or ()), *(args.test_file or ())]
    check_folders(args.train_file or (), held_out, args.output_dir)
    record = record_of(args.model_name_or_path)
    train = _open(args, "train", label_names, record.get("columns"))
    if train is None:
        raise ValueError(f"dataset {args.dataset_name!r} has no split 'train'")
    reader, num_labels = _make_reader(args, train), args.num_labels or len(train.names)
    names = train.names and train.names + unnamed_labels(num_labels)[len(train.names) :]
    if isinstance(reader, FeatureReader) and args.feature_scale == "auto":
        reader.take(record)
    if args.streaming and not num_labels:
        raise ValueError(f"streaming needs num_labels: {train.source} does not say how many classes it has")
    if not num_labels:
        num_labels = 1 + max((label for label in train.rows[args.label_column] if isinstance(label, int)), default=1)
        if num_labels > max(2, len(train.rows)):
            raise ValueError(
                f"{train.source}: labels go up to {num_labels - 1}; number the classes from 0, or give num_labels"
            )
    if num_labels < 2:
        raise ValueError(f"num_labels must be at least 2, got {num_labels} from {train.source}")
    samples = Rows(train.rows, reader, args.label_column, num_labels, train.source)
    if not args.streaming:  # all rows are checked before any are held out, so that errors name rows of the file
        labels, lengths, sha256 = samples.check()
    splits, digests = {}, {}
    for name, wanted in {"validation": args.validation_samples, "test": args.test_samples}.items():
        if (given := _open(args, name, names, train.columns)) is not None:
            _check_named(given, names, args.label_column)
            splits[name], digests[name] = _held_out(args, given, reader, num_labels, wanted)

    source: SampleSource
    if args.streaming:
        if "validation" not in splits:
            raise ValueError(
                "streaming needs a validation_file or a split 'validation': a stream cannot be held out from, and the "
                "test split is not to select by"
            )
        source = StreamSamples(
            lambda: cast(_Opened, _open(args, "train", label_names, train.columns)).rows,
            samples.expand,
            args.shuffle_buffer,
            args.seed,
        )
        sha256 = stream_digest(items_of(train.rows, train.source), args.train_file or [args.dataset_name])
        length, what, cut = args.max_length, f"a stream of {reader.name}", 0.0
    else:
        if "validation" not in splits:
            kept, rest = hold_out(len(labels), train.source)
            chosen = at_most(args.validation_samples, rest)
            what = f"{HELD_OUT_FRACTION:.0%} of the training rows, held out"
            splits = {"validation": Split(samples.select(chosen), torch.from_numpy(labels[chosen]), what)} | splits
            samples, lengths = samples.select(kept), lengths[kept]
        source, cut = MapSamples(samples, args.seed), float((lengths > args.max_length).mean())
        length = max(1, round(float(np.minimum(lengths, args.max_length).mean())))
        what = f"{len(samples):,} samples of {reader.name}"

    description = [f"{args.dataset_name or describe_files(args.train_file)}: {what} in {num_labels} classes"]
    description += [f"{max(cut, 0.001):.1%} of them cut at {args.max_length}"] if cut else []
    description += [f"{name} on {len(split.samples):,} ({split.name})" for name, split in splits.items()]
    identity = {"sha256 of the training data": sha256}
    identity |= {"sha256 of the validation data": digests["validation"]} if "validation" in digests else {}
    if isinstance(reader, TextReader) and not reader.is_bytes:  # whose digests above are of the text
        identity["sha256 of the tokenizer"] = digest_of(reader.tokenizer)
    return ClassificationData(
        source=source,
        validation=splits["validation"],
        test=splits.get("test"),
        tokens_per_sample=length,
        digests=identity,
        description="; ".join(description),
        collate=functools.partial(collate, reader),
        save_beside=reader.save_pretrained,
        reader=reader,
        num_labels=num_labels,
        label_names=names if len(names) == num_labels else None,
    )


def record_of(model: str | None) -> dict[str, Any]:
    """features.json of a model in a folder or on the Hub; empty if there is none. Raises ValueError if damaged."""
    path = file_of(model, FEATURES) if model else None
    return read_record(Path(path).parent) if path else {}


def load_test(
    args: Any, label_names: Sequence[str], record: dict[str, Any]
) -> tuple[Reader, Split, list[str] | None] | None:
    """The test split, or else the validation split, that the arguments name, as a trained model reads it.

    Args:
        label_names: of the model's classes; they count where they are more than numbers. record: its features.json, if
            it reads features.
    Returns:
        The reader, the samples, and the names of the classes where the data has any; None without such a split.
    Raises:
        ValueError: as `load_classification`.
    """
    wanted, names = {"test": args.test_samples, "validation": args.validation_samples}, named(label_names) or []
    columns = record.get("columns")
    found = ((_open(args, split, names, columns), count) for split, count in wanted.items())
    opened, count = next((each for each in found if each[0] is not None), (None, None))
    if opened is None:
        return None
    _check_named(opened, names, args.label_column)
    reader = _make_reader(args, opened)
    if isinstance(reader, FeatureReader):
        reader.take(record)
    split, _ = _held_out(args, opened, reader, len(label_names), count)
    return reader, split, opened.names or None


def load_held_out(args: Any, label_names: Sequence[str], record: dict[str, Any]) -> tuple[Split, Any]:
    """`held_out` and `collate` of `load_classification`; no training row is read where others with labels have files.

    Args and errors are those of `load_test`.
    """
    if (args.test_file or args.validation_file) and (found := load_test(args, label_names, record)) is not None:
        return found[1], functools.partial(collate, found[0])
    data = load_classification(args, named(label_names))
    return data.held_out, data.collate


def _open(
    args: Any, split: str, label_names: Sequence[str] | None, columns: Sequence[str] | None = None
) -> _Opened | None:
    """ "train", "validation" or "test", labels that are text as a `ClassLabel`; None if there is no such split.

    Args:
        label_names: of the classes, where they are known; none where they are numbers.
        columns: those of training that a pattern stands for.
    Raises:
        ValueError: it cannot be read, or has no rows, or not the columns that the arguments name, or other labels.
    """
    column, label = args.text_column or args.features_column, args.label_column
    options: dict[str, Any] = {"text": args.text_column, "label": label, "names": label_names or ()}
    if args.dataset_name:
        source = f"split {split!r} of dataset {args.dataset_name!r}"
        rows = load_splits(args.dataset_name, args.dataset_config_name, args.streaming, **options).get(split)
    else:
        paths = getattr(args, f"{split}_file")
        source = f"{split}_file {describe_files(paths or ())}"
        rows = open_files(paths, args.streaming, source, **options) if paths else None
    if rows is None:
        return None
    with reading(source):
        rows, columns = _one_column(rows, column, label, columns)
        rows = rows.select_columns([column, label])
        if isinstance((rows.features or {}).get(column), datasets.Audio):  # `datasets` would decode with torchcodec
            rows = rows.cast_column(column, datasets.Audio(decode=False))
        rows = _named(rows, label, label_names)
    if isinstance((rows.features or {}).get(column), datasets.Image):
        raise ValueError(
            f"column {column!r} of {source} holds images; make numbers of them, "
            f'as by `rows.map(lambda row: {{"pixels": np.asarray(row["{column}"]).ravel()}})`'
        )
    if (first := next(items_of(rows, source), None)) is None:
        raise ValueError(f"{source} holds no rows")
    if split == "test" and first[label] == -1 and (args.streaming or {*rows[label]} == {-1}):
        return None  # a benchmark keeps its labels to itself
    features = features_of(rows)
    return _Opened(rows, source, first, features, list(getattr(features[label], "names", None) or []), columns)


def _named(rows: Any, label: str, names: Sequence[str] | None) -> Any:
    """The same rows, labels that are text, or have other names than these, as a `ClassLabel` of these.

    Raises:
        ValueError: labels of which these names are not, or text where there are none.
    """
    kind = (rows.features or {}).get(label)
    if isinstance(rows, datasets.Dataset) and getattr(kind, "dtype", "") in ("string", "large_string"):
        known = names or sorted(name for name in rows.unique(label) if name is not None)
        if names is not None and not names:
            raise ValueError(f"label_column {label!r} holds text such as {known[:1]}, where the classes are numbers")
        return rows.cast_column(label, datasets.ClassLabel(names=list(known)))
    if not names or not isinstance(kind, datasets.ClassLabel) or kind.names == [*names]:
        return rows
    if unknown := sorted({*kind.names} - {*names}):
        raise ValueError(f"label_column {label!r} has classes {unknown}, which are not among {[*names]}")
    numbers = [names.index(name) for name in kind.names]

    def renumber(batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
        return {label: [number if number in (None, -1) else numbers[number] for number in batch[label]]}

    features = datasets.Features(rows.features | {label: datasets.ClassLabel(names=list(names))})
    return rows.map(renumber, batched=True, features=features)


def _check_named(opened: _Opened, names: list[str], label: str) -> None:
    """Raises ValueError for numbers as labels where the classes have names: nothing says which is which."""
    if names and not opened.names:
        raise ValueError(f"{opened.source}: label_column {label!r} holds numbers, where the classes are {names}")


def _one_column(rows: Any, pattern: str, label: str, known: Sequence[str] | None) -> tuple[Any, list[str]]:
    """The same rows, where a pattern names many columns with their numbers in one that is called like the pattern; and
    the columns that it stands for: those that are `known`, or else all that match, in the order of the file."""
    names = rows.column_names or list(next(iter(rows), {}))  # a stream may not know its own
    columns = list(known or [name for name in names if fnmatch.fnmatchcase(name, pattern) and name != label])
    if pattern in names or not columns:
        return rows, []
    if others := [name for name in columns if not fnmatch.fnmatchcase(name, pattern)]:
        raise ValueError(f"{pattern!r} does not name column {others[0]!r}, which the training data had")
    if absent := [name for name in columns if name not in names]:
        raise ValueError(f"no column {absent[0]!r}, which the training data has for {pattern!r}")
    if label not in names:
        raise ValueError(f"no column {label!r} for the labels among {', '.join(map(str, names[:20]))}")

    kinds = {getattr((rows.features or {}).get(name), "dtype", None) for name in columns}
    dtype = np.uint8 if kinds == {"uint8"} else np.float32

    def gather(batch: dict[str, list[Any]]) -> dict[str, list[Any]]:  # nothing becomes a NaN
        return {pattern: list(np.stack([np.array(batch[name], dtype) for name in columns], 1))}

    gone = [name for name in names if name != label]
    return rows.map(gather, batched=True, remove_columns=gone), columns


def _make_reader(args: Any, opened: _Opened) -> Reader:
    if args.text_column is not None:
        return TextReader(args.text_column, args.max_length, choose_tokenizer(args))
    column, leaf = args.features_column, opened.features[args.features_column]
    array, rate = as_array(opened.first[column], f"row 0 of {opened.source}: features_column {column!r}")
    while hasattr(leaf, "feature"):
        leaf = leaf.feature
    num_features, dtype = array.shape[-1] if array.ndim > 1 else 1, getattr(leaf, "dtype", None)
    frame = (args.feature_scale, args.frame_length, rate, opened.columns)
    return FeatureReader(column, args.max_length, num_features, dtype, *frame)


def _held_out(args: Any, opened: _Opened, reader: Reader, num_labels: int, wanted: int | None) -> tuple[Split, str]:
    """At most so many samples, of a table at random and of a stream the first; and the SHA-256 of all."""
    table = opened.rows
    if args.streaming:
        table = datasets.Dataset.from_list(list(islice(items_of(table, opened.source), wanted)))
    rows = Rows(table, reader, args.label_column, num_labels, opened.source)
    labels, _, sha256 = rows.check()
    chosen = at_most(wanted, np.arange(len(rows)))
    return Split(rows.select(chosen), torch.from_numpy(labels[chosen]), opened.source), sha256


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
    return named(class_names(config)) if holds_head(config, ESSMForSequenceClassification) else None


def named(labels: Sequence[str]) -> list[str] | None:
    """The same, unless they are but numbers."""
    return None if [*labels] == unnamed_labels(len(labels)) else [*labels]


def class_names(config: ESSMConfig) -> list[str]:
    return [config.id2label[i] for i in range(config.num_labels)]


def unnamed_labels(count: int) -> list[str]:
    return [f"LABEL_{i}" for i in range(count)]
