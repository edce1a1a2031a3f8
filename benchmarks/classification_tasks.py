# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Classification of whole sequences by the gated block, the paper's block and peers of equal size, at every budget.

    python -m benchmarks.classification_tasks --data_dir data --processes 2
    python -m benchmarks.classification_tasks --tasks smnist listops:updates=600 --only gated s4d --seeds 0
    python -m benchmarks.classification_tasks --table --runs_dir runs/classification_tasks

The tasks are those of train/list_tasks.py, read as train_classification.py reads them, at full length: sequential
MNIST, grey CIFAR, four spoken words as log-mel frames, the first 1,024 bytes of IMDb reviews, and ListOps. A run is
what train_classification.py does at the same arguments: AdamW, 50 updates of warm-up, a cosine; elastic models train
the first half of the updates at the full budget and the rest with budget dropout. At a seed all models see the same
samples in the same order; all runs of a task are measured on the same test samples. The figure is the share of errors,
tables show accuracy. The rate of a model is chosen on the samples that are reported: a small advantage, the same for
all. All models classify the mean over positions; Llama's block sees all of them, the others are causal.
A run is a task, a model, a learning rate and a seed: one JSON file in runs_dir; a sweep that was killed goes on when it
is started again.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from modeling_essm import ESSMConfig, ESSMForSequenceClassification

from . import common, sweep_tables, sweeps
from .matched_models import TOLERANCE, Row, definition_of, matched_config
from .sweeps import Run

BUDGETS = (2, 4, 8)  # and the capacity
METRIC = "error"
TEST_BATCH = 32

_PEER_RATES = (1.5e-3, 3e-3, 6e-3)
_GATED = {"block": "gated", "num_heads": 4, "mixing_size": 1, "num_spectral_channels": 16}
_SCALED = _GATED | {"embedding_initializer_range": 0.1}
ROWS: dict[str, Row] = {
    "paper": Row(2, {"num_spectral_channels": 16}, full_share=0.5),
    "gated": Row(4, _SCALED, expansion=2.0, full_share=0.5),
    "gated, exponent 1/4": Row(4, _SCALED | {"scaling_exponent": 1 / 4}, expansion=2.0, full_share=0.5),
    "gated, exponent 1/16": Row(4, _SCALED | {"scaling_exponent": 1 / 16}, expansion=2.0, full_share=0.5),
    "gated, FFN": Row(2, _SCALED, 2.0, 8 / 3, full_share=0.5),
    "llama": Row(2, peer="transformer", hidden_size=72, rates=_PEER_RATES),
    # The library's own scale of new weights for Mamba-2.
    "mamba2": Row(2, {"initializer_range": 0.1}, peer="mamba2", hidden_size=88, rates=_PEER_RATES),
    "s4d": Row(4, peer="s4d", hidden_size=48, rates=_PEER_RATES),
}


