# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""A trained model on a task at every budget: quality over seeds, retention, speed, peak memory, active parameters.

Language models are judged by bits per byte under the context rule of budget_sweep.py, classifiers by accuracy on the
test split. Retention, sweet spot and collapse boundary: modeling_essm/budgets/curve.py.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedModel

from essm_train.data.blocks import text_labels
from essm_train.data.classification import load_classification
from essm_train.data.rows import LabelledData
from essm_train.data.text import load_text, read_blocks
from essm_train.data.tokens import ByteEncoder, Encoder
from essm_train.measure.budget_sweep import sweep_accuracy, sweep_budgets
from essm_train.measure.metric import ACCURACY, BITS_PER_BYTE, Metric
from essm_train.measure.plots import draw_curves
from essm_train.measure.scoring import Predictor, num_scored, total_nats
from essm_train.measure.timing import peak_memory
from essm_train.models import capacity_of, load_model, run_at_budget
from essm_train.tasks.catalog import get_task, make_arguments
from essm_train.tasks.retrieval import load_retrieval
from modeling_essm.budgets.curve import BudgetCurve
from modeling_essm.training.budget_dropout import BUDGETS, clip_budgets


@dataclass(frozen=True)
class TaskData:
    """Held-out data of a task.

    Attributes:
        sweep: (model, budgets=..) to a BudgetCurve. inputs: one batch of the model's inputs, to measure memory on.
        load: from a folder, and whether its own code may run, to the model. description: for people.
        quality: of a model as it is, without its speed: the value of `metric`.
    """

    sweep: Callable[..., BudgetCurve]
    inputs: dict[str, Tensor]
    load: Callable[..., PreTrainedModel]
    description: str
    metric: Metric
    quality: Callable[[PreTrainedModel], float]


@dataclass(frozen=True)
class Evaluation:
    """The measurements of one or more seeds.

    Attributes:
        budgets: ascending, the last one full. values, tokens_per_second: one list per seed, one entry per budget.
        peak_bytes, active_parameters: one entry per budget, of the first seed: they do not depend on the weights.
    """

    metric: Metric
    budgets: tuple[int, ...]
    values: tuple[tuple[float, ...], ...]
    tokens_per_second: tuple[tuple[float, ...], ...]
    peak_bytes: tuple[int, ...]
    active_parameters: tuple[int, ...]

    @classmethod
    def of(
        cls, curves: Sequence[BudgetCurve], peak_bytes: tuple[int, ...], active_parameters: tuple[int, ...]
    ) -> Evaluation:
        """From the curve of every seed."""
        metric = Metric(curves[0].metric, curves[0].higher_is_better)
        values, speeds = (tuple(getattr(curve, name) for curve in curves) for name in ("values", "speeds"))
        return cls(metric, curves[0].budgets, values, speeds, peak_bytes, active_parameters)

    @property
    def mean(self) -> tuple[float, ...]:
        return tuple(statistics.fmean(column) for column in zip(*self.values))

    @property
    def deviation(self) -> tuple[float, ...]:
        """Standard deviations over seeds; zeros for one seed."""
        several = len(self.values) > 1
        return tuple(statistics.stdev(column) if several else 0.0 for column in zip(*self.values))

    @property
    def curve(self) -> BudgetCurve:
        """The means as one curve, the deviations as its errors."""
        speeds = tuple(statistics.fmean(column) for column in zip(*self.tokens_per_second))
        return BudgetCurve(*self.metric, self.budgets, self.mean, speeds, self.deviation)

    def record(self) -> dict[str, Any]:
        """For JSON."""
        curve = self.curve
        marks = {"sweet_spot": curve.sweet_spot, "collapse_boundary": curve.collapse_boundary}
        summary = {"mean": curve.values, "deviation": curve.errors, "retention": curve.retention}
        return {**asdict(self), "metric": self.metric._asdict(), "seeds": len(self.values), **summary, **marks}

    def markdown(self) -> str:
        """The table, in the form of the paper's Table 6."""
        curve, symbols = self.curve, {"sweet spot": "★", "collapse boundary": "▲"}
        lines = [
            f"| K | {curve.title} | retention | active parameters | tokens/s | peak memory, MiB | |",
            "|---|---|---|---|---|---|---|",
        ]
        for i, K in enumerate(self.budgets):
            spread = f" ± {curve.errors[i]:.4f}" if len(self.values) > 1 else ""
            marks = " ".join(f"{symbols[mark]} {mark}" for mark, at in curve.marks.items() if at == K)
            lines.append(
                f"| {K} | {curve.values[i]:.4f}{spread} | {curve.retention[i]:.1%} | {self.active_parameters[i]:,} "
                f"({self.active_parameters[i] / self.active_parameters[-1]:.0%}) | {curve.speeds[i]:,.0f} "
                f"| {self.peak_bytes[i] / 2**20:.1f} | {marks} |"
            )
        return "\n".join(lines) + "\n"


def draw_evaluations(evaluations: dict[str, Evaluation]) -> Figure:
    """One curve per task or variant, see `draw_curves`."""
    return draw_curves({label: evaluation.curve for label, evaluation in evaluations.items()})


