# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""essm_train/tasks/shards.py, essm-make-task-data: the same bytes whoever makes them, also after a kill; damage."""

import dataclasses
import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from datasets import load_dataset

from essm_train import make_task_data as script
from essm_train.tasks import listops, pathfinder, shards
from essm_train.tasks.listops import ListOps
from essm_train.tasks.pathfinder import Pathfinder
from essm_train.tasks.shards import MANIFEST, generate, shard_files

SIZES = {"train_size": 50, "validation_size": 7, "test_size": 10, "rows_per_shard": 10}
# Trees of 4 to 6 symbols: enough different ones, but many drawn twice.
TASK = ListOps(**SIZES, min_length=3, max_length=6, max_depth=2, max_arguments=3)
PICTURES = Pathfinder(**SIZES, contour_length=3, distractor_paddles=4)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def column(folder: Path, name: str) -> list:
    files = [file for part in shard_files(folder, "listops").values() for file in part]
    return [value for file in files for value in pq.read_table(file)[name].to_pylist()]


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("data") / "listops"
    generate(TASK, folder, progress=False)
    return folder


def copy(made: Path, folder: Path) -> Path:
    folder.mkdir()
    for name, data in contents(made).items():
        (folder / name).write_bytes(data)
    return folder


# ---------------------------------------------------------------------------------------------------------------------
# Same bytes.


def test_shards_hold_the_rows_and_the_manifest_says_so(made):
    manifest = json.loads((made / MANIFEST).read_text())
    assert list(manifest["shards"]) == [
        *(f"listops-train-{k:05d}-of-00005.parquet" for k in range(5)),
        "listops-validation-00000-of-00001.parquet",
        "listops-test-00000-of-00001.parquet",
    ]
    assert set(contents(made)) == {MANIFEST, *manifest["shards"]}
    assert [entry["rows"] for entry in manifest["shards"].values()] == [10] * 5 + [7, 10]
    assert manifest["complete"] and manifest["version"] == ListOps.VERSION
    assert manifest["parameters"] == dataclasses.asdict(TASK)


@pytest.mark.slow
def test_the_number_of_processes_does_not_show(made, tmp_path):
    generate(TASK, tmp_path / "two", num_workers=2, progress=False)
    assert contents(tmp_path / "two") == contents(made)


def test_trees_are_distinct_and_the_rest_is_as_drawn(made):
    drawn = [
        " ".join(TASK.tree(split, i)) for split, n in (("train", 50), ("validation", 7), ("test", 10)) for i in range(n)
    ]
    rows = column(made, "tokens")
    assert len(set(drawn)) < 67 == len(set(rows))
    first = {text: i for i, text in reversed(list(enumerate(drawn)))}
    kept = [i for i, text in enumerate(drawn) if first[text] == i]
    attempts = json.loads((made / MANIFEST).read_text())["attempts"]
    # A replacement may repeat a tree that stands further down, which is then replaced in its turn: rare.
    assert sum(rows[i] != drawn[i] for i in kept) <= 5
    assert sum(map(len, attempts.values())) == sum(row != text for row, text in zip(rows, drawn))


# ---------------------------------------------------------------------------------------------------------------------
# Interrupted.


@pytest.mark.parametrize("writes", [1, 10])
def test_a_kill_after_a_write_of_the_manifest_does_not_show(made, tmp_path, monkeypatch, writes):
    """Also one between finding repeated rows and replacing them."""
    write, left = shards._write_manifest, iter(range(writes))

    def stop(*arguments):
        write(*arguments)
        if next(left, None) is None:
            raise KeyboardInterrupt

    monkeypatch.setattr(shards, "_write_manifest", stop)
    with pytest.raises(KeyboardInterrupt):
        generate(TASK, tmp_path, progress=False)
    monkeypatch.undo()
    generate(TASK, tmp_path, progress=False)
    assert contents(tmp_path) == contents(made)


@pytest.mark.slow
def test_a_generation_that_was_killed_continues_to_the_same_bytes(tmp_path):
    arguments = ["--train_size", "6000", "--rows_per_shard", "200", "--validation_size", "5", "--test_size", "5"]
    arguments += ["--min_length", "20", "--max_length", "400", "--max_depth", "6", "--num_workers", "2"]
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    command = [sys.executable, script.__file__, "listops", *arguments]
    process = subprocess.Popen([*command, "--output_dir", killed], stderr=subprocess.DEVNULL, start_new_session=True)
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
    listed = json.loads((killed / MANIFEST).read_text())["shards"]
    assert 0 < len(listed) <= len(present) < 32
    with pytest.raises(FileNotFoundError, match=r"unfinished: continue with `essm-make-task-data listops "):
        shard_files(killed, "listops")

    script.main(["listops", *arguments, "--output_dir", str(whole)])
    script.main(["listops", *arguments, "--output_dir", str(killed)])
    assert contents(killed) == contents(whole)
    assert all((killed / name).stat().st_mtime_ns == present[name] for name in listed)


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


