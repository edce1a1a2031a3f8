# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Quality and speed of one model at every spectral budget: a metric, tokens/s, a table, a curve and a JSON file.

The metric of a language model is bits per byte. Context rule: the text is cut into blocks of `block_size` tokens that
share one token with the next. The first token of a block is context only; every other byte is predicted once, from the
bytes before it in its own block (1 to block_size - 1 of them). Special tokens are not scored. A model that is uniform
over 256 symbols gets 8 bits per byte.

What is marked on the curve, sweet spot and collapse boundary: modeling_essm/budgets/curve.py.

tokens/s is the speed of forward passes over whole blocks without a cache (prefill): after a warm-up, the median over
rounds in which every budget runs once, so that a machine that slows down hits all budgets alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from essm_train.data.rows import Split
from essm_train.files import write_figure, write_json
from essm_train.measure.metric import ACCURACY, BITS_PER_BYTE, Metric, load_metric
from essm_train.measure.plots import draw_sweep
from essm_train.measure.scoring import Predictor, num_scored, total_nats
from essm_train.measure.timing import tokens_per_second
from essm_train.models import capacity_of
from modeling_essm.budgets.curve import BudgetCurve
from modeling_essm.training.budget_dropout import BUDGETS, clip_budgets


def sweep_record(sweep: BudgetCurve) -> dict[str, Any]:
    """For JSON: a language model's values are called bits_per_byte, those of others values, with the metric."""
    values: dict[str, Any] = {"bits_per_byte": sweep.values}
    if sweep.metric != BITS_PER_BYTE.name:
        values = {"metric": Metric(sweep.metric, sweep.higher_is_better)._asdict(), "values": sweep.values}
    marks = {"sweet_spot": sweep.sweet_spot, "collapse_boundary": sweep.collapse_boundary}
    return {"budgets": sweep.budgets, **values, "tokens_per_second": sweep.speeds, **marks}


def read_sweep(record: Mapping[str, Any]) -> BudgetCurve:
    """From the record of budget_sweep.json, also of one that measured samples_per_second, or no speed.

    Raises:
        ValueError: no budgets, no metric, lists of different lengths, or values that are not finite.
    """
    metric = record.get("metric") or BITS_PER_BYTE._asdict()
    if isinstance(metric, str):
        metric = {"name": metric, "higher_is_better": record.get("higher_is_better", metric != BITS_PER_BYTE.name)}
    values = record.get("values", record.get(metric["name"]))
    budgets = record.get("budgets")
    if not budgets or values is None or len(values) != len(budgets):
        raise ValueError(
            f"a budget sweep needs `budgets` and as many values of {metric['name']!r}, got {budgets!r} and {values!r}"
        )
    unit = next((unit for unit in ("tokens", "samples") if record.get(f"{unit}_per_second")), "tokens")
    speeds = record.get(f"{unit}_per_second") or []
    if len(speeds) not in (0, len(budgets)):
        raise ValueError(f"{unit}_per_second must have {len(budgets)} values, got {len(speeds)}")
    for value in (*values, *speeds):
        if not isinstance(value, (int, float)) or not math.isfinite(value):
            raise ValueError(f"a budget sweep must hold finite numbers, got {value!r}")
    higher = bool(metric.get("higher_is_better", False))
    return BudgetCurve(str(metric["name"]), higher, tuple(budgets), tuple(values), tuple(speeds))


def save_sweep(sweep: BudgetCurve, output_dir: Path, **context: object) -> None:
    """Write budget_sweep.json, with whatever `context` should stand beside the figures, and budget_sweep.png."""
    record = {**sweep_record(sweep), **context, "torch": torch.__version__, "threads": torch.get_num_threads()}
    write_json(output_dir / "budget_sweep.json", record)
    write_figure(output_dir / "budget_sweep.png", draw_sweep(sweep))


def sweep_metric(
    model: PreTrainedModel,
    evaluate: Callable[[int], dict[str, Any]],
    inputs: Mapping[str, Tensor],
    metric: Metric,
    budgets: Sequence[int] = BUDGETS,
    progress: Callable[[int], object] = lambda budget: None,
) -> BudgetCurve:
    """Evaluate any model at every budget up to its capacity, which is always one of them.

    Args:
        model: any; one that knows no budgets has the single budget 1. It is left in evaluation mode.
        evaluate: from K to what the metric's `evaluate` module computes it from.
        inputs: a batch of the model's inputs, to measure its speed on.
        progress: called with each K before its evaluation.
    """
    model.eval()
    module, capacity = load_metric(metric.name), capacity_of(model)
    budgets = clip_budgets((*budgets, capacity), capacity)
    values = []
    for K in budgets:
        progress(K)
        values.append(module.compute(**evaluate(K))[metric.name])
    return BudgetCurve(*metric, budgets, tuple(values), tuple(tokens_per_second(model, inputs, budgets)))


def sweep_budgets(
    model: PreTrainedModel,
    input_ids: Tensor,
    labels: Tensor,
    num_bytes: float | None = None,
    batch_size: int = 8,
    **options: Any,
) -> BudgetCurve:
    """Bits per byte of a causal language model, and its speed, at every budget.

    Args:
        input_ids: (n, L) int64 blocks. labels: (n, L), the same before shifting, -100 where a token is not scored.
        num_bytes: bytes that the scored tokens stand for; by default each is one byte.
        batch_size: blocks per forward pass. options: budgets and progress of `sweep_metric`.
    """
    count = num_bytes or num_scored(labels)

    def evaluate(K: int) -> dict[str, Any]:
        return {"nats": [total_nats(model, input_ids, labels, K, batch_size)], "bytes": [count]}

    return sweep_metric(model, evaluate, {"input_ids": input_ids[:batch_size]}, BITS_PER_BYTE, **options)


def sweep_accuracy(model: PreTrainedModel, held_out: Split, predict: Predictor, **options: Any) -> BudgetCurve:
    """Accuracy of a classifier, and its speed, at every budget; as `sweep_metric`. All processes must call it."""
    with predict.accelerator.main_process_first():
        load_metric(ACCURACY.name)  # copies the module's code once

    def evaluate(K: int) -> dict[str, Any]:
        return {"predictions": predict(model, held_out.samples, K), "references": held_out.labels}

    return sweep_metric(model, evaluate, predict.batch(held_out.samples), ACCURACY, **options)