def open_language_task(args: Any, description: str) -> TaskData:
    """Held-out blocks as `train_clm.py` makes them from `CLMArguments`; byte models only."""
    encoder = ByteEncoder()
    text = load_text(args, encoder)
    labels = text_labels(text.held_out, encoder.special_ids)
    count = num_scored(labels) * text.bytes_per_token
    sweep = functools.partial(sweep_budgets, input_ids=text.held_out, labels=labels, num_bytes=count)
    inputs = {"input_ids": text.held_out[: args.per_device_train_batch_size]}
    return _language(sweep, inputs, text.held_out, labels, count, description)


def open_text(paths: Sequence[str], encoder: Encoder, block_size: int, max_blocks: int) -> TaskData:
    """Blocks of held-out text of your own, for language models. Raises ValueError as `read_blocks`."""
    blocks, bytes_per_token = read_blocks(list(paths), encoder, block_size, max_blocks)
    labels = text_labels(blocks, encoder.special_ids)
    count = num_scored(labels) * bytes_per_token
    sweep = functools.partial(sweep_budgets, input_ids=blocks, labels=labels, num_bytes=count)
    names = ", ".join(Path(path).name for path in paths)
    return _language(sweep, {"input_ids": blocks[:8]}, blocks, labels, count, names)


def _language(
    sweep: Callable[..., BudgetCurve],
    inputs: dict[str, Tensor],
    blocks: Tensor,
    labels: Tensor,
    num_bytes: float,
    description: str,
) -> TaskData:
    def quality(model: PreTrainedModel) -> float:
        return total_nats(model.eval(), blocks, labels, capacity_of(model), 8) / num_bytes / math.log(2)

    load = functools.partial(_load, AutoModelForCausalLM)
    name = f"{description}; {len(blocks)} blocks of {blocks.shape[1]}"
    return TaskData(sweep, inputs, load, name, BITS_PER_BYTE, quality)


def open_labelled_task(data: LabelledData, cls: Any, batch_size: int, description: str) -> TaskData:
    """The test split, or the validation split where there is none, for models of that class or Auto class."""
    predict = Predictor(lambda samples: data.collate(samples, None), batch_size)
    sweep = functools.partial(sweep_accuracy, held_out=data.held_out, predict=predict)
    name = f"{description}; {data.held_out.name}"
    labels = torch.as_tensor(data.held_out.labels)

    def quality(model: PreTrainedModel) -> float:
        return float((predict(model.eval(), data.held_out.samples, capacity_of(model)) == labels).float().mean())

    inputs = predict.batch(data.held_out.samples)
    return TaskData(sweep, inputs, functools.partial(_load, cls), name, ACCURACY, quality)


def _load(cls: Any, folder: str, trust_remote_code: bool = False) -> PreTrainedModel:
    """A saved model. Raises ValueError if the class needs weights that it lacks, as the head of another task."""
    model, found = load_model(cls, folder, trust_remote_code=trust_remote_code, output_loading_info=True)
    if found["missing_keys"]:
        raise ValueError(f"{folder} is not a model of this task: it lacks {', '.join(sorted(found['missing_keys']))}")
    return model


def open_task(name: str, data_dir: str, scale: str) -> TaskData:
    """The held-out data of a task that train/list_tasks.py names, as its script reads it.

    Raises:
        ValueError: unknown task or scale, or data that cannot be read. FileNotFoundError: absent data.
    """
    spec, args = get_task(name), make_arguments(name, data_dir, scale)
    if spec.script == "train_clm":
        return open_language_task(args, spec.title)
    data = load_retrieval(args) if spec.script == "train_retrieval" else load_classification(args)
    return open_labelled_task(data, AutoModelForSequenceClassification, args.eval_batch_size, spec.title)


def evaluate_models(
    folders: Sequence[str], task: TaskData, budgets: Sequence[int] = BUDGETS, trust_remote_code: bool = False
) -> Evaluation:
    """Sweep every model; memory and active parameters of the first.

    Raises:
        ValueError: models of different capacity, or one that needs its own code without `trust_remote_code`.
    """
    sweeps: list[BudgetCurve] = []
    peaks: tuple[int, ...] = ()
    active: tuple[int, ...] = ()
    for folder in folders:
        model = task.load(folder, trust_remote_code).eval()
        if torch.accelerator.is_available():
            model.to(torch.accelerator.current_accelerator())
        capacity = capacity_of(model)
        wanted = clip_budgets((*budgets, capacity), capacity)
        if sweeps and wanted != sweeps[0].budgets:
            raise ValueError(f"{folder} has capacity {capacity}, and {folders[0]} {sweeps[0].budgets[-1]}")
        if not sweeps:
            batch = {name: value.to(model.device) for name, value in task.inputs.items()}
            peaks = tuple(_peak(model, batch, K) for K in wanted)
            active = tuple(_active_parameters(model, K) for K in wanted)
        sweeps.append(task.sweep(model, budgets=wanted))
    return Evaluation.of(sweeps, peaks, active)


def _active_parameters(model: PreTrainedModel, budget: int) -> int:
    elastic = hasattr(model, "num_active_parameters")
    return model.num_active_parameters(budget) if elastic else model.num_parameters()


@torch.no_grad()
def _peak(model: PreTrainedModel, batch: dict[str, Tensor], budget: int) -> int:
    """Bytes that one forward pass over the batch needs beside the weights."""
    run = lambda: run_at_budget(model, batch, budget)  # noqa: E731
    run()  # constants made once do not count
    return peak_memory(run, model.device)
