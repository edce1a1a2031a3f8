# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Text as bytes, cut into blocks for training and evaluation.

A stream is a one-dimensional array of token ids: the bytes of each document, then <eos>. A block is a window of
`block_size` tokens, and neighbouring blocks share one token: the first of a block is context only, so that every
token of the stream but its very first is a target exactly once, seen with the tokens of its own block before it.
"""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from modeling_essm.byte_tokenizer import EOS_ID, PAD_ID

NUM_BYTES = 256  # ids below are bytes
HELD_OUT_FRACTION = 0.1  # of a text that comes without a validation part: its end

# The default corpus: programs, not their tests, tables or generated files.
_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"}
_MAX_FILE_BYTES, _MAX_CORPUS_BYTES = 1 << 18, 1 << 24
_HELD_OUT_ONE_IN = 50


def standard_library() -> tuple[np.ndarray, np.ndarray]:
    """Python's own standard-library sources, in sorted order: (training stream, held-out stream).

    About one file in 50 is held out, chosen by a hash of its relative path: the same ones on every machine.

    Raises:
        ValueError: this Python has no library sources on disk.
    """
    root = Path(sysconfig.get_path("stdlib"))
    train: list[bytes] = []
    held_out: list[bytes] = []
    total = 0
    for path in sorted(root.rglob("*.py"), key=lambda path: path.relative_to(root).as_posix()):
        name = path.relative_to(root)
        if _SKIPPED_FOLDERS.intersection(name.parts) or name.name.startswith("_sysconfigdata"):
            continue
        size = path.stat().st_size
        if not 0 < size <= _MAX_FILE_BYTES or total + size > _MAX_CORPUS_BYTES:
            continue
        total += size
        digest = hashlib.blake2b(name.as_posix().encode(), digest_size=8).digest()
        is_held_out = int.from_bytes(digest, "big") % _HELD_OUT_ONE_IN == 0
        (held_out if is_held_out else train).append(path.read_bytes())
    if not train or not held_out:
        raise ValueError(f"no standard-library sources below {root}; give --train_file")
    return to_stream(train), to_stream(held_out)


def read_files(paths: Sequence[str]) -> np.ndarray:
    """One stream of whole files, read as bytes in the given order.

    Raises:
        ValueError: a file is missing, unreadable or empty.
    """
    documents = []
    for path in paths:
        try:
            documents.append(Path(path).read_bytes())
        except OSError as error:
            raise ValueError(f"cannot read text file {path!r}: {error.strerror}") from error
        if not documents[-1]:
            raise ValueError(f"text file {path!r} is empty")
    return to_stream(documents)


def load_text_dataset(name: str, config_name: str | None, text_column: str) -> tuple[np.ndarray, np.ndarray]:
    """A text data set through `datasets.load_dataset`: (training stream, held-out stream), one document per row.

    Args:
        name: a name on the Hub, a local folder, or a local parquet, JSON, CSV or text file.
        config_name: which configuration of it, if it has several. text_column: the column that holds the text.
    Raises:
        ValueError: no "train" split, no such column, or no text in it.
    """
    import datasets

    builder = {".parquet": "parquet", ".json": "json", ".jsonl": "json", ".csv": "csv", ".txt": "text"}
    if Path(name).is_file() and Path(name).suffix in builder:
        splits = datasets.load_dataset(builder[Path(name).suffix], data_files=name)
    else:
        splits = datasets.load_dataset(name, config_name)

    def stream(split: str) -> np.ndarray:
        if text_column not in splits[split].column_names:
            columns = splits[split].column_names
            raise ValueError(f"text_column must be one of {columns} of dataset {name!r}, got {text_column!r}")
        documents = [text.encode() for text in splits[split][text_column] if text]
        if not documents:
            raise ValueError(f"split {split!r} of dataset {name!r} holds no text in column {text_column!r}")
        return to_stream(documents)

    if "train" not in splits:
        raise ValueError(f"dataset {name!r} has no split 'train', only {sorted(splits)}")
    return (stream("train"), stream("validation")) if "validation" in splits else hold_out_end(stream("train"))


def to_stream(documents: Iterable[bytes]) -> np.ndarray:
    """(n,) uint16: the bytes of every document followed by <eos>."""
    parts = []
    for document in documents:
        parts += [np.frombuffer(document, np.uint8).astype(np.uint16), np.array([EOS_ID], np.uint16)]
    return np.concatenate(parts)


def hold_out_end(stream: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Split off the last tenth."""
    end = len(stream) - int(len(stream) * HELD_OUT_FRACTION)
    return stream[:end], stream[end:]


def cut_blocks(stream: np.ndarray, block_size: int) -> np.ndarray:
    """Windows that share one token with the next: (n,) -> view (num_blocks, block_size); an incomplete end is left out.

    Raises:
        ValueError: the stream is shorter than one block.
    """
    if len(stream) < block_size:
        raise ValueError(
            f"the training text is shorter than one block: it holds {len(stream)} tokens and block_size is {block_size}"
        )
    return np.lib.stride_tricks.sliding_window_view(stream, block_size)[:: block_size - 1]


def evaluation_blocks(stream: np.ndarray, block_size: int, max_blocks: int) -> Tensor:
    """At most `max_blocks` blocks spread evenly over the stream, its end padded with <pad>: (n, block_size) int64.

    Raises:
        ValueError: the stream holds nothing to predict.
    """
    if len(stream) < 3:  # context, target, <eos>
        raise ValueError(f"the validation text must hold at least 2 bytes, got {len(stream) - 1}")
    padding = -(len(stream) - 1) % (block_size - 1)
    blocks = cut_blocks(np.pad(stream, (0, padding), constant_values=PAD_ID), block_size)
    chosen = np.linspace(0, len(blocks) - 1, min(len(blocks), max_blocks)).round().astype(int)
    return torch.from_numpy(blocks[chosen].astype(np.int64))


def byte_labels(input_ids: Tensor) -> Tensor:
    """Labels that score bytes only: special tokens become -100."""
    return input_ids.masked_fill(input_ids >= NUM_BYTES, -100)


class BlockOrder:
    """Which block stands where in training: one shuffled pass over all blocks after the other.

    A pure function of (seed, position), so that the position in the data is one integer and a resumed run, or any
    number of processes, reads what it would have read.
    """

    def __init__(self, num_blocks: int, seed: int):
        self.num_blocks, self.seed = num_blocks, seed
        self._epoch, self._order = -1, np.empty(0, int)

    def __getitem__(self, position: int) -> int:
        epoch, index = divmod(position, self.num_blocks)
        if epoch != self._epoch:
            self._epoch = epoch
            self._order = np.random.default_rng([self.seed, epoch]).permutation(self.num_blocks)
        return int(self._order[index])
