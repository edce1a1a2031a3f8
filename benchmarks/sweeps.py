# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Sweeps over models, learning rates, seeds and tasks: how a run is trained, its file, all runs, and their tables.

A run is one JSON file in --runs_dir, written when the run has ended. A sweep that was killed goes on when it is started
again: finished runs are skipped, others begin anew. `--table` makes the table of the runs that are there.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import json
import math
import multiprocessing
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from essm_train.files import write_json
from essm_train.models import capacity_of, run_part
from essm_train.run.loop import make_schedule
from essm_train.run.steps import check_finite, make_optimizer, make_scheduler, update
from modeling_essm import ESSMForCausalLM
from modeling_essm.training.budget_dropout import Part, budget_losses, clip_budgets

from . import common
from .matched_models import Row

SPEED = "_per_cpu_second"  # how the name of a speed ends
SIZES = ["hidden_size", "num_hidden_layers", "head_size", "intermediate_size", "num_spectral_channels"]
SIZES += ["memory_key_size", "memory_value_size", "state_size"]
Batch = TypeVar("Batch")


@dataclass(frozen=True)
class Run:
    """A row at a learning rate and a seed, and where there are several tasks, on one of them."""

    name: str
    rate: float
    seed: int
    task: str = ""

    @property
    def file(self) -> str:
        words = ("".join(c if c.isalnum() else "-" for c in name).replace("--", "-") for name in (self.task, self.name))
        return f"{'-'.join(filter(None, words))}-rate{self.rate:g}-seed{self.seed}.json"


def training_arguments(row: Row, updates: int, rate: float, seed: int) -> dict[str, Any]:
    """How the row is trained, as fields of RunArguments of essm_train/arguments.py."""
    updates = round(updates * row.updates)
    fields = {"max_steps": updates, "full_budget_updates": round(updates * row.full_share), "learning_rate": rate}
    fields |= {"warmup_steps": 50, "weight_decay": 0.1, "adam_beta2": 0.95, "max_grad_norm": 1.0, "seed": seed}
    return fields | {"budget_schedule": row.schedule, "optimizer": row.optimizer}


def fit(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: torch.optim.lr_scheduler.LRScheduler | None,
    updates: int,
    batch: Callable[[int], Batch],
    losses: Callable[[int, Batch], Iterable[Tensor]],
    *,
    max_grad_norm: float = 1.0,
    after_step: Callable[[int], object] = lambda done: None,
) -> dict[str, Any]:
    """All updates, until one has a loss or gradient that is not finite; that one is not made.

    Args:
        batch: draws the batch of an update, counted from 0. Its time does not count.
        losses: of an update and its batch, as `update` takes them.
        after_step: is given the number of updates done; its time counts.
    Returns:
        Whether the training diverged, updates done, the mean training loss of the last 50 of them, and the seconds of
        this process's processor that they took.
    """
    seconds, done = 0.0, 0
    recent: deque[float] = deque(maxlen=50)

    def check(loss: Tensor, norm: Tensor) -> None:
        check_finite(loss, norm)
        recent.append(float(loss))

    model.train()
    for number in range(updates):
        drawn = batch(number)
        started = time.process_time()
        try:
            update(optimizer, losses(number, drawn), model.parameters(), scheduler, max_grad_norm, check=check)
        except FloatingPointError:
            break
        done = number + 1
        after_step(done)
        seconds += time.process_time() - started
    return {
        "diverged": done < updates,
        "updates_done": done,
        "training_loss": statistics.fmean(recent) if recent else None,
        "cpu_seconds": seconds,
    }


def train(
    model: nn.Module,
    next_batch: Callable[[], dict[str, Tensor]],
    args: Any,
    count: float,
    unit: str = "tokens",
    after_step: Callable[[Any, int], object] | None = None,
    forward: Callable[[nn.Module, dict[str, Tensor], Part], Any] = run_part,
) -> dict[str, Any]:
    """All updates with budget dropout and a cosine. The time is that of the process's processor, in updates alone.

    Args:
        next_batch: draws the arguments of a forward pass, labels among them.
        args: RunArguments. count: tokens of a batch in the mean, or what else the speed is of, the `unit`.
        after_step: is given the optimizer and the update just done, counted from 1.
        forward: of the model, a batch and a part of the update, to an output with a `loss`.
    """
    schedule = make_schedule(args, model)
    optimizer = make_optimizer(model, args)

    def losses(update: int, batch: dict[str, Tensor]) -> Iterator[Tensor]:
        parts = schedule.parts(update, len(batch["labels"]))
        run, weight = functools.partial(forward, model, batch), args.distillation_weight
        return budget_losses(run, parts, labels=batch["labels"], distillation_weight=weight)

    found = fit(
        model,
        optimizer,
        make_scheduler(optimizer, args.warmup_steps, [[0, args.max_steps]]),
        args.max_steps,
        lambda update: next_batch(),
        losses,
        max_grad_norm=args.max_grad_norm,
        after_step=lambda update: after_step and after_step(optimizer, update),
    )
    seconds, alone = found["cpu_seconds"], (args.full_budget_updates or 0) >= args.max_steps
    found["trained_budgets"] = [capacity_of(model)] if alone else [*schedule.budgets]
    return found | {f"{unit}{SPEED}": found["updates_done"] * count / seconds if seconds else None}


