# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""The table of an experiment: its runs' sweeps over seeds, the paper's figures beside them, and what was smaller."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import re
import statistics
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from essm_train.arguments import config_fields
from essm_train.console import Failed
from essm_train.files import write_figure, write_json, write_text
from essm_train.measure.budget_sweep import read_sweep
from essm_train.measure.evaluation import Evaluation
from essm_train.measure.paper import Figures, paper_curve
from essm_train.measure.plots import Panels, draw_panels
from essm_train.tasks.catalog import ROOT, TaskSpec, arguments_class, get_task, substitute_data
from essm_train.tasks.experiments import Experiment
from modeling_essm.budgets.curve import BudgetCurve

# How often a run looks and saves, which changes no figure, and what stands for sizes.
_NO_DIFFERENCE = frozenset({"eval_steps", "save_steps", "config_name"})
_RECORDED = ("data", "updates", "samples_per_update", "tokens_per_update", "parameters", "hardware", "schedule")
Collected = Mapping[str, tuple[Evaluation, Mapping[str, Any]]]  # of each row, what `collect` gives


def collect(folders: Sequence[Path]) -> tuple[Evaluation, dict[str, Any]]:
    """The seeds of one row, and how they were trained. Raises Failed if they read other data."""
    curves = tuple(
        read_sweep(json.loads((folder / "budget_sweep.json").read_text(encoding="utf-8"))) for folder in folders
    )
    here = json.dumps(f"{ROOT}{os.sep}")[1:-1]  # as JSON writes it; files of this repository keep their place in it
    training = [
        json.loads((folder / "training.json").read_text(encoding="utf-8").replace(here, "")) for folder in folders
    ]
    for folder, each in zip(folders, training):
        if each.get("digests") != training[0].get("digests"):
            raise Failed(f"{folder} read other data than {folders[0]}: delete one, or choose another output_dir")
    arguments = training[0]["arguments"].items()
    return Evaluation(curves), {name: training[0].get(name) for name in _RECORDED} | {
        "seconds": [each.get("seconds") for each in training],
        "arguments": {k: v for k, v in arguments if v is not None and not k.endswith(("_dir", "_file"))},
    }


def series_of(experiment: Experiment, collected: Collected) -> dict[str, Evaluation]:
    """Each series as one evaluation: at every K the model that was trained at K alone, seed by seed."""
    found: dict[str, list[Evaluation]] = {}
    for name, (evaluation, _) in collected.items():
        if series := experiment.rows[name].series:
            found.setdefault(f"{series}, a model each", []).append(evaluation)
    lines = {}
    for name, models in found.items():
        models.sort(key=lambda model: model.budgets[-1])
        curves = []
        for seed in zip(*(model.curves for model in models)):
            budgets, values, speeds = zip(*((c.budgets[-1], c.values[-1], c.speeds[-1]) for c in seed))
            curves.append(dataclasses.replace(seed[0], budgets=budgets, values=values, speeds=speeds))
        lines[name] = Evaluation(tuple(curves))
    return lines


def markdown(experiment: Experiment, collected: Collected, paper: Figures, substitutes: Collection[str] = ()) -> str:
    """Rows by budgets, mean ± deviation over seeds; the paper's figures below ours. A baseline's stands at the end.

    Args:
        substitutes: tasks whose data is in the place of the official.
    """
    one = (1,)  # the budgets of a baseline
    budgets = sorted(
        {K for evaluation, _ in collected.values() if evaluation.budgets != one for K in evaluation.budgets}
    )
    columns = [f"K={K}" for K in budgets] or ["one budget"]
    lines = ["| | parameters | " + " | ".join(columns) + " | sweet spot | collapse | seeds |"]
    lines.append("|---" * (len(columns) + 5) + "|")
    theirs = "the paper's" + (f" on {experiment.paper_data}" if experiment.paper_data else "")

    def cells(figures: Mapping[int, Any], evaluation: Evaluation) -> str:
        if evaluation.budgets == one:  # its one figure, whatever the budget it was written down under
            return " | ".join([""] * (len(columns) - 1) + [str(figures[max(figures)])])
        return " | ".join(str(figures.get(K, "")) for K in budgets)

    def line(name: str, parameters: int | None, evaluation: Evaluation) -> str:
        figures = dict(zip(evaluation.budgets, evaluation.figures()))
        found = evaluation.curve.marks if len(figures) > 1 else {}
        marks = " | ".join(str(found.get(mark, "")) for mark in ("sweet spot", "collapse boundary"))
        size = f"{parameters:,}" if parameters else ""
        return f"| {name} | {size} | {cells(figures, evaluation)} | {marks} | {len(evaluation.curves)} |"

    for name, (evaluation, training) in collected.items():
        label = f"{name} (substitute data)" if experiment.rows[name].task_name in substitutes else name
        lines.append(line(label, training.get("parameters"), evaluation))
        if figures := paper.get(name):
            lines.append(f"| {name}, {theirs} | | {cells(figures, evaluation)} | | | |")
    lines += [line(name, None, evaluation) for name, evaluation in series_of(experiment, collected).items()]
    heading = f"# {experiment.title}\n\n" if experiment.title else ""
    return f"{heading}{experiment.question}\n\n" + "\n".join(lines) + "\n"


