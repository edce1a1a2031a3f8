# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""A budget that keeps a deadline: its choices under a simulated clock, and where steps are held up."""

import itertools
import random
import time
import types
from statistics import mean

import pytest
import torch
from helpers import VARIANTS, captured_warnings, level_model, random_ids, tiny_config

from modeling_essm.decoding import DeadlineBudget
from modeling_essm.decoding.deadline import WAIT

ALONE = {1: 2.6, 2: 3.0, 3: 3.4, 4: 3.8, 6: 4.6, 8: 5.4}  # ms of a step
CONFIG = tiny_config(**VARIANTS["elastic"], num_spectral_channels=8)


class Machine:
    """Runs steps at the budgets of a `DeadlineBudget`, on a clock that they alone move."""

    def __init__(self, deadline_ms, noise=0.0, believed=ALONE, truth=ALONE):
        self.now, self.truth, self.noise, self.random = 0.0, truth, noise, random.Random(0)
        believed = {K: ms / 1000 for K, ms in believed.items()}
        model = types.SimpleNamespace(config=CONFIG)
        self.deadline = DeadlineBudget(model, deadline_ms, budgets=believed, clock=lambda: self.now)
        self.step = 0

    def run(self, steps, load=1.0):
        """(K, ms) of further steps of one call."""
        if self.step == 0:
            assert self.deadline(0) == max(self.truth)  # room for all
            self.now += 3.0  # of the prompt, which does not count
        taken = []
        for _ in range(steps):
            self.step += 1
            K = self.deadline(self.step)
            taken.append((K, self.truth[K] * load * self.random.gauss(1, self.noise)))
            self.now += taken[-1][1] / 1000
        return taken


def changes(taken):
    return sum(a != b for (a, _), (b, _) in itertools.pairwise(taken))


def mean_ms(taken):
    return mean(ms for _, ms in taken)


@pytest.mark.parametrize("noise", [0.0, 0.1, 0.2])
def test_the_mean_meets_the_deadline_while_the_load_changes(noise):
    machine = Machine(6.5, noise)
    alone, loaded, again = machine.run(300), machine.run(300, load=2.0), machine.run(300)
    assert {K for K, _ in alone} == {8}
    assert mean_ms(loaded[:8]) > 6.5  # nobody can know
    assert mean_ms(loaded[32:]) < 6.5 and mean_ms(loaded) < 6.5  # lost time is made up for
    assert loaded[-1][0] == 2  # the largest that keeps the deadline
    assert {K for K, _ in again[100:]} == {8}
    for part in (loaded, again):
        assert changes(part) <= 5 and changes(part[100:]) <= 1


@pytest.mark.parametrize(
    ("believed", "most"),
    [
        (dict.fromkeys(ALONE, 5.4), 10),  # all cost alike, until rises have failed
        ({K: 5.4 * K / 8 for K in ALONE}, 5),
        ({K: ms * 3 for K, ms in ALONE.items()}, 5),
        ({K: ms / 3 for K, ms in ALONE.items()}, 5),
    ],
    ids=["flat", "steep", "slow", "fast"],
)
def test_wrong_times_of_budgets_cost_few_changes(believed, most):
    """In 2,000 steps at a load where K = 4 keeps the deadline and K = 6 does not."""
    taken = Machine(6.5, 0.1, believed).run(2000, load=1.5)
    assert changes(taken[:500]) <= most and changes(taken[500:]) == 0 and mean_ms(taken[64:]) < 6.5


def test_short_loads_and_pauses():
    """A pause is made up for and forgotten; a load that comes and goes within a few steps is not followed."""
    machine = Machine(6.5)
    machine.run(100)
    machine.now += 1.0
    after = machine.run(400)
    assert min(K for K, _ in after) < 8 and {K for K, _ in after[250:]} == {8} and changes(after) <= 8
    flicker = [taken for _ in range(100) for load in (1.0, 2.2) for taken in machine.run(10, load)]
    assert changes(flicker) <= 10
    assert {K for K, _ in machine.run(200)[100:]} == {8}


def test_a_deadline_that_no_budget_meets():
    machine = Machine(2.0)
    with captured_warnings() as warnings:
        taken = machine.run(4 * WAIT)
        machine.run(4 * WAIT, load=2.0)
    assert {K for K, _ in taken} == {1}
    assert [text for text in warnings if "no budget keeps 2 ms per token" in text and "K = 1, takes 2.6 ms" in text]
    assert len(warnings) == 1
    assert {K for K, _ in machine.run(400, load=0.2)[300:]} == {8}


