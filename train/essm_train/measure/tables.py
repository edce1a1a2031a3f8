# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""The table of an experiment: its runs' sweeps over seeds, the paper's figures beside them, and what was smaller."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from essm_train.measure.budget_sweep import read_sweep
from essm_train.measure.evaluation import Evaluation
from essm_train.tasks.catalog import ROOT, get_task
from essm_train.tasks.experiments import Experiment

# How often a run looks and saves, which changes no figure.
_NO_DIFFERENCE = frozenset({"eval_steps", "save_steps"})


def collect(folders: Sequence[Path]) -> tuple[Evaluation, dict[str, Any]]:
    """The seeds of one row, and how they were trained."""
    sweeps = [json.loads((folder / "budget_sweep.json").read_text()) for folder in folders]
    here = f"{ROOT}{os.sep}"  # of files of this repository only the place in it is kept
    training = [json.loads((folder / "training.json").read_text().replace(here, "")) for folder in folders]
    curves = [read_sweep(sweep) for sweep in sweeps]
    zeros = (0,) * len(curves[0].budgets)
    evaluation = Evaluation.of(curves, zeros, zeros)
    keep = ("data", "updates", "samples_per_update", "tokens_per_update", "parameters", "hardware", "schedule")
    return evaluation, {name: training[0].get(name) for name in keep} | {
        "seconds": [t.get("seconds") for t in training],
        "arguments": {
            name: value
            for name, value in training[0]["arguments"].items()
            if value is not None and not name.endswith(("_dir", "_file"))
        },
    }


def markdown(
    experiment: Experiment,
    rows: dict[str, Evaluation],
    parameters: dict[str, int | None],
    paper: dict[str, dict[str, float]],
) -> str:
    """Rows by budgets, mean ± deviation over seeds; the paper's figures below ours. A baseline's stands at the end."""
    budgets = sorted({K for evaluation in rows.values() if len(evaluation.budgets) > 1 for K in evaluation.budgets})
    columns = [f"K={K}" for K in budgets] or ["one budget"]
    lines = ["| | parameters | " + " | ".join(columns) + " | sweet spot | collapse | seeds |"]
    lines.append("|---" * (len(columns) + 5) + "|")
    for name, evaluation in rows.items():
        spread = [f" ± {d:.4f}" if len(evaluation.values) > 1 else "" for d in evaluation.deviation]
        found = {K: f"{m:.4f}{d}" for K, m, d in zip(evaluation.budgets, evaluation.mean, spread)}
        elastic = len(evaluation.budgets) > 1
        cells = [found.get(K, "") for K in budgets] if elastic else [""] * (len(columns) - 1) + [*found.values()]
        marks = [
            evaluation.curve.marks.get(mark, "") if elastic else "" for mark in ("sweet spot", "collapse boundary")
        ]
        size = f"{parameters[name]:,}" if parameters.get(name) else ""
        lines.append(f"| {name} | {size} | {' | '.join(cells)} | {marks[0]} | {marks[1]} | {len(evaluation.values)} |")
        if paper.get(name):
            cells = [f"{paper[name][str(K)]:g}" if str(K) in paper[name] else "" for K in budgets]
            if not elastic:  # its one figure, whatever the budget it was written down under
                figure = paper[name][max(paper[name], key=int)]
                cells = [""] * (len(columns) - 1) + [f"{figure:g}"]
            lines.append(f"| {name}, the paper's | | {' | '.join(cells)} | | | |")
    heading = f"# {experiment.title}\n\n" if experiment.title else ""
    return f"{heading}{experiment.question}\n\n" + "\n".join(lines) + "\n"


def departures(tasks: Sequence[str], scale: str) -> str:
    """In what a run of each task at that scale departs from the official one, as a Markdown list."""
    lines = []
    for name in tasks:
        spec = get_task(name)
        lines.append(f"- {spec.name}: {spec.note}. Arguments of full scale: {spec.origin}.")
        if scale == "small":
            changed = {k: v for k, v in spec.small.items() if v != spec.full.get(k) and k not in _NO_DIFFERENCE}
            shown = ", ".join(
                f"{k} {v}" + (f" for {spec.full[k]}" if k in spec.full else "") for k, v in changed.items()
            )
            lines.append(f"  Small scale: {shown}.")
    return "\n".join(lines) + "\n"


def read_paper_figures(path: str | None, rows: Sequence[str]) -> dict[str, dict[str, float]]:
    """Row to budget to figure. Raises ValueError if the file is not so, or names a row or budget that is none."""
    if path is None:
        return {}
    try:
        figures = json.loads(Path(path).read_text())
        figures = {row: {str(int(K)): float(value) for K, value in row_.items()} for row, row_ in figures.items()}
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise ValueError(f'{path} must hold {{"row": {{"budget": figure}}}} as JSON: {error}') from error
    if unknown := sorted(set(figures) - set(rows)):
        raise ValueError(f"rows of {path} must be among {tuple(rows)}, got {unknown}")
    return figures
