# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""essm_train/tasks/catalog.py: arguments that the scripts accept, sizes of hub_configs, where data is looked for."""

import json
import re
import shlex
import sys
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from helpers import ROOT

from essm_train import list_tasks, make_task_data
from essm_train.arguments import parse_arguments, sort_values
from essm_train.data.arguments import ClassificationArguments, CLMArguments
from essm_train.run.classifier import train_classifier
from essm_train.tasks import catalog
from essm_train.tasks.audio import SpeechFrames
from essm_train.tasks.catalog import SCALES, TASKS, get_task, make_arguments, substitute_data, task_arguments
from essm_train.tasks.listops import ListOps
from essm_train.tasks.pathfinder import Pathfinder
from essm_train.tasks.retrieval import RetrievalArguments
from essm_train.tasks.shards import MANIFEST, SPLITS
from essm_train.tasks.shards import generate as generate_shards
from essm_train.tasks.sources import Files, data_folders

BOTH = [(name, scale) for name in TASKS for scale in SCALES]
CLASSES = {
    "train_clm": CLMArguments,
    "train_classification": ClassificationArguments,
    "train_retrieval": RetrievalArguments,
}


class Noise:
    """Clips of speech that need no files."""

    words, sampling_rate, fingerprint = ("yes", "no"), 8000, "none"
    sizes = dict.fromkeys(SPLITS, 2)

    def read(self, split: str, rows: range) -> list[tuple[np.ndarray, int, str]]:
        rng = np.random.default_rng(0)
        return [(rng.normal(0, 0.1, 4000), row % 2, f"{row}.wav") for row in rows]


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """A folder that has something of everything."""
    folder = tmp_path_factory.mktemp("data")
    sizes = dict.fromkeys(("train_size", "validation_size", "test_size"), 2)
    small = {"image_size": 16, "seed_distance": 3, "contour_length": 2, "distractor_paddles": 0}
    trees = {"min_length": 5, "max_length": 50, "max_depth": 4}
    for spec in map(get_task, TASKS):
        for place in (*spec.data, *spec.small_data, *spec.medium_data):
            if isinstance(place, Files):
                for pattern in place.files.values():
                    path = folder / pattern.replace("*", "00000")
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.touch()
            elif spec.name == "listops":
                generate_shards(ListOps(**sizes, **trees), folder / place.folder, progress=False)
            elif spec.name in ("pathfinder", "pathx"):
                generate_shards(Pathfinder(name=place.name, **sizes, **small), folder / place.folder, progress=False)
            else:
                generate_shards(SpeechFrames.of(place.name, Noise()), folder / place.folder, progress=False)
    return folder


# ---------------------------------------------------------------------------------------------------------------------
# The tasks.


def test_all_tasks_are_there_and_say_what_they_are():
    names = "image listops novels pathfinder pathx pg19 retrieval sc10 smnist speech4 text"
    assert list(TASKS) == names.split()
    for name in TASKS:
        spec = get_task(name)
        assert spec.name == name and spec.title and spec.note and spec.origin
        assert (ROOT / "train/essm_train" / f"{spec.script}.py").is_file()
        assert spec.metric == ("bits/byte" if spec.script == "train_clm" else "accuracy")


@pytest.mark.parametrize("name, scale", BOTH)
def test_scripts_accept_the_arguments(name, scale, data, tmp_path):
    args = make_arguments(name, data, scale, output_dir=str(tmp_path), seed=3)
    assert type(args) is CLASSES[get_task(name).script] and (args.seed, args.max_steps > 0) == (3, True)
    assert args.max_steps % args.eval_steps == 0 or args.max_steps < args.eval_steps
    files = [args.train_file, args.validation_file]
    for paths in files:
        for path in [paths] if isinstance(paths, str) else paths or []:
            assert Path(path).is_file() and Path(path).is_relative_to(data)
    length = getattr(args, "block_size", None) or args.max_length
    if args.config_name:
        config = json.loads((Path(args.config_name) / "config.json").read_text())
        assert length <= config["filter_length"] if "filter_length" in config else length <= 4096
    else:
        assert length <= args.fields()["filter_length"]


@pytest.mark.parametrize(
    "name, folder",
    [(name, f"essm-lra-{name}") for name in ("listops", "text", "retrieval", "image", "pathfinder", "pathx")]
    + [("sc10", "essm-audio"), ("speech4", "essm-audio")],
)
def test_full_sizes_are_those_of_hub_configs(name, folder):
    config = json.loads((ROOT / "hub_configs" / folder / "config.json").read_text())
    arguments = get_task(name).arguments | get_task(name).full
    if "config_name" in arguments:  # which says all of it
        assert arguments["config_name"] == f"{{hub_configs}}/{folder}" and "hidden_size" not in arguments
        return
    for field in ("hidden_size", "num_hidden_layers", "filter_length", "dropout"):
        default = {"hidden_size": 256, "filter_length": 4096, "dropout": 0.0}.get(field)
        assert arguments.get(field, 0.0) == config.get(field, default), field
    if "num_labels" in arguments and "id2label" in config:
        assert arguments["num_labels"] == len(config["id2label"])


