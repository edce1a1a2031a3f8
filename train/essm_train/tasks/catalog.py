# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Tasks, which are files of recipes/tasks/ or of your own, as arguments of a training script: see essm-list-tasks."""

import os
import re
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from huggingface_hub.dataclasses import strict, type_validator

from essm_train.arguments import sort_values
from essm_train.recipes.reading import read_recipe, recipe_names, recipe_path
from essm_train.tasks.shards import SPLITS

ROOT = Path(__file__).resolve().parents[3]
TASKS = recipe_names("tasks")
SCALES = ("full", "medium", "small")
_HUB_CONFIGS = "{hub_configs}/"  # opens an argument that is a folder of the repository's hub_configs/
Folders = str | os.PathLike | None


def data_folders(data_dir: Folders = None) -> list[Path]:
    """The folders to look in: those given, separated as in PATH, or those of ESSM_DATA, or data."""
    given = os.fspath(data_dir or os.environ.get("ESSM_DATA") or "data")
    return [Path(folder) for folder in given.split(os.pathsep)]


@strict
@dataclass
class Files:
    """Files of a data folder, by split: a name, or a pattern for several.

    Attributes:
        how: where they come from; with `{data}` for the folder, a command that makes them.
        substitute: what they are where they stand in the place of the official data.
    """

    files: dict[str, str]
    how: str
    substitute: str = ""

    def __post_init__(self) -> None:
        if not {"train"} <= self.files.keys() <= set(SPLITS):
            raise ValueError(f"files must be of train and others of {', '.join(SPLITS)}, got {', '.join(self.files)}")

    def find(self, folder: Path) -> dict[str, list[str]] | None:
        """Paths of each split in that folder; None unless all are there, and all shards of a set of shards."""
        found = {split: sorted(folder.glob(pattern)) for split, pattern in self.files.items()}
        for paths in found.values():
            shards = re.search(r"-of-(\d+)\.", paths[0].name) if paths else None
            if not paths or (shards and len(paths) < int(shards[1])):
                return None
        return {split: list(map(str, paths)) for split, paths in found.items()}

    def instructions(self, folder: Path) -> str:
        if "{data}" in self.how:
            return self.how.replace("{data}", str(folder))
        return f"{self.how}, as {', '.join(str(folder / pattern) for pattern in self.files.values())}"


@strict
@dataclass
class TaskSpec:
    """One task. The keys of its file are these fields, but for the name, which is the file's.

    Attributes:
        title, note: for people; the note says how the data differs from the official set.
        origin: where the arguments of `full` come from.
        data: its places, the first that is there counts. small_data, medium_data: those of reduced data, if other.
        hub: arguments that read a data set on the Hub which has the same columns, or none.
        arguments: of the script, at every size. full, small, medium: those of each size; a task may lack medium.
    """

    name: str
    title: str
    script: Literal["train_clm", "train_classification", "train_retrieval"]
    note: str
    origin: str
    data: list[Files]
    full: dict[str, Any]
    small: dict[str, Any]
    medium: dict[str, Any] = field(default_factory=dict)
    arguments: dict[str, Any] = field(default_factory=dict)
    small_data: list[Files] = field(default_factory=list)
    medium_data: list[Files] = field(default_factory=list)
    hub: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.data:
            raise ValueError("data must name at least one place")

    @property
    def metric(self) -> str:
        """What the script measures."""
        return "bits/byte" if self.script == "train_clm" else "accuracy"

    @property
    def command(self) -> str:
        """The console script."""
        return f"essm-{self.script.replace('_', '-')}"

    def places(self, scale: str) -> list[Files]:
        return {"small": self.small_data, "medium": self.medium_data}.get(scale) or self.data

    def sizes(self, scale: str) -> dict[str, Any]:
        """The arguments of that scale. Raises ValueError for one that is none, or that the task lacks."""
        if scale not in SCALES:
            raise ValueError(f"scale must be one of {', '.join(map(repr, SCALES))}, got {scale!r}")
        sizes = getattr(self, scale)
        if scale == "medium" and not sizes:
            raise ValueError(f"task {self.name!r} has no medium scale: its file needs the key medium")
        return sizes


def get_task(name: str) -> TaskSpec:
    """A task of TASKS or of a .yaml file. Raises ValueError and OSError as `read_recipe`."""
    return read_recipe("tasks", name, TaskSpec, dict.fromkeys(("data", "small_data", "medium_data"), Files))


