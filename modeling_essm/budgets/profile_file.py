# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Reads budget_profile.json: every field is checked before anything is believed."""

from __future__ import annotations

import json
import math
import os
import reprlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..loading_essm import PROFILE_NAME, file_beside
from .fingerprint import Fingerprint, fingerprint
from .profile import FORMAT_VERSION, PHASES, BudgetProfile, DeviceProfile, Measurement, Quality, is_finite, profile_path

_LARGEST = 2**63 - 1  # integer of a file


class _Fields:
    """Checked fields of a JSON object. Every ValueError names the file, the field, its value and what is legal."""

    def __init__(self, values: Any, path: Path, name: str = ""):
        self.path, self.prefix = path, f"{name}." if name else ""
        if not isinstance(values, dict):
            raise ValueError(f"{path}: {name or 'the file'} must be a JSON object, got {reprlib.repr(values)}")
        self.values = values

    def get(self, name: str, legal: str, check: Any) -> Any:
        value = self.values.get(name)
        if name not in self.values or not check(value):
            got = reprlib.repr(value) if name in self.values else "nothing"
            raise ValueError(f"{self.path}: {self.prefix}{name} must be {legal}, got {got}")
        return value

    def integer(self, name: str, least: int, most: int = _LARGEST) -> int:
        return self.get(name, f"an integer in [{least}, {most}]", lambda v: type(v) is int and least <= v <= most)

    def number(self, name: str, least: float = 0.0) -> float:
        return float(self.get(name, f"a finite number >= {least:g}", lambda v: is_finite(v) and v >= least))

    def numbers(self, name: str, count: int | None = None, least: float = -math.inf) -> tuple[float, ...]:
        legal = "a list of " + ("" if count is None else f"{count} ") + "finite numbers"
        legal += "" if least == -math.inf else f" >= {least:g}"
        fits = lambda v: isinstance(v, list) and len(v) == (len(v) if count is None else count)  # noqa: E731
        values = self.get(name, legal, lambda v: fits(v) and all(is_finite(x) and x >= least for x in v))
        return tuple(map(float, values))

    def budgets(self, name: str, most: int = _LARGEST, ascending: bool = False) -> tuple[int, ...]:
        legal = f"a list of {'ascending ' if ascending else ''}integers in [1, {most}]"
        fits = lambda v: isinstance(v, list) and v and all(type(K) is int and 1 <= K <= most for K in v)  # noqa: E731
        return tuple(self.get(name, legal, lambda v: fits(v) and (not ascending or v == sorted(set(v)))))

    def text(self, name: str) -> str:
        return self.get(name, "text", lambda v: isinstance(v, str))

    def one_of(self, name: str, legal: Sequence[Any]) -> Any:
        return self.get(name, f"one of {list(legal)}", lambda v: any(type(v) is type(x) and v == x for x in legal))

    def each(self, name: str) -> dict[str, _Fields]:
        """The objects of an object, by name."""
        objects = self.object(name).values
        return {key: _Fields(value, self.path, f"{self.prefix}{name}[{key!r}]") for key, value in objects.items()}

    def rows(self, name: str) -> list[_Fields]:
        """The objects of a list."""
        rows = self.get(name, "a list of at least one object", lambda v: isinstance(v, list) and len(v) > 0)
        return [_Fields(row, self.path, f"{self.prefix}{name}[{i}]") for i, row in enumerate(rows)]

    def object(self, name: str) -> _Fields:
        return _Fields(self.values.get(name), self.path, self.prefix + name)


