# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Data that several benchmarks are tested on, and how one is run small."""

import itertools
import json

import datasets
import pytest
import torch
from tiny_chains import write_chains
from tiny_tasks import write_tiny_tasks


@pytest.fixture(autouse=True)
def one_thread():
    """Tiny products lose more to waiting threads than they gain; and no benchmark leaves another number behind."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    assert torch.get_num_threads() == 1
    torch.set_num_threads(before)


@pytest.fixture
def quick(tmp_path, monkeypatch, capsys):
    """Runs a benchmark from end to end on tiny sizes; its report, as written."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    numbers = itertools.count()

    def run(module, *arguments):
        path = tmp_path / f"report{next(numbers) or ''}.json"
        with pytest.raises(SystemExit):
            module.main(["-h"])
        rounds = ["--rounds", "1"] if "--rounds" in capsys.readouterr().out else []
        module.main(["--quick", *rounds, "--out", str(path), *map(str, arguments)])
        report = json.loads(path.read_text())
        assert {"cpu", "cpu_cores", "gpu", "torch", "transformers"} <= report["machine"].keys() and report["results"]
        return report

    return run


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    """A folder with tiny data of every task, read through a cache of its own."""
    patch, folder = pytest.MonkeyPatch(), tmp_path_factory.mktemp("data")
    patch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path_factory.mktemp("cache")))
    datasets.disable_progress_bars()
    write_tiny_tasks(folder)
    write_chains(folder / "protein_chains", 18)
    yield str(folder)
    patch.undo()
