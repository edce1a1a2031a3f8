# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""What the tests of budgets per layer share: inputs, and the kinds of model."""

import itertools

import pytest
import torch
from helpers import random_ids

GATED = {"block": "gated", "inner_size": 16, "num_heads": 4, "mixing_size": 2}
CASES = {"softmax": {}, "none": {"gating": "none"}, "gated": GATED, "gated-diagonal": GATED | {"mixing_size": 1}}
cases = pytest.mark.parametrize("fields", CASES.values(), ids=CASES)


def white(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def everywhere(x):
    return torch.ones(x.shape[:2], dtype=torch.bool)


def matrices(mixer):
    """M_k as the operator takes them."""
    return mixer.channel_mixing if mixer.mixing_heads is None else mixer.channel_mixing.unflatten(1, mixer.mixing_heads)


def text(rows=4, length=24, seed=0):
    return [{"input_ids": random_ids(rows, length, seed=seed)}]


def all_lists(total, capacities, min_budget):
    ranges = [range(min_budget, capacity + 1) for capacity in capacities]
    return [budgets for budgets in itertools.product(*ranges) if sum(budgets) == total]
