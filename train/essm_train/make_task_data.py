# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Generate the Long Range Arena tasks that are made, not collected: ListOps, Pathfinder and Path-X.

    essm-make-task-data listops --output_dir data/listops           # official sizes
    essm-make-task-data pathfinder32 --output_dir data/pathfinder32 --difficulty hard
    essm-make-task-data pathx --output_dir data/pathx --num_workers 16
    essm-make-task-data listops --output_dir data/listops_small --train_size 10000 --validation_size 500 \\
        --test_size 500 --min_length 50 --max_length 250 --max_depth 6          # a reduced set
    essm-make-task-data pathx --help                                 # every parameter

The same command continues an interrupted generation: finished shards are kept. Other data there is refused. The data
depends on the parameters only, not on the number of processes. `datasets.load_dataset("data/listops")` reads it.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from essm_train.arguments import arg, parse_arguments
from essm_train.console import command

if TYPE_CHECKING:
    from essm_train.tasks.shards import RowGenerator


@dataclass
class _Where:
    output_dir: str | None = arg(None, "Where the shards go; by default data/ and the name of the task.")
    num_workers: int | None = arg(None, "Processes; all cores by default.")


def parse(argv: Sequence[str], tasks: Sequence[type[RowGenerator]]) -> tuple[RowGenerator, str, int]:
    """The generator, the folder and the number of processes. Raises ValueError for parameters that cannot work."""
    named = {task.name: task for task in tasks}
    if not argv or argv[0] not in named:
        raise ValueError(f"the first argument must be one of {', '.join(named)}, got {' '.join(argv[:1]) or 'none'}")
    cls: Any = named[argv[0]]
    unchecked = {"__doc__": cls.__doc__, "__post_init__": lambda self: None}
    both = dataclasses.make_dataclass("Data", (), bases=(_Where, cls), namespace=unchecked)
    args: Any = parse_arguments(both, argv[1:])
    generator = cls(**{field.name: getattr(args, field.name) for field in dataclasses.fields(cls)})
    workers = (os.cpu_count() or 1) if args.num_workers is None else args.num_workers
    return generator, args.output_dir or f"data/{cls.name}", workers


def make(argv: Sequence[str] | None, tasks: Sequence[type[RowGenerator]], description: str | None) -> None:
    """Make the data that the command line asks for."""
    from essm_train.tasks.shards import generate

    argv = sys.argv[1:] if argv is None else argv
    if argv in (["-h"], ["--help"]):
        print(description)
        sys.exit(0)
    print(f"{generate(*parse(argv, tasks))}: complete")


def main(argv: Sequence[str] | None = None) -> None:
    """Make ListOps, Pathfinder or Path-X."""
    from essm_train.tasks.listops import ListOps
    from essm_train.tasks.pathfinder import Pathfinder, PathX

    make(argv, (ListOps, Pathfinder, PathX), __doc__)


run = command(main)


if __name__ == "__main__":
    run()
