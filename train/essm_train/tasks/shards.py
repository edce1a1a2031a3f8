# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Generated data sets as checksummed parquet shards: made by several processes, continued after a kill, same bytes.

A generator is a dataclass whose fields define the data, and row i of a split is a function of (fields, split, i,
attempt) only. So a shard can be made anywhere, in any order, and again: neither the number of processes nor an
interruption shows in its bytes. (The bytes of a parquet file name the pyarrow that wrote it; rows do not depend on it.)
`Dataset.from_generator` would begin anew after a kill, so shards are written here; their schema is a `Features`.

`manifest.json` in the folder says what the data is (generator, version, parameters) and what is there (rows, bytes and
SHA-256 of each finished shard). Where rows must be distinct, the attempt of a row that repeats an earlier one is raised
until none does; the manifest keeps those attempts, which is why this survives a kill as well.

    generate(ListOps(train_size=1000), Path("data/listops"), num_workers=2)
    files = shard_files(Path("data/listops"), "listops")  # {"train": [...], ...} for load_dataset("parquet", ...)
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import multiprocessing
import os
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
from tqdm import tqdm

from essm_train.arguments import check_at_least
from essm_train.files import PARTIAL, check_writable, replacing, sha256_of, write_json

MANIFEST = "manifest.json"
SPLITS = ("train", "validation", "test")
_FORMAT = 1
_MAKE = "essm-make-task-data"
_MAX_ROUNDS = 100  # of new attempts for repeated rows


class RowGenerator:
    """What a task has to offer: a dataclass of JSON-able fields, picklable.

    Attributes:
        name: of the data set, and the beginning of its files' names.
        VERSION: raised whenever the same fields give other rows.
        UNIQUE: the text column whose values must be distinct over all splits, or None.
        rows_per_shard: in a file, at most. train_size, validation_size, test_size: rows; read by the split's name.
    """

    VERSION: ClassVar[int] = 1
    UNIQUE: ClassVar[str | None] = None

    name: str
    rows_per_shard: int

    def __post_init__(self) -> None:
        """Raises ValueError for sizes that make no data set."""
        check_at_least(self, 1, "train_size", "rows_per_shard")
        check_at_least(self, 0, "validation_size", "test_size")

    def rows(self, split: str, indices: range, attempts: Mapping[int, int]) -> pa.Table:
        """Rows of a split, each a function of the fields, split, index and attempt (0 where none is given)."""
        raise NotImplementedError


class Shard(NamedTuple):
    """A file and the rows it holds."""

    split: str
    file: str
    rows: range


