# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Bits per byte, sum(bits) / sum(bytes), as an `evaluate` module that needs no network."""

import datasets
import evaluate


class BitsPerByte(evaluate.Metric):
    """It compares language models whatever their tokenizer: a model that is uniform over 256 bytes gets 8."""

    def _info(self) -> evaluate.MetricInfo:
        numbers = {"bits": datasets.Value("float64"), "bytes": datasets.Value("float64")}
        return evaluate.MetricInfo(
            description="Cross-entropy of a text in bits, divided by the bytes of the text.",
            citation="",
            inputs_description="bits: of each block or token. bytes: that each stands for; 0 for a token of no text.",
            features=datasets.Features(numbers),
        )

    def _compute(self, bits: list[float], bytes: list[float]) -> dict[str, float]:
        return {"bits_per_byte": sum(bits) / sum(bytes)}
