# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Recipes are YAML files whose keys are the fields of a dataclass: tasks (`TaskSpec`) and experiments (`Experiment`).

A recipe of this folder goes by its name ("smnist" is tasks/smnist.yaml), any other by a path that ends in .yaml. Every
key and value is checked against the dataclass; an error names the file, the key and what is legal there.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import yaml
from huggingface_hub.dataclasses import type_validator

_FOLDER = Path(__file__).resolve().parent
Recipe = TypeVar("Recipe")


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


def read_recipe(path: Path, cls: type[Recipe]) -> Recipe:
    """The dataclass of a file. Its field `name`, which is no key, is the file's name without the suffix.

    Raises:
        ValueError: not YAML, keys that are unknown or missing, or a value of another type. OSError: it cannot be read.
    """
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"{path} is not YAML: {error}") from error
    return _build(cls, values, str(path), name=path.stem)


def check_values(cls: type, values: Mapping[str, Any], where: str) -> None:
    """Raises ValueError, opened by `where`, unless these are fields of the dataclass with values of their types."""
    hints, names = typing.get_type_hints(cls), _names(cls)
    if unknown := sorted(map(str, values.keys() - set(names))):
        raise ValueError(f"{where}: unknown arguments: {', '.join(unknown)}; must be among {', '.join(names)}")
    for key, value in values.items():
        real = float in (hints[key], *typing.get_args(hints[key]))
        _convert(hints[key], float(value) if real and type(value) is int else value, f"{where}: {key}")


def _names(cls: type[Any]) -> list[str]:
    return [field.name for field in dataclasses.fields(cls)]


def _build(cls: type[Any], values: Any, where: str, **given: str) -> Any:
    """A dataclass from a table of its fields, less those that are given."""
    names = [name for name in _names(cls) if name not in given]
    if not isinstance(values, dict):
        raise ValueError(f"{where}: must be a table of {', '.join(names)}, got {values!r}")
    missing = [f.name for f in dataclasses.fields(cls) if f.default is f.default_factory is dataclasses.MISSING]
    for problem, keys in (("unknown", values.keys() - set(names)), ("missing", set(missing) - {*values, *given})):
        if keys:
            found = ", ".join(sorted(map(str, keys)))
            raise ValueError(f"{where}: {problem} keys: {found}; must be among {', '.join(names)}")
    hints = typing.get_type_hints(cls)
    values = {key: _convert(hints[key], value, f"{where}: {key}") for key, value in values.items()}
    try:
        return cls(**given, **values)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def _convert(hint: Any, value: Any, where: str) -> Any:
    """A value that has the type of the hint; a table becomes the dataclass that shares most keys with it."""
    origin, kinds = typing.get_origin(hint), typing.get_args(hint)
    if origin is list and isinstance(value, list):
        return [_convert(kinds[0], item, f"{where}[{i}]") for i, item in enumerate(value)]
    if origin is dict and isinstance(value, dict):
        key_hint, item_hint = kinds
        return {_convert(key_hint, k, where): _convert(item_hint, item, f"{where}: {k}") for k, item in value.items()}
    choices = kinds if origin is types.UnionType else (hint,)
    tables = [kind for kind in choices if isinstance(kind, type) and dataclasses.is_dataclass(kind)]
    if tables and not (value is None and type(None) in choices):
        keys = set(value) if isinstance(value, dict) else set()
        return _build(max(tables, key=lambda kind: len(keys.intersection(_names(kind)))), value, where)
    try:
        type_validator(where, value, hint)
    except TypeError as error:
        raise ValueError(str(error)) from error
    return value
