# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Sequences spread over gloo ranks give what one process gives: outputs, losses and all gradients."""

import itertools

import pytest
import torch
from helpers import VARIANTS, random_model
from parallel_run import (
    L,
    autocast_error,
    counts,
    model_errors,
    on_ranks,
    operator_errors,
    refusals,
    refusals_of_one,
    torch_context_parallel_error,
)

from modeling_essm import ESSMForSequenceClassification
from modeling_essm.parallel import context_parallel
from modeling_essm.parallel.batches import shard_positions
from modeling_essm.parallel.segments import find_order

orders = pytest.mark.parametrize("order", ["plain", "head_tail"])
# Sums over up to L positions in another order differ by L eps of the sum of sizes. A whole model chains some thirty
# such sums, whose differences add up.
ROUNDING = {dtype: L * torch.finfo(dtype).eps for dtype in (torch.float32, torch.float64)}
IN_A_MODEL = 30 * ROUNDING[torch.float32]


def check(found: dict[str, float], tolerance: float) -> None:
    assert all(error <= tolerance for error in found.values()), found


@orders
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.sampled(2)
def test_operator_equals_one_process(ranks, order):
    """With an initial state: outputs, gradients of inputs, gates, M_k and that state."""
    cases = list(itertools.product((4, 32), (torch.float32, torch.float64), (False, True), (False, True)))
    cases = cases if ranks == 2 else [case for case in cases if case[0] == 32 and case[3]]
    for errors in on_ranks(ranks, operator_errors, order, cases):
        for case, found in zip(cases, errors, strict=True):
            check(found, ROUNDING[case[1]])


@orders
@pytest.mark.parametrize("packed", [False, True], ids=["whole", "packed"])
@pytest.mark.parametrize("variant", ["paper", "no-gate", "gated", "gated-diagonal"])
def test_model_equals_one_process(variant, packed, order):
    fields = VARIANTS[variant]
    if variant == "gated-diagonal":
        fields = fields | {"num_heads": 4}
    for found in on_ranks(2, model_errors, order, fields, packed):
        check(found, IN_A_MODEL)


def test_four_ranks_with_gradient_checkpointing():
    for found in on_ranks(4, model_errors, "head_tail", VARIANTS["gated"], True, True):
        check(found, IN_A_MODEL)


def test_under_autocast():
    for error in on_ranks(2, autocast_error):
        assert error <= 2e-2  # operands carry 8 bits


@pytest.mark.parametrize(("variant", "per_layer"), [("paper", 1), ("gated", 2)])
@pytest.mark.parametrize("packed", [False, True], ids=["whole", "packed"])
def test_collectives_are_counted(variant, per_layer, packed):
    """One of states a layer and direction, one more where there is a convolution, two of positions a call."""
    for found in on_ranks(2, counts, VARIANTS[variant], packed):
        assert found["forward"] == 2 + 2 * per_layer
        assert found["backward"] == 2 * per_layer
        if not packed:  # else once for documents of similar length
            assert found["operator"] == 2


def test_order_of_torchs_context_parallel_is_read():
    for error in on_ranks(2, torch_context_parallel_error):
        assert error <= IN_A_MODEL


def test_calls_that_cannot_work_are_refused_on_all_ranks():
    expected = {
        "no position_ids": "needs position_ids",
        "another shape of position_ids": r"must have shape (1, 8), got (1, 7)",
        "seq_idx": "seq_idx does not tell",
        "cache": "use_cache has no place",
        "state_lengths": "state_lengths has no place",
        "padding on one rank": "must agree on shape, padding (0: none) and budgets, got [[1, 8, 0, 32, 32], [1, 8, 1,",
        "other budgets": "got [[1, 8, 0, 3, 3], [1, 8, 0, 4, 4]]",
        "other shapes": "got [[1, 8, 0, 32, 32], [1, 7, 0, 32, 32]]",
        "short segments": "at least the 3 positions before a step, got 2",
        "two orders": "fit more than one order",
        "stochastic depth": "stochastic_depth must be 0",
    }
    for said in on_ranks(2, refusals):
        assert said.keys() == expected.keys()
        for name, text in expected.items():
            assert text in said[name], said[name]


