# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""What is run on a GPU, on a CPU: parts that fail or take too long, and trainings without the graph."""

import argparse
import contextlib
import dataclasses
import importlib
import itertools
import json
import re
import subprocess

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from benchmarks import gpu_all, gpu_train
from essm_train.data.tokens import ByteEncoder
from essm_train.measure.evaluation import open_text
from essm_train.run.steps import Muon, make_scheduler, update
from modeling_essm import ESSMForCausalLM
from modeling_essm.training.budget_dropout import budget_losses

CONFIG = gpu_train.CONFIGS[0]
WRITES = "import os, signal, sys, time\nopen(sys.argv[sys.argv.index('--out') + 1], 'w').write('{\"rows\": [1]}')\n"


@pytest.fixture
def run(tmp_path, monkeypatch):
    def run(parts, *arguments):
        """Parts as code and the seconds that they may take."""
        commands = {}
        for name, (code, seconds) in parts.items():
            (script := tmp_path / f"{name.replace(' ', '-')}.py").write_text(code)
            commands[name] = (f"{script}{' --model' if name == 'needs a model' else ''}", seconds)
        monkeypatch.setattr(gpu_all, "PARTS", commands)
        gpu_all.main(["--device", "cpu", "--out", str(tmp_path / "all.json"), *arguments])
        return json.loads((tmp_path / "all.json").read_text())["results"]

    return run


def test_a_part_that_fails_costs_the_others_nothing(run):
    parts = {
        "fails": ("print('why'); raise SystemExit(3)", 60),
        "writes": (WRITES + "print(sys.argv[1:])", 60),
        "is killed": (WRITES + "os.kill(os.getpid(), signal.SIGKILL)", 60),
        "needs a model": ("", 60),
    }
    results = run(parts, "--quick")
    statuses = ["exit status 3", "done", "exit status -9", "not begun: no --model"]
    assert [result["status"] for result in results.values()] == statuses
    assert results["fails"]["output"] == "why\n" and "report" not in results["fails"]
    assert results["writes"]["report"] == {"rows": [1]}
    assert all(f"'{option}'" in results["writes"]["output"] for option in ("--device", "cpu", "--quick"))


def test_a_part_that_takes_too_long_is_stopped_and_what_it_wrote_is_kept(run, monkeypatch):
    """On a clock of its own, on which every part goes on until its time is over."""
    now, limits, run_to_its_end = [0.0], [], subprocess.run

    def until_stopped(command, timeout, **options):
        run_to_its_end(command, check=True, **options)
        limits.append(timeout)
        now[0] += timeout
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(gpu_all.subprocess, "run", until_stopped)
    monkeypatch.setattr(gpu_all.time, "monotonic", lambda: now[0])
    results = run({"long": (WRITES, 50), "longer": (WRITES, 600), "last": ("", 600)}, "--seconds", "200")
    assert limits == [50, 150] and results["last"]["status"] == "not begun: 0 s were left"
    for name in ("long", "longer"):
        assert results[name]["status"].startswith("stopped after") and results[name]["report"] == {"rows": [1]}


def test_every_part_is_a_command_that_exists(capsys):
    for command, _ in gpu_all.PARTS.values():
        _, module, *arguments = command.split()
        if module.startswith("benchmarks"):
            with pytest.raises(SystemExit) as stopped:
                importlib.import_module(module).main([*arguments, *(["x"] if "--model" in arguments else []), "-h"])
            assert stopped.value.code == 0, module
    assert "--out" in capsys.readouterr().out


@pytest.fixture
def train(tmp_path, monkeypatch):
    """Trains small on easy text of 721 tokens: 12 blocks of 61, and one more byte."""
    for name, count in {"WARMUP": 5, "TIMED": 1, "AT_ONCE": 10}.items():
        monkeypatch.setattr(gpu_train, name, count)
    pq.write_table(pa.table({"text": ["the cat sat on the mat. " * 15] * 2}), tmp_path / "text.parquet")

    numbers = itertools.count()

    def train(*arguments):
        files = [part for name in ("train", "text") for part in (f"--{name}_file", str(tmp_path / "text.parquet"))]
        size = ["--batch", "4", "--length", "61", "--windows", "2", "--learning_rate", "0.01"]
        options = [*size, "--configs", str(CONFIG), "--out", str(tmp_path / f"report-{next(numbers)}.json"), *arguments]
        return gpu_train.main(["--device", "cpu", "--quick", *files, *options])["results"]

    return train


def a_run(kind="elastic", batch=4, one_pass=False, length=25):
    args = argparse.Namespace(configs=[CONFIG], quick=True, models=["elastic", *gpu_train.PEERS], alone=[4])
    task = next(task for task in gpu_train.tasks_of(args) if task.kind == kind)
    stream = torch.randint(0, 256, (721,), generator=torch.Generator().manual_seed(0), dtype=torch.int16)
    return gpu_train.Run(task, gpu_train.Windows(stream, length, batch, one_pass), 0.01, torch.device("cpu"))


