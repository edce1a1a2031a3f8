# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""The training loop with a model that shrinks: sizes, averages and checkpoints across a truncation."""

import json

import pytest
import torch
from recurrences import RecurrentConfig, RecurrentModel, training_data

from essm_train.arguments import RunArguments
from essm_train.data.samples import MapSamples
from essm_train.measure.metric import Metric
from essm_train.run.accelerator import open_run
from essm_train.run.loop import make_schedule, train
from essm_train.run.task import Task
from modeling_essm.companions.truncation.training import InTrainingTruncation

SIZES = [8, 6]


def run(folder, steps=(2, 4), **changes):
    """Six updates with a checkpoint of each; what is left in `model`."""
    fields = {
        "max_steps": 6, "warmup_steps": 4, "learning_rate": 1e-2, "ema_decay": 0.9, "eval_steps": 2, "save_steps": 1,
        "save_total_limit": 10, "logging_steps": 1, "cpu_threads": 1, "budget_schedule": "full",
    }  # fmt: skip
    args = RunArguments(output_dir=str(folder), **(fields | changes))
    truncation = InTrainingTruncation(steps, tau=0.1)
    task = Task(
        model=RecurrentModel(RecurrentConfig(state_sizes=SIZES)),
        source=MapSamples(training_data(), args.seed),
        collate=lambda rows: {name: torch.stack([row[name] for row in rows]) for name in ("u", "labels")},
        training_figure=lambda outputs, batch: outputs.loss,
        evaluate=lambda accelerator, model, K: float(len(model.layers[0].nu)),
        metric=Metric("modes", higher_is_better=True),
        tokens_per_sample=6,
        save_beside=lambda path: None,
        identity={},
        truncation=truncation,
    )
    with open_run(args) as accelerator:
        record = train(accelerator, args, task, make_schedule(args, 1))
    return RecurrentModel.from_pretrained(folder / "model"), truncation.history, record


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("truncated") / "run"
    return folder, *run(folder)


def test_a_run_shrinks_its_model(finished, capsys):
    folder, model, history, record = finished
    assert [entry["step"] for entry in history] == [2, 4]
    assert model.config.state_sizes == history[-1]["sizes"]
    assert all(a < b for a, b in zip(history[-1]["sizes"], SIZES))
    states = [json.loads((folder / f"checkpoint-0000000{i}" / "run_state.json").read_text()) for i in range(1, 7)]
    assert [state["state_sizes"] for state in states] == [
        SIZES, *[history[0]["sizes"]] * 2, *[history[1]["sizes"]] * 3
    ]  # fmt: skip
    # More modes are better here: the best is one of the models since the last truncation all the same.
    assert record["best_update"] == 4


@pytest.mark.parametrize("update", [1, 2, 3, 5])
def test_a_run_resumes_across_truncations(finished, update):
    """With the same bits, weights' average and history included."""
    folder, expected, history, _ = finished
    model, again, _ = run(folder, resume_from_checkpoint=str(folder / f"checkpoint-0000000{update}"))
    assert [entry["after"] for entry in again] == [entry["after"] for entry in history]
    assert model.config.state_sizes == expected.config.state_sizes
    for name, tensor in expected.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name


def test_other_settings_are_another_run(finished):
    with pytest.raises(ValueError, match="truncation was"):
        run(finished[0], steps=(3, 4))
