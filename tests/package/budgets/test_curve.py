# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""The budget curve: drops, and what is marked."""

import math
from dataclasses import replace

import pytest

from modeling_essm.budgets.curve import BudgetCurve

BUDGETS = (2, 4, 8, 16, 32)


def curve(values, higher=False, budgets=BUDGETS) -> BudgetCurve:
    return BudgetCurve("accuracy" if higher else "bits_per_byte", higher, budgets, values, (1.0,) * len(budgets))


@pytest.mark.parametrize(
    "values, higher, sweet_spot, collapse_boundary",
    [
        ((2.4, 2.1, 2.03, 2.01, 2.0), False, 8, 4),
        ((2.0, 1.9, 1.8, 1.79, 1.8), False, 8, 2),  # 1.8 / 0.9 is 2.0
        ((2.3, 2.23, 2.22, 2.04, 2.0), False, 16, 8),  # at most 2.04 and 2.2222
        ((9.0, 8.0, 7.0, 6.0, 2.0), False, 32, 32),
        ((0.5, 0.80, 0.881, 0.9, 0.9), True, 16, 8),
        ((0.5, 0.81, 0.882, 0.9, 0.9), True, 8, 4),  # 90% is 0.81, 98% is 0.882
        ((0.0, 0.0, 0.0, 0.0, 0.0), True, 2, 2),
    ],
    ids=str,
)
def test_what_is_marked(values, higher, sweet_spot, collapse_boundary):
    found = curve(values, higher)
    assert (found.sweet_spot, found.collapse_boundary) == (sweet_spot, collapse_boundary)
    assert found.presets() == {"small": collapse_boundary, "medium": sweet_spot, "full": 32}
    collapses = collapse_boundary > 2  # or no smaller budget shows that the model falls apart below
    assert found.marks == {"sweet spot": sweet_spot} | ({"collapse boundary": collapse_boundary} if collapses else {})
    lines = found.table().splitlines()[1:]
    assert [K for K, line in zip(BUDGETS, lines) if "* sweet spot" in line] == [sweet_spot]
    assert [K for K, line in zip(BUDGETS, lines) if "^ collapse" in line] == [collapse_boundary] * collapses


SLOW, LIKE = (7.2, 7.0), (6.5, 6.3)  # median and fastest round
FAST, NOISY = (4.0, 3.9), (4.0, 1.0)


@pytest.mark.parametrize(
    "times, sweet_spot",
    [
        ((LIKE, SLOW, LIKE), 8),  # 3 is worse and slower
        ((LIKE, LIKE, LIKE), 8),
        ((FAST, FAST, LIKE), 3),
        ((NOISY, NOISY, LIKE), 8),  # faster by less than its rounds differ
        ((FAST, FAST, (6.5, 4.1)), 8),  # as the full one may be, on a quieter machine
        ((FAST, LIKE, LIKE), 8),  # 2 loses too much
    ],
    ids=str,
)
def test_what_is_worse_and_not_faster_is_not_recommended(times, sweet_spot):
    values, budgets = (1.86, 1.790, 1.765), (2, 3, 8)
    found = replace(curve(values, budgets=budgets), timings=(dict(zip(budgets, times)),))
    assert found.sweet_spot == found.marks["sweet spot"] == found.presets()["medium"] == sweet_spot
    assert ("saves no time" in found.table()) == (FAST not in times or times[2][1] < 5)
    saved = replace(found, timings=(*found.timings, dict(zip(budgets, (FAST, FAST, SLOW)))))
    assert saved.sweet_spot == 3 and "saves no time" not in saved.table()  # in another kind of call
    assert replace(found, timings=({8: LIKE},)).sweet_spot == 3  # of the others nothing is known


def test_what_is_worse_within_its_error_is_the_smaller_one():
    errors, timings = (0.02, 0.02, 0.0), ({2: SLOW, 3: SLOW, 8: LIKE},)
    found = replace(curve((1.86, 1.790, 1.765), budgets=(2, 3, 8)), timings=timings, drop_errors=errors)
    assert found.sweet_spot == 3 and found.undominated((2, 3, 8)) == (3, 8)


def test_drops_and_retention_are_against_the_full_budget():
    accuracy = curve((0.5, 0.6, 0.7, 0.9, 0.8), True)
    assert accuracy.drops == pytest.approx((0.375, 0.25, 0.125, -0.125, 0))
    assert accuracy.retention == pytest.approx((0.625, 0.75, 0.875, 1.125, 1.0))
    loss = curve((4.0, 2.5, 2.0, 2.0, 2.0))
    assert loss.drops == pytest.approx((1.0, 0.25, 0, 0, 0)) and loss.retention == pytest.approx((0.5, 0.8, 1, 1, 1))
    assert curve((0.1, 0.0, 0.0, 0.0, 0.0)).drops == (math.inf, 0, 0, 0, 0)
    assert curve((0.1, 0.0, 0.0, 0.0, 0.0), True).retention == (math.inf, 1, 1, 1, 1)
    assert curve((-3.0, -2.5, -2.0, -2.0, -2.0), True).drops == (0.5, 0.25, 0, 0, 0)


def test_the_table():
    table = curve((0.5, 0.71, 0.73, 0.785, 0.8), True, budgets=(2, 3, 4, 6, 8)).table()
    assert "   6     0.7850     -1.9%          1  * sweet spot" in table
    assert table.splitlines()[0] == "   K   accuracy   vs full   tokens/s"
    assert "n/a" in curve((0.0,) * 5, True).table()
