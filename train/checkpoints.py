# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Checkpoints that survive a kill at any moment: filled in a temporary folder, synced to disk, then renamed into place.

A folder `checkpoint-N` is therefore always complete. It holds what `Accelerator.save_state` writes (model, optimizer,
scheduler, loss scaler, random states of every process) and run_state.json (update, data position, budget, arguments).
"""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

from accelerate import Accelerator

RUN_STATE = "run_state.json"
_TEMPORARY = ".tmp-"


def list_checkpoints(output_dir: Path) -> list[Path]:
    """All complete checkpoints, oldest first."""
    found = [path for path in output_dir.glob("checkpoint-*") if re.fullmatch(r"checkpoint-\d+", path.name)]
    return sorted(found, key=lambda path: int(path.name.split("-")[1]))


def temporary_folder(path: Path) -> Path:
    """An empty folder next to `path`, to be filled and published under that name."""
    temporary = path.with_name(_TEMPORARY + path.name)
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    return temporary


def publish(temporary: Path, path: Path) -> None:
    """Give a filled temporary folder its name, atomically and durably; what had the name before is deleted."""
    for folder, _, files in os.walk(temporary):
        for name in (*files, "."):
            _sync(Path(folder, name))
    if path.exists():
        delete_folder(path)
    os.replace(temporary, path)
    _sync(path.parent)


def delete_folder(path: Path) -> None:
    """Delete so that a kill halfway leaves a temporary folder, not a damaged one under the old name."""
    doomed = path.with_name(f"{_TEMPORARY}deleted-{path.name}")
    shutil.rmtree(doomed, ignore_errors=True)
    os.replace(path, doomed)
    shutil.rmtree(doomed)


def delete_temporary_folders(output_dir: Path) -> None:
    """Clean up after a killed run."""
    for path in output_dir.glob(f"{_TEMPORARY}*"):
        shutil.rmtree(path)


def save_checkpoint(accelerator: Accelerator, output_dir: Path, run_state: dict[str, Any], keep: int) -> None:
    """Write `checkpoint-<run_state["update"]>` and delete all but the `keep` newest. All processes must call it."""
    path = output_dir / f"checkpoint-{run_state['update']:08d}"
    temporary = path.with_name(_TEMPORARY + path.name)
    if accelerator.is_main_process:
        temporary_folder(path)
    accelerator.wait_for_everyone()
    accelerator.save_state(str(temporary), safe_serialization=False)  # the tied head is one tensor under two names
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        (temporary / RUN_STATE).write_text(json.dumps(run_state, indent=2) + "\n")
        publish(temporary, path)
        for old in list_checkpoints(output_dir)[:-keep]:
            delete_folder(old)
    accelerator.wait_for_everyone()


def read_run_state(checkpoint: Path) -> dict[str, Any]:
    """What `save_checkpoint` was given."""
    return json.loads((checkpoint / RUN_STATE).read_text())


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
