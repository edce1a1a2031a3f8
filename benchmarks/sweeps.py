# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""What sweeps over models, learning rates and seeds share: training, and files of runs.

A run is one JSON file in a folder, written when the run has ended, so that a sweep that was killed goes on when it is
started again: finished runs are skipped, others begin anew. `benchmarks.ablation`, `benchmarks.memory_probes` and
`benchmarks.classification_tasks` say what their runs do.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from . import common
from .matched_models import Row, cache_bytes, sizes_of

SEEDS = (0, 1, 2)
Perform = Callable[["Run", Path], dict[str, Any]]  # does a run, writes its file, returns what it holds


# ---------------------------------------------------------------------------------------------------------------------
# One run.


@dataclass(frozen=True)
class Run:
    """A row at a learning rate and a seed, and where there are several tasks, on one of them."""

    name: str
    rate: float
    seed: int
    task: str | None = None

    @property
    def file(self) -> str:
        def words(name: str) -> str:
            return "".join(c if c.isalnum() else "-" for c in name).replace("--", "-")

        task = "" if self.task is None else words(self.task) + "-"
        return f"{task}{words(self.name)}-rate{self.rate:g}-seed{self.seed}.json"


def training_arguments(row: Row, updates: int, rate: float, seed: int) -> dict[str, Any]:
    """How the row is trained, as fields of RunArguments of essm_train/arguments.py."""
    updates = round(updates * row.updates)
    return {
        "max_steps": updates,
        "full_budget_updates": round(updates * row.full_share),
        "learning_rate": rate,
        "warmup_steps": 50,
        "weight_decay": 0.1,
        "adam_beta2": 0.95,
        "max_grad_norm": 1.0,
        "budget_schedule": row.schedule,
        "seed": seed,
    }


def train(
    model: nn.Module,
    next_forward: Callable[[], Callable[[int], Any]],
    args: Any,
    count: int,
    unit: str = "tokens",
    after_step: Callable[[Any, int], object] = lambda optimizer, update: None,
) -> dict[str, Any]:
    """All updates. The time is that of the process's processor, in updates alone: data and scoring do not count.

    Args:
        next_forward: draws a batch, and gives what runs the model on it at a budget: an output with a `loss`.
        args: RunArguments. count: tokens of a batch, or what else the speed is of, the `unit`.
        after_step: is given the optimizer and the update just done, counted from 1; its time counts.
    """
    from essm_train.models import capacity_of
    from essm_train.run.learning_rate import make_scheduler, parameter_groups
    from essm_train.run.loop import make_schedule
    from modeling_essm.training.budget_dropout import budget_losses

    schedule = make_schedule(args, capacity_of(model))
    groups, betas = parameter_groups(model, args.weight_decay), (0.9, args.adam_beta2)
    optimizer = torch.optim.AdamW(groups, lr=args.learning_rate, betas=betas, fused=True)
    scheduler = make_scheduler(optimizer, args.warmup_steps, [[0, args.max_steps]])
    seconds, recent, done = 0.0, [], 0
    model.train()
    for update in range(args.max_steps):
        forward = next_forward()
        started = time.process_time()
        loss = 0.0
        for part in budget_losses(forward, schedule(update)):
            part.backward()
            loss += part.item()
        norm = float(nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm))
        if not math.isfinite(loss + norm):
            break
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        after_step(optimizer, update + 1)
        seconds, done = seconds + time.process_time() - started, update + 1
        recent = [*recent[-49:], loss]
    return {
        "diverged": done < args.max_steps,
        "updates_done": done,
        "training_loss": statistics.fmean(recent) if recent else None,  # of the last 50 updates
        "cpu_seconds": seconds,
        f"{unit}_per_cpu_second": done * count / seconds if seconds else None,
    }


