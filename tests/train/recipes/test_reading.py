# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""essm_train/recipes: recipes of one's own, and what is said of those that are wrong."""

import dataclasses
import json
import re
import tomllib

import pytest
import yaml
from helpers import ROOT

from essm_train import list_tasks, reproduce
from essm_train.console import Failed
from essm_train.measure.paper import PAPER_FIGURES
from essm_train.tasks import catalog
from essm_train.tasks.catalog import TASKS, get_task, make_arguments, task_arguments
from essm_train.tasks.experiments import EXPERIMENTS, Row, get_experiment

SIZE = {"hidden_size": 16, "num_hidden_layers": 1, "num_spectral_channels": 4, "filter_length": 512, "block_size": 64}
SIZE |= {"learning_rate": 1, "validation_blocks": 2, "sweep_blocks": 2}
FILES = {"files": {"train": "mine.txt"}, "how": "write it"}
TASK = {
    "title": "My text",
    "script": "train_clm",
    "note": "a few words",
    "origin": "mine",
    "data": [FILES],
    "arguments": SIZE,
    "full": {"max_steps": 4},
    "small": {"max_steps": 2, "head_size": None},
}


@pytest.fixture
def folder(tmp_path):
    """A task of one's own with its data, in a folder of one's own."""
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "mine.yaml").write_text(yaml.safe_dump(TASK))
    (tmp_path / "mine.txt").write_text("the spectral state of the spectral budget " * 100)
    return tmp_path


def test_recipes_are_installed_with_the_library():
    packaged = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["essm_train"]
    library = ROOT / "train/essm_train"
    found = {path for pattern in packaged for path in library.glob(pattern) if path.is_relative_to(library / "recipes")}
    assert found == {*(library / "recipes").rglob("*.yaml"), PAPER_FIGURES}
    assert len(found) == len(TASKS) + len(EXPERIMENTS) + 1


def test_a_task_of_ones_own(folder, capsys, monkeypatch):
    path, data = str(folder / "recipes" / "mine.yaml"), str(folder)
    assert task_arguments(path, data, "small") == {"train_file": [f"{folder}/mine.txt"], **SIZE, "max_steps": 2}
    assert make_arguments(path, data).max_steps == 4
    list_tasks.run([path, "--data_dir", data, "--scale", "small"])
    printed = capsys.readouterr().out
    assert yaml.safe_load(printed) == task_arguments(path, data, "small")
    assert printed.startswith("# My text, small: essm-train-clm\n")
    monkeypatch.chdir(folder / "recipes")
    list_tasks.run(["--task", "mine.yaml", "--data_dir", data, "--scale", "small"])
    assert capsys.readouterr().out == printed


WRONG_TASKS = [
    ({"colour": 1, "name": "x"}, "unknown keys: colour, name; must be among title, script, .*, hub$"),
    ({"note": ...}, "missing 1 required .* 'note'"),
    ({"script": "train"}, r"'script'.* expected one of \('train_clm', 'train_classification', .*got train$"),
    ({"data": []}, "data must name at least one place"),
    ({"data": ["x.txt"]}, r"data\[0\]: must be a table of files, how, substitute, got 'x.txt'"),
    ({"data": [{"files": {"train": 3}, "how": ""}]}, r"data\[0\]: .*Invalid key or value in dict 'files'"),
    ({"data": [{"files": {"valid": "x"}, "how": ""}]}, "of train and others of train, validation, test, got valid"),
    ({"small": {"max_train_steps": 2}}, ": unknown argument max_train_steps; nearest: max_steps"),
    ({"full": {"learning_rate": "1e-3"}}, "learning_rate' expected float, got str"),
]


def test_wrong_tasks(folder):
    for changes, message in WRONG_TASKS:
        path = folder / "recipes" / "mine.yaml"
        path.write_text(yaml.safe_dump({key: value for key, value in (TASK | changes).items() if value is not ...}))
        with pytest.raises(ValueError, match=f"{path}.*{message}"):
            task_arguments(str(path), folder, "small" if "small" in changes else "full")


def test_the_examples_of_the_docs(tmp_path):
    examples = re.findall(r"^```yaml\n(.*?)^```", (ROOT / "docs" / "extend.md").read_text(), re.DOTALL | re.MULTILINE)
    for name, text in zip(("reviews.yaml", "gate.yaml"), examples, strict=True):
        (tmp_path / name).write_text(text)
    for split in ("train", "test"):
        (tmp_path / f"reviews-{split}.csv").touch()
    experiment = get_experiment(str(tmp_path / "gate.yaml"))
    assert {row.task for row in experiment.rows.values()} == {str(tmp_path / "reviews.yaml")}
    for scale in ("full", "small"):
        assert make_arguments(str(tmp_path / "reviews.yaml"), tmp_path, scale).max_length == 512


