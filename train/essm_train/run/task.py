# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""What the training loop is given: a model, samples, and how both are judged."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from torch import Tensor, nn
from transformers import PreTrainedModel

from essm_train.data.rows import LabelledData
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
