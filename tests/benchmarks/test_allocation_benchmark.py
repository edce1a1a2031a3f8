# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""benchmarks/budget_allocation.py"""

import argparse
import importlib
import json
import statistics

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torch.nn.functional as F
from allocations import all_lists
from helpers import random_model

from essm_train.tasks import catalog
from modeling_essm import ESSMForCausalLM, ESSMForSequenceClassification
from modeling_essm.budgets.allocation import (
    allocate_spectral_budget,
)


@pytest.fixture
def benchmark(monkeypatch):
    module = importlib.import_module("benchmarks.budget_allocation")
    monkeypatch.setattr(module, "seen", [], raising=False)  # calibration data that lists were chosen on

    def allocate(model, total, method, calibration, min_budget):
        module.seen.extend(calibration or [])
        return allocate_spectral_budget(model, total, method, calibration, min_budget)

    monkeypatch.setattr(module, "allocate_spectral_budget", allocate)
    return module


def save(tmp_path, cls=ESSMForCausalLM, **fields):
    folders = [str(tmp_path / f"seed{seed}" / "model") for seed in (0, 1)]
    for seed, folder in enumerate(folders):
        random_model(cls, seed=seed, **fields).save_pretrained(folder)
    return folders


def test_benchmark_of_language_models(benchmark, tmp_path, capsys):
    folders, held_out, other = save(tmp_path, num_hidden_layers=3), tmp_path / "held_out.txt", tmp_path / "other.txt"
    held_out.write_text("the spectral state of the spectral budget " * 30)
    other.write_text("a balanced realisation of the Hankel operator " * 30)
    out = tmp_path / "report.json"
    arguments = ["--quick", "--device", "cpu", "--models", *folders, "--averages", "3", "8", "--block_size", "64"]
    files = ["--text_files", str(held_out), "--calibration_files", str(other), "--out", str(out)]
    report = benchmark.main([*arguments, *files])
    assert json.loads(out.read_text())["results"] == report["results"] and out.with_suffix(".png").stat().st_size > 0
    assert {"cpu", "cpu_cores", "torch"} <= report["machine"].keys() and str(tmp_path) not in out.read_text()
    assert "aire, no data" in capsys.readouterr().out
    assert all(bytes(ids[ids < 256].tolist()) in other.read_bytes() for b in benchmark.seen for ids in b["input_ids"])
    rows = {(row["average"], row["method"]): row for row in report["results"]}
    assert len(rows) == 2 * 6
    model = ESSMForCausalLM.from_pretrained(folders[0]).eval()
    options = {"block_size": 64, "batch_size": 3, "evaluation_size": 8, "calibration_size": 4}
    data = benchmark.open_text(
        argparse.Namespace(text_files=[str(held_out)], calibration_files=[str(other)], **options)
    )
    for average in (3, 8):
        found = report["models"][0]["averages"][average]
        for method in ("uniform", *benchmark.METHODS):
            assert found[method]["quality"] == pytest.approx(data.quality(model, found[method]["list"]), rel=1e-6)
            assert sum(found[method]["list"]) == 3 * average and min(found[method]["list"]) >= 2
        assert found["uniform"]["list"] == [average] * 3 and len(found["random"]["qualities"]) == 3
        row = rows[average, "loss"]
        values = [m["averages"][average]["loss"]["quality"] for m in report["models"]]
        uniform = [m["averages"][average]["uniform"]["quality"] for m in report["models"]]
        assert row["quality"]["deviation"] == pytest.approx(statistics.stdev(values))
        assert row["gain"]["mean"] == pytest.approx(statistics.fmean(uniform) - statistics.fmean(values))
        assert rows[average, "uniform"]["gain"]["mean"] == 0.0 and 0 <= row["beaten"] <= 1
    assert report["targets"][0]["value"] == min(rows[average, "loss"]["gain"]["mean"] for average in (3, 8))
    with pytest.raises(ValueError, match="must not share a file"):
        benchmark.main([*arguments, "--text_files", str(held_out), "--calibration_files", str(other), str(held_out)])
    with pytest.raises(ValueError, match="need --calibration_files"):
        benchmark.main([*arguments, "--text_files", str(held_out)])