def measure(
    model: Any,
    trained: dict[str, Any],
    score: Callable[[Any, Sequence[int]], dict[str, float]],
    budgets: Sequence[int],
    metric: str,
    length: int = 0,
) -> dict[str, Any]:
    """The record of a trained model: sizes, how it was trained, the metric at every budget up to the capacity, and of
    an ES-SSM the bytes that it keeps for one row after `length` tokens, at the full budget."""
    sizes = {name: getattr(model.config, name) for name in SIZES if hasattr(model.config, name)}
    record = {"parameters": sum(p.numel() for p in model.parameters()), "sizes": sizes, **trained}
    capacity = capacity_of(model)
    measured = clip_budgets((*(getattr(model.config, "trained_budgets", None) or budgets), capacity), capacity)
    record[metric] = None if trained["diverged"] else score(model, measured)
    if length and isinstance(model, ESSMForCausalLM):
        tokens = torch.zeros(1, length, dtype=torch.int64, device=model.device)
        with torch.no_grad():
            record["cache_bytes"] = model(tokens, use_cache=True, logits_to_keep=1).past_key_values.num_bytes
    return record


Perform = Callable[[Any, Run], dict[str, Any]]


@dataclass(frozen=True)
class Sweep:
    """What a benchmark does with a run. Functions are given the settings and a Run, and can be pickled.

    Attributes:
        perform: trains and measures. metric: what its record holds for each budget; None in a run that diverged.
        define: what makes the run besides the settings: its row, its data. Runs of other definitions are refused.
    """

    settings: Any
    perform: Perform
    define: Perform
    metric: str

    def identity(self, run: Run) -> dict[str, Any]:
        """What makes the run, as JSON gives it back; in which folder the data lies is not part of it."""
        values = dataclasses.asdict(self.settings).items()
        settings = {k: v for k, v in values if not k.endswith(("_file", "_dir"))}
        return json.loads(json.dumps({"settings": settings, "definition": self.define(self.settings, run)}))

    def one(self, run: Run, folder: Path) -> dict[str, Any]:
        """Perform it on one thread, write its file in one move, return what that holds."""
        with common.threads(1):
            record: dict[str, Any] = {"task": run.task} if run.task else {}
            record |= {"model": run.name, "rate": run.rate, "seed": run.seed} | self.identity(run)
            device = torch.device(getattr(self.settings, "device", "cpu"))
            record |= self.perform(self.settings, run) | {"machine": common.machine(device)}
        write_json(folder / run.file, record)
        return record

    def perform_missing(self, runs: Sequence[Run], folder: Path, processes: int) -> None:
        """Perform the runs that are not there yet.

        Raises:
            ValueError: before any work, for a run that was made with other settings or another definition, and for what
                `define` refuses: tasks, data and sizes that are not there.
        """
        waiting = []
        for run, identity in [(run, self.identity(run)) for run in runs]:
            if not (path := folder / run.file).exists():
                waiting.append(run)
                continue
            record = json.loads(path.read_text(encoding="utf-8"))
            for part, wanted in identity.items():
                if (held := record[part]) != wanted:
                    reason = f"its {part} was {held} and is now {wanted}; choose another --runs_dir, or delete it"
                    raise ValueError(f"{path} is of another table: {reason}")
        folder.mkdir(parents=True, exist_ok=True)
        print(f"{len(runs) - len(waiting)} of {len(runs)} runs are there", flush=True)
        for i, record in enumerate(_performed(functools.partial(self.one, folder=folder), waiting, processes), 1):
            values = record[self.metric]
            shown = "diverged" if values is None else " ".join(f"K={K} {value:.4f}" for K, value in values.items())
            names = ", ".join(filter(None, (record.get("task"), record["model"])))
            print(f"{i}/{len(waiting)} {names}, rate {record['rate']:g}, seed {record['seed']}: {shown}", flush=True)


