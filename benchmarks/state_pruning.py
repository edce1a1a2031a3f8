# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""How much of a trained diagonal SSM can go, by which ranking: AIRE-Prune, LAST and baselines at every ratio.

    python -m benchmarks.state_pruning --data_dir data --processes 2
    python -m benchmarks.state_pruning --tasks digits --only s5 --seeds 0 --updates 300
    python -m benchmarks.state_pruning --table --runs_dir runs/state_pruning

A run trains a model of more modes than its task needs, prunes it by every method at every ratio, without training in
between, and measures the error on the same test samples. Reported of each method: the largest ratio up to which no
ratio loses more than a point, paired with the whole model seed by seed; the area under accuracy over ratio; the
steepest fall between two ratios; how far energies of modes add up to the energy of what is pruned; and every certified
bound over the gain of what is pruned, on a dense grid.
"""

from __future__ import annotations

import copy
import itertools
import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import nn

from essm_train.files import write_figure
from modeling_essm.companions import (
    allocate,
    balanced_truncate,
    certify,
    hinf_norm,
    importance,
    prune,
    remove,
    state_layers,
)
from modeling_essm.companions.pruning.scores import energy
from modeling_essm.companions.systems import DiagonalSystem
from modeling_essm.companions.truncation.balancing import gramians, matrices

from . import common, state_tasks, sweeps
from .state_tasks import METRIC, Settings
from .sweeps import Run, Sweep, mean

RATIOS = tuple(round(0.05 * i, 2) for i in range(20))
LOOKED_AT = (0.2, 0.5, 0.8)  # where energies and certificates are compared with what they speak of
RATE = 4e-3
POINT = 0.01
# Name: method of `importance`, scope of `allocate`; None truncates by balancing.
METHODS: dict[str, tuple[str | None, str]] = {
    "aire": ("aire", "global"),
    "aire_exact": ("aire_exact", "global"),
    "last": ("last", "global"),
    "lamp": ("lamp", "global"),
    "global energy": ("energy", "global"),
    "global hinf": ("hinf", "global"),
    "global magnitude": ("magnitude", "global"),
    "uniform energy": ("energy", "uniform"),
    "uniform hinf": ("hinf", "uniform"),
    "uniform magnitude": ("magnitude", "uniform"),
    "random": ("random", "uniform"),
    "balanced": (None, "uniform"),
}
MODELS: dict[str, dict[str, Any]] = {
    "s5": {"parameterization": "s5", "state_size": 64, "bidirectional": True},
    "s4d": {"parameterization": "s4d", "state_size": 32, "bidirectional": True},
}
TASKS = {name: state_tasks.TASKS[name] for name in ("digits", "reviews", "words")}
CHOICE = {"aire": ("AIRE", "C0"), "last": ("LAST", "C3")}
CHOICE |= {"balanced": ("balanced truncation", "C2"), "random": ("random", "0.6")}


def pruned(model: nn.Module, method: str, ratio: float, seed: int) -> tuple[nn.Module, list[int]]:
    """A smaller copy of a model, and the modes that each layer has left."""
    value, scope = METHODS[method]
    smaller = copy.deepcopy(model)
    if value is None:
        modes = [layer.read().lam.shape[-1] for layer in state_layers(model)]
        report = balanced_truncate(smaller, sizes=[max(1, n - round(ratio * n)) for n in modes])
        return smaller, [layer.after for layer in report.layers]
    plan = allocate(importance(model, value, seed=seed), amount=ratio, scope=scope)
    prune(smaller, plan)
    remove(smaller)  # as masks, but faster
    return smaller, plan.kept


def additivity(system: DiagonalSystem, keep: torch.Tensor) -> float:
    """The energy of the modes that are not kept over the sum of their energies.

    The energy of a set is that of its complex impulse response, cross terms between modes included, of one direction.
    """
    B = torch.where(keep if system.siso else keep[:, None], 0.0, system.B)
    part = DiagonalSystem(system.lam, B, system.C[0] if system.bidirectional else system.C, "complex")
    (P, _), (_, _, C) = gramians(part), matrices(part)
    together = float((C @ P @ C.mH).diagonal(dim1=-2, dim2=-1).sum().real)
    return together / float(energy(part).sum())


def cut_layers(model: nn.Module, ratio: float) -> list[dict[str, float]]:
    """For each layer that AIRE prunes: "energy", see `additivity`, the bounds on the gain of what is pruned, and that
    gain as "measured"."""
    plan, found = allocate(importance(model, "aire"), amount=ratio), []
    for layer, keep, bounds in zip(state_layers(model), plan.keep, certify(plan, model)):
        if not keep.all():
            system = layer.read()
            found.append({"energy": additivity(system, keep)} | bounds | {"measured": hinf_norm(system, ~keep)})
    return found


def perform(settings: Settings, run: Run) -> dict[str, Any]:
    model, record, score = state_tasks.trained(settings, run, MODELS[run.name])
    curves, ratios = {}, RATIOS[:: 9 if settings.quick else 1]
    for method in METHODS if not record["diverged"] else ():
        smaller = [pruned(model, method, ratio, run.seed) for ratio in ratios]
        errors, kept = [score(one) for one, _ in smaller], [modes for _, modes in smaller]
        curves[method] = {"ratios": ratios, "errors": errors, "kept": kept}
    cut = {str(ratio): cut_layers(model, ratio) for ratio in LOOKED_AT} if curves else {}
    return record | {"pruned": curves, "cut_layers": cut}


def define(settings: Settings, run: Run) -> dict[str, Any]:
    return {"task": state_tasks.identity(settings, run), "model": MODELS[run.name]}


def largest_within(errors: Sequence[float], ratios: Sequence[float]) -> float:
    """The largest ratio up to which none loses more than a point against the first, the whole model."""
    lost = [error - errors[0] > POINT + 1e-9 for error in errors]
    return ratios[lost.index(True) - 1] if True in lost else ratios[-1]


def area_of(curve: dict[str, Any]) -> float:
    """Under accuracy over ratio by trapezoids, over the width."""
    points = [*zip(curve["ratios"], curve["errors"])]
    under = sum((1 - (e + f) / 2) * (y - x) for (x, e), (y, f) in itertools.pairwise(points))
    return under / (points[-1][0] - points[0][0])


def by_model(records: list[dict[str, Any]]) -> dict[tuple[str, str], list[dict[str, Any]]]:
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for record in records:
        if not record["diverged"]:
            groups.setdefault((record["task"], record["model"]), []).append(record)
    return groups


def summarise(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Every method on every task and model: means and deviations over seeds."""
    results = []
    for ((task, model), runs), method in itertools.product(by_model(records).items(), METHODS):
        curves = [r["pruned"][method] for r in runs]
        ratios, areas = curves[0]["ratios"], [area_of(curve) for curve in curves]
        lost = [[e - curve["errors"][0] for e in curve["errors"]] for curve in curves]
        result: dict[str, Any] = {"task": task, "model": model, "method": method, "seeds": [r["seed"] for r in runs]}
        result |= {"accuracy": mean([1 - r[METRIC]["1"] for r in runs]), "area": mean(areas)}
        result["area_minus_aire"] = mean([a - area_of(r["pruned"]["aire"]) for a, r in zip(areas, runs)])
        result["largest_within_a_point"] = mean([largest_within(curve["errors"], ratios) for curve in curves])
        result["steepest_fall"] = mean([max(b - a for a, b in itertools.pairwise(values)) for values in lost])
        results.append(result | {"ratios": ratios, "lost": [mean(values) for values in zip(*lost)]})
    return results


