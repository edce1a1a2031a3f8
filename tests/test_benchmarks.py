# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Every benchmark runs from end to end on tiny sizes and writes the JSON that its readers expect; nothing is timed."""

import importlib
import json
from pathlib import Path

import pytest
import torch

TINY = {
    "spectral_basis": ["--lengths", "64", "512"],
    "spectral_layer": ["--lengths", "128", "--budgets", "2", "--threads", "1"],
    "decoding": ["--contexts", "16", "80"],
    "training_step": ["--length", "64"],
}


@pytest.fixture
def benchmark_module(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1]))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tiny products lose more to waiting threads than they gain
    yield lambda name: importlib.import_module(f"benchmarks.{name}")
    torch.set_num_threads(threads)


@pytest.mark.parametrize("name", TINY)
def test_benchmark_writes_its_report(benchmark_module, tmp_path, name):
    path = tmp_path / f"{name}.json"
    arguments = ["--quick", "--device", "cpu", "--rounds", "1", "--out", str(path), *TINY[name]]
    benchmark_module(name).main(arguments)
    report = json.loads(path.read_text())
    assert report["benchmark"] == name
    assert {"cpu", "cpu_cores", "gpu", "torch", "transformers"} <= report["machine"].keys()
    assert report["results"] and report["targets"]
    assert all(isinstance(t["met"], bool) and t["value"] >= 0 for t in report["targets"])
    assert [p.name for p in tmp_path.iterdir()] == [path.name]  # no partial file stays
    assert torch.get_num_threads() == 1  # left as found


def test_peak_memory_is_exact_where_the_answer_is_known(benchmark_module):
    benchmark_module("common").check_peak_memory(torch.device("cpu"))


def test_wrong_results_are_refused(benchmark_module):
    common = benchmark_module("common")
    assert common.require_close("same", torch.ones(4), torch.ones(4), 1e-6) == 0.0
    for wrong in (torch.zeros(4), torch.full((4,), torch.nan)):
        with pytest.raises(RuntimeError, match="wrong results are not timed"):
            common.require_close("wrong", wrong, torch.ones(4), 1e-6)
