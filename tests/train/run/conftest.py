# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""A tiny language-model run: its data, its arguments, and one that nothing interrupted."""

from pathlib import Path

import pytest
from training_run import (
    command_line,
    train,
    write_held_out,
    write_tables,
    write_text,
)


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> dict:
    folder = tmp_path_factory.mktemp("data")
    held_out = write_held_out(folder)
    return {
        "map-style": {"train_file": write_text(folder), "validation_file": held_out},
        "streaming": {
            "train_file": write_tables(folder),
            "validation_file": held_out,
            "streaming": True,
            "shuffle_buffer": 5,
        },
        "gated": {
            "train_file": write_text(folder),
            "validation_file": held_out,
            "block": "gated",
            "inner_size": 24,
            "mixing_size": 1,
        },
    }


@pytest.fixture(scope="module")
def arguments(data):
    """Arguments of a tiny run in that folder; keywords override."""

    def build(output_dir: Path, kind: str = "map-style", **changes) -> list[str]:
        return command_line(output_dir, **{**data[kind], **changes})

    return build


@pytest.fixture(scope="module")
def finished(tmp_path_factory, arguments) -> Path:
    """A run that nothing interrupted."""
    folder = tmp_path_factory.mktemp("finished")
    train(arguments(folder / "run"))
    return folder / "run"