def test_every_model_learns_and_is_saved(train, tmp_path):
    results = train("--updates", "15", "--learning_rate", "0.03", "--alone", "4", "--save", str(tmp_path / "saved"))
    names = [CONFIG.name, *(f"{CONFIG.name}-{kind}" for kind in ("alone-4", "llama", "mamba2", "matmamba"))]
    budgets = [["1", "2", "3", "4", "6", "8"], ["4"], ["None"], ["None"], ["1", "2", "4", "8"]]
    assert {name: [*result["bits_per_byte"]] for name, result in results.items()} == dict(zip(names, budgets))
    for name, result in results.items():
        assert max(result["bits_per_byte"].values()) < 7, name  # a new model has 8
        assert [done for done, _ in result["losses"]] == [10, 15] and result["tokens"] == 15 * 4 * 61
    for name in names[2:]:  # peers
        assert abs(results[name]["parameters"] / results[names[0]]["parameters"] - 1) <= 0.05, name
    for name, K in ((names[0], [1, 2, 3, 4, 6, 8]), (names[1], [4])):
        model = ESSMForCausalLM.from_pretrained(tmp_path / "saved" / name)
        assert model.dtype == torch.bfloat16 and model.config.trained_budgets == K
        bits = open_text([str(tmp_path / "text.parquet")], ByteEncoder(), 61, 2, 4).value(model.float(), K[-1])
        assert bits == pytest.approx(results[name]["bits_per_byte"][str(K[-1])], abs=0.1)


def test_what_another_run_saved_is_not_replaced(train, tmp_path, capsys):
    (tmp_path / CONFIG.name).mkdir()
    (tmp_path / CONFIG.name / "essm.py").write_text("mine")
    for options in (["--save", str(tmp_path)], ["--configs", str(CONFIG), str(CONFIG)]):
        with pytest.raises(SystemExit):
            train("--updates", "1", "--models", "elastic", *options)
    told = capsys.readouterr().err
    assert f"holds {CONFIG.name}, which this run did not write" in told and "of different names" in told


def test_a_model_that_fails_costs_the_others_nothing(train, monkeypatch):
    make = gpu_train.make_model
    monkeypatch.setattr(gpu_train, "make_model", lambda task: make(task) if task.kind == "llama" else 1 / 0)
    results = train("--seconds", "0.5", "--models", "llama", "elastic", "--first_bytes", "200")
    assert results.pop(f"{CONFIG.name}-llama")["updates"] > 0
    assert [*results.values()] == [{"failed": "ZeroDivisionError: division by zero"}]


def test_an_interrupted_run_continues(train, tmp_path, monkeypatch, capsys):
    options = ["--updates", "2", "--models", "elastic", "llama", "--save", str(tmp_path)]
    options += ["--out", str(tmp_path / "out.json")]
    make, save = gpu_train.make_model, gpu_train.Run.save

    def interrupted(*_):
        raise KeyboardInterrupt

    def held():
        return json.loads((tmp_path / "out.json").read_text())["results"]

    monkeypatch.setattr(gpu_train.Run, "save", interrupted)
    with pytest.raises(KeyboardInterrupt):
        train(*options)
    first = held()
    monkeypatch.setattr(gpu_train.Run, "save", save)
    monkeypatch.setattr(gpu_train, "make_model", lambda task: interrupted() if task.kind == "llama" else make(task))
    with pytest.raises(KeyboardInterrupt):
        train(*options)
    second = held()
    assert [*first] == [*second] == [CONFIG.name]  # trained again, since its folder was not there
    assert first[CONFIG.name]["seconds"] != second[CONFIG.name]["seconds"] and (tmp_path / CONFIG.name).is_dir()
    monkeypatch.setattr(gpu_train, "make_model", make)
    results = train(*options)
    assert [*results] == [CONFIG.name, f"{CONFIG.name}-llama"] and results[CONFIG.name] == second[CONFIG.name]
    with pytest.raises(SystemExit):
        train(*options, "--learning_rate", "0.02")
    assert "--out is a report of other settings" in capsys.readouterr().err and held() == results


def test_the_first_of_several_limits_ends_a_training(train):
    limits = {3: ["--one_pass"], 2: ["--one_pass", "--updates", "2"], 1: ["--one_pass", "--seconds", "1e-9"]}
    for updates, options in limits.items():
        results = train("--models", "llama", *options)
        assert [result["updates"] for result in results.values()] == [updates]


