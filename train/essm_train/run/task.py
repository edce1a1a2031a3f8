# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""What the training loop is given: a model, samples, and how both are judged."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from torch import Tensor, nn
from transformers import PreTrainedModel

from essm_train.data.samples import SampleSource
from essm_train.measure.metric import ACCURACY, Metric
from essm_train.measure.scoring import Predictor


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


def classification_task(
    model: PreTrainedModel,
    source: SampleSource,
    predict: Predictor,
    samples: Sequence[Any],
    labels: Tensor,
    **rest: Any,
) -> Task:
    """One class per sample; judged by the accuracy on held-out samples and their labels (n,) int64.

    Args:
        rest: tokens_per_sample, save_companions and identity of the `Task`.
    """

    def evaluate(accelerator: Accelerator, module: nn.Module, K: int) -> float:
        predictions = predict(accelerator.unwrap_model(module), samples, K)
        return float((predictions == labels).double().mean())

    return Task(
        model=model,
        source=source,
        collate=predict.collate,
        training_figure=lambda outputs, batch: (outputs.logits.argmax(-1) == batch["labels"]).float().mean(),
        evaluate=evaluate,
        metric=ACCURACY,
        **rest,
    )
