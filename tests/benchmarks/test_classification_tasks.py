# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Classification of sequences by models of equal size: the harness from end to end on tiny data of every task."""

import json
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
from helpers import ROOT, start_killed_sweep
from tiny_tasks import ROWS_OF

from benchmarks import classification_tasks, matched_models, sweeps
from benchmarks.classification_tasks import ROWS, TASKS, Settings


@pytest.fixture
def run(data_dir, tmp_path):
    """Runs the harness, small; its report."""

    def run(*arguments):
        path = tmp_path / "report.json"
        order = ["--quick", "--data_dir", data_dir, "--runs_dir", str(tmp_path / "runs"), "--out", str(path)]
        classification_tasks.main([*order, *arguments])
        return json.loads(path.read_text())

    return run


@pytest.mark.slow
def test_every_model_runs_every_task(run, tmp_path, capsys):
    report = run("--rates", "0.01", "--seeds", "0")
    assert [r["task"] for r in report["results"]] == [task for task in TASKS for _ in ROWS]
    assert len(list((tmp_path / "runs").iterdir())) == len(TASKS) * len(ROWS)
    classes = {"text": 2, "speech4": 4}
    for result in report["results"]:
        assert abs(result["parameters"] / 50_000 - 1) <= matched_models.TOLERANCE
        elastic = ROWS[result["model"]].peer is None
        assert [*result["error"]] == (["2", "4", "8", "16"] if elastic else ["1"])
        for error in result["error"].values():  # of 40 test samples
            assert (error["mean"] * 40) % 1 == pytest.approx(0, abs=1e-9) and 0 <= error["mean"] <= 1
        task = result["definition"]["task"]
        assert task["name"] == result["task"] and (task["max_length"], task["batch_size"]) == (64, 4)
        assert str(ROOT) not in task["data"]
        assert f"in {classes.get(result['task'], 10)} classes" in task["data"]
        assert result["samples_per_cpu_second"]["mean"] == pytest.approx(3 * 4 / result["cpu_seconds"]["mean"])
    text = capsys.readouterr().out
    assert all(f"\n{task}: accuracy\n" in text for task in TASKS) and text.count("samples/CPU_s") == len(TASKS)
    accuracy = (
        1 - next(r for r in report["results"] if (r["task"], r["model"]) == ("text", "s4d"))["error"]["1"]["mean"]
    )
    lines = text[text.index("\ntext: accuracy") :].splitlines()
    assert f"{accuracy:.4f}±0.0000" in next(line for line in lines if line.split()[:1] == ["s4d"])
    (target,) = report["targets"]
    full = {r["model"]: 1 - [*r["error"].values()][-1]["mean"] for r in report["results"] if r["task"] == "smnist"}
    assert target["target"].startswith("smnist: accuracy of the gated block")
    assert (target["value"], target["at_least"]) == (full["gated"], full["s4d"])
    assert target["met"] == (full["gated"] >= full["s4d"])
    again = run("--table")
    assert (again["results"], again["targets"]) == (report["results"], report["targets"])


def test_every_model_sees_the_same_samples(run, monkeypatch):
    from essm_train import models

    seen, budgets, run_at_budget = [], [], models.run_at_budget

    def watched(model, batch, budget):
        if "labels" in batch:  # an update
            seen.append(torch.cat([batch["input_features"].flatten(), batch["labels"]]))
            budgets.append(budget)
        return run_at_budget(model, batch, budget)

    monkeypatch.setattr(models, "run_at_budget", watched)
    order = ["--tasks", "smnist:updates=8", "--only", "gated", "s4d", "--rates", "0.01", "0.02", "--seeds", "0", "1"]
    results = run(*order)["results"]
    assert [r["definition"]["task"]["updates"] for r in results] == [8, 8]
    # Seed by seed: 8 updates of 2 models at 2 rates.
    orders = [torch.stack(seen[i : i + 8]) for i in range(0, len(seen), 8)]
    assert len(orders) == 8 and all(torch.equal(order, orders[0]) for order in orders[:4])
    assert all(torch.equal(order, orders[4]) for order in orders[4:]) and not torch.equal(orders[0], orders[4])
    assert len({*map(tuple, orders[0].tolist())}) == 8  # no batch twice
    # The gated block: the first half at the full budget, then what dropout draws; S4D has one.
    assert budgets[:4] == budgets[8:12] == budgets[32:36] == [16] * 4 and budgets[4:8] == budgets[12:16]
    assert {*budgets[4:8]} <= {2, 3, 4, 6, 8, 12, 16} != {16} and {*budgets[16:32]} == {1}
    assert {*budgets[4:8], *budgets[36:40]} != {16}