def test_what_is_refused_of_one_rank_is_raised_on_all():
    """At once: a rank that goes on would wait for the other until its group gives up."""
    of_the_second = {
        "no position_ids": "needs position_ids",
        "shape of position_ids": "must have shape (2, 8), got (2, 7)",
        "seq_idx": "seq_idx does not tell",
        "cache": "use_cache has no place",
        "state_lengths": "state_lengths has no place",
        "no inputs": "give exactly one of input_ids",
        "dtype of inputs": "input_ids must be int64 or int32",
        "token ids": "input_ids must be in [0, ",
        "budget out of range": "[1, 32], got 33",
        "a budget for too many rows": "3",
    }
    of_both = {
        "budgets of rows": "must agree on budgets of rows, got [[5, 20], [20, 5]]",
        "rows and none": "must agree on budgets of rows, got [[20, 20], [5, 20]]",
    }
    first, second = on_ranks(2, refusals_of_one)
    assert first.keys() == second.keys() == of_the_second.keys() | of_both.keys()
    for name, text in of_the_second.items():
        assert text in second[name], second[name]
        assert "processes [1] of those that share sequences refuse their arguments" in first[name], first[name]
    for name, text in of_both.items():
        assert text in first[name] and text in second[name], first[name]


def test_models_that_cannot_be_spread_are_refused():
    with (
        pytest.raises(ValueError, match="got ESSMForSequenceClassification"),
        context_parallel(random_model(ESSMForSequenceClassification), None),
    ):
        pass
    hybrid = random_model(layer_types=["full_attention", "linear_attention"])
    with pytest.raises(ValueError, match="keys that lie on others"), context_parallel(hybrid, None):
        pass
    with pytest.raises(ValueError, match="ar_order must be 0"), context_parallel(random_model(ar_order=2), None):
        pass
    with pytest.raises(ValueError, match="got Linear"), context_parallel(torch.nn.Linear(2, 2), None):
        pass


def ends_of(positions: torch.Tensor, order: str, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """first and last (R, B, 2) of `find_order` for whole rows of positions (B, L)."""
    halves = torch.stack(
        [
            positions[:, shard_positions(positions.shape[1], rank, size, order)].view(len(positions), 2, -1)
            for rank in range(size)
        ]
    )
    return halves[..., 0], halves[..., -1]


@orders
@pytest.mark.parametrize("size", [1, 2, 4])
def test_order_is_found_from_positions(order, size):
    rows = [[16], [3, 13], [7, 1, 8], [2, 11, 3]]
    for lengths in rows:
        positions = torch.cat([torch.arange(n) for n in lengths])[None]
        found = find_order(*ends_of(positions, order, size), None)
        assert found == ("plain" if size == 1 else order)


def test_bad_orders():
    ends = ends_of(torch.arange(16)[None], "plain", 2)
    with pytest.raises(ValueError, match=r"order must be one of .*, got 'ring'"):
        find_order(*ends, "ring")
    with pytest.raises(ValueError, match="even number of positions"):
        find_order(ends[0][..., :1], ends[1][..., 1:], "head_tail")
    with pytest.raises(ValueError, match="multiple of 4 positions for 2 processes, got 6"):
        shard_positions(6, 0, 2, "head_tail")


def test_what_the_docs_say_of_accelerate():
    """It refuses recurrent layers by their names alone."""
    big_modeling = pytest.importorskip("accelerate.big_modeling")
    if not hasattr(big_modeling, "_attach_context_parallel_hooks"):
        pytest.skip("this version of accelerate prepares models for context parallelism by other means")
    model = random_model()
    with pytest.raises(ValueError, match="linear_attention"):
        big_modeling._attach_context_parallel_hooks(model)
    model.config.layer_types = None
    big_modeling._attach_context_parallel_hooks(model)
