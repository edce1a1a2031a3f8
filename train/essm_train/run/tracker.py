# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""log.jsonl, as a tracker of Accelerate."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from accelerate.tracking import GeneralTracker, on_main_process
from tqdm import tqdm

from essm_train.files import write_bytes


class JsonlTracker(GeneralTracker):
    """log.jsonl: one line per logged update. A resumed run drops the lines of updates it will do again.

    It also drops damaged lines, and says which. Accelerate has no tracker that writes a plain file.
    """

    name = "jsonl"
    requires_logging_directory = True

    def __init__(self, path: Path):
        super().__init__()
        self.path = path

    @property
    def tracker(self) -> Path:
        return self.path

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        last, kept = values.get("first_update", 0), []
        lines = self.path.read_bytes().split(b"\n")[:-1] if self.path.exists() else []  # the last may be half written
        for number, line in enumerate(lines, 1):
            update = _update_of(line)
            if update is None:
                tqdm.write(f"{self.path}: line {number} is damaged and was dropped: {line[:60]!r}")
            elif update <= last:
                kept.append(line + b"\n")
        write_bytes(self.path, b"".join(kept))

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps({"update": step, **values}) + "\n")


def _update_of(line: bytes) -> int | None:
    """The update that a line of log.jsonl is about; None if it is no such line."""
    try:
        update = json.loads(line)["update"]
    except (ValueError, LookupError, TypeError, RecursionError):
        return None
    return update if type(update) is int else None
