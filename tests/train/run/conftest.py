# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""A tiny language-model run: its data, its arguments, and one that nothing interrupted."""

import itertools
from pathlib import Path
from types import SimpleNamespace

import pytest
from training_run import command_line, train, write_held_out, write_tables, write_text

from essm_train.run import language


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> dict:
    folder = tmp_path_factory.mktemp("data")
    held_out, text = {"validation_file": write_held_out(folder)}, {"train_file": write_text(folder)}
    stream = {"train_file": write_tables(folder), "streaming": True, "shuffle_buffer": 5}
    diagonal = {"architecture": "diagonal_ssm", "parameterization": "lru", "state_size": 8, "truncation_tau": 0.3}
    diagonal |= {"truncation_attempts": 2, "truncation_until": "5"}  # after updates 2 and 5
    diagonal |= dict.fromkeys(("num_spectral_channels", "filter_length"))
    kinds = {"map-style": text, "streaming": stream, "diagonal": text | diagonal}
    return {name: kind | held_out for name, kind in kinds.items()}


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


@pytest.fixture
def validations(monkeypatch):
    """Sets the validation figures of a run, one per validation, the same at every budget."""

    def use(figures: list[float], budgets: int = 3) -> None:
        make_task = language.make_task

        def task(*args):
            made, calls = make_task(*args), itertools.count()
            made.validation = SimpleNamespace(value=lambda *_, **__: figures[next(calls) // budgets])
            return made

        monkeypatch.setattr(language, "make_task", task)

    return use
