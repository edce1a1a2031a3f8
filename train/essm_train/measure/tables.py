# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""The table of an experiment: its runs' sweeps over seeds, the paper's figures beside them, and what was smaller."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import statistics
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from essm_train.arguments import config_fields
from essm_train.measure.budget_sweep import read_sweep
from essm_train.measure.evaluation import Evaluation
from essm_train.measure.paper import Figures, paper_curve
from essm_train.tasks.catalog import ROOT, TaskSpec, arguments_class, get_task
from essm_train.tasks.experiments import Experiment
from modeling_essm.budgets.curve import BudgetCurve

# How often a run looks and saves, which changes no figure, and what stands for sizes.
_NO_DIFFERENCE = frozenset({"eval_steps", "save_steps", "config_name"})
_RECORDED = ("data", "updates", "samples_per_update", "tokens_per_update", "parameters", "hardware", "schedule")
Collected = Mapping[str, tuple[Evaluation, Mapping[str, Any]]]  # of each row, what `collect` gives


def collect(folders: Sequence[Path]) -> tuple[Evaluation, dict[str, Any]]:
    """The seeds of one row, and how they were trained."""
    curves = [read_sweep(json.loads((folder / "budget_sweep.json").read_text())) for folder in folders]
    here = f"{ROOT}{os.sep}"  # of files of this repository only the place in it is kept
    training = [json.loads((folder / "training.json").read_text().replace(here, "")) for folder in folders]
    given = {name: value for name, value in training[0]["arguments"].items() if value is not None}
    return Evaluation.of(curves), {name: training[0].get(name) for name in _RECORDED} | {
        "seconds": [each.get("seconds") for each in training],
        "arguments": {name: value for name, value in given.items() if not name.endswith(("_dir", "_file"))},
    }


def series_of(experiment: Experiment, rows: Mapping[str, Evaluation]) -> dict[str, Evaluation]:
    """Each series as one evaluation: at every K the model that was trained at K alone, seed by seed."""
    found: dict[str, dict[int, Evaluation]] = {}
    for name, evaluation in rows.items():
        if series := experiment.rows[name].series:
            found.setdefault(series, {})[evaluation.budgets[-1]] = evaluation
    lines = {}
    for series, models in found.items():
        ordered = [models[K] for K in sorted(models)]
        values, speeds = (
            tuple(zip(*([seed[-1] for seed in getattr(model, name)] for model in ordered)))
            for name in ("values", "tokens_per_second")
        )
        lines[f"{series}, a model each"] = Evaluation(ordered[0].metric, tuple(sorted(models)), values, speeds)
    return lines


def _is_elastic(evaluation: Evaluation) -> bool:
    """Whether the model has budgets; a baseline has the single one that is called 1."""
    return evaluation.budgets != (1,)


