# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Labelled sequences: text as tokens, or flat features (pixels, mu-law codes, ..), frames of features, or sound.

A row of the data is a sequence in one column, or numbers in many, and a label in another: an integer, or text, whose
sorted values are the classes. Everything that can be wrong with a row
is checked before training, of a stream when the row is met, and the error names the row. What is read stays in Arrow
files on disk; a `Sample` is cut to `max_length` when it is drawn, and scaled and padded when it is put into a batch.
"""

from __future__ import annotations

import fnmatch
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import numpy as np
import pyarrow as pa
import torch
from essm_train.data.samples import MapSamples, SampleSource, StreamSamples
from essm_train.data.sound import decode_wav, is_sound, sound_splits, undecoded
from essm_train.data.text import TABLES, choose_tokenizer, load_splits, open_table
from torch import Tensor

from modeling_essm import build_byte_tokenizer
from modeling_essm.training.byte_tokenizer import EOS_ID, PAD_ID, VOCAB_SIZE

HELD_OUT_FRACTION = 0.1  # of the training rows, where no validation part is given
FEATURES = "features.json"  # beside a model of features
_RECORD = {"multiplier": float, "offset": float, "max_length": int, "frame_length": int, "sampling_rate": int}
_ROWS_AT_ONCE = 1000
_FINGERPRINT_ROWS = 64  # of a stream that comes from no local file
_FINGERPRINT_BYTES = 1 << 20  # at either end of a file that is streamed


class Sample(NamedTuple):
    """Values (L,) token ids, or (L, F) features as they are stored; and the class."""

    values: np.ndarray
    label: int


# ---------------------------------------------------------------------------------------------------------------------
# From the value in a column to an array.


class TextReader:
    """Text to token ids: its UTF-8 bytes, or what a tokenizer of transformers makes of it."""

    def __init__(self, column: str, max_length: int, tokenizer: Any = None):
        self.column, self.max_length, self.tokenizer = column, max_length, tokenizer
        self.pad_id = PAD_ID
        if tokenizer is not None:
            ids = (tokenizer.pad_token_id, tokenizer.eos_token_id, 0)  # any id will do: padding is masked
            self.pad_id = next(i for i in ids if i is not None)

    def check(self, value: Any, where: str) -> bytes:
        """The row's text. Raises ValueError if it is empty, no text, or not UTF-8 where a tokenizer needs that."""
        if isinstance(value, str):
            value = value.encode()
        if not isinstance(value, bytes):
            raise ValueError(f"{where}: text_column {self.column!r} must hold text, got {type(value).__name__}")
        if not value:
            raise ValueError(f"{where}: text_column {self.column!r} holds an empty text")
        if self.tokenizer is not None:
            try:
                value.decode()
            except UnicodeDecodeError as error:
                raise ValueError(
                    f"{where} is not UTF-8: byte {value[error.start]:#04x} at position {error.start}; convert it, or "
                    "train on bytes (without --tokenizer_name), which takes any text"
                ) from error
        return value

    def read(self, value: Any, where: str) -> np.ndarray:
        """(L,) at most max_length token ids. Raises ValueError as `check`, or if there is no token."""
        text = self.check(value, where)
        if self.tokenizer is None:
            return np.frombuffer(text[: self.max_length], np.uint8)
        ids = self.tokenizer(text.decode(), truncation=True, max_length=self.max_length, verbose=False)["input_ids"]
        if not ids:
            raise ValueError(f"{where}: the tokenizer makes no token of its text")
        return np.array(ids, np.int32)

    def num_positions(self, text: Any) -> int:
        """Length before it is cut, of a tokenizer's tokens an upper bound."""
        return len(text)

    def collate(self, samples: Sequence[Sample], length: int) -> dict[str, Tensor]:
        ids = np.full((len(samples), length), self.pad_id, np.int64)
        for row, sample in zip(ids, samples):
            row[: len(sample.values)] = sample.values
        return {"input_ids": torch.from_numpy(ids)}

    @property
    def config_fields(self) -> dict[str, Any]:
        """What the model's config must say."""
        if self.tokenizer is None:
            return {
                "vocab_size": VOCAB_SIZE,
                "pad_token_id": PAD_ID,
                "bos_token_id": EOS_ID - 1,
                "eos_token_id": EOS_ID,
            }
        special = {f"{name}_token_id": getattr(self.tokenizer, f"{name}_token_id") for name in ("bos", "eos")}
        return {"vocab_size": len(self.tokenizer), "pad_token_id": self.pad_id, **special}

    @property
    def name(self) -> str:
        return "bytes" if self.tokenizer is None else f"tokens of {self.tokenizer.name_or_path}"

    def save_pretrained(self, folder: Path) -> None:
        """The tokenizer, which pads and cuts as it was done here."""
        tokenizer = build_byte_tokenizer() if self.tokenizer is None else self.tokenizer
        tokenizer.padding_side, tokenizer.model_max_length = "right", self.max_length
        tokenizer.save_pretrained(folder)


