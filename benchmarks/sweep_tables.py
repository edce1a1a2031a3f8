# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Summaries of the runs of a sweep: each model at its best learning rate, and the tables of them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

from . import common

SPEED = "_per_cpu_second"  # how the name of a speed ends
COLUMNS = "model parameters DxL cache_bytes rate seeds"


def mean(values: Sequence[float]) -> dict[str, float]:
    """And standard deviation (n - 1)."""
    return {"mean": statistics.fmean(values), "deviation": statistics.stdev(values) if len(values) > 1 else 0.0}


def at_best_rate(records: list[dict[str, Any]], metric: str) -> tuple[dict[float, float | None], list[dict[str, Any]]]:
    """The runs of one model at its best rate: of the lowest mean over budgets and the seeds that all its rates have.

    A diverged run rules its rate out.

    Args:
        metric: what runs hold for each budget, better where lower.
    Returns:
        The mean at each rate, None if it is ruled out; and the runs by seed, none if every rate is.
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
    whole = {rate: value for rate, value in means.items() if value is not None}
    return means, by_rate[min(whole, key=lambda rate: whole[rate])] if whole else []


def summarise(records: list[dict[str, Any]], metric: str) -> dict[str, Any]:
    """One model at its best rate, as `at_best_rate` finds it."""
    means, runs = at_best_rate(records, metric)
    first = records[0]
    kept = ("task", "model", "metric", "definition", "parameters", "sizes", "cache_bytes")
    result = {name: first[name] for name in kept if name in first}
    result |= {"rates": {f"{rate:g}": value for rate, value in means.items()}, "best_rate": None}
    if not runs:
        return result
    best = runs[0]["rate"]
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
    cache = "-" if result.get("cache_bytes") is None else f"{result['cache_bytes']:,}"
    return [result["model"].replace(" ", "_"), f"{result['parameters']:,}", shape, cache, rate, seeds]


def shown(value: dict[str, float] | None, sign: str = "") -> str:
    return f"{value['mean']:{sign}.4f}±{value['deviation']:.4f}" if value else "-"


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
