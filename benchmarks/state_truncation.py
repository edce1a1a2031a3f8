# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Does a state space that shrinks while it trains end better than one born small? Balanced truncation (CompreSSM).

    python -m benchmarks.state_truncation --data_dir data --processes 2
    python -m benchmarks.state_truncation --tasks digits --only "tau 0.15" --seeds 0 --updates 1000
    python -m benchmarks.state_truncation --table --runs_dir runs/state_truncation

A run trains an LRU of 64 modes with balanced truncation in its warm-up, then, from the same seed and on the same
samples, a new one of the order that the first ended with; both are measured on the same test samples, and by the
processor time of their updates. "full" keeps its 64 modes; rows "every n" attempt at other distances.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from modeling_essm.companions import InTrainingTruncation, attempt_steps

from . import common, state_tasks, sweeps
from .state_tasks import METRIC, Settings
from .sweeps import Run, Sweep, mean

RATE = 1e-2
TASKS = {name: state_tasks.TASKS[name] for name in ("digits", "pictures", "reviews")}


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


def steps_of(settings: Settings, row: Truncated) -> tuple[int, ...]:
    """Updates after which a row attempts. Raises ValueError for a schedule that does not fit the run."""
    if row.tau == 0:
        return ()
    until = settings.warmup if row.every is None else row.attempts * row.every
    return attempt_steps(row.attempts, until, max_steps=settings.updates)


def perform(settings: Settings, run: Run) -> dict[str, Any]:
    row, lru = ROWS[run.name], {"parameterization": "lru", "norm": "batch"}
    whole = lru | {"state_sizes": [settings.state_size] * settings.num_hidden_layers}
    if row.tau == 0:
        model, record, _ = state_tasks.trained(settings, run, whole)
        return record | {"sizes": model.config.state_sizes, "truncations": []}
    truncation = InTrainingTruncation(steps_of(settings, row), tau=row.tau)
    model, record, _ = state_tasks.trained(settings, run, whole, truncation.after_step)
    record |= {"sizes": list(model.config.state_sizes), "truncations": truncation.history}
    _, record["born_small"], _ = state_tasks.trained(settings, run, lru | {"state_sizes": record["sizes"]})
    return record


def define(settings: Settings, run: Run) -> dict[str, Any]:
    steps_of(settings, ROWS[run.name])
    return {"task": state_tasks.identity(settings, run), "row": dataclasses.asdict(ROWS[run.name])}


def of_seeds(accuracies: Sequence[float]) -> dict[str, float]:
    """Best, mean of the best three, mean and deviation of all."""
    best = sorted(accuracies, reverse=True)
    return {"best": best[0], "top_3": statistics.fmean(best[:3]), **mean(accuracies)}


def summarise(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Every row of every task: accuracy and time of what shrank, of what was born small, and their differences."""
    full = {(r["task"], r["seed"]): r["cpu_seconds"] for r in records if r["model"] == "full" and not r["diverged"]}
    results = []
    for task, name in dict.fromkeys((r["task"], r["model"]) for r in records):
        runs = [r for r in records if (r["task"], r["model"]) == (task, name)]
        whole = [r for r in runs if r[METRIC] is not None and (r.get("born_small") or r)[METRIC] is not None]
        if not whole:
            continue
        mine = [1 - r[METRIC]["1"] for r in whole]
        result: dict[str, Any] = {"task": task, "row": name, "seeds": [r["seed"] for r in whole]}
        result |= {"diverged": len(runs) - len(whole), "modes": mean([sum(r["sizes"]) for r in whole])}
        result["accuracy"] = of_seeds(mine)
        if over := [r["cpu_seconds"] / full[task, r["seed"]] for r in whole if (task, r["seed"]) in full]:
            result["time_over_full"] = mean(over)
        if "born_small" in whole[0]:
            born = [1 - r["born_small"][METRIC]["1"] for r in whole]
            seconds = [r["cpu_seconds"] / r["born_small"]["cpu_seconds"] for r in whole]
            result |= {"born_small": of_seeds(born), "difference": mean([a - b for a, b in zip(mine, born)])}
            result["time_over_born_small"] = mean(seconds)
        results.append(result)
    return results


def main(argv: list[str] | None = None) -> dict[str, Any]:
    p = common.parser(__doc__, rounds=None)
    sweeps.add_data(p)
    sweeps.add_arguments(p, ROWS, "runs/state_truncation", 4000, TASKS, RATE, range(5))
    args = p.parse_args(argv)
    updates, test_samples, state_size = (min(args.updates, 20), 20, 8) if args.quick else (args.updates, 1000, 64)
    if args.quick:
        args.only = [name for name in args.only if ROWS[name].every is None]  # others need longer runs
    sizes = (updates, 16, 1, test_samples, state_size, max(4, updates // 10))  # one block; a tenth is the warm-up
    settings = Settings(args.data_dir, *sizes, args.quick, str(common.pick_device(args.device)))
    records, report = sweeps.run("state_truncation", args, Sweep(settings, perform, define, METRIC))
    report["results"] = summarise(records)
    return common.finish(report, args)


if __name__ == "__main__":
    main()