def measure(
    run: Run,
    path: Path,
    wanted: dict[str, Any],
    config: Any,
    make: Callable[[Any], nn.Module],
    fit: Callable[[nn.Module], dict[str, Any]],
    score: Callable[[nn.Module, list[int]], dict[str, float]],
    budgets: Sequence[int],
    metric: str,
    length: int | None = None,
) -> dict[str, Any]:
    """Train on one thread, measure, write the file in one move, return what it holds.

    Args:
        wanted: the "settings" of all runs, with the device, and the "definition" of this one.
        make: a model of the configuration. fit: `train` of it.
        score: the metric at every budget: of elastic models at these up to the capacity, and at the capacity.
        length: tokens after which the bytes of a language model's cache are counted.
    """
    from essm_train.files import write_json
    from essm_train.models import capacity_of

    with common.threads(1):
        device = torch.device(wanted["settings"]["device"])
        torch.manual_seed(run.seed)
        model = make(config).to(device)
        record: dict[str, Any] = {} if run.task is None else {"task": run.task}
        record |= {"model": run.name, "rate": run.rate, "seed": run.seed} | wanted
        record |= {"parameters": sum(p.numel() for p in model.parameters()), "sizes": sizes_of(config)} | fit(model)
        capacity = capacity_of(model)
        full = sorted({min(K, capacity) for K in (*budgets, capacity)})
        started = time.process_time()
        record[metric] = None if record["diverged"] else score(model, full)
        if length is not None:
            record["cache_bytes"] = cache_bytes(model, length)
        record["scoring_cpu_seconds"] = time.process_time() - started
        record["machine"] = common.machine(device)
    write_json(path, record)
    return record


# ---------------------------------------------------------------------------------------------------------------------
# All runs.


def runs_of(
    rows: dict[str, Row], names: Sequence[str], args: argparse.Namespace, tasks: Sequence[str | None] = (None,)
) -> list[Run]:
    """Every model at each of its rates, or of those that are given, at every seed, on every task.

    Seed by seed, so that a sweep cut short is a whole table of fewer seeds.
    """
    return [
        Run(name, rate, seed, task)
        for seed, task, name in itertools.product(args.seeds, tasks, names)
        for rate in args.rates or rows[name].rates
    ]


def choose_task(tasks: dict[str, Any], name: str, **fields: Any) -> Any:
    """A task of several, all dataclasses of numbers, or with other parameters: "mqar:length=128,pairs=8".

    Args:
        fields: that hold unless the name says otherwise; those that the task does not have are left out.
    Raises:
        ValueError: no such task or parameter, or one that the task refuses.
    """
    kind, _, rest = name.partition(":")
    if kind not in tasks:
        raise ValueError(f"a task must be one of {[*tasks]}, with parameters as in 'task:name=8', got {name!r}")
    legal = {field.name: str(field.type) for field in dataclasses.fields(tasks[kind])}
    given = {key: value for key, value in fields.items() if key in legal}
    for part in rest.split(",") if rest else []:
        key, _, value = part.partition("=")
        if key not in legal:
            raise ValueError(f"parameters of {kind} are {[*legal]}, got {part!r} in {name!r}")
        try:
            given[key] = float(value) if legal[key] == "float" else int(value)
        except ValueError:
            raise ValueError(f"{key} of {kind} must be a number ({legal[key]}), got {value!r} in {name!r}") from None
    return dataclasses.replace(tasks[kind], **given)


def read_run(path: Path) -> dict[str, Any] | None:
    """What the file of a finished run holds; None if there is none."""
    return json.loads(path.read_text()) if path.exists() else None


