# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""The text that a language model trains on and is judged by: whole, as one stream of tokens, or read while training.

documents.py reads it, tokens.py makes ids of it, and blocks.py cuts these.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from torch import Tensor

from essm_train.data import blocks, documents
from essm_train.data.samples import HELD_OUT_FRACTION, MapSamples, SampleSource, StreamSamples
from essm_train.data.tokens import Encoder

_DIGEST_TEXTS = 64  # of a data set too long to be read whole


@dataclass
class TextData:
    """What a language model trains on.

    Attributes:
        source: training blocks (block_size,).
        held_out: (n, block_size) int64.
        bytes_per_token: of the held-out text; 1 for bytes.
        description: for people.
        sha256: changes if the training text does. For a stream it covers the first rows and the files' sizes only.
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
    if args.streaming:
        return _load_stream(args, encoder)
    stream: blocks.Stream
    held_out: blocks.Stream | None = None
    if args.train_file or args.dataset_name:
        splits, description = _open(args)
        stream, density = blocks.to_mapped_stream(splits["train"], args.text_column, description, encoder)
        if "validation" in splits:
            held_out, density = blocks.to_mapped_stream(
                splits["validation"], args.text_column, "the validation text", encoder
            )
    else:  # at most 16 MB
        trained_on, held_out_texts = documents.standard_library()
        stream, _ = blocks.to_stream(trained_on, encoder)
        held_out, density = blocks.to_stream(held_out_texts, encoder)
        description = "the sources of Python's standard library"
    if held_out is None:
        end = len(stream) - int(len(stream) * HELD_OUT_FRACTION)
        stream, held_out = stream[:end], stream[end:]
        description += f" (the last {HELD_OUT_FRACTION:.0%} held out)"
    digest = hashlib.sha256()
    for chunk in stream.chunks if isinstance(stream, pa.ChunkedArray) else [stream]:
        digest.update(np.asarray(chunk).data)
    return TextData(
        MapSamples(blocks.Blocks(stream, args.block_size), args.seed),
        blocks.evaluation_blocks(held_out, args.block_size, args.sweep_blocks, encoder.pad_id),
        density,
        f"{description}: {len(stream):,} tokens of {encoder.name}, {len(held_out):,} held out",
        digest.hexdigest(),
    )


def read_blocks(paths: list[str], encoder: Encoder, block_size: int, max_blocks: int) -> tuple[Tensor, float]:
    """Held-out blocks (n, block_size) int64 of local files, and bytes per token. Raises ValueError as `read_files`."""
    stream, density = blocks.to_stream(documents.read_files(paths), encoder)
    return blocks.evaluation_blocks(stream, block_size, max_blocks, encoder.pad_id), density


def _open(args: Any) -> tuple[dict[str, Any], str]:
    """The splits train and, if there is one, validation, as data sets with the column of text; and what they are."""
    column = args.text_column
    if args.train_file:
        splits = {"train": documents.open_texts(args.train_file, column, args.streaming)}
        description = documents.describe_files(args.train_file)
    else:
        description = " ".join(filter(None, (args.dataset_name, args.dataset_config_name)))
        splits = documents.load_splits(args.dataset_name, args.dataset_config_name, args.streaming)
        if "train" not in splits:
            raise ValueError(f"dataset {description!r} has no split 'train', only {sorted(splits)}")
        splits = {split: splits[split] for split in ("train", "validation") if split in splits}
        for split, rows in splits.items():
            documents.check_column(rows, column, f"split {split!r} of dataset {description!r}")
    if args.validation_file:
        splits["validation"] = documents.open_texts(args.validation_file, column, args.streaming)
    return splits, description


def _load_stream(args: Any, encoder: Encoder) -> TextData:
    if not args.train_file and not args.dataset_name:
        raise ValueError("streaming needs train_file or dataset_name")
    splits, description = _open(args)
    if "validation" not in splits:
        raise ValueError("streaming needs validation_file or a split 'validation': the end of a stream is not held out")
    paths = [Path(path) for path in documents.files_of(args.train_file or [])]
    digest = hashlib.sha256(repr([path.stat().st_size for path in paths]).encode())
    first: Iterable[dict[str, Any]] = itertools.islice(documents.items_of(splits["train"], description), _DIGEST_TEXTS)
    for item in first:
        digest.update(repr(item[args.text_column]).encode())
    tokens_wanted, parts = args.sweep_blocks * args.block_size, []
    num_tokens = num_bytes = 0
    for text in documents.texts_of(splits["validation"], args.text_column, "the validation text"):
        ids, size = encoder(text)
        parts.append(ids)
        num_tokens, num_bytes = num_tokens + len(ids) - 1, num_bytes + size
        if num_tokens >= tokens_wanted:
            break
    pack = blocks.PackBlocks(encoder, args.block_size, args.text_column)
    return TextData(
        StreamSamples(lambda: _open(args)[0]["train"], pack, args.shuffle_buffer, args.seed),
        blocks.evaluation_blocks(np.concatenate(parts), args.block_size, args.sweep_blocks, encoder.pad_id),
        num_bytes / max(1, num_tokens),
        f"{description}, streamed as {encoder.name}; {num_tokens:,} tokens held out",
        digest.hexdigest(),
    )
