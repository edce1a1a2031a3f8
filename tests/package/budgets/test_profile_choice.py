# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""The budget that a profile chooses, by limits of time and quality."""

import math
from dataclasses import replace

import pytest
import torch
from helpers import random_model
from profiles import HERE, THERE, as_here, device, profile, quality

from modeling_essm.budgets import choose_budget
from modeling_essm.budgets import profile as profile_module
from modeling_essm.budgets.profile import device_name


@pytest.fixture(autouse=True)
def named_machine(monkeypatch):
    """The tests run HERE."""
    as_here(monkeypatch)


@pytest.mark.parametrize(
    "limits, budget",
    [
        ({"max_quality_drop": 0}, 32),
        ({"max_quality_drop": 0.01}, 16),
        ({"max_quality_drop": 0.05}, 4),  # exactly 5%
        ({"max_quality_drop": 0.0499}, 8),
        ({"max_quality_drop": 5}, 2),
        ({"max_latency_ms": 5.0}, 32),
        ({"max_latency_ms": 4.99}, 16),
        ({"max_latency_ms": 1}, 2),
        ({"max_latency_ms": 5.0, "batch_size": 4}, 8),
        ({"max_latency_ms": 12, "phase": "prefill"}, 8),
        ({"max_latency_ms": 3.0, "max_quality_drop": 0.05}, 4),  # the smallest of 4, 8 and 16
        ({"max_latency_ms": 2.0, "max_quality_drop": 0.02}, 8),  # the only one
    ],
    ids=str,
)
def test_the_budget_that_keeps_to_the_limits(limits, budget):
    assert profile().choose(**limits) == budget


def test_time_buys_quality_and_not_size():
    """Of equal or better quality, the smaller budget is chosen although there is time for the larger."""
    assert profile((2.4, 1.9, 2.03, 2.01, 2.0)).choose(max_latency_ms=100.0) == 4
    assert profile((2.4, 2.0, 2.0, 2.0, 2.0)).choose(max_latency_ms=100.0) == 4


def test_higher_is_better():
    found = profile((0.5, 0.85, 0.88, 0.95, 0.9), higher=True)
    assert found.quality.drops == pytest.approx((4 / 9, 1 / 18, 1 / 45, -1 / 18, 0))
    assert found.choose(max_quality_drop=0.05) == 8
    assert found.choose(max_quality_drop=0.0) == found.choose(max_latency_ms=9.0) == 16
    assert found.choose(max_latency_ms=2.9) == 8


def test_a_quality_of_zero():
    assert profile((0.1, 0.0, 0.0, 0.0, 0.0), higher=True).quality.drops == (-math.inf, 0, 0, 0, 0)
    assert profile((0.1, 0.0, 0.0, 0.0, 0.0)).quality.drops == (math.inf, 0, 0, 0, 0)
    negative = profile((-3.0, -2.5, -2.0, -2.0, -2.0), higher=True)
    assert negative.quality.drops == (0.5, 0.25, 0, 0, 0)


@pytest.mark.parametrize(
    "limits, message",
    [
        ({}, "needs max_latency_ms, max_quality_drop or both"),
        ({"max_latency_ms": 0.5}, "decodes a token within 0.5 ms on this machine at batch size 1; .* K=2, needs 1 ms"),
        ({"max_latency_ms": 1, "batch_size": 4}, "at batch size 4; the fastest, K=2, needs 2 ms"),
        ({"max_latency_ms": 1, "phase": "prefill"}, "no budget reads its input within 1 ms .* K=2, needs 10 ms"),
        ({"max_latency_ms": 1.9, "max_quality_drop": 0.02}, "most 0.02 .* 1.9 ms .* K=8, needs 2 ms; .* K=4, .* 0.05"),
        ({"max_latency_ms": 0}, "max_latency_ms must be a finite number > 0, got 0"),
        ({"max_latency_ms": 10**400}, "max_latency_ms must be a finite number > 0, got 1000"),
        ({"max_latency_ms": "2"}, "max_latency_ms must be a finite number > 0, got '2'"),
        ({"max_latency_ms": math.nan}, "max_latency_ms must be a finite number > 0, got nan"),
        ({"max_latency_ms": True}, "max_latency_ms must be a finite number > 0, got True"),
        ({"max_quality_drop": -0.1}, "max_quality_drop must be a finite number >= 0, got -0.1"),
        ({"max_quality_drop": math.inf}, "max_quality_drop must be a finite number >= 0, got inf"),
        ({"max_latency_ms": 2, "batch_size": 3}, r"batch_size must be one of \[1, 4\], measured on .*, got 3"),
        ({"max_latency_ms": 2, "phase": "train"}, r"phase must be one of \['prefill', 'decode'\].*got 'train'"),
        ({"max_latency_ms": 2, "device": "moon"}, "device must be one of those measured, 'this machine', got 'moon'"),
    ],
    ids=str,
)  # fmt: skip
def test_limits_that_cannot_be_kept(limits, message):
    with pytest.raises(ValueError, match=message):
        profile().choose(**limits)


