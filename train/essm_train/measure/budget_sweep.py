# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Quality and speed of one model at every spectral budget: a metric, tokens/s, a table, a curve and a JSON file.

The metric of a language model is bits per byte. Context rule: the text is cut into blocks of `block_size` tokens that
share one token with the next. The first token of a block is context only; every other byte is predicted once, from the
bytes before it in its own block (1 to block_size - 1 of them). Special tokens are not scored. A model that is uniform
over 256 symbols gets 8 bits per byte.

Sweet spot: the smallest budget whose bits per byte are at most 2% above those of the full (largest) budget. Collapse
boundary: the smallest budget that keeps 90% of the quality, with quality = 1 / bits per byte relative to the full
budget: at most 1 / 0.9, or 11.1% above it. Below that boundary the model falls apart. Of a metric where higher is
better, such as accuracy: at least 98% and at least 90% of its value at the full budget.

tokens/s is the speed of forward passes over whole blocks without a cache (prefill): after a warm-up, the median over
rounds in which every budget runs once, so that a machine that slows down hits all budgets alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator
from torch import Tensor
from transformers import PreTrainedModel

from essm_train.files import write_figure, write_json
from essm_train.measure.metric import ACCURACY, BITS_PER_BYTE, Metric, load_metric
from essm_train.measure.scoring import Predictor, num_scored, total_nats
from essm_train.measure.timing import tokens_per_second
from essm_train.models import capacity_of
from modeling_essm.training.budget_dropout import BUDGETS, clip_budgets

SWEET_SPOT_TOLERANCE = 0.02
COLLAPSE_QUALITY = 0.90


@dataclass(frozen=True)
class BudgetSweep:
    """One entry per budget, ascending; the last one is the full budget.

    Attributes:
        budgets: K. values, tokens_per_second: the metric and the speed at each K.
        metric: what the values are.
    """

    budgets: tuple[int, ...]
    values: tuple[float, ...]
    tokens_per_second: tuple[float, ...]
    metric: Metric = BITS_PER_BYTE

    @property
    def bits_per_byte(self) -> tuple[float, ...]:
        """The values of a language model's sweep."""
        if self.metric != BITS_PER_BYTE:
            raise AttributeError(f"this sweep measured {self.metric.name}: read `values`")
        return self.values

    @property
    def sweet_spot(self) -> int:
        """The smallest K within 2% of the full budget."""
        better = 1 - SWEET_SPOT_TOLERANCE if self.metric.higher_is_better else 1 + SWEET_SPOT_TOLERANCE
        return self._smallest_within(self.values[-1] * better)

    @property
    def collapse_boundary(self) -> int:
        """The smallest K that keeps 90% of the quality."""
        full = self.values[-1]
        higher = self.metric.higher_is_better
        return self._smallest_within(full * COLLAPSE_QUALITY if higher else full / COLLAPSE_QUALITY)

    def _smallest_within(self, limit: float) -> int:
        sign = 1 if self.metric.higher_is_better else -1
        return next(K for K, value in zip(self.budgets, self.values) if sign * value >= sign * limit)

    def table(self) -> str:
        """For people."""
        name = "bits/byte" if self.metric == BITS_PER_BYTE else self.metric.name
        lines = [f"{'K':>4}  {name:>9}  {'vs full':>8}  {'tokens/s':>9}"]
        full = self.values[-1]
        for K, value, speed in zip(self.budgets, self.values, self.tokens_per_second):
            change = f"{value / full - 1:>+8.1%}" if full else f"{'n/a':>8}"
            line = f"{K:>4}  {value:>9.4f}  {change}  {speed:>9,.0f}"
            line += "  * sweet spot" if self.sweet_spot == K else ""
            line += "  ^ collapse boundary" if self.collapse_boundary == K else ""
            lines.append(line)
        return "\n".join(lines)

    def record(self) -> dict[str, Any]:
        """For JSON: a language model's values are called bits_per_byte, those of others values, with the metric."""
        values: dict[str, Any] = {"bits_per_byte": self.values}
        if self.metric != BITS_PER_BYTE:
            values = {"metric": self.metric._asdict(), "values": self.values}
        marks = {"sweet_spot": self.sweet_spot, "collapse_boundary": self.collapse_boundary}
        return {"budgets": self.budgets, **values, "tokens_per_second": self.tokens_per_second, **marks}

    def save(self, output_dir: Path, **context: object) -> None:
        """Write budget_sweep.json, with whatever `context` should stand beside the figures, and budget_sweep.png."""
        record = {**self.record(), **context, "torch": torch.__version__, "threads": torch.get_num_threads()}
        write_json(output_dir / "budget_sweep.json", record)
        write_figure(output_dir / "budget_sweep.png", self._draw())

    def _draw(self) -> Figure:
        figure = Figure(figsize=(7, 4.5), layout="constrained")
        axes = figure.subplots()
        axes.plot(self.budgets, self.values, "o-", color="tab:blue", markersize=5, zorder=2)
        for K, marker, color, size, label in (
            (self.collapse_boundary, "^", "none", 22, "collapse boundary (at least 90% of the quality)"),
            (self.sweet_spot, "*", "tab:orange", 15, "sweet spot (within 2% of the full budget)"),
        ):
            value = self.values[self.budgets.index(K)]
            (point,) = axes.plot(K, value, marker, color=color, markersize=size, label=f"K = {K}: {label}", zorder=3)
            point.set_markeredgecolor("tab:red")
        axes.set_xscale("log")
        axes.set_xticks(self.budgets, [str(K) for K in self.budgets])
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xlabel("spectral budget K (channels used, log scale)")
        held_out = "held-out text" if self.metric == BITS_PER_BYTE else "held-out samples"
        axes.set_ylabel(f"{self.metric.name.replace('_', ' ')}, {held_out}")
        axes.set_title("One set of weights, every budget")
        axes.grid(alpha=0.3)
        axes.margins(y=0.12)
        axes.legend(markerscale=0.6)
        return figure


