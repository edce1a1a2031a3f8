# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Generated data sets as parquet shards: made by several processes, continued after a kill, always the same rows.

A row is a function of (the generator's parameters, split, index, attempt) only, so shards are made in any order. A
shard has its name only once it is whole; `unfinished.json` is there until all are, and `manifest.json` from then on.
Both say what the data is. Where rows must be distinct, the attempt of a row that repeats an earlier one is raised until
none does. (`Dataset.from_generator` would begin anew after a kill.)

    generate(ListOps(train_size=1000), Path("data/listops"), num_workers=2)
    rows = datasets.load_dataset("data/listops")
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import threading
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa
import pyarrow.parquet as pq
from tqdm import tqdm

from essm_train.arguments import check_at_least
from essm_train.files import alone_in, claim, replacing, write_json

MANIFEST, UNFINISHED = "manifest.json", "unfinished.json"
SPLITS = ("train", "validation", "test")
_MAX_ROUNDS = 100  # of new attempts for repeated rows


class RowGenerator:
    """What a task has to offer: a picklable object whose attributes define the data.

    Attributes:
        name: of the data set, and the beginning of its files' names. rows_per_shard: in a file, at most.
        VERSION: raised whenever the same parameters give other rows.
        UNIQUE: the text column whose values must be distinct over all splits, or None.
    """

    VERSION: ClassVar[int] = 1
    UNIQUE: ClassVar[str | None] = None
    name: ClassVar[str]
    rows_per_shard: int

    def __post_init__(self) -> None:
        """Raises ValueError for sizes that make no data set."""
        check_at_least(self, 1, "train_size", "rows_per_shard")
        check_at_least(self, 0, "validation_size", "test_size")

    def size(self, split: str) -> int:
        """Rows of a split."""
        return getattr(self, f"{split}_size")

    @property
    def parameters(self) -> dict[str, Any]:
        """What defines the rows, for JSON."""
        return vars(self)

    def rows(self, split: str, indices: range, attempts: Mapping[str, int]) -> pa.Table:
        """Rows of a split; `attempts` are those of rows "split/index", 0 where none is given."""
        raise NotImplementedError


Shard = tuple[Path, str, range]


def plan(generator: RowGenerator, folder: Path) -> list[Shard]:
    """File, split and rows of all shards, train first."""
    shards = []
    for split in SPLITS:
        rows, step = range(generator.size(split)), generator.rows_per_shard
        count = -(-len(rows) // step)
        for k in range(count):
            file = f"{generator.name}-{split}-{k:05d}-of-{count:05d}.parquet"
            shards.append((folder / file, split, rows[k * step : (k + 1) * step]))
    return shards


def generate(generator: RowGenerator, output_dir: Path | str, num_workers: int = 1) -> Path:
    """Make the shards that the folder lacks.

    Args:
        num_workers: processes; 1 works in this one.
    Raises:
        ValueError: the folder cannot be written, is in use, or holds data of other parameters or of unknown ones,
            before anything is made; or rows cannot be made distinct.
        OSError: the disk is full, or a worker was killed; finished shards stand.
    """
    if num_workers < 1:
        raise ValueError(f"num_workers must be at least 1, got {num_workers}")
    folder = Path(output_dir)
    manifest, unfinished, shards = folder / MANIFEST, folder / UNFINISHED, plan(generator, folder)
    record = {"name": generator.name, "version": generator.VERSION, **generator.parameters}
    record = json.loads(json.dumps({"data": record, "attempts": {}}))  # tuples to lists
    for path in filter(Path.exists, (manifest, unfinished)):
        wanted, record = record["data"], json.loads(path.read_text(encoding="utf-8"))
        held = record.get("data", {})
        differs = [
            f"{name} is {held.get(name)!r} there, {wanted.get(name)!r} was asked for"
            for name in {**wanted, **held}
            if held.get(name) != wanted.get(name)
        ]
        if differs:
            raise ValueError(
                f"{folder} holds other data: {'; '.join(differs)}. Give these parameters or another output_dir"
            )
    known = manifest.exists() or unfinished.exists()
    claim(folder, [] if known else [path.name for path, *_ in shards])
    with alone_in(folder):
        return _generate(generator, folder, shards, record, num_workers)


def _generate(
    generator: RowGenerator, folder: Path, shards: list[Shard], record: dict[str, Any], num_workers: int
) -> Path:
    manifest, unfinished = folder / MANIFEST, folder / UNFINISHED
    if manifest.exists() and all(path.exists() for path, *_ in shards):
        return manifest
    for _ in range(_MAX_ROUNDS):
        write_json(unfinished, record)
        manifest.unlink(missing_ok=True)
        _make([shard for shard in shards if not shard[0].exists()], generator, record["attempts"], num_workers)
        repeated = _repeated(generator.UNIQUE, shards) if generator.UNIQUE else []
        if not repeated:
            os.replace(unfinished, manifest)
            return manifest
        for path, row in repeated:  # deleted before new attempts are written: every file is of the attempts on disk
            path.unlink(missing_ok=True)
            record["attempts"][row] = record["attempts"].get(row, 0) + 1
    raise ValueError(
        f"{len(repeated)} of the rows still repeat others after {_MAX_ROUNDS} attempts: there are too few different "
        "ones with these parameters; ask for fewer rows or longer ones"
    )


def _make(shards: list[Shard], generator: RowGenerator, attempts: Mapping[str, int], num_workers: int) -> None:
    write, num_workers = partial(_write, generator, attempts), min(num_workers, len(shards))
    progress = partial(tqdm, total=len(shards), unit="shard", desc=generator.name, disable=None)
    if num_workers <= 1:
        for _ in progress(map(write, shards)):
            pass
        return
    context = multiprocessing.get_context("spawn")  # a fork would inherit locks of Arrow's threads
    with ProcessPoolExecutor(num_workers, context, _die_with_parent) as pool:
        try:
            for _ in progress(pool.map(write, shards)):
                pass
        except BrokenProcessPool as error:
            raise ChildProcessError(
                "a worker was killed, perhaps for want of memory. Finished shards stand: give the command again, with "
                "fewer num_workers"
            ) from error


def _die_with_parent() -> None:
    """A worker whose parent was killed would wait for its next shard forever."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _write(generator: RowGenerator, attempts: Mapping[str, int], shard: Shard) -> None:
    path, split, rows = shard
    with replacing(path) as temporary:
        pq.write_table(generator.rows(split, rows, attempts), temporary, compression="zstd")


def _repeated(column: str, shards: list[Shard]) -> list[tuple[Path, str]]:
    """File and "split/index" of rows whose text stands already in an earlier row."""
    seen: set[bytes] = set()
    repeated = []
    for path, split, rows in shards:
        for row, text in zip(rows, pq.read_table(path, columns=[column]).column(0).to_pylist()):
            digest = hashlib.blake2b(text.encode(), digest_size=16).digest()
            if digest in seen:
                repeated.append((path, f"{split}/{row}"))
            seen.add(digest)
    return repeated
