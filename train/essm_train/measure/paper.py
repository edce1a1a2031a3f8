# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""The figures of the paper's version 1, to set beside ours: recipes/paper_figures.json.

Its tables hold a figure at full capacity (a number, or mean and standard deviation), or one at every budget;
shares are percent there and fractions here. "FAIL", as the paper has it, is not a number.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from essm_train import recipes
from essm_train.tasks.experiments import Experiment
from modeling_essm.budgets.curve import BudgetCurve

PAPER_FIGURES = Path(recipes.__file__).with_name("paper_figures.json")
CAPACITY = 32  # the paper's, so what a single figure belongs to


class Figure(NamedTuple):
    """Mean and standard deviation over seeds; 0 where the paper gives none."""

    mean: float
    deviation: float = 0.0

    def __str__(self) -> str:
        if math.isnan(self.mean):
            return "FAIL"
        return f"{self.mean:g} ± {self.deviation:g}" if self.deviation else f"{self.mean:g}"


Figures = dict[str, dict[int, Figure]]  # of rows, by budget


def figures_of(experiment: Experiment) -> Figures:
    """The paper's figures of an experiment's rows, from the table that it names.

    Raises:
        ValueError: the paper has no such table or row.
    """
    if not experiment.paper:
        return {}
    table = _entry(
        json.loads(PAPER_FIGURES.read_text(encoding="utf-8"))["tables"],
        [experiment.paper],
        f"paper of {experiment.name}",
    )
    unit = 0.01 if table["unit"] == "percent" else 1.0

    def figure(value: Any) -> Figure:
        if isinstance(value, dict):
            return Figure(round(unit * value["mean"], 6), round(unit * value["std"], 6))
        return Figure(math.nan if value == "FAIL" else round(unit * value, 6))

    found = {}
    for name, row in experiment.rows.items():
        if row.paper:
            entry = _entry(table["rows"], row.paper, f"paper of {experiment.name}: {name}")
            by_budget = entry if isinstance(entry, dict) and "mean" not in entry else {CAPACITY: entry}
            found[name] = {int(K): figure(value) for K, value in by_budget.items()}
    return found


def _entry(entries: Any, keys: Sequence[str], where: str) -> Any:
    for key in keys:
        known = tuple(entries) if isinstance(entries, dict) else ()
        if key not in known:
            raise ValueError(f"{where} must be among {known}, got {key!r}")
        entries = entries[key]
    return entries


def paper_curve(figures: dict[int, Figure], like: BudgetCurve) -> BudgetCurve | None:
    """The figures as a curve of the metric of ours, `like`; None if there is none that is a number."""
    kept = {K: figure for K, figure in sorted(figures.items()) if not math.isnan(figure.mean)}
    if not kept:
        return None
    budgets = (1,) if like.budgets == (1,) else tuple(kept)
    values, errors = zip(*[*kept.values()][-len(budgets) :])
    return BudgetCurve(like.metric, like.higher_is_better, budgets, values, errors=errors)
