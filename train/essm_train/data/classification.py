# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Labelled sequences: text as tokens, or flat features (pixels, mu-law codes, ..), frames of features, or sound.

A row of the data is a sequence in one column, or numbers in many, and a label in another: an integer, or text, whose
sorted values are the classes. Everything that can be wrong with a row is checked before training, of a stream when the
row is met, and the error names the row. What is read stays in Arrow files on disk.
"""

from __future__ import annotations

import fnmatch
import functools
import hashlib
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import numpy as np
import pyarrow as pa
import torch

from essm_train.data.documents import TABLES, load_splits, open_table
from essm_train.data.labels import check_labels, count_labels, number_labels
from essm_train.data.readers import FeatureReader, Reader, SoundReader, TextReader, as_array
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
    _check_files(args)
    return _load_streams(args) if args.streaming else _load_tables(args, label_names)


def load_test(args: Any, label_names: Sequence[str], record: dict[str, Any]) -> tuple[Reader, Split, list[str] | None]:
    """The test split, or else validation or training split, that the arguments name, as a trained model reads it.

    Args:
        label_names: of the model's classes. record: its features.json, if it reads features.
    Returns:
        The reader, all samples, and the names of the classes where the data numbers them itself.
    Raises:
        ValueError: as `load_classification`.
    """
    _check_files(args)
    opened = next((found for split in ("test", "validation", "train") if (found := _open(args, split))), None)
    if opened is None:
        raise ValueError(f"dataset {args.dataset_name!r} has none of the splits test, validation and train")
    reader = _make_reader(args, opened)
    if isinstance(reader, FeatureReader):
        reader.take(record)
    feature = opened.features[args.label_column]
    split, _ = _table_split(args, opened, reader, len(label_names), label_names, args.test_samples)
    return reader, split, list(feature.names) if isinstance(feature, datasets.ClassLabel) else None


def _check_files(args: Any) -> None:
    for name in ("train_file", "validation_file", "test_file"):
        for path in getattr(args, name) or []:
            if os.path.isdir(path):
                raise ValueError(f"{name} {path!r} is a folder: give it as dataset_name")
            if not os.path.isfile(path):
                raise ValueError(f"{name} {path!r} is not there")
            if os.path.getsize(path) == 0:
                raise ValueError(f"{name} {path!r} is empty")
            if Path(path).suffix not in TABLES:
                raise ValueError(f"{name} must end in one of {sorted(TABLES)}, got {path!r}")


def _open(args: Any, split: str) -> _Opened | None:
    """ "train", "validation" or "test"; None if there is no such split. Raises ValueError for one without rows or the
    columns that the arguments name."""
    if (found := _rows_of(args, split)) is None:
        return None
    rows, source = found
    first = _first_table(rows, source)
    for name in ("text_column", "features_column", "label_column"):
        column = getattr(args, name)
        if column is not None and column not in first.column_names:
            raise ValueError(f"{name} must be one of {first.column_names} of {source}, got {column!r}")
    features = rows.features or datasets.Features.from_arrow_schema(first.schema)  # a stream may not know its own
    return _Opened(rows, source, first, features)


def _open_training(args: Any) -> tuple[_Opened, Reader]:
    opened = _open(args, "train")
    if opened is None:
        raise ValueError(f"dataset {args.dataset_name!r} has no split 'train'")
    return opened, _make_reader(args, opened)


def _rows_of(args: Any, split: str) -> tuple[Any, str] | None:
    """The rows of a split and what to call them; None if there are no such rows."""
    paths = getattr(args, f"{split}_file")
    source = f"{split}_file {', '.join(Path(path).name for path in paths or [])}"
    try:
        if not args.dataset_name:
            return (_as_column(args, open_table(paths, args.streaming), source), source) if paths else None
        source = f"dataset {args.dataset_name!r}"
        splits = sound_splits(args.dataset_name, args.streaming) if os.path.isdir(args.dataset_name) else None
        if splits is None:
            splits = load_splits(args.dataset_name, args.dataset_config_name, args.streaming)
        source = f"split {split!r} of {source}"
        return (_as_column(args, splits[split], source), source) if split in splits else None
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        if "corresponds to no data" in str(error):  # how `datasets` puts it
            raise ValueError(f"{source} holds no rows") from error
        raise ValueError(f"cannot read {source}: {_reason(error)}") from error


def _as_column(args: Any, rows: Any, source: str) -> Any:
    """The same rows, where features_column is a pattern with the numbers of all columns of such names in one.

    It is called like the pattern. Text in a cell, or no such column, is for the checks that follow; nothing is a NaN.
    """
    pattern = args.features_column
    rows = undecoded(rows, pattern)
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


def _reason(error: BaseException) -> BaseException:
    """What is behind the general error that `datasets` raises."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def _first_table(rows: Any, source: str) -> pa.Table:
    """The first row. Raises ValueError if there is none, or if it cannot be read."""
    try:
        table = next(iter(rows.with_format("arrow").iter(batch_size=1)), None)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise ValueError(f"cannot read {source}: {_reason(error)}") from error
    if table is None or table.num_rows == 0:
        raise ValueError(f"{source} holds no rows")
    return table


