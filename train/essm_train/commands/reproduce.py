# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""The paper's tables, and our own questions, by one command each: variants x seeds, resumed where they stopped.

    python train/reproduce.py table4 --scale small --seeds 3 --data_dir data          # ablation on language modelling
    python train/reproduce.py exponents --scale small --seeds 3 --data_dir data
    python train/reproduce.py my_experiment.yaml                                       # see tasks/experiments.py
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

from essm_train.arguments import RENAMED, arg
from essm_train.commands.errors import command
from essm_train.files import check_writable, write_figure, write_json, write_text
from essm_train.measure.evaluation import Evaluation, draw_evaluations
from essm_train.measure.tables import collect, departures, markdown, read_paper_figures
from essm_train.measure.training_cost import cost_table
from essm_train.tasks.catalog import get_task, published_folder, task_arguments
from essm_train.tasks.experiments import EXPERIMENTS, Row, get_experiment


def command_of(row: Row, args: ReproduceArguments, output_dir: Path, seed: int) -> list[str]:
    """The command line of one run. Raises FileNotFoundError where its data is absent."""
    overrides = {key: published_folder(value, row.task_name) for key, value in row.arguments.items()}
    values = task_arguments(row.task, args.data_dir, args.scale) | overrides
    values |= {"output_dir": str(output_dir), "seed": seed, "cpu_threads": args.cpu_threads}
    if args.max_steps:
        values["max_steps"] = args.max_steps
    command = [sys.executable, "-m", f"essm_train.commands.{get_task(row.task).script}"]
    for name, value in values.items():
        if value is None:
            continue
        command += [f"--{name}", *(map(str, value) if isinstance(value, (list, tuple)) else [str(value)])]
    return command


def folder_of(row: Row, args: ReproduceArguments, seed: int) -> Path:
    """Where a run goes; the same arguments of a task always mean the same folder."""
    name = "-".join(f"{key}={value}" for key, value in sorted(row.arguments.items())) or "default"
    return Path(args.output_dir) / f"{row.task_name}-{args.scale}" / f"{name}-seed{seed}"


def _options(command: Sequence[str]) -> list[str]:
    """What a command says beside its script, under the names of today."""
    first = next((i for i, part in enumerate(command) if part.startswith("--")), len(command))
    return [f"--{RENAMED.get(part[2:], part[2:])}" if part.startswith("--") else part for part in command[first:]]


def perform(command: list[str], output_dir: Path) -> float:
    """Run one command into output_dir/output.txt unless its sweep is there; its seconds.

    Raises:
        RuntimeError: it failed, and the message holds the end of what it printed; or the folder holds another run.
    """
    if (output_dir / "budget_sweep.json").exists():
        previous = output_dir / "command.json"
        if not previous.exists() or _options(json.loads(previous.read_text())) != _options(command):
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
    """Run and collect one experiment: one of EXPERIMENTS or a .yaml file.

    Raises:
        ValueError: unknown experiment, row or scale, or as `get_experiment`. FileNotFoundError: every row's data is
            absent. RuntimeError: a run failed.
    """
    experiment = get_experiment(name)
    wanted = args.rows or list(experiment.rows)
    if unknown := sorted(set(wanted) - set(experiment.rows)):
        raise ValueError(f"rows of {experiment.name} must be among {tuple(experiment.rows)}, got {unknown}")
    if args.seeds < 1 or args.jobs < 1:
        raise ValueError(f"seeds and jobs must be at least 1, got {args.seeds} and {args.jobs}")
    results_dir = Path(args.results_dir)
    check_writable(results_dir)
    paper = read_paper_figures(args.paper_figures or experiment.paper_figures, list(experiment.rows))
    folders = {row: [folder_of(experiment.rows[row], args, seed) for seed in range(args.seeds)] for row in wanted}
    jobs: list[tuple[list[str], Path]] = []
    absent: dict[str, str] = {}  # task to what to fetch
    for seed in range(args.seeds):  # seed by seed, so that an interrupted table has all rows
        for row in wanted:
            task, folder = experiment.rows[row].task_name, folders[row][seed]
            if task not in absent:
                try:
                    jobs.append((command_of(experiment.rows[row], args, folder, seed), folder))
                except FileNotFoundError as error:
                    absent[task] = str(error)
                    print(f"{task} is left out: {error}", flush=True)
    wanted = [row for row in wanted if experiment.rows[row].task_name not in absent]
    if not wanted:
        raise FileNotFoundError("; ".join(absent.values()))
    with ThreadPoolExecutor(args.jobs) as pool:
        for (_, folder), seconds in zip(jobs, pool.map(lambda job: perform(*job), jobs)):
            print(f"{folder.name}: {seconds:.0f} s" if seconds else f"{folder.name}: done before", flush=True)
    collected = {row: collect(folders[row]) for row in wanted}
    evaluations = {row: evaluation for row, (evaluation, _) in collected.items()}
    parameters = {row: training["parameters"] for row, (_, training) in collected.items()}
    text = markdown(experiment, evaluations, parameters, paper) + cost_table(collected)
    print("\n" + text)
    record = {"experiment": experiment.name, "question": experiment.question, "scale": args.scale, "seeds": args.seeds}
    record |= {"left out": sorted(absent)}
    record |= {"machine": platform.machine(), "torch": torch.__version__, "cpu_threads": args.cpu_threads}
    record["rows"] = {
        row: {"task": experiment.rows[row].task_name, "overrides": experiment.rows[row].arguments}
        | {k: v for k, v in evaluation.record().items() if k not in ("peak_bytes", "active_parameters")}
        | {"training": training}
        for row, (evaluation, training) in collected.items()
    }
    stem = f"{experiment.name}-{args.scale}"
    write_json(results_dir / f"{stem}.json", record)
    tasks = list(dict.fromkeys(experiment.rows[row].task for row in wanted))
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
        print("usage: reproduce.py EXPERIMENT [options] or --list; EXPERIMENT is a YAML file or one of these:\n")
        for name in EXPERIMENTS:
            experiment = get_experiment(name)
            print(f"{name}: {experiment.question} Rows: {', '.join(experiment.rows)}")
        if sys.argv[1:] in (["-h"], ["--help"]):
            HfArgumentParser(ReproduceArguments).parse_args(["--help"])
        return
    (args,) = HfArgumentParser(ReproduceArguments).parse_args_into_dataclasses(sys.argv[2:])
    reproduce(sys.argv[1], args)


run = command(main)


if __name__ == "__main__":
    run()
