# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""The table of an experiment: its runs' sweeps over seeds, the paper's figures beside them, and what was smaller."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from essm_train.arguments import RunArguments
from essm_train.measure.budget_sweep import read_sweep
from essm_train.measure.evaluation import Evaluation
from essm_train.measure.paper import Figures, paper_curve
from essm_train.measure.training_cost import Collected, cost_table
from essm_train.models import SizeArguments
from essm_train.tasks.catalog import ROOT, TaskSpec, arguments_class, get_task
from essm_train.tasks.experiments import Experiment
from modeling_essm.budgets.curve import BudgetCurve

# How often a run looks and saves, which changes no figure, and what stands for sizes.
_NO_DIFFERENCE = frozenset({"eval_steps", "save_steps", "config_name"})


_MODEL_SIZES = {f.name for f in dataclasses.fields(SizeArguments)} - {f.name for f in dataclasses.fields(RunArguments)}


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


def series_of(experiment: Experiment, rows: dict[str, Evaluation]) -> dict[str, Evaluation]:
    """Each series as one evaluation: at every K the model that was trained at K alone, seed by seed."""
    found: dict[str, dict[int, Evaluation]] = {}
    for name, evaluation in rows.items():
        if series := experiment.rows[name].series:
            found.setdefault(series, {})[evaluation.budgets[-1]] = evaluation
    lines = {}
    for series, models in found.items():
        budgets = tuple(sorted(models))
        values, speeds = (
            tuple(zip(*([seed[-1] for seed in getattr(models[K], name)] for K in budgets)))
            for name in ("values", "tokens_per_second")
        )
        zeros = (0,) * len(budgets)
        lines[f"{series}, a model each"] = Evaluation(models[budgets[0]].metric, budgets, values, speeds, zeros, zeros)
    return lines


def markdown(
    experiment: Experiment,
    rows: dict[str, Evaluation],
    training: dict[str, dict[str, Any]],
    paper: Figures,
    substitutes: Collection[str] = (),
) -> str:
    """Rows by budgets, mean ± deviation over seeds; the paper's figures below ours. A baseline's stands at the end.

    Args:
        training: of each row; its parameters are shown. substitutes: tasks whose data is in the place of the official.
    """
    budgets = sorted({K for evaluation in rows.values() if _is_elastic(evaluation) for K in evaluation.budgets})
    columns = [f"K={K}" for K in budgets] or ["one budget"]
    lines = ["| | parameters | " + " | ".join(columns) + " | sweet spot | collapse | seeds |"]
    lines.append("|---" * (len(columns) + 5) + "|")
    theirs = "the paper's" + (f" on {experiment.paper_data}" if experiment.paper_data else "")

    def line(name: str, parameters: int | None, evaluation: Evaluation) -> str:
        spread = [f" ± {d:.4f}" if len(evaluation.values) > 1 else "" for d in evaluation.deviation]
        found = {K: f"{m:.4f}{d}" for K, m, d in zip(evaluation.budgets, evaluation.mean, spread)}
        elastic = _is_elastic(evaluation)
        cells = [found.get(K, "") for K in budgets] if elastic else [""] * (len(columns) - 1) + [*found.values()]
        shown = evaluation.curve.marks if len(found) > 1 else {}
        marks = [str(shown.get(mark, "")) for mark in ("sweet spot", "collapse boundary")]
        size = f"{parameters:,}" if parameters else ""
        return f"| {name} | {size} | {' | '.join([*cells, *marks])} | {len(evaluation.values)} |"

    for name, evaluation in rows.items():
        task = experiment.rows[name].task_name
        label = f"{name} (substitute data)" if task in substitutes else name
        lines.append(line(label, training.get(name, {}).get("parameters"), evaluation))
        if figures := paper.get(name):
            cells = [str(figures.get(K, "")) for K in budgets]
            if not _is_elastic(evaluation):  # its one figure, whatever the budget it was written down under
                cells = [""] * (len(columns) - 1) + [str(figures[max(figures)])]
            lines.append(f"| {name}, {theirs} | | {' | '.join(cells)} | | | |")
    lines += [line(name, None, evaluation) for name, evaluation in series_of(experiment, rows).items()]
    heading = f"# {experiment.title}\n\n" if experiment.title else ""
    return f"{heading}{experiment.question}\n\n" + "\n".join(lines) + "\n"