def test_missing_and_damaged_shards_are_made_again_and_no_others(made, tmp_path, monkeypatch):
    folder = copy(made, tmp_path / "data")
    names = sorted(name for name in contents(folder) if name != MANIFEST)
    times = {name: (folder / name).stat().st_mtime_ns for name in names}
    flipped = bytearray((folder / names[1]).read_bytes())
    flipped[len(flipped) // 2] ^= 1
    (folder / names[1]).write_bytes(flipped)
    shard_files(folder, "listops")  # sizes are right
    with pytest.raises(FileNotFoundError, match=f"{names[1]}' is missing or damaged"):
        shard_files(folder, "listops", checksum=True)
    (folder / names[0]).unlink()
    (folder / names[2]).write_bytes((folder / names[2]).read_bytes()[:100])
    (folder / ".partial-old.parquet").write_bytes(b"half")
    with pytest.raises(FileNotFoundError, match=r"is missing or damaged: mend it with `essm-make-task-data"):
        shard_files(folder, "listops")
    generate(TASK, folder, progress=False)
    assert contents(folder) == contents(made)
    monkeypatch.setattr(ListOps, "rows", None)  # a shard to be made would call it
    generate(TASK, folder, progress=False)
    assert all((folder / name).stat().st_mtime_ns == times[name] for name in names[3:])


# ---------------------------------------------------------------------------------------------------------------------
# Refused.


def test_other_data_is_refused(made, tmp_path, monkeypatch):
    before = contents(made)
    with pytest.raises(
        ValueError, match=r"holds other data: seed is 0 there, 1 was asked for; max_length is 6 there, 7"
    ):
        generate(dataclasses.replace(TASK, seed=1, max_length=7), made, progress=False)
    with pytest.raises(ValueError, match="name is 'listops' there, 'pathfinder32' was asked for"):
        generate(PICTURES, made, progress=False)
    monkeypatch.setattr(ListOps, "VERSION", 2)
    with pytest.raises(ValueError, match="version is 1 there, 2 was asked for"):
        generate(TASK, made, progress=False)
    assert contents(made) == before
    folder = copy(made, tmp_path / "data")
    (folder / MANIFEST).write_text('{"name": "listops"')
    with pytest.raises(ValueError, match=r"manifest.json is damaged .* delete the folder"):
        generate(TASK, folder, progress=False)


def test_a_folder_that_cannot_be_written_is_refused_before_anything_is_made(tmp_path, monkeypatch):
    monkeypatch.setattr(ListOps, "rows", None)
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ValueError, match=f"output_dir '{folder}' cannot be written"):
            generate(TASK, folder, progress=False)
    with pytest.raises(ValueError, match="num_workers must be at least 1, got 0"):
        generate(TASK, tmp_path / "new", num_workers=0)
    assert not (tmp_path / "new").exists()


def test_a_full_disk_leaves_the_finished_shards(tmp_path, monkeypatch):
    write, left = pq.write_table, iter(range(3))

    def full(table, path, **options):
        if next(left, None) is None:
            Path(path).write_bytes(b"half")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(table, path, **options)

    monkeypatch.setattr(pq, "write_table", full)
    with pytest.raises(OSError, match=r"No space left.*Finished shards stand: make room and give the command again"):
        generate(TASK, tmp_path, progress=False)
    assert len(list(tmp_path.glob("*.parquet"))) == 3 and not list(tmp_path.glob(".partial-*"))


class Dying(ListOps):
    """Its worker is killed, as for want of memory."""

    def rows(self, *arguments):
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
def test_a_killed_worker_is_named(tmp_path):
    with pytest.raises(ChildProcessError, match=r"a worker was killed.* give the command again"):
        generate(Dying(**SIZES, min_length=3, max_length=60), tmp_path, num_workers=2, progress=False)


# ---------------------------------------------------------------------------------------------------------------------
# Loaded.


@pytest.mark.slow
def test_datasets_reads_the_files(made, tmp_path):
    rows = load_dataset("parquet", data_files=shard_files(made, "listops"), cache_dir=str(tmp_path / "cache"))
    assert {split: len(part) for split, part in rows.items()} == {"train": 50, "validation": 7, "test": 10}
    assert rows["train"].features["label"].names == list("0123456789")
    assert rows["test"][3]["tokens"].split()[0] in listops.OPERATORS
    generate(PICTURES, tmp_path / "pictures", progress=False)
    rows = load_dataset(
        "parquet", data_files=shard_files(tmp_path / "pictures", "pathfinder32"), cache_dir=str(tmp_path / "cache")
    )
    assert rows["train"].features["label"].names == ["separate", "connected"]
    assert len(rows["test"][0]["pixels"]) == 1024 and rows["test"].features["pixels"].feature.dtype == "uint8"


def test_the_command_that_an_error_names_gives_the_same_parameters(made):
    task = Pathfinder(**pathfinder.PATHX | {"seed": 5, "train_size": 9, "contour_length": 8})
    for generator in (TASK, task, PICTURES):
        manifest = {"name": generator.name, "parameters": json.loads(json.dumps(dataclasses.asdict(generator)))}
        assert script.parse_arguments(shards.command_line(manifest).split())[0] == generator
