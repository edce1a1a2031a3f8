# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""The Hub's client without a Hub, and a run folder as essm-train-clm leaves it."""

import json
import shutil
from pathlib import Path
from unittest.mock import create_autospec

import pytest
from helpers import VARIANTS, random_model
from huggingface_hub import HfApi, RepoUrl

from modeling_essm import build_byte_tokenizer

SWEEP = {
    "budgets": [2, 8, 32],
    "bits_per_byte": [2.75, 2.55, 2.5],
    "tokens_per_second": [9000.0, 5000.4, 2000.0],
    "sweet_spot": 8,
    "collapse_boundary": 2,
    "block_size": 512,
    "blocks": 128,
    "model": "/home/somebody/runs/x/model",
}
TRAINING = {
    "data": "A | tiny corpus",
    "updates": 600,
    "tokens_per_update": 2048,
    "hardware": "2 cores of an AMD EPYC",
    "arguments": {"learning_rate": 0.005, "train_file": ["/home/somebody/book.txt"], "hub_token": "hf_secret"},
}
PICTURE = b"\x89PNG\r\n\x1a\n\0not really"


@pytest.fixture
def api(monkeypatch):
    """The client's interface, which refuses calls that the client would not understand, and records the others."""
    api = create_autospec(HfApi, instance=True)
    api.create_repo.return_value = RepoUrl("https://huggingface.co/org/name")
    api.list_repo_files.return_value = [".gitattributes"]
    api.create_commit.return_value.oid = "0" * 40
    monkeypatch.setattr("essm_train.publish.hub.HfApi", lambda: api)
    monkeypatch.setenv("HF_TOKEN", "hf_any")
    return api


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    run = tmp_path_factory.mktemp("saved") / "run"
    random_model(**VARIANTS["memory"]).save_pretrained(run / "model")
    build_byte_tokenizer(512).save_pretrained(run / "model")
    (run / "budget_sweep.json").write_text(json.dumps(SWEEP))
    (run / "training.json").write_text(json.dumps(TRAINING))
    (run / "budget_sweep.png").write_bytes(PICTURE)
    return run


@pytest.fixture
def run(saved, tmp_path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "run"))