def test_notes_do_not_promise_official_numbers():
    assert "never call" in get_task("novels").note and "never call" in get_task("speech4").note
    assert "not the official bytes" in get_task("image").note
    for name in ("text", "retrieval"):
        assert "not the official task" in get_task(name).note  # of the small runs, which cut the texts


# ---------------------------------------------------------------------------------------------------------------------
# Where data is.


@pytest.mark.parametrize("name, scale", BOTH)
def test_absent_data_says_what_to_do(name, scale, tmp_path):
    with pytest.raises(FileNotFoundError) as caught:
        task_arguments(name, tmp_path, scale)
    message = str(caught.value)
    assert f"no data for task {name!r}" in message and str(tmp_path) in message
    assert "https://" in message or "http://" in message or "`essm-" in message or name == "speech4"
    assert not re.search(r"[{}]", message.replace("{train,validation,test}", ""))  # nothing left unformatted
    for command in re.findall(r"`essm-make-task-data (.*?)`", message):
        generator, output_dir, _ = make_task_data.parse_arguments(shlex.split(command))
        place = get_task(name).places(scale)[0]
        assert output_dir == tmp_path / place.folder and generator.name == place.name
        spec = get_task(name)
        limit = (spec.arguments | spec.sizes(scale))["max_length"]
        assert limit == (generator.max_length if name == "listops" else generator.image_size**2)


def test_speech_says_where_the_clips_are(tmp_path):
    raw, made = tmp_path / "raw", tmp_path / "made"
    with pytest.raises(FileNotFoundError, match=rf"put speech_commands_4words-train.* into {made}, then run"):
        task_arguments("speech4", [made, raw])
    raw.mkdir()
    (raw / "speech_commands_4words-train.parquet").touch()
    command = rf": run `essm-prepare-audio speech4 --data_dir {raw} --output_dir {made}/speech4`"
    with pytest.raises(FileNotFoundError, match=command):
        task_arguments("speech4", [made, raw])


def test_unfinished_and_foreign_shards(data, tmp_path):
    manifest = json.loads((data / "listops" / MANIFEST).read_text())
    folder = tmp_path / "listops"
    folder.mkdir()
    (folder / MANIFEST).write_text(json.dumps(manifest | {"complete": False}))
    with pytest.raises(
        FileNotFoundError, match=rf"unfinished: run `essm-make-task-data listops --output_dir {folder}` again"
    ):
        task_arguments("listops", tmp_path)
    (folder / MANIFEST).write_text(json.dumps(manifest | {"name": "pathx"}))
    with pytest.raises(ValueError, match="holds pathx data"):
        task_arguments("listops", tmp_path)


def test_folders_come_in_order(tmp_path, monkeypatch):
    first, second = tmp_path / "a", tmp_path / "b"
    for folder in (first, second):
        folder.mkdir()
        for split in ("train", "test"):
            (folder / f"imdb-{split}.parquet").touch()
    assert task_arguments("text", [first, second])["train_file"] == [str(first / "imdb-train.parquet")]
    (first / "imdb-test.parquet").unlink()  # all or nothing
    assert task_arguments("text", f"{first}:{second}")["train_file"] == [str(second / "imdb-train.parquet")]
    monkeypatch.setenv("ESSM_DATA", str(second))
    assert task_arguments("text")["test_file"] == [str(second / "imdb-test.parquet")]
    monkeypatch.delenv("ESSM_DATA")
    assert data_folders() == [Path("data")] and data_folders(Path("x")) == [Path("x")]
    with pytest.raises(ValueError, match="names no folder"):
        data_folders([])


def test_alternatives_and_patterns(data, tmp_path):
    for end in ("train", "eval", "test"):
        path = tmp_path / "lra_release" / "lra_release" / "tsv_data" / f"new_aan_pairs.{end}.tsv"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    found = task_arguments("retrieval", tmp_path)
    assert found["validation_file"].endswith("tsv_data/new_aan_pairs.eval.tsv")
    assert task_arguments("retrieval", data)["test_file"] == str(data / "new_aan_pairs.test.tsv")
    (data / "pg19" / "train-00001.parquet").touch()
    assert len(task_arguments("pg19", data)["train_file"]) == 2


def test_medium_is_the_papers_block_of_one_size(data):
    for name in TASKS:
        sizes = get_task(name).arguments | get_task(name).medium
        assert (sizes["hidden_size"], sizes["num_hidden_layers"], sizes["block"]) == (128, 4, "paper")
        assert "num_spectral_channels" not in sizes  # 32 by default
        assert sizes.get("max_length", sizes.get("block_size")) <= 1024


