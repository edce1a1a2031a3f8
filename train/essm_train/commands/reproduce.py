# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""The paper's tables, and our own questions, by one command each: variants x seeds, resumed where they stopped.

    python train/reproduce.py table4 --scale small --seeds 3 --data_dir data          # ablation on language modelling
    python train/reproduce.py exponents --scale small --seeds 3 --data_dir data
    python train/reproduce.py --list

Every run is one call of a training script in a process of its own, in output_dir/<task>-<scale>/<overrides>-seed<n>:
experiments share the runs that they have in common. A run whose sweep is there is not repeated, an unfinished one goes
on from its checkpoint. `--jobs 2` runs two at a time, each on `--cpu_threads`. At the end the figures of all runs are
collected into <experiment>-<scale>.json, .md and .png below --results_dir. A baseline ("text, transformer") has as many
parameters as the ES-SSM of its task, to 5%, sees the same data in the same order, and has one budget. Rows whose data
is absent are left out, and the output says what to fetch.

Small scale is small: narrower models, shorter sequences and few updates, minutes per run on a CPU; the Markdown lists
every argument in which it departs from full scale. The figures that the paper reports are not in this repository: put
them into a JSON file, {"text": {"32": 0.9}, ..}, and `--paper_figures file` sets them beside ours.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import HfArgumentParser

from essm_train.arguments import arg
from essm_train.commands.errors import run_script
from essm_train.files import check_writable, write_figure, write_json, write_text
from essm_train.measure.evaluation import Evaluation, draw_evaluations
from essm_train.measure.metric import Metric
from essm_train.tasks.catalog import ROOT, SCRIPTS, TASKS, task_arguments

# Table 4 of the paper: what each ingredient is worth.
VARIANTS: dict[str, dict[str, Any]] = {
    "base": {"gating": "none", "budget_schedule": "full"},
    "AR-STU": {"gating": "none", "ar_order": 2, "budget_schedule": "full"},
    "gate only": {"budget_schedule": "full"},
    "dropout only": {"gating": "none"},
    "ES-SSM": {},
}
SCHEDULES: dict[str, dict[str, Any]] = {
    "uniform": {"budget_schedule": "uniform"},
    "discrete": {},  # the scripts' default
    "authors": {"budget_schedule": "authors"},
    "sandwich": {"budget_schedule": "sandwich"},
    "sandwich + distillation": {"budget_schedule": "sandwich", "distillation_weight": 1.0},
}
EXPONENTS: dict[str, dict[str, Any]] = {
    "exponent 1/4": {},
    "exponent 1/8": {"scaling_exponent": 0.125},
    "exponent 1/16": {"scaling_exponent": 0.0625},
    "exponent 0": {"scaling_exponent": 0.0},
}
# How often a run looks and saves, which changes no figure.
_NO_DIFFERENCE = frozenset({"validate_every", "checkpoint_every"})


@dataclass(frozen=True)
class Experiment:
    """A table: rows are runs, told apart by task and by overrides of the task's arguments.

    Attributes:
        question: what it answers. rows: name to (task, overrides).
    """

    question: str
    rows: dict[str, tuple[str, dict[str, Any]]]


def _on(task: str, variants: dict[str, dict[str, Any]]) -> dict[str, tuple[str, dict[str, Any]]]:
    return {name: (task, overrides) for name, overrides in variants.items()}


def _against(architectures: Sequence[str], *tasks: str) -> dict[str, tuple[str, dict[str, Any]]]:
    """ES-SSM on every task, and the baselines on those that take `--architecture`."""
    rows: dict[str, tuple[str, dict[str, Any]]] = {}
    for task in tasks:
        rows[task] = (task, {})
        if TASKS[task].script != "retrieval":
            rows |= {f"{task}, {name}": (task, {"architecture": name}) for name in architectures}
    return rows


EXPERIMENTS: dict[str, Experiment] = {
    "table1": Experiment(
        "How good is ES-SSM on the Long Range Arena?",
        _against(("transformer", "mamba", "s4d"), "listops", "text", "retrieval", "image", "pathfinder", "pathx"),
    ),
    "table2": Experiment(
        "How good is it as a byte-level language model of books?",
        _against(("transformer", "mamba", "mamba2"), "pg19", "novels"),
    ),
    "table3": Experiment(
        "How good is it on speech commands?",
        _against(("cnn", "tc_resnet", "transformer", "s4d"), "sc10", "speech4"),
    ),
    "table4": Experiment("What are gate and budget dropout worth? Novels.", _on("novels", VARIANTS)),
    "table5": Experiment("What do the rules of training cost and bring? Novels.", _on("novels", SCHEDULES)),
    "table6": Experiment(
        "What does a trained model keep at every budget?",
        _against((), "text", "smnist", "speech4", "listops", "pathfinder"),
    ),
    "exponents": Experiment(
        "Does another exponent of sigma make use of the late channels? Novels.",
        _on("novels", EXPONENTS),
    ),
    "filter_length": Experiment(
        "Should the filters be longer than the training sequences? Novels in blocks of 512 bytes, 4 an update.",
        {
            "equal": ("novels", {"block_size": 512, "filter_length": 512, "per_device_batch_size": 4}),
            "8 times": ("novels", {"block_size": 512, "filter_length": 4096, "per_device_batch_size": 4}),
        },
    ),
}