def markdown(
    experiment: Experiment,
    rows: Mapping[str, Evaluation],
    training: Mapping[str, Mapping[str, Any]],
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

    def cells(figures: Mapping[int, Any], elastic: bool) -> str:
        if not elastic:  # its one figure, whatever the budget it was written down under
            return " | ".join([""] * (len(columns) - 1) + [str(figures[max(figures)])])
        return " | ".join(str(figures.get(K, "")) for K in budgets)

    def line(name: str, parameters: int | None, evaluation: Evaluation) -> str:
        figures = dict(zip(evaluation.budgets, evaluation.figures()))
        found = evaluation.curve.marks if len(figures) > 1 else {}
        marks = " | ".join(str(found.get(mark, "")) for mark in ("sweet spot", "collapse boundary"))
        size = f"{parameters:,}" if parameters else ""
        return f"| {name} | {size} | {cells(figures, _is_elastic(evaluation))} | {marks} | {len(evaluation.values)} |"

    for name, evaluation in rows.items():
        label = f"{name} (substitute data)" if experiment.rows[name].task_name in substitutes else name
        lines.append(line(label, training.get(name, {}).get("parameters"), evaluation))
        if figures := paper.get(name):
            lines.append(f"| {name}, {theirs} | | {cells(figures, _is_elastic(evaluation))} | | | |")
    lines += [line(name, None, evaluation) for name, evaluation in series_of(experiment, rows).items()]
    heading = f"# {experiment.title}\n\n" if experiment.title else ""
    return f"{heading}{experiment.question}\n\n" + "\n".join(lines) + "\n"


# ---------------------------------------------------------------------------------------------------------------------
# One elastic model against a fixed one for every budget. Appendix B of the paper: budget dropout costs about 1/9 of
# training nine fixed models, one for each of its nine budgets, and takes no more updates.


def cost_tables(experiment: Experiment, collected: Collected) -> str:
    """Every elastic row against the fixed models "K=2", "K=3", .. of each series, and of none; nothing without two.

    A fixed model is judged at its K, or at the largest budget below it that was swept. An elastic row has the same
    metric and as many seeds, another schedule than "full", and was swept over every one of these budgets.
    """
    fixed: dict[str, dict[int, str]] = {}
    for name in collected:
        if match := re.search(r"(?:^|, )K=(\d+)$", name):
            fixed.setdefault(experiment.rows[name].series, {})[int(match[1])] = name
    text = ""
    for series, names in sorted(fixed.items()):
        models = {K: collected[names[K]] for K in sorted(names)}
        elastic = {
            name: (evaluation, training)
            for name, (evaluation, training) in collected.items()
            if experiment.rows[name].series in ("", series) and name not in names.values()
            if training.get("schedule") != "full" and {*models} <= {*evaluation.budgets}
            if {(e.metric, len(e.values)) for e, _ in models.values()} == {(evaluation.metric, len(evaluation.values))}
        }
        if len(models) > 1 and elastic:
            text += f"\n{series}:\n" if series else ""
            text += "".join(_cost_table(name, row, models) for name, row in elastic.items())
    return text


def _cost_table(name: str, row: tuple[Evaluation, Mapping[str, Any]], models: Mapping[int, Any]) -> str:
    trainings = [*(training for _, training in models.values()), row[1]]
    lines = [f"\nOne model, {name!r}, against {len(models)} fixed ones (Appendix B says about 1/9 of nine):\n"]
    lines.append("| | " + " | ".join(f"K={K}" for K in models) + " | all fixed | elastic | elastic / all fixed |")
    lines.append("|---" * (len(models) + 4) + "|")
    for what, cost in (("seconds", _seconds), ("tokens", _tokens), ("updates", lambda t: t.get("updates") or 0)):
        costs = [cost(training) for training in trainings]
        if all(costs):
            total = sum(costs[:-1])
            shown = " | ".join(f"{value:,.0f}" for value in (*costs[:-1], total, costs[-1]))
            lines.append(f"| {what} of training | {shown} | 1/{total / costs[-1]:.1f} |")
    ours = {K: _at(row[0], K) for K in models}
    theirs = {K: _at(evaluation, K) for K, (evaluation, _) in models.items()}
    for what, figures in (("fixed", theirs), ("elastic", ours)):
        lines.append(f"| {what} at K | {' | '.join(f'{statistics.fmean(f):.4f}' for f in figures.values())} | | | |")
    differences = []
    for K in models:  # paired by seed
        each = [a - b for a, b in zip(ours[K], theirs[K])]
        spread = f" ± {statistics.stdev(each):.4f}" if len(each) > 1 else ""
        differences.append(f"{statistics.fmean(each):+.4f}{spread}")
    lines.append(f"| elastic - fixed | {' | '.join(differences)} | | | |")
    return "\n".join(lines) + "\n"


def _at(evaluation: Evaluation, K: int) -> list[float]:
    """The figure of every seed at K, or at the largest budget below it."""
    place = max((i for i, budget in enumerate(evaluation.budgets) if budget <= K), default=0)
    return [values[place] for values in evaluation.values]


def _seconds(training: Mapping[str, Any]) -> float:
    """Mean over seeds; 0 where one did not record them."""
    seconds = training.get("seconds") or [0.0]
    return statistics.fmean(seconds) if all(seconds) else 0.0


def _tokens(training: Mapping[str, Any]) -> float:
    return (training.get("updates") or 0) * (training.get("tokens_per_update") or 0)


# ---------------------------------------------------------------------------------------------------------------------
# Panels, and what a reduced run leaves out.

Panels = dict[str, dict[str, BudgetCurve]]


def panels_of(
    experiment: Experiment, rows: Mapping[str, Evaluation], paper: Figures, substitutes: Collection[str] = ()
) -> tuple[Panels, Panels]:
    """Curves of a panel a task, ours and the paper's of the same names; the paper's on other data in a panel alone.

    Args:
        substitutes: tasks whose data is in the place of the official, which their panels say.
    """
    ours: Panels = {}
    theirs: Panels = {}
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
    for spec in map(get_task, tasks):
        lines.append(f"- {spec.name}: {spec.note}. Arguments of full scale: {spec.origin}.")
        if spec.name in substitutes:
            lines.append(f"  Substitute data: {substitutes[spec.name]}.")
        if scale != "full":
            lines.append(f"  {scale.capitalize()} scale: {', '.join(_changes(spec, spec.sizes(scale)))}.")
    return "\n".join(lines) + "\n"


def _changes(spec: TaskSpec, reduced: Mapping[str, Any]) -> Iterator[str]:
    """ "name value for official value" of every argument that one of the two has and the other has not so."""
    defaults = {field.name: field.default for field in dataclasses.fields(arguments_class(spec.script))}
    sizes = config_fields("essm")
    defaults = dict.fromkeys(sizes) | defaults
    configured = str(spec.full.get("config_name", "")).rpartition("/")[2]
    for name in dict.fromkeys((*reduced, *spec.full)):
        ours, official = (values.get(name, spec.arguments.get(name)) for values in (reduced, spec.full))
        ours, official = (defaults.get(name) if value is None else value for value in (ours, official))
        if ours == official or name in _NO_DIFFERENCE:
            continue
        if official is None and configured and name == "block":
            continue  # the configurations are of the paper's block, as all tasks are
        meant = f"that of {configured}" if configured and name in sizes else "the default"
        yield f"{name} {'the default' if ours is None else ours} for {meant if official is None else official}"
