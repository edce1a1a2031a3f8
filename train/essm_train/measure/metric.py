# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""What models are judged by."""

from __future__ import annotations

from typing import NamedTuple


class Metric(NamedTuple):
    """What a task is judged by."""

    name: str
    higher_is_better: bool


BITS_PER_BYTE = Metric("bits_per_byte", higher_is_better=False)
ACCURACY = Metric("accuracy", higher_is_better=True)
