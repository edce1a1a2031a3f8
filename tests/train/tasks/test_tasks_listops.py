# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""essm_train/tasks/listops.py: the evaluator against a stack machine, and what the drawn trees look like."""

import json
import math
import random
import statistics
from collections import Counter

import numpy as np
import pytest
from helpers import ROOT

from essm_train.tasks.listops import OPERATORS, SYMBOLS, ListOps, evaluate

SMALL = ListOps(min_length=10, max_length=120, max_depth=6)


def stack_machine(symbols: list[str]) -> tuple[int, int, list[int]]:
    """Read from left to right with an explicit stack: the value, the deepest nesting, arguments of each operator."""
    stack: list = []
    deepest = nesting = 0
    arguments = []
    for symbol in symbols:
        if symbol.startswith("["):
            nesting += 1
            deepest = max(deepest, nesting)
            stack.append(symbol)
        elif symbol == "]":
            nesting -= 1
            values = []
            while not isinstance(stack[-1], str):
                values.append(stack.pop())
            arguments.append(len(values))
            reduce = {"MIN": min, "MAX": max, "SM": lambda v: sum(v) % 10, "MED": lambda v: int(statistics.median(v))}
            stack.append(reduce[stack.pop()[1:]](values))
        else:
            stack.append(int(symbol))
    assert nesting == 0 and len(stack) == 1
    return stack[0], deepest, arguments


@pytest.fixture(scope="module")
def trees() -> list[list[str]]:
    return [SMALL.tree("train", i) for i in range(4000)]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("[MAX 2 9 [MIN 4 7 ] 0 ]", 9),
        ("[MED 1 2 ]", 1),  # 1.5, rounded down
        ("[MED 9 1 5 ]", 5),
        ("[MED 8 1 2 3 ]", 2),
        ("[SM 9 9 [SM 5 5 ] ]", 8),
        ("[MIN 3 [MAX 1 0 ] ]", 1),
    ],
)
def test_evaluate_by_hand(text, value):
    assert evaluate(text.split()) == value


def test_evaluate_equals_a_stack_machine(trees):
    assert [evaluate(tree) for tree in trees] == [stack_machine(tree)[0] for tree in trees]


@pytest.mark.parametrize("text", ["", "[MAX 1", "[MAX 1 2", "] 1", "[MAX ]", "[MAX 1 2 ] 3", "[SUM 1 2 ]", "12"])
def test_evaluate_refuses_what_is_no_expression(text):
    with pytest.raises(ValueError, match=r"expression|expected|arguments"):
        evaluate(text.split())


def test_trees_keep_the_limits(trees):
    lengths = [len(tree) for tree in trees]
    assert min(lengths) == 11 and max(lengths) == 119  # both ends are reached, neither limit is
    machines = [stack_machine(tree) for tree in trees]
    assert max(deepest for _, deepest, _ in machines) == SMALL.max_depth - 1  # nodes of the last level are digits
    assert Counter(n for _, _, arguments in machines for n in arguments).keys() == set(range(2, 11))


def test_official_trees_keep_the_limits():
    official = ListOps()
    assert (official.train_size, official.validation_size, official.test_size) == (96_000, 2_000, 2_000)
    for i in range(40):
        tree = official.tree("test", i)
        value, deepest, arguments = stack_machine(tree)
        assert 500 < len(tree) < 2000 and deepest <= 9 and min(arguments) >= 2 and max(arguments) <= 10
        assert evaluate(tree) == value


def test_operators_and_digits_are_uniform(trees):
    """Trees are chosen by their shape alone, so that the symbols in them stay independent and uniform."""
    counts = Counter(symbol for tree in trees for symbol in tree)
    for kind in (OPERATORS, SYMBOLS[:10]):
        total, p = sum(counts[symbol] for symbol in kind), 1 / len(kind)
        for symbol in kind:
            assert abs(counts[symbol] / total - p) < 5 * math.sqrt(p * (1 - p) / total), symbol


def test_every_label_is_there_and_the_ends_are_more_frequent(trees):
    """MIN and MAX push values outwards; a tenth for each label would be wrong. No label is over a quarter."""
    labels = Counter(evaluate(tree) for tree in trees)
    shares = np.array([labels[digit] / len(trees) for digit in range(10)])
    assert shares.min() > 0.04 and shares.max() < 0.25
    assert min(shares[0], shares[9]) > shares[2:8].max()


def test_lengths_are_those_of_trees_drawn_whole_and_then_sorted_out(trees):
    """Giving up on a tree as soon as it is too long favours nothing."""
    draw = random.Random(1)

    def length(depth: int) -> int:
        if depth == SMALL.max_depth or draw.random() > 0.25:
            return 1
        return 2 + sum(length(depth + 1) for _ in range(draw.randint(2, 10)))

    whole: list[int] = []
    while len(whole) < 4000:
        if SMALL.min_length < (n := length(1)) < SMALL.max_length:
            whole.append(n)
    ours = np.array([len(tree) for tree in trees])
    deviation = math.sqrt((ours.var() + np.var(whole)) / 4000)
    assert abs(ours.mean() - np.mean(whole)) < 4 * deviation
    deviation = math.sqrt(0.5 / 4000)
    assert abs((ours < np.median(whole)).mean() - (np.array(whole) < np.median(whole)).mean()) < 4 * deviation


def test_a_row_depends_on_seed_split_index_and_attempt_only():
    table = SMALL.rows("validation", range(5, 9), {7: 2})
    assert table["tokens"].to_pylist()[1] == " ".join(SMALL.tree("validation", 6))
    assert table["tokens"].to_pylist()[2] == " ".join(SMALL.tree("validation", 7, attempt=2))
    others = [SMALL.tree("train", 6), SMALL.tree("validation", 6, 1)]
    others.append(ListOps(seed=1, min_length=10, max_length=120, max_depth=6).tree("validation", 6))
    assert all(tree != SMALL.tree("validation", 6) for tree in others)


def test_the_data_of_version_1_stay_what_they_are():
    """Raise ListOps.VERSION with this line."""
    assert " ".join(ListOps(min_length=4, max_length=12).tree("train", 0)) == PINNED


PINNED = "[MIN 6 4 6 ]"


def test_symbols_are_those_of_the_published_tokenizer():
    path = ROOT / "hub_configs" / "essm-lra-listops" / "tokenizer.json"
    vocabulary = json.loads(path.read_text())["model"]["vocab"]
    assert vocabulary == {symbol: i for i, symbol in enumerate(SYMBOLS)} | {"<pad>": len(SYMBOLS)}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train_size": 0}, "train_size must be at least 1, got 0"),
        ({"max_depth": 1}, "max_depth must be at least 2, got 1"),
        ({"max_arguments": 1}, "max_arguments must be at least 2, got 1"),
        ({"seed": -1}, "seed must be at least 0, got -1"),
        ({"min_length": 20, "max_length": 21}, "no tree has more than min_length 20 and fewer than max_length 21"),
        ({"max_depth": 3}, r"with max_depth 3 and max_arguments 10 there are 4 to 122"),
    ],
)
def test_parameters_that_cannot_work_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        ListOps(**changes)


def test_lengths_that_hardly_occur_are_given_up(monkeypatch):
    monkeypatch.setattr("essm_train.tasks.listops._MAX_DRAWS", 1000)
    with pytest.raises(ValueError, match=r"none of 1,000 trees has more than min_length 1100"):
        ListOps(min_length=1100, max_length=1200, max_depth=4).tree("train", 0)