def _is_elastic(evaluation: Evaluation) -> bool:
    """Whether it is of a model with budgets, of which a baseline has the one that is called 1."""
    return evaluation.budgets != (1,)


def cost_tables(experiment: Experiment, collected: Collected) -> str:
    """`cost_table` of the rows "K=2", "K=3", .., and of each series, whose rows end so, beside rows of none."""
    text = cost_table(collected)
    for series in dict.fromkeys(row.series for row in experiment.rows.values() if row.series):
        rows = {}
        for name, found in collected.items():
            if (own := experiment.rows[name].series) in ("", series):
                rows[name.rpartition(", ")[2] if own else name] = found
        if table := cost_table(rows):
            text += f"\n{series}:\n{table}"
    return text


def panels_of(
    experiment: Experiment, rows: dict[str, Evaluation], paper: Figures, substitutes: Collection[str] = ()
) -> tuple[dict[str, dict[str, BudgetCurve]], dict[str, dict[str, BudgetCurve]]]:
    """Curves of a panel a task, ours and the paper's of the same names; the paper's on other data in a panel alone.

    Args:
        substitutes: tasks whose data is in the place of the official, which their panels say.
    """
    ours: dict[str, dict[str, BudgetCurve]] = {}
    theirs: dict[str, dict[str, BudgetCurve]] = {}
    lines = {name: rows[name] for name in rows if not experiment.rows[name].series} | series_of(experiment, rows)
    for name, evaluation in lines.items():
        row = experiment.rows[name] if name in rows else next(iter(experiment.rows.values()))  # a series has one task
        task = row.task_name
        label = "ES-SSM" if name == task else name.removeprefix(f"{task}, ")
        panel = f"{task} (substitute data)" if task in substitutes else task
        ours.setdefault(panel, {})[label] = evaluation.curve
        if curve := paper_curve(paper.get(name, {}), evaluation.curve):
            if experiment.paper_data or task in substitutes:
                panel = f"the paper, {experiment.paper_data or task}"
            theirs.setdefault(panel, {})[label] = curve
    return ours, theirs


def departures(tasks: Sequence[str], scale: str, substitutes: Mapping[str, str] = MappingProxyType({})) -> str:
    """In what a run of each task at that scale departs from the official one, as a Markdown list.

    Args:
        substitutes: of tasks, by name, what the data in the place of the official is.
    """
    lines = []
    for name in tasks:
        spec = get_task(name)
        lines.append(f"- {spec.name}: {spec.note}. Arguments of full scale: {spec.origin}.")
        if spec.name in substitutes:
            lines.append(f"  Substitute data: {substitutes[spec.name]}.")
        if scale != "full":
            shown = ", ".join(_changes(spec, spec.sizes(scale)))
            lines.append(f"  {scale.capitalize()} scale: {shown}.")
    return "\n".join(lines) + "\n"


def _changes(spec: TaskSpec, reduced: Mapping[str, Any]) -> Iterator[str]:
    """ "name value for official value" of every argument that one of the two has and the other has not so."""
    defaults = {field.name: field.default for field in dataclasses.fields(arguments_class(spec.script))}
    configured = str(spec.full.get("config_name", "")).rpartition("/")[2]
    for name in dict.fromkeys((*reduced, *spec.full)):
        ours, official = (values.get(name, spec.arguments.get(name)) for values in (reduced, spec.full))
        ours, official = (defaults[name] if value is None else value for value in (ours, official))
        if ours == official or name in _NO_DIFFERENCE:
            continue
        if official is None and configured and name == "block":
            continue  # the configurations are of the paper's block, as all tasks are
        meant = f"that of {configured}" if configured and name in _MODEL_SIZES else "the default"
        yield f"{name} {'the default' if ours is None else ours} for {meant if official is None else official}"
