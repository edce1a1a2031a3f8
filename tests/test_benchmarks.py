# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Every benchmark runs from end to end on tiny sizes and writes the JSON that its readers expect; nothing is timed."""

import functools
import importlib
import json
from pathlib import Path

import pytest
import torch
from helpers import tiny_config

from modeling_essm import ESSMForCausalLM

TINY = {  # report: arguments
    "spectral_basis": ["--lengths", "64", "512"],
    "spectral_layer": ["--lengths", "128", "--budgets", "2", "--threads", "1"],
    "decoding": ["--contexts", "16", "80"],
    "decoding_limit": ["--table", "limit", "--backend", "eager"],
    "long_prompt": [],
    "prefix_loading": [],
    "quantization": [],
    "speculative": ["--tokens", "8"],
    "training_step": ["--table", "models", "--length", "64"],
    "training_step_essm": ["--table", "essm", "--lengths", "64", "32", "--batches", "1", "2"],
    "training_step_dropout": ["--table", "dropout", "--length", "64"],
}
MODULES = {
    "decoding_limit": "decoding",
    "training_step_essm": "training_step",
    "training_step_dropout": "training_step",
}


@pytest.fixture
def benchmark_module(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1]))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tiny products lose more to waiting threads than they gain
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))  # no C++ compiler
    yield lambda name: importlib.import_module(f"benchmarks.{MODULES.get(name, name)}")
    torch.set_num_threads(threads)


@pytest.mark.parametrize("name", TINY)
def test_benchmark_writes_its_report(benchmark_module, tmp_path, name):
    path = tmp_path / f"{name}.json"
    arguments = ["--quick", "--device", "cpu", "--rounds", "1", "--out", str(path), *TINY[name]]
    benchmark_module(name).main(arguments)
    report = json.loads(path.read_text())
    assert report["benchmark"] == name
    assert {"cpu", "cpu_cores", "gpu", "torch", "transformers"} <= report["machine"].keys()
    assert report["results"] and (report["targets"] or name == "training_step_essm")  # where no target is stated
    assert all(isinstance(t["met"], bool) and t["value"] >= 0 for t in report["targets"])
    assert [p.name for p in tmp_path.iterdir()] == [path.name]  # no partial file stays
    assert torch.get_num_threads() == 1  # left as found


def test_length_extrapolation(benchmark_module, tmp_path):
    ESSMForCausalLM(tiny_config(filter_length=64, num_spectral_channels=8)).save_pretrained(tmp_path / "equal")
    ESSMForCausalLM(tiny_config(filter_length=512, num_spectral_channels=8)).save_pretrained(tmp_path / "above")
    (tmp_path / "text.txt").write_bytes(bytes(range(256)) * 10)
    arguments = ["--training_length", "64", "--text_files", str(tmp_path / "text.txt"), "--budgets", "2", "8"]
    models = [f"equal={tmp_path / 'equal'},{tmp_path / 'equal'}", f"above={tmp_path / 'above'}"]
    report = quick_report(benchmark_module("length_extrapolation"), tmp_path, *arguments, "--models", *models)
    runs = {(r["name"], r["algorithm"]): r for r in report["results"]}
    assert list(runs) == [("equal", "chunked"), ("equal", "fft"), ("above", "chunked")]
    assert [r["seeds"] for r in runs.values()] == [2, 2, 1] and str(tmp_path) not in json.dumps(report)
    for run in runs.values():
        for K in ("2", "8"):
            contexts, positions = run["by_context"][K], run["by_position"][K]
            assert len(contexts) == 4 and len(positions) == 8 and all(entry["deviation"] == 0 for entry in contexts)
            assert abs(contexts[-1]["mean"] - sum(entry["mean"] for entry in positions) / 8) < 1e-4
    short, long = (runs["equal", name]["by_context"]["8"] for name in ("chunked", "fft"))
    assert abs(short[0]["mean"] - long[0]["mean"]) < 1e-4  # within the filters both are the same operator
    assert (tmp_path / "report.png").stat().st_size > 0


def quick_report(module, tmp_path, *arguments):
    path = tmp_path / "report.json"
    module.main(["--quick", "--device", "cpu", "--rounds", "1", "--out", str(path), *arguments])
    return json.loads(path.read_text())


def test_training_step_measures_every_combination_when_asked(benchmark_module, tmp_path):
    module = benchmark_module("training_step")
    shape = ["--lengths", "32", "--batches", "1", "--budgets", "2", "3"]
    report = quick_report(module, tmp_path, "--table", "essm", "--full", *shape)
    rows = {(r["budget"], r["checkpointing"], r["compiled"]): r for r in report["results"]}
    assert len(rows) == len(report["results"]) == 8 and report["left_out"] == 0
    for (K, checkpointing, compiled), row in rows.items():
        assert row["tokens_per_second"]["median"] > 0 and row["peak_bytes"] > 0
        assert row["memory_over_plain"] == row["peak_bytes"] / rows[K, False, False]["peak_bytes"]
        assert ("gradient_error" in row) == (checkpointing or compiled)
        assert row.get("graphs") == (1 if compiled else None)  # one for each budget


def test_training_step_names_what_it_cannot_measure(benchmark_module, tmp_path, monkeypatch):
    def backend(graph, inputs):
        raise OSError("no C++ compiler")

    module = benchmark_module("training_step")
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    report = quick_report(module, tmp_path, "--table", "essm", "--lengths", "32", "--batches", "1", "--budgets", "2")
    for row in report["results"]:
        assert ("no C++ compiler" in row.get("failed", "")) == row["compiled"] == ("seconds" not in row)
    report = quick_report(module, tmp_path, "--table", "dropout", "--length", "32")
    assert ["failed" in row for row in report["results"]] == [False, True] and len(report["targets"]) == 1
    report = quick_report(module, tmp_path, "--table", "essm", "--modes", "eager", "--memory", "1e-3")
    assert all("exceed" in row["skipped"] and "seconds" not in row for row in report["results"])


def test_training_step_dropout_is_balanced(benchmark_module):
    updates = benchmark_module("training_step").balanced_updates(32)
    assert sorted(updates) == [(2,), (3,), (4,), (6,), (8,), (12,), (16,), (24,), (32,)]
    assert updates != sorted(updates)


def test_peak_memory_is_exact_where_the_answer_is_known(benchmark_module):
    benchmark_module("common").check_peak_memory(torch.device("cpu"))


def test_wrong_results_are_refused(benchmark_module):
    common = benchmark_module("common")
    assert common.require_close("same", torch.ones(4), torch.ones(4), 1e-6) == 0.0
    for wrong in (torch.zeros(4), torch.full((4,), torch.nan)):
        with pytest.raises(RuntimeError, match="wrong results are not timed"):
            common.require_close("wrong", wrong, torch.ones(4), 1e-6)