def command_of(
    task: str, overrides: dict[str, Any], args: ReproduceArguments, output_dir: Path, seed: int
) -> list[str]:
    """The command line of one run. Raises FileNotFoundError where its data is absent."""
    values = {**task_arguments(task, args.data_dir, args.scale), **overrides}
    values |= {"output_dir": str(output_dir), "seed": seed, "cpu_threads": args.cpu_threads}
    if args.max_steps:
        values["max_steps"] = args.max_steps
    command = [sys.executable, "-m", f"essm_train.commands.{SCRIPTS[TASKS[task].script]}"]
    for name, value in values.items():
        if value is None:
            continue
        command += [f"--{name}", *(map(str, value) if isinstance(value, (list, tuple)) else [str(value)])]
    return command


def folder_of(task: str, overrides: dict[str, Any], args: ReproduceArguments, seed: int) -> Path:
    """Where a run goes; the same overrides of a task always mean the same folder."""
    name = "-".join(f"{key}={value}" for key, value in sorted(overrides.items())) or "default"
    return Path(args.output_dir) / f"{task}-{args.scale}" / f"{name}-seed{seed}"


def perform(command: list[str], output_dir: Path) -> float:
    """Run one command into output_dir/output.txt unless its sweep is there; its seconds.

    Raises:
        RuntimeError: it failed, and the message holds the end of what it printed; or the folder holds another run.
    """
    if (output_dir / "budget_sweep.json").exists():
        previous = output_dir / "command.json"
        if not previous.exists() or json.loads(previous.read_text()) != command[1:]:
            raise RuntimeError(f"{output_dir} holds the run of another command; delete it or choose another output_dir")
        return 0.0
    output_dir.mkdir(parents=True, exist_ok=True)
    (output_dir / "command.json").write_text(json.dumps(command[1:]))
    started = time.perf_counter()
    with (output_dir / "output.txt").open("a") as log:
        done = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    if done.returncode != 0:
        tail = "\n".join((output_dir / "output.txt").read_text(errors="replace").splitlines()[-15:])
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{tail}")
    return time.perf_counter() - started


def collect(folders: Sequence[Path]) -> tuple[Evaluation, dict[str, Any]]:
    """The seeds of one row, and how they were trained."""
    sweeps = [json.loads((folder / "budget_sweep.json").read_text()) for folder in folders]
    here = f"{ROOT}{os.sep}"  # of files of this repository only the place in it is kept
    training = [json.loads((folder / "training.json").read_text().replace(here, "")) for folder in folders]
    first = sweeps[0]
    metric = Metric(**first["metric"]) if "metric" in first else Metric("bits_per_byte", higher_is_better=False)
    values = tuple(tuple(sweep.get("values", sweep.get("bits_per_byte"))) for sweep in sweeps)
    speeds = tuple(tuple(sweep["tokens_per_second"]) for sweep in sweeps)
    zeros = (0,) * len(first["budgets"])
    evaluation = Evaluation(metric, tuple(first["budgets"]), values, speeds, zeros, zeros)
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
    return f"{experiment.question}\n\n" + "\n".join(lines) + "\n"


def departures(tasks: Sequence[str], scale: str) -> str:
    """In what a run of each task at that scale departs from the official one, as a Markdown list."""
    lines = []
    for name in tasks:
        spec = TASKS[name]
        lines.append(f"- {name}: {spec.note}. Arguments of full scale: {spec.origin}.")
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


@dataclass
class ReproduceArguments:
    """Arguments of the script; the experiment's name comes first."""

    scale: str = arg("small", "'full' or 'small'.")
    seeds: int = arg(3, "Seeds 0, 1, .. of every row.")
    rows: list[str] | None = arg(None, "Only these rows.")
    data_dir: str = arg("data", "Folder of the tasks' data.")
    output_dir: str = arg("runs/reproduce", "Where the runs go.")
    results_dir: str = arg("benchmarks/results", "Where tables and figures go.")
    jobs: int = arg(1, "Runs at a time.")
    cpu_threads: int = arg(1, "CPU threads of each run.")
    max_steps: int | None = arg(None, "Other than the task's number of updates.")
    paper_figures: str | None = arg(None, "JSON file of the figures that the paper reports, to set beside ours.")


