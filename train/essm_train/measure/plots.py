# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Pictures of budget curves: quality over the budget, of one model or of several, and quality over time.

Axes end at what is possible: the budget's at the capacity, a metric's at 0 and, where it is a share, at 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patheffects import withStroke
from matplotlib.ticker import LogLocator, NullLocator

from essm_train.measure.metric import ACCURACY, BITS_PER_BYTE
from modeling_essm.budgets.curve import BudgetCurve
from modeling_essm.budgets.profile import BudgetProfile

MARKERS = {"collapse boundary": "^", "sweet spot": "*"}  # the star is drawn over the triangle


def budget_axis(axes: Axes, budgets: Iterable[int]) -> None:
    """x is the budget, from the smallest to the full one; log scale."""
    ticks = sorted(set(budgets))
    axes.set_xscale("log")
    axes.set_xticks(ticks, [str(K) for K in ticks])
    axes.xaxis.set_minor_locator(NullLocator())
    if len(ticks) > 1:
        axes.set_xlim(ticks[0], ticks[-1])


def metric_axis(axes: Axes, metric: str) -> None:
    """y is the metric: nothing below 0, and of an accuracy nothing above 1."""
    axes.margins(y=0.12)
    low, high = axes.get_ylim()
    axes.set_ylim(max(low, 0.0), min(high, 1.0) if metric == ACCURACY.name else high)


def draw_sweep(curve: BudgetCurve) -> Figure:
    """One curve with its marks."""
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.plot(curve.budgets, curve.values, "o-", color="tab:blue", markersize=5, zorder=2, clip_on=False)
    styles: dict[str, tuple[str, int, str]] = {
        "collapse boundary": ("none", 22, "at least 90% of the quality"),
        "sweet spot": ("tab:orange", 15, "within 2% of the full budget"),
    }
    for mark, (color, size, meaning) in styles.items():
        if mark in curve.marks:
            K = curve.marks[mark]
            label = f"K = {K}: {mark} ({meaning})"
            value = curve.values[curve.budgets.index(K)]
            style: dict[str, Any] = {"color": color, "markeredgecolor": "tab:red", "markersize": size, "zorder": 3}
            axes.plot(K, value, MARKERS[mark], label=label, clip_on=False, **style)
    budget_axis(axes, curve.budgets)
    axes.set_xlabel("spectral budget K (channels used, log scale)")
    held_out = "held-out text" if curve.metric == BITS_PER_BYTE.name else "held-out samples"
    axes.set_ylabel(f"{curve.title}, {held_out}")
    axes.set_title("One set of weights, every budget")
    axes.grid(alpha=0.3)
    metric_axis(axes, curve.metric)
    axes.legend(markerscale=0.6)
    return figure


def draw_curves(curves: Mapping[str, BudgetCurve]) -> Figure:
    """One curve per variant: errors as a band, star and triangle; one budget is a dashed line."""
    return draw_panels({"": curves}, {})


