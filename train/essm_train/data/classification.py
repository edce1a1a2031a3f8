# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Labelled sequences: text as tokens, or flat features (pixels, mu-law codes, ..), frames of features, or sound.

A row of the data is a sequence in one column, or numbers in many, and a label in another: an integer, or text, whose
sorted values are the classes. Everything that can be wrong with a row is checked before training, in a stream when the
row is met, and the error names the row. What is read stays in Arrow files on disk.
"""

from __future__ import annotations

import fnmatch
import functools
import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import numpy as np
import pyarrow as pa
import torch

from essm_train.data.documents import TABLES, load_splits, open_table
from essm_train.data.readers import FeatureReader, Reader, TextReader, as_array
from essm_train.data.rows import EncodeRows, LabelledData, Split, TableSamples, cell_value, check_rows, collate
from essm_train.data.samples import HELD_OUT_FRACTION, MapSamples, StreamSamples, at_most, hold_out
from essm_train.data.sound import decode_wav, is_sound, sound_splits, undecoded
from essm_train.data.tokens import choose_tokenizer

_DIGEST_ROWS = 64  # of a stream that comes from no local file
_DIGEST_BYTES = 1 << 20  # at either end of a file that is streamed


@dataclass
class ClassificationData(LabelledData):
    """Labelled sequences out of tables.

    Attributes:
        reader: how they become tensors. label_names: one per class, or None where the data gives none.
    """

    reader: Reader
    num_labels: int
    label_names: list[str] | None


class _Opened(NamedTuple):
    """The rows of a split, what to call them, a table of the first one, and the types of all columns."""

    rows: Any
    source: str
    first: pa.Table
    features: datasets.Features


# ---------------------------------------------------------------------------------------------------------------------
# Opening what the arguments name.


def load_classification(args: Any, label_names: Sequence[str] | None = None) -> ClassificationData:
    """The data that the arguments (`ClassificationArguments`) name, checked.

    Args:
        label_names: in which order labels that are text are the classes; by default sorted.
    Raises:
        ValueError: anything about it that cannot work, naming the file, column or row.
    """
    opened = _open(args, "train")
    if opened is None:
        raise ValueError(f"dataset {args.dataset_name!r} has no split 'train'")
    reader = _make_reader(args, opened)
    return _load_streams(args, opened, reader) if args.streaming else _load_tables(args, opened, reader, label_names)


def load_test(args: Any, label_names: Sequence[str], record: dict[str, Any]) -> tuple[Reader, Split, list[str] | None]:
    """The test split, or else validation or training split, that the arguments name, as a trained model reads it.

    Args:
        label_names: of the model's classes. record: its features.json, if it reads features.
    Returns:
        The reader, all samples, and the names of the classes where the data numbers them itself.
    Raises:
        ValueError: as `load_classification`.
    """
    opened = next((found for split in ("test", "validation", "train") if (found := _open(args, split))), None)
    if opened is None:
        raise ValueError(f"dataset {args.dataset_name!r} has none of the splits test, validation and train")
    reader = _make_reader(args, opened)
    if isinstance(reader, FeatureReader):
        reader.take(record)
    split, _ = _table_split(args, opened, reader, len(label_names), label_names, args.test_samples)
    return reader, split, _names(opened.features[args.label_column])


def _open(args: Any, split: str) -> _Opened | None:
    """ "train", "validation" or "test"; None if there is no such split.

    Raises:
        ValueError: it cannot be read, or has no rows, or not the columns that the arguments name.
    """
    if (found := _rows_of(args, split)) is None:
        return None
    rows, source = found
    rows = _as_column(args, undecoded(rows, args.features_column), source)
    first = _first_table(rows, source)
    for name in ("text_column", "features_column", "label_column"):
        column = getattr(args, name)
        if column is not None and column not in first.column_names:
            raise ValueError(f"{name} must be one of {first.column_names} of {source}, got {column!r}")
    features = rows.features or datasets.Features.from_arrow_schema(first.schema)  # a stream may not know its own
    return _Opened(rows, source, first, features)


def _rows_of(args: Any, split: str) -> tuple[Any, str] | None:
    """The rows of a split and what to call them; None if there are no such rows."""
    if not args.dataset_name:
        paths = getattr(args, f"{split}_file")
        if not paths:
            return None
        for path in paths:
            if os.path.isdir(path):
                raise ValueError(f"{split}_file {path!r} is a folder: give it as dataset_name")
            if not os.path.isfile(path):
                raise ValueError(f"{split}_file {path!r} is not there")
            if Path(path).suffix not in TABLES or Path(path).suffix != Path(paths[0]).suffix:
                raise ValueError(f"{split}_file must end in one of {sorted(TABLES)}, all in the same, got {path!r}")
        source = f"{split}_file {', '.join(Path(path).name for path in paths)}"
        try:
            return open_table(paths, args.streaming, source), source
        except ValueError as error:
            if "corresponds to no data" in str(error):  # how `datasets` puts it
                raise ValueError(f"{source} holds no rows") from error
            raise
    splits = sound_splits(args.dataset_name, args.streaming) if os.path.isdir(args.dataset_name) else None
    if splits is None:
        splits = load_splits(args.dataset_name, args.dataset_config_name, args.streaming)
    return (splits[split], f"split {split!r} of dataset {args.dataset_name!r}") if split in splits else None


def _as_column(args: Any, rows: Any, source: str) -> Any:
    """The same rows, where features_column is a pattern with the numbers of all columns of such names in one.

    It is called like the pattern. Text in a cell, or no such column, is for the checks that follow; nothing is a NaN.
    """
    pattern = args.features_column
    if pattern is None or not set(pattern) & set("*?["):
        return rows
    names = rows.column_names or _first_table(rows, source).column_names  # a stream may not know its own
    columns = [name for name in names if fnmatch.fnmatchcase(name, pattern) and name != args.label_column]
    if pattern in names or not columns:
        return rows

    def gather(batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
        numbers = []
        for name in columns:
            try:
                numbers.append(np.array(batch[name], np.float32))
            except (TypeError, ValueError) as error:
                raise ValueError(f"features_column {pattern!r}: column {name!r} must hold numbers: {error}") from None
        return {pattern: list(np.stack(numbers, 1))}

    return rows.map(gather, batched=True, remove_columns=columns)


def _first_table(rows: Any, source: str) -> pa.Table:
    """The first row. Raises ValueError if there is none, or if it cannot be read."""
    try:
        table = next(iter(rows.with_format("arrow").iter(batch_size=1)), None)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise ValueError(f"cannot read {source}: {error.__cause__ or error}") from error
    if table is None or table.num_rows == 0:
        raise ValueError(f"{source} holds no rows")
    return table


def _make_reader(args: Any, opened: _Opened) -> Reader:
    if args.text_column is not None:
        return TextReader(args.text_column, args.max_length, choose_tokenizer(args))
    column = args.features_column
    make = functools.partial(FeatureReader, column, args.max_length, scale=args.feature_scale)
    where = f"row 0 of {opened.source}: features_column {column!r}"
    value = cell_value(opened.first.column(column)[0])
    if is_sound(value):
        samples, rate = decode_wav(value, where)
        return make(samples.shape[1], "float32", frame_length=args.frame_length, sampling_rate=rate)
    array = as_array(value, where)
    if array.ndim not in (1, 2):
        raise ValueError(f"{where} must hold a flat sequence of numbers or frames, got an array of shape {array.shape}")
    leaf = opened.features[column]
    while hasattr(leaf, "feature"):
        leaf = leaf.feature
    num_features = array.shape[1] if array.ndim == 2 else None
    return make(num_features, getattr(leaf, "dtype", None), frame_length=args.frame_length)


# ---------------------------------------------------------------------------------------------------------------------
# Classes.


def _names(feature: Any) -> list[str] | None:
    return list(feature.names) if isinstance(feature, datasets.ClassLabel) and feature.names else None


def _number_labels(
    opened: _Opened, column: str, names: Sequence[str] | None
) -> tuple[datasets.Dataset, Sequence[str] | None]:
    """Rows whose labels, if they are text, are a `ClassLabel` of those names, by default of all values, sorted.

    Raises:
        ValueError: a row without a label, or with another one; names the row.
    """
    if getattr(opened.features[column], "dtype", None) not in ("string", "large_string"):
        return opened.rows, names
    labels = opened.rows.with_format("arrow")[column].to_pylist()
    names = sorted({label for label in labels if label is not None}) if names is None else list(names)
    for row, label in enumerate(labels):
        if label not in names:
            raise ValueError(
                f"row {row} of {opened.source}: label_column {column!r} must be one of {names}, got {label!r}"
            )
    return opened.rows.cast_column(column, datasets.ClassLabel(names=names)), names


def _count_labels(args: Any, names: list[str] | None, labels: np.ndarray | None, source: str) -> int:
    """How many classes: those asked for, or that have a name, or that are there."""
    if args.num_labels is not None:
        return args.num_labels
    if names is None and labels is None:
        raise ValueError(f"streaming needs num_labels: {source} does not say how many classes it has")
    count = len(names) if names is not None else int(labels.max()) + 1  # type: ignore[union-attr]
    if names is None and count > max(2, len(labels)):  # type: ignore[arg-type]
        raise ValueError(f"{source}: labels go up to {count - 1}; number the classes from 0, or give num_labels")
    if count < 2:
        raise ValueError(f"num_labels must be at least 2, got {count} from {source}")
    return count


# ---------------------------------------------------------------------------------------------------------------------
# Tables and streams.


def _load_tables(args: Any, opened: _Opened, reader: Reader, label_names: Sequence[str] | None) -> ClassificationData:
    rows, label_names = _number_labels(opened, args.label_column, label_names)
    names = _names(rows.features[args.label_column])
    # All rows are checked before any are held out, so that errors name rows of the file.
    samples = TableSamples(rows, reader, args.label_column, opened.source)
    known = args.num_labels or (len(names) if names else None)
    scan = check_rows(samples, known)
    num_labels = _count_labels(args, names, scan.labels, opened.source)
    if scan.labels.min() < 0:
        check_rows(samples, num_labels)  # raises
    digests = {"sha256 of the training data": scan.sha256}
    if (given := _open(args, "validation")) is not None:
        kept = np.arange(len(rows))
        validation, sha256 = _table_split(args, given, reader, num_labels, label_names, args.validation_samples)
        digests["sha256 of the validation data"] = sha256
    else:
        kept, held_out = hold_out(len(rows), args.seed, opened.source)
        chosen = at_most(args.validation_samples, held_out, args.seed)
        name = f"{HELD_OUT_FRACTION:.0%} of the training rows, held out"
        validation = Split(samples.select(chosen), torch.from_numpy(scan.labels[chosen]), name)
        samples = samples.select(kept)
    given, test = _open(args, "test"), None
    # A benchmark that keeps the labels of its test split to itself publishes -1.
    if given is not None and set(given.rows.with_format("arrow")[args.label_column].to_pylist()) != {-1}:
        test, _ = _table_split(args, given, reader, num_labels, label_names, args.test_samples)
    cut = float((scan.lengths[kept] > args.max_length).mean())
    length = max(1, round(float(np.minimum(scan.lengths[kept], args.max_length).mean())))
    description = _describe(args, f"{len(kept):,} samples of {reader.name}", cut, num_labels, validation, test)
    rest = _reading(reader, num_labels, names)
    return ClassificationData(MapSamples(samples, args.seed), validation, test, length, digests, description, **rest)


def _reading(reader: Reader, num_labels: int, names: list[str] | None) -> dict[str, Any]:
    """The fields that say how samples are read and what their classes are."""
    names = names if names and len(names) == num_labels else None
    classes = {"num_labels": num_labels, "label_names": names, "reader": reader}
    return classes | {"collate": functools.partial(collate, reader), "save_beside": reader.save_pretrained}


def _table_split(
    args: Any, opened: _Opened, reader: Reader, num_labels: int, label_names: Sequence[str] | None, wanted: int | None
) -> tuple[Split, str]:
    """(held-out rows, checked; the SHA-256 of all)."""
    rows, _ = _number_labels(opened, args.label_column, label_names)
    samples = TableSamples(rows, reader, args.label_column, opened.source)
    scan = check_rows(samples, num_labels)
    chosen = at_most(wanted, np.arange(len(rows)), args.seed)
    return Split(samples.select(chosen), torch.from_numpy(scan.labels[chosen]), opened.source), scan.sha256


def _describe(args: Any, samples: str, cut: float, num_labels: int, validation: Split, test: Split | None) -> str:
    name = args.dataset_name or ", ".join(Path(path).name for path in args.train_file)
    parts = [f"{name}: {samples} in {num_labels} classes"]
    if cut:
        parts.append(f"{max(cut, 0.001):.1%} of them cut at {args.max_length}")
    parts.append(f"validation on {len(validation.samples):,} ({validation.name})")
    if test is not None:
        parts.append(f"test on {len(test.samples):,} ({test.name})")
    return "; ".join(parts)


def _load_streams(args: Any, opened: _Opened, reader: Reader) -> ClassificationData:
    names = _names(opened.features[args.label_column])
    num_labels = _count_labels(args, names, None, opened.source)

    def open_stream() -> Any:
        again = _open(args, "train")
        assert again is not None
        return again.rows.select_columns([reader.column, args.label_column])

    validation = _stream_split(args, "validation", reader, num_labels, args.validation_samples)
    if validation is None:
        raise ValueError(
            "streaming needs a validation_file or a split 'validation': a stream cannot be held out from, and the "
            "test split is not to select by"
        )
    test = _stream_split(args, "test", reader, num_labels, args.test_samples)
    expand = EncodeRows(reader, args.label_column, num_labels, opened.source)
    source = StreamSamples(open_stream, expand, args.shuffle_buffer, args.seed)
    digests = {"sha256 of the training data": _stream_digest(args, opened)}
    description = _describe(args, f"a stream of {reader.name}", 0.0, num_labels, validation, test)
    rest = _reading(reader, num_labels, names)
    return ClassificationData(source, validation, test, args.max_length, digests, description, **rest)


def _stream_split(args: Any, split: str, reader: Reader, num_labels: int, wanted: int | None) -> Split | None:
    """The first `wanted` rows, or all, in memory."""
    opened = _open(args, split)
    if opened is None or (split == "test" and opened.first.column(args.label_column)[0].as_py() == -1):
        return None  # or a benchmark that keeps its labels to itself
    encode = EncodeRows(reader, args.label_column, num_labels, opened.source)
    samples = [sample for item in islice(opened.rows, wanted) for sample in encode(item)]
    return Split(samples, torch.tensor([sample.label for sample in samples]), opened.source)


def _stream_digest(args: Any, opened: _Opened) -> str:
    """Sizes and both ends of local files; of anything else, its first rows."""
    digest = hashlib.sha256()
    paths = [Path(path) for path in args.train_file or []]
    if args.dataset_name and Path(args.dataset_name).is_dir():
        paths = sorted(p for p in Path(args.dataset_name).rglob("*") if p.suffix in TABLES)
    for path in paths:
        with path.open("rb") as file:
            size = path.stat().st_size
            digest.update(f"{size} ".encode() + file.read(_DIGEST_BYTES))
            file.seek(max(0, size - _DIGEST_BYTES))
            digest.update(file.read())
    if not paths:
        for item in islice(opened.rows, _DIGEST_ROWS):
            digest.update(repr(item).encode())
    return digest.hexdigest()
