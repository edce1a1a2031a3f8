# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Experiments: variants of tasks and baselines beside them, of recipes/experiments/ or of a .yaml file of your own.

question: What is the gate worth?
task: novels                                   # of every row that names no other
rows:
  ES-SSM: {}
  without gate: {arguments: {gating: none}}    # instead of the task's
  my text: {task: my_task.yaml}                # beside this file
"""

import functools
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from huggingface_hub.dataclasses import strict

from essm_train.recipes.reading import read_recipe, recipe_names, recipe_path
from essm_train.tasks.catalog import check_arguments, get_task

EXPERIMENTS = recipe_names("experiments")


@strict
@dataclass
class Row:
    """A run of every seed.

    Attributes:
        task: of TASKS, or the path of a .yaml file. arguments: in place of the task's.
        paper: keys that lead to the paper's figure in the experiment's table of recipes/paper_figures.json.
        series: rows of one series are models of one budget each, and together one more line, K by K.
    """

    task: str = ""
    arguments: dict[str, Any] = field(default_factory=dict)
    paper: list[str] = field(default_factory=list)
    series: str = ""

    @property
    def task_name(self) -> str:
        return Path(self.task).stem


@strict
@dataclass
class Experiment:
    """A table and its figure. The keys of its file are these fields, without the name.

    Attributes:
        name: that of the file. question: what it answers. rows: by name. task: of rows that name none.
        title: heads the table.
        paper: a table of recipes/paper_figures.json. paper_data: what it was measured on, where that is not ours.
    """

    name: str
    question: str
    rows: dict[str, Row]
    task: str = ""
    title: str = ""
    paper: str = ""
    paper_data: str = ""

    def __post_init__(self) -> None:
        if not self.rows:
            raise ValueError("rows must name at least one row")


def get_experiment(name: str) -> Experiment:
    """An experiment of EXPERIMENTS or of a .yaml file; tasks and files that it names lie beside it.

    Raises:
        ValueError: an unknown task or argument, and as `read_recipe`. OSError: a file cannot be read.
    """
    path, experiment = recipe_path("experiments", name), read_recipe("experiments", name, Experiment, {"rows": Row})
    script_of = functools.cache(lambda task: get_task(task).script)
    for key, row in experiment.rows.items():
        where = f"{path}: rows: {key}"
        row.task = row.task or experiment.task
        if not row.task:
            raise ValueError(f"{where}: names no task, and neither does the experiment")
        if row.task.endswith((".yaml", ".yml")):
            row.task = str(path.parent / row.task)
        try:
            script = script_of(row.task)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error
        check_arguments(script, row.arguments, f"{where}: arguments")
        if own := {"output_dir", "seed", "cpu_threads"} & row.arguments.keys():
            raise ValueError(f"{where}: arguments: {', '.join(sorted(own))}: only the command line sets that")
    return experiment
