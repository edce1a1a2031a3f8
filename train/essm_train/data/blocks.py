# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Token ids cut into blocks for training and evaluation.

A stream is a one-dimensional array of token ids, in memory or in Arrow files: the tokens of each text, then <eos>.
A block is a window of `block_size` tokens, and neighbouring blocks share one token: the first of a block is context
only, so that every token of the stream but its very first is a target exactly once, seen with the tokens of its own
block before it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from datasets.fingerprint import Hasher
from torch import Tensor

from essm_train.data.tokens import ByteEncoder, Encoder
from modeling_essm.training.byte_tokenizer import PAD_ID

Stream: TypeAlias = np.ndarray | pa.ChunkedArray
_TEXTS_AT_ONCE, _BYTES_AT_ONCE = 100, 1 << 30  # of a row of ids, which holds at most 2^31 - 1
_FORMAT = 2  # raised whenever the same texts and encoder give other tokens


def to_stream(texts: Iterable[str], encoder: Encoder, at_least: float = math.inf) -> tuple[np.ndarray, float]:
    """(n,) token ids of texts, each followed by <eos>, and bytes per token that is not <eos>.

    Args:
        at_least: so many tokens that are not <eos> are enough.
    """
    parts, num_tokens, num_bytes = [encoder()[0]], 0, 0
    for text in texts:
        ids, size = encoder(text)
        parts.append(ids)
        num_tokens, num_bytes = num_tokens + len(ids) - 1, num_bytes + size
        if num_tokens >= at_least:
            break
    return np.concatenate(parts), num_bytes / max(1, num_tokens)


def to_mapped_stream(rows: datasets.Dataset, column: str, encoder: Encoder) -> tuple[pa.ChunkedArray, float]:
    """As `to_stream`, in Arrow files of the cache of `datasets`: made once, mapped by every process that asks again."""

    def encode(batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
        texts = list(filter(None, batch[column]))
        ids, size = encoder(*texts)
        return {"ids": [ids], "texts": [len(texts)], "bytes": [size]}

    largest = pc.max(pc.binary_length(rows.with_format("arrow")[:].column(column))).as_py() or 1
    count = datasets.Value("int64")
    ids = datasets.List(datasets.Value(np.dtype(encoder.dtype).name))
    made = rows.map(
        encode,
        batched=True,
        batch_size=min(_TEXTS_AT_ONCE, max(1, _BYTES_AT_ONCE // largest)),
        writer_batch_size=1,  # a row is megabytes
        remove_columns=rows.column_names,
        features=datasets.Features({"ids": ids, "texts": count, "bytes": count}),
        new_fingerprint=Hasher.hash([_FORMAT, rows._fingerprint, column, encoder]),
    )
    kind = pa.from_numpy_dtype(encoder.dtype)
    stream = pa.chunked_array([chunk.flatten() for chunk in made.data.table["ids"].chunks], kind)
    return stream, sum(made["bytes"]) / max(1, len(stream) - sum(made["texts"]))


class Blocks(Sequence[np.ndarray]):
    """Windows (block_size,) of a stream, without an incomplete end. Raises ValueError if there is none."""

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


def pack_text(
    encoder: Encoder, block_size: int, column: str, item: dict[str, Any], rest: np.ndarray | None
) -> tuple[list[np.ndarray], np.ndarray]:
    """Blocks out of a row of a stream, and the tokens left over, which begin the next block; see `samples.Expand`.

    Packing of `datasets` or TRL drops or pads the rest of a batch; here every token of the stream is seen once.
    """
    tokens = encoder(*filter(None, [item[column]]))[0]
    tokens = tokens if rest is None else np.concatenate([rest, tokens])
    step = block_size - 1
    count = max(0, len(tokens) - 1) // step
    return [tokens[i * step :][:block_size].copy() for i in range(count)], tokens[count * step :].copy()
