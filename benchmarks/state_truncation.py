# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Does a state space that shrinks while it trains end better than one born small? Balanced truncation (CompreSSM).

    python -m benchmarks.state_truncation --data_dir data --processes 2
    python -m benchmarks.state_truncation --tasks digits --only "tau 0.15" --seeds 0 --updates 1000
    python -m benchmarks.state_truncation --table --runs_dir runs/state_truncation

A run trains an LRU of 64 modes with balanced truncation in its warm-up, then, from the same seed and on the same
samples, a new one of the order that the first ended with; both are measured on the same test samples, and by the
processor time of their updates. "full" is the model that keeps its 64 modes. Rows "every n" attempt at other distances.
Tasks: MNIST averaged to 14 x 14 and grey CIFAR to 16 x 16, read pixel by pixel; and the words of the first 512 bytes of
IMDb reviews as the control, where the order is expected to matter little. Best, mean of the best three and mean of all
seeds are reported, and differences seed by seed. One JSON file a run; a sweep that was killed goes on when it is
started again.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from . import classification_tasks, common, sweep_tables, sweeps
from .classification_tasks import TEST_BATCH, Row
from .state_pruning import Task, batch_of, model_fields, score
from .sweeps import Run

METRIC = "error"
RATE = 1e-2
TASKS = {"digits": Task("smnist", 2), "pictures": Task("image", 2), "reviews": Task("text:max_length=512", words=4096)}


@dataclass(frozen=True)
class Truncated:
    """How a row truncates.

    Attributes:
        tau: share of the Hankel singular values that an attempt may discard; 0 truncates nothing.
        attempts: how many. every: updates between them; None: at equal distances over the warm-up.
    """

    tau: float
    attempts: int = 4
    every: int | None = None


ROWS = {
    "full": Truncated(0.0),
    "tau 0.15": Truncated(0.15),
    "tau 0.05": Truncated(0.05),
    "tau 0.02": Truncated(0.02),
    "tau 0.15, every 50": Truncated(0.15, every=50),
    "tau 0.15, every 200": Truncated(0.15, every=200),
    "tau 0.15, every 800": Truncated(0.15, every=800),
}


