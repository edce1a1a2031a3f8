# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""The paper's tables, and our own questions, by one command each: variants x seeds, resumed where they stopped.

    python train/reproduce.py table4 --scale small --seeds 3 --data_dir data          # ablation on language modelling
    python train/reproduce.py exponents --scale small --seeds 3 --data_dir data
    python train/reproduce.py --list

Every run is one call of train_clm.py or train_classification.py in a process of its own, in
output_dir/<experiment>-<scale>/<run>-seed<n>; a run whose sweep is there is not repeated, an unfinished one goes on
from its checkpoint. `--jobs 2` runs two at a time, each on `--cpu_threads`. At the end the figures of all runs are
collected into <experiment>-<scale>.json, .md and .png below --results_dir.

Small scale is small: narrower models, shorter sequences and few updates, minutes per run on a CPU. Its figures are
there to compare rows of one table, never to be put beside the paper's. What the paper reports is not in this
repository; the Markdown says in which ways a run differs from it.
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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from engine import Metric, check_writable, write_json
from evaluation import Evaluation, draw_curves
from tasks.catalog import ROOT, SCRIPTS, TASKS, task_arguments
from transformers import HfArgumentParser

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
    "discrete": {"budget_schedule": "discrete"},
    "authors": {"budget_schedule": "authors"},
    "sandwich": {"budget_schedule": "sandwich"},
    "sandwich + distillation": {"budget_schedule": "sandwich", "distillation_weight": 1.0},
}
EXPONENTS: dict[str, dict[str, Any]] = {
    f"exponent {name}": {"scaling_exponent": value}
    for name, value in {"1/4": 0.25, "1/8": 0.125, "1/16": 0.0625, "0": 0.0}.items()
}


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


def _tasks(*names: str) -> dict[str, tuple[str, dict[str, Any]]]:
    return {name: (name, {}) for name in names}


EXPERIMENTS: dict[str, Experiment] = {
    "table1": Experiment(
        "How good is ES-SSM on the Long Range Arena?",
        _tasks("listops", "text", "image", "pathfinder", "pathx"),
    ),
    "table2": Experiment("How good is it as a byte-level language model of books?", _tasks("pg19")),
    "table3": Experiment("How good is it on speech commands?", _tasks("sc10")),
    "table4": Experiment("What are gate and budget dropout worth? Novels.", _on("novels", VARIANTS)),
    "table5": Experiment("What do the rules of training cost and bring? Novels.", _on("novels", SCHEDULES)),
    "table6": Experiment(
        "What does a trained model keep at every budget?", _tasks("text", "smnist", "speech4", "listops", "pathfinder")
    ),
    "exponents": Experiment(
        "Does another exponent of sigma make use of the late channels? Novels.",
        _on("novels", EXPONENTS),
    ),
    "filter_length": Experiment(
        "Should the filters be longer than the training sequences? Novels.",
        {
            "as long": ("novels", {"filter_length": 512}),
            "8 times": ("novels", {"filter_length": 4096}),
        },
    ),
}


def command_of(
    task: str, overrides: dict[str, Any], args: ReproduceArguments, output_dir: Path, seed: int
) -> list[str]:
    """The command line of one run. Raises what `task_arguments` does where the data is absent."""
    values = {**task_arguments(task, args.data_dir, args.scale), **overrides}
    values |= {"output_dir": str(output_dir), "seed": seed, "cpu_threads": args.cpu_threads}
    if args.max_steps:
        values["max_steps"] = args.max_steps
    command = [sys.executable, str(ROOT / SCRIPTS[TASKS[task].script])]
    for name, value in values.items():
        if value is None:
            continue
        command += [f"--{name}", *(map(str, value) if isinstance(value, (list, tuple)) else [str(value)])]
    return command


def slug(name: str) -> str:
    """A row's name as a folder."""
    return "".join(c if c.isalnum() else "_" for c in name.lower())


def run(command: list[str], output_dir: Path) -> float:
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
    training = [json.loads((folder / "training.json").read_text()) for folder in folders]
    first = sweeps[0]
    metric = Metric(**first["metric"]) if "metric" in first else Metric("bits_per_byte", higher_is_better=False)
    values = tuple(tuple(sweep.get("values", sweep.get("bits_per_byte"))) for sweep in sweeps)
    speeds = tuple(tuple(sweep["tokens_per_second"]) for sweep in sweeps)
    zeros = (0,) * len(first["budgets"])
    evaluation = Evaluation(metric, tuple(first["budgets"]), values, speeds, zeros, zeros)
    keep = ("data", "updates", "samples_per_update", "tokens_per_update", "hardware", "schedule")
    return evaluation, {name: training[0].get(name) for name in keep} | {
        "seconds": [t.get("seconds") for t in training],
        "arguments": {
            name: value
            for name, value in training[0]["arguments"].items()
            if value is not None and not name.endswith(("_dir", "_file"))
        },
    }


