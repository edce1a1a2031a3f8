# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Pictures of budget curves: quality over the budget, of one model or of several, and quality over time.

Axes end at what is possible: the budget's at the capacity, a metric's at 0 and, where it is a share, at 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patheffects import withStroke
from matplotlib.ticker import LogLocator, NullLocator

from modeling_essm.budgets.curve import BudgetCurve
from modeling_essm.budgets.profile import BudgetProfile

SHAPES = {"collapse boundary": ("^", 12, "triangle"), "sweet spot": ("*", 15, "star")}  # the star is drawn on top
Panels = Mapping[str, Mapping[str, BudgetCurve]]


def metric_axis(axes: Axes, metric: str) -> None:
    """y is the metric: nothing below 0, and no accuracy above 1."""
    axes.margins(y=0.12)
    low, high = axes.get_ylim()
    axes.set_ylim(max(low, 0.0), min(high, 1.0) if metric == "accuracy" else high)


def draw_curves(curves: Mapping[str, BudgetCurve]) -> Figure:
    """One curve per variant: errors as a band, star and triangle; one budget is a dashed line."""
    return draw_panels({"": curves}, {})


def draw_panels(ours: Panels, theirs: Panels) -> Figure:
    """Quality over the budget in the form of the paper's Figures 2 and 3: a panel a task, at most three in a row.

    Args:
        ours: by title of the panel, the curves by name. A name has one colour in all panels.
        theirs: the paper's, thin and dotted beside ours, and as ours in a panel that has none of ours.
    """
    panels = {title: (ours.get(title, {}), theirs.get(title, {})) for title in (*ours, *theirs)}
    curves = [pair for part in (ours, theirs) for panel in part.values() for pair in panel.items()]
    colors = {name: f"C{i}" for i, name in enumerate(dict.fromkeys(name for name, _ in curves))}
    across, down = min(len(panels), 3), -(-len(panels) // 3)
    figure = Figure(figsize=(7, 4.5) if len(panels) == 1 else (4.6 * across, 3.4 * down + 0.8), layout="constrained")
    grid = figure.subplots(down, across, squeeze=False).flatten()
    marks = {mark for _, curve in curves if len(curve.budgets) > 1 for mark in curve.marks}
    legend = [f"{SHAPES[mark][2]}: {mark}" for mark in reversed(SHAPES) if mark in marks]
    label = "spectral budget K" + (f" ({', '.join(legend)})" if legend else "")
    for axes, (title, (mine, papers)) in zip(grid, panels.items()):
        shown = mine or papers
        for name, curve in shown.items():
            _draw_curve(axes, curve, name, colors[name], "black", marker="o", markersize=4)
        for name, curve in papers.items() if mine else ():
            _draw_curve(axes, curve, "the paper's", colors[name], "white", linestyle=":", linewidth=1.2)
        axes.set_xscale("log")
        ticks = sorted({K for curve in shown.values() if len(curve.budgets) > 1 for K in curve.budgets})
        axes.set_xticks(ticks, [str(K) for K in ticks])
        axes.xaxis.set_minor_locator(NullLocator())
        if len(ticks) > 1:
            axes.set_xlim(ticks[0], ticks[-1])
        first = next(iter(shown.values()))
        metric_axis(axes, first.metric)
        axes.set(title=title, xlabel=label if len(panels) == 1 else "", ylabel=first.title)
        axes.grid(alpha=0.3)
    for axes in grid[len(panels) :]:
        axes.remove()
    handles = {name: line for axes in figure.axes for line, name in zip(*axes.get_legend_handles_labels())}
    if "the paper's" in handles:
        handles["the paper's"] = Line2D([], [], linestyle=":", color="gray")
    if len(panels) == 1:
        figure.axes[0].legend(handles.values(), handles)
    else:
        figure.legend(handles.values(), handles, title=label, loc="outside lower center", ncols=5)
    return figure


def _draw_curve(axes: Axes, curve: BudgetCurve, label: str, color: str, edge: str, **style: Any) -> None:
    """A line with its band of errors and its marks; a model of one budget is a level line."""
    if len(curve.budgets) == 1:
        axes.axhline(curve.values[0], color=color, label=label, **{"linestyle": "--"} | style)
        return
    axes.plot(curve.budgets, curve.values, color=color, label=label, clip_on=False, **style)
    if curve.errors and edge == "black":
        low, high = ([v + sign * e for v, e in zip(curve.values, curve.errors)] for sign in (-1, 1))
        axes.fill_between(curve.budgets, low, high, color=color, alpha=0.15)
    face, edge = (color, edge) if edge == "black" else (edge, color)
    value = dict(zip(curve.budgets, curve.values))
    for mark in SHAPES:
        if K := curve.marks.get(mark):
            _draw_mark(axes, mark, [(K, value[K])], face, edge)


def _draw_mark(axes: Axes, mark: str, points: list[tuple[float, float]], face: str, edge: str, label: str = "") -> None:
    """The star or the triangle at points (x, y)."""
    marker, size, _ = SHAPES[mark]
    style: dict[str, Any] = {"color": face, "markeredgecolor": edge, "markersize": size, "zorder": 3}
    axes.plot(*zip(*points), marker, clip_on=False, linestyle="none", label=label or None, **style)


def draw_profile(profile: BudgetProfile) -> Figure:
    """Quality against the time of a decoded token (of a call, for a classifier): a panel per device."""
    quality = profile.quality
    value = dict(zip(quality.budgets, quality.values))
    figure = Figure(figsize=(7 * len(profile.devices), 4.8), layout="constrained")
    panels = figure.subplots(1, len(profile.devices), sharey=True, squeeze=False)[0]
    for axes, entry in zip(panels, profile.devices.values()):
        phase = entry.phases[-1]
        for i, size in enumerate(entry.batch_sizes(phase)):
            rows = [row for K, row in entry.at(phase, size).items() if K in value]
            x, y = [row.median_ms for row in rows], [value[row.budget] for row in rows]
            spread = [[r.median_ms - r.min_ms for r in rows], [r.max_ms - r.median_ms for r in rows]]
            axes.errorbar(x, y, xerr=spread, fmt="none", ecolor=f"C{i}", elinewidth=0.8, alpha=0.7)
            axes.plot(x, y, "o-", color=f"C{i}", markersize=4, label=f"batch size {size}", clip_on=False)
            style: dict[str, Any] = {"textcoords": "offset points", "ha": "center", "fontsize": 8, "color": f"C{i}"}
            style["path_effects"] = [withStroke(linewidth=2.5, foreground="white")]
            for row, point in zip(rows, zip(x, y)):
                axes.annotate(str(row.budget), point, (0, 7), zorder=4, **style)
        for mark, K in quality.marks.items():
            at = [(row.median_ms, value[K]) for row in entry.rows if (row.phase, row.budget) == (phase, K)]
            if not at:  # a budget that was not timed on this device
                continue
            face = "gold" if mark == "sweet spot" else "none"
            _draw_mark(axes, mark, at, face, "tab:red", f"K = {K}: {mark}")
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7)))
        axes.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
        axes.xaxis.set_minor_locator(NullLocator())
        per = "decoded token" if phase == "decode" else f"call over {entry.prompt_length} positions"
        axes.set_xlabel(f"ms per {per}: median, and range of the rounds (log scale)")
        axes.set_title(f"{entry.device}\n{entry.dtype}, CPU threads: {entry.threads}", fontsize=10)
        axes.grid(alpha=0.3)
        axes.legend(markerscale=0.7)
    metric_axis(panels[0], quality.metric)
    better = "higher" if quality.higher_is_better else "lower"
    panels[0].set_ylabel(f"{quality.title} of held-out data ({better} is better)")
    return figure