@dataclass(frozen=True)
class Settings:
    """What all runs of a table have in common."""

    data_dir: str | None
    updates: int
    hidden_size: int = 16
    num_hidden_layers: int = 1
    state_size: int = 64
    test_samples: int = 1000
    quick: bool = False
    device: str = "cpu"

    def data(self) -> classification_tasks.Settings:
        return classification_tasks.Settings(
            self.data_dir, 0, self.updates, self.test_samples, quick=self.quick, device=self.device
        )

    def values(self) -> dict[str, Any]:
        """As JSON gives them back; in which folder the data lies is not part of them."""
        return {k: v for k, v in json.loads(json.dumps(dataclasses.asdict(self))).items() if k != "data_dir"}

    def steps(self, row: Truncated) -> tuple[int, ...]:
        """Updates after which a row attempts; the warm-up is a tenth of all.

        Raises:
            ValueError: a schedule that does not fit the run.
        """
        from modeling_essm.companions import attempt_steps

        if row.tau == 0:
            return ()
        until = self.warmup if row.every is None else row.attempts * row.every
        return attempt_steps(row.attempts, until, max_steps=self.updates)

    @property
    def warmup(self) -> int:
        return max(4, self.updates // 10)


# ---------------------------------------------------------------------------------------------------------------------
# One run.


def trained(
    settings: Settings, run: Run, task: Task, sizes: Sequence[int], after_step: Callable[..., object] | None = None
) -> dict[str, Any]:
    """Train a new model of so many modes a layer; its error, sizes and time.

    Args:
        after_step: called with the model, the optimizer and the update.
    """
    from essm_train.data.samples import MapSamples
    from essm_train.models import run_at_budget
    from modeling_essm.companions import DiagonalSSMConfig, DiagonalSSMForSequenceClassification

    data, test, _ = classification_tasks.load(settings.data(), task.name)
    args = settings.data().arguments(task.name, rate=run.rate, seed=run.seed)
    args.warmup_steps = settings.warmup
    device = torch.device(settings.device)
    torch.manual_seed(run.seed)
    fields = model_fields(task, settings, data) | {"parameterization": "lru", "norm": "batch"}
    config = DiagonalSSMConfig(**fields, state_sizes=list(sizes))
    model = DiagonalSSMForSequenceClassification(config).float().to(device)
    source, size = MapSamples(data.source.samples, run.seed), args.per_device_train_batch_size

    def next_forward() -> Any:
        batch = batch_of(data.reader, source.load(source.draw(size)), task, device)
        return functools.partial(run_at_budget, model, batch)

    hook = {} if after_step is None else {"after_step": functools.partial(after_step, model)}
    record: dict[str, Any] = {"parameters": sum(p.numel() for p in model.parameters())}
    record |= sweeps.train(model, next_forward, args, size, "samples", **hook)
    batches = [batch_of(data.reader, test[i : i + TEST_BATCH], task, device) for i in range(0, len(test), TEST_BATCH)]
    record[METRIC] = None if record["diverged"] else score(model, batches)
    return record | {"sizes": list(config.state_sizes)}


def perform(settings: Settings, run: Run, path: Path) -> dict[str, Any]:
    """Train both on one thread, measure, write the file in one move, return what it holds."""
    from essm_train.files import write_json
    from modeling_essm.companions import InTrainingTruncation

    task, row = TASKS[run.task or ""], ROWS[run.name]
    whole = [settings.state_size] * settings.num_hidden_layers
    with common.threads(1):
        record: dict[str, Any] = {"task": run.task, "model": run.name, "rate": run.rate, "seed": run.seed}
        _, _, identity = classification_tasks.load(settings.data(), task.name)
        record |= {"settings": settings.values(), "definition": definition(run, identity), "metric": "accuracy"}
        started = time.process_time()
        if row.tau == 0:
            record |= trained(settings, run, task, whole) | {"truncations": []}
        else:
            truncation = InTrainingTruncation(settings.steps(row), tau=row.tau)
            record |= trained(settings, run, task, whole, truncation.after_step)
            record["truncations"] = truncation.history
            record["born_small"] = trained(settings, run, task, record["sizes"])
        record[METRIC] = None if record[METRIC] is None else {"1": record[METRIC]}
        record["all_cpu_seconds"] = time.process_time() - started
        record["machine"] = common.machine(torch.device(settings.device))
    write_json(path, record)
    return record


def definition(run: Run, identity: dict[str, Any]) -> dict[str, Any]:
    task = dataclasses.asdict(TASKS[run.task or ""])
    return json.loads(json.dumps({"task": task | identity, "row": dataclasses.asdict(ROWS[run.name])}))


# ---------------------------------------------------------------------------------------------------------------------
# All runs.


def of_seeds(accuracies: Sequence[float]) -> dict[str, float]:
    """Best, mean of the best three, mean and deviation of all."""
    best = sorted(accuracies, reverse=True)
    return {"best": best[0], "top_3": statistics.fmean(best[:3]), **sweep_tables.mean(accuracies)}


def summarise(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Every row of every task: accuracy and time of what shrank, of what was born small, and their differences."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for record in records:
        groups.setdefault((record["task"], record["model"]), []).append(record)
    full = {(r["task"], r["seed"]): r["cpu_seconds"] for r in records if r["model"] == "full" and r[METRIC] is not None}
    results = []
    for (task, name), runs in groups.items():
        whole = [r for r in runs if r[METRIC] is not None and (r.get("born_small") or r)[METRIC] is not None]
        if not whole:
            continue
        mine = [1 - r[METRIC]["1"] for r in whole]
        result: dict[str, Any] = {"task": task, "row": name, "seeds": [r["seed"] for r in whole], "diverged": 0}
        result |= {"diverged": len(runs) - len(whole), "modes": sweep_tables.mean([sum(r["sizes"]) for r in whole])}
        result |= {"accuracy": of_seeds(mine), "by_seed": dict(zip(map(str, result["seeds"]), mine))}
        time_over_full = [r["cpu_seconds"] / full[task, r["seed"]] for r in whole if (task, r["seed"]) in full]
        if time_over_full:
            result["time_over_full"] = sweep_tables.mean(time_over_full)
        if "born_small" in whole[0]:
            born = [1 - r["born_small"][METRIC] for r in whole]
            result["born_small"] = of_seeds(born)
            result["difference"] = sweep_tables.mean([a - b for a, b in zip(mine, born)])
            result["time_over_born_small"] = sweep_tables.mean(
                [r["cpu_seconds"] / r["born_small"]["cpu_seconds"] for r in whole]
            )
        results.append(result)
    return results


def print_tables(results: list[dict[str, Any]]) -> None:
    for task in dict.fromkeys(r["task"] for r in results):
        rows = []
        for r in (r for r in results if r["task"] == task):
            born = r.get("born_small")
            cells = [r["row"].replace(" ", "_"), len(r["seeds"]), sweep_tables.shown(r["modes"])]
            for found in (r["accuracy"], born):
                cells += [sweep_tables.shown(found), *(f"{found[n]:.4f}" if found else "-" for n in ("best", "top_3"))]
            cells += [sweep_tables.shown(r.get(name), "+") for name in ("difference",)]
            cells += [sweep_tables.shown(r.get(name)) for name in ("time_over_full", "time_over_born_small")]
            rows.append(cells)
        print(f"\n{task}: accuracy")
        names = "shrunk best top_3 born_small best top_3 difference time/full time/born_small"
        common.table(f"row seeds modes {names}", rows)


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Perform what is missing, then print the tables and write them."""
    p = common.parser(__doc__)
    p.add_argument("--tasks", nargs="+", default=[*TASKS], choices=TASKS)
    p.add_argument("--data_dir", help="data folders, separated as in PATH; by default $ESSM_DATA, or data")
    p.add_argument("--test_samples", type=int, default=1000, help="at most, the same for every run of a task")
    rows = {name: Row(1, rates=(RATE,)) for name in ROWS}
    sweeps.add_arguments(p, rows, "runs/state_truncation", updates=4000)
    p.set_defaults(seeds=[0, 1, 2, 3, 4])
    args = p.parse_args(argv)
    sweeps.check_arguments(p, args, "test_samples")
    names = args.only or [*ROWS]
    if not args.table:
        device = str(common.pick_device(args.device))
        settings = Settings(args.data_dir, args.updates, test_samples=args.test_samples, device=device)
        if args.quick:
            small = {"updates": min(args.updates, 8), "state_size": 8, "test_samples": 20, "quick": True}
            settings = dataclasses.replace(settings, **small)
            names = [name for name in names if ROWS[name].every is None]  # others need longer runs
        for name in names:
            settings.steps(ROWS[name])  # before any work
        runs = sweeps.runs_of(rows, names, args, args.tasks)

        def wanted(run: Run) -> dict[str, Any]:
            identity = classification_tasks.load(settings.data(), TASKS[run.task or ""].name).identity
            return settings.values() | {"definition": definition(run, identity)}

        sweeps.sweep(runs, args.runs_dir, args.processes, functools.partial(perform, settings), wanted, METRIC)
    records = sweeps.collect_tasks(args.runs_dir, names, args.tasks)
    device, report = common.start("state_truncation", args, **records[0]["settings"])
    report["results"] = summarise(records)
    print_tables(report["results"])
    return common.finish(report, args, device)


if __name__ == "__main__":
    main()
