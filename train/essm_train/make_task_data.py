# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Generate the Long Range Arena tasks that are made, not collected: ListOps, Pathfinder and Path-X.

    essm-make-task-data listops --output_dir data/listops           # official sizes
    essm-make-task-data pathfinder32 --output_dir data/pathfinder32 --difficulty hard
    essm-make-task-data pathx --output_dir data/pathx --num_workers 16
    essm-make-task-data listops --output_dir data/listops_small --train_size 10000 --validation_size 500 \\
        --test_size 500 --min_length 50 --max_length 250 --max_depth 6          # a reduced set
    essm-make-task-data pathx --help                                 # every parameter

The same command continues an interrupted generation: finished shards are verified by checksum and kept. The data
depends on the parameters only, not on the number of processes. Rows go to parquet files that
`load_dataset("parquet", data_files=...)` reads, e.g. with the files that `shard_files` of tasks/shards.py returns.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import time
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from essm_train.console import command

if TYPE_CHECKING:
    from essm_train.tasks.shards import RowGenerator


def generators() -> dict[str, tuple[type, Mapping[str, Any]]]:
    """Each task's generator, and the values that it has in place of the generator's defaults."""
    from essm_train.tasks.listops import ListOps
    from essm_train.tasks.pathfinder import PATHX, Pathfinder

    return {"listops": (ListOps, {}), "pathfinder32": (Pathfinder, {}), "pathx": (Pathfinder, PATHX)}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def parse_arguments(argv: Sequence[str] | None = None) -> tuple[RowGenerator, Path, int]:
    """The generator, the folder and the number of processes.

    Raises:
        ValueError: parameters that cannot work.
    """
    known = generators()
    parser = _Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    tasks = parser.add_subparsers(dest="task", required=True, metavar="{" + ",".join(known) + "}")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for name, (cls, preset) in known.items():
        task = tasks.add_parser(name, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
        task.add_argument("--output_dir", default=f"data/{name}", help="Where the shards and manifest.json go.")
        task.add_argument("--num_workers", type=int, default=cores, help="Processes; all cores by default.")
        kinds = typing.get_type_hints(cls)
        for field in dataclasses.fields(cls):
            if field.name != "name":
                default = preset.get(field.name, field.default)
                convert, nargs = _kind(kinds[field.name])
                help_text = field.metadata["help"]
                task.add_argument(f"--{field.name}", type=convert, nargs=nargs, default=default, help=help_text)
    values = vars(parser.parse_args(argv))
    cls, _ = known[values["task"]]
    output_dir, num_workers = Path(values.pop("output_dir")), values.pop("num_workers")
    values["name"] = values.pop("task")
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
    return cls(**values), output_dir, num_workers


def _kind(annotation: Any) -> tuple[Any, str | None]:
    """How argparse reads a field: int, float or str; `X | None` as X; tuple[X, ...] as one or more X."""
    if isinstance(annotation, types.UnionType):
        annotation = next(part for part in typing.get_args(annotation) if part is not type(None))
    if typing.get_origin(annotation) is tuple:
        return typing.get_args(annotation)[0], "+"
    return annotation, None


def main(argv: Sequence[str] | None = None) -> None:
    from essm_train.tasks.shards import generate

    generator, output_dir, num_workers = parse_arguments(argv)
    started = time.perf_counter()
    manifest = generate(generator, output_dir, num_workers)
    print(f"{manifest}: complete, {time.perf_counter() - started:.0f} s in this session")


run = command(main)


if __name__ == "__main__":
    run()
