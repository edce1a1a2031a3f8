# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""The paper's tables, and our own questions, by one command each: variants x seeds, resumed where they stopped.

    essm-reproduce table4_novels --scale small --seeds 3 --data_dir data   # ablation on language modelling
    essm-reproduce table1 --scale medium --seeds 1 --jobs 2 --data_dir data
    essm-reproduce exponents --scale small --seeds 3 --data_dir data
    essm-reproduce my_experiment.yaml                                       # see tasks/experiments.py
    essm-reproduce                                       # what each experiment asks

Every run is one call of a training script in a process of its own, with the arguments in arguments.yaml, in
output_dir/<task>-<scale>/<overrides>-seed<n>: experiments share the runs that they have in common. A run whose sweep
is there is not repeated, an unfinished one goes on from its checkpoint. `--jobs 2` runs two at a time, each on
`--cpu_threads`. At the end the figures of all runs are collected into <experiment>-<scale>.json, .md and .png below
--results_dir. Baselines, and variants with `match_parameters`, have as many parameters as the ES-SSM of their task, to
5%. All see the same data in the same order; a baseline has one budget. Rows whose data is absent are left out, and the
output says what to fetch.

table1 to table6 are Tables 1 to 6 of the paper's version 1, whose figures stand below ours. Rows named elastic have the
elastic block, all others the paper's. The Markdown lists where a reduced scale departs from full scale.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from essm_train.arguments import DATA_HELP, arg, check_at_least, parse_yaml
from essm_train.console import Failed, command
from essm_train.files import claim, write_text

if TYPE_CHECKING:
    from essm_train.tasks.experiments import Row


@dataclass
class ReproduceArguments:
    """An experiment's runs and their table; the experiment's name, or a YAML file, comes first."""

    experiment: str | None = arg(None, "A YAML file, or one of those that are listed without a name.")
    scale: str = arg("small", "'full', 'medium' or 'small'.")
    seeds: int = arg(3, "Seeds 0, 1, .. of every row.")
    rows: list[str] | None = arg(None, "Only these rows.")
    data_dir: str | None = arg(None, DATA_HELP)
    output_dir: str = arg("runs/reproduce", "Where the runs go.")
    results_dir: str = arg("benchmarks/results", "Where tables and figures go.")
    jobs: int = arg(1, "Runs at a time.")
    cpu_threads: int = arg(1, "CPU threads of each run.")
    max_steps: int | None = arg(None, "Other than the task's number of updates.")
    overwrite: bool = arg(False, "Replace the tables and figures in results_dir; no run is.")

    def __post_init__(self) -> None:
        check_at_least(self, 1, "seeds", "jobs", "cpu_threads", "max_steps")


def folder_of(row: Row, args: ReproduceArguments, seed: int) -> Path:
    """Where a run goes; the same arguments of a task always mean the same folder."""
    name = "-".join(f"{key}={value}" for key, value in sorted(row.arguments.items())) or "default"
    name = name.replace("/", "_")
    if len(name.encode()) > 200:  # of the 255 bytes that a file system allows
        name = f"{name.encode()[:100].decode(errors='ignore')}-{hashlib.sha256(name.encode()).hexdigest()[:16]}"
    return Path(args.output_dir) / f"{row.task_name}-{args.scale}" / f"{name}-seed{seed}"


def arguments_of(row: Row, args: ReproduceArguments, seed: int) -> dict[str, Any]:
    """The arguments of one run. Raises FileNotFoundError where its data is absent."""
    from essm_train.tasks.catalog import published_folder, task_arguments

    values = task_arguments(row.task, args.data_dir, args.scale)
    values |= {key: published_folder(value, row.task_name) for key, value in row.arguments.items()}
    values |= {"output_dir": str(folder_of(row, args, seed)), "seed": seed, "cpu_threads": args.cpu_threads}
    if args.max_steps:
        values["max_steps"] = args.max_steps
    return {name: value for name, value in values.items() if value is not None}


