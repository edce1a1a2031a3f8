# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""essm_train/tasks/shards.py, essm-make-task-data: the same rows whoever makes them, also after a kill; refusals."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from essm_train import make_task_data
from essm_train.files import alone_in
from essm_train.tasks import shards
from essm_train.tasks.catalog import Files
from essm_train.tasks.listops import ListOps
from essm_train.tasks.pathfinder import Pathfinder, PathX
from essm_train.tasks.shards import MANIFEST, generate

SIZES = {"train_size": 50, "validation_size": 7, "test_size": 10, "rows_per_shard": 10}
TASK = ListOps(**SIZES, min_length=3, max_length=6, max_depth=2, max_arguments=3)
NAMES = [*(f"listops-train-{k:05d}-of-00005.parquet" for k in range(5))]
NAMES += ["listops-validation-00000-of-00001.parquet", "listops-test-00000-of-00001.parquet"]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("[!.]*")}


def found(folder: Path) -> bool:
    """Whether a task reads the folder."""
    splits = {split: f"listops-{split}-*.parquet" for split in shards.SPLITS}
    return Files(splits, "").find(folder) is not None


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("data") / "listops"
    generate(TASK, folder)
    return folder


def test_shards_hold_the_rows_and_the_manifest_says_which(made):
    assert set(contents(made)) == {MANIFEST, *NAMES} and found(made)
    record = json.loads((made / MANIFEST).read_text())
    assert record == {"name": "listops", "version": ListOps.VERSION} | dataclasses.asdict(TASK)
    drawn = [" ".join(TASK.tree(split, i)) for split in shards.SPLITS for i in range(TASK.size(split))]
    assert [text for name in NAMES for text in pq.read_table(made / name)["tokens"].to_pylist()] == drawn
    features = json.loads(pq.read_schema(made / NAMES[0]).metadata[b"huggingface"])["info"]["features"]
    assert features["label"]["names"] == list("0123456789")


@pytest.mark.slow
def test_the_number_of_processes_does_not_show(made, tmp_path):
    generate(TASK, tmp_path, num_workers=2)
    assert contents(tmp_path) == contents(made)


def test_a_kill_does_not_show(made, tmp_path, monkeypatch):
    real, left = shards._write, iter(range(3))

    def stop(*arguments, **options):
        if next(left, None) is None:
            raise KeyboardInterrupt
        return real(*arguments, **options)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(shards, "_write", stop)
        generate(TASK, tmp_path)
    assert not found(tmp_path)
    generate(TASK, tmp_path)
    assert contents(tmp_path) == contents(made) and found(tmp_path)