def test_calls_share_what_was_learned():
    machine = Machine(6.5)
    machine.run(200, load=2.0)
    held = len(machine.deadline.history)
    assert held == 199  # the last one's end is not seen
    machine.step, machine.now = 0, machine.now + 60.0  # a pause between calls
    assert {K for K, _ in machine.run(100, load=2.0)} == {2}
    assert all(seconds < 0.02 for _, seconds in machine.deadline.history)
    assert machine.deadline(100) == machine.deadline(100) == 2
    assert len(machine.deadline.history) == held + 99


def test_generate_moves_within_the_room():
    """Budgets as chosen are those that run, and tokens are those of the list of them; rows, beams and guidance too."""
    model, ids = level_model(**VARIANTS["memory"]), random_ids(2, 9)
    options = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None, "pad_token_id": 256}
    for more in ({}, {"num_beams": 2}, {"guidance_scale": 2.0}, {"cache_implementation": "static"}):
        asked, now = [], [0.0]

        def clock():
            now[0] += 0.004 if 4 < len(asked) < 12 else 0.001  # noqa: B023
            return now[0]  # noqa: B023

        deadline = DeadlineBudget(model, 1.2, budgets={32: 0.001, 7: 0.0005, 2: 0.0001}, clock=clock)
        chosen = lambda step: asked.append((step, deadline(step))) or asked[-1][1]  # noqa: E731, B023
        tokens = model.generate(ids, step_budgets=chosen, **options, **more)
        plan = list(dict(asked).values())
        assert len(plan) == 24 and len(set(plan)) > 1
        assert torch.equal(tokens, model.generate(ids, step_budgets=plan, **options, **more))


def test_budgets_are_measured_by_name_and_number():
    model = level_model(**VARIANTS["elastic"], budget_presets={"small": 3, "full": 32, "odd": [1, 2]})
    model.generation_config.update(max_time=1e-9, stop_strings=["."])
    before = torch.get_rng_state()
    assert DeadlineBudget(model, 1e6, budgets=["full", 7, "small"]).seconds.keys() == {3, 7, 32}
    assert DeadlineBudget(model, 1e6).seconds.keys() == {1, 2, 4, 8, 16, 32}
    model.config.trained_budgets = [4, 32]
    deadline = DeadlineBudget(model, 1e6)
    assert deadline.seconds.keys() == {4, 32} and deadline.budget == 32
    assert all(seconds > 0 for seconds in deadline.seconds.values()) and not deadline.history
    assert torch.equal(torch.get_rng_state(), before)


def test_a_small_budget_may_be_slower():
    """As where a larger one alone has a compiled step."""
    model, now = level_model(**VARIANTS["elastic"]), [0.0]

    def pass_time(module, args, kwargs):
        now[0] += 2.0 if kwargs["spectral_budget"] == 2 else 1.0

    model.register_forward_pre_hook(pass_time, with_kwargs=True)
    deadline = DeadlineBudget(model, 1500.0, budgets=[2, 8], clock=lambda: now[0])
    assert deadline.seconds == {2: 2.0, 8: 1.0} and deadline.budget == 8


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"milliseconds_per_token": 0}, "milliseconds_per_token must be a finite number > 0, got 0"),
        ({"milliseconds_per_token": float("nan")}, "got nan"),
        ({"milliseconds_per_token": "5"}, "got '5'"),
        ({"budgets": []}, r"budgets must be a list of budgets, or a mapping to seconds, got \[\]"),
        ({"budgets": 4.0}, "budgets must be a list of budgets, or a mapping to seconds, got 4.0"),
        ({"budgets": [4, 33]}, r"\[1, 32\], got 33"),
        ({"budgets": ["tiny"]}, "'tiny'; known presets: 'odd', 'four'"),
        ({"budgets": ["odd"]}, r"names of integers, got 'odd', which is \[1, 2\]"),
        (
            {"budgets": {4: 0.1, "four": 0.2}},
            "must give each budget once, by number or name, got {4: 0.1, 'four': 0.2}",
        ),
        ({"budgets": {4: 0.0}}, "the seconds of budget 4 must be a finite number > 0, got 0.0"),
    ],
)
def test_errors(options, message):
    model = level_model(budget_presets={"odd": [1, 2], "four": 4})
    with pytest.raises(ValueError, match=message):
        DeadlineBudget(model, **{"milliseconds_per_token": 5} | options)


def test_all_that_passes_counts_and_not_the_processors_time():
    """However fast or busy the machine is: a step lasts at least as long as it sleeps."""
    deadline = DeadlineBudget(types.SimpleNamespace(config=CONFIG), 5, budgets={1: 0.002, 8: 0.003})
    for step in range(3):
        deadline(step)
        time.sleep(0.03)
    deadline(3)
    assert [K for K, _ in deadline.history] == [8, 8] and all(seconds >= 0.03 for _, seconds in deadline.history)
