# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Elastic state models at work, to be looked at: a walk through a maze, a chain before and after, quality by cost.

    python -m benchmarks.elastic_figures --data_dir data --runs_dir runs/elastic_states
    python -m benchmarks.elastic_figures --data_dir data --runs_dir runs/elastic_states --example 5 --seed 1

Draws what `benchmarks.elastic_states` has trained, each row at its best rate; a figure whose run is missing is left
out, and a line says so. The maze and the chain are the first ones of the test sets unless another is asked for, not
chosen by their looks.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from torch import Tensor

from essm_train.tasks import chains

from . import common, sweeps
from .elastic_measures import AROUND, IN_USE
from .elastic_states import ROWS, load_trained
from .elastic_tables import METRICS, quality_by_depth, summarise
from .elastic_tasks import TASKS, Maze, Repair, gate

FRAMES = 5
COLORS = "viridis"
OTHERWISE = {"mean everywhere": "x", "by chance": "+", "where difficult": "^"}
NAMES = {"energy": "energy of the repaired chain", "failures": "share of mazes not solved"}


# ---------------------------------------------------------------------------------------------------------------------
# A walk.


def walk_through(model: Any, task: Maze, example: int) -> dict[str, Any]:
    """One test maze walked by the values that a model says.

    Returns:
        maze (n, n) as it was at the start, start, goal, and for each step: place (T, 2), depth (T,), difficult (T,);
        "end" (2,), where the walk ended, and whether it "arrived".
    """
    before, walks = task.test_walks()[example], task.test_walks()[example : example + 1]
    seen = {name: x[0].numpy() for name, x in task.walk(model, walks, gate).items()}
    found: dict[str, Any] = {"maze": before.maze, "start": before.at, "goal": before.goal, "optimal": before.optimal}
    found |= {"place": seen["place"], "depth": seen["depths"], "difficult": seen["difficult"]}
    return found | {"end": walks[0].at, "arrived": walks[0].arrived}


def draw_walk(walked: dict[str, Any], most: int) -> Figure:
    """A strip of the maze at five moments, K_t as the colour of where it was spent, and K_t over time below."""
    T = len(walked["depth"])
    moments = np.unique(np.linspace(1, T, FRAMES).round().astype(int))
    figure = Figure(figsize=(3 * len(moments), 4.6), layout="constrained")
    grid = figure.add_gridspec(2, len(moments), height_ratios=(3, 1))
    for i, upto in enumerate(moments):
        axes = figure.add_subplot(grid[0, i])
        shade = np.choose(walked["maze"], (0.25, 1.0, 0.7))  # walls, cells, closed doors
        axes.imshow(shade, cmap="gray", vmin=0, vmax=1)
        places = np.vstack([walked["place"], walked["end"]])[: upto + 1]
        axes.plot(places[:, 1], places[:, 0], color="0.5", linewidth=1)
        order = np.argsort(walked["depth"][:upto], kind="stable")  # the deepest on top where a cell was met twice
        at = walked["place"][:upto][order]
        axes.scatter(
            at[:, 1], at[:, 0], c=walked["depth"][:upto][order], cmap=COLORS, vmin=0, vmax=most, s=45, zorder=2
        )
        axes.plot(walked["goal"][1], walked["goal"][0], "*", color="crimson", markersize=14)
        axes.plot(walked["start"][1], walked["start"][0], "x", color="crimson", markersize=9)
        axes.set_title(f"after {upto} steps", fontsize=9)
        axes.set_axis_off()
    below = figure.add_subplot(grid[1, :])
    bars = below.bar(np.arange(T), walked["depth"], color=_colors(walked["depth"], most))
    bars[0].set_label("depth K_t")
    hard = np.flatnonzero(walked["difficult"])
    below.plot(hard, np.full(len(hard), -0.35), "^", color="crimson", markersize=5, label="junction or door")
    below.set(xlabel="step", ylabel="K_t", xlim=(-1, T), ylim=(-0.7, most + 0.3), yticks=range(most + 1))
    below.xaxis.set_major_locator(MaxNLocator(integer=True))
    below.legend(fontsize=8, ncols=2, loc="lower right", bbox_to_anchor=(1, 1))
    end = "arrived" if walked["arrived"] else "not arrived"
    figure.suptitle(f"{end} in {T} steps, {walked['optimal']} at best (x start, star goal, light gray closed doors)")
    return figure


