# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""What models are judged by."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any, NamedTuple


class Metric(NamedTuple):
    """What a task is judged by."""

    name: str
    higher_is_better: bool


BITS_PER_BYTE = Metric("bits_per_byte", higher_is_better=False)
ACCURACY = Metric("accuracy", higher_is_better=True)


@functools.cache
def load_metric(name: str) -> Any:
    """The module metrics/`name` of this folder, by the `evaluate` library: nothing is fetched."""
    import evaluate

    return evaluate.load(str(Path(__file__).resolve().parent / "metrics" / name), keep_in_memory=True)