class FeatureReader:
    """A flat sequence of numbers, one feature per position, or a list of frames of F features each.

    Args:
        num_features: F; None for a flat sequence. dtype: of the column, as `datasets` names it.
        scale: "auto" maps columns of type uint8 onto [-1, 1] and leaves other numbers as they are; "uint8" maps
            [0, 255] onto [-1, 1] whatever the type; a number multiplies.
        frame_length: steps of a row that one position of the model reads, all their numbers; an incomplete end is
            left out.
    """

    def __init__(
        self,
        column: str,
        max_length: int,
        num_features: int | None,
        dtype: str | None,
        scale: str,
        frame_length: int | None = None,
    ):
        self.column, self.max_length, self.num_features = column, max_length, num_features
        self.frame_length = frame_length or 1
        self.width = (num_features or 1) * self.frame_length
        self.is_uint8 = scale == "uint8" or (scale == "auto" and dtype == "uint8")
        self.multiplier = 1 / 127.5 if self.is_uint8 else 1.0 if scale == "auto" else float(scale)
        self.offset = -1.0 if self.is_uint8 else 0.0

    def check(self, value: Any, where: str) -> np.ndarray:
        """(L, F * frame_length). Raises ValueError for anything but finite numbers of that shape."""
        where = f"{where}: features_column {self.column!r}"
        array = as_array(value, where)
        if array.size == 0:
            raise ValueError(f"{where} holds an empty sequence")
        if self.num_features is None and array.ndim == 1:
            array = array[:, None]
        width = 1 if self.num_features is None else self.num_features
        if array.ndim != 2 or array.shape[1] != width:
            wanted = "a flat sequence of numbers" if self.num_features is None else f"frames of {width} numbers"
            raise ValueError(f"{where} must hold {wanted}, as in the first row, got an array of shape {array.shape}")
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise ValueError(f"{where} must hold finite numbers, got {array[~np.isfinite(array)][0]}")
        if self.is_uint8 and array.dtype != np.uint8 and not ((array >= 0) & (array <= 255)).all():
            worst = array[(array < 0) | (array > 255)][0]
            raise ValueError(f"{where} must hold numbers in [0, 255] for feature_scale uint8, got {worst}")
        frames = len(array) // self.frame_length
        if frames == 0:
            raise ValueError(f"{where} holds {len(array)} steps, and frame_length is {self.frame_length}")
        return array[: frames * self.frame_length].reshape(frames, self.width)

    def read(self, value: Any, where: str) -> np.ndarray:
        """(L, F) the first max_length positions, as they are stored. Raises ValueError as `check`."""
        return self.check(value, where)[: self.max_length]

    def num_positions(self, array: Any) -> int:
        """Length before it is cut."""
        return len(array)

    def collate(self, samples: Sequence[Sample], length: int) -> dict[str, Tensor]:
        features = np.zeros((len(samples), length, self.width), np.float32)
        for row, sample in zip(features, samples):
            row[: len(sample.values)] = sample.values * np.float32(self.multiplier) + np.float32(self.offset)
        return {"input_features": torch.from_numpy(features)}

    @property
    def config_fields(self) -> dict[str, Any]:
        """What the model's config must say."""
        return {"num_input_features": self.width}

    @property
    def name(self) -> str:
        unit = "numbers" if self.width == 1 else f"frames of {self.width} numbers"
        return f"{unit}, x -> {self.multiplier:.6g} x {self.offset:+g}"

    @property
    def record(self) -> dict[str, Any]:
        """What has to be done to numbers before the model reads them."""
        record = {"multiplier": self.multiplier, "offset": self.offset, "max_length": self.max_length}
        return record | ({"frame_length": self.frame_length} if self.frame_length > 1 else {})

    def take(self, record: dict[str, Any]) -> None:
        """Do what a `record` says; it may be empty."""
        self.multiplier, self.offset = (record.get(name, getattr(self, name)) for name in ("multiplier", "offset"))
        self.is_uint8 = (self.multiplier, self.offset) == (1 / 127.5, -1.0)

    def save_pretrained(self, folder: Path) -> None:
        """features.json, the `record`."""
        (folder / FEATURES).write_text(json.dumps(self.record) + "\n")