def test_files_that_are_no_recipes(folder):
    path = folder / "recipes" / "mine.yaml"
    with pytest.raises(ValueError, match="task 'mine' has no medium scale: its file needs the key medium"):
        task_arguments(str(path), folder, "medium")
    for text, message in (("- a", ": must be a table of title, .* got "), ("a: [", " is not YAML"), ("", ": must be")):
        path.write_text(text)
        with pytest.raises(ValueError, match=f"{path}{message}"):
            get_task(str(path))
    with pytest.raises(FileNotFoundError, match="No such file"):
        get_task(str(folder / "nothing.yaml"))


def test_configurations_of_the_repository(folder, monkeypatch):
    """An installed library has no hub_configs/."""
    path = folder / "recipes" / "mine.yaml"
    path.write_text(yaml.safe_dump(TASK | {"full": {"config_name": "{hub_configs}/essm-21m"}}))
    assert task_arguments(str(path), folder)["config_name"] == str(ROOT / "hub_configs" / "essm-21m")
    monkeypatch.setattr(catalog, "ROOT", folder)
    with pytest.raises(FileNotFoundError, match=r"needs hub_configs/essm-21m, which .* a checkout, or name a folder"):
        task_arguments(str(path), folder)
    task_arguments(str(path), folder, "small")


@pytest.mark.slow
def test_an_experiment_of_ones_own(folder):
    """Baselines beside the task, a title, and the paper's figures, all beside the experiment."""
    rows = {
        "ours": {"paper": ["ES-SSM (gate + budget dropout)"]},
        "two layers": {"arguments": {"num_hidden_layers": 2}},
        "again": {},
        "ours, transformer": {"arguments": {"architecture": "transformer"}},
        "novels": {"task": "novels"},
    }
    recipe = {"question": "Is it good?", "title": "Table 1", "task": "mine.yaml", "paper": "table_4"}
    path = folder / "recipes" / "table.yaml"
    path.write_text(yaml.safe_dump(recipe | {"rows": rows}, sort_keys=False))
    folders = {"output_dir": str(folder / "runs"), "results_dir": str(folder / "results"), "data_dir": str(folder)}
    args = reproduce.ReproduceArguments(str(path), seeds=1, rows=["ours", "again"], jobs=2, **folders)  # of one run
    experiment = get_experiment(str(path))
    third = experiment.rows["ours, transformer"]
    assert reproduce.arguments_of(third, args, 0)["architecture"] == "transformer"
    assert experiment.rows["novels"] == Row("novels") and experiment.rows["ours"].task_name == "mine"
    reproduce.reproduce(args)
    written = (folder / "results" / "table-small.json").read_text()
    assert json.loads(written)["rows"]["ours"]["task"] == "mine" and str(folder) not in written
    assert (folder / "runs" / "mine-small" / "default-seed0" / "model").is_dir()
    text = (folder / "results" / "table-small.md").read_text()
    assert text.startswith("# Table 1\n\nIs it good?\n\n| |") and "| ours, the paper's | | " in text and "1.266" in text
    assert "- mine: a few words. Arguments of full scale: mine." in text
    run = folder / "runs" / "mine-small" / "default-seed0" / "training.json"
    run.write_text(re.sub(r'"sha256 of the training text": "\w', '"sha256 of the training text": "x', run.read_text()))
    with pytest.raises(Failed, match=r"default-seed1 read other data than .*default-seed0: delete one"):
        reproduce.reproduce(dataclasses.replace(args, seeds=2, overwrite=True))


WRONG_EXPERIMENTS = [
    ({"task": ...}, "rows: a: names no task, and neither does the experiment"),
    ({"task": "mine.yaml"}, "rows: a: .*mine.yaml: unknown keys: question, "),
    ({"rows": {"a": {"architecture": "mamba"}}}, "rows: a: unknown keys: architecture; must be among task, arg"),
    ({"rows": {"a": {"arguments": {"gate": 1}}}}, "rows: a: arguments: unknown argument gate; nearest: gat"),
    ({"rows": {"a": {"arguments": {"seed": 5}}}}, "rows: a: arguments: seed: only the command line sets that"),
    ({"rows": {}}, "rows must name at least one row"),
]


def test_wrong_experiments(tmp_path):
    for changes, message in WRONG_EXPERIMENTS:
        recipe = {"question": "Is it good?", "task": "novels", "rows": {"a": {}}} | changes
        path = tmp_path / "mine.yaml"
        path.write_text(yaml.safe_dump({key: value for key, value in recipe.items() if value is not ...}))
        with pytest.raises(ValueError, match=f"{path}.*{message}"):
            get_experiment(str(path))
