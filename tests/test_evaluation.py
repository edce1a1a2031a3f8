# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""train/evaluate.py and train/reproduce.py: sweeps of saved models, seeds, tables and the runner."""

import importlib.util
import json
import statistics
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from helpers import random_model

sys.path.insert(0, str(Path(__file__).parents[1] / "train"))

import evaluation
import reproduce
from engine import Metric
from evaluation import Evaluation
from train_classification import ClassificationArguments
from train_clm import CLMArguments

from modeling_essm import ESSMForSequenceClassification, build_byte_tokenizer


def summary(values, higher=False):
    budgets = (2, 4, 32)
    metric = Metric("accuracy" if higher else "bits_per_byte", higher)
    return Evaluation(metric, budgets, values, tuple((300.0, 200.0, 100.0) for _ in values), (1, 2, 4), (10, 20, 80))


def test_seeds_are_summarised():
    found = summary(((2.4, 2.1, 2.0), (2.6, 2.3, 2.0)))
    assert found.mean == pytest.approx((2.5, 2.2, 2.0))
    assert found.deviation == pytest.approx((statistics.stdev((2.4, 2.6)), statistics.stdev((2.1, 2.3)), 0.0))
    assert found.retention == pytest.approx((2.0 / 2.5, 2.0 / 2.2, 1.0))
    assert (found.curve.sweet_spot, found.curve.collapse_boundary) == (32, 4)  # 2.2 is 10% above, 2 / 2.2 = 91%
    better = summary(((0.5, 0.885, 0.9),), higher=True)
    assert better.retention == pytest.approx((0.5 / 0.9, 0.885 / 0.9, 1.0)) and better.deviation == (0, 0, 0)
    assert (better.curve.sweet_spot, better.curve.collapse_boundary) == (4, 4)


def test_markdown_has_a_row_per_budget():
    lines = summary(((2.4, 2.1, 2.0), (2.6, 2.3, 2.0))).markdown().splitlines()
    assert len(lines) == 5 and lines[2].startswith("| 2 | 2.5000 ± 0.1414 | 80.0% | 10 (12%) | 300 |")
    assert "▲ collapse boundary" in lines[3] and "★ sweet spot" in lines[4]


def test_a_language_model_is_evaluated_at_every_budget(tmp_path):
    folders = []
    for seed in (0, 1):
        folder = tmp_path / f"seed{seed}" / "model"
        random_model(seed=seed).save_pretrained(folder)
        build_byte_tokenizer().save_pretrained(folder)
        folders.append(str(folder))
    (tmp_path / "text.txt").write_text("spectral budget " * 200)
    args = CLMArguments(
        train_file=[str(tmp_path / "text.txt")], block_size=64, sweep_blocks=4, validation_blocks=4, filter_length=512
    )
    task = evaluation.open_language_task(args, "words")
    found = evaluation.evaluate_models(folders, task, (2, 8))
    assert found.budgets == (2, 8, 32) and len(found.values) == 2
    model = task.load(folders[0])
    assert found.active_parameters == tuple(model.num_active_parameters(K) for K in found.budgets)
    assert found.peak_bytes[0] < found.peak_bytes[2]
    assert found.values[0] != found.values[1]
    record = json.loads(json.dumps(found.record()))
    assert record["seeds"] == 2 and record["sweet_spot"] in found.budgets
    small = tmp_path / "small"
    random_model(num_spectral_channels=8).save_pretrained(small)
    with pytest.raises(ValueError, match="capacity 8"):
        evaluation.evaluate_models([folders[0], str(small)], task, (2, 8))


