# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Recipes are YAML files whose keys are the fields of a dataclass: tasks (`TaskSpec`) and experiments (`Experiment`).

A recipe of this folder goes by its name ("smnist" is tasks/smnist.yaml), any other by a path that ends in .yaml.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from huggingface_hub.errors import StrictDataclassError

from essm_train.arguments import parse_yaml

_FOLDER = Path(__file__).resolve().parent
Strict = TypeVar("Strict")


def recipe_names(kind: str) -> tuple[str, ...]:
    """Recipes of this folder. `kind` is "tasks" or "experiments"."""
    return tuple(sorted(path.stem for path in (_FOLDER / kind).glob("*.yaml")))


def recipe_path(kind: str, name: str) -> Path:
    """The file of a recipe. Raises ValueError for what is neither a name of this folder nor a path of a .yaml file."""
    if name.endswith((".yaml", ".yml")):
        return Path(name)
    if name not in recipe_names(kind):
        known = ", ".join(recipe_names(kind))
        raise ValueError(f"{kind[:-1]} must be one of {known}, or a .yaml file, got {name!r}")
    return _FOLDER / kind / f"{name}.yaml"


def read_recipe(kind: str, name: str, cls: type[Strict], parts: Mapping[str, type]) -> Strict:
    """The `@strict` dataclass of a recipe, whose `name` is the file's without the suffix.

    Args:
        parts: fields that are lists or tables of dataclasses themselves.
    Raises:
        ValueError: an unknown name; or, opened by the file, no YAML, keys that are unknown or missing, a value of
            another type. OSError: it cannot be read.
    """
    path = recipe_path(kind, name)
    values = parse_yaml(path.read_bytes(), path)
    for key, part in parts.items() if isinstance(values, dict) else ():
        if isinstance(found := values.get(key), list):
            values[key] = [_build(part, item, f"{path}: {key}[{i}]") for i, item in enumerate(found)]
        elif isinstance(found, dict):
            values[key] = {name: _build(part, item, f"{path}: {key}: {name}") for name, item in found.items()}
    return _build(cls, values, str(path), name=path.stem)


def _build(cls: type[Strict], values: Any, where: str, **given: Any) -> Strict:
    names = [field.name for field in dataclasses.fields(cls) if field.name not in given]  # type: ignore[arg-type]
    if not isinstance(values, dict):
        raise ValueError(f"{where}: must be a table of {', '.join(names)}, got {values!r}")
    if unknown := sorted(set(map(str, values)) - set(names)):
        raise ValueError(f"{where}: unknown keys: {', '.join(unknown)}; must be among {', '.join(names)}")
    try:
        return cls(**given, **values)
    except (TypeError, ValueError, StrictDataclassError) as error:
        raise ValueError(f"{where}: {' '.join(str(error).split())}") from error