def arguments_class(script: str) -> type[Any]:
    """The dataclass that a script's arguments are."""
    from essm_train.data.arguments import ClassificationArguments, CLMArguments, RetrievalArguments

    classes: dict[str, type] = {"train_clm": CLMArguments, "train_classification": ClassificationArguments}
    return classes.get(script, RetrievalArguments)


def check_arguments(script: str, values: Mapping[str, Any], where: str) -> None:
    """Raises ValueError, opened by `where`, for what is no argument of the script, or a value of another type."""
    cls = arguments_class(script)
    hints = typing.get_type_hints(cls)
    for name, value in sort_values(cls, values, where).items():
        real = type(value) is int and float in (hints[name], *typing.get_args(hints[name]))
        try:
            type_validator(name, float(value) if real else value, hints[name])
        except TypeError as error:
            raise ValueError(f"{where}: {error}") from error


def _found(spec: TaskSpec, scale: str, data_dir: Folders) -> tuple[Files, dict[str, list[str]]] | None:
    """The first place whose files are in any of the folders, and these."""
    pairs = ((place, place.find(folder)) for place in spec.places(scale) for folder in data_folders(data_dir))
    return next(((place, files) for place, files in pairs if files is not None), None)


def find_data(spec: TaskSpec, scale: str, data_dir: Folders = None) -> dict[str, list[str]]:
    """Files of each split, of the first place that is in any of the folders.

    Raises:
        FileNotFoundError: there is none; says what to fetch, from where, and where to put it, or what to run.
    """
    if (found := _found(spec, scale, data_dir)) is not None:
        return found[1]
    folders, (first, *others) = data_folders(data_dir), spec.places(scale)
    advice = "; or, in its place, ".join(
        place.instructions(folders[0]) for place in (first, *(other for other in others if other.substitute))
    )
    if spec.hub:
        advice += f"; a training can read {spec.hub['dataset_name']!r} from the Hub (`essm-list-tasks --use_hub`)"
    reduced = f" ({scale})" if first not in spec.data else ""
    raise FileNotFoundError(f"no data for task {spec.name!r}{reduced} in {', '.join(map(str, folders))}: {advice}")


def substitute_data(name: str, scale: str, data_dir: Folders = None) -> str:
    """What the data is that a task reads at that scale in the place of the official; "" if it reads the official."""
    found = _found(get_task(name), scale, data_dir)
    return "" if found is None else found[0].substitute


def task_arguments(name: str, data_dir: Folders = None, scale: str = "full", use_hub: bool = False) -> dict[str, Any]:
    """Arguments of the script of a task, ready for its dataclass or a YAML file; output_dir and seed are the caller's.

    Args:
        name: of TASKS, or a .yaml file. data_dir: see `data_folders`. scale: one of SCALES.
        use_hub: read the task's data set on the Hub instead of files.
    Raises:
        ValueError: unknown name, scale or arguments, or no data set on the Hub.
        FileNotFoundError: as `find_data` and `published_folder`.
    """
    spec = get_task(name)
    arguments = spec.arguments | spec.sizes(scale)
    arguments = {key: value for key, value in arguments.items() if value is not None}  # null is the script's default
    check_arguments(spec.script, arguments, str(recipe_path("tasks", name)))
    arguments = {key: published_folder(value, spec.name) for key, value in arguments.items()}
    if use_hub:
        if not spec.hub:
            raise ValueError(f"task {spec.name!r} has no data set on the Hub with the columns that it needs")
        return spec.hub | arguments
    one_file = spec.script == "train_retrieval"
    found = find_data(spec, scale, data_dir)
    return {f"{split}_file": paths[0] if one_file else paths for split, paths in found.items()} | arguments


def published_folder(value: Any, task: str) -> Any:
    """An argument; a folder of hub_configs/ as its path. Raises FileNotFoundError outside of a checkout."""
    if not (isinstance(value, str) and value.startswith(_HUB_CONFIGS)):
        return value
    folder = ROOT / "hub_configs" / value.removeprefix(_HUB_CONFIGS)
    if not folder.is_dir():
        raise FileNotFoundError(
            f"task {task!r} needs hub_configs/{folder.name}, which comes with the repository and not with the "
            f"installed package: run it from a checkout, or name a folder of your own in a copy of the recipe"
        )
    return str(folder)


def make_arguments(name: str, data_dir: Folders = None, scale: str = "full", **changes: Any) -> Any:
    """The dataclass of the task's script with these arguments; `changes` override them (output_dir, seed, ..).

    Raises:
        ValueError, FileNotFoundError: as `task_arguments`, and what the dataclass refuses.
    """
    cls = arguments_class(get_task(name).script)
    return cls(**sort_values(cls, task_arguments(name, data_dir, scale) | changes, name))
