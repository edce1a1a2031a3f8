# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Whether a run found in a folder is the one that is to be continued."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from transformers import PreTrainedModel

from essm_train.arguments import RunArguments
from essm_train.files import delete_folder, delete_temporary_folders, set_aside
from essm_train.run.accelerator import say
from essm_train.run.checkpoints import (
    DAMAGED,
    LATER,
    chosen_checkpoint,
    list_checkpoints,
    newest_sound_checkpoint,
    prune_checkpoints,
    read_run_state,
)

# Fields of a configuration that no weight depends on.
_NOT_OF_WEIGHTS = frozenset(
    {"transformers_version", "_name_or_path", "architectures", "auto_map", "dtype", "torch_dtype", "use_cache"}
    | {"spectral_budget", "trained_budgets", "budget_presets"}
)


def model_identity(model: PreTrainedModel) -> dict[str, Any]:
    """The fields of a model's configuration that its weights depend on, as JSON holds them."""
    fields = json.loads(model.config.to_json_string(use_diff=False))
    return {name: value for name, value in fields.items() if name not in _NOT_OF_WEIGHTS}


def check_same_run(checkpoint: Path, identity: dict[str, Any], args: RunArguments) -> None:
    """Raises ValueError if the checkpoint belongs to a run that would have given other weights.

    Args:
        identity: what defines the run, with the `model_identity` as "model".
    """
    reasons = {
        "num_processes": " (the random states of every process, and shards, are part of a checkpoint)",
        "max_steps": " (with --extend it may become larger)",
    }
    saved = read_run_state(checkpoint)["identity"]
    if args.extend and identity["max_steps"] > saved["max_steps"]:
        identity = {name: new for name, new in identity.items() if name not in ("max_steps", "num_train_epochs")}
    changed = [
        f"{name} was {saved.get(name)!r} and is now {new!r}{reasons.get(name, '')}"
        for name, new in identity.items()
        if name != "model" and saved.get(name) != new
    ]
    changed += [
        f"{name} of the model was {saved['model'].get(name)!r} and is now {new!r}"
        for name, new in identity["model"].items()
        if saved["model"].get(name) != new
    ]
    if changed:
        raise ValueError(
            f"cannot resume {checkpoint}: {', '.join(changed)}; go back to the old value, choose another "
            "output_dir, or start afresh with --overwrite_output_dir"
        )


def find_run(
    accelerator: Accelerator, args: RunArguments, identity: dict[str, Any]
) -> tuple[Path | None, list[Any] | None]:
    """Make output_dir ready: the checkpoint to go on from, if any, and what `_saved_model` says of it.

    Raises:
        ValueError: (on all processes) only damaged checkpoints, those of another run, or none where `extend` or
            `resume_from_checkpoint` needs one.
    """
    output_dir = Path(args.output_dir)
    found: list[Any] = [None, {}, None, ""]
    if accelerator.is_main_process:
        delete_temporary_folders(output_dir)
        if args.overwrite_output_dir:
            aside = (path for prefix in (DAMAGED, LATER) for path in output_dir.glob(f"{prefix}checkpoint-*"))
            for old in (*list_checkpoints(output_dir), *aside, output_dir / "model", output_dir / "best"):
                if old.exists():
                    delete_folder(old)
            for name in ("training.json", "budget_sweep.json", "budget_sweep.png"):
                (output_dir / name).unlink(missing_ok=True)
        try:
            chosen = args.resume_from_checkpoint
            place = newest_sound_checkpoint(output_dir) if chosen is None else chosen_checkpoint(output_dir, chosen)
            found = [*place, _saved_model(output_dir), ""]
        except ValueError as error:
            found[3] = str(error)
    broadcast_object_list(found)
    checkpoint, not_resumed, saved_model, problem = found
    if checkpoint is None and args.extend:
        problem = problem or f"extend needs a run to go on with, and output_dir {args.output_dir!r} holds no checkpoint"
    if problem:
        raise ValueError(problem)
    if checkpoint is not None:
        check_same_run(checkpoint, identity, args)
    if accelerator.is_main_process:
        if checkpoint is None:
            (output_dir / "training.json").unlink(missing_ok=True)  # of a run whose checkpoints were deleted
        for path, damage in not_resumed.items():
            what, name = (f"damaged: {damage}", DAMAGED + path.name) if damage else ("later", LATER + path.name)
            say(accelerator, f"{path} is {what}; now {name}, and the run goes on from {checkpoint}")
            set_aside(path, name)
        prune_checkpoints(output_dir, args.save_total_limit)  # one more stays where a run was killed before it did
    accelerator.wait_for_everyone()
    return checkpoint, saved_model


def _saved_model(output_dir: Path) -> list[Any] | None:
    """The update that the model in the folder has seen, and whether it is the best; None if that is not known."""
    try:
        record = json.loads((output_dir / "training.json").read_text())
        is_best = record["arguments"]["load_best_model_at_end"]
        complete = any((output_dir / "model").glob("*.safetensors"))
        return [record["updates"], is_best] if complete else None
    except (OSError, ValueError, LookupError, TypeError):
        return None
