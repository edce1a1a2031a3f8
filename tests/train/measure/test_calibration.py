# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""What calibration measures: quality with its errors, and times."""

import math
from dataclasses import replace

import pytest
import torch
from helpers import random_model

from essm_train.measure import calibration
from essm_train.measure.calibration import measure_device, measure_quality
from essm_train.measure.scoring import ACCURACY, BITS_PER_BYTE, HeldOut
from essm_train.measure.timing import peak_memory
from modeling_essm import ESSMForSequenceClassification


def test_standard_errors_are_those_of_paired_samples():
    generator = torch.Generator().manual_seed(0)
    hits = {K: (torch.rand(500, generator=generator) < p).double() for K, p in ((2, 0.5), (4, 0.8), (8, 0.8))}
    coins = HeldOut(ACCURACY, lambda model, K: (hits[K], torch.ones(500).double()), {}, 7, "coins", None)
    found = measure_quality(random_model(num_spectral_channels=8), coins, (2, 4, 8))
    assert (found.metric, found.higher_is_better, found.data, found.samples) == ("accuracy", True, "coins", 500)
    assert found.values == pytest.approx([float(hits[K].mean()) for K in (2, 4, 8)])
    assert found.errors == pytest.approx([float(hits[K].std() / math.sqrt(500)) for K in (2, 4, 8)])
    assert found.drop_errors[2] == 0
    # By resampling: what is measured of drops when samples are drawn anew.
    rows = torch.randint(500, (4000, 500), generator=generator)
    resampled = {K: hits[K][rows].mean(1) for K in (2, 4, 8)}
    for i, K in enumerate((2, 4)):
        expected = float((1 - resampled[K] / resampled[8]).std())
        assert found.drop_errors[i] == pytest.approx(expected, rel=0.1)  # 4000 draws of a spread: 1%
    # Blocks that all lose alike have errors, but their drop has none.
    bits, sizes = torch.tensor([9.0, 3.0, 5.0]).double(), torch.tensor([3.0, 2.0, 2.0]).double()
    blocks = replace(coins, metric=BITS_PER_BYTE, score=lambda model, K: (bits * (1.1 if K == 2 else 1.0), sizes))
    found = measure_quality(random_model(num_spectral_channels=4), blocks, (2, 4))
    assert found.values == pytest.approx((17 / 7 * 1.1, 17 / 7)) and found.drops[0] == pytest.approx(0.1)
    assert found.errors[1] > 0.1 and found.drop_errors == pytest.approx((0, 0), abs=1e-12)


def test_what_a_time_means(monkeypatch):
    """A prefill's is that of the call, decoding's that of one of its steps, for the whole batch."""
    times = [0.004, 0.012, 0.002]
    monkeypatch.setattr(calibration, "paired", lambda calls, *args, **kwargs: {case: times for case in calls})
    prefill, decode = measure_device(random_model(), (4,), (3,), 10, 2, 1).rows
    assert (prefill.phase, decode.phase) == ("prefill", "decode")
    assert (prefill.median_ms, prefill.min_ms, prefill.max_ms) == pytest.approx((4, 2, 12))
    assert (decode.median_ms, decode.min_ms, decode.max_ms) == pytest.approx((2, 1, 6))
    assert (prefill.tokens_per_second, decode.tokens_per_second) == pytest.approx((30 / 0.004, 3 / 0.002))


@pytest.mark.parametrize("fields, shape", [({}, (2, 9)), ({"num_input_features": 3}, (2, 9, 3))])
def test_classifiers_are_timed(fields, shape):
    model = random_model(ESSMForSequenceClassification, num_labels=3, **fields)
    assert next(iter(calibration.random_inputs(model, 2, 9).values())).shape == shape
    rows = measure_device(model, (4,), (2,), 9, 1, 1).rows
    assert [(row.phase, row.batch_size, row.budget) for row in rows] == [("prefill", 2, 4)]


def test_peak_memory_is_what_was_held_at_once():
    MB = 2**20

    def call():  # holds 8, 32, 24, 40 (the peak), 16 MB
        a = torch.empty(8 * MB, dtype=torch.uint8)
        b = torch.empty(24 * MB, dtype=torch.uint8)
        del a
        c = torch.empty(16 * MB, dtype=torch.uint8)
        del b
        return c

    assert peak_memory(call, torch.device("cpu")) == pytest.approx(40 * MB, rel=0.02)
