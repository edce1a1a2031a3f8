# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""What sweeps over models, learning rates and seeds share: models of equal size, training, files of runs, summaries.

A run is one JSON file in a folder, written when the run has ended, so that a sweep that was killed goes on when it is
started again: finished runs are skipped, others begin anew. `benchmarks.ablation`, `benchmarks.memory_probes` and
`benchmarks.classification_tasks` say what their runs do.
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
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from modeling_essm import ESSMConfig, ESSMForCausalLM

from . import common

TOLERANCE = 0.03  # of the number of parameters
SEEDS = (0, 1, 2)
Perform = Callable[["Run", Path], dict[str, Any]]  # does a run, writes its file, returns what it holds


# ---------------------------------------------------------------------------------------------------------------------
# Models.


@dataclass(frozen=True)
class Row:
    """A model of a table.

    Attributes:
        layers: blocks to begin with. fields: of ESSMConfig, or of BaselineConfig.
        expansion: inner width of the gated block over D. feed_forward: width of its feed-forward layer over D.
        peer: architecture of essm_train/baselines/models.py instead. hidden_size: of a peer, to begin with.
        rates: learning rates.
        updates: over those of the table, for models compared at equal time.
        full_share: of the updates, the first ones, that are at the full budget; 1 is no budget dropout.
        schedule: of the budgets of the others.
    """

    layers: int
    fields: dict[str, Any] = field(default_factory=dict)
    expansion: float = 1.0
    feed_forward: float = 0.0
    peer: str | None = None
    hidden_size: int = 0
    rates: tuple[float, ...] = (3e-3, 6e-3, 1.2e-2)
    updates: float = 1.0
    full_share: float = 0.0
    schedule: str = "discrete"


def matched_config(row: Row, target: int, model_class: Any = None) -> Any:
    """The configuration with that many parameters, to 3%, whose shape is nearest to the row's in log distance.

    Of an ES-SSM the inner width is what its heads divide, and the width D is even; both, then the depth, give way.

    Args:
        model_class: what the parameters are counted of, called with a configuration; by default the language model.
    Raises:
        ValueError: there is none.
    """
    if row.peer is not None:
        from essm_train.baselines.models import BaselineForCausalLM
        from essm_train.baselines.sizes import matched_baseline

        model_class = model_class or BaselineForCausalLM
        sizes = {"hidden_size": row.hidden_size, "num_hidden_layers": row.layers}
        return matched_baseline(row.peer, target, tolerance=TOLERANCE, model_class=model_class, **sizes, **row.fields)
    gated = row.fields.get("block") == "gated"
    step = math.lcm(2, row.fields["num_heads"] * (row.fields["mixing_size"] or 1)) if gated else 2

    def make(hidden: int, inner: int, layers: int) -> ESSMConfig:
        sizes = {"hidden_size": hidden, "num_hidden_layers": layers}
        if gated:
            sizes |= {"inner_size": inner, "intermediate_size": 8 * round(row.feed_forward * hidden / 8)}
            sizes["mixing_size"] = row.fields["mixing_size"] or inner // row.fields["num_heads"]
        return ESSMConfig(**row.fields | sizes)

    @functools.cache
    def law(hidden: int, inner: int) -> tuple[int, int]:
        one, two = (count_parameters(make(hidden, inner, layers), model_class) for layers in (1, 2))
        return 2 * one - two, two - one  # of all layers together, of each

    def count(hidden: int, inner: int, layers: int) -> int:
        fixed, each = law(hidden, inner)
        return fixed + layers * each

    def first(reaches: Callable[[int], bool]) -> int:
        """The first even number for which a monotone condition holds."""
        low, high = 1, 2
        while not reaches(2 * high):
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if reaches(2 * middle) else (middle, high)
        return 2 * high

    def follows(hidden: int) -> int:
        return max(step, round(row.expansion * hidden / step) * step) if gated else hidden

    found: list[tuple[float, int, int, int]] = []  # distance, then sizes
    depths = range(1, 2 * row.layers + 1)
    for layers in sorted(depths, key=lambda n: abs(math.log(n / row.layers))):
        depth = math.log(layers / row.layers) ** 2
        if found and depth >= min(found)[0]:
            break
        middle = first(lambda D, layers=layers: count(D, follows(D), layers) >= target)
        around = range(follows(middle) - step, follows(middle) + step + 1, step)
        for inner in [width for width in around if width > 0] if gated else [0]:
            hidden = first(lambda D, inner=inner, layers=layers: count(D, inner or D, layers) >= target)
            for D in (hidden - 2, hidden):
                if D >= 2 and abs(count(D, inner or D, layers) / target - 1) <= TOLERANCE:
                    ratio = math.log((inner or D) / (row.expansion * D))
                    found.append((ratio**2 + depth, D, inner or D, layers))
    if not found:
        raise ValueError(f"no model of this shape has {target:,} parameters to {TOLERANCE:.0%}: {row}")
    _, hidden, inner, layers = min(found)
    return make(hidden, inner, layers)


