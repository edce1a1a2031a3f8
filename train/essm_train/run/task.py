# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""What the training loop is given, a model, samples, and how both are judged; and what is reported after it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from torch import Tensor, nn
from transformers import PreTrainedModel

from essm_train.arguments import RunArguments
from essm_train.data.rows import LabelledData
from essm_train.data.samples import SampleSource
from essm_train.measure.budget_sweep import save_sweep, sweep_budgets
from essm_train.measure.metric import ACCURACY, Metric
from essm_train.measure.scoring import Predictor, hold_out_samples
from essm_train.run.accelerator import say
from modeling_essm.budgets.curve import BudgetCurve
from modeling_essm.companions.truncation.training import InTrainingTruncation


@dataclass
class Task:
    """What a script trains.

    Attributes:
        model: on the CPU, initialised.
        source: training samples.
        collate: samples to keyword arguments of the model, labels among them, as CPU tensors.
        training_figure: (outputs, batch) to the metric on a training batch, a scalar tensor.
        evaluate: (accelerator, model, K) to the validation metric; every process calls it and gets the same value.
        metric: of both.
        tokens_per_sample: for the speed shown.
        save_companions: writes tokenizer and the like into the folder of a saved model.
        identity: what defines the data; a run found with another identity is not continued.
        truncation: for models of diagonal state spaces, how they shrink on the way.
    """

    model: PreTrainedModel
    source: SampleSource
    collate: Callable[[list[Any]], dict[str, Tensor]]
    training_figure: Callable[[Any, dict[str, Tensor]], Tensor]
    evaluate: Callable[[Accelerator, nn.Module, int], float]
    metric: Metric
    tokens_per_sample: int
    save_companions: Callable[[Path], None]
    identity: dict[str, Any]
    truncation: InTrainingTruncation | None = None


def make_predictor(args: Any, data: LabelledData, accelerator: Accelerator) -> Predictor:
    """Of batches of `eval_batch_size`, padded to one length where the model is compiled.

    Args:
        args: `ClassificationArguments` or `RetrievalArguments`.
    """
    length = args.max_length if args.torch_compile else None
    return Predictor(lambda samples: data.collate(samples, length), args.eval_batch_size, accelerator)


def classification_task(model: PreTrainedModel, data: LabelledData, predict: Predictor) -> Task:
    """One class per sample; judged by the accuracy on the validation split."""

    def evaluate(accelerator: Accelerator, module: nn.Module, K: int) -> float:
        predictions = predict(accelerator.unwrap_model(module), data.validation.samples, K)
        return float((predictions == data.validation.labels).double().mean())

    return Task(
        model=model,
        source=data.source,
        collate=predict.collate,
        training_figure=lambda outputs, batch: (outputs.logits.argmax(-1) == batch["labels"]).float().mean(),
        evaluate=evaluate,
        metric=ACCURACY,
        tokens_per_sample=data.tokens_per_sample,
        save_companions=data.save_companions,
        identity=data.digests,
    )


def report_sweep(
    accelerator: Accelerator, args: RunArguments, sweep: BudgetCurve, heading: str, **context: object
) -> None:
    """Show and save the sweep of `output_dir/model`, with `context` beside the figures. One process does."""
    output_dir = Path(args.output_dir)
    if accelerator.is_main_process:
        say(accelerator, heading + sweep.table())
        save_sweep(sweep, output_dir, model=str(output_dir / "model"), **context)
        say(accelerator, f"saved {output_dir / 'budget_sweep.json'} and budget_sweep.png")


def report_accuracy(
    accelerator: Accelerator,
    args: RunArguments,
    model: PreTrainedModel,
    data: LabelledData,
    predict: Predictor,
    what: str,
) -> BudgetCurve:
    """Sweep and report a classifier on its held-out samples, of which `what` tells people. All processes call it."""
    held_out = hold_out_samples(data.held_out, predict, data.description)
    sweep = sweep_budgets(model, held_out, progress=lambda K: say(accelerator, f"sweep: K={K}"))
    context = {"split": "validation" if data.test is None else "test", "samples": len(data.held_out.samples)}
    report_sweep(accelerator, args, sweep, f"accuracy on {what}\n", **context, data=data.description)
    return sweep
