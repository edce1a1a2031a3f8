# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Balanced truncation in essm-train-clm: sizes fall, an interrupted run goes on across one, two ranks truncate."""

import json
import signal

import pytest
import torch
from training_run import final_state, train, train_apart
from transformers import AutoModelForCausalLM

import modeling_essm.companions  # noqa: F401, which makes the Auto classes know the model


@pytest.fixture(scope="module")
def whole(arguments, tmp_path_factory):
    """A run that nothing interrupts."""
    folder = tmp_path_factory.mktemp("whole")
    train(arguments(folder, "diagonal"))
    return folder


def history_of(folder):
    record = json.loads((folder / "training.json").read_text())
    return {"sizes": record["state_sizes"], "history": record["truncations"]}


def test_modes_fall_and_the_model_loads(whole):
    found = history_of(whole)
    assert [attempt["step"] for attempt in found["history"]] == [2, 5]
    first, second = found["history"]
    assert first["before"] == [8, 8] and first["after"] == second["before"] and second["after"] == found["sizes"]
    assert all(0 < after < 8 for after in found["sizes"])
    model = AutoModelForCausalLM.from_pretrained(whole / "model")
    assert model.config.state_sizes == found["sizes"]
    tokens = torch.randint(0, 256, (1, 20), generator=torch.Generator().manual_seed(0))
    assert torch.isfinite(model(tokens).logits).all()


def test_what_was_best_before_a_truncation_is_not_compared(arguments, validations, tmp_path):
    validations([1.0, 2.0, 3.0], budgets=1)
    train(arguments(tmp_path, "diagonal", max_steps=6, eval_steps=2, truncation_attempts=1, truncation_until="3"))
    record = json.loads((tmp_path / "training.json").read_text())
    assert (record["best_update"], record["best_validation"]) == (4, 2.0)


def test_a_killed_run_goes_on_across_a_truncation(whole, arguments, tmp_path):
    """Its checkpoint, of update 3, holds fewer modes than a new model, and it truncates again after update 5."""
    killed = arguments(tmp_path / "run", "diagonal")
    codes, _ = train_apart(killed, tmp_path, ("kill_at_update", 4))
    assert codes == [-signal.SIGKILL]
    train(killed)
    assert history_of(tmp_path / "run")["sizes"] == history_of(whole)["sizes"]
    for mine, theirs in zip(final_state(tmp_path / "run"), final_state(whole), strict=True):
        assert torch.equal(mine, theirs)


def test_two_ranks_truncate(arguments, tmp_path):
    codes, log = train_apart(arguments(tmp_path / "run", "diagonal", save_steps=8), tmp_path, ranks=2)
    assert codes == [0, 0], log
    found = history_of(tmp_path / "run")
    assert found["history"][0]["before"] == [8, 8] and all(after < 8 for after in found["sizes"])


def test_an_extended_run_keeps_its_attempts(arguments, tmp_path):
    """An end that is a share of all updates stays where the first plan had it: later, the model would be done."""
    share = {"truncation_attempts": 1, "truncation_until": "0.5"}
    train(arguments(tmp_path, "diagonal", max_steps=2, **share))
    sizes = history_of(tmp_path)["sizes"]
    train([*arguments(tmp_path, "diagonal", max_steps=8, **share), "--extend"])
    extended = history_of(tmp_path)
    assert [attempt["step"] for attempt in extended["history"]] == [1] and extended["sizes"] == sizes
