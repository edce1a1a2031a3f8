# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Rows of a data set as samples: read from Arrow files when they are drawn, or encoded as they stream by."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
    """Samples of a map-style data set, read from its Arrow files.

    Args:
        rows: with a label in `label_column`. source: what errors call them.
    """

    def __init__(self, rows: datasets.Dataset, reader: Reader, label_column: str, source: str):
        self.rows = rows.select_columns([reader.column, label_column]).with_format("arrow")
        self.reader, self.label_column, self.source = reader, label_column, source

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Sample:  # type: ignore[override]
        (value,), (label,) = self._columns(self.rows[int(index)])
        return Sample(self.reader.read(value, f"row {index} of {self.source}"), label)

    def _columns(self, table: pa.Table) -> tuple[list[Any], list[Any]]:
        """Values, lists among them without going through Python's numbers, and labels."""
        cells = table.column(self.reader.column)
        values = [cell.values if isinstance(cell, pa.ListScalar) else cell.as_py() for cell in cells]
        return values, table.column(self.label_column).to_pylist()

    def select(self, rows: np.ndarray) -> TableSamples:
        """The samples of those rows."""
        return TableSamples(self.rows.select(rows), self.reader, self.label_column, self.source)

    def check(self, num_labels: int) -> tuple[np.ndarray, np.ndarray, str]:
        """Every row's class, its length before it is cut (in bytes of text), and the SHA-256 of all.

        Raises:
            ValueError: a row that cannot be; names the first one.
        """
        labels: list[int] = []
        lengths: list[int] = []
        digest = hashlib.sha256()
        for table in self.rows.iter(_ROWS_AT_ONCE):
            for value, label in zip(*self._columns(table)):
                where = f"row {len(labels)} of {self.source}"
                raw = self.reader.check(value, where)
                labels.append(read_label(label, num_labels, self.label_column, where))
                lengths.append(len(raw))
                data = raw if isinstance(raw, bytes) else raw.tobytes()
                digest.update(f"{labels[-1]} {len(data)} ".encode() + data)
        return np.array(labels, np.int64), np.array(lengths, np.int64), digest.hexdigest()


def read_label(value: Any, num_labels: int, column: str, where: str) -> int:
    """An integer below num_labels. Raises ValueError for anything else."""
    if not isinstance(value, int):
        raise ValueError(
            f"{where}: label_column {column!r} must hold integers from 0, got {value!r}; text is numbered where all of "
            "the data is text and read whole, without --streaming (else by `datasets.Dataset.class_encode_column`)"
        )
    if not 0 <= value < num_labels:
        raise ValueError(f"{where}: labels must be in [0, {num_labels - 1}], got {value}")
    return int(value)


def encode_row(
    reader: Reader, label_column: str, num_labels: int, source: str, item: dict[str, Any], row: int | None
) -> tuple[list[Sample], int]:
    """The sample of a row of a stream, and the number of the next one, for errors; see `samples.Expand`."""
    where = f"row {row or 0} of {source}"
    label = read_label(item[label_column], num_labels, label_column, where)
    return [Sample(reader.read(item[reader.column], where), label)], (row or 0) + 1


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