def test_which_device(monkeypatch):
    slow, fast = device(THERE, (10.0, 15.0, 20.0, 30.0, 50.0)), device(HERE, (1.0, 1.5, 2.0, 3.0, 5.0))
    both = profile(**{THERE: slow, HERE: fast})
    assert both.choose(max_latency_ms=20, device=THERE) == 8
    said: list[str] = []
    monkeypatch.setattr(profile_module.logger, "warning_once", said.append)
    assert both.choose(max_latency_ms=20) == 32 and not said
    assert profile(**{THERE: slow}).choose(max_latency_ms=20) == 8  # the only one
    assert said == ["budgets are chosen by times measured on 'another machine'; this is 'this machine'"]
    monkeypatch.setattr(profile_module, "device_name", lambda device=None: f"a {device or 'third'}")
    with pytest.raises(ValueError, match=r"no times were measured on 'a third'.*'another machine', 'this machine'"):
        both.choose(max_latency_ms=20)
    with pytest.raises(ValueError, match="no times were measured on 'a cuda'"):
        both.choose(max_latency_ms=20, device=torch.device("cuda"))
    assert both.choose(max_quality_drop=0.02) == 8  # needs no device
    with pytest.raises(ValueError, match=r"\(measured: none\)"):
        replace(both, devices={}).choose(max_latency_ms=20)


def test_a_classifier_is_chosen_by_prefill():
    found = profile(**{HERE: device(HERE)})
    assert found.choose(max_latency_ms=12.5) == 8
    with pytest.raises(ValueError, match=r"phase must be one of \['prefill'\].*got 'decode'"):
        found.choose(max_latency_ms=12.5, phase="decode")


def test_only_budgets_with_both_figures_count():
    found = profile(**{HERE: device(HERE, (1.0, 1.5, 2.0, 3.0, 5.0))})
    some = replace(found, quality=quality((2.4, 2.0), budgets=(2, 32)))
    assert some.choose(max_latency_ms=3.5) == 2
    with pytest.raises(ValueError, match=r"no budget has both a quality \(of \[3\]\) and a time"):
        replace(found, quality=quality((2.0,), budgets=(3,))).choose(max_latency_ms=3.5)
    untimed = replace(found, quality=quality((2.4, 2.0), budgets=(2, 33)))
    with pytest.raises(
        ValueError, match="none timed there loses so little; within that time the best is K=2, which loses"
    ):
        untimed.choose(max_latency_ms=3.5, max_quality_drop=0.1)


def test_device_name_is_of_its_parts(monkeypatch):
    monkeypatch.undo()
    name = device_name(torch.device("cpu"))
    assert name.endswith(" cores") and len(name.split(", ")[0]) > 2
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"GPU {device}")
    assert device_name() == device_name(torch.device("cuda")) == "GPU cuda"


def test_the_times_are_those_of_the_device_the_model_is_on(monkeypatch):
    monkeypatch.setattr(profile_module, "device_name", lambda device=None: THERE if device is None else HERE)
    times = {THERE: device(THERE, (0.1, 0.2, 0.3, 0.4, 0.5)), HERE: device(HERE, (1.0, 1.5, 2.0, 3.0, 5.0))}
    found = profile(**times)
    assert choose_budget(random_model(), profile=found, max_latency_ms=2.0) == 8
    assert choose_budget(random_model(), profile=found, max_latency_ms=2.0, device=THERE) == 32
    assert found.choose(max_latency_ms=2.0) == 32  # this machine's first device