# ---------------------------------------------------------------------------------------------------------------------
# One elastic model against a fixed one for every budget. Appendix B of the paper: budget dropout costs about 1/9 of
# training nine fixed models, one for each of its nine budgets, and takes no more updates.


def cost_tables(experiment: Experiment, collected: Collected) -> str:
    """Every elastic row against the fixed models "K=2", "K=3", .. of each series, and of none; nothing without two.

    An elastic row is of the same task, had another schedule than "full", and was swept over every one of these budgets.
    """
    fixed: dict[str, dict[int, str]] = {}
    for name in collected:
        if match := re.search(r"(?:^|, )K=(\d+)$", name):
            fixed.setdefault(experiment.rows[name].series, {})[int(match[1])] = name
    text = ""
    for series, names in sorted(fixed.items()):
        models = {K: collected[names[K]] for K in sorted(names)}
        task = experiment.rows[names[min(names)]].task
        tables = [
            _cost_table(name, evaluation, training, models)
            for name, (evaluation, training) in collected.items()
            if experiment.rows[name].series in ("", series) and experiment.rows[name].task == task
            if training["schedule"] != "full" and name not in names.values() and {*models} <= {*evaluation.budgets}
        ]
        if len(models) > 1 and tables:
            text += (f"\n{series}:\n" if series else "") + "".join(tables)
    return text


def _cost_table(name: str, evaluation: Evaluation, training: Mapping[str, Any], models: Mapping[int, Any]) -> str:
    lines = [f"\nOne model, {name!r}, against {len(models)} fixed ones (Appendix B says about 1/9 of nine):\n"]
    lines.append("| | " + " | ".join(f"K={K}" for K in models) + " | all fixed | elastic | elastic / all fixed |")
    lines.append("|---" * (len(models) + 4) + "|")
    trainings = [*(fixed for _, fixed in models.values()), training]
    updates = [each["updates"] for each in trainings]
    for what, costs in {
        "seconds": [statistics.fmean(each["seconds"]) for each in trainings],
        "tokens": [number * each["tokens_per_update"] for number, each in zip(updates, trainings)],
        "updates": updates,
    }.items():
        total = sum(costs[:-1])
        shown = " | ".join(f"{value:,.0f}" for value in (*costs[:-1], total, costs[-1]))
        lines.append(f"| {what} of training | {shown} | 1/{total / costs[-1]:.1f} |")

    def values(of: Evaluation, K: int) -> list[float]:
        return [curve.values[curve.budgets.index(K)] for curve in of.curves]

    pairs = [(values(fixed, K), values(evaluation, K)) for K, (fixed, _) in models.items()]
    for i, what in enumerate(("fixed", "elastic")):
        lines.append(f"| {what} at K | {' | '.join(f'{statistics.fmean(pair[i]):.4f}' for pair in pairs)} | | | |")
    differences = [[b - a for a, b in zip(*pair)] for pair in pairs]  # paired by seed
    shown = " | ".join(
        f"{statistics.fmean(each):+.4f}" + (f" ± {statistics.stdev(each):.4f}" if len(each) > 1 else "")
        for each in differences
    )
    return "\n".join([*lines, f"| elastic - fixed | {shown} | | | |"]) + "\n"


# ---------------------------------------------------------------------------------------------------------------------
# Panels, and what a reduced run leaves out.


