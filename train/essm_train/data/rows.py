# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Rows of a data set as samples: checked, read from Arrow files when they are drawn, or encoded as they stream by."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from essm_train.data.readers import Reader, Sample
from essm_train.data.samples import SampleSource

_ROWS_AT_ONCE = 1000


@dataclass
class Split:
    """Held-out samples.

    Attributes:
        samples: all or a part of them, with len() and integer indexing. labels: (n,) int64, of these. name: for people.
    """

    samples: Any
    labels: Tensor
    name: str


@dataclass
class LabelledData:
    """What a classifier trains on.

    Attributes:
        source: training samples. validation: to select by. test: to report on, or None.
        tokens_per_sample: mean length after cutting; for a stream max_length.
        digests: change if the training or validation data does. description: for people.
        collate: samples, and a length to pad to or None, to a batch with labels.
        save_beside: writes what the model's inputs need into the folder of a saved model.
    """

    source: SampleSource
    validation: Split
    test: Split | None
    tokens_per_sample: int
    digests: dict[str, str]
    description: str
    collate: Callable[..., dict[str, Tensor]]
    save_beside: Callable[[Path], None]

    @property
    def held_out(self) -> Split:
        """What is reported on."""
        return self.test or self.validation


class TableSamples(Sequence[Sample]):
    """Samples of a map-style data set, read from its Arrow files."""

    def __init__(self, rows: datasets.Dataset, reader: Reader, label_column: str, source: str):
        self.rows = rows.select_columns([reader.column, label_column]).with_format("arrow")
        self.reader, self.label_column, self.source = reader, label_column, source

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Sample:  # type: ignore[override]
        table = self.rows[int(index)]
        values = self.reader.read(cell_value(table.column(self.reader.column)[0]), f"row {index} of {self.source}")
        return Sample(values, int(table.column(self.label_column)[0].as_py()))

    def select(self, rows: np.ndarray) -> TableSamples:
        """The samples of those rows."""
        return TableSamples(self.rows.select(rows), self.reader, self.label_column, self.source)


def cell_value(scalar: Any) -> Any:
    """A cell of an Arrow table: lists as arrays, without going through Python's numbers."""
    return scalar.values if isinstance(scalar, pa.ListScalar) else scalar.as_py()


def read_label(value: Any, num_labels: int | None, column: str, where: str) -> int:
    """An integer below num_labels, where that is known. Raises ValueError for anything else."""
    if not isinstance(value, (bool, int, np.integer)):
        raise ValueError(
            f"{where}: label_column {column!r} must hold integers from 0, got {value!r}; text is numbered where all of "
            "the data is text and read whole, without --streaming (else by `datasets.Dataset.class_encode_column`)"
        )
    if num_labels is not None and not 0 <= value < num_labels:
        raise ValueError(f"{where}: labels must be in [0, {num_labels - 1}], got {value}")
    return int(value)


class EncodeRows:
    """The `Expand` of labelled streams: a row is a sample. It counts rows, so that errors can name them."""

    def __init__(self, reader: Reader, label_column: str, num_labels: int, source: str):
        self.reader, self.label_column, self.num_labels, self.source = reader, label_column, num_labels, source
        self.row = 0

    def __call__(self, item: dict[str, Any]) -> list[Sample]:
        where = f"row {self.row} of {self.source}"
        label = read_label(item[self.label_column], self.num_labels, self.label_column, where)
        values = self.reader.read(item[self.reader.column], where)
        self.row += 1
        return [Sample(values, label)]

    def state_dict(self) -> dict[str, Any]:
        return {"row": self.row}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.row = state["row"]

    def end_epoch(self) -> None:
        self.row = 0


def collate(reader: Reader, samples: Sequence[Sample], length: int | None = None) -> dict[str, Tensor]:
    """A batch: sequences padded on the right, to the longest one or to `length`, and labels (B,) int64.

    attention_mask (B, L) int64 is there only where a sequence is padded. (`DataCollatorWithPadding` makes these tensors
    out of Python's lists, in 12 ms instead of 0.1 for 16 texts, with a mask always, and not of features.)
    """
    lengths = torch.tensor([len(sample.values) for sample in samples])
    longest = int(lengths.max()) if length is None else length
    batch = reader.collate(samples, longest)
    if int(lengths.min()) < longest:
        batch["attention_mask"] = (torch.arange(longest) < lengths[:, None]).long()
    return batch | {"labels": torch.tensor([sample.label for sample in samples])}


class CheckedRows(NamedTuple):
    """For every row: its class, and its length before it is cut, an upper bound of a tokenizer's tokens."""

    labels: np.ndarray
    lengths: np.ndarray
    sha256: str


def check_rows(samples: TableSamples, num_labels: int | None) -> CheckedRows:
    """Check every row. Raises ValueError naming the first bad one."""
    reader, digest = samples.reader, hashlib.sha256()
    labels: list[int] = []
    lengths: list[int] = []
    for table in samples.rows.iter(_ROWS_AT_ONCE):
        for value, label in zip(table.column(reader.column), table.column(samples.label_column).to_pylist()):
            where = f"row {len(labels)} of {samples.source}"
            raw = reader.check(cell_value(value), where)
            labels.append(read_label(label, num_labels, samples.label_column, where))
            lengths.append(len(raw))
            data = raw if isinstance(raw, bytes) else np.ascontiguousarray(raw).tobytes()
            digest.update(f"{labels[-1]} {len(data)} ".encode())
            digest.update(data)
    return CheckedRows(np.array(labels, np.int64), np.array(lengths, np.int64), digest.hexdigest())