def test_substitute_data_is_named_as_such(data, tmp_path):
    """Where the official pairs are absent, those of novels are read at medium scale only, and said to be so."""
    assert substitute_data("retrieval", "medium", data) == "" == substitute_data("retrieval", "medium", tmp_path)
    (tmp_path / "novel_pairs").mkdir()
    for split in SPLITS:
        (tmp_path / "novel_pairs" / f"{split}.tsv").touch()
    found = task_arguments("retrieval", tmp_path, "medium")
    assert found["train_file"] == str(tmp_path / "novel_pairs" / "train.tsv")
    assert "Never call a number on it one of Retrieval" in substitute_data("retrieval", "medium", tmp_path)
    assert task_arguments("retrieval", [tmp_path, data], "medium")["train_file"].startswith(str(data))
    for scale in ("full", "small"):
        with pytest.raises(FileNotFoundError, match=r"fetch lra_release"):
            task_arguments("retrieval", tmp_path, scale)


def test_hub_only_when_asked_for():
    arguments = task_arguments("pg19", "nowhere", "small", use_hub=True)
    assert arguments["dataset_name"] == "emozilla/pg19" and arguments["streaming"] and "train_file" not in arguments
    assert CLMArguments(**sort_values(CLMArguments, arguments, "pg19")).block_size == 256
    arguments = task_arguments("text", "nowhere", use_hub=True)
    assert ClassificationArguments(**sort_values(ClassificationArguments, arguments, "text")).max_length == 4096
    with pytest.raises(ValueError, match="task 'smnist' has no data set on the Hub"):
        task_arguments("smnist", "nowhere", use_hub=True)


@pytest.mark.parametrize("scale", SCALES)
def test_tasks_are_the_papers_block(scale, monkeypatch):
    """Whatever the scripts make by default; a named configuration says its own."""
    from modeling_essm import ESSMConfig

    monkeypatch.setattr(catalog, "find_data", lambda *args: {})
    for name in catalog.TASKS:
        arguments = catalog.task_arguments(name, "nowhere", scale)
        if "config_name" in arguments:
            assert "block" not in arguments and ESSMConfig.from_pretrained(arguments["config_name"]).block == "paper"
        else:
            assert arguments["block"] == "paper"


def test_unknown_names():
    with pytest.raises(ValueError, match=r"task must be one of image, listops, .*, text, or a .yaml file, got 'lists'"):
        task_arguments("lists")
    with pytest.raises(ValueError, match="scale must be one of 'full', 'medium', 'small', got 'tiny'"):
        task_arguments("text", scale="tiny")


# ---------------------------------------------------------------------------------------------------------------------
# From the command line to a run.


def test_table(data, tmp_path, capsys, monkeypatch):
    list_tasks.run(["--data_dir", str(tmp_path / "nothing")])
    text = capsys.readouterr().out
    assert all(re.search(rf"^{name} +- +- +- ", text, re.M) for name in TASKS) and "fetch lra_release.gz" in text
    list_tasks.run(["--data_dir", str(data)])
    text = capsys.readouterr().out
    assert all(re.search(rf"^{name} +yes +yes +yes ", text, re.M) for name in TASKS) and "no data" not in text
    monkeypatch.setattr(sys, "argv", ["list_tasks.py", "--data_dir", str(tmp_path), "--task", "smnist"])
    with pytest.raises(SystemExit) as left:
        list_tasks.run()
    assert left.value.code == 1 and capsys.readouterr().err.startswith("error: no data for task 'smnist'")


@pytest.mark.parametrize("name, scale", BOTH)
def test_yaml_means_the_same(name, scale, data, tmp_path, capsys):
    list_tasks.run(["--data_dir", str(data), "--task", name, "--scale", scale])
    path = tmp_path / "arguments.yaml"
    path.write_text(capsys.readouterr().out)
    parsed = parse_arguments(CLASSES[get_task(name).script], [str(path), "--output_dir", str(tmp_path)])
    assert vars(parsed) == vars(make_arguments(name, data, scale, output_dir=str(tmp_path)))


def test_a_task_runs(tmp_path, monkeypatch):
    """Sequential "MNIST" of which only the first pixels count."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    rng = np.random.default_rng(0)
    for split, count in (("train", 40), ("test", 20)):
        pixels = pa.FixedSizeListArray.from_arrays(pa.array(rng.integers(256, size=count * 784).astype(np.uint8)), 784)
        table = pa.table({"pixels": pixels, "label": pa.array(np.arange(count) % 10, pa.int8())})
        pq.write_table(table, tmp_path / f"mnist-{split}.parquet")
    tiny = {"max_length": 40, "filter_length": 512, "hidden_size": 8, "num_hidden_layers": 1, "max_steps": 2}
    tiny |= {"num_spectral_channels": 4, "cpu_threads": 1, "output_dir": str(tmp_path / "run")}
    threads = torch.get_num_threads()
    try:
        train_classifier(make_arguments("smnist", tmp_path, "small", **tiny))
    finally:
        torch.set_num_threads(threads)
    sweep = json.loads((tmp_path / "run" / "budget_sweep.json").read_text())
    assert sweep["split"] == "test" and sweep["samples"] == 20
