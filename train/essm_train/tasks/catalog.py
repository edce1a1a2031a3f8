# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Every task as named arguments of a training script: where its data is, its shape, and three sizes of the run.

    task_arguments("smnist", "data", "small")         # a dict, ready for YAML; essm-list-tasks prints it

A task is a file of recipes/tasks/, or one of your own, given by its path. `full` is the official data at the size of
hub_configs/; `small` is a few minutes on one CPU thread: shorter sequences, fewer updates, a narrower model; `medium`
is about half an hour on two CPU cores: the paper's block of width 128, 4 blocks and capacity 32. `note` says how the
data differs from the official set. What is measured on other data must not be called by the official name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from essm_train.arguments import make_arguments_of, sort_values
from essm_train.recipes.reading import check_values, read_recipe, recipe_names, recipe_path
from essm_train.tasks.sources import Files, Folders, Hub, Shards, data_folders

ROOT = Path(__file__).resolve().parents[3]
TASKS = recipe_names("tasks")
SCALES = ("full", "medium", "small")
_HUB_CONFIGS = "{hub_configs}/"  # opens an argument that is a folder of the repository's hub_configs/


@dataclass(frozen=True)
class TaskSpec:
    """One task. The keys of its file are these fields, without the name.

    Attributes:
        name: that of the file. title: for people. script: in train/.
        note: how the data differs from the official set. origin: where the arguments of `full` come from.
        data: its places, the first that is there counts. small_data, medium_data: those of reduced data, if other.
        hub: a data set on the Hub that has the same columns, or None.
        arguments: of the script, at every size. full, small, medium: those of each size; a task may lack medium.
    """

    name: str
    title: str
    script: Literal["train_clm", "train_classification", "train_retrieval"]
    note: str
    origin: str
    data: list[Files | Shards]
    full: dict[str, Any]
    small: dict[str, Any]
    medium: dict[str, Any] = field(default_factory=dict)
    arguments: dict[str, Any] = field(default_factory=dict)
    small_data: list[Files | Shards] = field(default_factory=list)
    medium_data: list[Files | Shards] = field(default_factory=list)
    hub: Hub | None = None

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

    def places(self, scale: str) -> list[Files | Shards]:
        return {"small": self.small_data, "medium": self.medium_data}.get(scale) or self.data

    def sizes(self, scale: str) -> dict[str, Any]:
        """The arguments of that scale. Raises ValueError for one that is none, or that the task lacks."""
        if scale not in SCALES:
            raise ValueError(f"scale must be one of {', '.join(map(repr, SCALES))}, got {scale!r}")
        sizes = {"full": self.full, "medium": self.medium, "small": self.small}[scale]
        if scale == "medium" and not sizes:
            raise ValueError(f"task {self.name!r} has no medium scale: its file needs the key medium")
        return sizes


def get_task(name: str) -> TaskSpec:
    """A task of TASKS or of a .yaml file. Raises ValueError for an unknown name, and as `read_recipe`."""
    return read_recipe(recipe_path("tasks", name), TaskSpec)


def arguments_class(script: str) -> type[Any]:
    """The dataclass that a script's arguments are."""
    from essm_train.data.arguments import ClassificationArguments, CLMArguments, RetrievalArguments

    classes: dict[str, type] = {"train_clm": CLMArguments, "train_classification": ClassificationArguments}
    return classes.get(script, RetrievalArguments)


def check_arguments(script: str, values: Mapping[str, Any], where: str) -> None:
    """Raises ValueError, opened by `where`, for what is no argument of the script, or a value of another type."""
    cls = arguments_class(script)
    check_values(cls, sort_values(cls, values, where), where)


def find_data(spec: TaskSpec, scale: str, data_dir: Folders = None) -> dict[str, list[str]]:
    """Files of each split, of the first source that is in any of the folders.

    Raises:
        FileNotFoundError: there is none; says what to fetch, from where, and where to put it, or what to run.
        ValueError: generated data is damaged or belongs to another task.
    """
    folders, places = data_folders(data_dir), spec.places(scale)
    if (found := _first_place(places, folders)) is not None:
        return found[1]
    searched = ", ".join(str(folder) for folder in folders)
    reduced = f" ({scale})" if places is not spec.data else ""
    message = f"no data for task {spec.name!r}{reduced} in {searched}: {places[0].instructions(folders)}"
    for place in places[1:]:
        if place.substitute:
            message += f"; or, in its place, {place.instructions(folders)}"
    if spec.hub is not None:
        again = "`use_hub=True`, `essm-list-tasks --use_hub`"
        message += f"; or read {spec.hub.name!r} from the Hub ({again})"
    raise FileNotFoundError(message)


def _first_place(
    places: Sequence[Files | Shards], folders: Sequence[Path]
) -> tuple[Files | Shards, dict[str, list[str]]] | None:
    for place in places:
        for folder in folders:
            found = place.find(folder)
            if found is not None:
                return place, found
    return None


def substitute_data(name: str, scale: str, data_dir: Folders = None) -> str:
    """What the data is that a task reads at that scale in the place of the official; "" if it reads the official.

    Raises:
        ValueError, FileNotFoundError: data that is there is damaged or unfinished.
    """
    found = _first_place(get_task(name).places(scale), data_folders(data_dir))
    return "" if found is None else found[0].substitute


def task_arguments(name: str, data_dir: Folders = None, scale: str = "full", use_hub: bool = False) -> dict[str, Any]:
    """Arguments of the script of a task, ready for its dataclass or a YAML file; output_dir and seed are the caller's.

    Args:
        name: of TASKS, or a .yaml file. data_dir: see `data_folders`. scale: one of SCALES.
        use_hub: read the task's data set on the Hub instead of files.
    Raises:
        ValueError: unknown name, scale or arguments, no data set on the Hub, or damaged data.
        FileNotFoundError: see `find_data`; or a configuration of hub_configs/ outside of a checkout.
    """
    spec = get_task(name)
    arguments = spec.arguments | spec.sizes(scale)
    arguments = {key: value for key, value in arguments.items() if value is not None}  # null is the script's default
    check_arguments(spec.script, arguments, str(recipe_path("tasks", name)))
    arguments = {key: published_folder(value, spec.name) for key, value in arguments.items()}
    if use_hub:
        if spec.hub is None:
            raise ValueError(f"task {spec.name!r} has no data set on the Hub with the columns that it needs")
        return {"dataset_name": spec.hub.name, **spec.hub.arguments, **arguments}
    found = find_data(spec, scale, data_dir)
    if spec.script == "train_clm":
        found.pop("test", None)  # it has no test file
    one_file = spec.script == "train_retrieval"
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
    return make_arguments_of(cls, task_arguments(name, data_dir, scale) | changes, name)
