# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""The metric of all models: sums of what was counted, divided by sums of what it is counted on."""

import datasets
import evaluate


class Ratio(evaluate.Metric):
    """Bits over bytes, by which language models compare whatever their tokenizer; hits over samples."""

    def _info(self) -> evaluate.MetricInfo:
        numbers = dict.fromkeys(("totals", "weights"), datasets.Value("float64"))
        return evaluate.MetricInfo(
            description="The sum of totals divided by the sum of weights.",
            citation="",
            inputs_description="totals: bits of blocks or tokens, or hits. weights: their bytes, or samples.",
            features=datasets.Features(numbers),
        )

    def _compute(self, totals: list[float], weights: list[float]) -> dict[str, float]:
        return {"ratio": sum(totals) / sum(weights)}
