# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Accuracy as an `evaluate` module that needs no network: evaluate.load takes the folder's path."""

from __future__ import annotations

import datasets
import evaluate
import numpy as np


class Accuracy(evaluate.Metric):
    """Correct predictions over all predictions."""

    def _info(self) -> evaluate.MetricInfo:
        integer = datasets.Value("int64")
        return evaluate.MetricInfo(
            description="The share of predictions that equal their references.",
            citation="",
            inputs_description="predictions, references: lists of classes. Returns accuracy in [0, 1].",
            features=datasets.Features({"predictions": integer, "references": integer}),
        )

    def _compute(self, predictions: list[int], references: list[int]) -> dict[str, float]:
        if len(predictions) == 0:
            raise ValueError("accuracy needs at least one prediction, got none")
        return {"accuracy": float(np.mean(np.asarray(predictions) == np.asarray(references)))}
