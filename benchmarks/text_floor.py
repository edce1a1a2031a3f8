# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""What a model of bytes has to beat: gzip -9, and counts of three bytes.

    python -m benchmarks.text_floor                              the text of README's first command
    python -m benchmarks.text_floor --train_file novels-train.parquet --text_files novels-validation.parquet

gzip reads the held-out text alone, as one file. The trigram counts the training text and is judged, like a model, by
the bits per byte that it gives to the held-out text; contexts that it has not seen fall back on two bytes, on one, and
on none (Witten and Bell, 1991): p(c | ab) = (n(abc) + T(ab) p(c | b)) / (n(ab) + T(ab)), where T counts in how many
ways a context goes on.
"""

from __future__ import annotations

import argparse
import gzip

import numpy as np

from essm_train.data import documents
from essm_train.data.blocks import to_stream
from essm_train.data.tokens import ByteEncoder

from . import common

SYMBOLS = ByteEncoder.vocab_size
PIECE = 1 << 22  # symbols counted at a time


def counts(stream: np.ndarray, order: int) -> np.ndarray:
    """How often each run of `order` symbols occurs: (SYMBOLS,) * order."""
    total = np.zeros(SYMBOLS**order, np.int64)
    for start in range(0, len(stream), PIECE):
        part = stream[start : start + PIECE + order - 1]
        total += np.bincount(_runs(part, order), minlength=len(total))
    return total.reshape((SYMBOLS,) * order)


def _runs(stream: np.ndarray, order: int) -> np.ndarray:
    """Every run of `order` symbols as one number."""
    number = np.zeros(max(0, len(stream) - order + 1), np.int64)
    for i in range(order):
        number = number * SYMBOLS + stream[i : i + len(number)]
    return number


def trigram_bits(train: np.ndarray, held_out: np.ndarray) -> float:
    """Bits per symbol of held_out, ids below SYMBOLS, from its third on."""
    probability = np.full(len(held_out) - 2, 1 / SYMBOLS)
    for order in (1, 2, 3):
        table = counts(train, order)
        context_total, ways = table.sum(-1), (table > 0).sum(-1)
        symbols = _runs(held_out, order)[3 - order :]
        context = symbols // SYMBOLS
        seen, total, ways = table.ravel()[symbols], context_total.ravel()[context], ways.ravel()[context]
        mixed = (seen + ways * probability) / np.maximum(total + ways, 1)
        probability = np.where(total > 0, mixed, probability)
    return float(-np.log2(probability).mean())


def text_of(part: list[str]) -> bytes:
    return "".join(part).encode()


def floors(train: list[str], held_out: list[str]) -> dict[str, float]:
    """Bits per byte of both."""
    text, encoder = text_of(held_out), ByteEncoder()
    trigram = trigram_bits(to_stream(train, encoder)[0], to_stream(held_out, encoder)[0])
    return {"gzip -9": 8 * len(gzip.compress(text, 9)) / len(text), "trigram": trigram}


def add_texts(p: argparse.ArgumentParser) -> None:
    """--train_file and --text_files."""
    p.add_argument("--train_file", nargs="+", help="text to count; by default Python's standard library")
    p.add_argument("--text_files", nargs="+", help="held-out text of the same kind")


def read_texts(args: argparse.Namespace) -> tuple[list[str], list[str]]:
    """Texts to train on and held-out ones. Raises ValueError where only one is named, or as `read_files`."""
    if (args.train_file is None) != (args.text_files is None):
        raise ValueError(f"give both --train_file and --text_files, got {args.train_file} and {args.text_files}")
    if args.train_file is None:
        return documents.standard_library()
    return list(documents.read_files(args.train_file)), list(documents.read_files(args.text_files))


def main(argv: list[str] | None = None) -> dict:
    p = common.parser(__doc__)
    add_texts(p)
    args = p.parse_args(argv)
    train, held_out = read_texts(args)
    if args.quick:
        train, held_out = train[:3], held_out[:1]
    sizes = [len(text_of(part)) for part in (train, held_out)]
    device, report = common.start("text_floor", args, train_bytes=sizes[0], held_out_bytes=sizes[1])
    found = floors(train, held_out)
    report["results"] = [{"name": name, "bits_per_byte": bits} for name, bits in found.items()]
    return common.finish(report, args, device)


if __name__ == "__main__":
    main()
