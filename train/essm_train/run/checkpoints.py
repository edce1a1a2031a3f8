# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Checkpoints that survive a kill at any moment, and which of them a run goes on from.

A folder is filled under a temporary name, synced to disk, then renamed, so `checkpoint-N` is always complete. It holds
what `Accelerator.save_state` writes (model, optimizer, scheduler, loss scaler, random states of every process), data.pt
(the place in the data), the weights' average if one is kept, run_state.json (update, validation so far, budget,
arguments) and manifest.json, the size and SHA-256 of each of those files: what a disk or a copy has damaged since is
not resumed from.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from safetensors import SafetensorError
from torch.distributed.checkpoint.api import CheckpointException
from transformers import PreTrainedModel

from essm_train.arguments import RunArguments
from essm_train.files import (
    TEMPORARY,
    claim,
    delete,
    publish,
    recorded,
    set_aside,
    sha256_of,
    write_json,
)
from essm_train.run.accelerator import say

RUN_STATE = "run_state.json"
MANIFEST = "manifest.json"
# Before the names of checkpoints that are kept to be looked at, and not resumed from.
DAMAGED, LATER = "damaged-", "later-"
# What a run leaves beside checkpoints. Without one it is of a run that has ended, but for a best model so far.
RESULTS = ("model", "training.json", "budget_sweep.json", "budget_sweep.png")
BEST = "best"
# Fields of a configuration that no weight depends on.
_NOT_OF_WEIGHTS = frozenset(
    {"transformers_version", "_name_or_path", "architectures", "auto_map", "dtype", "torch_dtype", "use_cache"}
    | {"spectral_budget", "trained_budgets", "budget_presets"}
)


def list_checkpoints(output_dir: Path) -> list[Path]:
    """All complete checkpoints, oldest first."""
    found = [path for path in output_dir.glob("checkpoint-*") if re.fullmatch(r"checkpoint-\d+", path.name)]
    return sorted(found, key=_update_of)


def _update_of(checkpoint: Path) -> int:
    return int(checkpoint.name.split("-")[1])


def last_good(output_dir: Path, update: float = float("inf")) -> str:
    """For an error at that update."""
    before = [path for path in list_checkpoints(output_dir) if _update_of(path) < update]
    return f"Last good checkpoint: {before[-1] if before else 'none'}"


# --- Writing ----------------------------------------------------------------------------------------------------------


@contextmanager
def publishing(accelerator: Accelerator, path: Path) -> Iterator[Path]:
    """An empty folder that all processes may fill. It becomes `path` when the block ends; all must enter it.

    Raises:
        ConnectionError: another process of the run is gone.
        OSError: it could not be written; its space is free again, and the message names the last good checkpoint.
    """
    temporary = path.with_name(f"{TEMPORARY}{0:08x}-{path.name}")  # all know it, and no other run is in this folder
    try:
        if accelerator.is_main_process:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir()
        accelerator.wait_for_everyone()
        yield temporary
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            publish(temporary, path)
    except (OSError, RuntimeError, SafetensorError, CheckpointException) as error:  # torch's writers raise all of these
        shutil.rmtree(temporary, ignore_errors=True)
        last = last_good(path.parent)
        if is_lost_peer(error):
            raise ConnectionError(
                f"lost another process of this run, {path} is not saved: {error}. {last}. See what that process said, "
                "and start the run again"
            ) from error
        if isinstance(error, RuntimeError) and "inline_container" not in str(error):
            raise  # of no writer
        raise OSError(f"cannot write {path}: {error}. {last}. Make room and start the run again") from error
    accelerator.wait_for_everyone()


def is_lost_peer(error: BaseException) -> bool:
    """Whether it says that another process of the run is gone: torch.distributed's, or gloo's plain RuntimeError."""
    failures = error.failures.values() if isinstance(error, CheckpointException) else ()
    return (
        isinstance(error, torch.distributed.DistError)
        or (isinstance(error, RuntimeError) and "/gloo/" in str(error))
        or any(is_lost_peer(failure) for failure, _ in failures)
    )


