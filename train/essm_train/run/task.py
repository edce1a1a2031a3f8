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
from essm_train.data.samples import SampleSource
from essm_train.measure.budget_sweep import save_sweep
from essm_train.measure.metric import Metric
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
        save_beside: writes tokenizer and the like into the folder of a saved model.
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
    save_beside: Callable[[Path], None]
    identity: dict[str, Any]
    truncation: InTrainingTruncation | None = None


def report_sweep(
    accelerator: Accelerator, args: RunArguments, sweep: BudgetCurve, heading: str, **context: object
) -> None:
    """Show and save the sweep of `output_dir/model`, with `context` beside the figures. One process does."""
    output_dir = Path(args.output_dir)
    if accelerator.is_main_process:
        say(accelerator, heading + sweep.table())
        save_sweep(sweep, output_dir, model=str(output_dir / "model"), **context)
        say(accelerator, f"saved {output_dir / 'budget_sweep.json'} and budget_sweep.png")