def draw_panels(
    ours: Mapping[str, Mapping[str, BudgetCurve]], theirs: Mapping[str, Mapping[str, BudgetCurve]]
) -> Figure:
    """Quality over the budget in the form of the paper's Figures 2 and 3: a panel a task, at most three in a row.

    Args:
        ours: of panels, by title, the curves by name. A name has one colour in all panels.
        theirs: the paper's, thin and dotted beside ours, and as ours in a panel that has none of ours.
    """
    panels = {title: (ours.get(title, {}), theirs.get(title, {})) for title in (*ours, *theirs)}
    names = list(dict.fromkeys(name for curves in (*ours.values(), *theirs.values()) for name in curves))
    colors = {name: f"C{i}" for i, name in enumerate(names)}
    across = min(len(panels), 3)
    down = -(-len(panels) // across)
    figure = Figure(figsize=(7, 4.5) if len(panels) == 1 else (4.6 * across, 3.4 * down + 0.8), layout="constrained")
    grid = figure.subplots(down, across, squeeze=False).flatten()
    label = _budget_label([*ours.values(), *theirs.values()])
    for axes, (title, (curves, papers)) in zip(grid, panels.items()):
        _draw_panel(axes, curves or papers, colors)
        for name, curve in papers.items() if curves else ():
            _draw_curve(axes, curve, colors[name], "the paper's", linestyle=":", linewidth=1.2)
            _draw_marks(axes, curve, "white", colors[name])
        metric_axis(axes, next(iter((curves or papers).values())).metric)
        axes.set_title(title)
        axes.set_xlabel(label if len(panels) == 1 else "")
    for axes in grid[len(panels) :]:
        axes.remove()
    handles = {label: line for axes in figure.axes for line, label in zip(*axes.get_legend_handles_labels())}
    if "the paper's" in handles:
        handles["the paper's"] = Line2D([], [], linestyle=":", color="gray")
    if len(panels) == 1:
        figure.axes[0].legend(handles.values(), handles)
    else:
        figure.legend(handles.values(), handles, title=label, loc="outside lower center", ncols=5)
    return figure


def _budget_label(panels: Sequence[Mapping[str, BudgetCurve]]) -> str:
    """Of the x axis: the budget, and what the marks mean that are drawn."""
    marks = {mark for curves in panels for curve in curves.values() if len(curve.budgets) > 1 for mark in curve.marks}
    shapes = {"sweet spot": "star", "collapse boundary": "triangle"}
    legend = [f"{shape}: {mark}" for mark, shape in shapes.items() if mark in marks]
    return "spectral budget K" + (f" ({', '.join(legend)})" if legend else "")


def _draw_curve(axes: Axes, curve: BudgetCurve, color: str, label: str, **style: Any) -> None:
    if len(curve.budgets) == 1:
        axes.axhline(curve.values[0], color=color, label=label, **{"linestyle": "--"} | style)
    else:
        axes.plot(curve.budgets, curve.values, color=color, label=label, clip_on=False, **style)


def _draw_marks(axes: Axes, curve: BudgetCurve, face: str, edge: str) -> None:
    for mark, marker in MARKERS.items() if len(curve.budgets) > 1 else ():
        if mark in curve.marks:
            K, size = curve.marks[mark], 12 if marker == "^" else 15
            value = curve.values[curve.budgets.index(K)]
            style: dict[str, Any] = {"color": face, "markeredgecolor": edge, "markersize": size, "zorder": 3}
            axes.plot(K, value, marker, clip_on=False, **style)


def _draw_panel(axes: Axes, curves: Mapping[str, BudgetCurve], colors: Mapping[str, str]) -> None:
    """Curves with their error bands and marks."""
    for name, curve in curves.items():
        elastic = len(curve.budgets) > 1
        _draw_curve(axes, curve, colors[name], name, **({"marker": "o", "markersize": 4} if elastic else {}))
        if elastic and curve.errors:
            low, high = ([v + sign * e for v, e in zip(curve.values, curve.errors)] for sign in (-1, 1))
            axes.fill_between(curve.budgets, low, high, color=colors[name], alpha=0.15)
        _draw_marks(axes, curve, colors[name], "black")
    budget_axis(axes, (K for curve in curves.values() if len(curve.budgets) > 1 for K in curve.budgets))
    axes.set_ylabel(next(iter(curves.values())).title)
    axes.grid(alpha=0.3)


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
        for mark, face in (("collapse boundary", "none"), ("sweet spot", "gold")):
            if mark not in quality.marks:
                continue
            K = quality.marks[mark]
            at = [row.median_ms for row in entry.rows if (row.phase, row.budget) == (phase, K)]
            style = {"color": face, "markeredgecolor": "tab:red", "markersize": 14, "zorder": 3}
            axes.plot(at, [value[K]] * len(at), MARKERS[mark], label=f"K = {K}: {mark}", clip_on=False, **style)
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