def _make_reader(args: Any, opened: _Opened) -> Reader:
    if args.text_column is not None:
        return TextReader(args.text_column, args.max_length, choose_tokenizer(args))
    where = f"row 0 of {opened.source}: features_column {args.features_column!r}"
    value = cell_value(opened.first.column(args.features_column)[0])
    if is_sound(value):
        samples, rate = decode_wav(value, where)
        return SoundReader(
            args.features_column, args.max_length, rate, samples.shape[1], args.feature_scale, args.frame_length
        )
    array = as_array(value, where)
    if array.ndim not in (1, 2):
        raise ValueError(f"{where} must hold a flat sequence of numbers or frames, got an array of shape {array.shape}")
    leaf = opened.features[args.features_column]
    while hasattr(leaf, "feature"):
        leaf = leaf.feature
    num_features = array.shape[1] if array.ndim == 2 else None
    dtype = getattr(leaf, "dtype", None)
    return FeatureReader(
        args.features_column, args.max_length, num_features, dtype, args.feature_scale, args.frame_length
    )


def _load_tables(args: Any, label_names: Sequence[str] | None) -> ClassificationData:
    opened, reader = _open_training(args)
    source = opened.source
    rows, label_names = number_labels(opened.rows, args.label_column, label_names, source)
    # All rows are checked before any are held out, so that errors name rows of the file.
    samples = TableSamples(rows, reader, args.label_column, source)
    scan = check_rows(samples)
    num_labels, names = count_labels(args, rows.features[args.label_column], scan.labels, source)
    check_labels(scan.labels, num_labels, source)

    given = _open(args, "validation")
    digests = {"sha256 of the training data": scan.sha256}
    if given is not None:
        kept = np.arange(len(rows))
        validation, sha256 = _table_split(args, given, reader, num_labels, label_names, args.validation_samples)
        digests["sha256 of the validation data"] = sha256
    else:
        kept, held_out = hold_out(len(rows), args.seed, source)
        chosen = at_most(args.validation_samples, held_out, args.seed)
        name = f"{HELD_OUT_FRACTION:.0%} of the training rows, held out"
        validation = Split(samples.select(chosen), torch.from_numpy(scan.labels[chosen]), name)
        samples = samples.select(kept)
    given, test = _open(args, "test"), None
    # A benchmark that keeps the labels of its test split to itself publishes -1.
    if given is not None and set(given.rows.with_format("arrow")[args.label_column].to_pylist()) != {-1}:
        test, _ = _table_split(args, given, reader, num_labels, label_names, args.test_samples)
    cut = float((scan.lengths[kept] > args.max_length).mean())
    return ClassificationData(
        MapSamples(samples, args.seed),
        validation,
        test,
        max(1, round(float(np.minimum(scan.lengths[kept], args.max_length).mean()))),
        digests,
        _describe(args, f"{len(kept):,} samples of {reader.name}", cut, num_labels, validation, test),
        functools.partial(collate, reader),
        reader.save_pretrained,
        reader,
        num_labels,
        names,
    )


def _table_split(
    args: Any, opened: _Opened, reader: Reader, num_labels: int, label_names: Sequence[str] | None, wanted: int | None
) -> tuple[Split, str]:
    """(held-out rows, checked; the SHA-256 of all)."""
    rows, _ = number_labels(opened.rows, args.label_column, label_names, opened.source)
    samples = TableSamples(rows, reader, args.label_column, opened.source)
    scan = check_rows(samples)
    check_labels(scan.labels, num_labels, opened.source)
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


# ---------------------------------------------------------------------------------------------------------------------
# Streams.


def _load_streams(args: Any) -> ClassificationData:
    opened, reader = _open_training(args)
    num_labels, names = count_labels(args, opened.features[args.label_column], None, opened.source)

    def open_stream() -> Any:
        again = _rows_of(args, "train")
        assert again is not None
        return again[0].select_columns([reader.column, args.label_column])

    validation = _stream_split(args, "validation", reader, num_labels, args.validation_samples)
    if validation is None:
        raise ValueError(
            "streaming needs a validation_file or a split 'validation': a stream cannot be held out from, and the "
            "test split is not to select by"
        )
    test = _stream_split(args, "test", reader, num_labels, args.test_samples)
    expand = EncodeRows(reader, args.label_column, num_labels, opened.source)
    return ClassificationData(
        StreamSamples(open_stream, expand, args.shuffle_buffer, args.seed),
        validation,
        test,
        args.max_length,
        {"sha256 of the training data": _stream_digest(args, open_stream)},
        _describe(args, f"a stream of {reader.name}", 0.0, num_labels, validation, test),
        functools.partial(collate, reader),
        reader.save_pretrained,
        reader,
        num_labels,
        names,
    )


def _stream_split(args: Any, split: str, reader: Reader, num_labels: int, wanted: int | None) -> Split | None:
    """The first `wanted` rows, or all, in memory."""
    opened = _open(args, split)
    if opened is None or (split == "test" and opened.first.column(args.label_column)[0].as_py() == -1):
        return None  # or a benchmark that keeps its labels to itself
    encode = EncodeRows(reader, args.label_column, num_labels, opened.source)
    samples = [sample for item in islice(opened.rows, wanted) for sample in encode(item)]
    return Split(samples, torch.tensor([sample.label for sample in samples]), opened.source)


def _stream_digest(args: Any, open_stream: Callable[[], Iterable[dict[str, Any]]]) -> str:
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
        for item in islice(open_stream(), _DIGEST_ROWS):
            digest.update(repr(item).encode())
    return digest.hexdigest()
