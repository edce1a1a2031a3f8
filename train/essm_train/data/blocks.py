# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Token ids cut into blocks for training and evaluation.

A stream is a one-dimensional array of token ids, in memory or in Arrow files: the tokens of each text, then <eos>.
A block is a window of `block_size` tokens, and neighbouring blocks share one token: the first of a block is context
only, so that every token of the stream but its very first is a target exactly once, seen with the tokens of its own
block before it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from datasets.fingerprint import Hasher
from torch import Tensor

from essm_train.data.documents import texts_in
from essm_train.data.tokens import ByteEncoder, Encoder
from modeling_essm.training.byte_tokenizer import PAD_ID

Stream: TypeAlias = np.ndarray | pa.ChunkedArray
_TEXTS_AT_ONCE = 100
_FORMAT = 2  # raised whenever the same texts and encoder give other tokens


def to_stream(texts: Iterable[str], encoder: Encoder) -> tuple[np.ndarray, float]:
    """(n,) token ids of every text followed by <eos>, and bytes per token that is not <eos>."""
    rows = [encoder(text) for text in texts]
    stream = np.concatenate([ids for ids, _ in rows])
    return stream, sum(size for _, size in rows) / max(1, len(stream) - len(rows))


def to_mapped_stream(
    rows: datasets.Dataset, column: str, source: str, encoder: Encoder
) -> tuple[pa.ChunkedArray, float]:
    """As `to_stream`, in Arrow files of the cache of `datasets`: made once, mapped by every process that asks again.

    Raises:
        ValueError: the column holds something else than text, or none.
    """

    def encode(batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
        texts = list(texts_in(({column: text} for text in batch[column]), column, source))
        if not texts:
            return {"ids": [], "texts": [], "bytes": []}
        ids, size = encoder(*texts)
        return {"ids": [ids], "texts": [len(texts)], "bytes": [size]}

    count = datasets.Value("int64")
    ids = datasets.List(datasets.Value(np.dtype(encoder.dtype).name))
    made = rows.map(
        encode,
        batched=True,
        batch_size=_TEXTS_AT_ONCE,
        writer_batch_size=1,  # a row is megabytes
        remove_columns=rows.column_names,
        features=datasets.Features({"ids": ids, "texts": count, "bytes": count}),
        new_fingerprint=Hasher.hash([_FORMAT, rows._fingerprint, column, encoder]),
    )
    if not len(made):
        raise ValueError(f"{source} holds no text in column {column!r}")
    table = made.data.table
    stream = pa.chunked_array([chunk.flatten() for chunk in table["ids"].chunks])
    num_texts, num_bytes = (pc.sum(table[name]).as_py() for name in ("texts", "bytes"))
    return stream, num_bytes / max(1, len(stream) - num_texts)


class Blocks(Sequence[np.ndarray]):
    """Windows (block_size,) of a stream that share one token with the next; an incomplete end is left out.

    Raises:
        ValueError: the stream is shorter than one block.
    """

    def __init__(self, stream: Stream, block_size: int):
        if len(stream) < block_size:
            raise ValueError(
                f"the training text is shorter than one block: it holds {len(stream)} tokens and block_size is "
                f"{block_size}"
            )
        self.stream, self.block_size = stream, block_size

    def __len__(self) -> int:
        return (len(self.stream) - 1) // (self.block_size - 1)

    def __getitem__(self, index: int) -> np.ndarray:  # type: ignore[override]
        first = range(len(self))[index] * (self.block_size - 1)
        return np.asarray(self.stream[first : first + self.block_size])


def evaluation_blocks(stream: Stream, block_size: int, max_blocks: int, pad_id: int = PAD_ID) -> Tensor:
    """At most `max_blocks` blocks spread evenly over the stream, its end padded with <pad>: (n, block_size) int64.

    Raises:
        ValueError: the stream holds nothing to predict.
    """
    if len(stream) < 3:  # context, target, <eos>
        raise ValueError(f"the validation text must hold at least 2 tokens, got {len(stream) - 1}")
    step = block_size - 1
    count = -(-(len(stream) - 1) // step)
    chosen = np.linspace(0, count - 1, min(count, max_blocks)).round().astype(int)
    blocks = torch.full((len(chosen), block_size), pad_id)
    for block, index in zip(blocks.numpy(), chosen * step):
        part = stream[index : index + block_size]
        block[: len(part)] = part
    return blocks


def text_labels(input_ids: Tensor, special_ids: Sequence[int] = ByteEncoder.special_ids) -> Tensor:
    """Labels that score text only: special tokens become -100."""
    special = torch.isin(input_ids, torch.tensor(special_ids, device=input_ids.device))
    return input_ids.masked_fill(special, -100)


class PackBlocks:
    """Blocks out of a stream of rows; see `samples.Expand`. What a row leaves over begins the next block.

    Packing of `datasets` or TRL drops or pads the rest of a batch; here every token of the stream is seen once.
    """

    def __init__(self, encoder: Encoder, block_size: int, column: str):
        self.encoder, self.block_size, self.column = encoder, block_size, column
        self._rest = np.empty(0, encoder.dtype)

    def __call__(self, item: dict[str, Any]) -> list[np.ndarray]:
        for text in texts_in([item], self.column, "the training stream"):
            tokens = np.concatenate([self._rest, self.encoder(text)[0]])
            step = self.block_size - 1
            count = (len(tokens) - 1) // step
            self._rest = tokens[count * step :].copy()
            return [tokens[i * step : i * step + self.block_size].copy() for i in range(count)]
        return []

    def state_dict(self) -> dict[str, Any]:
        return {"rest": self._rest}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._rest = state["rest"]

    def end_epoch(self) -> None:
        self._rest = np.empty(0, self.encoder.dtype)
