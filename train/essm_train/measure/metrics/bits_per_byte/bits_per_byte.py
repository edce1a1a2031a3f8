# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Bits per byte as an `evaluate` module that needs no network: evaluate.load takes the folder's path.

It compares language models whatever their tokenizer: a model that is uniform over 256 bytes gets 8.
"""

from __future__ import annotations

import math

import datasets
import evaluate

_INPUTS = """
nats: cross-entropies, each summed over a piece of text: one token, a document, or everything.
bytes: how many bytes each piece stands for; 0 for a token that stands for no text, such as <eos>, and that counts.
Returns bits_per_byte, sum(nats) / ln 2 / sum(bytes).
"""


class BitsPerByte(evaluate.Metric):
    """sum(nats) / ln 2 / sum(bytes)."""

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description="Summed cross-entropy of a text in bits, divided by the bytes of the text.",
            citation="",
            inputs_description=_INPUTS,
            features=datasets.Features({"nats": datasets.Value("float64"), "bytes": datasets.Value("float64")}),
        )

    def _compute(self, nats: list[float], bytes: list[float]) -> dict[str, float]:
        for value in nats:
            if not 0 <= value < math.inf:
                raise ValueError(f"nats must be finite and at least 0, got {value}")
        if not sum(bytes) > 0:
            raise ValueError("bits per byte needs at least one byte, got none")
        return {"bits_per_byte": math.fsum(nats) / math.log(2) / sum(bytes)}
