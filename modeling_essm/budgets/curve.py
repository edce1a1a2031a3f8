# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""The budget curve: a metric of one model at every budget K, and the rule that marks two budgets on it.

The drop of a budget is its relative loss of quality against the full (largest) budget. The sweet spot is the smallest
budget with a drop of at most 2% that is not dominated. A budget is dominated where another one is better, and takes no
more time in anything that was timed; differences within errors and spreads do not count. The collapse boundary is the
smallest budget that keeps 90% of the quality; below it the model falls apart. Quality is the metric if higher is
better, and 1 / metric otherwise, so that the boundary of a loss lies at 1 / 0.9, 11.1% above the full budget's.

If the smallest budget measured keeps 90% too, nothing was seen to collapse: tables and plots mark no boundary, files
and presets name that smallest budget.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

SWEET_SPOT_DROP = 0.02  # the paper's
COLLAPSE_QUALITY = 0.90

PRESETS = ("small", "medium", "full")
MARK_SYMBOLS = {"sweet spot": "*", "collapse boundary": "^"}

_ROUNDING = 1e-9  # a drop of exactly 2% is within 2%
Times = Mapping[int, tuple[float, float]]  # of a call by budget: median and minimum of its rounds


def saves_time(times: Times, K: int, other: int) -> bool:
    """Whether K takes less time than another budget, by more than the spread of both.

    The spread reaches from the fastest round to the median: slower rounds tell of what else the machine did.
    """
    (median, fastest), (longer, its_fastest) = times[K], times[other]
    return longer - median > (median - fastest) + (longer - its_fastest)


@dataclass(frozen=True)
class BudgetCurve:
    """The metric at each budget, ascending; the last budget is the full one.

    Attributes:
        metric, higher_is_better: what the values are.
        speeds: tokens/s of forward passes, or empty.
        errors: standard error of each value over samples, or standard deviation over seeds; or empty.
        drop_errors: standard error of each drop; or empty.
        timings: times of each kind of call that was timed, in one run of rounds; or empty.
    """

    metric: str
    higher_is_better: bool
    budgets: tuple[int, ...]
    values: tuple[float, ...]
    speeds: tuple[float, ...] = ()
    errors: tuple[float, ...] = ()
    drop_errors: tuple[float, ...] = ()
    timings: tuple[Times, ...] = field(default=(), compare=False)

    @property
    def title(self) -> str:
        """The metric's name for people."""
        return self.metric.replace("_", " ")

    @property
    def column(self) -> str:
        """The metric's name at the head of a column."""
        return "bits/byte" if self.metric == "bits_per_byte" else self.metric

    @property
    def drops(self) -> tuple[float, ...]:
        """Relative loss of quality against the full budget: 0.02 is 2% worse, negative is better."""
        full = self.values[-1]
        losses = ((full - value if self.higher_is_better else value - full) for value in self.values)
        return tuple(loss / abs(full) if full else math.copysign(math.inf, loss) if loss else 0.0 for loss in losses)

    @property
    def retention(self) -> tuple[float, ...]:
        """Share of the full budget's quality: value / full where higher is better, full / value otherwise."""
        full = self.values[-1]
        pairs = ((value, full) if self.higher_is_better else (full, value) for value in self.values)
        return tuple(a / b if b else math.inf if a else 1.0 for a, b in pairs)

    def within(self, drop: float) -> tuple[int, ...]:
        """The budgets that lose at most `drop`, ascending; the full one is among them if `drop` >= 0."""
        return tuple(K for K, loss in zip(self.budgets, self.drops) if loss <= drop + _ROUNDING)

    def undominated(self, budgets: Sequence[int], timings: Sequence[Times] | None = None) -> tuple[int, ...]:
        """Those of the budgets that none of these dominates by being better in no more time, from the best down.

        timings are by default all. Without times nothing is dominated: a smaller budget needs less memory. A dominated
        budget rules out none: 3 may save time against 8, and neither differ from 6 by more than the spread.
        """
        drops = dict(zip(self.budgets, self.drops))
        errors = dict(zip(self.budgets, self.drop_errors or (0.0,) * len(self.budgets)))

        def dominates(better: int, K: int) -> bool:
            timed = [times for times in (self.timings if timings is None else timings) if {K, better} <= times.keys()]
            worse = drops[K] - drops[better] > math.hypot(errors[K], errors[better])
            return worse and bool(timed) and not any(saves_time(times, K, better) for times in timed)

        kept: list[int] = []
        for K in sorted(budgets, key=lambda K: drops[K]):
            if not any(dominates(better, K) for better in kept):
                kept.append(K)
        return tuple(K for K in budgets if K in kept)

    def time_note(self, timings: Sequence[Times] | None = None) -> str:
        """A sentence for people where no budget takes less time than the full one; timings are by default all."""
        full, timed = self.budgets[-1], self.timings if timings is None else timings
        saves = [saves_time(times, K, full) for times in timed if full in times for K in times if full > K]
        if not saves or any(saves):
            return ""
        return (
            f"A smaller budget saves no time here: none differs from K = {full} by more than the spread of the rounds."
        )

    @property
    def sweet_spot(self) -> int:
        """The smallest K within 2% of the full budget that is not dominated."""
        return self.undominated(self.within(SWEET_SPOT_DROP))[0]

    @property
    def collapse_boundary(self) -> int:
        """The smallest K that keeps 90% of the quality, also where no smaller one was measured."""
        return self.within(1 - COLLAPSE_QUALITY if self.higher_is_better else 1 / COLLAPSE_QUALITY - 1)[0]

    @property
    def marks(self) -> dict[str, int]:
        """What tables and plots mark: the sweet spot, and the collapse boundary if a smaller budget is below it."""
        marks = {"sweet spot": self.sweet_spot}
        if self.collapse_boundary > self.budgets[0]:
            marks["collapse boundary"] = self.collapse_boundary
        return marks

    def marks_at(self, K: int) -> str:
        """The marks of a budget, for the end of its line in a table."""
        return "".join(f"  {MARK_SYMBOLS[mark]} {mark}" for mark, at in self.marks.items() if at == K)

    def presets(self) -> dict[str, int]:
        """Names of sizes for config.budget_presets: collapse boundary, sweet spot and full budget, ascending."""
        return dict(zip(PRESETS, (self.collapse_boundary, self.sweet_spot, self.budgets[-1])))

    def table(self) -> str:
        """Value, change and, where it was measured, speed at every budget, for people."""
        lines = [f"{'K':>4}  {self.column:>9}  {'vs full':>8}" + f"  {'tokens/s':>9}" * bool(self.speeds)]
        full = self.values[-1]
        for K, value, speed in itertools.zip_longest(self.budgets, self.values, self.speeds):
            change = f"{value / full - 1:>+8.1%}" if full else f"{'n/a':>8}"
            shown = f"  {speed:>9,.0f}" if self.speeds else ""
            lines.append(f"{K:>4}  {value:>9.4f}  {change}{shown}{self.marks_at(K)}")
        return "\n".join([*lines, *filter(None, [self.time_note()])])