def plan(generator: RowGenerator) -> list[Shard]:
    """All shards, train first."""
    shards = []
    for split in SPLITS:
        rows, step = range(getattr(generator, f"{split}_size")), generator.rows_per_shard
        count = -(-len(rows) // step)
        for k in range(count):
            file = f"{generator.name}-{split}-{k:05d}-of-{count:05d}.parquet"
            shards.append(Shard(split, file, rows[k * step : (k + 1) * step]))
    return shards


# ---------------------------------------------------------------------------------------------------------------------
# Writing.


def generate(generator: RowGenerator, output_dir: Path, num_workers: int = 1, progress: bool = True) -> Path:
    """Make what is missing or damaged in the folder; does nothing where all is there. One call per folder at a time.

    Args:
        num_workers: processes; 1 works in this one.
        progress: show a bar.
    Returns:
        Path of the manifest.
    Raises:
        ValueError: the folder cannot be written or holds data of other parameters, before anything is made; or rows
            cannot be made distinct.
        OSError: the disk is full, or a worker was killed; finished shards stand.
    """
    if num_workers < 1:
        raise ValueError(f"num_workers must be at least 1, got {num_workers}")
    output_dir = Path(output_dir)
    path, shards = output_dir / MANIFEST, plan(generator)
    parameters = json.loads(json.dumps(dataclasses.asdict(generator)))  # type: ignore[call-overload]  # tuples to lists
    identity = {"format": _FORMAT, "name": generator.name, "version": generator.VERSION, "parameters": parameters}
    manifest = {**identity, "complete": False, "attempts": {}, "shards": {}}
    if path.exists():
        manifest = _read_manifest(path)
        _refuse_other(manifest, identity, output_dir)
    check_writable(output_dir)
    for stale in output_dir.glob(f"{PARTIAL}*"):
        stale.unlink()
    for file, entry in list(manifest["shards"].items()):
        if not is_intact(output_dir / file, entry, checksum=True):
            del manifest["shards"][file]
            manifest["complete"] = False
    for _ in range(_MAX_ROUNDS):
        _write_manifest(manifest, path)
        _make_missing(generator, shards, manifest, path, num_workers, progress)
        repeated = _repeated_rows(generator, output_dir) if generator.UNIQUE and not manifest["complete"] else []
        for shard, row in repeated:
            attempts = manifest["attempts"].setdefault(shard.split, {})
            attempts[str(row)] = attempts.get(str(row), 0) + 1
            manifest["shards"].pop(shard.file, None)
        if not repeated:
            if not manifest["complete"]:
                manifest["complete"] = True
                _write_manifest(manifest, path)
            return path
    raise ValueError(
        f"{len(repeated)} of the rows still repeat others after {_MAX_ROUNDS} attempts: there are too few different "
        "ones with these parameters; ask for fewer rows or longer ones"
    )


def _refuse_other(manifest: dict[str, Any], identity: dict[str, Any], output_dir: Path) -> None:
    held, wanted = (
        {name: record.get(name) for name in ("name", "version", "format")} | record["parameters"]
        for record in (manifest, identity)
    )
    differs = [
        f"{name} is {held.get(name)!r} there, {wanted.get(name)!r} was asked for"
        for name in {**wanted, **held}
        if held.get(name) != wanted.get(name)
    ]
    if differs:
        raise ValueError(
            f"{output_dir} holds other data: {'; '.join(differs)}. Give these parameters or another output_dir"
        )


def is_intact(path: Path, entry: Mapping[str, Any], checksum: bool) -> bool:
    """Whether the file is there, has the size of the manifest's entry and, if asked for, its SHA-256."""
    if not path.is_file() or path.stat().st_size != entry["bytes"]:
        return False
    return not checksum or sha256_of(path) == entry["sha256"]


def _make_missing(
    generator: RowGenerator,
    shards: list[Shard],
    manifest: dict[str, Any],
    path: Path,
    num_workers: int,
    progress: bool,
) -> None:
    """Write every shard that the manifest lacks, and its entry after it."""
    missing = [shard for shard in shards if shard.file not in manifest["shards"]]
    total, left = (sum(len(shard.rows) for shard in part) for part in (shards, missing))
    with tqdm(total=total, initial=total - left, unit="row", desc=generator.name, disable=not progress) as bar:
        for shard, entry in _made(generator, missing, manifest["attempts"], path.parent, num_workers):
            entries = manifest["shards"] | {shard.file: entry}
            # In the plan's order, so that the manifest's bytes do not tell who was faster.
            manifest["shards"] = {each.file: entries[each.file] for each in shards if each.file in entries}
            _write_manifest(manifest, path)
            bar.update(len(shard.rows))


def _made(
    generator: RowGenerator,
    shards: list[Shard],
    attempts: Mapping[str, Mapping[str, int]],
    output_dir: Path,
    num_workers: int,
) -> Iterator[tuple[Shard, dict[str, Any]]]:
    """Each shard with its manifest entry, when it is on disk."""
    given = {split: {int(row): attempt for row, attempt in rows.items()} for split, rows in attempts.items()}
    jobs = [(generator, shard, given.get(shard.split, {}), output_dir) for shard in shards]
    if num_workers == 1 or len(shards) <= 1:
        yield from ((job[1], _write_shard(*job)) for job in jobs)
        return
    context = multiprocessing.get_context("spawn")  # a fork would inherit locks of Arrow's threads
    with ProcessPoolExecutor(min(num_workers, len(shards)), context, _die_with_parent) as pool:
        futures = {pool.submit(_write_shard, *job): job[1] for job in jobs}
        try:
            for future in as_completed(futures):
                yield futures[future], future.result()
        except BrokenProcessPool as error:
            raise ChildProcessError(
                "a worker was killed, perhaps for want of memory. Finished shards stand: give the command again, with "
                "fewer num_workers"
            ) from error
        finally:
            pool.shutdown(cancel_futures=True)


def _die_with_parent() -> None:
    """A worker whose parent was killed would wait for its next shard forever."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _write_shard(
    generator: RowGenerator, shard: Shard, attempts: Mapping[int, int], output_dir: Path
) -> dict[str, Any]:
    """Write the file under a temporary name, to disk, and rename it. Returns its manifest entry."""
    table = generator.rows(shard.split, shard.rows, attempts)
    path = output_dir / shard.file
    try:
        with replacing(path, durable=True) as temporary:
            pq.write_table(table, temporary, compression="zstd")
            return {"rows": len(table), "bytes": temporary.stat().st_size, "sha256": sha256_of(temporary)}
    except OSError as error:
        raise OSError(
            error.errno, f"cannot write {path}: {error}. Finished shards stand: make room and give the command again"
        ) from error


def _repeated_rows(generator: RowGenerator, output_dir: Path) -> list[tuple[Shard, int]]:
    """Rows whose text stands already in an earlier row, in the order of `SPLITS`."""
    seen: set[bytes] = set()
    repeated = []
    for shard in plan(generator):
        column = pq.read_table(output_dir / shard.file, columns=[generator.UNIQUE]).column(0)
        for row, text in zip(shard.rows, column.to_pylist()):
            digest = hashlib.blake2b(text.encode(), digest_size=16).digest()
            if digest in seen:
                repeated.append((shard, row))
            seen.add(digest)
    return repeated


def _write_manifest(manifest: Mapping[str, Any], path: Path) -> None:
    write_json(path, manifest, indent=1, durable=True)


def _read_manifest(path: Path) -> dict[str, Any]:
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(manifest["parameters"], dict) or not isinstance(manifest["shards"], dict):
            raise TypeError("its parts have the wrong types")
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged ({error!r}): delete the folder and generate the data again") from error
    return manifest


# ---------------------------------------------------------------------------------------------------------------------
# Reading.


def shard_files(folder: Path | str, name: str, checksum: bool = False) -> dict[str, list[str]]:
    """The files of each split, as `load_dataset("parquet", data_files=...)` takes them; empty splits are left out.

    Args:
        name: of the data set.
        checksum: read every file and compare its SHA-256; otherwise presence and size are checked.
    Raises:
        FileNotFoundError: there is no such data, or a part of it is missing; names the command that makes it.
        ValueError: the folder holds another data set, or the manifest is damaged.
    """
    folder = Path(folder)
    command = f"`{_MAKE} {name} --output_dir {folder}`"
    if not (folder / MANIFEST).is_file():
        raise FileNotFoundError(f"no {name} data in {str(folder)!r}: make it with {command}")
    manifest = _read_manifest(folder / MANIFEST)
    if manifest["name"] != name:
        raise ValueError(f"{str(folder)!r} holds {manifest['name']} data, not {name}; make it: {command}")
    again = f"`{_MAKE} {command_line(manifest)} --output_dir {folder}`"
    if not manifest["complete"]:
        raise FileNotFoundError(f"the {name} data in {str(folder)!r} is unfinished: continue with {again}")
    files: dict[str, list[str]] = {}
    for file, entry in manifest["shards"].items():
        if not is_intact(folder / file, entry, checksum):
            raise FileNotFoundError(f"{str(folder / file)!r} is missing or damaged: mend it with {again}")
        files.setdefault(file.removeprefix(f"{name}-").split("-")[0], []).append(str(folder / file))
    return files


def command_line(manifest: Mapping[str, Any]) -> str:
    """The arguments of make_task_data, but for the folder, that give this data."""
    values = {name: value for name, value in manifest["parameters"].items() if name != "name" and value is not None}
    parts = ((f"--{name}", *map(str, value if isinstance(value, list) else [value])) for name, value in values.items())
    return " ".join([manifest["name"], *(word for part in parts for word in part)])