@pytest.mark.slow
def test_a_generation_that_was_killed_continues_to_the_same_rows(tmp_path):
    arguments = ["--train_size", "1500", "--rows_per_shard", "50", "--validation_size", "5", "--test_size", "5"]
    arguments += ["--min_length", "20", "--max_length", "400", "--max_depth", "6", "--num_workers", "2"]
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    command = [sys.executable, make_task_data.__file__, "listops", *arguments, "--output_dir", killed]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL, start_new_session=True)
    deadline = time.monotonic() + 120
    while len(list(killed.glob("listops-*"))) < 3 and time.monotonic() < deadline:
        assert process.poll() is None, "finished before it could be killed"
        time.sleep(0.005)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    while process_group(process.pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not process_group(process.pid)  # no worker waits for more
    present = {path.name: path.stat().st_mtime_ns for path in killed.glob("listops-*")}
    assert 0 < len(present) < 32
    for folder in (whole, killed):
        make_task_data.main(["listops", *arguments, "--output_dir", str(folder)])
    assert contents(killed) == contents(whole)
    assert sum((killed / name).stat().st_mtime_ns == then for name, then in present.items()) == len(present)


def process_group(leader: int) -> bool:
    """Whether any process of the group still runs."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, group = path.read_text().rsplit(")", 1)[1].split()[:3]
        except OSError:
            continue
        if int(group) == leader and state != "Z":
            return True
    return False


def test_missing_shards_are_made_again_and_no_others(made, tmp_path, monkeypatch):
    for name, data in contents(made).items():
        (tmp_path / name).write_bytes(data)
    times = {name: (tmp_path / name).stat().st_mtime_ns for name in NAMES}
    (tmp_path / NAMES[1]).unlink()
    (tmp_path / NAMES[2]).write_bytes(b"")  # as a crash of the machine leaves it
    assert not found(tmp_path)
    generate(TASK, tmp_path)
    assert contents(tmp_path) == contents(made) and found(tmp_path)
    changed = [name for name in NAMES if (tmp_path / name).stat().st_mtime_ns != times[name]]
    assert changed == list(NAMES[1:3])
    monkeypatch.setattr(shards, "_write", None)  # nothing is left to do
    generate(TASK, tmp_path)


def test_other_data_is_refused(made, monkeypatch):
    before = contents(made)
    with pytest.raises(
        ValueError, match=r"holds other data: seed is 0 there, 1 was asked for; max_length is 6 there, 7"
    ):
        generate(dataclasses.replace(TASK, seed=1, max_length=7), made)
    with pytest.raises(ValueError, match="name is 'listops' there, 'pathfinder32' was asked for"):
        generate(Pathfinder(), made)
    monkeypatch.setattr(ListOps, "VERSION", 2)
    with pytest.raises(ValueError, match="version is 1 there, 2 was asked for"):
        generate(TASK, made)
    assert contents(made) == before


def test_shards_that_nothing_describes_are_refused(made, tmp_path):
    """They are not taken for this task's own."""
    (tmp_path / NAMES[2]).write_bytes(b"of another task")
    with pytest.raises(ValueError, match=f"holds {NAMES[2]}, which this run did not write"):
        generate(TASK, tmp_path)
    assert contents(tmp_path) == {NAMES[2]: b"of another task"}
    with alone_in(made), pytest.raises(ValueError, match="is in use by another run"):
        generate(TASK, made)
    for foreign in ("3", "not JSON"):
        (tmp_path / "manifest.json").write_text(foreign)
        with pytest.raises(ValueError, match=r"manifest\.json is no record of generated data"):
            generate(TASK, tmp_path)


def test_a_folder_that_cannot_be_written_is_refused_before_anything_is_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"folder '.*below' cannot be written"):
        generate(TASK, tmp_path / "file" / "below")
    with pytest.raises(ValueError, match="num_workers must be at least 1, got 0"):
        generate(TASK, tmp_path / "new", num_workers=0)
    assert not (tmp_path / "new").exists()


class Dying(ListOps):
    """Its worker is killed, as for want of memory."""

    def rows(self, *arguments):
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
def test_a_killed_worker_is_named(tmp_path):
    with pytest.raises(ChildProcessError, match=r"a worker was killed.* give the command again"):
        generate(Dying(**SIZES, min_length=3, max_length=60), tmp_path, num_workers=2)


def test_arguments_are_a_generators_fields(capsys):
    tasks = (ListOps, PathX)
    generator, folder, _ = make_task_data.parse(["pathx", "--paddle_margins", "1", "4", "--seed", "8"], tasks)
    assert generator == PathX(paddle_margins=[1, 4], seed=8) and folder == "data/pathx"
    assert make_task_data.parse(["pathx", "--num_workers", "0"], tasks)[2] == 0  # which `generate` refuses
    for line, said in {
        "": "one of listops, ",
        "lists": "got lists",
        "listops --max_dept 3": "nearest: --max_dept",
    }.items():
        with pytest.raises(ValueError, match=said):
            make_task_data.parse(line.split(), tasks)
    with pytest.raises(SystemExit):
        make_task_data.main(["--help"])
    assert "essm-make-task-data pathx --help" in capsys.readouterr().out