def read_profile(path: str | os.PathLike, model: Any = None) -> BudgetProfile:
    """Read and check a profile.

    Args:
        path: the file, or the folder that holds budget_profile.json.
        model: the ES-SSM that it must belong to; where that has fewer channels, larger budgets are left out.
    Raises:
        FileNotFoundError: there is none.
        ValueError: not JSON, another format, a field that is missing or out of range, a budget above the capacity, or
            another model's profile.
    """
    path = profile_path(path)
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FileNotFoundError(f"there is no {path}: write it with essm-calibrate (train/calibrate.py)") from None
    except (OSError, ValueError, RecursionError) as error:  # damaged JSON or UTF-8
        raise ValueError(
            f"{path} cannot be read: {error}; delete it and run essm-calibrate again, or fetch it again"
        ) from error
    fields = _Fields(record, path)
    fields.one_of("format_version", [FORMAT_VERSION])
    measured = _read_fingerprint(fields.object("model"))
    capacity = max(measured.capacities)
    devices = {name: _read_device(name, entry, capacity) for name, entry in fields.each("devices").items()}
    profile = BudgetProfile(measured, _read_quality(fields.object("quality"), capacity), devices)
    return profile if model is None else _for_model(profile, path, model)


def _for_model(profile: BudgetProfile, path: Path, model: Any) -> BudgetProfile:
    here = fingerprint(model)
    difference = profile.model.difference(here)
    if difference is not None:
        raise ValueError(
            f"{path} was measured on another model: this one has {difference}. Delete it, or measure this model with "
            "essm-calibrate (train/calibrate.py)"
        )
    # At a budget K both run the same channels if every layer has K of them, or as many as it had.
    layers = list(zip(profile.model.capacities, here.capacities))
    same = [K for K in profile.quality.budgets if all(min(K, a) == min(K, b) for a, b in layers)]
    restricted = profile.restricted_to(max(same)) if same else None
    if restricted is None:
        raise ValueError(
            f"{path}: quality.budgets must hold one in [1, {min(here.capacities)}], the capacity of this model, "
            f"got {list(profile.quality.budgets)}"
        )
    return restricted


def _read_fingerprint(fields: _Fields) -> Fingerprint:
    samples = fields.object("samples")
    values = {name: samples.numbers(name) for name in samples.values}
    return Fingerprint(fields.integer("hidden_size", 1), fields.budgets("capacities"), values)


def _read_quality(fields: _Fields, capacity: int) -> Quality:
    budgets = fields.budgets("budgets", capacity, ascending=True)
    n = len(budgets)
    return Quality(
        fields.text("metric"),
        fields.one_of("higher_is_better", [True, False]),
        data=fields.text("data"),
        samples=fields.integer("samples", 1),
        length=fields.integer("length", 1),
        date=fields.text("date"),
        dtype=fields.text("dtype"),
        budgets=budgets,
        values=fields.numbers("values", n),
        errors=fields.numbers("standard_errors", n, 0.0),
        drop_errors=fields.numbers("drop_errors", n, 0.0),
    )


def _read_device(name: str, fields: _Fields, capacity: int) -> DeviceProfile:
    rows = []
    for row in fields.rows("rows"):
        low = row.number("min_ms")
        median = row.number("median_ms", low)
        rows.append(
            Measurement(
                row.one_of("phase", PHASES),
                row.integer("batch_size", 1),
                row.integer("budget", 1, capacity),
                median,
                low,
                row.number("max_ms", median),
                row.number("tokens_per_second"),
                row.integer("peak_bytes", 0),
                row.integer("cache_bytes", 0),
            )
        )
    versions = fields.object("versions")
    return DeviceProfile(
        name,
        fields.text("date"),
        fields.text("dtype"),
        fields.integer("threads", 1),
        {library: versions.text(library) for library in versions.values},
        fields.integer("prompt_length", 1),
        fields.integer("rounds", 1),
        fields.integer("weight_bytes", 0),
        tuple(rows),
    )


def budget_profile(model: Any) -> BudgetProfile | None:
    """Quality, speed and memory of a model at every budget, as train/calibrate.py measured them; None without a file.

    The file lies beside the weights that the model was loaded from, in a folder or a Hub repository.

    Raises:
        ValueError: as `read_profile`.
    """
    path = file_beside(model, PROFILE_NAME)
    return None if path is None else read_profile(path, model)