def panels_of(
    experiment: Experiment, collected: Collected, paper: Figures, substitutes: Collection[str]
) -> tuple[Panels, Panels]:
    """Curves of a panel a task, ours and the paper's of the same names; the paper's on other data in a panel alone.

    Args:
        substitutes: tasks whose data is in the place of the official, which their panels say.
    """
    ours: dict[str, dict[str, BudgetCurve]] = {}
    theirs: dict[str, dict[str, BudgetCurve]] = {}
    lines = {name: evaluation for name, (evaluation, _) in collected.items() if not experiment.rows[name].series}
    tasks = {f"{row.series}, a model each": row.task_name for row in experiment.rows.values()}  # a series has one
    tasks |= {name: row.task_name for name, row in experiment.rows.items()}
    for name, evaluation in (lines | series_of(experiment, collected)).items():
        task = tasks[name]
        label = "ES-SSM" if name == task else name.removeprefix(f"{task}, ")
        panel = f"{task} (substitute data)" if task in substitutes else task
        ours.setdefault(panel, {})[label] = evaluation.curve
        if curve := paper_curve(paper.get(name, {}), evaluation.curve):
            if experiment.paper_data or task in substitutes:
                panel = f"the paper, {experiment.paper_data or task}"
            theirs.setdefault(panel, {})[label] = curve
    return ours, theirs


def departures(tasks: Sequence[str], scale: str, substitutes: Mapping[str, str], given: Mapping[str, Any]) -> str:
    """In what a run of each task at that scale departs from the official one, as a Markdown list.

    Args:
        substitutes: what the data in the place of the official is, by the task's name. given: arguments of all runs.
    """
    lines = []
    for spec in map(get_task, tasks):
        lines.append(f"- {spec.name}: {spec.note}. Arguments of full scale: {spec.origin}.")
        if spec.name in substitutes:
            lines.append(f"  Substitute data: {substitutes[spec.name]}.")
        if changes := ", ".join(_changes(spec, {**spec.sizes(scale), **given})):
            lines.append(f"  {scale.capitalize()} scale: {changes}.")
    return "\n".join(lines) + "\n"


def _changes(spec: TaskSpec, reduced: Mapping[str, Any]) -> Iterator[str]:
    """ "name value for official value" of every argument that one of the two has and the other has not so."""
    sizes = config_fields("essm")
    fields = dataclasses.fields(arguments_class(spec.script))
    defaults = dict.fromkeys(sizes) | {field.name: field.default for field in fields} | spec.arguments
    configured = str(spec.full.get("config_name", "")).rpartition("/")[2]
    for name in dict.fromkeys((*reduced, *spec.full)):
        ours, official = (values.get(name, defaults.get(name)) for values in (reduced, spec.full))
        if ours == official or name in _NO_DIFFERENCE:
            continue
        if official is None and configured and name == "block":
            continue  # the configurations are of the paper's block, as all tasks are
        meant = f"that of {configured}" if configured and name in sizes else "the default"
        yield f"{name} {'the default' if ours is None else ours} for {meant if official is None else official}"


def write_results(experiment: Experiment, args: Any, collected: Collected, paper: Figures, absent: list[str]) -> None:
    """Print the table; write JSON, Markdown and picture to results_dir.

    Args:
        args: of essm-reproduce. absent: tasks that were left out.
    """
    tasks = list(dict.fromkeys(experiment.rows[row].task for row in collected))
    named = {Path(task).stem: substitute_data(task, args.scale, args.data_dir) for task in tasks}
    substitutes = {task: meaning for task, meaning in named.items() if meaning}
    text = markdown(experiment, collected, paper, substitutes) + cost_tables(experiment, collected)
    print("\n" + text)
    record: dict[str, Any] = {"experiment": experiment.name, "question": experiment.question, "scale": args.scale}
    record |= {"seeds": args.seeds, "left out": absent, "substitute data": substitutes}
    record |= {"machine": platform.machine(), "torch": torch.__version__, "cpu_threads": args.cpu_threads, "rows": {}}
    for name, (evaluation, training) in collected.items():
        given = {"task": experiment.rows[name].task_name, "overrides": experiment.rows[name].arguments}
        record["rows"][name] = given | evaluation.record() | {"training": training}
    stem = Path(args.results_dir) / f"{experiment.name}-{args.scale}"
    hardware = ", ".join(sorted({training["hardware"] for _, training in collected.values()}))
    text += f"\nSeeds {', '.join(map(str, range(args.seeds)))}; {hardware}.\n\n"
    given = {"max_steps": args.max_steps} if args.max_steps else {}
    text += departures(tasks, args.scale, substitutes, given)
    text += "".join(f"- {task} was left out, its data was absent.\n" for task in absent)
    figure = draw_panels(*panels_of(experiment, collected, paper, substitutes))
    write_figure(stem.with_suffix(".png"), figure, dpi=120)  # first: a kill while it is drawn leaves no file
    write_text(stem.with_suffix(".md"), text)
    write_json(stem.with_suffix(".json"), record)
    print(f"saved {stem}.json, .md and .png")