def test_benchmark_reads_language_tasks(benchmark, tmp_path, monkeypatch):
    from essm_train.data.arguments import CLMArguments
    from essm_train.data.text import load_text
    from essm_train.data.tokens import ByteEncoder

    (tmp_path / "train.txt").write_text("a balanced realisation of the Hankel operator " * 30)
    (tmp_path / "validation.txt").write_text("the spectral state of the spectral budget " * 30)
    files = {f"{split}_file": [str(tmp_path / f"{split}.txt")] for split in ("train", "validation")}
    args = CLMArguments(**files, block_size=64, filter_length=512)
    monkeypatch.setattr(catalog, "make_arguments", lambda name, data_dir, scale: args)
    options = {"data_dir": "data", "scale": "full", "batch_size": 3, "evaluation_size": 5, "calibration_size": 4}
    data = benchmark.open_task(argparse.Namespace(task="novels", **options))
    blocks = [bytes(ids[ids < 256].tolist()) for batch in data.calibration for ids in batch["input_ids"]]
    train = (tmp_path / "train.txt").read_bytes()
    assert len(blocks) == 4 and all(block in train for block in blocks)
    rows, model = load_text(args, ByteEncoder()).held_out, random_model()
    assert len(rows) == 20
    rows = rows[[0, 5, 10, 14, 19]]
    with torch.no_grad():
        logits = model(rows, spectral_budget=[3, 5]).logits[:, :-1]
    nats = F.cross_entropy(logits.mT, rows[:, 1:].masked_fill(rows[:, 1:] > 255, -100))
    assert data.quality(model, [3, 5]) == pytest.approx(float(nats) / np.log(2), rel=1e-5)


def test_benchmark_of_classifiers(benchmark, tmp_path, monkeypatch):
    from essm_train.data.arguments import ClassificationArguments

    rng = np.random.default_rng(0)
    for split, count in (("train", 20), ("test", 7)):
        rows = pa.array(list(rng.integers(0, 256, (count, 16)).astype(np.uint8)), pa.list_(pa.uint8()))
        pq.write_table(pa.table({"pixels": rows, "label": rng.integers(0, 3, count)}), tmp_path / f"{split}.parquet")
    args = ClassificationArguments(
        train_file=[str(tmp_path / "train.parquet")], test_file=[str(tmp_path / "test.parquet")],
        features_column="pixels", num_labels=3, filter_length=512, cpu_threads=1,
    )  # fmt: skip
    monkeypatch.setattr(catalog, "make_arguments", lambda name, data_dir, scale: args)
    folders = save(tmp_path, ESSMForSequenceClassification, num_input_features=1, num_labels=3)
    out = tmp_path / "report.json"
    report = benchmark.main(
        ["--quick", "--device", "cpu", "--models", *folders, "--task", "smnist", "--averages", "3", "--out", str(out)]
    )
    assert report["metric"] == "accuracy" and "7 of " in report["data"] and "4 training samples" in report["data"]
    model = ESSMForSequenceClassification.from_pretrained(folders[1])
    table = pq.read_table(tmp_path / "test.parquet")
    pixels, labels = (torch.tensor(table[name].to_pylist()) for name in ("pixels", "label"))
    train = {tuple(row) for row in pq.read_table(tmp_path / "train.parquet")["pixels"].to_pylist()}
    drawn = [((row[:, 0] + 1) * 127.5).round().int().tolist() for b in benchmark.seen for row in b["input_features"]]
    assert drawn and all(tuple(row) in train for row in drawn)
    found = report["models"][1]["averages"][3]
    for name in ("uniform", "loss"):
        with torch.no_grad():
            logits = model(input_features=pixels[..., None] / 127.5 - 1, spectral_budget=found[name]["list"]).logits
        assert found[name]["quality"] == pytest.approx(float((logits.argmax(-1) == labels).double().mean()))


def test_random_lists_are_legal_and_equally_likely(benchmark):
    lists = [tuple(budgets) for budgets in benchmark.random_lists(3000, 12, (6, 4, 7), 2, seed=0)]
    legal = all_lists(12, (6, 4, 7), 2)
    counts = [lists.count(budgets) for budgets in legal]
    assert sum(counts) == 3000 and len(legal) == 14
    assert all(abs(count - 3000 / 14) < 5 * (3000 / 14) ** 0.5 for count in counts)