def over_truth(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """By task and model, over layers, seeds and ratios: energies of sets over sums, and bounds over measured gains."""
    rows = []
    for (task, model), runs in by_model(records).items():
        layers = [layer for r in runs for found in r["cut_layers"].values() for layer in found]
        for name in [name for name in layers[0] if name != "measured"] if layers else ():
            found = [layer[name] / (1 if name == "energy" else layer["measured"]) for layer in layers]
            spread = {"least": min(found), "median": statistics.median(found), "largest": max(found)}
            rows.append({"task": task, "model": model, "of": name, "layers": len(found)} | spread)
    return rows


def draw(results: list[dict[str, Any]]) -> Figure:
    """What to use when: accuracy that AIRE, LAST and balanced truncation lose with as many modes left in all.

    The band is a deviation over seeds.
    """
    panels = list(dict.fromkeys((r["task"], r["model"]) for r in results))
    figure = Figure(figsize=(4 * len(panels) / 2, 6.5), layout="constrained")
    grid = figure.subplots(2, -(-len(panels) // 2), squeeze=False)
    for axes, panel in zip(grid.T.flat, panels):
        for method, (label, color) in CHOICE.items():
            result = next(r for r in results if (r["task"], r["model"], r["method"]) == (*panel, method))
            lost, wide = (100 * np.array([x[name] for x in result["lost"]]) for name in ("mean", "deviation"))
            axes.plot(result["ratios"], lost, color=color, label=label)
            axes.fill_between(result["ratios"], lost - wide, lost + wide, color=color, alpha=0.12, linewidth=0)
        axes.axhline(1, color="black", linewidth=0.8, linestyle=":")
        axes.set(title=", ".join(panel), xlabel="share of modes removed", ylabel="points of accuracy lost")
        axes.set_ylim(-3, 40)
        axes.grid(alpha=0.3)
    figure.legend(*grid[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=len(CHOICE), fontsize=9)
    return figure


def main(argv: list[str] | None = None) -> dict[str, Any]:
    p = common.parser(__doc__, rounds=None)
    sweeps.add_data(p)
    sweeps.add_arguments(p, MODELS, "runs/state_pruning", 600, TASKS, RATE)
    args = p.parse_args(argv)
    sizes = (min(args.updates, 3), 8, 2, 20) if args.quick else (args.updates, 32, 2, 600)
    settings = Settings(args.data_dir, *sizes, quick=args.quick, device=str(common.pick_device(args.device)))
    records, report = sweeps.run("state_pruning", args, Sweep(settings, perform, define, METRIC))
    report["results"], report["certificates"] = summarise(records), over_truth(records)
    common.table(report["certificates"])
    if report["results"]:  # a run that diverged has none
        write_figure(args.report.with_suffix(".png"), draw(report["results"]))
    return common.finish(report, args)


if __name__ == "__main__":
    main()
