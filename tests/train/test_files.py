# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""essm_train/files.py: a file has its old content or its new one. Folders are tested with the runs that are killed."""

import json
import os

import pytest
from matplotlib.figure import Figure

from essm_train.files import replacing, set_aside, sha256_of, write_bytes, write_figure, write_json, write_text


@pytest.mark.parametrize("durable", [False, True])
def test_a_file_is_replaced_whole_or_not_at_all(durable, tmp_path):
    path = tmp_path / "a.txt"
    write_text(path, "old")
    with pytest.raises(KeyboardInterrupt), replacing(path, durable=durable) as temporary:
        temporary.write_text("half")
        assert temporary.parent == tmp_path and temporary.name == ".partial-a.txt"
        raise KeyboardInterrupt
    assert path.read_text() == "old"
    with replacing(path, durable=durable) as temporary:
        temporary.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new" and os.listdir(tmp_path) == ["a.txt"]


def test_what_is_written(tmp_path):
    write_text(tmp_path / "a.txt", "é")
    write_bytes(tmp_path / "b", b"\x00")
    write_json(tmp_path / "c.json", {"x": [1]}, indent=1)
    write_figure(tmp_path / "d.png", Figure())
    assert (tmp_path / "a.txt").read_bytes() == "é".encode() and (tmp_path / "b").read_bytes() == b"\x00"
    text = (tmp_path / "c.json").read_text()
    assert json.loads(text) == {"x": [1]} and text.startswith('{\n "x"') and text.endswith("\n")
    assert (tmp_path / "d.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(os.listdir(tmp_path)) == ["a.txt", "b", "c.json", "d.png"]
    assert sha256_of(tmp_path / "b").startswith("6e340b9cffb37a98")


def test_a_folder_is_set_aside(tmp_path):
    for name in ("run", "damaged-run"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    set_aside(tmp_path / "run", "damaged-run")
    assert [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")] == ["damaged-run", "damaged-run/run"]
