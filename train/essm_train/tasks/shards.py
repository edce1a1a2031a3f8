# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Generated data sets as parquet shards: made by several processes, continued after a kill, always the same rows.

A row is a function of (the generator's parameters, split, index) only, so shards are made in any order. A shard has its
name, which says of how many it is, only once it is whole; `manifest.json` says what the data is.
(`Dataset.from_generator` would begin anew after a kill.)

    generate(ListOps(train_size=1000), Path("data/listops"), num_workers=2)
    rows = datasets.load_dataset("data/listops")
"""

from __future__ import annotations

import json
import multiprocessing
import os
import threading
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

MANIFEST = "manifest.json"
SPLITS = ("train", "validation", "test")


class RowGenerator:
    """What a task has to offer: a picklable object whose attributes define the data.

    Attributes:
        name: of the data set, and the beginning of its files' names. rows_per_shard: in a file, at most.
        VERSION: raised whenever the same parameters give other rows.
    """

    VERSION: ClassVar[int] = 1
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

    def rows(self, split: str, indices: range) -> pa.Table:
        """These rows of a split."""
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
            before anything is made.
        OSError: the disk is full, or a worker was killed; finished shards stand.
    """
    if num_workers < 1:
        raise ValueError(f"num_workers must be at least 1, got {num_workers}")
    folder = Path(output_dir)
    manifest, shards = folder / MANIFEST, plan(generator, folder)
    record = {"name": generator.name, "version": generator.VERSION, **generator.parameters}
    record = json.loads(json.dumps(record))  # tuples to lists
    if known := manifest.exists():
        try:
            held = dict(json.loads(manifest.read_text(encoding="utf-8")))
        except (TypeError, ValueError) as error:
            raise ValueError(f"{manifest} is no record of generated data: {error}") from error
        differs = [
            f"{name} is {held.get(name)!r} there, {record.get(name)!r} was asked for"
            for name in {**record, **held}
            if held.get(name) != record.get(name)
        ]
        if differs:
            raise ValueError(
                f"{folder} holds other data: {'; '.join(differs)}. Give these parameters or another output_dir"
            )
    claim(folder, [] if known else [path.name for path, *_ in shards], flag="")
    with alone_in(folder):
        write_json(manifest, record)
        missing = [shard for shard in shards if not shard[0].exists() or not shard[0].stat().st_size]
        if missing:
            _make(missing, generator, num_workers)
    return manifest


def _make(shards: list[Shard], generator: RowGenerator, num_workers: int) -> None:
    write, num_workers = partial(_write, generator), min(num_workers, len(shards))
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


def _write(generator: RowGenerator, shard: Shard) -> None:
    path, split, rows = shard
    with replacing(path) as temporary:
        pq.write_table(generator.rows(split, rows), temporary, compression="zstd")