def markdown(experiment: Experiment, rows: dict[str, Evaluation]) -> str:
    """Rows by budgets, mean ± deviation over seeds."""
    first = next(iter(rows.values()))
    lines = ["| | " + " | ".join(f"K={K}" for K in first.budgets) + " | sweet spot | collapse | seeds |"]
    lines.append("|---" * (len(first.budgets) + 4) + "|")
    for name, evaluation in rows.items():
        cells = [
            f"{m:.4f}" + (f" ± {d:.4f}" if len(evaluation.values) > 1 else "")
            for m, d in zip(evaluation.mean, evaluation.deviation)
        ]
        cells += [
            str(evaluation.curve.sweet_spot),
            str(evaluation.curve.collapse_boundary),
            str(len(evaluation.values)),
        ]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return f"{experiment.question}\n\n" + "\n".join(lines) + "\n"


@dataclass
class ReproduceArguments:
    """Arguments of the script; the experiment's name comes first."""

    scale: str = field(default="small", metadata={"help": "'full' or 'small'."})
    seeds: int = field(default=3, metadata={"help": "Seeds 0, 1, .. of every row."})
    rows: list[str] | None = field(default=None, metadata={"help": "Only these rows."})
    data_dir: str = field(default="data", metadata={"help": "Folder of the tasks' data."})
    output_dir: str = field(default="runs/reproduce", metadata={"help": "Where the runs go."})
    results_dir: str = field(default="benchmarks/results", metadata={"help": "Where tables and figures go."})
    jobs: int = field(default=1, metadata={"help": "Runs at a time."})
    cpu_threads: int = field(default=1, metadata={"help": "CPU threads of each run."})
    max_steps: int | None = field(default=None, metadata={"help": "Other than the task's number of updates."})


def reproduce(name: str, args: ReproduceArguments) -> dict[str, Any]:
    """Run and collect one experiment.

    Raises:
        ValueError: unknown experiment, row or scale. FileNotFoundError: absent data. RuntimeError: a run failed.
    """
    if name not in EXPERIMENTS:
        raise ValueError(f"the experiment must be one of {tuple(EXPERIMENTS)}, got {name!r}")
    experiment = EXPERIMENTS[name]
    wanted = args.rows or list(experiment.rows)
    if unknown := sorted(set(wanted) - set(experiment.rows)):
        raise ValueError(f"rows of {name} must be among {tuple(experiment.rows)}, got {unknown}")
    if args.seeds < 1 or args.jobs < 1:
        raise ValueError(f"seeds and jobs must be at least 1, got {args.seeds} and {args.jobs}")
    results_dir, root = Path(args.results_dir), Path(args.output_dir) / f"{name}-{args.scale}"
    check_writable(results_dir)
    folders = {row: [root / f"{slug(row)}-seed{seed}" for seed in range(args.seeds)] for row in wanted}
    jobs = [  # seed by seed, so that an interrupted table has all rows
        (command_of(*experiment.rows[row], args, folders[row][seed], seed), folders[row][seed])
        for seed in range(args.seeds)
        for row in wanted
    ]
    with ThreadPoolExecutor(args.jobs) as pool:
        for (_, folder), seconds in zip(jobs, pool.map(lambda job: run(*job), jobs)):
            print(f"{folder.name}: {seconds:.0f} s" if seconds else f"{folder.name}: done before", flush=True)
    collected = {row: collect(folders[row]) for row in wanted}
    evaluations = {row: evaluation for row, (evaluation, _) in collected.items()}
    text = markdown(experiment, evaluations)
    print("\n" + text)
    record = {"experiment": name, "question": experiment.question, "scale": args.scale, "seeds": args.seeds}
    record |= {"machine": platform.machine(), "torch": torch.__version__, "cpu_threads": args.cpu_threads}
    record["rows"] = {
        row: {"task": experiment.rows[row][0], "overrides": experiment.rows[row][1]}
        | {k: v for k, v in evaluation.record().items() if k not in ("peak_bytes", "active_parameters")}
        | {"training": training}
        for row, (evaluation, training) in collected.items()
    }
    stem = f"{name}-{args.scale}"
    write_json(results_dir / f"{stem}.json", record)
    notes = {TASKS[task].note for task, _ in (experiment.rows[row] for row in wanted) if TASKS[task].note}
    (results_dir / f"{stem}.md").write_text(text + "".join(f"\n{note}\n" for note in sorted(notes)))
    by_metric: dict[str, dict[str, Evaluation]] = {}
    for row, evaluation in evaluations.items():
        by_metric.setdefault(evaluation.metric.name, {})[row] = evaluation
    for i, group in enumerate(by_metric.values()):
        draw_curves(group).savefig(results_dir / (f"{stem}.png" if i == 0 else f"{stem}-{i}.png"), dpi=120)
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


if __name__ == "__main__":
    main()
