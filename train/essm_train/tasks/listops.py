# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Long Range Arena's ListOps: nested list expressions over digits, and the digit that they amount to.

    [MAX 2 9 [MIN 4 7 ] 0 ]   ->  9

Trees are drawn as there (Tay et al., arXiv 2011.04006; figures from its generator): a node above the depth limit is an
operator with probability 1/4, otherwise a digit; an operator is one of four with 2 to 10 arguments, all uniform. The
tree is kept if its number of symbols lies strictly between the limits. MED is the median, rounded down, and SM the sum
modulo 10. Symbols are written without the parentheses of the original files, which its tokenizer drops as well.
"""

from __future__ import annotations

import hashlib
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import pyarrow as pa
from datasets import ClassLabel, Dataset, Features, Value

from essm_train.arguments import arg, check_at_least
from essm_train.tasks.shards import RowGenerator

DIGITS = tuple(map(str, range(10)))
_OPERATIONS: dict[str, Callable[[list[int]], int]] = {
    **{"[MIN": min, "[MAX": max},
    **{"[MED": lambda values: int(statistics.median(values)), "[SM": lambda values: sum(values) % 10},
}
OPERATORS = tuple(_OPERATIONS)
CLOSE = "]"
SYMBOLS = (*DIGITS, *OPERATORS, CLOSE)  # a symbol's id is its place; as in hub_configs/essm-lra-listops
OPERATOR_PROBABILITY = 0.25
_SHORTEST = 4  # an operator with two digits; a tree that is one digit is no list
_MAX_DRAWS = 1_000_000  # of trees, for one that has the right length


@dataclass
class ListOps(RowGenerator):
    """The data set of these parameters; the defaults are Long Range Arena's.

    Raises:
        ValueError: parameters that no tree can meet.
    """

    name: ClassVar[str] = "listops"
    seed: int = arg(0, "Same seed, same data.")
    train_size: int = arg(96_000, "Training rows.")
    validation_size: int = arg(2_000, "Validation rows.")
    test_size: int = arg(2_000, "Test rows.")
    min_length: int = arg(500, "Trees have more symbols than this ..")
    max_length: int = arg(2_000, ".. and fewer than this.")
    max_depth: int = arg(10, "Levels of the tree; the root is level 1, and nodes of the last level are digits.")
    max_arguments: int = arg(10, "Arguments of an operator: 2 to this many.")
    rows_per_shard: int = arg(2_000, "Rows in a file.")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least(self, 0, "seed", "min_length")
        check_at_least(self, 2, "max_depth", "max_arguments")
        longest = 1
        for _ in range(self.max_depth - 1):
            longest = 2 + self.max_arguments * longest
        if not max(self.min_length + 1, _SHORTEST) <= min(self.max_length - 1, longest):
            raise ValueError(
                f"no tree has more than min_length {self.min_length} and fewer than max_length {self.max_length} "
                f"symbols: with max_depth {self.max_depth} and max_arguments {self.max_arguments} there are "
                f"{_SHORTEST} to {longest}"
            )

    def rows(self, split: str, indices: range) -> pa.Table:
        """Columns tokens (text) and label (0..9)."""
        trees = [self.tree(split, i) for i in indices]
        columns = {"tokens": [" ".join(tree) for tree in trees], "label": [evaluate(tree) for tree in trees]}
        features = Features({"tokens": Value("string"), "label": ClassLabel(names=list(DIGITS))})
        return Dataset.from_dict(columns, features).data.table

    def tree(self, split: str, index: int) -> list[str]:
        """Symbols of one tree, a function of (seed, split, index).

        Raises:
            ValueError: trees of such lengths are too rare to be drawn.
        """
        key = f"{self.seed}/{split}/{index}/0".encode()
        # random() of Python's generator gives the same numbers in every version; its other methods need not.
        draw = random.Random(int.from_bytes(hashlib.blake2b(key, digest_size=16).digest(), "big")).random
        for _ in range(_MAX_DRAWS):
            symbols: list[str] = []
            if self._grow(symbols, 1, draw) and len(symbols) >= max(self.min_length + 1, _SHORTEST):
                return symbols
        raise ValueError(
            f"none of {_MAX_DRAWS:,} trees has more than min_length {self.min_length} and fewer than max_length "
            f"{self.max_length} symbols: raise max_depth or max_arguments, or allow other lengths"
        )

    def _grow(self, symbols: list[str], depth: int, draw: Callable[[], float]) -> bool:
        """Append a subtree; False as soon as the whole can only become too long."""
        if depth >= self.max_depth or draw() > OPERATOR_PROBABILITY:
            symbols.append(DIGITS[int(draw() * 10)])
            return len(symbols) < self.max_length
        symbols.append(OPERATORS[int(draw() * len(OPERATORS))])
        for _ in range(2 + int(draw() * (self.max_arguments - 1))):
            if not self._grow(symbols, depth + 1, draw):
                return False
        symbols.append(CLOSE)
        return len(symbols) < self.max_length


def evaluate(symbols: Sequence[str]) -> int:
    """The digit that an expression amounts to."""
    remaining = iter(symbols)
    return _evaluate(next(remaining), remaining)


def _evaluate(symbol: str, remaining: Iterator[str]) -> int:
    """The value of the subtree that begins with `symbol`; reads its other symbols."""
    if symbol in DIGITS:
        return int(symbol)
    return _OPERATIONS[symbol]([_evaluate(inner, remaining) for inner in iter(lambda: next(remaining), CLOSE)])
