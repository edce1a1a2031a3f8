# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Whether a run found in a folder is the one that is to be continued."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from essm_train.run.checkpoints import read_run_state

# Of a configuration: who wrote it, and what may be set on a finished model.
_NOT_OF_WEIGHTS = frozenset(
    {"transformers_version", "_name_or_path", "architectures", "auto_map", "dtype", "torch_dtype", "use_cache"}
    | {"spectral_budget", "trained_budgets", "budget_presets"}
)


def model_identity(model: PreTrainedModel) -> dict[str, Any]:
    """The fields of a model's configuration that its weights depend on, as JSON holds them."""
    fields = json.loads(model.config.to_json_string(use_diff=False))
    return {name: value for name, value in fields.items() if name not in _NOT_OF_WEIGHTS}


def check_same_run(checkpoint: Path, identity: dict[str, Any], args: Any) -> None:
    """Raises ValueError if the checkpoint belongs to a run that would have given other weights.

    What the checkpoint does not know, as it was written by an earlier version, must be an argument at its default, or
    as `EARLIER` of the arguments says.

    Args:
        identity: what defines the run, with the `model_identity` as "model". args: engine.RunArguments.
    """
    reasons = {
        "num_processes": " (the random states of every process, and shards, are part of a checkpoint)",
        "max_steps": " (with --extend it may become larger)",
    }
    saved = read_run_state(checkpoint)["identity"]
    if args.extend and identity["max_steps"] > saved["max_steps"]:
        identity = {name: new for name, new in identity.items() if name not in ("max_steps", "num_train_epochs")}
    defaults = {f.name: f.default for f in dataclasses.fields(args) if f.default is not dataclasses.MISSING}
    known = defaults | args.EARLIER | saved
    changed = {
        name: f"{name} was {old!r} and is now {new!r}{reasons.get(name, '')}"
        for name, new in identity.items()
        if name != "model" and name in known and (old := known[name]) != new
    }
    model = saved.get("model", {})
    for name, new in identity["model"].items():
        if name in model and model[name] != new:
            changed.setdefault(name, f"{name} of the model was {model[name]!r} and is now {new!r}")
    if changed:
        raise ValueError(
            f"cannot resume {checkpoint}: {', '.join(changed.values())}; go back to the old value, choose another "
            "output_dir, or start afresh with --overwrite_output_dir"
        )
