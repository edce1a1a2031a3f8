# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Accuracy as an `evaluate` module that needs no network: evaluate.load("essm_train/measure/metrics/accuracy")."""

from __future__ import annotations

import datasets
import evaluate
import numpy as np

_DESCRIPTION = "The share of predictions that equal their references."
_INPUTS = """
Args:
    predictions (list of int): the predicted classes.
    references (list of int): the true classes, as many.
Returns:
    accuracy (float): in [0, 1].
"""


class Accuracy(evaluate.Metric):
    """Correct predictions over all predictions."""

    def _info(self) -> evaluate.MetricInfo:
        integer = datasets.Value("int64")
        return evaluate.MetricInfo(
            description=_DESCRIPTION,
            citation="",
            inputs_description=_INPUTS,
            features=datasets.Features({"predictions": integer, "references": integer}),
        )

    def _compute(self, predictions: list[int], references: list[int]) -> dict[str, float]:
        if len(predictions) == 0:
            raise ValueError("accuracy needs at least one prediction, got none")
        return {"accuracy": float(np.mean(np.asarray(predictions) == np.asarray(references)))}
