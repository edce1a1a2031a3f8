# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Token ids cut into blocks for training and evaluation.

A stream is a one-dimensional array of token ids: the tokens of each document, then <eos>. A block is a window of
`block_size` tokens, and neighbouring blocks share one token: the first of a block is context only, so that every
token of the stream but its very first is a target exactly once, seen with the tokens of its own block before it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from essm_train.data.documents import text_of
from essm_train.data.samples import HELD_OUT_FRACTION
from essm_train.data.tokens import ByteEncoder, Document, Encoder
from modeling_essm.training.byte_tokenizer import PAD_ID


def to_stream(documents: Iterable[Document], encoder: Encoder) -> tuple[np.ndarray, float]:
    """(n,) token ids of every document followed by <eos>, and bytes per token that is not <eos>."""
    parts, num_bytes = [], 0
    for document in documents:
        ids, size = encoder(document)
        parts.append(ids)
        num_bytes += size
    stream = np.concatenate(parts)
    return stream, num_bytes / max(1, len(stream) - len(parts))


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


def evaluation_blocks(stream: np.ndarray, block_size: int, max_blocks: int, pad_id: int = PAD_ID) -> Tensor:
    """At most `max_blocks` blocks spread evenly over the stream, its end padded with <pad>: (n, block_size) int64.

    Raises:
        ValueError: the stream holds nothing to predict.
    """
    if len(stream) < 3:  # context, target, <eos>
        raise ValueError(f"the validation text must hold at least 2 tokens, got {len(stream) - 1}")
    padding = -(len(stream) - 1) % (block_size - 1)
    blocks = cut_blocks(np.pad(stream, (0, padding), constant_values=pad_id), block_size)
    chosen = np.linspace(0, len(blocks) - 1, min(len(blocks), max_blocks)).round().astype(int)
    return torch.from_numpy(blocks[chosen].astype(np.int64))


def text_labels(input_ids: Tensor, special_ids: Sequence[int] = ByteEncoder.special_ids) -> Tensor:
    """Labels that score text only: special tokens become -100."""
    special = torch.isin(input_ids, torch.tensor(special_ids, device=input_ids.device))
    return input_ids.masked_fill(special, -100)


class PackBlocks:
    """Blocks out of a stream of rows; see `samples.Expand`. What a row leaves over begins the next block."""

    def __init__(self, encoder: Encoder, block_size: int, text_column: str):
        self.encoder, self.block_size, self.text_column = encoder, block_size, text_column
        self._rest = np.empty(0, encoder.dtype)

    def __call__(self, item: dict[str, Any]) -> list[np.ndarray]:
        text = text_of(item, self.text_column, "a row of the training stream")
        if not text:
            return []
        tokens = np.concatenate([self._rest, self.encoder(("a row of the training stream", text))[0]])
        step = self.block_size - 1
        count = (len(tokens) - 1) // step
        self._rest = tokens[count * step :].copy()
        return [tokens[i * step : i * step + self.block_size].copy() for i in range(count)]

    def state_dict(self) -> dict[str, Any]:
        return {"rest": self._rest}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._rest = state["rest"]

    def end_epoch(self) -> None:
        self._rest = np.empty(0, self.encoder.dtype)