def perform(script: str, arguments: dict[str, Any], output_dir: Path) -> float:
    """Run one training script into output_dir, which keeps its output.txt, unless its sweep is there; its seconds.

    Raises:
        Failed: it failed, and the message holds the end of what it printed; or the folder holds another run.
    """
    written, said = output_dir / "arguments.yaml", output_dir / "output.txt"
    if (output_dir / "budget_sweep.json").exists():
        held = parse_yaml(written.read_bytes(), written) if written.exists() else {}
        if {**held, "cpu_threads": None} != {**arguments, "cpu_threads": None}:
            raise Failed(f"{output_dir} holds the run of another command; delete it or choose another output_dir")
        return 0.0
    output_dir.mkdir(parents=True, exist_ok=True)
    write_text(written, yaml.safe_dump(arguments, sort_keys=False))
    command = [sys.executable, "-m", f"essm_train.{script}", str(written)]
    started = time.perf_counter()
    with said.open("ab") as log:
        before = log.tell()
        done = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    if done.returncode != 0:
        tail = "\n".join(said.read_bytes()[before:].decode(errors="replace").splitlines()[-15:])
        raise Failed(f"{' '.join(command)} ended with {done.returncode}:\n{tail}")
    return time.perf_counter() - started


def reproduce(args: ReproduceArguments) -> None:
    """Run and collect one experiment.

    Raises:
        ValueError: unknown experiment, row or scale, as `get_experiment`.
        FileNotFoundError: every row's data is absent. Failed: a run failed.
    """
    from essm_train.measure.paper import figures_of
    from essm_train.measure.tables import collect, write_results
    from essm_train.tasks.catalog import get_task
    from essm_train.tasks.experiments import get_experiment

    experiment = get_experiment(str(args.experiment))
    wanted = args.rows or [*experiment.rows]
    if unknown := sorted(set(wanted) - set(experiment.rows)):
        raise ValueError(f"rows of {experiment.name} must be among {tuple(experiment.rows)}, got {unknown}")
    results = [f"{experiment.name}-{args.scale}.{kind}" for kind in ("json", "md", "png")]
    claim(Path(args.results_dir), results, overwrite=args.overwrite)
    paper = figures_of(experiment)
    rows: dict[str, Row] = {}
    absent: dict[str, str] = {}  # task to what to fetch
    for name in wanted:
        row = experiment.rows[name]
        try:
            arguments_of(row, args, seed=0)
            rows[name] = row
        except FileNotFoundError as error:
            absent[row.task_name] = str(error)
    for task, fetch in absent.items():
        print(f"{task} is left out: {fetch}", flush=True)
    if not rows:
        raise FileNotFoundError("; ".join(absent.values()))
    # Seeds one after the other, so that an interrupted table has all rows; a run that two rows share stands once.
    runs: dict[Path, tuple[Row, int]] = {}
    for seed, row in itertools.product(range(args.seeds), rows.values()):
        other, _ = runs.setdefault(folder := folder_of(row, args, seed), (row, seed))
        if arguments_of(other, args, seed) != arguments_of(row, args, seed):
            raise ValueError(f"{other.task} and {row.task} would share {folder}: give one file another name")

    def perform_run(folder: Path) -> None:
        row, seed = runs[folder]
        seconds = perform(get_task(row.task).script, arguments_of(row, args, seed), folder)
        print(f"{folder.name}: {seconds:.0f} s" if seconds else f"{folder.name}: done before", flush=True)

    with ThreadPoolExecutor(args.jobs) as pool:
        list(pool.map(perform_run, runs))
    collected = {n: collect([folder_of(row, args, seed) for seed in range(args.seeds)]) for n, row in rows.items()}
    write_results(experiment, args, collected, paper, sorted(absent))


def main(args: ReproduceArguments) -> None:
    """Run an experiment, or list them all."""
    from essm_train.tasks.experiments import EXPERIMENTS, get_experiment

    if args.experiment is not None:
        reproduce(args)
        return
    for name in EXPERIMENTS:
        experiment = get_experiment(name)
        print(f"{name}: {experiment.question} Rows: {', '.join(experiment.rows)}")


run = command(main, ReproduceArguments, positional="experiment")


if __name__ == "__main__":
    run()
