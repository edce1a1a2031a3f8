# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""A budget for every step of `generate` that keeps the mean time of a token within a deadline while the load changes.

    model.generate(ids, step_budgets=DeadlineBudget(model, milliseconds_per_token=5))

A step is predicted to take the time of its budget, which is measured once, times a load that all budgets share, which
is an average over the last steps. Time that was lost is made up for over the steps to come. The budget falls as soon
as its predicted time misses the deadline. It rises after some steps, to one that meets the deadline with a margin. If
it falls again soon after, that one is taken to be slower than measured, which is forgotten slowly.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from transformers.utils import logging

logger = logging.get_logger(__name__)

ROUNDS = 8  # in which the budgets take turns when they are measured; the fastest of each counts
RATE = 1 / 32  # weight of a step in the load
LONGEST = 4  # times what was predicted: more than that is no load but a pause
HORIZON = 64  # steps in which lost time is made up for; at most half of their deadlines
MARGIN = 0.9  # share of the deadline that a new budget may take
SETTLE, WAIT = 4, 32  # steps at a budget before a fall, and before a rise
SOON, MOST, FORGET = 256, 1.25, 1 / 2048  # a fall so soon after a rise; what it adds to a budget's time; and by step


class DeadlineBudget:
    """What `generate` takes as step_budgets: the largest budget that keeps the mean time of a token within a deadline.

    A step gives a token of every row of the batch. Its time is all that passes until the next one: the model, the
    choice of the token, a streamer. The prompt is read at the largest budget, which makes room for all, and its time
    does not count. Where no budget meets the deadline, it stays at the fastest and warns once. An object may serve one
    call after another, not two at once.

    Args:
        model: an ES-SSM. milliseconds_per_token: the deadline.
        budgets: those to move between, integers or names in config.budget_presets; by default those that the model was
            trained at, or halves of the capacity. A cache that is given to `generate` needs room for the largest. Times
            are measured here, by generating a few tokens of one row with the model as it is now: move it before, or
            compile it with the largest budget as `state_budget`. A mapping gives seconds of a step of each instead.
        clock: seconds, of any origin.
    Attributes:
        budget: K of the next step. history: (K, seconds) of the last 4,096 steps that were measured.
        seconds: of a step by budget, at a load of 1. load: how many times as long steps take now.
    Raises:
        ValueError: a bad budget, deadline or time.
    """

    def __init__(
        self,
        model: Any,
        milliseconds_per_token: float,
        budgets: Sequence[int | str] | Mapping[Any, float] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ):
        self._deadline = _positive("milliseconds_per_token", milliseconds_per_token) / 1000
        self._clock, config = clock, model.config
        if budgets is None:
            capacity = config.num_spectral_channels
            budgets = config.trained_budgets or [capacity >> i for i in range(capacity.bit_length())]
        if isinstance(budgets, str) or not isinstance(budgets, (Sequence, Mapping)) or not budgets:
            raise ValueError(f"budgets must be a list of budgets, or a mapping to seconds, got {budgets!r}")
        given = {_of_all_layers(config, K): K for K in budgets}
        if isinstance(budgets, Mapping) and len(given) < len(budgets):
            raise ValueError(f"budgets must give each budget once, by number or name, got {budgets!r}")
        if isinstance(budgets, Mapping):
            self.seconds = {K: _positive(f"the seconds of budget {K}", budgets[name]) for K, name in given.items()}
        else:
            self.seconds = _measure(model, sorted(given), clock)
        self.load, self.history = 1.0, deque[tuple[int, float]](maxlen=4096)
        self._slower = dict.fromkeys(self.seconds, 1.0)  # than measured, as rises have shown
        self._late, self._since, self._warned = 0.0, 0, False
        self._load_before: float | None = None  # the last change, if it was a rise
        self._step, self._started = 0, 0.0
        self.budget = self._largest_within()

    def __call__(self, step: int) -> int:
        """The budget of a step of `generate`, which begins now; asked again for the same step, the same."""
        if step and step != self._step:
            now = self._clock()
            if self._step:  # the step that ends now is not the prompt's
                self._take(now - self._started)
            self._started = now
        self._step = step
        return self.budget if step else max(self.seconds)

    def _take(self, seconds: float) -> None:
        """Learn from a step that has passed, and choose the budget of the next one."""
        K = self.budget
        self.history.append((K, seconds))
        alone = self._predicted(K) / self.load
        self.load += RATE * (min(seconds / alone, LONGEST * self.load) - self.load)
        most = HORIZON / 2 * self._deadline
        self._late = min(max(0.0, self._late + seconds - self._deadline), most)
        self._slower = {K: slower + FORGET * (1 - slower) for K, slower in self._slower.items()}
        self._since += 1
        best, took = self._largest_within(), self._predicted(K)
        if best < K and self._since >= SETTLE and took > self._limit:
            if self._load_before is not None and self._since < SOON:
                slower = min(max(1.0, self.load / self._load_before), MOST)
                self._slower[K] *= slower
                self.load /= slower
                best = self._largest_within()
            self._load_before = None
        elif best > K and self._since >= WAIT:
            self._load_before = self.load
        else:
            if best == K and took > self._deadline and self._late == most and not self._warned:
                self._warned = True
                fastest, asked = f"K = {K}, takes {1000 * took:.3g} ms", f"{1000 * self._deadline:g} ms"
                logger.warning(f"no budget keeps {asked} per token: the fastest, {fastest}")
            return
        self.budget, self._since = best, 0

    @property
    def _limit(self) -> float:
        """Seconds that a step may take from now on."""
        return self._deadline - self._late / HORIZON

    def _largest_within(self) -> int:
        """The largest budget that keeps the limit with a margin, or the fastest."""
        within = [K for K in self.seconds if self._predicted(K) <= MARGIN * self._limit]
        return max(within, default=min(self.seconds, key=self._predicted))

    def _predicted(self, K: int) -> float:
        """Seconds of a step now."""
        return self.seconds[K] * self._slower[K] * self.load


def _positive(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise ValueError(f"{name} must be a finite number > 0, got {value!r}")
    return value


def _of_all_layers(config: Any, budget: int | str) -> int:
    """An integer or a name as an integer. Raises ValueError for anything else."""
    layers = config.resolve_budget(budget).layers
    if config.resolve_budget(max(layers)).layers != layers:
        raise ValueError(f"budgets must be integers, or names of integers, got {budget!r}, which is {list(layers)}")
    return max(layers)


def _measure(model: Any, budgets: list[int], clock: Callable[[], float]) -> dict[int, float]:
    """Seconds of a step of `generate` at each budget: the fastest of several rounds."""
    plan = [max(budgets)] + budgets * ROUNDS
    starts: dict[int, float] = {}

    def budget_of(step: int) -> int:
        starts.setdefault(step, clock())
        return plan[min(step, len(plan) - 1)]

    ids = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
    options = {"max_new_tokens": len(plan) + 1, "do_sample": False, "eos_token_id": None}
    options |= {"num_beams": 1, "num_return_sequences": 1, "max_time": None, "stop_strings": None}
    model.generate(ids, attention_mask=torch.ones_like(ids), step_budgets=budget_of, **options)
    steps = [(K, starts[i + 1] - starts[i]) for i, K in enumerate(plan) if i]
    return {K: min(seconds for budget, seconds in steps if budget == K) for K in budgets}
