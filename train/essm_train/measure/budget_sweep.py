# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Quality and speed of one model at every spectral budget: a metric, tokens/s, a table, a curve and a JSON file.

What is marked on the curve, sweet spot and collapse boundary: modeling_essm/budgets/curve.py. How a model is scored:
scoring.py. tokens/s is the speed of forward passes over a whole batch without a cache (prefill), the median over rounds
in which every budget runs once.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from essm_train.files import write_figure, write_json
from essm_train.measure.plots import draw_curves
from essm_train.measure.scoring import BITS_PER_BYTE, HeldOut, Metric
from essm_train.measure.timing import paired
from essm_train.models import budgets_to_measure, run_at_budget
from modeling_essm.budgets.curve import BudgetCurve, Times

SWEEP_FILES = ("budget_sweep.json", "budget_sweep.png")


def sweep_budgets(
    model: PreTrainedModel,
    held_out: HeldOut,
    budgets: Sequence[int] | None = None,
    progress: Callable[[int], object] = lambda budget: None,
) -> BudgetCurve:
    """Score any model at budgets up to its capacity, and measure its speed.

    Args:
        model: one that knows no budgets has the single budget 1. It is left in evaluation mode.
        budgets: as in `budgets_to_measure`.
        progress: called with each K before it is scored.
    """
    model.eval()
    budgets, values = budgets_to_measure(model, budgets), []
    for K in budgets:
        progress(K)
        values.append(held_out.value(model, K))
    num_tokens, times = time_passes(model, held_out.inputs, budgets)
    speeds = tuple(num_tokens / times[K][0] for K in budgets)
    return BudgetCurve(*held_out.metric, budgets, tuple(values), speeds, timings=(times,))


@torch.no_grad()
def time_passes(model: PreTrainedModel, inputs: Mapping[str, Tensor], budgets: Sequence[int]) -> tuple[int, Times]:
    """Tokens of a batch, and seconds of a forward pass over it; positions that are masked do not count."""
    batch = {name: value.to(model.device) for name, value in inputs.items()}
    first, mask = next(iter(batch.values())), batch.get("attention_mask")
    num_tokens = math.prod(first.shape[:2]) if mask is None else int(mask.sum())
    calls = {K: functools.partial(run_at_budget, model, batch, K) for K in budgets}
    seconds = paired(calls, first.device, rounds=5, warmup=1, sample_seconds=0.0, limit_seconds=math.inf)
    return num_tokens, {K: (statistics.median(seconds[K]), min(seconds[K])) for K in budgets}


def read_sweep(record: Mapping[str, Any]) -> BudgetCurve:
    """From the record of budget_sweep.json. Raises ValueError for lists of unlike lengths or numbers not finite."""
    metric = record.get("metric", BITS_PER_BYTE._asdict())
    budgets, values = record.get("budgets") or (), record.get("values", record.get("bits_per_byte")) or ()
    speeds = record.get("tokens_per_second") or ()
    if not budgets or len(values) != len(budgets) or len(speeds) not in (0, len(budgets)):
        raise ValueError(
            f"a budget sweep needs `budgets`, as many values of {metric['name']!r} and as many speeds, or none; "
            f"got {budgets!r}, {values!r} and {speeds!r}"
        )
    timings = tuple({int(K): tuple(pair) for K, pair in times.items()} for times in record.get("timings") or ())
    if not all(math.isfinite(value) for value in (*values, *speeds)):
        raise ValueError(f"a budget sweep must hold finite numbers, got {values!r} and {speeds!r}")
    name, higher = metric["name"], metric["higher_is_better"]
    return BudgetCurve(name, higher, tuple(budgets), tuple(values), tuple(speeds), timings=timings)


def save_sweep(sweep: BudgetCurve, output_dir: Path, **context: object) -> None:
    """Write budget_sweep.json, with whatever `context` should stand beside the figures, and budget_sweep.png.

    A language model's values are called bits_per_byte, those of others values, with the metric.
    """
    record: dict[str, Any] = {"budgets": sweep.budgets, "bits_per_byte": sweep.values}
    if sweep.metric != BITS_PER_BYTE.name:
        metric = Metric(sweep.metric, sweep.higher_is_better)._asdict()
        record = {"budgets": sweep.budgets, "metric": metric, "values": sweep.values}
    record |= {"tokens_per_second": sweep.speeds, "sweet_spot": sweep.sweet_spot}
    record |= {"collapse_boundary": sweep.collapse_boundary, "timings": sweep.timings, **context}
    record |= {"torch": torch.__version__, "threads": torch.get_num_threads()}
    write_json(output_dir / SWEEP_FILES[0], record)
    write_figure(output_dir / SWEEP_FILES[1], draw_curves({"held out": sweep}))