def _performed(one: Callable[[Run], dict[str, Any]], runs: list[Run], processes: int) -> Iterable[dict[str, Any]]:
    if processes == 1:
        yield from map(one, runs)
        return
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        yield from pool.map(one, runs)  # which cancels those that wait when one fails


def collect(
    folder: Path,
    names: Sequence[str],
    tasks: Sequence[str] | None,
    seeds: Sequence[int] | None,
    rates: Sequence[float] | None,
) -> list[dict[str, Any]]:
    """The records of these models on these tasks at these seeds and rates, None for any.

    Raises:
        ValueError: there are none, or they have different settings or texts, or one model of a task two definitions.
    """
    records = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("[!.]*-seed*.json"))]
    records = [r for r in records if r["model"] in names and (tasks is None or r.get("task", "") in tasks)]
    for name, chosen in {"seed": seeds, "rate": rates}.items():
        records = [r for r in records if chosen is None or r[name] in chosen]
    if not records:
        asked = f"the models {[*names]}, of the tasks {tasks or 'any'}, seeds {seeds or 'any'}, rates {rates or 'any'}"
        raise ValueError(f"{folder} holds no finished run of {asked}")
    held: dict[str, Any] = {}
    for record in records:
        task, of = record.get("task", ""), record["definition"]
        told = {"settings": record["settings"], " ".join(filter(None, ("definitions", task, record["model"]))): of}
        for what, value in (told | {f"texts {task}".strip(): of.get("text")}).items():
            if value != (first := held.setdefault(what, value)):
                raise ValueError(f"{folder} holds runs of different {what}: {value} {first}")
    return records


def add_arguments(
    p: argparse.ArgumentParser,
    rows: Mapping[str, Any],
    runs_dir: str,
    updates: int,
    tasks: Iterable[str] = (),
    rate: float | None = None,
    seeds: Sequence[int] = (0, 1, 2),
) -> None:
    """Rows by name; without `rates` of their own they all have this `rate`, and a table is of one.

    A run without --seeds and --tasks is of these seeds and tasks; the table of what is there is then of all.
    """
    p.set_defaults(device="cpu", tasks=None, usual_tasks=[*tasks] or [""], rows=rows, usual_seeds=seeds)
    if tasks:
        p.add_argument("--tasks", nargs="+", help=f"by default {[*tasks]}")
    p.add_argument("--only", nargs="+", metavar="NAME", choices=[*rows], default=[*rows], help=f"of {[*rows]}")
    p.add_argument("--updates", type=common.positive, default=updates)
    if rate is None:
        p.add_argument(
            "--rates", type=common.above_zero, nargs="+", help="learning rates, instead of those of each model"
        )
    else:
        p.add_argument(
            "--rate", dest="rates", type=common.above_zero, nargs=1, default=[rate], help="learning rate of all"
        )
    p.add_argument("--seeds", type=int, nargs="+", help=f"by default {[*seeds]}")
    p.add_argument("--processes", type=common.positive, default=1, help="runs at a time, each on one thread")
    p.add_argument("--runs_dir", type=Path, default=Path(runs_dir), help="where the file of every run goes")
    p.add_argument("--table", action="store_true", help="run nothing: the table of the runs that are in runs_dir")


def add_data(p: argparse.ArgumentParser) -> None:
    p.add_argument("--data_dir", help="data folders, separated as in PATH; by default $ESSM_DATA, or data")


