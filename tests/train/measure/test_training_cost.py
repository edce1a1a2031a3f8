# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""measure/training_cost.py: one elastic model against fixed ones, written out by hand."""

from dataclasses import replace

import pytest

from essm_train.measure.evaluation import Evaluation
from essm_train.measure.metric import Metric
from essm_train.measure.training_cost import cost_table, training_costs


def row(budgets, values, seconds, updates=100, schedule="full", tokens=64):
    zeros = (0,) * len(budgets)
    speeds = ((1.0,) * len(budgets),) * len(values)
    evaluation = Evaluation(Metric("bits_per_byte", False), budgets, values, speeds, zeros, zeros)
    training = {"seconds": seconds, "updates": updates, "tokens_per_update": tokens, "schedule": schedule}
    return evaluation, training


@pytest.fixture
def rows():
    return {
        "K=8": row((2, 4, 8), ((9.0, 9.0, 2.5), (9.0, 9.0, 2.7)), [50.0, 70.0]),
        "ES-SSM": row((2, 4, 8), ((3.2, 2.9, 2.8), (3.4, 2.9, 2.6)), [40.0, 60.0], updates=120, schedule="discrete"),
        "K=2": row((2,), ((3.0,), (3.1,)), [20.0, 30.0]),
        "all channels": row((2, 4, 8), ((5.0, 4.0, 3.0),) * 2, [1.0, 1.0]),
    }


def test_costs_and_quality_by_hand(rows):
    (cost,) = training_costs(rows)
    assert cost.elastic == "ES-SSM" and cost.budgets == (2, 8)
    assert cost.seconds == (50.0, 25.0, 60.0) and cost.share(cost.seconds) == 50 / 85
    assert cost.updates == (120, 100, 100) and cost.tokens == (7680, 6400, 6400)
    assert [*map(list, cost.quality)] == [pytest.approx([3.3, 3.05]), pytest.approx([2.7, 2.6])]
    assert cost.deviation == pytest.approx((0.05 * 2**0.5, 0.2 * 2**0.5))  # of +0.2, +0.3 and of +0.3, -0.1


def test_the_table_says_it(rows):
    table = [[cell.strip() for cell in line.split("|")[1:-1]] for line in cost_table(rows).splitlines() if "|" in line]
    assert table[0] == ["", "K=2", "K=8", "all fixed", "elastic", "elastic / all fixed"]
    assert table[2] == ["seconds of training", "25", "60", "85", "50", "1/1.7"]
    assert table[3][-1] == table[4][-1] == "1/1.7" and table[3][1:5] == ["6,400", "6,400", "12,800", "7,680"]
    assert table[5][:3] == ["fixed at K", "3.0500", "2.6000"] and table[6][:3] == ["elastic at K", "3.3000", "2.7000"]
    assert table[7][1:3] == ["+0.2500 ± 0.0707", "+0.1000 ± 0.2828"]
    assert len({*map(len, table)}) == 1


def test_one_ninth_of_nine_equal_models(rows):
    equal = {f"K={K}": row((K,), ((1.0,),), [10.0]) for K in (2, 3, 4, 6, 8, 12, 16, 24, 32)}
    equal["ES-SSM"] = row((2, 3, 4, 6, 8, 12, 16, 24, 32), ((1.0,) * 9,), [10.0], schedule="discrete")
    (cost,) = training_costs(equal)
    assert cost.share(cost.seconds) == cost.share(cost.tokens) == pytest.approx(1 / 9) and set(cost.deviation) == {0.0}
    assert cost_table(equal).count("1/9.0") == 3 and "±" not in cost_table(equal)


def test_what_is_not_known_or_not_alike_is_left_out(rows):
    evaluation, training = rows["K=2"]
    rows["K=2"] = evaluation, training | {"seconds": [20.0, None], "tokens_per_update": None}
    (cost,) = training_costs(rows)
    assert cost.seconds is None and cost.tokens is None and cost.updates == (120, 100, 100)
    assert "seconds" not in cost_table(rows) and "updates of training" in cost_table(rows)
    rows["K=2"] = replace(evaluation, values=((3.0,),)), training  # another number of seeds
    assert training_costs(rows) == []
    rows["K=2"] = replace(evaluation, metric=Metric("accuracy", True)), training
    assert training_costs(rows) == []
    rows["K=2"], (other, training) = (evaluation, training), rows["K=8"]
    rows["K=8"] = replace(other, metric=Metric("accuracy", True)), training
    assert training_costs(rows) == []
    rows["K=8"] = other, training
    assert len(training_costs(rows)) == 1
    del rows["K=2"]
    assert training_costs(rows) == [] and cost_table(rows) == ""  # a single fixed model is no family
    assert training_costs({}) == []