def _colors(depths: np.ndarray, most: int) -> Any:
    return colormaps[COLORS](depths / most)


# ---------------------------------------------------------------------------------------------------------------------
# A chain.


def repair(model: Any, task: Repair, example: int) -> dict[str, Any]:
    """One test window mended: places (64, 3) in A "native", as "read" and "repaired"; depth (63,), loop (63,) bool."""
    batch = task.window(example)
    refined, unrefined = task.follow(model, batch), task.follow(model, batch, lambda difficult: 0)

    def places(places: Tensor) -> np.ndarray:
        return np.vstack([np.zeros(3), places[0].numpy() * chains.BOND])

    found = {"native": places(batch["native"].cumsum(1)), "read": places(batch["observations"]["place"])}
    found |= {"repaired": places(refined["places"]), "depth": refined["depths"][0].numpy()}
    found["loop"] = batch["loop"][0].numpy()
    return found | {"energies": [float(each["refined"].mean()) for each in (unrefined, refined)]}


def draw_repair(found: dict[str, Any], most: int) -> Figure:
    """The chain as it was read and as it was mended, the native one behind both, and K_t residue by residue."""
    figure = Figure(figsize=(11, 7.5), layout="constrained")
    grid = figure.add_gridspec(2, 2, height_ratios=(3, 1))
    loop = np.flatnonzero(found["loop"]) + 1
    near = slice(max(1, loop[0] - 8), loop[-1] + 9)  # the loop and what it is held by; the first atom has no depth
    for i, name in enumerate(("read", "repaired")):
        axes: Any = figure.add_subplot(grid[0, i], projection="3d")
        axes.plot(*found["native"][near].T, color="0.75", linewidth=4, label="native")
        axes.plot(*found[name][near].T, color="0.35", linewidth=1)
        marks = _colors(found["depth"][near.start - 1 : near.stop - 1], most) if name == "repaired" else "0.35"
        axes.scatter(*found[name][near].T, c=marks, s=35, depthshade=False)
        axes.scatter(*found[name][loop].T, facecolors="none", edgecolors="crimson", s=110, label="disturbed loop")
        axes.set_title({"read": "as read", "repaired": "repaired, coloured by K_t"}[name])
        axes.set_aspect("equal")
        axes.legend(fontsize=8)
    below = figure.add_subplot(grid[1, :])
    below.bar(np.arange(1, len(found["depth"]) + 1), found["depth"], color=_colors(found["depth"], most))
    below.axvspan(loop[0] - 0.5, loop[-1] + 0.5, color="crimson", alpha=0.12, label="disturbed loop")
    below.set(xlabel="residue", ylabel="K_t", ylim=(0, most + 0.2), yticks=range(most + 1))
    below.legend(fontsize=8)
    before, after = found["energies"]
    figure.suptitle(f"energy a residue {before:.3f} unrefined, {after:.3f} refined, same weights")
    return figure


# ---------------------------------------------------------------------------------------------------------------------
# All rows.


def draw_rows(results: list[dict[str, Any]]) -> Figure:
    """Quality by FLOPs for every row, hollow where it is refined in use alone, and depth about where difficult
    stretches begin; a column a task."""
    tasks = [*dict.fromkeys(r["task"] for r in results)]
    figure = Figure(figsize=(8 * len(tasks), 8), layout="constrained")
    colors = dict(zip(ROWS, colormaps["tab20"].colors)) | {"ESM": "black"}
    panels = figure.subplots(2, len(tasks), squeeze=False, height_ratios=(5, 3))
    for axes, below, task in zip(*panels, tasks):
        rows = [r for r in results if r["task"] == task and r["control"] is None]
        metric = next(name for name in METRICS if name in rows[0])
        for r in rows:
            style = {"marker": "o" if r["model"].startswith("ESM") else "s", "color": colors[r["model"]]}
            value = r[metric]
            axes.errorbar(
                r["flops"]["mean"], value["mean"], yerr=value["deviation"], **style, capsize=2, label=r["model"]
            )
            for used in (u for u in results if (u["task"], u["model"], u["control"]) == (task, r["model"], IN_USE)):
                axes.plot(used["flops"]["mean"], used[metric]["mean"], **style, markerfacecolor="none")
            aligned = [np.nan if at is None else at["mean"] for at in r.get("around_events", [])]
            below.plot(np.arange(len(aligned)) - AROUND, aligned, color=colors[r["model"]])
        below.axvline(0, color="0.7", linewidth=1, zorder=0)
        scale = "log" if all(r[metric]["mean"] > 0 for r in rows) else "linear"
        axes.set(xscale="log", yscale=scale, xlabel="FLOPs a position", ylabel=NAMES[metric], title=task)
        axes.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1, 1))
        below.set(xlabel="steps after a difficult stretch begins", ylabel="mean depth K_t", ylim=(0, None))
        below.xaxis.set_major_locator(MaxNLocator(integer=True))
    return figure