def check_run(path: Path, record: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Raises ValueError if a run that was found has other settings, or another "definition", than are wanted."""
    held = record["settings"] | {"definition": record["definition"]}
    changed = [f"{k} was {held.get(k)!r} and is now {wanted[k]!r}" for k in wanted if held.get(k) != wanted[k]]
    if changed:
        raise ValueError(f"{path} is of another table: {', '.join(changed)}; choose another --runs_dir, or delete it")


def sweep(
    runs: Sequence[Run],
    folder: Path,
    processes: int,
    perform: Perform,
    wanted: Callable[[Run], dict[str, Any]],
    metric: str,
) -> None:
    """Perform the runs that are not there yet, and print the metric of each.

    Args:
        perform: can be pickled if processes > 1.
        wanted: settings and "definition" that the file of a run must hold.
    Raises:
        ValueError: a run was found that has others; before any work.
    """
    waiting = []
    for run in runs:
        if (record := read_run(folder / run.file)) is None:
            waiting.append(run)
        else:
            check_run(folder / run.file, record, wanted(run))
    folder.mkdir(parents=True, exist_ok=True)
    print(f"{len(runs) - len(waiting)} of {len(runs)} runs are there", flush=True)
    for i, record in enumerate(_performed(perform, waiting, folder, processes), 1):
        values = record[metric]
        shown = "diverged" if values is None else " ".join(f"K={K} {value:.4f}" for K, value in values.items())
        task = f"{record['task']}, " if "task" in record else ""
        head = f"{i}/{len(waiting)} {task}{record['model']}, rate {record['rate']:g}, seed {record['seed']}"
        print(f"{head}: {shown} ({record['cpu_seconds']:.0f} CPU s)", flush=True)


def _performed(perform: Perform, runs: list[Run], folder: Path, processes: int) -> Iterator[dict[str, Any]]:
    if processes == 1:
        for run in runs:
            yield perform(run, folder / run.file)
        return
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        futures = [pool.submit(perform, run, folder / run.file) for run in runs]
        try:
            for future in as_completed(futures):
                yield future.result()
        finally:
            pool.shutdown(cancel_futures=True)


def collect(folder: Path) -> list[dict[str, Any]]:
    """The records of a folder. Raises ValueError if there are none, or they have different settings."""
    records = [json.loads(path.read_text()) for path in sorted(folder.glob("[!.]*-seed*.json"))]
    if not records:
        raise ValueError(f"{folder} holds no finished run")
    for record in records:
        if record["settings"] != records[0]["settings"]:
            raise ValueError(
                f"{folder} holds runs of different settings: {record['settings']} {records[0]['settings']}"
            )
    return records


def collect_tasks(folder: Path, names: Sequence[str], tasks: Sequence[str]) -> list[dict[str, Any]]:
    """Those of these models on these tasks, in the order of the tasks. Raises ValueError as `collect`."""
    records = [r for r in collect(folder) if r["model"] in names and r["task"] in tasks]
    if not records:
        raise ValueError(f"{folder} holds no run of the models {[*names]} on the tasks {[*tasks]}")
    return sorted(records, key=lambda r: tasks.index(r["task"]))


# ---------------------------------------------------------------------------------------------------------------------
# Command line.


def add_arguments(p: argparse.ArgumentParser, rows: dict[str, Row], runs_dir: str, updates: int) -> None:
    """What every sweep is told."""
    p.set_defaults(device="cpu")
    p.add_argument("--only", nargs="+", metavar="NAME", choices=rows, help=f"models, out of {[*rows]}")
    p.add_argument("--updates", type=int, default=updates)
    p.add_argument("--rates", type=float, nargs="+", help="learning rates, instead of those of each model")
    p.add_argument("--seeds", type=int, nargs="+", default=[*SEEDS])
    p.add_argument("--processes", type=int, default=1, help="runs at a time, each on one thread")
    p.add_argument("--runs_dir", type=Path, default=Path(runs_dir), help="where the file of every run goes")
    p.add_argument("--table", action="store_true", help="run nothing: the table of the runs that are in runs_dir")


def check_arguments(p: argparse.ArgumentParser, args: argparse.Namespace, *names: str) -> None:
    """Ends the program for numbers below 1."""
    for name in (*names, "updates", "processes"):
        if getattr(args, name) < 1:
            p.error(f"--{name} must be at least 1, got {getattr(args, name)}")