def test_a_run_is_a_run_of_train_classification(run, data_dir, tmp_path):
    """So that what it measures is what a user gets."""
    from essm_train.arguments import parse_arguments
    from essm_train.commands import train_classification

    run("--tasks", "listops", "--only", "gated", "--rates", "0.01", "--seeds", "0")
    (path,) = (tmp_path / "runs").iterdir()
    record = json.loads(path.read_text())
    own = {"text_column": "tokens", "max_length": 64, "filter_length": 2048, "per_device_train_batch_size": 4}
    own |= {"embedding_initializer_range": 0.1, "num_labels": 10, "test_samples": 40, "learning_rate": 0.01}
    own |= {"tokenizer_name": ROOT / "hub_configs" / "essm-lra-listops"}
    own |= {"max_steps": 3, "full_budget_updates": 2, "output_dir": tmp_path / "run", "cpu_threads": 1}
    own["logging_steps"] = 1
    for split in ROWS_OF:
        (own[f"{split}_file"],) = Path(data_dir, "listops").glob(f"*-{split}-*.parquet")
    values = record["sizes"] | own
    line = [part for name, value in values.items() for part in (f"--{name}", str(value))]
    train_classification.main(parse_arguments(train_classification.ClassificationArguments, line))
    sweep = json.loads((tmp_path / "run" / "budget_sweep.json").read_text())
    accuracy = dict(zip(map(str, sweep["budgets"]), sweep["values"]))
    assert {K: 1 - accuracy[K] for K in record["error"]} == pytest.approx(record["error"])
    lines = map(json.loads, (tmp_path / "run" / "log.jsonl").read_text().splitlines())
    assert np.mean([line["loss"] for line in lines if "loss" in line]) == pytest.approx(record["training_loss"])


def test_errors_are_those_of_the_answers(data_dir):
    """Scored by models that are known: one class for all, guesses, and the class that the mean of the pixels tells."""

    class Known(torch.nn.Module):
        config = None

        def __init__(self, answer):
            super().__init__()
            self.unused, self.answer = torch.nn.Parameter(torch.zeros(1)), answer

        def forward(self, input_features, attention_mask=None, use_cache=None):
            logits = torch.nn.functional.one_hot(self.answer(input_features), 10).float()
            return type("Output", (), {"logits": logits})

    loaded = classification_tasks.load(Settings(data_dir, 1, 1), "smnist")
    labels = torch.tensor([sample.label for sample in loaded.test])
    assert len(labels) == ROWS_OF["test"]

    def error(answer, samples=loaded.test):
        return classification_tasks.score(Known(answer), loaded.data.reader, samples, [1])["1"]

    share = float((labels == 1).double().mean())
    assert 0 < share < 1
    assert error(lambda x: torch.ones(len(x), dtype=torch.int64)) == pytest.approx(1 - share)
    assert error(lambda x: ((x.mean((1, 2)) + 1) * 127.5 / 80 - 0.05).long()) == 0.0  # means of 45, 125 and 205
    generator = torch.Generator().manual_seed(0)
    guesses = error(lambda x: torch.randint(10, (len(x),), generator=generator), loaded.test * 40)
    assert guesses == pytest.approx(0.9, abs=0.03)  # 4 standard deviations of 2,000


def test_training_lowers_the_error(data_dir, tmp_path):
    settings = Settings(data_dir, 20_000, 40, quick=True)
    classification_tasks.sweep(settings, [sweeps.Run("gated", 0.01, 0, "smnist")], tmp_path, 1)
    (record,) = sweeps.collect(tmp_path)
    assert all(error < 0.3 for error in record["error"].values())  # 2/3 is chance


