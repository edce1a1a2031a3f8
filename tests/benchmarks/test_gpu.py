# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""What is run on a GPU, on a CPU: parts that fail or take too long, and a training that is stopped and goes on."""

import importlib
import itertools
import json
import types

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from benchmarks import gpu_all, gpu_train
from benchmarks.gpu_all import Part

WRITES = "import sys; open(sys.argv[sys.argv.index('--out') + 1], 'w').write('{\"rows\": [1]}'); "


def run(parts, tmp_path, monkeypatch, *arguments):
    monkeypatch.setattr(gpu_all, "PARTS", parts)
    out = tmp_path / "all.json"
    gpu_all.main(["--device", "cpu", "--out", str(out), *arguments])
    return json.loads(out.read_text())["results"]


def test_a_part_that_fails_costs_the_others_nothing(tmp_path, monkeypatch):
    parts = {
        "fails": Part(("-c", "print('why'); raise SystemExit(3)"), 60),
        "writes": Part(("-c", WRITES + "print(sys.argv[1:])"), 60),
        "is killed": Part(("-c", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"), 60, reports=False),
        "needs a model": Part(("-c", ""), 60, needs_model="--model"),
    }
    results = run(parts, tmp_path, monkeypatch, "--quick")
    assert {name: result["status"] for name, result in results.items()} == {
        "fails": "exit status 3",
        "writes": "done",
        "is killed": "exit status -9",
        "needs a model": "not begun: no --model",
    }
    assert results["fails"]["output"] == "why\n" and "report" not in results["fails"]
    assert results["writes"]["report"] == {"rows": [1]}
    assert "'--device', 'cpu', '--quick', '--out'" in results["writes"]["output"]


def test_a_part_that_takes_too_long_is_stopped_and_what_it_wrote_is_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_all, "LEAST_SECONDS", 1)
    waits = WRITES + "sys.stdout.flush(); import time; time.sleep(600)"
    parts = {"long": Part(("-c", waits), 0.7), "longer": Part(("-c", waits), 60), "last": Part(("-c", ""), 60)}
    results = run(parts, tmp_path, monkeypatch, "--seconds", "2")
    assert results["long"]["status"].startswith("stopped after") and results["long"]["report"] == {"rows": [1]}
    assert results["longer"]["status"].startswith("stopped after")
    assert results["last"]["status"].startswith("not begun: 0 s")


def test_every_part_is_a_command_that_exists(capsys):
    for name, part in gpu_all.PARTS.items():
        if part.reports:
            model = [part.needs_model, "x"] if part.needs_model else []
            with pytest.raises(SystemExit) as stopped:
                importlib.import_module(part.command[1]).main([*part.command[2:], *model, "-h"])
            assert stopped.value.code == 0, name
    assert "--out" in capsys.readouterr().out


@pytest.fixture
def train(tmp_path, monkeypatch):
    """Trains small on easy text. A look at the clock takes a tenth of a second, and an update looks twice."""
    ticks = itertools.count()
    monkeypatch.setattr(gpu_train, "time", types.SimpleNamespace(monotonic=lambda: next(ticks) / 10))
    monkeypatch.setattr(gpu_train, "WARMUP", 5)
    pq.write_table(pa.table({"text": ["the cat sat on the mat. " * 30] * 2}), tmp_path / "text.parquet")

    def train(*arguments):
        files = [part for name in ("train", "text") for part in (f"--{name}_file", str(tmp_path / "text.parquet"))]
        size = ["--batch", "2", "--length", "48", "--windows", "2", "--learning_rate", "0.01", "--log_every", "1"]
        out = ["--output_dir", str(tmp_path), "--out", str(tmp_path / "report.json")]
        return gpu_train.main(["--device", "cpu", "--quick", *files, *size, *out, *arguments])["results"]

    return train


@pytest.mark.slow
def test_all_three_models_learn(train):
    results = train("--seconds", "40")
    assert set(results) == {"flagship", "Mamba-2", "Llama"}
    for name, result in results.items():
        assert max(result["bits_per_byte"].values()) < result["losses"][0][2] - 1, name
        assert len(result["losses"]) == result["updates"] and result["tokens"] == 96 * result["updates"]
    assert set(results["flagship"]["bits_per_byte"]) == {"2", "3", "4", "6", "8", "12", "16"}
    assert set(results["Llama"]["bits_per_byte"]) == {"None"}


def test_a_stopped_training_goes_on(train):
    first = train("--seconds", "3", "--models", "Llama")["Llama"]
    again = train("--seconds", "10", "--models", "Llama")["Llama"]
    assert first["updates"] + 5 < again["updates"] == len(again["losses"])
    assert again["losses"][: first["updates"]] == first["losses"]


def test_models_of_the_gpu_run_have_one_size():
    with torch.device("meta"):
        models = [gpu_train.make_model(name, False) for name in gpu_train.SHARES]
    counts = [sum(p.numel() for p in model.parameters()) for model in models]
    assert max(counts) < 1.05 * min(counts), counts
    assert gpu_train.rate(0, 0.0) == 1 / gpu_train.WARMUP and gpu_train.rate(1000, 0.5) == 1.0
    assert gpu_train.rate(1000, 1.0) == 0.0 and gpu_train.rate(1000, 0.875) == pytest.approx(0.5)
