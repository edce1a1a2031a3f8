# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""One elastic model against a fixed one for every budget: what training costs, and what each is worth at its budget.

Appendix B of the paper: budget dropout costs about 1/9 of training nine fixed models, one for each of its nine budgets,
and takes no more updates.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from essm_train.measure.evaluation import Evaluation

Collected = Mapping[str, tuple[Evaluation, Mapping[str, Any]]]  # as `tables.collect` gives each row


@dataclass(frozen=True)
class TrainingCost:
    """An elastic row beside the fixed models; costs are of one seed, seconds their mean over seeds.

    Attributes:
        elastic: its row. budgets: K of the fixed models, ascending.
        seconds, tokens, updates: of the elastic model, then of each fixed one; None where a run did not record them.
        quality: of both at each K, mean over seeds: (elastic, fixed).
        deviation: of the difference of both over seeds, paired; zeros for one seed.
    """

    elastic: str
    budgets: tuple[int, ...]
    seconds: tuple[float, ...] | None
    tokens: tuple[float, ...] | None
    updates: tuple[float, ...] | None
    quality: tuple[tuple[float, float], ...]
    deviation: tuple[float, ...]

    @staticmethod
    def share(costs: tuple[float, ...]) -> float:
        """Cost of the elastic model over that of all fixed ones together."""
        return costs[0] / sum(costs[1:])


def training_costs(rows: Collected) -> list[TrainingCost]:
    """Every elastic row against the rows "K=2", "K=3", ..: none without at least two of those.

    A fixed model is judged at its K, or at the largest budget below it that was swept. An elastic row has another name,
    the same metric and as many seeds, another schedule than "full", and was swept over every one of these budgets.
    """
    named = {int(match[1]): name for name in rows if (match := re.fullmatch(r"K=(\d+)", name))}
    fixed = [(K, *rows[named[K]]) for K in sorted(named)]
    if len(fixed) < 2:
        return []
    budgets = tuple(sorted(named))
    found = []
    for name, (evaluation, training) in rows.items():
        alike = len({(e.metric, len(e.values)) for e in (evaluation, *(one for _, one, _ in fixed))}) == 1
        elastic = training.get("schedule") != "full" and {*budgets} <= {*evaluation.budgets}
        if name in named.values() or not alike or not elastic:
            continue
        trainings = [training, *(training for _, _, training in fixed)]
        pairs = [(_at(evaluation, K), _at(one, K)) for K, one, _ in fixed]
        differences = [[ours - theirs for ours, theirs in zip(*pair)] for pair in pairs]
        found.append(
            TrainingCost(
                elastic=name,
                budgets=budgets,
                seconds=_known([_mean(t.get("seconds")) for t in trainings]),
                tokens=_known([_product(t.get("updates"), t.get("tokens_per_update")) for t in trainings]),
                updates=_known([t.get("updates") for t in trainings]),
                quality=tuple((statistics.fmean(ours), statistics.fmean(theirs)) for ours, theirs in pairs),
                deviation=tuple(statistics.stdev(each) if len(each) > 1 else 0.0 for each in differences),
            )
        )
    return found


def cost_table(rows: Collected) -> str:
    """`training_costs` in Markdown, to stand below a table of the rows; nothing where there are none."""
    return "".join(map(_markdown, training_costs(rows)))


def _markdown(cost: TrainingCost) -> str:
    lines = [
        f"\nOne model, {cost.elastic!r}, against {len(cost.budgets)} fixed ones (Appendix B says about 1/9 of nine):\n"
    ]
    lines.append("| | " + " | ".join(f"K={K}" for K in cost.budgets) + " | all fixed | elastic | elastic / all fixed |")
    lines.append("|---" * (len(cost.budgets) + 4) + "|")
    for name in ("seconds", "tokens", "updates"):
        if values := getattr(cost, name):
            shown = [f"{value:,.0f}" for value in (*values[1:], sum(values[1:]), values[0])]
            lines.append(f"| {name} of training | {' | '.join(shown)} | 1/{1 / cost.share(values):.1f} |")
    ours, theirs = zip(*cost.quality)
    for name, figures in (("fixed", theirs), ("elastic", ours)):
        lines.append(f"| {name} at K | {' | '.join(f'{figure:.4f}' for figure in figures)} | | | |")
    differences = [f"{a - b:+.4f}" + (f" ± {d:.4f}" if d else "") for a, b, d in zip(ours, theirs, cost.deviation)]
    lines.append(f"| elastic - fixed | {' | '.join(differences)} | | | |")
    return "\n".join(lines) + "\n"


def _at(evaluation: Evaluation, K: int) -> list[float]:
    """The figure of every seed at K, or at the largest budget below it."""
    place = max((i for i, budget in enumerate(evaluation.budgets) if budget <= K), default=0)
    return [values[place] for values in evaluation.values]


def _mean(values: list[float | None] | None) -> float | None:
    known = [value for value in values or () if value is not None]
    return statistics.fmean(known) if values and len(known) == len(values) else None


def _product(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else a * b


def _known(costs: list[float | None]) -> tuple[float, ...] | None:
    """The costs, none of which is unknown or nothing; or None."""
    return tuple(cost for cost in costs if cost) if all(costs) else None
