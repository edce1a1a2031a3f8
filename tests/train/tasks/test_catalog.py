# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Tasks: arguments that the scripts accept, sizes of hub_configs, and where data is looked for."""

import json
import re
import shlex
from pathlib import Path

import pytest
from helpers import ROOT

from essm_train import list_tasks, make_task_data
from essm_train.arguments import parse_arguments
from essm_train.tasks import catalog
from essm_train.tasks.catalog import (
    SCALES,
    TASKS,
    data_folders,
    get_task,
    make_arguments,
    substitute_data,
    task_arguments,
)
from essm_train.tasks.listops import ListOps
from essm_train.tasks.pathfinder import Pathfinder, PathX
from essm_train.tasks.shards import SPLITS


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """A folder that has something of everything."""
    folder = tmp_path_factory.mktemp("data")
    for spec in map(get_task, TASKS):
        for place in (*spec.data, *spec.small_data, *spec.medium_data):
            for pattern in place.files.values():
                path = folder / pattern.replace("*", "00000-of-00001")
                path.parent.mkdir(parents=True, exist_ok=True)
                path.touch()
    return folder


@pytest.mark.parametrize("scale", SCALES)
def test_scripts_accept_the_arguments_of_every_task(scale, data, tmp_path):
    names = "image listops novels pathfinder pathx pg19 retrieval sc10 smnist speech4 text"
    assert list(TASKS) == names.split()
    for name in TASKS:
        args = make_arguments(name, data, scale, output_dir=str(tmp_path), seed=3)
        assert type(args) is catalog.arguments_class(get_task(name).script) and args.seed == 3
        assert args.max_steps % args.eval_steps == 0 or args.max_steps < args.eval_steps
        for paths in (args.train_file, args.validation_file):
            for path in [paths] if isinstance(paths, str) else paths or []:
                assert Path(path).is_file() and Path(path).is_relative_to(data)
        values = task_arguments(name, data, scale)
        if config_name := values.get("config_name"):
            config = json.loads((Path(config_name) / "config.json").read_text())
            assert "block" not in values and config["block"] == "paper"
        else:
            assert values["block"] == "paper"  # whatever the scripts make by default
        if scale == "medium":  # one size
            sizes = (values["hidden_size"], values["num_hidden_layers"], values.get("num_spectral_channels"))
            assert sizes == (128, 4, None) and values.get("max_length", values.get("block_size")) <= 1024


def test_full_sizes_are_those_of_hub_configs():
    folders = {name: f"essm-lra-{name}" for name in ("listops", "text", "retrieval", "image", "pathfinder", "pathx")}
    for name, folder in (folders | {"sc10": "essm-audio", "speech4": "essm-audio"}).items():
        config = json.loads((ROOT / "hub_configs" / folder / "config.json").read_text())
        arguments = get_task(name).arguments | get_task(name).full
        if "config_name" in arguments:  # which says all of it
            assert arguments["config_name"] == f"{{hub_configs}}/{folder}" and "hidden_size" not in arguments
            continue
        for field in ("hidden_size", "num_hidden_layers", "filter_length", "dropout"):
            default = {"hidden_size": 256, "filter_length": 4096, "dropout": 0.0}.get(field)
            assert arguments.get(field, 0.0) == config.get(field, default), field


def test_unknown_names():
    with pytest.raises(ValueError, match=r"task must be one of image, listops, .*, text, or a .yaml file, got 'lists'"):
        task_arguments("lists")
    with pytest.raises(ValueError, match="scale must be one of 'full', 'medium', 'small', got 'tiny'"):
        task_arguments("text", scale="tiny")


def test_absent_data_says_what_to_do(tmp_path):
    """The command that an error names makes data of the size that the task reads, where the task looks for it."""
    for name in TASKS:
        for scale in SCALES:
            with pytest.raises(FileNotFoundError, match=f"no data for task {name!r}") as caught:
                task_arguments(name, tmp_path, scale)
            message = str(caught.value)
            assert str(tmp_path) in message and ("http" in message or "essm-" in message)
            assert not re.search(r"[{}]", message)  # nothing left unformatted
            for command in re.findall(r"`essm-make-task-data (.*?)`", message):
                generator, output_dir, _ = make_task_data.parse(shlex.split(command), (ListOps, Pathfinder, PathX))
                spec = get_task(name)
                limit = (spec.arguments | spec.sizes(scale))["max_length"]
                assert limit == (generator.max_length if name == "listops" else generator.image_size**2)
                for split, pattern in spec.places(scale)[0].files.items():
                    assert tmp_path / pattern == Path(output_dir) / f"{generator.name}-{split}-*.parquet"


