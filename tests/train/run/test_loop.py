# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""essm_train/run: a run ends with the same bits whatever happens to it, or says why not."""

import dataclasses
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.tracking import GeneralTracker
from helpers import ROOT
from torch import nn
from training_run import (
    NUM_BLOCKS,
    command_line,
    final_state,
    model_weights,
    read_log,
    read_samples,
    same,
    train,
    train_apart,
    write_held_out,
    write_tables,
    write_text,
)
from transformers import TrainingArguments, get_scheduler

from essm_train.arguments import SCHEDULES, RunArguments, parse_arguments
from essm_train.commands import train_clm
from essm_train.files import delete_folder, delete_temporary_folders, publish, temporary_folder
from essm_train.measure.metric import Metric
from essm_train.run import accelerator as run_accelerator
from essm_train.run import loop
from essm_train.run.accelerator import make_accelerator, open_run
from essm_train.run.average import WeightAverage
from essm_train.run.budgets import eval_budgets
from essm_train.run.checkpoints import list_checkpoints
from essm_train.run.finiteness import non_finite
from essm_train.run.learning_rate import make_scheduler, parameter_groups
from essm_train.run.loop import Progress
from modeling_essm import ESSMConfig, ESSMForCausalLM

KILLED = [-signal.SIGKILL]


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
            "mixing_size": 2,
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


# ---------------------------------------------------------------------------------------------------------------------
# Arguments.


def test_arguments_come_from_files_and_are_overridden(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text("learning_rate: 1e-3\ntrain_file: x.txt\nstreaming: true\neval_budgets: [2, 4]\nema_decay: null\n")
    args = parse_arguments(train_clm.CLMArguments, [str(path), "--learning_rate", "0.5", "--max_steps", "7"])
    assert (args.learning_rate, args.max_steps, args.train_file) == (0.5, 7, ["x.txt"])
    assert (args.streaming, args.eval_budgets, args.ema_decay) == (True, [2, 4], 0.0)
    assert parse_arguments(train_clm.CLMArguments, [str(path)]).learning_rate == 1e-3  # which YAML reads as text
    path = tmp_path / "a.json"
    path.write_text(json.dumps({"max_steps": 7, "train_file": ["x.txt", "y.txt"], "num_train_epochs": 1}))
    args = parse_arguments(train_clm.CLMArguments, [str(path), "--train_file", "z.txt"])
    assert (args.max_steps, args.train_file, args.num_train_epochs) == (7, ["z.txt"], 1.0)


@pytest.mark.parametrize(
    "content", ["max_stepz: 3", "- 3", "max_steps: 1.5", "learning_rate: fast", "streaming: maybe"]
)
def test_broken_argument_files_are_refused(content, tmp_path, capsys):
    path = tmp_path / "a.yaml"
    path.write_text(content)
    with pytest.raises((ValueError, SystemExit)) as error:
        parse_arguments(train_clm.CLMArguments, [str(path)])
    said = str(error.value) + capsys.readouterr().err
    reasons = "unknown arguments ['max_stepz']", "must hold a table", "invalid int", "invalid float", "Truthy value"
    assert any(reason in said for reason in reasons)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_steps": 0}, "max_steps must be at least 1, got 0"),
        ({"save_steps": 0}, "save_steps must be at least 1, got 0"),
        ({"warmup_steps": -1}, "warmup_steps must be at least 0, got -1"),
        ({"ema_decay": 1.0}, r"ema_decay must be in \[0, 1\), got 1.0"),
        ({"num_train_epochs": 0.0}, "num_train_epochs must be positive and finite, got 0.0"),
        ({"num_train_epochs": math.inf}, "num_train_epochs must be positive and finite, got inf"),
        ({"learning_rate": math.nan}, r"learning_rate must be in \[0, inf\), got nan"),
        ({"learning_rate": -1.0}, r"learning_rate must be in \[0, inf\), got -1.0"),
        ({"weight_decay": math.nan}, r"weight_decay must be in \[0, inf\), got nan"),
        ({"weight_decay": math.inf}, r"weight_decay must be in \[0, inf\), got inf"),
        ({"adam_beta2": math.nan}, r"adam_beta2 must be in \[0, 1\), got nan"),
        ({"max_grad_norm": math.nan}, r"max_grad_norm must be in \(0, inf\], got nan"),
        ({"max_grad_norm": 0.0}, r"max_grad_norm must be in \(0, inf\], got 0.0"),
        ({"extend": True, "overwrite_output_dir": True}, "give extend or overwrite_output_dir, not both"),
        ({"extend": True, "resume_from_checkpoint": "a"}, "give extend or resume_from_checkpoint, not both"),
        ({"lr_scheduler_type": "reduce_lr_on_plateau"}, "lr_scheduler_type must be one of cosine, linear, .*, got"),
        ({"distillation_weight": 0.5}, "distillation_weight needs budget_schedule 'sandwich'"),
        ({"push_to_hub": True}, "push_to_hub needs hub_model_id"),
    ],
    ids=str,
)
def test_wrong_arguments_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        RunArguments(**changes)


TODAY = {
    "per_device_batch_size": "per_device_train_batch_size",
    "validate_every": "eval_steps",
    "checkpoint_every": "save_steps",
    "keep_checkpoints": "save_total_limit",
    "log_every": "logging_steps",
    "log_with": "report_to",
    "deterministic": "full_determinism",
    "hub_private": "hub_private_repo",
    "final_model": "load_best_model_at_end",
}


@pytest.mark.parametrize("old", TODAY)
def test_names_of_before_are_refused_with_those_of_today(old, tmp_path):
    for known in (RunArguments, TrainingArguments):
        assert TODAY[old] in {field.name for field in dataclasses.fields(known)}
    file = tmp_path / "a.yaml"
    file.write_text(f"max_steps: 3\n{old}: 4\n")
    for given in ([f"--{old}", "4"], [f"--{old}=4"], [f"--{old.replace('_', '-')}", "4"], [str(file)]):
        with pytest.raises(ValueError, match=f"^{old} is called {TODAY[old]} now") as error:
            parse_arguments(train_clm.CLMArguments, given)
        assert ("'best' is now true, 'last' is false" in str(error.value)) == (old == "final_model")


def test_validated_budgets():
    schedule = SimpleNamespace(budgets=(2, 3, 4, 6, 8))
    assert eval_budgets(RunArguments(), schedule, 8) == (2, 4, 8)
    assert eval_budgets(RunArguments(eval_budgets=[8, 5, 5]), schedule, 8) == (5, 8)
    with pytest.raises(ValueError, match=r"eval_budgets must be integers in \[1, 8\], got 9"):
        eval_budgets(RunArguments(eval_budgets=[9]), schedule, 8)