class SoundReader(FeatureReader):
    """WAV files: a step is a sample in [-1, 1) of every channel.

    Args:
        sampling_rate, channels: of all files. The others as of `FeatureReader`.
    """

    def __init__(self, column: str, max_length: int, sampling_rate: int, channels: int, scale: str, frame: int | None):
        super().__init__(column, max_length, channels, "float32", scale, frame)
        self.sampling_rate = sampling_rate

    def check(self, value: Any, where: str) -> np.ndarray:
        """(L, channels * frame_length). Raises ValueError for another file than WAV, or another sampling rate."""
        if not is_sound(value):
            raise ValueError(f"{where}: features_column {self.column!r} must hold sound, got {type(value).__name__}")
        samples, rate = decode_wav(value, where)
        if rate != self.sampling_rate:
            raise ValueError(
                f"{where}, {value['path']}: sound must have {self.sampling_rate} samples a second, as in the first row "
                f"(or the model), got {rate}: convert it, for example by `ffmpeg -i in.wav -ar {self.sampling_rate} "
                "out.wav`"
            )
        return super().check(samples, where)

    @property
    def record(self) -> dict[str, Any]:
        return super().record | {"sampling_rate": self.sampling_rate}

    def take(self, record: dict[str, Any]) -> None:
        super().take(record)
        self.sampling_rate = record.get("sampling_rate", self.sampling_rate)


Reader = TextReader | FeatureReader


def as_array(value: Any, where: str) -> np.ndarray:
    """Numbers of a row, from Arrow or from Python lists. Raises ValueError if they are none, or ragged."""
    if isinstance(value, pa.Array):
        value = value.to_numpy(zero_copy_only=False)
    if value is None or isinstance(value, (str, bytes, dict)):
        raise ValueError(f"{where} must hold a sequence of numbers, got {type(value).__name__}")
    try:
        array = np.asarray(value)
        if array.dtype == object and array.size and not np.isscalar(array.flat[0]):  # lists inside of Arrow's lists
            array = np.stack([np.asarray(frame) for frame in array])
    except ValueError as error:
        widths = sorted({len(frame) for frame in value if hasattr(frame, "__len__")})
        raise ValueError(f"{where} holds a ragged list: frames of {widths} numbers, not of one width") from error
    if array.dtype == bool:
        array = array.astype(np.uint8)
    if array.size and array.dtype.kind not in "uif":
        raise ValueError(f"{where} must hold numbers, got {array.dtype} such as {array.flat[0]!r}")
    return array


# ---------------------------------------------------------------------------------------------------------------------
# Rows.


def _read_label(value: Any, column: str, where: str) -> int:
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


class TableSamples(Sequence[Sample]):
    """Samples of a map-style data set, read from its Arrow files."""

    def __init__(self, rows: datasets.Dataset, reader: Reader, label_column: str, source: str):
        self.rows = rows.select_columns([reader.column, label_column]).with_format("arrow")
        self.reader, self.label_column, self.source = reader, label_column, source

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Sample:  # type: ignore[override]
        table = self.rows[int(index)]
        where = f"row {index} of {self.source}"
        values = self.reader.read(_value(table.column(self.reader.column)[0]), where)
        return Sample(values, int(table.column(self.label_column)[0].as_py()))

    def scan(self) -> Iterator[tuple[Any, int, str]]:
        """(checked value, label, where) of every row in order."""
        row = 0
        for table in self.rows.iter(_ROWS_AT_ONCE):
            values, labels = table.column(self.reader.column), table.column(self.label_column).to_pylist()
            for value, label in zip(values, labels):
                where = f"row {row} of {self.source}"
                yield self.reader.check(_value(value), where), _read_label(label, self.label_column, where), where
                row += 1


