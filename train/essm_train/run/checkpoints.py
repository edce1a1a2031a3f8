# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Checkpoints that survive a kill at any moment: filled in a temporary folder, synced to disk, then renamed into place.

A folder `checkpoint-N` is therefore always complete. It holds what `Accelerator.save_state` writes (model, optimizer,
scheduler, loss scaler, random states of every process), data.pt (the place in the data), the weights' average if one is
kept, run_state.json (update, validation so far, budget, arguments) and manifest.json, the size and SHA-256 of each of
those files: what a disk or a copy has damaged since is not resumed from.
"""

from __future__ import annotations

import json
import pickle
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from safetensors import SafetensorError
from torch.distributed.checkpoint.api import CheckpointException

from essm_train.files import TEMPORARY, delete_folder, publish, sha256_of, temporary_folder, write_json

RUN_STATE = "run_state.json"
MANIFEST = "manifest.json"
# Before the names of checkpoints that are kept to be looked at, and not resumed from.
DAMAGED, LATER = "damaged-", "later-"


def list_checkpoints(output_dir: Path) -> list[Path]:
    """All complete checkpoints, oldest first."""
    found = [path for path in output_dir.glob("checkpoint-*") if re.fullmatch(r"checkpoint-\d+", path.name)]
    return sorted(found, key=lambda path: int(path.name.split("-")[1]))


def last_good(output_dir: Path, update: int) -> str:
    """For an error at that update."""
    before = [path for path in list_checkpoints(output_dir) if int(path.name.split("-")[1]) < update]
    return f"Last good checkpoint: {before[-1] if before else 'none'}"


@contextmanager
def complete_or_removed(path: Path, temporary: Path) -> Iterator[None]:
    """While `path` is written in `temporary`: a failure frees the space and names the last good checkpoint.

    Raises:
        ConnectionError: another process of the run is gone.
        OSError: also for the errors that torch's and safetensors' writers make of one.
    """
    try:
        yield
    except (torch.OutOfMemoryError, torch.AcceleratorError):  # RuntimeErrors, but not of a writer
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    except (OSError, RuntimeError, SafetensorError, CheckpointException) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        last = next(reversed(list_checkpoints(path.parent)), "none")
        if is_lost_peer(error):
            raise ConnectionError(
                f"lost another process of this run, {path} is not saved: {error}. Last good checkpoint: {last}. See "
                "what that process said, and start the run again"
            ) from error
        raise OSError(
            f"cannot write {path}: {error}. Last good checkpoint: {last}. Make room and start the run again"
        ) from error


def is_lost_peer(error: BaseException) -> bool:
    """Whether it says that another process of the run is gone: torch.distributed's, or gloo's plain RuntimeError."""
    failures = error.failures.values() if isinstance(error, CheckpointException) else ()
    return (
        isinstance(error, torch.distributed.DistError)
        or (isinstance(error, RuntimeError) and "/gloo/" in str(error))
        or any(is_lost_peer(failure) for failure, _ in failures)
    )


def save_checkpoint(
    accelerator: Accelerator,
    output_dir: Path,
    run_state: dict[str, Any],
    keep: int,
    shared: dict[str, Any],
    by_process: dict[str, Any],
) -> None:
    """Write `checkpoint-<run_state["update"]>` and delete all but the `keep` newest. All processes must call it.

    Args:
        run_state: for people, as JSON. shared: the same on all processes; one of them writes it.
        by_process: each process writes what it has.
    Raises:
        OSError: nothing was published, the older checkpoints stand.
    """
    path = output_dir / f"checkpoint-{run_state['update']:08d}"
    temporary = path.with_name(TEMPORARY + path.name)
    with complete_or_removed(path, temporary):
        if accelerator.is_main_process:
            temporary_folder(path)
        accelerator.wait_for_everyone()
        accelerator.save_state(str(temporary), safe_serialization=False)  # the tied head is one tensor with two names
        for name, state in by_process.items():
            torch.save(state, temporary / f"{name}_{accelerator.process_index}.pt")
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            for name, state in shared.items():
                torch.save(state, temporary / f"{name}.pt")
            write_json(temporary / RUN_STATE, run_state)
            write_json(temporary / MANIFEST, _manifest(temporary))
            publish(temporary, path)
    if accelerator.is_main_process:
        prune_checkpoints(output_dir, keep)
    accelerator.wait_for_everyone()


def prune_checkpoints(output_dir: Path, keep: int) -> None:
    """Delete all but the `keep` newest."""
    for old in list_checkpoints(output_dir)[:-keep]:
        delete_folder(old)


def _manifest(folder: Path) -> dict[str, dict[str, Any]]:
    """Size and SHA-256 of every file below the folder."""
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    return {name: {"bytes": (folder / name).stat().st_size, "sha256": sha256_of(folder / name)} for name in names}


def newest_sound_checkpoint(output_dir: Path) -> tuple[Path | None, dict[Path, str]]:
    """The newest checkpoint in which nothing is damaged, and the damaged ones after it, with what is wrong.

    Raises:
        ValueError: there are checkpoints, and all are damaged.
    """
    damaged: dict[Path, str] = {}
    for checkpoint in reversed(list_checkpoints(output_dir)):
        damage = find_damage(checkpoint)
        if damage is None:
            return checkpoint, damaged
        damaged[checkpoint] = damage
    if damaged:
        what = "; ".join(f"{path}: {damage}" for path, damage in damaged.items())
        raise ValueError(
            f"no checkpoint can be resumed from, {what}. Put the files back from a copy, or start afresh with "
            "--overwrite_output_dir"
        )
    return None, {}


def chosen_checkpoint(output_dir: Path, chosen: str) -> tuple[Path, dict[Path, str]]:
    """The checkpoint that `resume_from_checkpoint` names, and those after it, with nothing wrong with them.

    Raises:
        ValueError: it is none of output_dir, or damaged.
    """
    checkpoints = list_checkpoints(output_dir)
    places = [path.resolve() for path in checkpoints]
    if (wanted := Path(chosen).resolve()) not in places:
        known = ", ".join(map(str, checkpoints)) or "none yet"
        raise ValueError(
            f"resume_from_checkpoint must be a checkpoint of output_dir ({known}), got {chosen!r}; without it a run "
            "goes on from its last checkpoint, and with --overwrite_output_dir it starts afresh"
        )
    index = places.index(wanted)
    if damage := find_damage(checkpoints[index]):
        raise ValueError(f"resume_from_checkpoint {chosen!r} is damaged: {damage}")
    return checkpoints[index], dict.fromkeys(checkpoints[index + 1 :], "")


def find_damage(checkpoint: Path) -> str | None:
    """What is wrong with a checkpoint, by the name of a file, or None."""
    try:
        read_run_state(checkpoint)
        manifest = json.loads((checkpoint / MANIFEST).read_text())
        expected = {name: (entry["bytes"], entry["sha256"]) for name, entry in manifest.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{RUN_STATE} or {MANIFEST} cannot be read ({error})"
    for name, (size, digest) in expected.items():
        path = checkpoint / name
        if not path.is_file():
            return f"{name} is missing"
        if (found := path.stat().st_size) != size:
            return f"{name} has {found:,} bytes, and had {size:,} when it was written"
        if sha256_of(path) != digest:
            return f"{name} is not what was written, by its SHA-256"
    return None


def load_checkpoint(
    accelerator: Accelerator, checkpoint: Path, shared: Sequence[str], by_process: Sequence[str]
) -> dict[str, Any]:
    """Everything that Accelerate knows goes back into place; the states of those names are returned.

    Raises:
        ValueError: files that cannot be read, or random states that Accelerate could not set.
    """
    rank = accelerator.process_index
    files = {name: f"{name}.pt" for name in shared} | {name: f"{name}_{rank}.pt" for name in by_process}
    # Data states hold NumPy arrays, hence no weights_only: a checkpoint is as trusted as the run that wrote it.
    read = partial(torch.load, map_location="cpu", weights_only=False)
    try:
        states = {name: read(checkpoint / file) for name, file in files.items()}
        random_states = read(checkpoint / f"random_states_{rank}.pkl")
        accelerator.load_state(str(checkpoint))
    except (OSError, EOFError, pickle.UnpicklingError) as error:
        raise ValueError(f"cannot read {checkpoint}: {error!r}; delete it to go on from the one before it") from error
    _check_random_states(accelerator, checkpoint, random_states)
    return states


def _check_random_states(accelerator: Accelerator, checkpoint: Path, states: dict[str, Any]) -> None:
    """Raises ValueError if they are not in place: Accelerate says nothing when it cannot set them."""
    device = accelerator.device
    in_place = torch.equal(torch.get_rng_state(), states["torch_manual_seed"])
    if device.type == "cuda":
        saved = states["torch_cuda_manual_seed"]
        index = torch.cuda.current_device() if device.index is None else device.index
        in_place &= index < len(saved) and torch.equal(torch.cuda.get_rng_state(device), saved[index])
    if not in_place:
        raise ValueError(
            f"cannot resume {checkpoint}: its random_states_{accelerator.process_index}.pkl cannot be put back here, "
            "so the run would go on with other random numbers; use the versions and devices it was written with"
        )


def read_run_state(checkpoint: Path) -> dict[str, Any]:
    """The JSON that `save_checkpoint` was given."""
    return json.loads((checkpoint / RUN_STATE).read_text())
