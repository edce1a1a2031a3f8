# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""The rows of every table of essm-reproduce, one of each kind, start at full scale.

Arguments, data, model and optimizer are those of the row's own command, in full; the data is a handful of made-up rows
of the official shape. The two updates read one sample of at most 128 positions instead of up to 64 of up to 16,384,
which would take up to 160 GB (a Mamba of the novels); S4's kernel, always as long as the longest sequence (a minute
an update on Path-X), is of that length too. Nothing is saved or swept: that is the same code at every size, and tested
with small ones. ES-SSM alone also reads one whole sample of every task.
"""

import ctypes
import gc
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from essm_train import reproduce
from essm_train.arguments import sort_values
from essm_train.baselines.state_spaces import S4Mixer
from essm_train.data.arguments import ClassificationArguments, CLMArguments, RetrievalArguments
from essm_train.measure.timing import threads
from essm_train.run import classifier, language, loop
from essm_train.run.checkpoints import list_checkpoints
from essm_train.tasks.audio import SC10_WORDS, SpeechFrames
from essm_train.tasks.catalog import TASKS, get_task
from essm_train.tasks.experiments import EXPERIMENTS, Row, get_experiment
from essm_train.tasks.listops import ListOps
from essm_train.tasks.pathfinder import Pathfinder, PathX
from essm_train.tasks.shards import SPLITS, generate

# One for each set of arguments that chooses other code, which numbers do not; tasks have a test of their own.
ROWS = {
    json.dumps({k: v if isinstance(v, (str, bool)) else None for k, v in row.arguments.items()}, sort_keys=True): row
    for name in EXPERIMENTS
    for row in get_experiment(name).rows.values()
    if row.arguments
}
SCRIPTS = {
    "train_clm": (language, language.train_language_model, CLMArguments),
    "train_classification": (classifier, classifier.train_classifier, ClassificationArguments),
    "train_retrieval": (classifier, classifier.train_pair_classifier, RetrievalArguments),
}
POSITIONS = 128


class Noise(SpeechFrames):
    """Clips of speech that need no files."""

    words, sampling_rate, source = SC10_WORDS, 8000, "none"
    sizes = dict.fromkeys(SPLITS, 2)

    def __init__(self, name: str):
        self.name = name

    def read(self, split: str, rows: range) -> list[tuple[np.ndarray, int, str]]:
        rng = np.random.default_rng(0)
        return [(rng.normal(0, 0.1, 8000), row % 2, f"{row}.wav") for row in rows]


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """A folder that has a few rows of everything, of the official shape."""
    folder = tmp_path_factory.mktemp("data")
    sizes = dict.fromkeys(("train_size", "validation_size", "test_size"), 2)
    easy = sizes | {"contour_length": 2, "distractor_paddles": 0}
    for generator in (ListOps(**sizes), Pathfinder(**easy), PathX(**easy), Noise("sc10"), Noise("speech4")):
        generate(generator, folder / generator.name)
    books = {"text": ["It was the best of times, it was the worst of times. " * 1000] * 2}
    (folder / "pg19").mkdir()
    for stem in ("pg19/train-0", "pg19/validation-0", "english_novels-train", "english_novels-validation"):
        pq.write_table(pa.table(books), folder / f"{stem}.parquet")
    for split in ("train", "test"):
        labels = {"label": [0, 1] * 2}
        pq.write_table(pa.table({"text": ["a fine film " * 400] * 4} | labels), folder / f"imdb-{split}.parquet")
        for stem, length in (("cifar10_gray", 1024), ("mnist", 784)):
            pixels = pa.array([(np.arange(length) % 256).astype(np.uint8)] * 4, pa.list_(pa.uint8()))
            pq.write_table(pa.table({"pixels": pixels} | labels), folder / f"{stem}-{split}.parquet")
    for end in ("train", "eval", "test"):
        line = "\t".join(["1.0", "a", "b", "one paper " * 500, "another one " * 500])
        (folder / f"new_aan_pairs.{end}.tsv").write_text(f"{line}\n" * 2)
    return folder


@pytest.fixture(autouse=True)
def surroundings(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    with threads(torch.get_num_threads()):
        yield
    gc.collect()  # what the exception's frames hold, and what glibc keeps of many small tensors, 0.5 GB a test
    if sys.platform == "linux":
        getattr(ctypes.CDLL(None), "malloc_trim", lambda pad: 0)(0)


class Started(Exception):
    """The first updates are done."""


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS.values(), ids=lambda row: f"{row.task}-{row.arguments}".replace(" ", ""))
def test_a_row_starts_at_full_scale(row, data, tmp_path, monkeypatch):
    start_row(row, POSITIONS, data, tmp_path, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("task", [task for task in TASKS if task != "pathx"])  # 16,384 positions: 12 GB and minutes
def test_a_task_starts_at_its_own_length(task, data, tmp_path, monkeypatch):
    """ES-SSM, one sample of the official length an update, and a look at held-out data."""
    start_row(Row(task), None, data, tmp_path, monkeypatch)


def start_row(row: Row, positions: int | None, data: Path, tmp_path: Path, monkeypatch) -> None:
    """Two updates of one sample cut to that many positions; validated only at full length."""
    args = reproduce.ReproduceArguments(scale="full", data_dir=str(data), max_steps=2, output_dir=str(tmp_path))
    values = reproduce.arguments_of(row, args, seed=0)
    module, main, arguments = SCRIPTS[get_task(row.task).script]

    def start(accelerator, args, task):
        collate = task.collate
        if positions is not None:
            task.validation = SimpleNamespace(value=lambda *rest, finite: 0.5)
        task.collate = lambda samples: {
            name: value if value.ndim == 1 else value[(slice(None),) * (value.ndim - rest) + (slice(positions),)]
            for name, value in collate(samples[:1]).items()
            for rest in [2 if name == "input_features" else 1]
        }
        for mixer in task.model.modules():
            if isinstance(mixer, S4Mixer):
                mixer.max_length = positions or mixer.max_length
        run = loop._Run(accelerator, args, task)
        run.resume()
        run.perform_updates()
        assert run.progress.update == 2 and not list_checkpoints(Path(values["output_dir"]))
        raise Started(task.model)

    monkeypatch.setattr(module, "train_and_sweep", start)
    for name in ("save_checkpoint", "save_model"):
        monkeypatch.setattr(loop, name, lambda *rest: None)
    with pytest.raises(Started) as started:
        few = {"validation_blocks": 1} if module is language else {}
        main(
            arguments(**sort_values(arguments, values | {"load_best_model_at_end": False} | few, row.task))
        )  # no model is saved
    config = started.value.args[0].config
    for name, value in row.arguments.items():  # a row is what its name says
        if hasattr(config, name):
            assert getattr(config, name) == value, name