def save_checkpoint(
    accelerator: Accelerator, output_dir: Path, run_state: dict[str, Any], keep: int, states: dict[str, Any]
) -> None:
    """Write `checkpoint-<run_state["update"]>` and delete all but the `keep` newest. All processes must call it.

    Args:
        run_state: for people, as JSON. states: what this process writes, by the names of the files.
    Raises:
        OSError: nothing was published, the older checkpoints stand.
    """
    with publishing(accelerator, output_dir / f"checkpoint-{run_state['update']:08d}") as folder:
        accelerator.save_state(str(folder), safe_serialization=False)  # the tied head is one tensor with two names
        for name, state in states.items():
            torch.save(state, folder / name)
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            write_json(folder / RUN_STATE, run_state)
            files = sorted(path for path in folder.rglob("*") if path.is_file())
            manifest = {path: {"bytes": path.stat().st_size, "sha256": sha256_of(path)} for path in files}
            write_json(folder / MANIFEST, {str(path.relative_to(folder)): entry for path, entry in manifest.items()})
    if accelerator.is_main_process:
        prune_checkpoints(output_dir, keep)
    accelerator.wait_for_everyone()


def prune_checkpoints(output_dir: Path, keep: int) -> None:
    """Delete all but the `keep` newest."""
    for old in list_checkpoints(output_dir)[:-keep]:
        delete(old)


# --- Reading ----------------------------------------------------------------------------------------------------------


