# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""essm_train/files.py: a file has its old content or its new one. Folders are tested with the runs that are killed."""

import errno
import os
import resource
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from essm_train import files
from essm_train.files import (
    alone_in,
    claim,
    filling,
    recorded,
    replacing,
    set_aside,
    write_json,
    write_text,
)
from modeling_essm import _files

REPLACING = pytest.mark.parametrize("replacing", [files.replacing, _files.replacing], ids=["commands", "package"])


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


@pytest.mark.parametrize("damaged", [None, b"", b'{"a": 1', b"\xff", b"[1]"], ids=str)
def test_a_record_is_read_or_there_is_none(damaged, tmp_path):
    path = tmp_path / "a.json"
    write_json(path, {"a": 1})
    assert recorded(path) == {"a": 1}
    path.unlink() if damaged is None else path.write_bytes(damaged)
    assert recorded(path) == {}


def test_a_folder_is_set_aside(tmp_path):
    for name in ("run", "damaged-run"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    assert set_aside(tmp_path / "run", "damaged-run") == "damaged-run-1"
    left = {"damaged-run": "damaged-run", "damaged-run-1": "run"}  # what had that name stays
    assert {path.name: next(path.iterdir()).name for path in tmp_path.iterdir()} == left


@REPLACING
def test_two_writers_of_a_file_do_not_meet(replacing, tmp_path):
    """The last one wins; the file is as readable as any other, and so are those that follow it."""
    path, plain = tmp_path / "a.json", tmp_path / "plain"
    with replacing(path) as first:
        first.write_text("first")
        with replacing(path) as second:
            second.write_text("second")
        assert path.read_text() == "second"
    assert path.read_text() == "first" and os.listdir(tmp_path) == ["a.json"]
    plain.touch()
    assert path.stat().st_mode == plain.stat().st_mode


def test_what_a_killed_run_left_is_deleted_and_nothing_else(tmp_path):
    """Killed while it wrote a file or a folder, deleted one, or had moved one aside for its successor."""
    others = (".partial-thesis.txt", ".tmp-notes")
    own = ("partial-0123abcd-a.json", "tmp-0123abcd-model", "tmp-deleted-0123abcd-old", "tmp-replaced-0123abcd-best")
    for name in (*(f".{name}" for name in own), *others):
        (tmp_path / name).mkdir()
    with alone_in(tmp_path):
        assert {path.name for path in tmp_path.iterdir()} == {".lock", "best", *others}


def test_two_writers_of_a_folder_do_not_meet(tmp_path):
    path = tmp_path / "model"
    with filling(path) as first:
        (first / "name").write_text("first")
        with filling(path) as second:
            (second / "name").write_text("second")
        assert (path / "name").read_text() == "second"
    assert (path / "name").read_text() == "first" and os.listdir(tmp_path) == ["model"]


def test_a_name_that_was_taken_and_is_free_again(tmp_path, monkeypatch):
    """Of three writers: the folder that stood in the way of one has been moved aside by another."""
    path, move, met = tmp_path / "model", os.replace, []
    with filling(path) as temporary:
        (temporary / "name").touch()

        def replace(source, target):
            if source == temporary and not met:
                met.append(path)
                raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY))
            move(source, target)

        monkeypatch.setattr(os, "replace", replace)
    assert met and (path / "name").exists() and os.listdir(tmp_path) == ["model"]


def no_space() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.fixture
def small_disk():
    """No file grows beyond 4 KiB: a real error of the operating system."""
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    signal.signal(signal.SIGXFSZ, before)


@REPLACING
def test_a_full_disk_names_the_file_and_leaves_nothing(replacing, tmp_path, small_disk):
    (tmp_path / "a.txt").write_text("old")
    with pytest.raises(OSError, match=r"No space left on device: '.*/a\.txt'"), replacing(tmp_path / "a.txt"):
        no_space()
    with pytest.raises(OSError, match=r"cannot write .*/a\.txt: .*too large"), replacing(tmp_path / "a.txt") as path:
        save_file({"x": torch.zeros(9000)}, path)
    assert (tmp_path / "a.txt").read_text() == "old" and os.listdir(tmp_path) == ["a.txt"]


def test_a_full_disk_leaves_no_temporary_folder(tmp_path, small_disk):
    with pytest.raises(OSError, match=r"No space left on device: '.*/model'"), filling(tmp_path / "model") as folder:
        (folder / "config.json").write_text("{}")
        no_space()
    with pytest.raises(OSError, match=r"cannot write .*/model: "), filling(tmp_path / "model") as folder:
        torch.save({"x": torch.zeros(9000)}, folder / "state.pt")
    assert os.listdir(tmp_path) == []


def test_a_folder_that_cannot_be_opened_is_written_all_the_same(tmp_path, monkeypatch):
    """As on Windows, where its entries cannot be synced. A file that cannot be is an error."""
    opened = os.open

    def no_folders(path, *arguments, **options):
        if os.path.isdir(path):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return opened(path, *arguments, **options)

    monkeypatch.setattr(os, "open", no_folders)
    write_text(tmp_path / "a.txt", "whole")
    with filling(tmp_path / "model") as folder:
        write_json(folder / "config.json", {})
    assert sorted(os.listdir(tmp_path)) == ["a.txt", "model"]
    with pytest.raises(FileNotFoundError), replacing(tmp_path / "b.txt"):
        pass  # nothing was written


def test_what_another_run_has_written_is_refused_by_name(tmp_path):
    claim(tmp_path / "new" / "run", ["model"])
    (tmp_path / "new" / "run" / "model").mkdir()
    claim(tmp_path / "new" / "run", ["model"])  # an empty folder is nothing
    write_text(tmp_path / "new" / "run" / "model" / "config.json", "{}")
    with pytest.raises(ValueError, match=r"run' holds model, which this run did not write: .* give --overwrite to"):
        claim(tmp_path / "new" / "run", ["model", "card"])
    claim(tmp_path / "new" / "run", ["model", "card"], overwrite=True)
    source = str(tmp_path / "new" / "run" / "model")
    for reads in ([source], [None, 3, "no path", f"{source}/config.json"]):
        with pytest.raises(ValueError, match=r"model.*' is read, and '.*/model' would be replaced"):
            claim(tmp_path / "new" / "run", ["model"], overwrite=True, reads=reads)
    claim(Path(source), ["model"], reads=[source])  # below it