def count_parameters(config: ESSMConfig, model_class: Any = None) -> int:
    """A tied matrix counts once; allocates nothing."""
    with torch.device("meta"):
        return sum(p.numel() for p in (model_class or ESSMForCausalLM)(config).parameters())


def definition(row: Row) -> dict[str, Any]:
    """What makes a row, but for its rates, as JSON gives it back."""
    return json.loads(json.dumps({k: v for k, v in dataclasses.asdict(row).items() if k != "rates"}))


def sizes_of(config: Any) -> dict[str, Any]:
    names = ("hidden_size", "num_hidden_layers", "inner_size", "num_heads", "mixing_size", "intermediate_size")
    names += ("num_spectral_channels", "state_size")
    return {name: getattr(config, name) for name in names if hasattr(config, name)}


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
    model: nn.Module, next_forward: Callable[[], Callable[[int], Any]], args: Any, count: int, unit: str = "tokens"
) -> dict[str, Any]:
    """All updates. The time is that of the process's processor, in updates alone: data and scoring do not count.

    Args:
        next_forward: draws a batch, and gives what runs the model on it at a budget: an output with a `loss`.
        args: RunArguments. count: tokens of a batch, or what else the speed is of, the `unit`.
    """
    from essm_train.models import capacity_of
    from essm_train.run.budgets import make_schedule
    from essm_train.run.learning_rate import make_scheduler, parameter_groups
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
) -> dict[str, Any]:
    """Train on one thread, measure, write the file in one move, return what it holds.

    Args:
        wanted: the "settings" of all runs, with the device, and the "definition" of this one.
        make: a model of the configuration. fit: `train` of it.
        score: the metric at every budget: of elastic models at these up to the capacity, and at the capacity.
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
# Summaries.


def mean(values: Sequence[float]) -> dict[str, float]:
    """And standard deviation (n - 1)."""
    return {"mean": statistics.fmean(values), "deviation": statistics.stdev(values) if len(values) > 1 else 0.0}


def summarise(records: list[dict[str, Any]], metric: str) -> dict[str, Any]:
    """One model at its best rate, that of the lowest mean over budgets and the seeds that all its rates have.

    A diverged run rules its rate out.

    Args:
        metric: what runs hold for each budget, better where lower.
    """
    by_rate: dict[float, list[dict[str, Any]]] = {}
    for record in sorted(records, key=lambda r: (r["rate"], r["seed"])):
        by_rate.setdefault(record["rate"], []).append(record)
    shared = set.intersection(*({run["seed"] for run in runs} for runs in by_rate.values()))
    means = {
        rate: None
        if any(run["diverged"] for run in runs)
        else statistics.fmean(
            statistics.fmean(run[metric].values()) for run in runs if not shared or run["seed"] in shared
        )
        for rate, runs in by_rate.items()
    }
    first = records[0]
    kept = ("task", "model", "metric", "definition", "parameters", "sizes")
    result = {name: first[name] for name in kept if name in first}
    result |= {"rates": {f"{rate:g}": value for rate, value in means.items()}, "best_rate": None}
    whole = {rate: value for rate, value in means.items() if value is not None}
    if not whole:
        return result
    best = min(whole, key=lambda rate: whole[rate])
    runs = by_rate[best]
    (speed,) = (name for name in runs[0] if name.endswith(SPEED))
    ends = (min(means), max(means))
    return result | {
        "best_rate": best,
        "at_the_edge": best in ends,  # a rate beyond may be better still
        "seeds": [run["seed"] for run in runs],
        "by_seed": {str(run["seed"]): run[metric] for run in runs},
        metric: {K: mean([run[metric][K] for run in runs]) for K in runs[0][metric]},
        speed: mean([run[speed] for run in runs]),
        "cpu_seconds": mean([run["cpu_seconds"] for run in runs]),
        "cpus": sorted({run["machine"]["cpu"] for run in runs}),
    }


def summarise_tasks(records: list[dict[str, Any]], metric: str) -> list[dict[str, Any]]:
    """Every model on every task at its best rate, in the order of the records' tasks, the best model first."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for record in records:
        groups.setdefault((record["task"], record["model"]), []).append(record)
    results = [summarise(runs, metric) for runs in groups.values()]
    tasks = [*dict.fromkeys(result["task"] for result in results)]
    return sorted(results, key=lambda r: (tasks.index(r["task"]), at_full_budget(r, metric)))