def run(name: str, args: argparse.Namespace, sweep: Sweep) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Perform what is missing, unless --table says otherwise; the records of all runs, and the report of that name.

    Every model runs at each of its rates, at every seed, on every task: seed by seed, so that a sweep cut short is a
    whole table of fewer seeds.
    """
    tasks, kinds = args.tasks or args.usual_tasks, [task.partition(":")[0] for task in args.usual_tasks]
    if unknown := [task for task in tasks if task.partition(":")[0] not in kinds]:
        raise ValueError(f"a task must be one of {kinds}, got {unknown[0]!r}")
    common.check_output(args)
    if not args.table:
        points = itertools.product(args.seeds or args.usual_seeds, tasks, args.only)
        runs = [
            Run(model, rate, seed, task)
            for seed, task, model in points
            for rate in args.rates or args.rows[model].rates
        ]
        sweep.perform_missing(runs, args.runs_dir, args.processes)
    records = collect(args.runs_dir, args.only, args.tasks, args.seeds, args.rates)
    records.sort(key=lambda r: (tasks.index(t) if (t := r.get("task", "")) in tasks else len(tasks), t))
    settings = {"quick": args.quick} | records[0]["settings"]
    return records, common.start(name, args, measured_on=records[0]["machine"], **settings)[1]


def choose_task(tasks: Mapping[str, Any], name: str, **fields: Any) -> Any:
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
        try:
            given[key] = float(value) if legal[key] == "float" else int(value)
        except (KeyError, ValueError):
            raise ValueError(f"parameters of {kind} are numbers named {[*legal]}, got {part!r} in {name!r}") from None
    return dataclasses.replace(tasks[kind], **given)


def mean(values: Sequence[float]) -> dict[str, float]:
    """And standard deviation (n - 1)."""
    return {"mean": statistics.fmean(values), "deviation": statistics.stdev(values) if len(values) > 1 else 0.0}


def at_best_rate(records: list[dict[str, Any]], metric: str) -> tuple[dict[float, float | None], list[dict[str, Any]]]:
    """The runs of one model at its best rate: of the lowest mean over the budgets that it was trained at, and over the
    seeds that all its rates have, but for one at which a run diverged.

    Returns:
        The mean at each rate, None where a run diverged, which rules it out; and the runs by seed, if any rate is left.
    Raises:
        ValueError: no seed that all rates have.
    """
    by_rate: dict[float, list[dict[str, Any]]] = {}
    for record in sorted(records, key=lambda r: (r["rate"], r["seed"])):
        by_rate.setdefault(record["rate"], []).append(record)
    whole = {rate: runs for rate, runs in by_rate.items() if not any(run["diverged"] for run in runs)}
    seeds = {rate: {run["seed"] for run in runs} for rate, runs in whole.items()}
    shared = set.intersection(*seeds.values()) if seeds else set()
    if seeds and not shared:
        raise ValueError(f"rates of one model must share a seed to be compared, got seeds by rate {seeds}")
    means: dict[float, float | None] = dict.fromkeys(by_rate)

    def judge(run: dict[str, Any]) -> float:
        trained = {str(K) for K in run.get("trained_budgets", ())} & {*run[metric]} or run[metric]
        return statistics.fmean(run[metric][K] for K in trained)

    for rate, runs in whole.items():
        means[rate] = statistics.fmean(judge(run) for run in runs if run["seed"] in shared)
    left = [(value, rate) for rate, value in means.items() if value is not None]
    return means, by_rate[min(left)[1]] if left else []


def summarise(records: list[dict[str, Any]], metric: str) -> dict[str, Any]:
    """One model at its best rate, as `at_best_rate` finds it."""
    means, runs = at_best_rate(records, metric)
    kept = ("task", "model", "metric", "definition", "parameters", "sizes", "cache_bytes")
    result = {name: records[0][name] for name in kept if name in records[0]}
    result |= {"rates": {f"{rate:g}": value for rate, value in means.items()}, "best_rate": None}
    if not runs:
        return result
    best = runs[0]["rate"]
    (speed,) = (name for name in runs[0] if name.endswith(SPEED))
    return result | {
        "best_rate": best,
        "at_the_edge": best in (min(means), max(means)),  # a rate beyond may be better still
        "seeds": [run["seed"] for run in runs],
        "by_seed": {str(run["seed"]): run[metric] for run in runs},
        metric: {K: mean([run[metric][K] for run in runs]) for K in runs[0][metric]},
        speed: mean([run[speed] for run in runs]),
        "cpu_seconds": mean([run["cpu_seconds"] for run in runs]),
        "cpus": sorted({run["machine"]["cpu"] for run in runs}),
    }


def summarise_all(records: list[dict[str, Any]], metric: str) -> list[dict[str, Any]]:
    """Every model on every task at its best rate, in the order of the records' tasks, the best model first."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for record in records:
        groups.setdefault((record.get("task", ""), record["model"]), []).append(record)
    results = [summarise(runs, metric) for runs in groups.values()]
    tasks = [*dict.fromkeys(task for task, _ in groups)]

    def at_full_budget(result: dict[str, Any]) -> tuple[int, float]:
        values = result.get(metric)  # absent if every rate diverged
        return tasks.index(result.get("task", "")), [*values.values()][-1]["mean"] if values else math.inf

    return sorted(results, key=at_full_budget)