@dataclass(frozen=True)
class Task:
    """How a task of the catalogue is run here.

    Attributes:
        max_length: positions read of a sample. batch_size: samples of an update.
        updates: instead of those of the table; 0 is none of its own.
    Raises:
        ValueError: a number that cannot be.
    """

    max_length: int
    batch_size: int = 16
    updates: int = 0

    def __post_init__(self) -> None:
        for name, least in (("max_length", 1), ("batch_size", 1), ("updates", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} of a task must be at least {least}, got {getattr(self, name)}")


# An update of tokens has about as many positions as one of digits, padding included.
TASKS: dict[str, Task] = {
    "smnist": Task(784),
    "image": Task(1024),
    "speech4": Task(98),
    "text": Task(1024, batch_size=12),
    "listops": Task(2000, batch_size=8),
}


@dataclass(frozen=True)
class Settings:
    """What all runs of a table have in common.

    Attributes:
        data_dir: as of train/list_tasks.py. test_samples: at most, drawn once for all runs.
        quick: short sequences and small batches, see `task`.
    """

    data_dir: str | None
    parameters: int
    updates: int
    test_samples: int = 2000
    quick: bool = False
    device: str = "cpu"

    def task(self, name: str) -> Task:
        """A short one with the quick settings, unless the name says otherwise."""
        return sweeps.choose_task(TASKS, name, **({"max_length": 64, "batch_size": 4} if self.quick else {}))

    def values(self) -> dict[str, Any]:
        """As JSON gives them back; in which folder the data lies is not part of them."""
        return {k: v for k, v in json.loads(json.dumps(dataclasses.asdict(self))).items() if k != "data_dir"}

    def arguments(self, name: str, row: Row | None = None, rate: float = 0.0, seed: int = 0) -> Any:
        """A run as arguments of train_classification.py, without the model's sizes.

        Raises:
            ValueError: no such task. FileNotFoundError: its data is absent; says how to get it.
        """
        from essm_train.tasks.catalog import make_arguments

        task = self.task(name)
        return make_arguments(
            name.partition(":")[0],
            self.data_dir,
            max_length=task.max_length,
            per_device_train_batch_size=task.batch_size,
            test_samples=self.test_samples,
            dropout=0.0,
            **sweeps.training_arguments(row or Row(1), task.updates or self.updates, rate, seed),
        )


class Loaded(NamedTuple):
    """Data of essm_train/data/classification.py, its test samples in memory by length, and what identifies them."""

    data: Any
    test: list[Any]
    identity: dict[str, Any]


@functools.cache
def load(settings: Settings, name: str) -> Loaded:
    """The data of a task, the same for every seed. Raises as `Settings.arguments` and `load_classification`."""
    from essm_train.data.classification import load_classification
    from essm_train.tasks.catalog import ROOT

    data = load_classification(settings.arguments(name))
    digest = hashlib.sha256()
    test = [data.test.samples[i] for i in range(len(data.test.samples))]
    for sample in test:
        digest.update(f"{sample.label} {sample.values.shape} ".encode() + np.ascontiguousarray(sample.values).tobytes())
    here = f"{ROOT}{os.sep}"  # of files of this repository only the place in it is kept
    identity = {"data": data.description.replace(here, ""), **data.digests}
    identity["sha256 of the test samples"] = digest.hexdigest()
    return Loaded(data, sorted(test, key=lambda sample: len(sample.values)), identity)


def definition(settings: Settings, run: Run) -> dict[str, Any]:
    """What makes a task, with its data, and a row, but for the rates."""
    name = run.task or ""
    task = {"name": name.partition(":")[0]} | dataclasses.asdict(settings.task(name)) | load(settings, name).identity
    return {"task": task} | definition_of(ROWS[run.name])


# ---------------------------------------------------------------------------------------------------------------------
# One run.


def model_config(row: Row, name: str, settings: Settings) -> Any:
    """The row's configuration for the task, with as many parameters as the settings ask for.

    Raises:
        ValueError: there is none.
    """
    from essm_train.baselines.models import BaselineForSequenceClassification

    data, args = load(settings, name).data, settings.arguments(name)
    fields = {"num_labels": data.num_labels, "classifier_pooling": args.classifier_pooling, **data.reader.config_fields}
    fields["problem_type"] = "single_label_classification"
    fields["filter_length" if row.peer is None else "max_position_embeddings"] = args.filter_length
    row = dataclasses.replace(row, fields=row.fields | fields)
    model_class = ESSMForSequenceClassification if row.peer is None else BaselineForSequenceClassification
    return matched_config(row, settings.parameters, model_class)


def make_model(config: Any) -> nn.Module:
    """A new classifier in fp32."""
    from essm_train.baselines.models import BaselineForSequenceClassification

    elastic = isinstance(config, ESSMConfig)
    return (ESSMForSequenceClassification(config) if elastic else BaselineForSequenceClassification(config)).float()


def train(model: nn.Module, data: Any, args: Any) -> dict[str, Any]:
    """All updates, on samples in the order that train_classification.py has at that seed."""
    from essm_train.data.rows import collate
    from essm_train.data.samples import MapSamples
    from essm_train.models import run_at_budget

    source = MapSamples(data.source.samples, args.seed)
    device = next(model.parameters()).device

    def next_forward() -> Callable[[int], Any]:
        batch = collate(data.reader, source.load(source.draw(args.per_device_train_batch_size)))
        return functools.partial(run_at_budget, model, {name: value.to(device) for name, value in batch.items()})

    return sweeps.train(model, next_forward, args, args.per_device_train_batch_size, "samples")


@torch.inference_mode()
def score(model: nn.Module, reader: Any, samples: Sequence[Any], budgets: Sequence[int]) -> dict[str, float]:
    """The share of samples that are put into a wrong class, at every budget."""
    from essm_train.data.rows import collate
    from essm_train.models import run_at_budget

    wrong = dict.fromkeys(budgets, 0)
    device = next(model.parameters()).device
    model.eval()
    for start in range(0, len(samples), TEST_BATCH):
        batch = collate(reader, samples[start : start + TEST_BATCH])
        batch = {name: value.to(device) for name, value in batch.items()}
        labels = batch.pop("labels")
        for K in budgets:
            wrong[K] += int((run_at_budget(model, batch, K).logits.argmax(-1) != labels).sum())
    return {str(K): count / len(samples) for K, count in wrong.items()}


def perform(settings: Settings, run: Run, path: Path) -> dict[str, Any]:
    """Train on one thread, measure, write the file in one move, return what it holds."""
    name, row = run.task or "", ROWS[run.name]
    data, test, _ = load(settings, name)

    def fit(model: nn.Module) -> dict[str, Any]:
        return {"metric": "accuracy"} | train(model, data, settings.arguments(name, row, run.rate, run.seed))

    def measured(model: nn.Module, budgets: Sequence[int]) -> dict[str, float]:
        return score(model, data.reader, test, budgets)

    wanted = {"settings": settings.values(), "definition": definition(settings, run)}
    config = model_config(row, name, settings)
    return sweeps.measure(run, path, wanted, config, make_model, fit, measured, BUDGETS, METRIC)


# ---------------------------------------------------------------------------------------------------------------------
# All runs.


def sweep(settings: Settings, runs: Sequence[Run], folder: Path, processes: int) -> None:
    """Perform the runs that are not there yet.

    Raises:
        ValueError: a run was found that has other settings or data, or a task or a model cannot be made.
        FileNotFoundError: data is absent. All before any work.
    """
    for task in dict.fromkeys(run.task or "" for run in runs):
        settings.arguments(task)  # of all, before the first is read
    for task, name in dict.fromkeys((run.task or "", run.name) for run in runs):
        model_config(ROWS[name], task, settings)

    def wanted(run: Run) -> dict[str, Any]:
        return settings.values() | {"definition": definition(settings, run)}

    sweeps.sweep(runs, folder, processes, functools.partial(perform, settings), wanted, METRIC)


def targets_of(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The goal, where both its models are: on sequential MNIST the gated block is at least as good as S4D."""
    accuracy = {
        (r["task"], r["model"]): 1 - sweep_tables.at_full_budget(r, METRIC)
        for r in results
        if r["best_rate"] is not None
    }
    return [
        common.target(f"{task}: accuracy of the gated block against S4D's", accuracy[task, "gated"], least=peer)
        for (task, model), peer in accuracy.items()
        if model == "s4d" and task.partition(":")[0] == "smnist" and (task, "gated") in accuracy
    ]


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Perform what is missing, then print the tables and write them, with every rate and the spread over seeds."""
    p = common.parser(__doc__)
    p.add_argument(
        "--tasks", nargs="+", default=[*TASKS], help=f"out of {[*TASKS]}; parameters as in listops:updates=600"
    )
    p.add_argument("--data_dir", help="data folders, separated as in PATH; by default $ESSM_DATA, or data")
    p.add_argument("--parameters", type=int, default=120_000, help=f"of every model, to {TOLERANCE:.0%}%")
    p.add_argument("--test_samples", type=int, default=2000, help="at most, the same for every run of a task")
    sweeps.add_arguments(p, ROWS, "runs/classification_tasks", updates=300)
    args = p.parse_args(argv)
    sweeps.check_arguments(p, args, "parameters", "test_samples")
    names = args.only or [*ROWS]
    if not args.table:
        device = str(common.pick_device(args.device))
        settings = Settings(args.data_dir, args.parameters, args.updates, args.test_samples, device=device)
        if args.quick:
            small = {"parameters": 50_000, "updates": min(args.updates, 3), "test_samples": min(args.test_samples, 40)}
            settings = dataclasses.replace(settings, **small, quick=True)
        sweep(settings, sweeps.runs_of(ROWS, names, args, args.tasks), args.runs_dir, args.processes)
    records = sweeps.collect_tasks(args.runs_dir, names, args.tasks)
    device, report = common.start("classification_tasks", args, **records[0]["settings"] | {"quick": args.quick})
    report["results"] = sweep_tables.summarise_tasks(records, METRIC)
    sweep_tables.print_tables(report["results"], METRIC, "samples")
    report["targets"] = targets_of(report["results"])
    return common.finish(report, args, device)


if __name__ == "__main__":
    main()