def at_full_budget(result: dict[str, Any], metric: str) -> float:
    """Its mean; infinite if every rate diverged."""
    values = result.get(metric)
    return list(values.values())[-1]["mean"] if values else math.inf


def columns(result: dict[str, Any]) -> list[Any]:
    """Cells of a table under `COLUMNS`."""
    rate = "diverged" if result["best_rate"] is None else f"{result['best_rate']:g}" + "*" * result["at_the_edge"]
    shape = f"{result['sizes']['hidden_size']}x{result['sizes']['num_hidden_layers']}"
    seeds = len(result.get("seeds", []))
    return [result["model"].replace(" ", "_"), f"{result['parameters']:,}", shape, rate, seeds]


COLUMNS = "model parameters DxL rate seeds"


def shown(value: dict[str, float] | None, sign: str = "") -> str:
    return f"{value['mean']:{sign}.4f}±{value['deviation']:.4f}" if value else "-"


SPEED = "_per_cpu_second"  # how the name of a speed ends


def speed(result: dict[str, Any]) -> str:
    """Tokens, or what a run counts, per second of one CPU."""
    found = next((value["mean"] for name, value in result.items() if name.endswith(SPEED)), None)
    return "-" if found is None else f"{found:,.0f}" if found >= 100 else f"{found:.3g}"


def print_tables(results: list[dict[str, Any]], metric: str, unit: str, **titles: str) -> None:
    """A table for each task. Peers have no budgets, and stand in the last column only.

    Args:
        results: whose "metric" says what is shown: "accuracy", where the metric is the share of errors, or itself.
        unit: what the speed counts. titles: of what is shown, by its name.
    """
    for task in dict.fromkeys(result["task"] for result in results):
        rows = []
        of_task = [r for r in results if r["task"] == task]
        kind = of_task[0]["metric"]
        accuracy = kind == "accuracy"
        budgets = [*dict.fromkeys(K for r in of_task if is_elastic(r) for K in [*r.get(metric, {})][:-1])]
        for r in of_task:
            values = {K: e | {"mean": 1 - e["mean"]} if accuracy else e for K, e in r.get(metric, {}).items()}
            cells = [values.get(K) if is_elastic(r) else None for K in budgets]
            cells.append(list(values.values())[-1] if values else None)
            rows.append([*columns(r), *map(shown, cells), speed(r)])
        print(f"\n{task}: {titles.get(kind, kind)}")
        header = " ".join(f"K={K}" for K in budgets)
        common.table(f"{COLUMNS} {header} full {unit}/CPU_s", rows)
    print("* the best rate is the smallest or the largest tried")


def is_elastic(result: dict[str, Any]) -> bool:
    """Whether it is of an ES-SSM, which runs at several budgets."""
    return "num_spectral_channels" in result["sizes"]


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
