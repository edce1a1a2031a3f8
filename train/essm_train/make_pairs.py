# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Pairs of passages of books, in the form of Long Range Arena's Retrieval and in the place of its absent files.

    essm-make-pairs --books data/english_novels-train.parquet --output_dir data/novel_pairs

Label 1 says that both passages come from one book. Training passages lie in the first 80% of every book, those of
validation and test in the next 10% each. A number measured on such pairs must never be called one of Retrieval.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from essm_train.arguments import OVERWRITE_HELP, arg, check_at_least
from essm_train.console import command
from essm_train.data.documents import read_files
from essm_train.files import claim, write_text

_PARTS = {"train": (0.0, 0.8), "validation": (0.8, 0.9), "test": (0.9, 1.0)}  # of every book


def pairs(books: Sequence[bytes], split: str, count: int, length: int, seed: int) -> Iterator[str]:
    """Lines of a file of `tasks.retrieval`: label, two ids and two passages of `length` bytes between tabs.

    Raises:
        ValueError: fewer than two books have two passages of that length in this part of them.
    """
    start, stop = _PARTS[split]
    parts = {i: (int(start * len(book)), int(stop * len(book)) - length) for i, book in enumerate(books)}
    parts = {i: (first, last) for i, (first, last) in parts.items() if last - first >= 2 * length}
    if len(parts) < 2:
        raise ValueError(f"{split} needs two books with two passages of length {length}, got {len(parts)}")
    rng, names = np.random.default_rng([seed, list(_PARTS).index(split)]), list(parts)
    for _ in range(count):
        label, (a, other) = int(rng.integers(2)), rng.choice(names, 2, replace=False)
        b = a if label else other
        at, to = (int(rng.integers(*parts[book])) for book in (a, b))
        while a == b and abs(at - to) < length:  # passages of one book do not overlap
            to = int(rng.integers(*parts[b]))
        texts = (books[book][place : place + length] for book, place in ((a, at), (b, to)))
        yield "\t".join([f"{label:.1f}", f"{a}:{at}", f"{b}:{to}", *map(repr, texts)])


@dataclass
class PairsArguments:
    """Pairs of passages of books."""

    books: str = field(metadata={"help": "A table with a column text, one book a row."})
    output_dir: str = arg("data/novel_pairs", "Where {train,validation,test}.tsv go.")
    length: int = arg(1_000, "Bytes of a passage.")
    seed: int = arg(0, "Same seed, same pairs.")
    train_size: int = arg(20_000, "Pairs of train.")
    validation_size: int = arg(1_000, "Pairs of validation.")
    test_size: int = arg(2_000, "Pairs of test.")
    overwrite: bool = arg(False, OVERWRITE_HELP)

    def __post_init__(self) -> None:
        check_at_least(self, 1, "length", "train_size", "validation_size", "test_size")
        check_at_least(self, 0, "seed")


def main(args: PairsArguments) -> None:
    """Write the three files."""
    folder = Path(args.output_dir)
    claim(folder, [f"{split}.tsv" for split in _PARTS], overwrite=args.overwrite, reads=[args.books])
    books = [text.encode() for text in read_files([args.books])]
    made = {
        split: "\n".join(pairs(books, split, getattr(args, f"{split}_size"), args.length, args.seed)) + "\n"
        for split in _PARTS
    }
    for split, lines in made.items():
        write_text(folder / f"{split}.tsv", lines)
    print(f"{folder}: complete; train with essm-train-retrieval --train_file {folder / 'train.tsv'}")


run = command(main, PairsArguments)


if __name__ == "__main__":
    run()
