# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""essm_train/files.py: a file has its old content or its new one. Folders are tested with the runs that are killed."""

import json
import os

import pytest
from matplotlib.figure import Figure

from essm_train.files import replacing, set_aside, sha256_of, write_figure, write_json, write_text


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path):
    path = tmp_path / "a.txt"
    write_text(path, "é")
    with pytest.raises(KeyboardInterrupt), replacing(path) as temporary:
        temporary.write_text("half")
        raise KeyboardInterrupt
    assert path.read_bytes() == "é".encode()
    with replacing(path) as temporary:
        temporary.write_text("new")
        assert path.read_bytes() == "é".encode()
    assert path.read_text() == "new" and os.listdir(tmp_path) == ["a.txt"]


def test_what_is_written(tmp_path):
    write_json(tmp_path / "c.json", {"x": [1]}, indent=1)
    write_figure(tmp_path / "d.png", Figure())
    text = (tmp_path / "c.json").read_text()
    assert json.loads(text) == {"x": [1]} and text.startswith('{\n "x"') and text.endswith("\n")
    assert (tmp_path / "d.png").read_bytes().startswith(b"\x89PNG")
    (tmp_path / "b").write_bytes(b"\x00")
    assert sha256_of(tmp_path / "b").startswith("6e340b9cffb37a98")


def test_a_folder_is_set_aside(tmp_path):
    for name in ("run", "damaged-run"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    set_aside(tmp_path / "run", "damaged-run")
    assert [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")] == ["damaged-run", "damaged-run/run"]
