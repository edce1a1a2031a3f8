# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Quality of a model with more and more of its modes masked: measured ratio by ratio, recorded, drawn."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from tqdm import tqdm
from transformers import PreTrainedModel

from essm_train.files import recorded, write_json
from essm_train.measure.plots import metric_axis
from essm_train.measure.scoring import HeldOut
from essm_train.models import capacity_of
from modeling_essm.companions import Plan, prune, restore


@dataclass(frozen=True)
class PruningCurve:
    """Quality by the share of modes that are pruned.

    Attributes:
        ratios: ascending, the first is 0. values: of the metric. kept: modes that stay in each layer.
    """

    metric: str
    higher_is_better: bool
    ratios: tuple[float, ...]
    values: tuple[float, ...]
    kept: tuple[tuple[int, ...], ...]

    @property
    def title(self) -> str:
        return self.metric.replace("_", " ")

    @property
    def losses(self) -> tuple[float, ...]:
        """What each ratio loses against the whole model; negative where it gains."""
        sign = -1.0 if self.higher_is_better else 1.0
        return tuple(sign * (value - self.values[0]) for value in self.values)

    def largest_within(self, most: float) -> float:
        """The largest ratio that, like every smaller one measured, loses at most so much."""
        within = itertools.takewhile(lambda row: row[1] <= most + 1e-9, zip(self.ratios, self.losses))
        return max((ratio for ratio, _ in within), default=0.0)

    def record(self) -> dict[str, Any]:
        """For JSON."""
        return {"metric": self.metric, "ratios": self.ratios, "values": self.values, "kept": self.kept}

    def markdown(self) -> str:
        """The ladder as a table."""
        lines = [f"| pruned | {self.title} | loss | modes kept by layer |", "|---|---|---|---|"]
        for ratio, value, loss, kept in zip(self.ratios, self.values, self.losses, self.kept):
            lines.append(f"| {ratio:.1%} | {value:.4f} | {loss:+.4f} | {' '.join(map(str, kept))} |")
        return "\n".join(lines) + "\n"

    def draw(self, chosen: float, label: str) -> Figure:
        """Quality over the ratio above, modes kept by layer below; a line at the chosen ratio."""
        figure = Figure(figsize=(7, 6), layout="constrained")
        above, below = figure.subplots(2, 1, sharex=True)
        above.plot(self.ratios, self.values, "o-", markersize=4, label=label, clip_on=False)
        for i, modes in enumerate(zip(*self.kept)):
            below.plot(self.ratios, modes, "o-", markersize=3, color=f"C{i % 10}", label=f"layer {i}", clip_on=False)
        for axes in (above, below):
            axes.axvline(chosen, color="tab:red", linestyle="--", label=f"chosen: {chosen:.1%}")
            axes.grid(alpha=0.3)
            axes.legend(fontsize=8, ncols=2)
        above.set_ylabel(f"{self.title}, held out")
        metric_axis(above, self.metric)
        below.set(ylabel="modes kept", xlabel="share that is pruned, of all modes or (mode_index) of their ranks")
        below.set_ylim(bottom=0)
        below.set_xlim(0, max(self.ratios[-1], chosen))
        return figure


def measure_ratios(
    model: PreTrainedModel,
    plan: Callable[[float], Plan],
    ratios: Sequence[float],
    held_out: HeldOut,
    path: Path,
    identity: Mapping[str, Any],
    overwrite: bool = False,
) -> PruningCurve:
    """Quality at every ratio, with a progress bar. The model is left without masks.

    Args:
        plan: what to keep at a ratio. ratios: ascending, the first is 0.
        path: JSON of what is measured so far, which a run that was cut off reads.
        identity: what the figures depend on. overwrite: begin anew where `path` has figures of another identity.
    Raises:
        ValueError: `path` has figures of another identity.
    """
    partial: dict[str, Any] = {"identity": json.loads(json.dumps(identity)), "values": {}}
    found = recorded(path) or partial  # nothing, or something damaged: all is measured
    if differ := [name for name, value in partial["identity"].items() if found["identity"].get(name) != value]:
        theirs, ours = ({name: x["identity"].get(name) for name in differ} for x in (found, partial))
        if not overwrite:
            raise ValueError(f"{path} was measured with {theirs}, got {ours}: take another output_dir, or --overwrite")
    else:
        partial = found
    values, kept = partial["values"], []
    for ratio in (bar := tqdm(ratios, unit="ratio", disable=None)):
        chosen, key = plan(ratio), f"{ratio:.6f}"
        kept.append(tuple(chosen.kept))
        if key not in values:
            prune(model, chosen)
            try:
                values[key] = held_out.value(model, capacity_of(model))
            finally:
                restore(model)
            write_json(path, partial)
        bar.set_postfix_str(f"{ratio:.0%}: {held_out.metric.name} {values[key]:.4f}")
    measured = tuple(values[f"{ratio:.6f}"] for ratio in ratios)
    return PruningCurve(*held_out.metric, tuple(ratios), measured, tuple(kept))
