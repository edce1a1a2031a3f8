# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""The text that a language model trains on and is judged by: whole, as one stream of tokens, or read while training.

documents.py reads it, tokens.py makes ids of it, and blocks.py cuts these.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from torch import Tensor

from essm_train.data import blocks, documents
from essm_train.data.samples import HELD_OUT_FRACTION, MapSamples, SampleSource, StreamSamples
from essm_train.data.tokens import Document, Encoder

_DIGEST_DOCUMENTS = 64  # of a data set too long to be read whole


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
        ValueError: anything about it that cannot work; see the functions above.
    """
    if args.streaming:
        return _load_stream(args, encoder)
    stream: blocks.Stream
    held_out: blocks.Stream | None = None
    if args.train_file:
        stream, density = _files(args.train_file, args, encoder)
        description = documents.describe_files(args.train_file)
    elif args.dataset_name:
        splits = documents.load_splits(args.dataset_name, args.dataset_config_name, streaming=False)
        stream, density = _mapped_split(splits, "train", args, encoder)
        if "validation" in splits and not args.validation_file:
            held_out, density = _mapped_split(splits, "validation", args, encoder)
        description = " ".join(filter(None, (args.dataset_name, args.dataset_config_name)))
    else:  # at most 16 MB
        trained_on, held_out_documents = documents.standard_library()
        stream, _ = blocks.to_stream(trained_on, encoder)
        held_out, density = blocks.to_stream(held_out_documents, encoder)
        description = "the sources of Python's standard library"
    if args.validation_file:
        held_out, density = _files(args.validation_file, args, encoder)
    if held_out is None:
        stream, held_out = blocks.hold_out_end(stream)
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


def _files(paths: list[str], args: Any, encoder: Encoder) -> tuple[blocks.Stream, float]:
    status = [(os.path.abspath(path), os.stat(path)) for path in documents.files_of(paths) if os.path.exists(path)]
    identity = [(path, stat.st_size, stat.st_mtime_ns) for path, stat in status]
    return blocks.to_mapped_stream(
        lambda: documents.read_files(paths, args.text_column), [identity, args.text_column], encoder
    )


def _mapped_split(splits: Any, name: str, args: Any, encoder: Encoder) -> tuple[blocks.Stream, float]:
    identity = [splits[name]._fingerprint, args.text_column]
    return blocks.to_mapped_stream(lambda: _split(splits, name, args), identity, encoder)


def _split(splits: Any, name: str, args: Any) -> Iterator[Document]:
    return documents.documents_of(splits[name], args.text_column, f"split {name!r} of dataset {args.dataset_name!r}")


def _load_stream(args: Any, encoder: Encoder) -> TextData:
    open_train: Callable[[], Any]
    validation: Iterable[Document]
    if args.validation_file:
        validation = documents.read_files(args.validation_file, args.text_column)
    if args.train_file:
        if not args.validation_file:
            raise ValueError("streaming needs validation_file: the end of a stream cannot be held out")
        paths = documents.files_of(args.train_file)
        open_train = lambda: documents.open_table(paths, streaming=True)  # noqa: E731
        description = documents.describe_files(args.train_file)
        sizes = [Path(path).stat().st_size for path in paths if Path(path).is_file()]
    elif args.dataset_name:
        splits = documents.load_splits(args.dataset_name, args.dataset_config_name, streaming=True)
        if "validation" not in splits and not args.validation_file:
            raise ValueError(
                f"streaming needs a split 'validation', and dataset {args.dataset_name!r} has only {sorted(splits)}: "
                "give validation_file"
            )
        open_train = lambda: documents.load_splits(args.dataset_name, args.dataset_config_name, streaming=True)["train"]  # noqa: E731
        if not args.validation_file:
            validation = _split(splits, "validation", args)
        description, sizes = args.dataset_name, []
    else:
        raise ValueError("streaming needs train_file (parquet, json, jsonl or csv) or dataset_name")
    rows = open_train()
    documents.check_column(rows, args.text_column, description)
    digest = hashlib.sha256(repr(sizes).encode())
    for item in islice(documents.items_of(rows, description), _DIGEST_DOCUMENTS):
        digest.update(repr(item[args.text_column]).encode())
    tokens_wanted, parts = args.sweep_blocks * args.block_size, []
    num_tokens = num_bytes = 0
    for document in validation:
        ids, size = encoder(document)
        parts.append(ids)
        num_tokens, num_bytes = num_tokens + len(ids) - 1, num_bytes + size
        if num_tokens >= tokens_wanted:
            break
    pack = blocks.PackBlocks(encoder, args.block_size, args.text_column)
    return TextData(
        StreamSamples(open_train, pack, args.shuffle_buffer, args.seed),
        blocks.evaluation_blocks(np.concatenate(parts), args.block_size, args.sweep_blocks, encoder.pad_id),
        num_bytes / max(1, num_tokens),
        f"{description}, streamed as {encoder.name}; {num_tokens:,} tokens held out",
        digest.hexdigest(),
    )