def _value(scalar: Any) -> Any:
    """A cell of an Arrow table: lists as arrays, without going through Python's numbers."""
    if isinstance(scalar, pa.ListScalar):
        return scalar.values
    return scalar.as_py()


class EncodeRows:
    """The `Expand` of labelled streams: a row is a sample. It counts rows, so that errors can name them."""

    def __init__(self, reader: Reader, label_column: str, num_labels: int, source: str):
        self.reader, self.label_column, self.num_labels, self.source = reader, label_column, num_labels, source
        self.row = 0

    def __call__(self, item: dict[str, Any]) -> list[Sample]:
        where = f"row {self.row} of {self.source}"
        label = _read_label(item[self.label_column], self.label_column, where)
        check_label(label, self.num_labels, where)
        values = self.reader.read(item[self.reader.column], where)
        self.row += 1
        return [Sample(values, label)]

    def state_dict(self) -> dict[str, Any]:
        return {"row": self.row}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.row = state["row"]

    def end_epoch(self) -> None:
        self.row = 0


@dataclass
class Split:
    """Held-out samples.

    Attributes:
        samples: all or a part of them. labels: (n,) int64, of these. name: for people.
    """

    samples: Sequence[Sample]
    labels: Tensor
    name: str


@dataclass
class ClassificationData:
    """What a classifier trains on.

    Attributes:
        source: training samples. reader: how they become tensors.
        validation: to select by. test: to report on, or None.
        label_names: one per class, or None where the data gives none.
        tokens_per_sample: mean length after cutting; of a stream max_length.
        fingerprints: change if the training or validation data does.
        description: for people.
    """

    source: SampleSource
    reader: Reader
    validation: Split
    test: Split | None
    num_labels: int
    label_names: list[str] | None
    tokens_per_sample: int
    fingerprints: dict[str, str]
    description: str


def collate(reader: Reader, samples: Sequence[Sample], length: int | None = None) -> dict[str, Tensor]:
    """A batch: sequences padded on the right, to the longest one or to `length`, and labels (B,) int64.

    attention_mask (B, L) int64 is there only where a sequence is padded.
    """
    lengths = torch.tensor([len(sample.values) for sample in samples])
    longest = int(lengths.max()) if length is None else length
    batch = reader.collate(samples, longest)
    if int(lengths.min()) < longest:
        batch["attention_mask"] = (torch.arange(longest) < lengths[:, None]).long()
    return batch | {"labels": torch.tensor([sample.label for sample in samples])}


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
    rows, source = opened
    if len(rows) == 0:
        raise ValueError(f"{source} holds no rows")
    _check_columns(args, rows.column_names, source)
    reader = _make_reader(args, rows.with_format("arrow")[:1], rows.features, source)
    if isinstance(reader, FeatureReader):
        reader.take(record)
    feature = rows.features[args.label_column]
    split, _ = _table_split(args, rows, source, reader, len(label_names), label_names, args.test_samples)
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


def _open(args: Any, split: str) -> tuple[Any, str] | None:
    """The rows of "train", "validation" or "test" and what to call them; None if there are no such rows."""
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


def _number_labels(
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


def _check_columns(args: Any, columns: Sequence[str], source: str) -> None:
    for name in ("text_column", "features_column", "label_column"):
        column = getattr(args, name)
        if column is not None and column not in columns:
            raise ValueError(f"{name} must be one of {list(columns)} of {source}, got {column!r}")


def _make_reader(args: Any, first: pa.Table, features: datasets.Features, source: str) -> Reader:
    if args.text_column is not None:
        return TextReader(args.text_column, args.max_length, choose_tokenizer(args))
    where = f"row 0 of {source}: features_column {args.features_column!r}"
    value = _value(first.column(args.features_column)[0])
    if is_sound(value):
        samples, rate = decode_wav(value, where)
        return SoundReader(
            args.features_column, args.max_length, rate, samples.shape[1], args.feature_scale, args.frame_length
        )
    array = as_array(value, where)
    if array.ndim not in (1, 2):
        raise ValueError(f"{where} must hold a flat sequence of numbers or frames, got an array of shape {array.shape}")
    leaf = features[args.features_column]
    while hasattr(leaf, "feature"):
        leaf = leaf.feature
    num_features = array.shape[1] if array.ndim == 2 else None
    dtype = getattr(leaf, "dtype", None)
    return FeatureReader(
        args.features_column, args.max_length, num_features, dtype, args.feature_scale, args.frame_length
    )


def _features(rows: Any, first: pa.Table) -> datasets.Features:
    return rows.features or datasets.Features.from_arrow_schema(first.schema)  # a stream may not know its own


def read_record(folder: Path) -> dict[str, Any]:
    """features.json of a saved model; empty if there is none. Raises ValueError if it is damaged."""
    path = folder / FEATURES
    if not path.exists():
        return {}
    try:
        record = json.loads(path.read_text())
        return {name: type_(record[name]) for name, type_ in _RECORD.items() if name in record}
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} must hold numbers for {', '.join(_RECORD)}: {error}") from error