def find_damage(checkpoint: Path) -> str:
    """What is wrong with a checkpoint, by the name of a file; "" if nothing is."""
    try:
        read_run_state(checkpoint)
        manifest = json.loads((checkpoint / MANIFEST).read_text(encoding="utf-8"))
        expected = {name: entry["sha256"] for name, entry in manifest.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{RUN_STATE} or {MANIFEST} cannot be read ({error})"
    for name, digest in expected.items():
        if not (checkpoint / name).is_file():
            return f"{name} is missing"
        if sha256_of(checkpoint / name) != digest:
            return f"{name} is not what was written, by its SHA-256"
    return ""


def read_run_state(checkpoint: Path) -> dict[str, Any]:
    """The JSON that `save_checkpoint` was given."""
    return json.loads((checkpoint / RUN_STATE).read_text(encoding="utf-8"))


def load_checkpoint(accelerator: Accelerator, checkpoint: Path, names: Iterable[str]) -> list[Any]:
    """Everything that Accelerate knows goes back into place; the states in the files of those names are returned.

    Raises:
        ValueError: files that cannot be read, or random states that Accelerate could not set, which it does not say.
    """
    device, random_states = accelerator.device, f"random_states_{accelerator.process_index}.pkl"
    try:
        # Data states hold NumPy arrays, hence no weights_only: a checkpoint is as trusted as the run that wrote it.
        *states, saved = (torch.load(checkpoint / f, "cpu", weights_only=False) for f in (*names, random_states))
        accelerator.load_state(str(checkpoint))
    except (OSError, EOFError, pickle.UnpicklingError) as error:
        raise ValueError(f"cannot read {checkpoint}: {error!r}; delete it to go on from the one before it") from error
    in_place = torch.equal(torch.get_rng_state(), saved["torch_manual_seed"])
    if device.type == "cuda":
        kept, index = saved["torch_cuda_manual_seed"], torch.cuda.current_device()
        in_place &= index < len(kept) and torch.equal(torch.cuda.get_rng_state(device), kept[index])
    if not in_place:
        raise ValueError(
            f"cannot resume {checkpoint}: its {random_states} cannot be put back here, so the run would go on with "
            "other random numbers; use the versions and devices it was written with"
        )
    return states


# --- Which run a folder holds -----------------------------------------------------------------------------------------


def model_identity(model: PreTrainedModel) -> dict[str, Any]:
    """The fields of a model's configuration that its weights depend on, as JSON holds them."""
    fields = json.loads(model.config.to_json_string(use_diff=False))
    return {name: value for name, value in fields.items() if name not in _NOT_OF_WEIGHTS}


def _check_same_run(checkpoint: Path, identity: dict[str, Any], args: RunArguments) -> None:
    """Raises ValueError if the checkpoint belongs to a run that would have given other weights."""
    reasons = {
        "num_processes": " (the random states of every process, and shards, are part of a checkpoint)",
        "max_steps": " (with --extend it may become larger)",
    }
    saved, now = (
        {name: value for name, value in whole.items() if name != "model"}
        | {f"{name} of the model": value for name, value in whole["model"].items()}
        for whole in (read_run_state(checkpoint)["identity"], identity)
    )
    may_change = set()
    if args.extend and identity["max_steps"] > saved["max_steps"]:
        may_change |= {"max_steps", "num_train_epochs"}
    changed = [
        f"{name} was {saved.get(name)!r} and is now {new!r}{reasons.get(name, '')}"
        for name, new in now.items()
        if name not in may_change and saved.get(name) != new
    ]
    if changed:
        raise ValueError(
            f"cannot resume {checkpoint}: {', '.join(changed)}; go back to the old value, choose another "
            "output_dir, or start afresh with --overwrite_output_dir"
        )


def _choose(output_dir: Path, chosen: str | None) -> tuple[Path | None, dict[Path, str]]:
    """The checkpoint to go on from, and those after it with what is wrong with them, or "" where nothing is.

    Raises:
        ValueError: all are damaged, or the chosen one is; or it is none of output_dir.
    """
    checkpoints, passed = list_checkpoints(output_dir), dict[Path, str]()
    wanted = None if chosen is None else Path(chosen).resolve()
    if wanted is not None and wanted not in [path.resolve() for path in checkpoints]:
        known = ", ".join(map(str, checkpoints)) or "none yet"
        raise ValueError(
            f"resume_from_checkpoint must be a checkpoint of output_dir ({known}), got {chosen!r}; without it a run "
            "goes on from its last checkpoint, and with --overwrite_output_dir it starts afresh"
        )
    for checkpoint in reversed(checkpoints):
        is_later = wanted not in (None, checkpoint.resolve())
        damage = "" if is_later else find_damage(checkpoint)
        if not is_later and not damage:
            return checkpoint, passed
        if damage and chosen is not None:
            raise ValueError(f"resume_from_checkpoint {chosen!r} is damaged: {damage}")
        passed[checkpoint] = damage
    if passed:
        what = "; ".join(f"{path}: {damage}" for path, damage in passed.items())
        raise ValueError(
            f"no checkpoint can be resumed from, {what}. Put the files back from a copy, or start afresh with "
            "--overwrite_output_dir"
        )
    return None, {}


def _of_a_run(output_dir: Path) -> list[Path]:
    """What a run leaves, there or not."""
    kept = [path for prefix in (DAMAGED, LATER) for path in output_dir.glob(f"{prefix}checkpoint-*")]
    return [*list_checkpoints(output_dir), *(output_dir / name for name in (*RESULTS, BEST)), *kept]


def delete_run(accelerator: Accelerator, args: RunArguments) -> None:
    """What `overwrite_output_dir` says may go, once `find_run` has found that it may."""
    if accelerator.is_main_process:
        for path in filter(os.path.lexists, _of_a_run(Path(args.output_dir))):
            delete(path)
    accelerator.wait_for_everyone()


def _has_own_best(output_dir: Path, identity: dict[str, Any]) -> bool:
    """Whether the best model there is of this run, killed before its first checkpoint."""
    return recorded(output_dir / BEST / f"{BEST}.json").get("identity") == json.loads(json.dumps(identity))


def find_run(accelerator: Accelerator, args: RunArguments, identity: dict[str, Any]) -> Path | None:
    """Make output_dir ready, but for `delete_run`; the checkpoint to go on from, if any.

    Args:
        identity: what defines the run, with the `model_identity` as "model".
    Raises:
        ValueError: (on all processes) only damaged checkpoints, those of another run, none where `extend` or
            `resume_from_checkpoint` needs one, or none but a model that another run has left; or what is to be
            overwritten is read.
    """
    output_dir, found = Path(args.output_dir), list[Any]([None, {}, ""])
    if accelerator.is_main_process:
        try:
            if args.overwrite_output_dir:
                read = chain.from_iterable(v if isinstance(v, list) else [v] for v in vars(args).values())
                claim(output_dir, [path.name for path in _of_a_run(output_dir)], overwrite=True, reads=read)
            else:
                found[:2] = _choose(output_dir, args.resume_from_checkpoint)
                if found[0] is None and not args.extend:
                    names = RESULTS if _has_own_best(output_dir, identity) else (*RESULTS, BEST)
                    claim(output_dir, names, flag="--overwrite_output_dir")
        except ValueError as error:
            found[2] = str(error)
    checkpoint, passed, problem = broadcast_object_list(found)
    if checkpoint is None and args.extend:
        problem = problem or f"extend needs a run to go on with, and output_dir {args.output_dir!r} holds no checkpoint"
    if problem:
        raise ValueError(problem)
    if checkpoint is not None:
        _check_same_run(checkpoint, identity, args)
    if checkpoint is not None and accelerator.is_main_process:
        for path, damage in passed.items():
            what, name = (f"damaged: {damage}", DAMAGED + path.name) if damage else ("later", LATER + path.name)
            name = set_aside(path, name)
            say(accelerator, f"{path} is {what}; now {name}, and the run goes on from {checkpoint}")
        prune_checkpoints(output_dir, args.save_total_limit)  # one more stays where a run was killed before it did
    accelerator.wait_for_everyone()
    return checkpoint
