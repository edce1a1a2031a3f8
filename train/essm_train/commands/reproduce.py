# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""The paper's tables, and our own questions, by one command each: variants x seeds, resumed where they stopped.

    python train/reproduce.py table4_novels --scale small --seeds 3 --data_dir data   # ablation on language modelling
    python train/reproduce.py table1 --scale medium --seeds 1 --jobs 2 --data_dir data
    python train/reproduce.py exponents --scale small --seeds 3 --data_dir data
    python train/reproduce.py my_experiment.yaml                                       # see tasks/experiments.py
    python train/reproduce.py --list

Every run is one call of a training script in a process of its own, in output_dir/<task>-<scale>/<overrides>-seed<n>:
experiments share the runs that they have in common. A run whose sweep is there is not repeated, an unfinished one goes
on from its checkpoint. `--jobs 2` runs two at a time, each on `--cpu_threads`. At the end the figures of all runs are
collected into <experiment>-<scale>.json, .md and .png below --results_dir. Variants ("text, AR-STU") and baselines
("text, transformer") have as many parameters as the ES-SSM of their task, to 5%, and see the same data in the same
order; a baseline has one budget. Rows whose data is absent are left out, and the output says what to fetch.

table1 to table6 are the paper's Tables 1 to 6; on data in the place of the paper's they have names of their own
(table3_novels, table4_novels, table5_speech4, table6_speech4). The figures that the paper reports stand below ours
(recipes/paper_figures.json), or those of a JSON file {"text": {"32": 0.9}, ..}: `--paper_figures`.

Small scale is small: narrower models, shorter sequences and few updates, minutes per run on a CPU; medium is about half
an hour on two cores. The Markdown lists every argument in which they depart from full scale.
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
from essm_train.measure.evaluation import Evaluation
from essm_train.measure.paper import Figures, figures_of, read_paper_figures
from essm_train.measure.plots import draw_panels
from essm_train.measure.tables import collect, cost_tables, departures, markdown, panels_of
from essm_train.tasks.catalog import get_task, published_folder, substitute_data, task_arguments
from essm_train.tasks.experiments import EXPERIMENTS, Experiment, Row, get_experiment


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

    scale: str = arg("small", "'full', 'medium' or 'small'.")
    seeds: int = arg(3, "Seeds 0, 1, .. of every row.")
    rows: list[str] | None = arg(None, "Only these rows.")
    data_dir: str = arg("data", "Folder of the tasks' data.")
    output_dir: str = arg("runs/reproduce", "Where the runs go.")
    results_dir: str = arg("benchmarks/results", "Where tables and figures go.")
    jobs: int = arg(1, "Runs at a time.")
    cpu_threads: int = arg(1, "CPU threads of each run.")
    max_steps: int | None = arg(None, "Other than the task's number of updates.")
    paper_figures: str | None = arg(None, "JSON file of figures to set beside ours in place of the paper's.")


def check_results(experiment: Experiment, path: Path) -> None:
    """Raises ValueError if that name meant another experiment before, and the file holds its figures."""
    if not (experiment.formerly and path.exists()):
        return
    if foreign := [row for row in json.loads(path.read_text())["rows"] if row not in experiment.rows]:
        raise ValueError(
            f"{path} holds figures of another experiment, of the rows {', '.join(foreign)}. {experiment.formerly} "
            f"Rename it, or choose another results_dir"
        )


def reproduce(name: str, args: ReproduceArguments) -> dict[str, Any]:
    """Run and collect one experiment: one of EXPERIMENTS or a .yaml file.

    Raises:
        ValueError: unknown experiment, row or scale, as `get_experiment`, or results_dir holds the figures of what that
            name meant before. FileNotFoundError: every row's data is absent. RuntimeError: a run failed.
    """
    experiment = get_experiment(name)
    if experiment.formerly:
        print(experiment.formerly, flush=True)
    wanted = args.rows or list(experiment.rows)
    if unknown := sorted(set(wanted) - set(experiment.rows)):
        raise ValueError(f"rows of {experiment.name} must be among {tuple(experiment.rows)}, got {unknown}")
    if args.seeds < 1 or args.jobs < 1:
        raise ValueError(f"seeds and jobs must be at least 1, got {args.seeds} and {args.jobs}")
    check_writable(Path(args.results_dir))
    check_results(experiment, Path(args.results_dir) / f"{experiment.name}-{args.scale}.json")
    figures = args.paper_figures or experiment.paper_figures
    paper = read_paper_figures(figures, list(experiment.rows)) if figures else figures_of(experiment)
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
    return write_results(experiment, args, {row: collect(folders[row]) for row in wanted}, paper, sorted(absent))


def write_results(
    experiment: Experiment,
    args: ReproduceArguments,
    collected: dict[str, tuple[Evaluation, dict[str, Any]]],
    paper: Figures,
    absent: list[str],
) -> dict[str, Any]:
    """Print the table, write JSON, Markdown and picture to results_dir; the record of the JSON.

    Args:
        collected: of each row, its evaluation and how it was trained. absent: tasks that were left out.
    """
    evaluations = {row: evaluation for row, (evaluation, _) in collected.items()}
    training = {row: trained for row, (_, trained) in collected.items()}
    tasks = list(dict.fromkeys(experiment.rows[row].task for row in collected))
    named = {Path(task).stem: substitute_data(task, args.scale, args.data_dir) for task in tasks}
    substitutes = {task: meaning for task, meaning in named.items() if meaning}
    text = markdown(experiment, evaluations, training, paper, substitutes) + cost_tables(experiment, collected)
    print("\n" + text)
    record = {"experiment": experiment.name, "question": experiment.question, "scale": args.scale, "seeds": args.seeds}
    record |= {"left out": absent, "substitute data": substitutes}
    record |= {"machine": platform.machine(), "torch": torch.__version__, "cpu_threads": args.cpu_threads}
    record["rows"] = {
        row: {"task": experiment.rows[row].task_name, "overrides": experiment.rows[row].arguments}
        | {k: v for k, v in evaluation.record().items() if k not in ("peak_bytes", "active_parameters")}
        | {"training": trained}
        for row, (evaluation, trained) in collected.items()
    }
    stem = Path(args.results_dir) / f"{experiment.name}-{args.scale}"
    write_json(stem.with_suffix(".json"), record)
    hardware = ", ".join(sorted({trained["hardware"] for trained in training.values()}))
    text += f"\nSeeds {', '.join(map(str, range(args.seeds)))}; {hardware}.\n\n"
    text += departures(tasks, args.scale, substitutes)
    text += "".join(f"- {task} was left out, its data was absent.\n" for task in absent)
    write_text(stem.with_suffix(".md"), text)
    panels = panels_of(experiment, evaluations, paper, substitutes)
    write_figure(stem.with_suffix(".png"), draw_panels(*panels), dpi=120)
    print(f"saved {stem}.json, .md and .png")
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
