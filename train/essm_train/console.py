# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""The console commands; without the extra `train` each says so instead of a traceback."""

from __future__ import annotations

import functools
import importlib
import sys


def _run(name: str) -> None:
    try:
        command = importlib.import_module(f"essm_train.commands.{name}")
    except ModuleNotFoundError as error:
        sys.exit(f"error: {error.name} is not installed, this command needs pip install 'modeling-essm[train]'")
    command.run()


train_clm = functools.partial(_run, "train_clm")
train_classification = functools.partial(_run, "train_classification")
budget_sweep = functools.partial(_run, "budget_sweep")
calibrate = functools.partial(_run, "calibrate")
export = functools.partial(_run, "export")
prune = functools.partial(_run, "prune")
push_to_hub = functools.partial(_run, "push_to_hub")
