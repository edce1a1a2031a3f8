# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""The text that a language model trains on and is judged by: whole, as one stream of tokens, or read while training.

documents.py reads it, tokens.py makes ids of it, and blocks.py cuts these.
"""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass
from typing import Any

import datasets
import numpy as np
from torch import Tensor

from essm_train.data import blocks, documents
from essm_train.data.samples import HELD_OUT_FRACTION, MapSamples, SampleSource, StreamSamples
from essm_train.data.tokens import Encoder


@dataclass
class TextData:
    """What a language model trains on.

    Attributes:
        source: training blocks (block_size,). held_out: (n, block_size) int64. bytes_per_token: of the held-out text.
        description: for people. sha256: of the training text; of a stream's first rows and files' sizes.
    """

    source: SampleSource
    held_out: Tensor
    bytes_per_token: float
    description: str
    sha256: str


def load_text(args: Any, encoder: Encoder) -> TextData:
    """The training and held-out text that the arguments (`CLMArguments`) name.

    Raises:
        ValueError: anything about it that cannot work; see documents.py and blocks.py.
    """
    column = args.text_column
    if args.streaming and not (args.train_file or args.dataset_name):
        raise ValueError("streaming needs train_file or dataset_name")
    documents.check_folders(args.train_file or (), args.validation_file or (), args.output_dir)
    splits, description = _open(args)
    _check_held_out(args, splits)
    source: SampleSource
    if args.streaming:
        expand = functools.partial(blocks.pack_text, encoder, args.block_size, column)
        source = StreamSamples(lambda: _open(args)[0]["train"], expand, args.shuffle_buffer, args.seed)
        rows = documents.items_of(splits["train"], description)
        sha256 = documents.stream_digest(rows, args.train_file or [args.dataset_name])
        description += f", streamed as {encoder.name}"
    else:
        if "validation" not in splits:
            splits["train"], splits["validation"] = documents.cut_end(splits["train"], column, HELD_OUT_FRACTION)
            description += f" (the last {HELD_OUT_FRACTION:.0%} held out)"
        stream, _ = blocks.to_mapped_stream(splits["train"], column, encoder)
        digest = hashlib.sha256()
        for chunk in stream.chunks:
            digest.update(np.asarray(chunk).data)
        source, sha256 = MapSamples(blocks.Blocks(stream, args.block_size), args.seed), digest.hexdigest()
        description += f": {len(stream):,} tokens of {encoder.name}"
    evaluated, density, count = _evaluated(args, splits["validation"], encoder)
    return TextData(source, evaluated, density, f"{description}, {count:,} held out", sha256)


def load_held_out(args: Any, encoder: Encoder) -> tuple[Tensor, float]:
    """`held_out` and `bytes_per_token` of `load_text`; no training text is read where the validation text has files."""
    if args.validation_file:
        rows = documents.open_files(args.validation_file, args.streaming, column=args.text_column)
    elif (rows := (splits := _open(args)[0]).get("validation")) is None:
        _check_held_out(args, splits)
        _, rows = documents.cut_end(splits["train"], args.text_column, HELD_OUT_FRACTION)
    return _evaluated(args, rows, encoder)[:2]


def _check_held_out(args: Any, splits: dict[str, Any]) -> None:
    """Raises ValueError for a stream without validation text."""
    if args.streaming and "validation" not in splits:
        raise ValueError("streaming needs validation_file or a split 'validation': the end of a stream is not held out")


def _evaluated(args: Any, rows: Any, encoder: Encoder) -> tuple[Tensor, float, int]:
    """Blocks of the validation text, its bytes per token, and its tokens; of a stream, as many as are evaluated."""
    stream: blocks.Stream
    if args.streaming:
        items = documents.items_of(rows, "the validation text")
        texts = (item[args.text_column] for item in items if item[args.text_column])
        stream, density = blocks.to_stream(texts, encoder, args.sweep_blocks * args.block_size)
    else:
        stream, density = blocks.to_mapped_stream(rows, args.text_column, encoder)
    evaluated = blocks.evaluation_blocks(stream, args.block_size, args.sweep_blocks, encoder.pad_id)
    return evaluated, density, len(stream)


def _open(args: Any) -> tuple[dict[str, Any], str]:
    """The splits train and, if there is one, validation, as data sets with the column of text; and what they are."""
    column, splits = args.text_column, {}
    if not (args.train_file or args.dataset_name):
        texts = zip(("train", "validation"), documents.standard_library())
        found = {split: datasets.Dataset.from_dict({column: sources}) for split, sources in texts}
        return found, "the sources of Python's standard library"
    description = " ".join(filter(None, (args.dataset_name, args.dataset_config_name)))
    if args.dataset_name:
        found = documents.load_splits(args.dataset_name, args.dataset_config_name, args.streaming, column)
        for split in ("train", "validation"):
            if split in found:
                what = f"split {split!r} of dataset {description!r}"
                splits[split] = documents.only_text(found[split], column, what)
        if "train" not in splits:
            raise ValueError(f"dataset {description!r} has no split 'train', only {sorted(found)}")
    for split, paths in {"train": args.train_file, "validation": args.validation_file}.items():
        if paths:
            splits[split] = documents.open_files(paths, args.streaming, column=column)
    return splits, description or documents.describe_files(args.train_file)


def read_blocks(
    paths: list[str], encoder: Encoder, block_size: int, max_blocks: int, column: str = "text"
) -> tuple[Tensor, float]:
    """Held-out blocks (n, block_size) int64 of local files, and bytes per token. Raises ValueError as `read_files`."""
    stream, density = blocks.to_stream(documents.read_files(paths, column), encoder)
    return blocks.evaluation_blocks(stream, block_size, max_blocks, encoder.pad_id), density
