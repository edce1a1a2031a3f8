# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Every task as named arguments of a training script: where its data is, its shape, and three sizes of the run.

    essm-list-tasks --data_dir data                                   # all tasks, and which of their data is there
    essm-list-tasks smnist --data_dir data --scale small > smnist.yaml               # or my_task.yaml
    essm-train-classification smnist.yaml --output_dir runs/smnist

Data is looked for in one or several folders, separated as in PATH; by default those of the environment variable
ESSM_DATA, else `data`. Where it is absent, the error says what to fetch, from where, and where to put it.

`full` is the official data at the size of hub_configs/; `small` is a few minutes on one CPU thread: shorter sequences,
fewer updates, a narrower model; `medium` is about half an hour on two CPU cores. `note` says how the data differs from
the official set. What is measured on other data must not be called by the official name.
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass

import yaml

from essm_train.arguments import DATA_HELP, arg
from essm_train.console import command


def table(data_dir: str | None = None) -> str:
    """All tasks with what is there, and what to do about the rest."""
    from essm_train.tasks.catalog import SCALES, TASKS, data_folders, find_data, get_task

    lines = [f"data folders: {', '.join(map(str, data_folders(data_dir)))}", ""]
    lines.append(f"{'task':<11} {'full':<5} {'medium':<6} {'small':<6} {'metric':<10} {'command':<25} title")
    absent: list[str] = []
    for spec in map(get_task, TASKS):
        marks: list[str] = []
        for scale in SCALES:
            try:
                find_data(spec, scale, data_dir)
                marks.append("yes")
            except (FileNotFoundError, ValueError) as error:
                marks.append("-")
                if (text := str(error)) not in absent:
                    absent.append(text)
        found = f"{marks[0]:<5} {marks[1]:<6} {marks[2]:<6}"
        lines.append(f"{spec.name:<11} {found} {spec.metric:<10} {spec.command:<25} {spec.title}")
        lines.append(f"{'':<24} {spec.note}")
    return "\n".join([*lines, "", *absent])


@dataclass
class ListArguments:
    """Every task with its data; or the arguments of one task, as YAML."""

    task: str | None = arg(None, "Print the arguments of this task: a name of the table, or a .yaml file of your own.")
    data_dir: str | None = arg(None, DATA_HELP)
    scale: str = arg("full", "The size of the run: full, medium or small.")
    use_hub: bool = arg(False, "Read the data set on the Hub instead of files.")


def main(args: ListArguments) -> None:
    """Print them."""
    from essm_train.tasks.catalog import get_task, task_arguments

    if args.task is None:
        print(table(args.data_dir))
        return
    values = task_arguments(args.task, args.data_dir, args.scale, args.use_hub)
    spec = get_task(args.task)
    heading = f"{spec.title}, {args.scale}: {spec.command}\n{spec.note}"
    print(textwrap.indent(heading, "# ", lambda line: True))
    print(yaml.safe_dump(values, sort_keys=False), end="")


run = command(main, ListArguments, positional="task")


if __name__ == "__main__":
    run()