def test_a_peer_sees_what_is_before_alone():
    model = a_run("llama").model.eval()
    ids = torch.arange(20)[None]
    changed = ids.clone()
    changed[0, 10:] += 1
    logits, others = model(ids).logits, model(changed).logits
    torch.testing.assert_close(logits[:, :10], others[:, :10])
    assert (logits - others)[:, 10:].abs().amax() > 1e-3


def test_no_model_begins_after_the_limit(train):
    results = train("--one_pass", "--models", "llama", "mamba2", "--limit", "-1")
    assert len(results) == 2 and all(result["failed"].startswith("not begun") for result in results.values())


@pytest.mark.parametrize(
    ("options", "legal"),
    [
        (["--updates", "1", "--alone", "9"], r"--alone must be an integer in \[1, 8\], got 9"),
        (["--updates", "0"], "--updates: must be at least 1, got 0"),
        (["--seconds", "-5"], "--seconds: must be a number above 0, got -5"),
        ([], "give --updates, --seconds or --one_pass"),
        (["--one_pass", "--batch", "13"], "at most the 12 blocks of the text, got 13"),
    ],
)
def test_options_that_cannot_be_are_refused(train, capsys, options, legal):
    with pytest.raises(SystemExit):
        train(*options)
    assert re.search(legal, capsys.readouterr().err)


@pytest.mark.parametrize(("kind", "batch"), [("elastic", 2), ("elastic", 7), ("alone", 2), ("llama", 2), ("mamba2", 2)])
def test_an_update_is_that_of_a_plain_loop_over_its_parts(kind, batch):
    """Whose budgets share out the rows one by one, as `BudgetSchedule.parts` has them without `together`."""
    run, plain, numbers = a_run(kind, batch), a_run(kind, batch), range(60, 62)
    optimizer, losses = Muon(plain.model, 0.01), []
    factor = make_scheduler(optimizer, gpu_train.WARMUP, [(0, 80)]).lr_lambdas[0]
    for number, starts in zip(numbers, plain.windows.starts(numbers)):
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * factor(number)
        ids = torch.stack([plain.stream[start : start + 25] for start in starts]).long()
        schedule = plain.schedule and dataclasses.replace(plain.schedule, updates=80)
        parts = schedule.parts(number, batch) if schedule else plain.parts
        forward = lambda part, ids=ids: gpu_train.outputs_of(plain.model, ids[part.rows], part.budget or None)  # noqa: E731
        losses.append(float(forward(parts[0]).loss.detach()))
        update(
            optimizer,
            budget_losses(forward, parts, labels=ids, distillation_weight=gpu_train.DISTILLATION),
            plain.model.parameters(),
        )
    run.fill(numbers, 80)
    for _ in numbers:
        run.step()
    torch.testing.assert_close(run.losses[:2], torch.tensor(losses), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(run.model.state_dict(), plain.model.state_dict(), rtol=1e-3, atol=2e-5)


def test_a_capture_leaves_the_model_as_new():
    run, new = a_run(), a_run()
    assert run.capture() > 0
    torch.testing.assert_close(run.model.state_dict(), new.model.state_dict(), rtol=0, atol=0)
    assert not any(value.any() for state in run.optimizer.state.values() for value in state.values())


def test_one_pass_reads_every_block_once():
    windows = a_run(one_pass=True, batch=3).windows  # 30 blocks
    read = torch.cat([windows.starts(range(4)), windows.starts(range(4, windows.updates))])
    assert read.shape == (10, 3) and sorted(read.flatten().tolist()) == [*range(0, 720, 24)]
    assert read.flatten().tolist() != [*range(0, 720, 24)]


@pytest.mark.parametrize("kind", ["elastic", "alone", *gpu_train.PEERS])
def test_an_update_reads_no_value_that_is_on_the_device(kind, monkeypatch):
    """A graph could not: tensors of the meta device have none to read."""
    meta = torch.device("meta")
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: contextlib.nullcontext())
    run = a_run(kind)
    run.model, run.stream, run.within, run.counter = (
        x.to(meta) for x in (run.model, run.stream, run.within, run.counter)
    )
    run.starts, run.budgets, run.weights, run.losses = (
        x.to(meta) for x in (run.starts, run.budgets, run.weights, run.losses)
    )
    run.rates = run.rates.to(meta)
    run.parameters = [*run.model.parameters()]
    run.optimizer = Muon(run.model, 0.01)
    for group in run.optimizer.param_groups:
        group["lr"] = torch.zeros((), device=meta)
    monkeypatch.setattr(run.optimizer._rest, "step", lambda: None)  # torch's own, which reads none if capturable
    monkeypatch.setattr(run.optimizer, "zero_grad", lambda: None)
    run.update()
    assert all(p.grad is not None for p in run.parameters) and run.optimizer.state
