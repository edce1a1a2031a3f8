# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Accuracy, the share of predictions that equal their references, as an `evaluate` module that needs no network."""

import datasets
import evaluate


class Accuracy(evaluate.Metric):
    def _info(self) -> evaluate.MetricInfo:
        number = datasets.Value("float64")
        return evaluate.MetricInfo(
            description="The share of predictions that equal their references.",
            citation="",
            inputs_description="predictions, references: classes.",
            features=datasets.Features({"predictions": number, "references": number}),
        )

    def _compute(self, predictions: list[int], references: list[int]) -> dict[str, float]:
        hits = sum(found == right for found, right in zip(predictions, references, strict=True))
        return {"accuracy": hits / len(references)}
