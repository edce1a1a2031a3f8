# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""essm_train/tasks/listops.py: the evaluator against a stack machine, and what the drawn trees look like."""

import json
import math
import statistics
from collections import Counter

import pytest
from helpers import ROOT

from essm_train.tasks.listops import OPERATORS, SYMBOLS, ListOps, evaluate

SMALL = ListOps(min_length=10, max_length=120, max_depth=6)


def stack_machine(symbols: list[str]) -> tuple[int, int, list[int]]:
    """Read from left to right with an explicit stack: the value, the deepest nesting, arguments of each operator."""
    reduce = {"MIN": min, "MAX": max, "SM": lambda v: sum(v) % 10, "MED": lambda v: int(statistics.median(v))}
    stack: list[list] = [[]]
    deepest, arguments = 0, []
    for symbol in symbols:
        if symbol.startswith("["):
            stack.append([symbol[1:]])
            deepest = max(deepest, len(stack) - 1)
        elif symbol == "]":
            name, *values = stack.pop()
            arguments.append(len(values))
            stack[-1].append(reduce[name](values))
        else:
            stack[-1].append(int(symbol))
    ((value,),) = stack
    return value, deepest, arguments


@pytest.fixture(scope="module")
def trees() -> list[list[str]]:
    return [SMALL.tree("train", i) for i in range(2000)]


def test_expressions_are_evaluated(trees):
    """By hand, and as a stack machine does."""
    by_hand = {"[MAX 2 9 [MIN 4 7 ] 0 ]": 9, "[MED 9 1 5 ]": 5, "[MED 1 2 ]": 1, "[SM 9 9 [SM 5 5 ] ]": 8}
    assert {text: evaluate(text.split()) for text in by_hand} == by_hand  # 1.5 is rounded down
    assert [evaluate(tree) for tree in trees] == [stack_machine(tree)[0] for tree in trees]


def test_trees_keep_the_limits(trees):
    lengths = [len(tree) for tree in trees]
    assert min(lengths) == 11 and max(lengths) == 119  # both ends are reached, neither limit is
    machines = [stack_machine(tree) for tree in trees]
    assert max(deepest for _, deepest, _ in machines) == SMALL.max_depth - 1  # nodes of the last level are digits
    assert Counter(n for _, _, arguments in machines for n in arguments).keys() == set(range(2, 11))


def test_operators_and_digits_are_uniform(trees):
    """Trees are chosen by their shape alone, so that the symbols in them stay independent and uniform."""
    counts = Counter(symbol for tree in trees for symbol in tree)
    for kind in (OPERATORS, SYMBOLS[:10]):
        total, p = sum(counts[symbol] for symbol in kind), 1 / len(kind)
        for symbol in kind:
            assert abs(counts[symbol] / total - p) < 5 * math.sqrt(p * (1 - p) / total), symbol


def test_a_row_depends_on_seed_split_and_index_only():
    table = SMALL.rows("validation", range(5, 9))
    assert table["tokens"].to_pylist()[1] == " ".join(SMALL.tree("validation", 6))
    others = [SMALL.tree("train", 6), SMALL.tree("validation", 7)]
    others.append(ListOps(seed=1, min_length=10, max_length=120, max_depth=6).tree("validation", 6))
    assert all(tree != SMALL.tree("validation", 6) for tree in others)
    # Raise ListOps.VERSION with this line.
    assert " ".join(ListOps(min_length=4, max_length=12).tree("train", 0)) == "[MIN 6 4 6 ]"


def test_symbols_are_those_of_the_published_tokenizer():
    path = ROOT / "hub_configs" / "essm-lra-listops" / "tokenizer.json"
    vocabulary = json.loads(path.read_text())["model"]["vocab"]
    assert vocabulary == {symbol: i for i, symbol in enumerate(SYMBOLS)} | {"<pad>": len(SYMBOLS)}


def test_parameters_that_cannot_work_are_refused(monkeypatch):
    for changes, message in (
        ({"train_size": 0}, "train_size must be at least 1, got 0"),
        ({"min_length": 20, "max_length": 21}, "no tree has more than min_length 20 and fewer than max_length 21"),
        ({"max_depth": 3}, r"with max_depth 3 and max_arguments 10 there are 4 to 122"),
    ):
        with pytest.raises(ValueError, match=message):
            ListOps(**changes)
    monkeypatch.setattr("essm_train.tasks.listops._MAX_DRAWS", 1000)
    with pytest.raises(ValueError, match=r"none of 1,000 trees has more than min_length 1100"):
        ListOps(min_length=1100, max_length=1200, max_depth=4).tree("train", 0)
