# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Which modes stay: exact numbers, ties, whole layers, and the file of a plan."""

import dataclasses

import pytest
import torch
from companion_layers import Stack, with_energies
from recurrences import random_system

from modeling_essm.companions import Plan, allocate, importance


def kept(plan):
    return [mask.nonzero()[:, 0].tolist() for mask in plan.keep]


def scored(*energies, method="energy", **arguments):
    return importance(Stack(*(with_energies(*layer) for layer in energies)), method, **arguments)


def test_the_best_of_all_layers_stay():
    found = scored((5.0, 1.0, 3.0), (2.0, 4.0), (0.5, 0.25))
    assert kept(allocate(found, total=4)) == [[0, 2], [1], [0]]
    assert kept(allocate(found, total=4, min_keep=0)) == [[0, 2], [0, 1], []]
    assert kept(allocate(found, total=6, min_keep=2)) == [[0, 2], [0, 1], [0, 1]]
    assert kept(allocate(found, amount=0)) == [[0, 1, 2], [0, 1], [0, 1]]
    assert kept(allocate(found, amount=1.0)) == [[0], [1], [0]]
    plan = allocate(found, amount=0.5)  # round(3.5) = 4 of 7 go
    assert plan.sizes == plan.kept == [1, 1, 1]


def test_prefix_scores_never_lose_a_layer():
    """Without an epsilon the first score of each layer is 1, the largest there is."""
    found = scored((1.0, 1.0, 1.0), (1e-12, 1e-13), method="aire")
    assert kept(allocate(found, total=2)) == [[0], [0]]
    with pytest.raises(ValueError, match="min_keep=0 needs scores that can tell an idle layer"):
        allocate(found, total=2, min_keep=0)
    idle = scored((1.0, 1.0, 1.0), (1e-12, 1e-13), method="aire", eps=1e-6)
    assert kept(allocate(idle, total=2, min_keep=0)) == [[0, 1], []]


def test_ties_go_by_layer_and_index():
    found = scored((1.0, 1.0, 1.0), (1.0, 1.0, 1.0))
    for total in range(2, 7):
        plan = allocate(found, total=total)
        first = min(3, total - 1)
        assert kept(plan) == [list(range(first)), list(range(total - first))]
    same = scored((2.0, 1.0, 2.0, 1.0), (1.0, 2.0, 1.0, 2.0), method="aire")
    # scores 1, 1/2, 1/5, 1/6 in both layers, of equal energies the first first
    assert kept(allocate(same, total=3)) == [[0, 2], [1]]
    assert kept(allocate(same, total=5)) == [[0, 1, 2], [1, 3]]


def test_a_threshold_keeps_every_score_that_reaches_it():
    found = scored((5.0, 1.0, 3.0), (2.0, 4.0), (0.5, 0.25))
    limit = float(found.layers[1].scores[0])  # of energy 2
    assert kept(allocate(found, threshold=limit)) == [[0, 2], [0, 1], [0]]
    assert kept(allocate(found, threshold=limit, min_keep=0)) == [[0, 2], [0, 1], []]


def test_uniform_is_the_same_share_of_every_layer():
    systems = [random_system(n=n, seed=n) for n in (20, 10, 10)]
    found = importance(Stack(*systems), "energy")
    plan = allocate(found, amount=0.4, scope="uniform")
    assert plan.kept == [12, 6, 6]
    for mask, raw in zip(plan.keep, found.raw):
        assert raw[mask].min() > raw[~mask].max()
    assert allocate(found, total=26, scope="uniform").kept == [13, 7, 6]  # 13, 6.5 and 6.5: the first of a tie
    assert allocate(found, total=3, scope="uniform").kept == [1, 1, 1]
    assert allocate(scored((1.0,), (1.0,) * 99), total=50, scope="uniform").kept == [1, 49]
    small_ones = scored((1.0,), (1.0,), (1.0,), (1.0,) * 10, (1.0,) * 20)  # whose first modes cost the others two
    assert allocate(small_ones, total=10, scope="uniform").kept == [1, 1, 1, 2, 5]


def test_modes_per_channel():
    system = random_system(n=4, channels=3)
    found = importance(Stack(system), "energy")
    plan = allocate(found, total=5)
    assert plan.keep[0].shape == (3, 4) and plan.kept == [5] and plan.sizes == [int(plan.keep[0].sum(1).max())]
    assert found.raw[0][plan.keep[0]].min() > found.raw[0][~plan.keep[0]].max()
    rectangular = allocate(importance(Stack(system), "energy", granularity="mode_index"), total=2)
    assert rectangular.keep[0].sum(1).tolist() == [2, 2, 2] and rectangular.sizes == [2]
    for mask, raw in zip(rectangular.keep[0], found.raw[0]):
        assert raw[mask].min() > raw[~mask].max()
    ragged = Stack(dataclasses.replace(system, present=torch.arange(4) < torch.tensor([[2], [1], [3]])))
    plan = allocate(importance(ragged, "energy", granularity="mode_index"), total=2)
    assert plan.keep[0].sum(1).tolist() == [2, 1, 2]


def test_bad_arguments():
    for arguments, message in [
        ({}, "exactly one of amount, total and threshold"),
        ({"threshold": 1.0, "scope": "uniform"}, "threshold must be a finite number"),
        (dict(amount=0.5, total=3), "exactly one of"),
        (dict(amount=1.5), r"amount must be .* in \[0, 1\], got 1.5"),
        (dict(amount=float("nan")), "amount must be"),
        (dict(amount=True), "amount must be .* got True"),
        (dict(threshold=True), "threshold must be a finite number, .* got True"),
        (dict(total=1), r"total must be an integer in \[2, 5\], got 1"),
        (dict(total=6), r"total must be an integer in \[2, 5\], got 6"),
        (dict(total=2.0), "total must be an integer"),
        (dict(amount=0.5, scope="local"), "scope must be one of global, uniform, got 'local'"),
        (dict(amount=0.5, min_keep=-1), "min_keep must be an integer of at least 0, got -1"),
    ]:
        with pytest.raises(ValueError, match=message):
            allocate(scored((1.0, 2.0, 3.0), (1.0, 2.0)), **arguments)


def test_a_plan_is_a_file(tmp_path):
    model = Stack(random_system(n=6), random_system(n=4, channels=3, seed=1))
    plan = allocate(importance(model), total=9)
    plan.save(tmp_path / "plan.json")
    read = Plan.load(tmp_path / "plan.json")
    assert all(map(torch.equal, read.keep, plan.keep)) and (read.method, read.scope) == (plan.method, plan.scope)
    assert read.sizes == plan.sizes and [layer.name for layer in read.layers] == ["layers.0", "layers.1"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plan.json"]
    row = (
        '{"method": "aire", "scope": "global", "layers": [{"name": "a", "kind": "s5", "present": [1, 1], "keep": %s}]}'
    )
    for text in ("{", "[]", '{"layers": []}', row % "null", row % "[1]"):
        (tmp_path / "plan.json").write_text(text)
        with pytest.raises(ValueError, match=r"plan\.json must be a plan"):
            Plan.load(tmp_path / "plan.json")
