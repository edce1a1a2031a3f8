# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""train_clm.py with --context_parallel on CPU ranks: the same as one rank, and resumed exactly."""

import signal
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
from test_distributed import FSDP2
from training_run import command_line, model_weights, read_log, same, train, train_apart, write_text

from essm_train.run import loop
from essm_train.run.checkpoints import list_checkpoints
from modeling_essm import ESSMConfig


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> dict:
    folder = tmp_path_factory.mktemp("text")
    return {"train_file": write_text(folder), "dropout": 0.0, "validation_blocks": 1, "sweep_blocks": 1}


def run(folder: Path, ranks: int, environment: dict | None = None, **changes) -> list[dict]:
    """The log of a run."""
    folder.mkdir()
    order = command_line(folder / "run", **changes)
    codes, log = train_apart(order, folder, ranks=ranks, samples=False, environment=environment)
    assert codes == [0] * ranks, log
    return read_log(folder / "run")


def assert_same_figures(ours: list[dict], theirs: list[dict]) -> None:
    """Losses are of size 6, where a rounding step is 5e-7: up to twenty of them, one an update."""
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs):
        for name in ("loss", "bits/byte", "gradient_norm", "budget"):
            assert a[name] == pytest.approx(b[name], abs=1e-5), (a, b)


def test_twenty_updates_on_two_ranks_equal_one(text, tmp_path):
    """Each update at its own budgets, one learning from the other; the last shard scores a position less.

    A wrong share of that position would show as 1 / 31 of the loss.
    """
    changes = text | {"max_steps": 20, "save_steps": 20, "eval_steps": 20, "budget_schedule": "sandwich"}
    changes |= {"sandwich_random": 0, "distillation_weight": 0.5}
    one = run(tmp_path / "one", 1, **changes)
    two = run(tmp_path / "two", 2, context_parallel=2, **changes)
    assert len(one) == 20
    assert_same_figures(two, one)


def test_two_sharded_ranks_equal_one(text, tmp_path):
    changes = text | {"max_steps": 3}
    one = run(tmp_path / "one", 1, **changes)
    two = run(tmp_path / "two", 2, FSDP2, context_parallel=2, gradient_checkpointing=True, **changes)
    assert_same_figures(two, one)


@pytest.mark.slow
def test_four_ranks_are_two_replicas_of_two(text, tmp_path):
    changes = text | {"max_steps": 3, "gradient_accumulation_steps": 2}
    one = run(tmp_path / "one", 1, **changes)
    four = run(tmp_path / "four", 4, **changes | {"context_parallel": 2, "per_device_train_batch_size": 1})
    assert_same_figures(four, one)


@pytest.mark.slow
def test_a_killed_run_resumes_bit_for_bit(text, tmp_path):
    """With dropout, so that the random state of each rank matters."""
    changes = text | {"dropout": 0.1, "context_parallel": 2}
    run(tmp_path / "whole", 2, **changes)
    killed = tmp_path / "killed"
    killed.mkdir()
    order = command_line(killed / "run", **changes)
    codes, _ = train_apart(order, killed, ("kill_at_update", 4), ranks=2, samples=False)
    assert codes == [-signal.SIGKILL] * 2
    codes, log = train_apart(order, killed, ranks=2, samples=False)
    assert codes == [0, 0] and "checkpoint-00000003 holds update 3" in log, log
    assert same(killed / "run", tmp_path / "whole" / "run")
    assert model_weights(killed / "run" / "model")
    assert [path.name for path in list_checkpoints(killed / "run")] == ["checkpoint-00000006", "checkpoint-00000008"]


def test_what_cannot_work_is_refused(text, tmp_path):
    for changes, reason in (
        ({"context_parallel": 2}, "context_parallel must divide the 1 processes, got 2"),
        ({"context_parallel": 3}, "block_size must be a multiple of context_parallel = 3, got 32"),
        ({"context_parallel": 0}, "context_parallel must be at least 1, got 0"),
        ({"context_parallel": 2, "torch_compile": True}, "torch_compile needs context_parallel 1, got 2"),
        ({"context_parallel": 2, "block_size": 4}, r"block_size must be in \[6, filter_length = .*\], got 4: with"),
        ({"context_parallel": 4, "block_size": 16, "conv_kernel_size": 6}, r"block_size must be in \[20, .*, got 16"),
    ):
        with pytest.raises(ValueError, match=reason):
            train(command_line(tmp_path / "run", **text | changes))
    ESSMConfig(block="gated", conv_kernel_size=8).save_pretrained(tmp_path / "shape")
    changes = {"context_parallel": 2, "block_size": 12, "config_name": tmp_path / "shape"}
    with pytest.raises(ValueError, match=r"block_size must be in \[14, .*conv_kernel_size = 8 reads before a step"):
        train(command_line(tmp_path / "run", **text | changes))


def test_the_order_of_parts_is_not_guessed():
    with mock.patch.object(loop, "context_parallel") as entered:
        loop._Run._sequences(SimpleNamespace(model="model", context="group"))
    entered.assert_called_once_with("model", "group", "plain")
