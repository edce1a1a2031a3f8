# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""The pairs of Long Range Arena's Retrieval, which a classifier of pairs reads.

A line of the files is label, id1, id2, text1 and text2 between tabs, without a header and without quoting; the label is
written as a float (0.0 or 1.0), and a text as the literal of a Python bytes object (b'...'), in which every line break
and non-ASCII byte is an escape. As in LRA's own pipeline, the tokens are the bytes of that field as it stands in the
file, cut at 4,000 each.
"""

from __future__ import annotations

import csv
import glob
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import numpy as np
import pyarrow.compute as pc
import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset

from essm_train.data.arguments import RetrievalArguments
from essm_train.data.documents import load
from essm_train.data.readers import TextReader
from essm_train.data.rows import LabelledData, Split
from essm_train.data.samples import MapSamples, at_most, hold_out
from essm_train.files import sha256_of
from modeling_essm.training.byte_tokenizer import PAD_ID

COLUMNS = ("label", "id1", "id2", "text1", "text2")
LABELS = ("unrelated", "related")


class Pair(NamedTuple):
    """Token ids (L,) uint8 of two documents, and 1 if they belong together."""

    first: np.ndarray
    second: np.ndarray
    label: int


class PairFile(Dataset[Pair]):
    """The pairs of one file of the archive, all lines checked; texts stay on disk until they are asked for.

    Attributes:
        labels: (n,) int64. lengths: (n, 2) bytes of both texts before they are cut. sha256: of the whole file.
    Raises:
        ValueError: the file is not there, no table, or not UTF-8, or a line is wrong; names it.
    """

    def __init__(self, path: str | Path, max_length: int):
        self.path, self.max_length = Path(path), max_length
        if not self.path.is_file():
            raise ValueError(
                f"{path} is not there: fetch lra_release.gz, linked in the README of "
                "https://github.com/google-research/long-range-arena, and name one of its new_aan_pairs.*.tsv"
            )
        texts = datasets.Features(dict.fromkeys(COLUMNS, datasets.Value("string")))
        options: dict[str, Any] = {"sep": "\t", "column_names": list(COLUMNS), "features": texts, "split": "train"}
        options |= {"quoting": csv.QUOTE_NONE, "keep_default_na": False, "skip_blank_lines": False}
        self.rows = load(str(path), "csv", data_files=[glob.escape(str(self.path.absolute()))], **options)
        table = self.rows.with_format("arrow")[:]
        sizes = [pc.fill_null(pc.binary_length(table.column(name)), 0).to_numpy() for name in COLUMNS[3:]]
        self.lengths, self.sha256 = np.stack(sizes, 1), sha256_of(self.path)
        labels = table.column("label").to_pylist()
        for number, (label, lengths) in enumerate(zip(labels, self.lengths), 1):
            if label not in ("0", "1", "0.0", "1.0") or not lengths.all():
                raise ValueError(
                    f"line {number} of {path} must hold {', '.join(COLUMNS)} between tabs, label 0 or 1 and texts that "
                    f"are not empty, got label {label!r} and texts of {' and '.join(map(str, lengths))} bytes"
                )
        self.labels = torch.tensor([int(label[0]) for label in labels])

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Pair:
        row = self.rows[int(index)]
        first, second = (np.frombuffer(row[name].encode()[: self.max_length], np.uint8) for name in COLUMNS[3:])
        return Pair(first, second, int(self.labels[index]))

    def split(self, rows: np.ndarray, wanted: int | None) -> Split:
        """At most so many of these rows."""
        chosen = at_most(wanted, rows)
        return Split(Subset(self, chosen.tolist()), self.labels[chosen], f"{len(chosen):,} pairs of {self.path.name}")


def collate(pairs: Sequence[Pair], length: int | None = None) -> dict[str, Tensor]:
    """input_ids (B, 2, L), padded on the right to the longest document or to `length`, attention_mask, labels (B,)."""
    longest = max(len(text) for pair in pairs for text in pair[:2]) if length is None else length
    ids = np.full((len(pairs), 2, longest), PAD_ID, np.int64)
    for row, pair in zip(ids, pairs):
        for document, text in zip(row, pair[:2]):
            document[: len(text)] = text
    input_ids, labels = torch.from_numpy(ids), torch.tensor([pair.label for pair in pairs])
    return {"input_ids": input_ids, "attention_mask": (input_ids != PAD_ID).long(), "labels": labels}


def load_retrieval(args: RetrievalArguments) -> LabelledData:
    """The pairs that the arguments name, all checked. Raises ValueError naming the file or line that is wrong."""
    assert args.train_file is not None
    pairs = PairFile(args.train_file, args.max_length)
    digests = {"sha256 of the training data": pairs.sha256}
    held, kept, test = pairs, np.arange(len(pairs)), None
    if args.validation_file is None:
        kept, rows = hold_out(len(pairs), str(pairs.path), "lines")
    else:
        held = PairFile(args.validation_file, args.max_length)
        rows, digests["sha256 of the validation data"] = np.arange(len(held)), held.sha256
    validation = held.split(rows, args.validation_samples)
    cut = float((pairs.lengths > args.max_length).mean())
    description = (
        f"{pairs.path.name}: {len(kept):,} pairs of bytes, {cut:.1%} of the documents cut at {args.max_length}"
    )
    description += f"; validation on {len(validation.samples):,}"
    if args.test_file is not None:
        test = load_held_out(args)
        description += f"; test on {len(test.samples):,}"
    tokens = max(1, round(float(np.minimum(pairs.lengths[kept], args.max_length).sum(1).mean())))
    source = MapSamples(Subset(pairs, kept.tolist()), args.seed)
    save = TextReader("text1", args.max_length).save_pretrained
    return LabelledData(source, validation, test, tokens, digests, description, collate, save)


def load_held_out(args: RetrievalArguments) -> Split:
    """`held_out` of `load_retrieval`; no training pairs are read where there is a file of test pairs."""
    if args.test_file is None:
        return load_retrieval(args).held_out
    file = PairFile(args.test_file, args.max_length)
    return file.split(np.arange(len(file)), args.test_samples)