def test_sweep_goes_on_where_it_was_killed(run, data_dir, tmp_path, monkeypatch):
    order = ["--tasks", "smnist", "--only", "llama", "--rates", "0.01"]
    start_killed_sweep(classification_tasks, monkeypatch, lambda: run(*order))
    found = {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").iterdir()}
    assert {path.name for path in found} == {f"smnist-llama-rate0.01-seed{seed}.json" for seed in (0, 1)}
    (result,) = run(*order)["results"]
    assert result["seeds"] == [0, 1, 2] and all(path.stat().st_mtime_ns == time for path, time in found.items())
    with pytest.raises(ValueError, match="updates was 3 and is now 2; choose another --runs_dir"):
        run(*order, "--updates", "2")
    with pytest.raises(
        ValueError, match=r"test_samples was 40 and is now 20, definition was .*; choose another --runs_dir"
    ):
        run(*order, "--test_samples", "20")
    # The same files in another folder are the same data; other files are not.
    moved = tmp_path / "moved"
    moved.mkdir()
    for split in ("train", "test"):
        (moved / f"mnist-{split}.parquet").write_bytes(Path(data_dir, f"mnist-{split}.parquet").read_bytes())
    assert run(*order, "--data_dir", str(moved))["results"] == [result]
    classification_tasks.load.cache_clear()
    table = datasets.load_dataset("parquet", data_files=str(moved / "mnist-test.parquet"), split="train")
    table.map(lambda row: row | {"label": 0}).to_parquet(moved / "mnist-test.parquet")
    with pytest.raises(ValueError, match=r"definition was .* and is now .*; choose another --runs_dir"):
        run(*order, "--data_dir", str(moved))


def test_what_cannot_be_run_is_refused_before_any_work(run, data_dir, tmp_path, capsys):
    for tasks, error, message in (
        (["smnist", "copy"], ValueError, "a task must be one of"),
        (["smnist:batch_size=0"], ValueError, "batch_size of a task must be at least 1, got 0"),
        (["smnist:updates=-1"], ValueError, "updates of a task must be at least 0, got -1"),
        (["smnist:pairs=8"], ValueError, "parameters of smnist are"),
        (["smnist:max_length=5000"], ValueError, r"max_length must be in \[1, filter_length = 1024\], got 5000"),
    ):
        with pytest.raises(error, match=message):
            run("--tasks", *tasks)
    with pytest.raises(
        FileNotFoundError,
        match=r"no data for task 'listops' in .*: run `python -m essm_train.commands.make_task_data listops ",
    ):
        run("--data_dir", str(tmp_path), "--tasks", "listops")
    with pytest.raises(ValueError, match="has 50 parameters"):
        classification_tasks.sweep(
            Settings(data_dir, 50, 1), [sweeps.Run("paper", 0.01, 0, "smnist")], tmp_path / "runs", 1
        )
    with pytest.raises(SystemExit):
        run("--test_samples", "0")
    assert "--test_samples must be at least 1, got 0" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()
    with pytest.raises(ValueError, match="holds no finished run"):
        run("--table")


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("name", ROWS)
def test_models_have_as_many_parameters(data_dir, name, task):
    row = ROWS[name]
    settings = Settings(data_dir, 120_000, 1)
    config = classification_tasks.model_config(row, task, settings)
    with torch.device("meta"):
        model = classification_tasks.make_model(config)
    assert abs(model.num_parameters() / 120_000 - 1) <= 0.03
    assert config.num_labels == {"text": 2, "speech4": 4}.get(task, 10) and config.classifier_pooling == "mean"
    assert config.num_input_features == {"text": None, "listops": None, "speech4": 40}.get(task, 1)
    assert abs(config.num_hidden_layers - row.layers) <= 1
    for field, value in row.fields.items():
        assert getattr(config, field) == value
    if row.peer is None:
        assert config.num_spectral_channels == 16 and config.filter_length >= TASKS[task].max_length
    if name == "gated":
        assert abs(config.inner_size / config.hidden_size - row.expansion) <= 0.25
