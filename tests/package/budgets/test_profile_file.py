# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""budget_profile.json: written in one move, read with every field checked."""

import json
import math
import os
from dataclasses import replace
from pathlib import Path

import pytest
from helpers import captured_warnings, random_model
from profiles import HERE, THERE, as_here, device, of, profile

from modeling_essm.budgets import choose_budget, read_profile
from modeling_essm.loading_essm import PROFILE_NAME


@pytest.fixture(autouse=True)
def named_machine(monkeypatch):
    """The tests run HERE."""
    as_here(monkeypatch)


def test_devices_stand_side_by_side(tmp_path):
    one = profile(**{HERE: device(HERE, (1.0, 1.5, 2.0, 3.0, 5.0))})
    path = one.save(tmp_path)
    assert path == tmp_path / PROFILE_NAME and read_profile(tmp_path) == read_profile(path) == one
    both = one.merge(device(THERE, (10.0, 15.0, 20.0, 30.0, 50.0)))
    both.save(path)
    assert read_profile(path) == both and list(both.devices) == [HERE, THERE]
    again = read_profile(path).merge(device(HERE, (2.0, 2.5, 3.0, 4.0, 6.0)))
    again.save(path)
    assert read_profile(path).devices[THERE] == both.devices[THERE]
    assert read_profile(path).choose(max_latency_ms=5.0) == 16  # and not 32 as before
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("where", ["write", "replace"])
def test_an_interrupted_write_leaves_the_old_file(tmp_path, monkeypatch, where):
    old = profile()
    path = old.save(tmp_path)

    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    if where == "replace":
        monkeypatch.setattr(os, "replace", interrupted)
    else:
        write_text = Path.write_text
        half = lambda self, text, **kwargs: (write_text(self, text[: len(text) // 2], **kwargs), interrupted())  # noqa: E731
        monkeypatch.setattr(Path, "write_text", half)
    with pytest.raises(KeyboardInterrupt):
        old.merge(device(THERE, (1.0,) * 5)).save(tmp_path)
    monkeypatch.undo()
    assert read_profile(path) == old and list(tmp_path.iterdir()) == [path]


def edit(path: Path, keys: tuple, value) -> None:
    """Set (or with `del` remove) a value inside a JSON file."""
    record = json.loads(path.read_text())
    inner = record
    for key in keys[:-1]:
        inner = inner[key]
    if value is del_:
        del inner[keys[-1]]
    else:
        inner[keys[-1]] = value
    path.write_text(json.dumps(record))


del_ = object()
ROW = ("devices", HERE, "rows", 0)


@pytest.mark.parametrize(
    "keys, value, message",
    [
        (("format_version",), 2, r"format_version must be one of \[1\], got 2"),
        (("format_version",), True, r"format_version must be one of \[1\], got True"),
        (("format_version",), del_, r"format_version must be one of \[1\], got nothing"),
        (("quality",), del_, "quality must be a JSON object, got None"),
        (("devices",), [], r"devices must be a JSON object, got \[\]"),
        (("model", "hidden_size"), 0, r"model.hidden_size must be an integer in \[1, \d+\], got 0"),
        (("model", "capacities"), [32, 0], r"model.capacities must be a list of integers in \[1, \d+\], got \[32, 0\]"),
        (
            ("model", "samples", "the norms"),
            [1.0, None],
            r"samples.the norms must be a list of finite numbers",
        ),
        (("quality", "metric"), None, "quality.metric must be text, got None"),
        (("quality", "higher_is_better"), 1, r"quality.higher_is_better must be one of \[True, False\], got 1"),
        (("quality", "budgets"), [4, 2], r"budgets must be a list of ascending integers in \[1, 32\], got \[4, 2\]"),
        (("quality", "budgets"), [2, 2], r"budgets must be a list of ascending integers in \[1, 32\], got \[2, 2\]"),
        (("quality", "budgets"), [], r"quality.budgets must be a list of ascending integers in \[1, 32\], got \[\]"),
        (("quality", "budgets"), ["2"], r"quality.budgets must be .* got \['2'\]"),
        (("quality", "values"), [1.0] * 4, r"quality.values must be a list of 5 finite numbers, got \[1.0"),
        (("quality", "values"), [1.0] * 4 + [math.nan], "quality.values must be a list of 5 finite numbers, got .*nan"),
        (("quality", "drop_errors"), [0, 0, 0, 0, -1], "quality.drop_errors must be .* 5 finite numbers >= 0, got"),
        (("devices", HERE, "rows"), [], r"devices\['this machine'\].rows must be a list of at least one object, got"),
        (
            ("devices", HERE, "threads"),
            1.5,
            r"devices\['this machine'\].threads must be an integer in \[1, \d+\], got 1.5",
        ),
        (("devices", HERE, "versions"), None, r"devices\['this machine'\].versions must be a JSON object, got None"),
        ((*ROW, "phase"), "train", r"rows\[0\].phase must be one of \['prefill', 'decode'\], got 'train'"),
        ((*ROW, "budget"), "2", r"rows\[0\].budget must be an integer in \[1, 32\], got '2'"),
        (
            ("quality", "budgets"),
            [2, 4, 8, 16, 33],
            r"budgets must be a list of ascending integers in \[1, 32\], got .*33",
        ),
        ((*ROW, "budget"), 33, r"rows\[0\].budget must be an integer in \[1, 32\], got 33"),
        ((*ROW, "max_ms"), 10**400, r"rows\[0\].max_ms must be a finite number >= 10, got 1000"),
        (("quality", "values"), [10**400] * 5, r"quality.values must be a list of 5 finite numbers, got \[1000"),
        ((*ROW, "peak_bytes"), 10**400, r"rows\[0\].peak_bytes must be an integer in \[0, \d+\], got 1000"),
        (("model", "samples", "the norms"), [10**400], r"samples.the norms must be a list of finite numbers, got"),
        ((*ROW, "min_ms"), -1, r"rows\[0\].min_ms must be a finite number >= 0, got -1"),
        ((*ROW, "median_ms"), 8.9, r"rows\[0\].median_ms must be a finite number >= 9, got 8.9"),
        ((*ROW, "max_ms"), math.inf, r"rows\[0\].max_ms must be a finite number >= 10, got inf"),
        ((*ROW, "peak_bytes"), del_, r"rows\[0\].peak_bytes must be an integer in \[0, \d+\], got nothing"),
    ],
    ids=lambda x: str(x) if isinstance(x, tuple) else "",
)
def test_a_damaged_field(tmp_path, keys, value, message):
    path = profile().save(tmp_path)
    edit(path, keys, value)
    with pytest.raises(ValueError, match=message) as error:
        read_profile(tmp_path)
    assert str(error.value).startswith(str(path))


DAMAGED = {
    "empty": b"",
    "cut": b'{"format_version": 1, "mod',
    "binary": b"\xff\xfe",
    "list": b"[1]",
    "nested": b"[" * 100_000 + b"]" * 100_000,
    "nested-objects": b'{"model": ' * 100_000 + b"1" + b"}" * 100_000,
    "nested-within": b'{"format_version": ' + b"[" * 900 + b"]" * 900 + b"}",
    "digits": b'{"format_version": 1' + b"0" * 5000 + b"}",
}


@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED.keys())
def test_a_damaged_file(tmp_path, content):
    path = tmp_path / PROFILE_NAME
    path.write_bytes(content)
    with pytest.raises(ValueError, match=PROFILE_NAME) as error:
        read_profile(tmp_path)
    assert path.read_bytes() == content and len(str(error.value)) < len(str(path)) + 300


@pytest.mark.parametrize("damage", [lambda text: "[" * 100_000, lambda text: text.replace(" 2.4", " 1" + "0" * 400)])
def test_a_damaged_profile_does_not_keep_a_model_from_being_saved(tmp_path, damage):
    model = random_model(seed=3)
    model.save_pretrained(tmp_path / "model")
    path = of(model).save(tmp_path / "model")
    path.write_text(damage(path.read_text()))
    loaded = type(model).from_pretrained(tmp_path / "model")
    with captured_warnings() as messages:
        loaded.save_pretrained(tmp_path / "again")
    assert len(messages) == 1 and messages[0].startswith(f"no budget profile is saved: {path}")
    assert (tmp_path / "again" / "model.safetensors").exists() and not (tmp_path / "again" / PROFILE_NAME).exists()
    with pytest.raises(ValueError, match=PROFILE_NAME):
        choose_budget(loaded, max_quality_drop=0.1)


def test_no_budget_above_the_capacity_is_chosen(tmp_path):
    """Also where all layers ran the whole of what they hold at that budget."""
    model = random_model(seed=3)
    record = of(model)
    replace(record, quality=replace(record.quality, budgets=(2, 4, 8, 16, 40))).save(tmp_path)
    with pytest.raises(ValueError, match=r"quality.budgets must be .* in \[1, 32\], got \[2, 4, 8, 16, 40\]"):
        read_profile(tmp_path, model)


def test_no_file(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"there is no .*budget_profile.json: write it with essm-calibrate"):
        read_profile(tmp_path)