class _Scan(NamedTuple):
    labels: np.ndarray
    lengths: np.ndarray
    sha256: str


def _scan(samples: TableSamples) -> _Scan:
    """Check every row. Raises ValueError naming the first bad one."""
    digest, labels, lengths = hashlib.sha256(), [], []
    for raw, label, _ in samples.scan():
        data = raw if isinstance(raw, bytes) else np.ascontiguousarray(raw).tobytes()
        digest.update(f"{label} {len(data)} ".encode())
        digest.update(data)
        labels.append(label)
        lengths.append(samples.reader.num_positions(raw))
    return _Scan(np.array(labels, np.int64), np.array(lengths, np.int64), digest.hexdigest())


def _check_labels(labels: np.ndarray, num_labels: int, source: str) -> None:
    for row in np.flatnonzero((labels < 0) | (labels >= num_labels))[:1]:
        check_label(int(labels[row]), num_labels, f"row {row} of {source}")


def _num_labels(args: Any, feature: Any, labels: np.ndarray | None, source: str) -> tuple[int, list[str] | None]:
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


def _some(count: int, wanted: int | None, seed: int) -> np.ndarray:
    """At most `wanted` of `count` rows, at random, ascending."""
    order = np.random.default_rng([seed, 2]).permutation(count)
    return np.sort(order[: count if wanted is None else wanted])


def _load_tables(args: Any, label_names: Sequence[str] | None) -> ClassificationData:
    opened = _open(args, "train")
    if opened is None:
        raise ValueError(f"dataset {args.dataset_name!r} has no split 'train'")
    rows, source = opened
    if len(rows) == 0:
        raise ValueError(f"{source} holds no rows")
    _check_columns(args, rows.column_names, source)
    reader = _make_reader(args, rows.with_format("arrow")[:1], rows.features, source)
    rows, label_names = _number_labels(rows, args.label_column, label_names, source)
    # All rows are checked before any are held out, so that errors name rows of the file.
    samples = TableSamples(rows, reader, args.label_column, source)
    scan = _scan(samples)
    num_labels, names = _num_labels(args, rows.features[args.label_column], scan.labels, source)
    _check_labels(scan.labels, num_labels, source)

    given = _open(args, "validation")
    fingerprints = {"sha256 of the training data": scan.sha256}
    if given is not None:
        kept = np.arange(len(rows))
        validation, sha256 = _table_split(args, *given, reader, num_labels, label_names, args.validation_samples)
        fingerprints["sha256 of the validation data"] = sha256
    else:
        order = np.random.default_rng([args.seed, 1]).permutation(len(rows))
        held_out = max(1, round(HELD_OUT_FRACTION * len(rows)))
        if held_out == len(rows):
            raise ValueError(f"{source} must hold at least 2 rows, so that one can be held out, got {len(rows)}")
        kept, chosen = np.sort(order[held_out:]), np.sort(order[:held_out])
        chosen = chosen[_some(held_out, args.validation_samples, args.seed)]
        validation = Split(
            TableSamples(rows.select(chosen), reader, args.label_column, source),
            torch.from_numpy(scan.labels[chosen]),
            f"{HELD_OUT_FRACTION:.0%} of the training rows, held out",
        )
        samples = TableSamples(rows.select(kept), reader, args.label_column, source)
    given = _open(args, "test")
    test = None
    if given is not None and not _is_unlabelled(args, given[0]):
        test, _ = _table_split(args, *given, reader, num_labels, label_names, args.test_samples)
    lengths = np.minimum(scan.lengths[kept], args.max_length)
    cut = float((scan.lengths[kept] > args.max_length).mean())
    return ClassificationData(
        MapSamples(samples, args.seed),
        reader,
        validation,
        test,
        num_labels,
        names,
        max(1, round(float(lengths.mean()))),
        fingerprints,
        _describe(args, f"{len(kept):,} samples of {reader.name}", cut, num_labels, validation, test),
    )