def draw_depths(results: list[dict[str, Any]]) -> Figure:
    """Quality by mean depth of every row, the thresholds of its gate shifted, its own depth marked; a panel a task.

    Beside them the ESM's weights with its mean depth spent otherwise, and rows of one depth everywhere.
    """
    refinable = {(r["task"], r["model"]) for r in results if r["model"].startswith("ESM") or "at_esm_depth" in r}
    rows = [r for r in results if (r["task"], r["model"]) in refinable]
    tasks = [*dict.fromkeys(r["task"] for r in rows)]
    figure = Figure(figsize=(9 * len(tasks), 5.5), layout="constrained")
    colors = dict(zip(ROWS, colormaps["tab20"].colors)) | {"ESM": "black"}
    for axes, task in zip(figure.subplots(1, len(tasks), squeeze=False)[0], tasks):
        metric = TASKS[task].metric
        for r in (r for r in rows if r["task"] == task and r["control"] is None):
            of_model = [each for each in rows if each["task"] == task and each["model"] == r["model"]]
            depths, values = quality_by_depth(of_model, metric)
            color = colors[r["model"]]
            axes.plot(depths, values, color=color, linewidth=2 if r["model"] == "ESM" else 1)
            axes.plot(r["mean_depth"]["mean"], r[metric]["mean"], "o", color=color, label=r["model"])
        for name, mark in OTHERWISE.items():
            for r in (r for r in rows if (r["task"], r["model"], r["control"]) == (task, "ESM", name)):
                axes.plot(r["mean_depth"]["mean"], r[metric]["mean"], mark, color="black", label=f"ESM, {name}")
        axes.set(xlabel="mean depth K", ylabel=NAMES[metric], title=task, yscale="log")
        axes.set_xscale("symlog", linthresh=0.1)  # most is decided below one step
        axes.set_xlim(left=-0.01)
        axes.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1, 1))
    return figure


def main(argv: list[str] | None = None) -> list[Path]:
    """Draw what can be drawn, say what cannot; the files."""
    from essm_train.files import write_figure

    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--data_dir", default="data", help="folder with protein_chains")
    p.add_argument("--runs_dir", type=Path, default=Path("runs/elastic_states"))
    p.add_argument("--model", default="ESM", choices=[name for name, row in ROWS.items() if row.refined])
    p.add_argument("--seed", type=int, default=0, help="of the trained model")
    p.add_argument("--example", type=int, default=0, help="which maze, and which window, of the test sets")
    p.add_argument("--out_dir", type=Path, default=common.RESULTS)
    args = p.parse_args(argv)
    if args.example < 0:
        p.error(f"--example must be at least 0, got {args.example}")
    records = sweeps.collect(args.runs_dir)
    most, results = records[0]["settings"]["max_refine_depth"], summarise(records, ROWS)
    rates = {(r["task"], r["model"], seed): r["rate"] for r in results for seed in r["seeds"]}
    args.out_dir.mkdir(parents=True, exist_ok=True)
    written = []
    for name in TASKS:
        rate = rates.get((name, args.model, args.seed))
        if rate is None:
            print(f"not drawn: {args.model} of seed {args.seed} on {name}, {args.runs_dir} has no such run")
            continue
        task = TASKS[name](args.data_dir)
        model = load_trained(args.runs_dir / sweeps.Run(args.model, rate, args.seed, name).file, task)
        if isinstance(task, Repair):
            figure = draw_repair(repair(model, task, args.example), most)
        else:
            figure = draw_walk(walk_through(model, task, args.example), most)
        written.append(args.out_dir / f"elastic_states_{name}.png")
        write_figure(written[-1], figure, dpi=110)
    for name, figure in {"": draw_rows(results), "_depths": draw_depths(results)}.items():
        written.append(args.out_dir / f"elastic_states{name}.png")
        write_figure(written[-1], figure, dpi=110)
    print("\n".join(f"written: {path}" for path in written))
    return written


if __name__ == "__main__":
    main()