def reproduce(name: str, args: ReproduceArguments) -> dict[str, Any]:
    """Run and collect one experiment.

    Raises:
        ValueError: unknown experiment, row or scale. FileNotFoundError: every row's data is absent. RuntimeError: a run
            failed.
    """
    if name not in EXPERIMENTS:
        raise ValueError(f"the experiment must be one of {tuple(EXPERIMENTS)}, got {name!r}")
    experiment = EXPERIMENTS[name]
    wanted = args.rows or list(experiment.rows)
    if unknown := sorted(set(wanted) - set(experiment.rows)):
        raise ValueError(f"rows of {name} must be among {tuple(experiment.rows)}, got {unknown}")
    if args.seeds < 1 or args.jobs < 1:
        raise ValueError(f"seeds and jobs must be at least 1, got {args.seeds} and {args.jobs}")
    results_dir = Path(args.results_dir)
    check_writable(results_dir)
    paper = read_paper_figures(args.paper_figures, list(experiment.rows))
    folders = {row: [folder_of(*experiment.rows[row], args, seed) for seed in range(args.seeds)] for row in wanted}
    jobs: list[tuple[list[str], Path]] = []
    absent: dict[str, str] = {}  # task to what to fetch
    for seed in range(args.seeds):  # seed by seed, so that an interrupted table has all rows
        for row in wanted:
            task, overrides = experiment.rows[row]
            if task not in absent:
                try:
                    jobs.append((command_of(task, overrides, args, folders[row][seed], seed), folders[row][seed]))
                except FileNotFoundError as error:
                    absent[task] = str(error)
                    print(f"{task} is left out: {error}", flush=True)
    wanted = [row for row in wanted if experiment.rows[row][0] not in absent]
    if not wanted:
        raise FileNotFoundError("; ".join(absent.values()))
    with ThreadPoolExecutor(args.jobs) as pool:
        for (_, folder), seconds in zip(jobs, pool.map(lambda job: perform(*job), jobs)):
            print(f"{folder.name}: {seconds:.0f} s" if seconds else f"{folder.name}: done before", flush=True)
    collected = {row: collect(folders[row]) for row in wanted}
    evaluations = {row: evaluation for row, (evaluation, _) in collected.items()}
    parameters = {row: training["parameters"] for row, (_, training) in collected.items()}
    text = markdown(experiment, evaluations, parameters, paper)
    print("\n" + text)
    record = {"experiment": name, "question": experiment.question, "scale": args.scale, "seeds": args.seeds}
    record |= {"left out": sorted(absent)}
    record |= {"machine": platform.machine(), "torch": torch.__version__, "cpu_threads": args.cpu_threads}
    record["rows"] = {
        row: {"task": experiment.rows[row][0], "overrides": experiment.rows[row][1]}
        | {k: v for k, v in evaluation.record().items() if k not in ("peak_bytes", "active_parameters")}
        | {"training": training}
        for row, (evaluation, training) in collected.items()
    }
    stem = f"{name}-{args.scale}"
    write_json(results_dir / f"{stem}.json", record)
    tasks = list(dict.fromkeys(experiment.rows[row][0] for row in wanted))
    hardware = ", ".join(sorted({training["hardware"] for _, training in collected.values()}))
    text += f"\nSeeds {', '.join(map(str, range(args.seeds)))}; {hardware}.\n\n{departures(tasks, args.scale)}"
    text += "".join(f"- {task} was left out, its data was absent.\n" for task in absent)
    write_text(results_dir / f"{stem}.md", text)
    by_metric: dict[str, dict[str, Evaluation]] = {}
    for row, evaluation in evaluations.items():
        by_metric.setdefault(evaluation.metric.name, {})[row] = evaluation
    for i, group in enumerate(by_metric.values()):
        write_figure(results_dir / (f"{stem}.png" if i == 0 else f"{stem}-{i}.png"), draw_evaluations(group), dpi=120)
    print(f"saved {results_dir / stem}.json, .md and .png")
    return record


def main() -> None:
    """Run an experiment from the command line."""
    if len(sys.argv) < 2 or sys.argv[1] in ("--list", "-h", "--help"):
        for name, experiment in EXPERIMENTS.items():
            print(f"{name}: {experiment.question} Rows: {', '.join(experiment.rows)}")
        if sys.argv[1:] in (["-h"], ["--help"]):
            HfArgumentParser(ReproduceArguments).parse_args(["--help"])
        return
    (args,) = HfArgumentParser(ReproduceArguments).parse_args_into_dataclasses(sys.argv[2:])
    reproduce(sys.argv[1], args)


def run() -> None:
    """The command."""
    run_script(main)


if __name__ == "__main__":
    run()
