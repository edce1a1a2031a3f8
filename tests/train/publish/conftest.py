# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""A Hub, and a run folder as essm-train-clm leaves it."""

import json
import shutil
from pathlib import Path

import pytest
from helpers import random_model
from hub_run import PICTURE, SWEEP, TRAINING
from hub_server import FakeHub

from modeling_essm import build_byte_tokenizer


@pytest.fixture
def hub():
    with FakeHub() as hub:
        yield hub


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """A run folder as essm-train-clm leaves it."""
    run = tmp_path_factory.mktemp("saved") / "run"
    random_model(gate_hidden_size=4).save_pretrained(run / "model")
    build_byte_tokenizer(512).save_pretrained(run / "model")
    (run / "budget_sweep.json").write_text(json.dumps(SWEEP))
    (run / "training.json").write_text(json.dumps(TRAINING))
    (run / "budget_sweep.png").write_bytes(PICTURE)
    return run


@pytest.fixture
def run(saved, tmp_path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "run"))
