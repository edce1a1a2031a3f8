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

SMALL = "essm-elastic-21m"
LLAMA = f"Llama as {SMALL}"
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
    monkeypatch.setattr(gpu_all, "LEAST_SECONDS", 1)
    waits = WRITES + "time.sleep(600)"
    results = run({"long": (waits, 0.7), "longer": (waits, 60), "last": ("", 60)}, "--seconds", "2")
    assert results["long"]["status"].startswith("stopped after") and results["long"]["report"] == {"rows": [1]}
    assert results["longer"]["status"].startswith("stopped after")
    assert results["last"]["status"].startswith("not begun: 0 s")


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
    results = train("--seconds", "40", "--configs", str(gpu_train.HUB / SMALL))
    for name, result in results.items():
        assert max(result["bits_per_byte"].values()) < result["losses"][0][2] - 1, name
        assert len(result["losses"]) == result["updates"] and result["tokens"] == 96 * result["updates"]
    budgets = {name: [*result["bits_per_byte"]] for name, result in results.items()}
    assert budgets == {SMALL: ["1", "2", "3", "4", "6", "8"], f"Mamba-2 as {SMALL}": ["None"], LLAMA: ["None"]}


def test_a_stopped_training_goes_on(train):
    options = ("--models", "Llama", "--configs", str(gpu_train.HUB / SMALL))
    first, again = (train("--seconds", seconds, *options)[LLAMA] for seconds in ("3", "10"))
    assert first["updates"] + 5 < again["updates"] == len(again["losses"])
    assert again["losses"][: first["updates"]] == first["losses"]


def test_a_model_that_fails_costs_the_others_nothing(train, monkeypatch):
    make = gpu_train.make_model
    monkeypatch.setattr(
        gpu_train, "make_model", lambda config, *rest: make(config, *rest) if SMALL in str(config) else 1 / 0
    )
    results = train("--seconds", "4", "--models", "Llama", "--save_seconds", "0")
    assert results.pop(LLAMA)["updates"] and [*results.values()] == [{"failed": "ZeroDivisionError: division by zero"}]


@pytest.mark.parametrize("batch", [2, 7])
def test_rows_of_smaller_budgets_in_one_pass_train_as_their_parts(batch):
    model = gpu_train.make_model(gpu_train.HUB / SMALL, "elastic", True).train()
    ids = torch.randint(0, 256, (batch, 41), generator=torch.Generator().manual_seed(0))
    parts = gpu_train.budget_schedule("family", 8, 0).parts(3, batch)

    def by_parts():
        forward = lambda part: gpu_train.outputs_of(model, ids[part.rows], part.budget)  # noqa: E731
        return gpu_train.budget_losses(forward, parts, labels=ids, distillation_weight=gpu_train.DISTILLATION)

    found = []
    for losses in (by_parts(), gpu_train.losses_of(model, ids, parts)):
        total = sum(losses)
        found.append([total.detach(), *torch.autograd.grad(total, [*model.parameters()])])
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("config", gpu_train.PEERS)
def test_models_of_the_gpu_run_have_one_size(config):
    with torch.device("meta"):
        models = [gpu_train.make_model(gpu_train.HUB / config, name, False) for name in gpu_train.SHARES]
    elastic, *peers = (sum(p.numel() for p in model.parameters()) for model in models)
    assert all(abs(count / elastic - 1) < 0.03 for count in peers), (elastic, peers)


def test_the_learning_rate_rises_and_falls():
    assert gpu_train.rate(0, 0.0) == 1 / gpu_train.WARMUP and gpu_train.rate(1000, 0.5) == 1.0
    assert gpu_train.rate(1000, 1.0) == 0.0 and gpu_train.rate(1000, 0.875) == pytest.approx(0.5)