# ---------------------------------------------------------------------------------------------------------------------
# What an update does.


def test_only_matrices_decay():
    model = ESSMForCausalLM(ESSMConfig(hidden_size=8, num_hidden_layers=1, num_spectral_channels=4, filter_length=64))
    decayed, others = parameter_groups(model, 0.1)
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.1, 0.0)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    exempt = {names[id(p)] for p in others["params"]}
    assert exempt == {n for n in names.values() if n.endswith(".bias") or "norm" in n or "embed" in n}
    assert len(decayed["params"]) + len(exempt) == len(names)


@pytest.mark.parametrize("schedule", [{}, {"budget_schedule": "sandwich", "distillation_weight": 0.5}], ids=str)
def test_accumulated_gradients_equal_one_large_batch(schedule, arguments, tmp_path):
    shared = {"dropout": 0.0, "max_steps": 3, "learning_rate": 1e-3, **schedule}
    train(arguments(tmp_path / "large", per_device_train_batch_size=4, **shared))
    train(arguments(tmp_path / "accumulated", gradient_accumulation_steps=4, per_device_train_batch_size=1, **shared))
    for a, b in zip(final_state(tmp_path / "large"), final_state(tmp_path / "accumulated"), strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-4)  # fp32 sums in another order
    for a, b in zip(read_log(tmp_path / "large"), read_log(tmp_path / "accumulated"), strict=True):
        assert [a[name] for name in ("loss", "bits/byte", "budget", "gradient_norm")] == pytest.approx(
            [b[name] for name in ("loss", "bits/byte", "budget", "gradient_norm")], rel=1e-4
        )


def test_learning_rate_warms_up_and_falls_along_a_cosine(finished):
    rates = [line["learning_rate"] for line in read_log(finished)]
    peak, warmup, steps = 5e-3, 2, 8
    done = range(1, steps + 1)  # the rate of the next update
    cosine = [peak * 0.5 * (1 + math.cos(math.pi * (n - warmup) / (steps - warmup))) for n in done]
    assert rates == pytest.approx([peak * n / warmup if n < warmup else c for n, c in zip(done, cosine)], abs=1e-12)


def test_the_learning_rate_may_take_another_course(arguments, tmp_path, finished):
    train(arguments(tmp_path, lr_scheduler_type="linear", max_steps=6))
    rates = [line["learning_rate"] for line in read_log(tmp_path)]
    assert rates == pytest.approx([5e-3 * share for share in (1 / 2, 1, 3 / 4, 1 / 2, 1 / 4, 0)], abs=1e-12)
    with pytest.raises(ValueError, match="lr_scheduler_type was 'cosine' and is now 'linear'"):
        train(arguments(finished, lr_scheduler_type="linear"))


def test_an_earlier_trainer_does_not_stop_the_optimizer(arguments, tmp_path, finished):
    GradientState().sync_gradients = False  # as Trainer leaves it where accumulation was cut short
    train(arguments(tmp_path))
    assert all(torch.equal(a, b) for a, b in zip(final_state(tmp_path), final_state(finished), strict=True))


def test_gradients_are_clipped(arguments, tmp_path):
    for norm in (1e-3, 1e-6):  # AdamW's first moment is a tenth of the gradient; all norms here are above 0.1
        train(arguments(tmp_path / str(norm), max_steps=1, max_grad_norm=norm))
        moments = torch.load(tmp_path / str(norm) / "checkpoint-00000001" / "optimizer.bin")["state"].values()
        total = math.sqrt(sum(float(state["exp_avg"].square().sum()) for state in moments))
        assert total == pytest.approx(norm / 10, rel=1e-3)
        assert read_log(tmp_path / str(norm))[0]["gradient_norm"] > 0.1  # before


def test_weights_are_averaged():
    torch.manual_seed(0)
    model = nn.Linear(3, 2).to(torch.float64)
    expected, average = model.weight.detach().clone(), WeightAverage(model, 0.5)
    for n in range(1, 13):
        with torch.no_grad():
            for p in model.parameters():
                p.add_(torch.randn_like(p))
        average.update()
        decay = min(0.5, (1 + n) / (10 + n))
        expected = decay * expected + (1 - decay) * model.weight.detach()
    own = model.weight.clone()
    with average.applied():
        torch.testing.assert_close(model.weight, expected, rtol=1e-12, atol=1e-12)
    assert torch.equal(model.weight, own) and not torch.allclose(own, expected)
    restored = WeightAverage(nn.Linear(3, 2).to(torch.float64), 0.5)
    restored.load_state_dict(average.state_dict())
    assert restored.updates == 12 and torch.equal(restored.average[0], average.average[0])


def test_the_average_is_kept_in_fp32():
    model = nn.Linear(3, 2).to(torch.bfloat16)
    average = WeightAverage(model, 0.999)
    assert {a.dtype for a in average.average} == {torch.float32}
    average.load_state_dict({"updates": 10**6, "average": average.average})
    with torch.no_grad():
        model.weight.mul_(1.01)
    before = average.average[0].clone()
    average.update()
    assert not torch.equal(average.average[0], before)  # bf16 would round a thousandth of a hundredth away


def test_the_average_is_what_is_validated_and_saved(finished):
    checkpoint = list_checkpoints(finished)[-1]
    saved, own = model_weights(finished / "model"), torch.load(checkpoint / "pytorch_model.bin")
    average = torch.load(checkpoint / "average.pt")["average"]
    assert any(not torch.equal(saved[name], own[name]) for name in saved)
    sizes = sorted(t.norm().item() for t in average)
    assert sizes == sorted(t.norm().item() for t in saved.values())


@pytest.mark.parametrize("changes", [{"gradient_checkpointing": True}, {"full_determinism": True}], ids=str)
def test_settings_that_change_no_weight(changes, arguments, finished, tmp_path, monkeypatch):
    if "full_determinism" in changes:
        for name in ("CUDA_LAUNCH_BLOCKING", "CUBLAS_WORKSPACE_CONFIG", "FLASH_ATTENTION_DETERMINISTIC"):
            monkeypatch.setenv(name, "")  # restored afterwards
    called, forward = [], ESSMForCausalLM.forward

    def noting(self, *args, **kwargs):
        called.append((self.is_gradient_checkpointing, torch.are_deterministic_algorithms_enabled()))
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(ESSMForCausalLM, "forward", noting)
    try:
        train([*arguments(tmp_path), *(f"--{name}" for name in changes)])
    finally:
        torch.use_deterministic_algorithms(False)
    assert set(called) == {("gradient_checkpointing" in changes, "full_determinism" in changes)}
    assert same(tmp_path, finished)


