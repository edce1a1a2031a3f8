# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Checkpoints that survive a kill at any moment: filled in a temporary folder, synced to disk, then renamed into place.

A folder `checkpoint-N` is therefore always complete. It holds what `Accelerator.save_state` writes (model, optimizer,
scheduler, loss scaler, random states of every process), data.pt (the place in the data), the weights' average if one is
kept, and run_state.json (update, validation so far, budget, arguments).
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from safetensors import SafetensorError

RUN_STATE = "run_state.json"
_TEMPORARY = ".tmp-"
_REPLACED = f"{_TEMPORARY}replaced-"


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
    replaced = path.with_name(_REPLACED + path.name)
    if path.exists():
        os.replace(path, replaced)
    os.replace(temporary, path)
    _sync(path.parent)
    shutil.rmtree(replaced, ignore_errors=True)


@contextmanager
def complete_or_removed(path: Path, temporary: Path) -> Iterator[None]:
    """While `path` is written in `temporary`: a failure frees the space and names the last good checkpoint.

    Raises:
        OSError: also for the errors that torch's and safetensors' writers make of one.
    """
    try:
        yield
    except (torch.OutOfMemoryError, torch.distributed.DistError):  # RuntimeErrors, but not of a writer
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    except (OSError, RuntimeError, SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        last = next(reversed(list_checkpoints(path.parent)), "none")
        raise OSError(
            f"cannot write {path}: {error}. Last good checkpoint: {last}. Make room and start the run again"
        ) from error


def delete_folder(path: Path) -> None:
    """Delete so that a kill halfway leaves a temporary folder, not a damaged one under the old name."""
    doomed = path.with_name(f"{_TEMPORARY}deleted-{path.name}")
    shutil.rmtree(doomed, ignore_errors=True)
    os.replace(path, doomed)
    shutil.rmtree(doomed)


def delete_temporary_folders(output_dir: Path) -> None:
    """Clean up after a killed run."""
    for path in output_dir.glob(f"{_REPLACED}*"):
        if not (original := path.with_name(path.name.removeprefix(_REPLACED))).exists():
            os.replace(path, original)  # killed between the two renames of `publish`
    for path in output_dir.glob(f"{_TEMPORARY}*"):
        shutil.rmtree(path)


def save_checkpoint(
    accelerator: Accelerator,
    output_dir: Path,
    run_state: dict[str, Any],
    keep: int,
    shared: dict[str, Any],
    own: dict[str, Any],
) -> None:
    """Write `checkpoint-<run_state["update"]>` and delete all but the `keep` newest. All processes must call it.

    Args:
        run_state: for people, as JSON. shared: the same on all processes; one of them writes it.
        own: each process writes its own.
    Raises:
        OSError: nothing was published, the older checkpoints stand.
    """
    path = output_dir / f"checkpoint-{run_state['update']:08d}"
    temporary = path.with_name(_TEMPORARY + path.name)
    with complete_or_removed(path, temporary):
        if accelerator.is_main_process:
            temporary_folder(path)
        accelerator.wait_for_everyone()
        accelerator.save_state(str(temporary), safe_serialization=False)  # the tied head is one tensor with two names
        for name, state in own.items():
            torch.save(state, temporary / f"{name}_{accelerator.process_index}.pt")
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            for name, state in shared.items():
                torch.save(state, temporary / f"{name}.pt")
            (temporary / RUN_STATE).write_text(json.dumps(run_state, indent=2) + "\n")
            publish(temporary, path)
    if accelerator.is_main_process:
        for old in list_checkpoints(output_dir)[:-keep]:
            delete_folder(old)
    accelerator.wait_for_everyone()


def load_checkpoint(
    accelerator: Accelerator, checkpoint: Path, shared: Sequence[str], own: Sequence[str]
) -> dict[str, Any]:
    """Everything that Accelerate knows goes back into place; the states of those names are returned."""
    accelerator.load_state(str(checkpoint))
    files = {name: f"{name}.pt" for name in shared} | {name: f"{name}_{accelerator.process_index}.pt" for name in own}
    # Data states hold NumPy arrays, hence no weights_only: a checkpoint is as trusted as the run that wrote it.
    return {name: torch.load(checkpoint / file, map_location="cpu", weights_only=False) for name, file in files.items()}


def read_run_state(checkpoint: Path) -> dict[str, Any]:
    """The JSON that `save_checkpoint` was given."""
    return json.loads((checkpoint / RUN_STATE).read_text())


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
