# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Tables of `benchmarks.elastic_states`: every row at its best rate, its controls, and both against their peers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from . import common, sweep_tables
from .elastic_measures import IN_USE
from .elastic_tasks import TASKS

TOLD = (
    *("mean_depth", "auroc", "rank_correlation", "error_correlation", "error_correlation_difficult"),
    *("depth_difficult", "depth_easy", "proposal_objective", "objective", "lowered"),
)
METRICS = ("energy", "rmsd_outside", "rmsd_loop", "gap", "failures", "detour")


def summarise(records: list[dict[str, Any]], names: Iterable[str]) -> list[dict[str, Any]]:
    """Every row at its best rate, and its controls, of every task, in this order: means and deviations over seeds."""
    results, curves = [], {}
    for task, model in itertools.product(TASKS, names):
        runs = [record for record in records if (record["task"], record["model"]) == (task, model)]
        if not runs:
            continue
        rates, whole = sweep_tables.at_best_rate(runs, "metric")
        curves[task, model] = {run["seed"]: curve_of(run) for run in whole if run["controls"]}
        for control in (None, *(whole[0]["controls"] if whole else ())):
            found = [r["own"] if control is None else r["controls"][control] for r in whole]
            if not found:
                continue
            row: dict[str, Any] = {
                "task": task,
                "model": model,
                "control": control,
                "seeds": [r["seed"] for r in whole],
            }
            row |= {"diverged": sum(r["diverged"] for r in runs), "parameters": whole[0]["parameters"]}
            row |= {"rate": whole[0]["rate"], "rates": {f"{rate:g}": value for rate, value in rates.items()}}
            for name in (*found[0]["values"], *TOLD):
                values = [f["values"].get(name, f.get(name, math.nan)) for f in found]
                if all(map(math.isfinite, values)):  # no correlation where depth is constant, no detour without arrival
                    row[name] = sweep_tables.mean(values)
            if control is None:
                row |= {name: sweep_tables.mean([r["cost"][name] for r in whole]) for name in ("flops", "seconds")}
                aligned = [f["around_events"] for f in found if "around_events" in f]
                if aligned:
                    row["around_events"] = [None if None in at else sweep_tables.mean([*at]) for at in zip(*aligned)]
            if control == IN_USE:
                row |= {
                    name: sweep_tables.mean([r["cost_in_use"][name] for r in whole]) for name in ("flops", "seconds")
                }
            results.append(row)
    return [row | relative(row, results) | at_equal_depth(row, results, curves) for row in results]


def curve_of(run: dict[str, Any]) -> list[tuple[float, float]]:
    """Mean depths, rising, and the task's metric there, of one run with a gate."""
    metric = TASKS[run["task"]].metric
    told = [run["own"], *(found for control, found in run["controls"].items() if of_gate(control))]
    return sorted((each["mean_depth"], each["values"][metric]) for each in told)


def of_gate(control: str | None) -> bool:
    """Whether depths are the gate's, whatever its thresholds: none and all are the ends of that."""
    return control in (None, "none", "all", IN_USE) or control.startswith("thresholds")


def at_equal_depth(
    row: dict[str, Any], results: list[dict[str, Any]], curves: dict[tuple[str, str], dict[int, Any]]
) -> dict[str, Any]:
    """What each seed of a row with a gate reaches at the mean depth of the ESM's, "at_esm_depth"; and how much more
    that is than what the ESM of that seed has there, "minus_esm", with its "seeds", those that both have."""
    esm = next((r for r in results if (r["task"], r["model"], r["control"]) == (row["task"], "ESM", None)), None)
    own, peers = (curves.get((row["task"], model), {}) for model in (row["model"], "ESM"))
    if esm is None or row["control"] is not None or not own:
        return {}
    depth = esm["mean_depth"]["mean"]
    there, theirs = (
        {seed: float(np.interp(depth, *zip(*curve))) for seed, curve in each.items()} for each in (own, peers)
    )
    found: dict[str, Any] = {"at_esm_depth": sweep_tables.mean([*there.values()])}
    if shared := [there[seed] - theirs[seed] for seed in there if seed in theirs]:
        found["minus_esm"] = sweep_tables.mean(shared) | {"seeds": len(shared)}
    return found


def relative(row: dict[str, Any], results: list[dict[str, Any]]) -> dict[str, float]:
    """Against its peers: as the poster's table has it "over_ssm", the task's metric as a multiple, and
    "flops_over_transformer"."""
    of_task = [r for r in results if r["task"] == row["task"]]
    peers = {r["model"]: r for r in of_task if r["control"] is None}
    metric, found = TASKS[row["task"]].metric, {}
    if "SSM" in peers and (least := peers["SSM"][metric]["mean"]):
        found["over_ssm"] = row[metric]["mean"] / least
    if "Transformer" in peers and "flops" in row:
        found["flops_over_transformer"] = row["flops"]["mean"] / peers["Transformer"]["flops"]["mean"]
    return found


def quality_by_depth(rows: list[dict[str, Any]], metric: str) -> tuple[list[float], list[float]]:
    """Mean depths, rising, and the metric there, of one model: no refinement, its gate at all thresholds, and all."""
    points = sorted((r["mean_depth"]["mean"], r[metric]["mean"]) for r in rows if of_gate(r["control"]))
    return [depth for depth, _ in points], [value for _, value in points]


def print_tables(results: list[dict[str, Any]]) -> None:
    """A table for each task; rows of controls are indented."""
    for task in dict.fromkeys(r["task"] for r in results):
        rows = [r for r in results if r["task"] == task]
        metrics = [name for name in METRICS if name in rows[0]]
        print(f"\n{task}")
        cells = []
        for r in rows:
            name = r["model"] if r["control"] is None else f"..{r['control']}"
            told = ("mean_depth", "auroc", "error_correlation", "error_correlation_difficult")
            shown = [sweep_tables.shown(r.get(metric)) for metric in (*metrics, *told)]
            shown += [f"{r[name]:.2f}" if name in r else "-" for name in ("over_ssm", "flops_over_transformer")]
            shown += [sweep_tables.shown(r.get("at_esm_depth")), sweep_tables.shown(r.get("minus_esm"), "+")]
            cost = ["-", "-"]
            if "flops" in r:
                seconds = r["seconds_in_turn"]["median"] if "seconds_in_turn" in r else r["seconds"]["mean"]
                cost = [f"{r['flops']['mean']:,.0f}", f"{seconds * 1e3:.2f}"]
            cells.append([name.replace(" ", "_"), len(r["seeds"]), *shown, *cost])
        columns = "mean_depth auroc errors errors_there over_ssm compute at_depth minus_esm flops ms"
        common.table(f"row seeds {' '.join(metrics)} {columns}", cells)