def test_bf16_keeps_fp32_weights(arguments, finished, tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    seen, forward = [], torch.nn.functional.linear
    monkeypatch.setattr(torch.nn.functional, "linear", lambda *a: [y := forward(*a), seen.append(y.dtype)][0])
    try:
        AcceleratorState._reset_state(reset_partial_state=True)
        train(arguments(tmp_path))
        with pytest.raises(ValueError, match="mixed_precision was 'no' and is now 'bf16'"):
            train(arguments(finished))
    finally:
        monkeypatch.undo()
        AcceleratorState._reset_state(reset_partial_state=True)
    assert torch.bfloat16 in seen
    checkpoint = list_checkpoints(tmp_path)[-1]
    assert {t.dtype for t in torch.load(checkpoint / "pytorch_model.bin").values()} == {torch.float32}
    assert {t.dtype for t in model_weights(tmp_path / "model").values()} == {torch.float32}
    loss, expected = (read_log(folder)[-1]["loss"] for folder in (tmp_path, finished))
    assert loss != expected and loss == pytest.approx(expected, rel=0.01)


def test_compiled_training(arguments, tmp_path, monkeypatch):
    """Without code generation, which takes a minute: what is captured, and under which names weights are saved."""
    compile_model = nn.Module.compile
    monkeypatch.setattr(
        ESSMForCausalLM, "compile", lambda self: compile_model(self, backend="aot_eager"), raising=False
    )
    shared = {"max_steps": 2, "dropout": 0.0, "num_hidden_layers": 1, "eval_budgets": 2}
    train(arguments(tmp_path / "plain", **shared))
    torch._dynamo.reset()
    captured = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    train([*arguments(tmp_path / "compiled", **shared), "--torch_compile"])
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > captured
    ours, theirs = (model_weights(tmp_path / name / "model") for name in ("compiled", "plain"))
    assert ours.keys() == theirs.keys()
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], atol=1e-5, rtol=0.0)


# ---------------------------------------------------------------------------------------------------------------------
# Validation: best, early stopping, records.