def test_a_classifier_is_evaluated_on_the_test_split(tmp_path):
    rng = np.random.default_rng(0)
    for split, count in (("train", 20), ("test", 7)):
        rows = pa.array(list(rng.integers(0, 256, (count, 16)).astype(np.uint8)), pa.list_(pa.uint8()))
        pq.write_table(pa.table({"pixels": rows, "label": rng.integers(0, 3, count)}), tmp_path / f"{split}.parquet")
    random_model(ESSMForSequenceClassification, num_input_features=1, num_labels=3).save_pretrained(tmp_path / "model")
    args = ClassificationArguments(
        train_file=[str(tmp_path / "train.parquet")], test_file=[str(tmp_path / "test.parquet")],
        features_column="pixels", num_labels=3, filter_length=512, cpu_threads=1,
    )  # fmt: skip
    task = evaluation.open_classification_task(args, "noise")
    found = evaluation.evaluate_models([str(tmp_path / "model")], task, (2, 32))
    assert found.metric.name == "accuracy"
    labels = torch.tensor(pq.read_table(tmp_path / "test.parquet")["label"].to_pylist())
    pixels = torch.tensor(pq.read_table(tmp_path / "test.parquet")["pixels"].to_pylist()) / 127.5 - 1
    model = task.load(str(tmp_path / "model")).eval()
    with torch.no_grad():
        expected = [
            (model(input_features=pixels[..., None], spectral_budget=K).logits.argmax(-1) == labels) for K in (2, 32)
        ]
    assert found.values[0] == pytest.approx([float(e.double().mean()) for e in expected])


def test_the_script_does_not_hide_the_evaluate_library():
    from budget_sweep import load_metric

    assert load_metric("accuracy").compute(predictions=[1, 0], references=[1, 1])["accuracy"] == 0.5
    assert importlib.util.find_spec("evaluate") is not None


# ---------------------------------------------------------------------------------------------------------------------
# The runner.


@pytest.fixture
def novels(tmp_path, monkeypatch):
    """A tiny task in place of the novels; the arguments of a runner that trains it."""
    text = tmp_path / "text.txt"
    text.write_text("the spectral state of the spectral budget " * 100)
    tiny = {"train_file": [str(text)], "hidden_size": 16, "num_hidden_layers": 1, "num_spectral_channels": 4}
    tiny |= {"filter_length": 512, "block_size": 64, "max_steps": 4, "warmup_steps": 1, "validation_blocks": 2}
    tiny |= {"sweep_blocks": 2, "per_device_batch_size": 2}
    monkeypatch.setattr(reproduce, "task_arguments", lambda name, data_dir, scale: tiny)
    folders = {"output_dir": str(tmp_path / "runs"), "results_dir": str(tmp_path / "results")}
    return lambda **changes: reproduce.ReproduceArguments(
        **({"seeds": 2, "rows": ["base", "ES-SSM"]} | folders | changes)
    )


def test_a_table_is_run_collected_and_resumed(novels, tmp_path, capsys, monkeypatch):
    record = reproduce.reproduce("table4", novels())
    rows = record["rows"]
    assert list(rows) == ["base", "ES-SSM"] and all(len(row["values"]) == 2 for row in rows.values())
    assert rows["base"]["training"]["arguments"]["gating"] == "none"
    assert rows["ES-SSM"]["training"]["schedule"] == "discrete" and rows["base"]["training"]["schedule"] == "full"
    assert rows["base"]["values"][0] != rows["base"]["values"][1]  # another seed
    names = {path.name for path in (tmp_path / "results").iterdir()}
    assert names == {"table4-small.json", "table4-small.md", "table4-small.png"}
    assert "| ES-SSM |" in (tmp_path / "results" / "table4-small.md").read_text()
    assert str(tmp_path) not in (tmp_path / "results" / "table4-small.json").read_text()
    capsys.readouterr()
    monkeypatch.setattr(reproduce.subprocess, "run", None)  # nothing is run again
    assert reproduce.reproduce("table4", novels())["rows"] == rows
    assert capsys.readouterr().out.count("done before") == 4
    with pytest.raises(RuntimeError, match="base-seed0 holds the run of another command"):
        reproduce.reproduce("table4", novels(max_steps=5))


def test_runner_errors(novels):
    with pytest.raises(ValueError, match="experiment must be one of"):
        reproduce.reproduce("table9", novels())
    with pytest.raises(ValueError, match=r"rows of table4 must be among .* got \['gate'\]"):
        reproduce.reproduce("table4", novels(rows=["gate"]))
    with pytest.raises(ValueError, match="seeds and jobs"):
        reproduce.reproduce("table4", novels(seeds=0))
    with pytest.raises(RuntimeError, match="max_steps must be at least 1, got -1"):
        reproduce.reproduce("table4", novels(max_steps=-1, rows=["base"], seeds=1))