def sweep_metric(
    model: PreTrainedModel,
    evaluate: Callable[[int], float],
    inputs: Mapping[str, Tensor],
    *,
    metric: Metric,
    budgets: Sequence[int] = BUDGETS,
    progress: Callable[[int], object] = lambda budget: None,
) -> BudgetSweep:
    """Evaluate any model at every budget up to its capacity, which is always one of them.

    Args:
        model: any; one that knows no budgets has the single budget 1. It is left in evaluation mode.
        evaluate: from K to the metric. inputs: a batch of the model's inputs, to measure its speed on.
        progress: called with each K before its evaluation.
    """
    model.eval()
    capacity = capacity_of(model)
    budgets = clip_budgets((*budgets, capacity), capacity)
    values = []
    for K in budgets:
        progress(K)
        values.append(evaluate(K))
    return BudgetSweep(budgets, tuple(values), tuple(tokens_per_second(model, inputs, budgets)), metric)


def sweep_budgets(
    model: PreTrainedModel,
    input_ids: Tensor,
    labels: Tensor,
    *,
    budgets: Sequence[int] = BUDGETS,
    num_bytes: float | None = None,
    batch_size: int = 8,
    progress: Callable[[int], object] = lambda budget: None,
) -> BudgetSweep:
    """Evaluate a causal language model at every budget up to its capacity, which is always one of them.

    Args:
        model: any; one that knows no budgets has the single budget 1. It is left in evaluation mode.
        input_ids: (n, L) int64 blocks. labels: (n, L), the same before shifting, -100 where a token is not scored.
        num_bytes: bytes that the scored tokens stand for; by default each is one byte.
        batch_size: blocks per forward pass. progress: called with each K before its evaluation.
    """
    count = num_bytes or num_scored(labels)

    def bits_per_byte(K: int) -> float:
        return total_nats(model, input_ids, labels, K, batch_size) / math.log(2) / count

    inputs = {"input_ids": input_ids[:batch_size]}
    return sweep_metric(model, bits_per_byte, inputs, metric=BITS_PER_BYTE, budgets=budgets, progress=progress)


def sweep_accuracy(
    model: PreTrainedModel,
    samples: Sequence[Any],
    labels: Tensor,
    predict: Predictor,
    budgets: Sequence[int] = BUDGETS,
    progress: Callable[[int], object] = lambda budget: None,
) -> BudgetSweep:
    """Accuracy, by the `evaluate` module of this folder, and speed at every budget. All processes must call it.

    Args:
        labels: (n,) int64, of the samples. progress: called with each K before its evaluation.
    """
    with predict.accelerator.main_process_first() if predict.accelerator is not None else nullcontext():
        metric = load_metric("accuracy")

    def accuracy(K: int) -> float:
        return metric.compute(predictions=predict(model, samples, K), references=labels)["accuracy"]

    return sweep_metric(model, accuracy, predict.batch(samples), metric=ACCURACY, budgets=budgets, progress=progress)
