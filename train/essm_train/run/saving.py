# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""The model that a run leaves, as a folder for `from_pretrained`."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn

from essm_train.files import publish, temporary_folder, write_json
from essm_train.run.checkpoints import complete_or_removed
from essm_train.run.task import Task


def save_model(
    accelerator: Accelerator, model: nn.Module, task: Task, folder: Path, records: dict[str, dict] | None = None
) -> None:
    """Publish a loadable folder: weights gathered from all processes, code, and what the task adds. All must call it.

    Args:
        records: JSON files to put beside them, by name.
    """
    state = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        config = task.model.config
        cls = next(c for c in type(task.model).__mro__ if not c.__module__.startswith("torch."))  # not FSDP2's own
        with torch.device("meta"):  # draws no random numbers
            copy = cls(config)
        copy.load_state_dict({name: value.cpu() for name, value in state.items()}, assign=True)
        copy.tie_weights()
        copy.generation_config = getattr(task.model, "generation_config", None)
        temporary = temporary_folder(folder)
        with complete_or_removed(folder, temporary):
            copy.save_pretrained(temporary)
            task.save_beside(temporary)
            for name, record in (records or {}).items():
                write_json(temporary / name, record)
            publish(temporary, folder)
    accelerator.wait_for_everyone()


def copy_model(source: Path, target: Path) -> None:
    """Publish a copy of a saved model's folder."""
    temporary = temporary_folder(target)
    shutil.copytree(source, temporary, dirs_exist_ok=True)
    (temporary / "best.json").unlink(missing_ok=True)
    publish(temporary, target)