def test_folders_come_in_order(data, tmp_path, monkeypatch):
    first, second = tmp_path / "a", tmp_path / "b"
    for folder in (first, second):
        folder.mkdir()
        for split in ("train", "test"):
            (folder / f"imdb-{split}.parquet").touch()
    assert task_arguments("text", f"{first}:{second}")["train_file"] == [str(first / "imdb-train.parquet")]
    (first / "imdb-test.parquet").unlink()  # all or nothing
    assert task_arguments("text", f"{first}:{second}")["train_file"] == [str(second / "imdb-train.parquet")]
    monkeypatch.setenv("ESSM_DATA", str(second))
    assert task_arguments("text")["test_file"] == [str(second / "imdb-test.parquet")]
    monkeypatch.delenv("ESSM_DATA")
    assert data_folders() == [Path("data")] and data_folders(Path("x")) == [Path("x")]


def test_shards_are_read_when_all_are_there(data, tmp_path):
    (tmp_path / "pathx").mkdir()
    for split, count in zip(SPLITS, (2, 1, 1)):
        for k in range(count):
            (tmp_path / "pathx" / f"pathx-{split}-{k:05d}-of-{count:05d}.parquet").touch()
    assert len(task_arguments("pathx", tmp_path)["train_file"]) == 2
    (tmp_path / "pathx" / "pathx-train-00001-of-00002.parquet").unlink()
    with pytest.raises(FileNotFoundError, match=rf"run `essm-make-task-data pathx --output_dir {tmp_path}/pathx`"):
        task_arguments("pathx", tmp_path)


def test_substitute_data_is_named_as_such(data, tmp_path):
    """Where the official pairs are absent, those of novels are read at medium scale only, and said to be so."""
    assert substitute_data("retrieval", "medium", data) == "" == substitute_data("retrieval", "medium", tmp_path)
    (tmp_path / "novel_pairs").mkdir()
    for split in SPLITS:
        (tmp_path / "novel_pairs" / f"{split}.tsv").touch()
    found = task_arguments("retrieval", tmp_path, "medium")
    assert found["train_file"] == str(tmp_path / "novel_pairs" / "train.tsv")
    assert "Never call a number on it one of Retrieval" in substitute_data("retrieval", "medium", tmp_path)
    assert task_arguments("retrieval", f"{tmp_path}:{data}", "medium")["train_file"].startswith(str(data))
    with pytest.raises(FileNotFoundError, match=r"fetch lra_release"):
        task_arguments("retrieval", tmp_path, "small")


def test_the_hub_is_asked_only_when_it_is_asked_for():
    arguments = task_arguments("pg19", "nowhere", "small", use_hub=True)
    assert arguments["dataset_name"] == "emozilla/pg19" and arguments["streaming"] and "train_file" not in arguments
    with pytest.raises(ValueError, match="task 'smnist' has no data set on the Hub"):
        task_arguments("smnist", "nowhere", use_hub=True)


def test_the_list_and_its_yaml(data, tmp_path, capsys):
    list_tasks.run(["--data_dir", str(tmp_path / "nothing")])
    text = capsys.readouterr().out
    assert all(re.search(rf"^{name} +- +- +- ", text, re.M) for name in TASKS) and "fetch lra_release.gz" in text
    list_tasks.run(["--data_dir", str(data)])
    text = capsys.readouterr().out
    assert all(re.search(rf"^{name} +yes +yes +yes ", text, re.M) for name in TASKS) and "no data" not in text
    for name in TASKS:
        list_tasks.run(["--data_dir", str(data), "--task", name, "--scale", "small"])
        (tmp_path / "arguments.yaml").write_text(capsys.readouterr().out)
        line = [str(tmp_path / "arguments.yaml"), "--output_dir", str(tmp_path)]
        parsed = parse_arguments(catalog.arguments_class(get_task(name).script), line)
        assert vars(parsed) == vars(make_arguments(name, data, "small", output_dir=str(tmp_path)))