def _table_split(
    args: Any,
    rows: datasets.Dataset,
    source: str,
    reader: Reader,
    num_labels: int,
    label_names: Sequence[str] | None,
    wanted: int | None,
) -> tuple[Split, str]:
    """(held-out rows, checked; their fingerprint)."""
    if len(rows) == 0:
        raise ValueError(f"{source} holds no rows")
    _check_columns(args, rows.column_names, source)
    rows, _ = _number_labels(rows, args.label_column, label_names, source)
    scan = _scan(TableSamples(rows, reader, args.label_column, source))
    _check_labels(scan.labels, num_labels, source)
    chosen = _some(len(rows), wanted, args.seed)
    samples = TableSamples(rows.select(chosen), reader, args.label_column, source)
    return Split(samples, torch.from_numpy(scan.labels[chosen]), source), scan.sha256


def _is_unlabelled(args: Any, rows: Any) -> bool:
    """Whether it is a test split of a benchmark that keeps its labels to itself and publishes -1."""
    if args.label_column not in rows.column_names:
        return False
    return set(rows.with_format("arrow")[args.label_column].to_pylist()) == {-1}


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
    opened = _open(args, "train")
    if opened is None:
        raise ValueError(f"dataset {args.dataset_name!r} has no split 'train'")
    rows, source = opened
    first = _first_table(rows, source)
    _check_columns(args, first.column_names, source)
    features = _features(rows, first)
    reader = _make_reader(args, first, features, source)
    num_labels, names = _num_labels(args, features[args.label_column], None, source)

    def open_stream() -> Any:
        again = _open(args, "train")
        assert again is not None
        return again[0].select_columns([reader.column, args.label_column])

    validation = _stream_split(args, "validation", reader, num_labels, args.validation_samples)
    if validation is None:
        raise ValueError(
            "streaming needs a validation_file or a split 'validation': a stream cannot be held out from, and the "
            "test split is not to select by"
        )
    test = _stream_split(args, "test", reader, num_labels, args.test_samples)
    expand = EncodeRows(reader, args.label_column, num_labels, source)
    return ClassificationData(
        StreamSamples(open_stream, expand, args.shuffle_buffer, args.seed),
        reader,
        validation,
        test,
        num_labels,
        names,
        args.max_length,
        {"sha256 of the training data": _stream_fingerprint(args, open_stream)},
        _describe(args, f"a stream of {reader.name}", 0.0, num_labels, validation, test),
    )


def _stream_split(args: Any, split: str, reader: Reader, num_labels: int, wanted: int | None) -> Split | None:
    """The first `wanted` rows, or all, in memory."""
    opened = _open(args, split)
    if opened is None:
        return None
    rows, source = opened
    first = _first_table(rows, source)
    _check_columns(args, first.column_names, source)
    if split == "test" and first.column(args.label_column)[0].as_py() == -1:
        return None  # a benchmark that keeps its labels to itself
    encode = EncodeRows(reader, args.label_column, num_labels, source)
    samples = [sample for item in islice(rows, wanted) for sample in encode(item)]
    return Split(samples, torch.tensor([sample.label for sample in samples]), source)


def _stream_fingerprint(args: Any, open_stream: Callable[[], Iterable[dict[str, Any]]]) -> str:
    """Sizes and both ends of local files; of anything else, its first rows."""
    digest = hashlib.sha256()
    paths = [Path(path) for path in args.train_file or []]
    if args.dataset_name and Path(args.dataset_name).is_dir():
        paths = sorted(p for p in Path(args.dataset_name).rglob("*") if p.suffix in TABLES)
    for path in paths:
        with path.open("rb") as file:
            size = path.stat().st_size
            digest.update(f"{size} ".encode() + file.read(_FINGERPRINT_BYTES))
            file.seek(max(0, size - _FINGERPRINT_BYTES))
            digest.update(file.read())
    if not paths:
        for item in islice(open_stream(), _FINGERPRINT_ROWS):
            digest.update(repr(item).encode())
    return digest.hexdigest()