@pytest.fixture
def validations(monkeypatch):
    """Sets the validation figures of a run, one per validation, the same at every budget."""

    def use(figures: list[float]) -> None:
        make_task = train_clm.make_task

        def task(*args):
            made, calls = make_task(*args), []
            made.evaluate = lambda *_: [figures[len(calls) // 3], calls.append(1)][0]
            return made

        monkeypatch.setattr(train_clm, "make_task", task)

    return use


def test_the_best_model_is_the_earlier_of_equals(arguments, validations, tmp_path):
    validations([3.0, 2.0, 2.0, 2.5])
    train(arguments(tmp_path, eval_steps=2, save_steps=4, load_best_model_at_end=True))
    best = json.loads((tmp_path / "best" / "best.json").read_text())
    assert best["update"] == 4 and best["validation"] == {"2": 2.0, "4": 2.0, "8": 2.0}
    assert [line.get("validation bits/byte K=4") for line in read_log(tmp_path)] == [
        None, 3.0, None, 2.0, None, 2.0, None, 2.5,
    ]  # fmt: skip
    then = torch.load(tmp_path / "checkpoint-00000004" / "average.pt")["average"]
    best_weights, final = (model_weights(tmp_path / name) for name in ("best", "model"))
    assert all(torch.equal(best_weights[name], final[name]) for name in final)
    assert sorted(t.norm().item() for t in then) == sorted(t.norm().item() for t in final.values())
    assert not (tmp_path / "model" / "best.json").exists()


def test_a_metric_may_be_better_when_higher():
    accuracy, loss = Metric("accuracy", True), Metric("loss", False)
    progress = Progress(update=3, best=0.5, best_update=1, validations_without_best=1)
    assert not progress.record_validation(0.5, accuracy) and progress.validations_without_best == 2
    assert progress.record_validation(0.6, accuracy)
    assert progress == Progress(update=3, best=0.6, best_update=3, validations_without_best=0)
    assert not progress.record_validation(0.6, loss)
    assert not progress.record_validation(math.nan, loss)
    progress.best = math.nan
    assert progress.record_validation(9.0, loss)


def test_early_stopping_holds_over_a_restart(arguments, validations, tmp_path, capsys):
    stop = {"eval_steps": 1, "early_stopping_patience": 2, "save_steps": 3, "save_total_limit": 9}
    validations([3.0, 2.0, 2.5, 2.1, 1.0])
    train(arguments(tmp_path, **stop))
    assert "stopped early: no new best since update 2" in capsys.readouterr().out
    assert [path.name for path in list_checkpoints(tmp_path)] == ["checkpoint-00000003", "checkpoint-00000004"]
    validations([])
    train(arguments(tmp_path, **stop))
    assert "finished already" in capsys.readouterr().out
    delete_folder(tmp_path / "checkpoint-00000004")
    validations([2.1])  # of update 4: the count goes on
    train(arguments(tmp_path, **stop))
    assert "stopped early" in capsys.readouterr().out and len(read_log(tmp_path)) == 4


def test_epochs_are_counted_in_samples(arguments, tmp_path):
    train(arguments(tmp_path, num_train_epochs=0.5, per_device_train_batch_size=4, save_steps=100))
    assert [path.name for path in list_checkpoints(tmp_path)] == [f"checkpoint-{NUM_BLOCKS // 2 // 4:08d}"]
    with pytest.raises(ValueError, match="num_train_epochs needs a data set of known length"):
        train(arguments(tmp_path / "stream", "streaming", num_train_epochs=1))


def test_trackers_get_what_the_log_gets(arguments, tmp_path, monkeypatch):
    class Memory(GeneralTracker):
        name, requires_logging_directory, tracker = "memory", False, None
        started, logged, finished = [], [], []

        def store_init_configuration(self, values):
            self.started.append(values)

        def log(self, values, step=None, **kwargs):
            self.logged.append({"update": step, **values})

        def finish(self):
            self.finished.append(True)

    with pytest.raises(ValueError, match=r"report_to must name installed trackers, .* got 'nonsense'"):
        train(arguments(tmp_path, report_to="nonsense"))
    monkeypatch.setattr(run_accelerator, "get_available_trackers", lambda: ["memory"])
    accelerator = run_accelerator.Accelerator
    monkeypatch.setattr(
        run_accelerator, "Accelerator", lambda log_with, **rest: accelerator(log_with=[log_with[0], Memory()], **rest)
    )
    train(arguments(tmp_path, report_to="memory"))
    assert Memory.logged == read_log(tmp_path) and len(Memory.logged) == 8 and Memory.finished == [True]
    assert Memory.started[0]["learning_rate"] == 0.005
    assert all(isinstance(value, (int, float, str)) for value in Memory.started[0].values())


# ---------------------------------------------------------------------------------------------------------------------
# Interruption.

EPOCH_AND_A_HALF = {
    "per_device_train_batch_size": 1,
    "gradient_accumulation_steps": 2,
    "max_steps": 18,
    "save_steps": 4,
    "eval_steps": 5,
}


@pytest.mark.parametrize("kind", ["map-style", "streaming", "gated"])
def test_a_run_killed_again_and_again_ends_with_the_same_bits(kind, arguments, tmp_path):
    """In mid-epoch, between checkpoints and inside of a checkpoint, with the buffer and the rest of a row half used."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    for folder in (whole, killed):
        folder.mkdir()
    codes, log = train_apart(arguments(whole / "run", kind, **EPOCH_AND_A_HALF), whole)
    assert codes == [0], log
    order = arguments(killed / "run", kind, **EPOCH_AND_A_HALF)
    of = lambda *updates: [f"checkpoint-{update:08d}" for update in updates]  # noqa: E731
    faults = {
        ("kill_at_update", 2): of(),
        ("kill_at_update", 6): of(4),
        ("kill_in_file", "checkpoint-00000008/optimizer.bin"): of(4),
        ("kill_at_rename", "checkpoint-00000008"): of(4),
        ("kill_at_rename", "deleted-checkpoint-00000004"): of(4, 8, 12),
        ("kill_in_file", "checkpoint-00000016/data.pt"): of(8, 12),  # the one too many is gone
        ("kill_at_rename", "run/model"): of(16, 18),
    }
    for fault, left in faults.items():
        codes, log = train_apart(order, killed, fault)
        assert codes == KILLED, log
        assert [path.name for path in list_checkpoints(killed / "run")] == left
        half_written = [path.name for path in (killed / "run").glob(".tmp-*")]
        assert bool(half_written) == (fault[0] != "kill_at_update" and "deleted" not in fault[1])
    codes, log = train_apart(order, killed)
    assert codes == [0] and "finished already" in log, log
    assert same(killed / "run", whole / "run")
    assert not list((killed / "run").glob(".tmp-*"))
    seen = read_samples(killed, 18)
    assert seen == read_samples(whole, 18)
    epoch = [block for blocks in seen[:12] for block in blocks]
    assert len(epoch) == len(set(epoch)) == NUM_BLOCKS  # every sample exactly once
    assert len({block for blocks in seen[12:] for block in blocks}) == 12  # and none twice in the half after it
    for name in ("best", "model"):
        ours, theirs = (model_weights(folder / "run" / name) for folder in (killed, whole))
        assert all(torch.equal(ours[n], theirs[n]) for n in theirs)
    ours, theirs = (read_log(folder / "run") for folder in (killed, whole))
    for line in (*ours, *theirs):
        del line["tokens_per_second"]
    assert ours == theirs  # no update missing, none twice


def test_a_best_model_killed_while_it_is_replaced_comes_back(arguments, tmp_path):
    order = arguments(tmp_path / "run", eval_steps=2, load_best_model_at_end=True)
    assert train_apart(order, tmp_path)[0] == [0]
    expected = json.loads((tmp_path / "run" / "best" / "best.json").read_text())
    shutil.rmtree(tmp_path / "run")
    codes, log = train_apart(order, tmp_path, ("kill_at_rename", "replaced-best"))
    assert codes == KILLED, log
    assert train_apart(order, tmp_path)[0] == [0]
    assert json.loads((tmp_path / "run" / "best" / "best.json").read_text()) == expected


def test_what_was_being_replaced_comes_back(tmp_path):
    for name in (".tmp-replaced-best", ".tmp-best", ".tmp-replaced-model", "model"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "weights").write_text(name)
    delete_temporary_folders(tmp_path)  # killed between the renames of `best`, and after those of `model`
    assert {path.name: (path / "weights").read_text() for path in tmp_path.iterdir()} == {
        "best": ".tmp-replaced-best",
        "model": "model",
    }


def test_checkpoints_hold_everything_and_a_bounded_number_is_kept(finished):
    assert [path.name for path in list_checkpoints(finished)] == ["checkpoint-00000006", "checkpoint-00000008"]
    names = {path.name for path in list_checkpoints(finished)[-1].iterdir()}
    scheduler, rng = "custom_checkpoint_0.pkl", "random_states_0.pkl"
    files = {"pytorch_model.bin", "optimizer.bin", scheduler, rng, "average.pt", "data.pt", "run_state.json"}
    assert names == files | {"manifest.json"}
    manifest = json.loads((list_checkpoints(finished)[-1] / "manifest.json").read_text())
    assert manifest.keys() == files
    state = json.loads((list_checkpoints(finished)[-1] / "run_state.json").read_text())
    assert state["update"] == 8 and state["samples_seen"] == 16
    assert state["budget"]["schedule"] == "discrete" and state["budget"]["trained"] == [2, 3, 4, 6, 8]
    assert state["identity"]["learning_rate"] == 0.005 and state["identity"]["num_processes"] == 1
    data_state = torch.load(list_checkpoints(finished)[-1] / "data.pt", weights_only=False)
    assert data_state == {"position": 16}  # not that of the batch which is read ahead


def test_a_finished_run_is_not_trained_again(finished, arguments, capsys, monkeypatch):
    before = {path: path.stat().st_mtime_ns for path in list_checkpoints(finished)}
    monkeypatch.setattr(loop, "_accumulate", None)  # an update would call it
    train(arguments(finished))
    assert "finished already" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in list_checkpoints(finished)} == before


def test_overwriting_starts_afresh(arguments, tmp_path):
    train(arguments(tmp_path, max_steps=3))
    train([*arguments(tmp_path, max_steps=2, seed=1), "--overwrite_output_dir"])
    assert [path.name for path in list_checkpoints(tmp_path)] == ["checkpoint-00000002"]
    assert [line["update"] for line in read_log(tmp_path)] == [1, 2]


def test_resuming_with_other_arguments_is_refused_by_name(finished, arguments, tmp_path):
    before = final_state(finished)
    with pytest.raises(ValueError, match=r"learning_rate was 0.005 and is now 0.001; go back to the old value"):
        train(arguments(finished, learning_rate=0.001))
    with pytest.raises(
        ValueError, match=r"seed was 0 and is now 1, .*ema_decay was 0.9|ema_decay was 0.9.*, seed was 0"
    ):
        train(arguments(finished, seed=1, ema_decay=0.5))
    with pytest.raises(ValueError, match=r"streaming was False and is now True.*sha256 of the training text was"):
        train(arguments(finished, "streaming"))
    assert all(torch.equal(a, b) for a, b in zip(before, final_state(finished)))
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    train(
        arguments(tmp_path, save_steps=5, save_total_limit=1, logging_steps=3, load_best_model_at_end=True)
    )  # may change
    assert [path.name for path in list_checkpoints(tmp_path)] == ["checkpoint-00000008"]


@pytest.mark.parametrize("kind", ["map-style", "streaming"])
def test_resuming_on_changed_data_is_refused(kind, data, tmp_path):
    """Of a stream the first rows and the sizes of files are looked at."""
    copies = {**data[kind], "max_steps": 1}
    for name in ("train_file", "validation_file"):
        paths = copies[name] if isinstance(copies[name], list) else [copies[name]]
        copies[name] = [shutil.copy(path, tmp_path) for path in paths]
    train(command_line(tmp_path / "run", **copies))
    held_out = Path(copies["validation_file"][0])
    text = held_out.read_text()
    held_out.write_text(text.replace("a", "b"))
    with pytest.raises(ValueError, match="sha256 of the validation blocks was"):
        train(command_line(tmp_path / "run", **copies))
    held_out.write_text(text)
    shutil.copy(copies["train_file"][-1], tmp_path / "other")
    if kind == "streaming":
        write_tables(tmp_path, files=2)  # part-0 and part-1 with other rows; part-2 as it was
    else:
        Path(copies["train_file"][0]).write_text(Path(copies["train_file"][0]).read_text().replace("a", "b"))
    with pytest.raises(ValueError, match="sha256 of the training text was"):
        train(command_line(tmp_path / "run", **copies))


def as_of_an_earlier_version(checkpoint: Path) -> Path:
    """Without what later versions added: a manifest, the model's configuration and the plan of the learning rate."""
    (checkpoint / "manifest.json").unlink(missing_ok=True)
    state = json.loads((checkpoint / "run_state.json").read_text())
    state.pop("plan", None)
    for name in ("model", "extend"):
        state["identity"].pop(name, None)
    (checkpoint / "run_state.json").write_text(json.dumps(state))
    return checkpoint


def test_checkpoints_of_earlier_versions_resume(arguments, tmp_path):
    """They hold the paper's block and do not say so."""
    whole, folder = tmp_path / "whole", tmp_path / "run"
    train(arguments(whole, block="paper"))
    shutil.copytree(whole, folder)
    delete_folder(folder / "checkpoint-00000008")
    state = as_of_an_earlier_version(folder / "checkpoint-00000006") / "run_state.json"
    known = json.loads(state.read_text())
    for name in ("adam_beta2", "block", "inner_size", "embedding_initializer_range"):  # as if they were new
        known["identity"].pop(name)
    state.write_text(json.dumps(known))
    with pytest.raises(ValueError, match=r"block was 'paper' and is now 'gated'"):
        train(arguments(folder))
    with pytest.raises(ValueError, match=r"adam_beta2 was 0.95 and is now 0.9"):
        train(arguments(folder, block="paper", adam_beta2=0.9))
    train(arguments(folder, block="paper"))
    assert same(folder, whole)


def test_a_run_goes_back_to_the_checkpoint_that_is_asked_for(arguments, finished, tmp_path, capsys):
    """It ends with the same bits, killed on the way too; what came later is kept under another name."""
    shutil.copytree(finished, tmp_path / "run")
    first, last = list_checkpoints(tmp_path / "run")
    train(arguments(tmp_path / "run", resume_from_checkpoint=first))
    assert f"{last} is later; now later-{last.name}, and the run goes on from {first}" in capsys.readouterr().out
    assert same(tmp_path / "run", finished)
    ours, theirs = ([(line["update"], line["loss"]) for line in read_log(run)] for run in (tmp_path / "run", finished))
    assert ours == theirs
    order = arguments(tmp_path / "run")
    codes, log = train_apart([*order, "--resume_from_checkpoint", str(first)], tmp_path, ("kill_at_update", 7))
    assert codes == KILLED, log
    assert list_checkpoints(tmp_path / "run") == [first] and (tmp_path / "run" / f"later-{last.name}").is_dir()
    train(order)
    assert same(tmp_path / "run", finished)
    train([*arguments(tmp_path / "run", max_steps=1), "--overwrite_output_dir"])
    assert not list((tmp_path / "run").glob("later-*"))


def test_a_checkpoint_to_go_back_to_must_be_one_of_the_run(arguments, finished, tmp_path):
    shutil.copytree(finished, tmp_path / "run")
    first, last = list_checkpoints(tmp_path / "run")
    for wrong in ("true", list_checkpoints(finished)[0], tmp_path / "run" / "model"):
        with pytest.raises(
            ValueError, match=f"must be a checkpoint of output_dir .{first}, {last}., got '{wrong}'; with"
        ):
            train(arguments(tmp_path / "run", resume_from_checkpoint=wrong))
    with pytest.raises(ValueError, match=r"must be a checkpoint of output_dir \(none yet\)"):
        train(arguments(tmp_path / "empty", resume_from_checkpoint=first))
    flip(first / "optimizer.bin")
    with pytest.raises(ValueError, match=r"checkpoint-00000006' is damaged: optimizer.bin is not what was written"):
        train(arguments(tmp_path / "run", resume_from_checkpoint=first))
    assert list_checkpoints(tmp_path / "run") == [first, last]


def test_a_run_recorded_under_the_names_of_before_goes_on(arguments, finished, tmp_path, capsys):
    """Killed in the middle, and finished: its model is not saved again."""
    before = {today: old for old, today in TODAY.items()}
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    record = json.loads((tmp_path / "training.json").read_text())
    named = {before.get(name, name): value for name, value in record["arguments"].items()}
    named["final_model"] = "best" if named["final_model"] else "last"
    (tmp_path / "training.json").write_text(json.dumps(record | {"arguments": named}))
    for checkpoint in list_checkpoints(tmp_path):
        state = json.loads((checkpoint / "run_state.json").read_text())
        state["identity"] = {before.get(name, name): value for name, value in state["identity"].items()}
        assert {"per_device_batch_size", "validate_every"} <= state["identity"].keys()
        (checkpoint / "manifest.json").unlink()
        (checkpoint / "run_state.json").write_text(json.dumps(state))
    with pytest.raises(ValueError, match="eval_steps was 4 and is now 5"):
        train(arguments(tmp_path, eval_steps=5))
    train(arguments(tmp_path))
    assert "kept" in capsys.readouterr().out
    train(arguments(tmp_path, load_best_model_at_end=True))
    assert "(best weights, averaged)" in capsys.readouterr().out
    train(arguments(tmp_path))
    delete_folder(tmp_path / "checkpoint-00000008")
    train(arguments(tmp_path))
    assert same(tmp_path, finished)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


@pytest.mark.parametrize(
    ("name", "damage", "said"),
    [
        ("pytorch_model.bin", flip, "pytorch_model.bin is not what was written"),
        ("optimizer.bin", cut, r"optimizer.bin has [\d,]+ bytes, and had"),
        ("random_states_0.pkl", Path.unlink, "random_states_0.pkl is missing"),
        ("random_states_0.pkl", cut, r"random_states_0.pkl has [\d,]+ bytes, and had"),
        ("run_state.json", cut, "run_state.json or manifest.json cannot be read"),
        ("manifest.json", cut, "run_state.json or manifest.json cannot be read"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_a_damaged_checkpoint_gives_way_to_the_one_before_it(name, damage, said, arguments, finished, tmp_path, capsys):
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    damage(tmp_path / "checkpoint-00000008" / name)
    train(arguments(tmp_path))
    out = capsys.readouterr().out
    assert re.search(rf"checkpoint-00000008 is damaged: {said}.*goes on from .*checkpoint-00000006", out), out
    assert same(tmp_path, finished)
    assert (tmp_path / "damaged-checkpoint-00000008").is_dir()
    train([*arguments(tmp_path, max_steps=1), "--overwrite_output_dir"])
    assert not (tmp_path / "damaged-checkpoint-00000008").exists()


@pytest.mark.parametrize("name", ["pytorch_model.bin", "random_states_0.pkl"])
def test_cut_and_missing_files_are_found_without_a_manifest(name, arguments, finished, tmp_path):
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    for checkpoint in list_checkpoints(tmp_path):
        cut(as_of_an_earlier_version(checkpoint) / name)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.name != ".lock"}
    with pytest.raises(
        ValueError, match=rf"no checkpoint can be resumed from, .*00000008: {name} is cut.*00000006: {name} is cut"
    ):
        train(arguments(tmp_path))
    shutil.rmtree(tmp_path / "checkpoint-00000006")
    (tmp_path / "checkpoint-00000008" / name).unlink()
    if name == "random_states_0.pkl":
        with pytest.raises(ValueError, match=r"00000008: random_states_0.pkl is missing"):
            train(arguments(tmp_path))
    assert all(path.stat().st_mtime_ns == then for path, then in before.items() if path.parent.name == "model")


def test_random_states_that_cannot_be_put_back_are_refused(arguments, finished, tmp_path):
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    delete_folder(tmp_path / "checkpoint-00000008")
    path = as_of_an_earlier_version(tmp_path / "checkpoint-00000006") / "random_states_0.pkl"
    states = torch.load(path, weights_only=False)
    torch.save(states | {"random_state": "of another version"}, path)
    with pytest.raises(ValueError, match=r"checkpoint-00000006: its random_states_0.pkl cannot be put back here"):
        train(arguments(tmp_path))


def test_a_changed_configuration_is_refused_by_name(arguments, tmp_path):
    config = ESSMConfig(hidden_size=16, num_hidden_layers=1, num_spectral_channels=8, filter_length=512)
    config.save_pretrained(tmp_path / "config")
    sizes = dict.fromkeys(("hidden_size", "num_hidden_layers", "num_spectral_channels", "filter_length", "dropout"))
    order = arguments(tmp_path / "run", **sizes, config_name=tmp_path / "config", max_steps=1)
    train(order)
    config.budget_presets = {"low": 2}  # may be set at any time
    config.save_pretrained(tmp_path / "config")
    train(order)
    config.hidden_act = "relu"
    config.save_pretrained(tmp_path / "config")
    with pytest.raises(ValueError, match="hidden_act of the model was 'gelu' and is now 'relu'"):
        train(order)


def test_damaged_lines_of_the_log_are_dropped_by_number(arguments, finished, tmp_path, capsys):
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    good = (tmp_path / "log.jsonl").read_bytes().splitlines()
    bad = [b"\xff\xfe garbage", b"\0" * 9, b"[1, 2]", b'{"loss": 1.0}', b'{"update": "three"}', b""]
    (tmp_path / "log.jsonl").write_bytes(b"\n".join([*bad, *good, b'{"update": 8, "lo']))
    train(arguments(tmp_path))
    assert read_log(tmp_path) == read_log(finished)
    out = capsys.readouterr().out
    assert [f"log.jsonl: line {number} is damaged and was dropped" in out for number in range(1, 8)] == [True] * 6 + [
        False
    ]


def test_a_second_run_in_the_folder_is_refused(arguments, tmp_path):
    """Until the first one ends: one that was killed holds nothing."""
    args = parse_arguments(train_clm.CLMArguments, arguments(tmp_path / "run"))
    with open_run(args):
        codes, log = train_apart(arguments(tmp_path / "run"), tmp_path)
        assert codes == [1] and re.search("ValueError: output_dir '.*run' is in use by another run", log), log
        assert not list_checkpoints(tmp_path / "run")
    assert train_apart(arguments(tmp_path / "run"), tmp_path, ("kill_at_update", 4))[0] == KILLED
    train(arguments(tmp_path / "run"))


def test_a_finished_model_keeps_what_was_added_to_it(arguments, tmp_path, capsys):
    train(arguments(tmp_path))
    profile = tmp_path / "model" / "budget_profile.json"
    profile.write_text("{}")
    train(arguments(tmp_path))
    assert "kept" in capsys.readouterr().out and profile.read_text() == "{}"
    train(arguments(tmp_path, load_best_model_at_end=True))  # other weights, of which it says nothing
    assert not profile.exists()
    profile.write_text("{}")
    train([*arguments(tmp_path, max_steps=9, load_best_model_at_end=True), "--extend"])
    assert not profile.exists()


# ---------------------------------------------------------------------------------------------------------------------
# Longer than planned.


def test_a_finished_run_is_extended(arguments, finished, tmp_path, capsys):
    """Its learning rate rises and falls once more; killed and resumed, it ends with the same bits."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    for folder in (whole, killed):
        shutil.copytree(finished, folder / "run")
    longer = {"max_steps": 14}
    with pytest.raises(ValueError, match=r"max_steps was 8 and is now 14 \(with --extend it may become larger\)"):
        train(arguments(whole / "run", **longer))
    with pytest.raises(ValueError, match=r"max_steps was 8 and is now 7 .*"):
        train([*arguments(whole / "run", max_steps=7), "--extend"])
    train([*arguments(whole / "run", **longer), "--extend"])
    assert "extended to 14 updates" in capsys.readouterr().out
    log = read_log(whole / "run")
    assert [line["update"] for line in log] == [*range(1, 15)]
    rates = [line["learning_rate"] for line in log]  # of the next update
    assert rates[:8] == [line["learning_rate"] for line in read_log(finished)]
    cosine = [5e-3 * 0.5 * (1 + math.cos(math.pi * n / 4)) for n in range(5)]
    assert rates[7:] == pytest.approx([0.0, 2.5e-3, *cosine], abs=1e-12)

    order = [*arguments(killed / "run", **longer), "--extend"]
    assert train_apart(order, killed, ("kill_at_update", 10))[0] == KILLED
    assert train_apart(order, killed, ("kill_at_update", 13))[0] == KILLED
    train(arguments(killed / "run", **longer))  # its checkpoint knows by now
    assert same(killed / "run", whole / "run")


def test_a_run_is_extended_before_its_end_and_by_epochs(arguments, finished, tmp_path):
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    delete_folder(tmp_path / "checkpoint-00000008")
    train([*arguments(tmp_path, num_train_epochs=1), "--extend"])  # 12 updates
    rates = [line["learning_rate"] for line in read_log(tmp_path)]
    assert len(rates) == 12
    reached = rates[5]  # of update 7, where the old plan stood
    assert 0 < reached < 5e-3 and rates[6] == pytest.approx((reached + 5e-3) / 2)
    assert rates[7] == pytest.approx(5e-3) and rates[-1] == pytest.approx(0.0, abs=1e-12)


def test_extending_without_warm_up_starts_at_the_peak(arguments, tmp_path, monkeypatch):
    train(arguments(tmp_path, max_steps=2, warmup_steps=0))
    used, step = [], torch.optim.AdamW.step

    def noting(self, *args, **kwargs):
        used.append(self.param_groups[0]["lr"])
        return step(self, *args, **kwargs)

    monkeypatch.setattr(torch.optim.AdamW, "step", noting)
    train([*arguments(tmp_path, max_steps=4, warmup_steps=0), "--extend"])
    assert used == pytest.approx([5e-3, 2.5e-3])


def test_there_must_be_a_run_to_extend(arguments, tmp_path):
    with pytest.raises(ValueError, match=r"extend needs a run to go on with, and output_dir .* holds no checkpoint"):
        train([*arguments(tmp_path), "--extend"])


def test_the_learning_rate_is_that_of_transformers():
    """A cosine bit for bit that of earlier versions, so that their checkpoints go on as they would have."""
    for warmup, steps in ((0, 7), (3, 11), (50, 601), (20, 10)):
        ours = make_scheduler(torch.optim.SGD([torch.zeros(1)], lr=1.0), warmup, [[0, steps]]).lr_lambdas[0]
        for n in range(steps + 1):
            cosine = max(0.0, 0.5 * (1.0 + math.cos(math.pi * ((n - warmup) / max(1, steps - warmup)))))
            assert ours(n) == (n / warmup if n < warmup else cosine)


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_can_be_extended(name):
    """From where it stands it rises to the peak, and then is what it would be in a run of the extension's length."""
    make = lambda plan: make_scheduler(torch.optim.SGD([torch.zeros(1)], lr=0.1), 3, plan, name).lr_lambdas[0]  # noqa: E731
    first, extended, alone = make([[0, 10]]), make([[0, 10], [10, 24]]), make([[0, 14]])
    theirs = get_scheduler(name, torch.optim.SGD([torch.zeros(1)], lr=0.1), 3, 10).lr_lambdas[0]
    assert [first(n) for n in range(11)] == [extended(n) for n in range(11)] == [theirs(n) for n in range(11)]
    assert [extended(n) for n in range(13, 25)] == [alone(n) for n in range(3, 15)]
    assert extended(11) == pytest.approx(first(10) + (1 - first(10)) / 3) and extended(13) == 1


def test_publishing_replaces_a_folder_whole(tmp_path):
    target = tmp_path / "model"
    for text in ("old", "new"):
        folder = temporary_folder(target)
        (folder / "file").write_text(text)
        publish(folder, target)
        assert (target / "file").read_text() == text
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


# ---------------------------------------------------------------------------------------------------------------------
# Failure.


@pytest.mark.parametrize("name", ["checkpoint-00000006", "best"])
def test_a_full_disk_keeps_the_last_good_checkpoint_and_the_run_goes_on_later(name, arguments, finished, tmp_path):
    codes, log = train_apart(arguments(tmp_path / "run"), tmp_path, ("full_disk_at", name))
    assert codes == [1]
    assert re.search(rf"OSError: cannot write .*{name}: .*Last good checkpoint: .*checkpoint-00000003", log), log
    assert [path.name for path in list_checkpoints(tmp_path / "run")] == ["checkpoint-00000003"]
    assert not list((tmp_path / "run").glob(".tmp-*"))  # its space is free again
    train(arguments(tmp_path / "run"))
    assert same(tmp_path / "run", finished)


@pytest.mark.parametrize("broken", ["loss", "gradient"])
def test_training_stops_when_it_diverges(broken, arguments, tmp_path, monkeypatch):
    forward, calls = ESSMForCausalLM.forward, []

    def diverging(self, *args, **kwargs):
        output = forward(self, *args, **kwargs)
        calls.extend([1] * self.training)
        if len(calls) == 5 and self.training:
            if broken == "loss":
                output.loss = output.loss * math.nan
            else:
                output.loss.register_hook(lambda gradient: gradient * math.inf)
        return output

    monkeypatch.setattr(ESSMForCausalLM, "forward", diverging)
    with pytest.raises(FloatingPointError, match=r"update 5: loss is .*Last good checkpoint: .*checkpoint-00000003"):
        train(arguments(tmp_path))
    assert [path.name for path in list_checkpoints(tmp_path)] == ["checkpoint-00000003"]
    assert not (tmp_path / "model").exists()


def test_infinity_that_is_meant_is_not_broken():
    """A mask, computed anew by every model; running statistics are saved with the weights."""
    accelerator, model = Accelerator(), nn.BatchNorm1d(3)
    model.register_buffer("mask", torch.full((3,), -math.inf), persistent=False)
    optimizer = torch.optim.AdamW(model.parameters())
    assert non_finite(accelerator, model, optimizer, []) == []
    model.running_var[1] = math.inf
    assert non_finite(accelerator, model, optimizer, [torch.tensor([math.nan])]) == [
        "the weights",
        "the averaged weights",
    ]


@pytest.mark.parametrize("update", [6, 8], ids=["at a checkpoint", "at the end"])
@pytest.mark.parametrize("part", ["weights", "averaged weights", "optimizer's state"])
def test_what_an_update_breaks_is_not_saved(part, update, arguments, tmp_path, monkeypatch):
    """Its loss and gradient were finite: only what it leaves behind is not."""
    step, average, made = torch.optim.AdamW.step, WeightAverage.update, []

    def broken_step(self, *args, **kwargs):
        result = step(self, *args, **kwargs)
        made.append(1)
        if len(made) == update and part != "averaged weights":
            parameter = self.param_groups[0]["params"][-1]
            broken = parameter if part == "weights" else self.state[parameter]["exp_avg_sq"]
            broken.data.view(-1)[0] = math.inf
        return result

    def broken_average(self):
        average(self)
        if self.updates == update and part == "averaged weights":
            self.average[-1].view(-1)[0] = math.nan

    monkeypatch.setattr(torch.optim.AdamW, "step", broken_step)
    monkeypatch.setattr(WeightAverage, "update", broken_average)
    last = {6: 3, 8: 6}[update]
    with pytest.raises(
        FloatingPointError, match=f"update {update}: .*the {part}.* hold NaN .*checkpoint: .*checkpoint-0000000{last}"
    ):
        train(arguments(tmp_path, eval_steps=update))
    assert list_checkpoints(tmp_path)[-1].name == f"checkpoint-0000000{last}"
    assert not (tmp_path / "model").exists() and not (tmp_path / "best").exists()


def test_a_broken_checkpoint_of_an_earlier_version_is_not_good(arguments, finished, tmp_path):
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    checkpoint = as_of_an_earlier_version(list_checkpoints(tmp_path)[-1])
    weights = torch.load(checkpoint / "pytorch_model.bin")
    next(iter(weights.values())).view(-1)[0] = math.nan
    torch.save(weights, checkpoint / "pytorch_model.bin")
    shutil.rmtree(tmp_path / "model")
    with pytest.raises(
        FloatingPointError, match=r"00000008: the weights hold NaN .*delete it .*checkpoint: .*checkpoint-00000006"
    ):
        train(arguments(tmp_path))
    assert not (tmp_path / "model").exists()


def test_an_absurd_learning_rate_is_noticed(arguments, tmp_path):
    with pytest.raises(FloatingPointError, match=r"update \d: loss is .*Try a lower learning_rate or a longer warm-up"):
        train(arguments(tmp_path, learning_rate=1e30, warmup_steps=0, max_grad_norm=1e30))


def test_a_folder_that_cannot_be_written_is_refused(arguments, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"output_dir .*file/run' cannot be written: Not a directory"):
        train(arguments(tmp_path / "file" / "run"))


def test_a_row_that_breaks_the_stream_stops_the_run_and_keeps_its_checkpoint(data, tmp_path):
    path = tmp_path / "rows.jsonl"
    rows = [json.dumps({"text": "abcdefgh" * 8})] * 100
    path.write_text("\n".join([*rows, json.dumps({"text": {"nested": 5}}), *rows]))
    changes = {"train_file": path, "validation_file": data["map-style"]["validation_file"], "shuffle_buffer": 2}
    with pytest.raises(ValueError, match="a row of the training stream: column 'text' must hold text, got dict"):
        train(
            [*command_line(tmp_path / "run", **changes, max_steps=500, per_device_train_batch_size=20), "--streaming"]
        )
    assert list_checkpoints(tmp_path / "run")
    assert os.listdir(tmp_path / "run").count("model") == 0


def test_a_run_is_not_resumed_with_other_sizes_beside_its_configuration(arguments, tmp_path):
    ESSMConfig(hidden_size=8, num_hidden_layers=1, filter_length=512).save_pretrained(tmp_path / "config")
    sizes = dict.fromkeys(("hidden_size", "num_hidden_layers", "num_spectral_channels", "filter_length"))
    given = sizes | {"config_name": tmp_path / "config", "gating": "none", "max_steps": 1}
    train(arguments(tmp_path / "run", **given))
    config = ESSMConfig.from_pretrained(tmp_path / "run" / "model")
    assert (config.hidden_size, config.gating, config.filter_length) == (8, "none", 512)
    train(arguments(tmp_path / "run", **given))  # finished already
    for changes in ({"gating": None}, {"gating": "softmax"}, {"hidden_size": 128}):
        with pytest.raises(ValueError, match=r"config_overrides was {'gating': 'none'} and is now "):
            train(arguments(tmp_path / "run", **given | changes))


def test_an_output_dir_that_is_not_shared_is_refused(tmp_path, monkeypatch):
    args = RunArguments(output_dir=str(tmp_path), cpu_threads=1)
    make_accelerator(args)
    assert not list(tmp_path.glob(".seen-*"))
    monkeypatch.setattr(run_accelerator.Path, "touch", lambda path: None)  # as on a disk that this process does not see
    monkeypatch.setattr(run_accelerator.Path, "unlink", lambda path: None)
    with pytest.raises(ValueError, match="is one folder for 0 of 1 processes"):
        make_accelerator(args)


@pytest.mark.parametrize("script", ["train_clm", "train_classification"])
def test_waiting_threads_soon_sleep(script):
    """As the OpenMP library reads it when torch is imported: spinning ones slow down whoever else uses the cores, and
    those that sleep at once come late to the small products of a gated block."""
    env = {name: value for name, value in os.environ.items() if name not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")}
    path = ROOT / "train" / f"{script}.py"
    run = [sys.executable, str(path), "--help"]
    told = subprocess.run(run, env=env | {"OMP_DISPLAY_ENV": "verbose"}, capture_output=True, text=True).stderr
    if "GOMP_SPINCOUNT" not in told:
        pytest.skip("torch's OpenMP library is not GNU's, or tells no settings")
    assert "GOMP_SPINCOUNT = '10000'" in told
