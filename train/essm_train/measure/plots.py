# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Pictures of budget curves: quality over the budget, of one model or of several, and quality over time.

Axes end at what is possible: the budget's at the capacity, a metric's at 0 and, where it is a share, at 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
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
    """One curve per task or variant, in the form of the paper's Figure 2: errors as a band, star and triangle; one
    budget is a dashed line."""
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for i, (label, curve) in enumerate(curves.items()):
        color = f"C{i}"
        if len(curve.budgets) == 1:
            axes.axhline(curve.values[0], linestyle="--", color=color, label=label)
            continue
        axes.plot(curve.budgets, curve.values, "o-", color=color, markersize=4, label=label, clip_on=False)
        low, high = ([v + sign * e for v, e in zip(curve.values, curve.errors)] for sign in (-1, 1))
        axes.fill_between(curve.budgets, low, high, color=color, alpha=0.15)
        for mark, marker in MARKERS.items():
            if mark in curve.marks:
                K, size = curve.marks[mark], 12 if marker == "^" else 15
                value = curve.values[curve.budgets.index(K)]
                style: dict[str, Any] = {"color": color, "markeredgecolor": "black", "markersize": size, "zorder": 3}
                axes.plot(K, value, marker, clip_on=False, **style)
    elastic = [curve for curve in curves.values() if len(curve.budgets) > 1]
    budget_axis(axes, (K for curve in elastic for K in curve.budgets))
    shapes = {"sweet spot": "star", "collapse boundary": "triangle"}
    legend = [f"{shape}: {mark}" for mark, shape in shapes.items() if any(mark in curve.marks for curve in elastic)]
    axes.set_xlabel("spectral budget K" + (f" ({', '.join(legend)})" if legend else ""))
    first = next(iter(curves.values()))
    axes.set_ylabel(first.title)
    axes.grid(alpha=0.3)
    metric_axis(axes, first.metric)
    axes.legend()
    return figure


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
