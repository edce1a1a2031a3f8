# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Classification of whole sequences by the elastic block, the paper's block and peers of equal size, at every budget.

    python -m benchmarks.classification_tasks --data_dir data --processes 2
    python -m benchmarks.classification_tasks --tasks smnist listops:updates=600 --only elastic s4d --seeds 0
    python -m benchmarks.classification_tasks --table --runs_dir runs/classification_tasks

A run is what train_classification does at the same arguments on a task of essm-list-tasks. Elastic models train the
first half of the updates at the full budget and the rest with budget dropout. At a seed all models see the same samples
in the same order; all runs of a task are measured on the same test samples. The figure is the share of errors. The rate
of a model is chosen on the samples that are reported: a small advantage, the same for all. All models classify the mean
over positions; Llama's block sees all of them, the others are causal.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from essm_train.baselines.models import BaselineForSequenceClassification
from essm_train.data.classification import load_classification
from essm_train.data.rows import Split, collate
from essm_train.data.samples import MapSamples
from essm_train.measure.scoring import hold_out_samples
from essm_train.tasks.catalog import ROOT, make_arguments
from modeling_essm import ESSMForSequenceClassification

from . import common, sweeps
from .matched_models import TOLERANCE, Row, matched_config
from .sweeps import Run, Sweep

BUDGETS = (1, 2, 4, 8)  # and the capacity
METRIC = "error"
TEST_BATCH = 32

_PEER_RATES = (1.5e-3, 3e-3, 6e-3)
_ELASTIC = {"block": "elastic", "num_spectral_channels": 8}
ROWS: dict[str, Row] = {
    "paper": Row(2, {"num_spectral_channels": 16}, full_share=0.5),
    "elastic": Row(4, _ELASTIC, expansion=2.0, full_share=0.5, schedule="family"),
    "elastic, heads of 4 D": Row(4, _ELASTIC, expansion=4.0, full_share=0.5, schedule="family"),
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
    """

    max_length: int
    filter_length: int
    batch_size: int = 16
    updates: int = 0


# An update of tokens has about as many positions as one of digits, padding included.
TASKS: dict[str, Task] = {
    "smnist": Task(784, 1024),
    "image": Task(1024, 1024),
    "speech4": Task(98, 512),
    "text": Task(1024, 4096, batch_size=12),
    "listops": Task(2000, 2048, batch_size=8),
}


@dataclass(frozen=True)
class Settings:
    """What all runs of a table have in common.

    Attributes:
        data_dir: as of essm-list-tasks. test_samples: at most, drawn once for all runs.
        quick: short sequences and small batches, unless the name of a task says otherwise.
    """

    data_dir: str | None
    parameters: int
    updates: int
    test_samples: int = 2000
    quick: bool = False
    device: str = "cpu"

    def task(self, name: str) -> Task:
        return sweeps.choose_task(TASKS, name, **({"max_length": 64, "batch_size": 4} if self.quick else {}))

    def arguments(self, name: str, row: Row | None = None, rate: float = 0.0, seed: int = 0) -> Any:
        """A run as arguments of train_classification, without the model's sizes.

        Raises:
            ValueError: no such task. FileNotFoundError: its data is absent; says how to get it.
        """
        task = self.task(name)
        fields = sweeps.training_arguments(row or Row(1), task.updates or self.updates, rate, seed)
        fields |= {"max_length": task.max_length, "per_device_train_batch_size": task.batch_size}
        fields |= {"test_samples": self.test_samples, "dropout": 0.0}
        return make_arguments(name.partition(":")[0], self.data_dir, **fields)


class Loaded(NamedTuple):
    """Data of essm_train/data/classification.py, its test samples in memory by length, and what identifies them."""

    data: Any
    test: list[Any]
    identity: dict[str, Any]


@functools.cache
def load(settings: Settings, name: str) -> Loaded:
    """The data of a task, the same for every seed. Raises as `Settings.arguments` and `load_classification`."""
    data: Any = load_classification(settings.arguments(name))
    digest = hashlib.sha256()
    test = [data.test.samples[i] for i in range(len(data.test.samples))]
    for sample in test:
        digest.update(f"{sample.label} {sample.values.shape} ".encode() + np.ascontiguousarray(sample.values).tobytes())
    here = f"{ROOT}{os.sep}"  # of files of this repository only the place in it is kept
    identity = {"data": data.description.replace(here, ""), **data.digests, "test": digest.hexdigest()}
    return Loaded(data, sorted(test, key=lambda sample: len(sample.values)), identity)


def define(settings: Settings, run: Run) -> dict[str, Any]:
    config = model_config(ROWS[run.name], run.task, settings)
    task = {"name": run.task.partition(":")[0]} | dataclasses.asdict(settings.task(run.task))
    return {"task": task | load(settings, run.task).identity} | ROWS[run.name].definition(config)


def model_config(row: Row, name: str, settings: Settings) -> Any:
    """The row's configuration for the task, with as many parameters as the settings ask for."""
    data = load(settings, name).data
    fields = {"num_labels": data.num_labels, "classifier_pooling": "mean", **data.reader.config_fields}
    fields["problem_type"] = "single_label_classification"
    fields["filter_length" if row.peer is None else "max_position_embeddings"] = settings.task(name).filter_length
    return matched_config(row.with_fields(**fields), settings.parameters, class_of(row))


def class_of(row: Row) -> Any:
    return ESSMForSequenceClassification if row.peer is None else BaselineForSequenceClassification


def train_and_score(
    model: nn.Module, loaded: Loaded, args: Any, collated: Callable[[Any], dict[str, Tensor]], **options: Any
) -> tuple[dict[str, Any], Callable[..., dict[str, float]]]:
    """All updates, on samples in the order that train_classification has at that seed.

    Args:
        collated: makes a batch of samples. options: of `sweeps.train`.
    Returns:
        How the model was trained; and what gives the share of test samples that a model puts into a wrong class, at
        every budget.
    """
    source, size = MapSamples(loaded.data.source.samples, args.seed), args.per_device_train_batch_size
    device = next(model.parameters()).device

    def next_batch() -> dict[str, Tensor]:
        return {name: value.to(device) for name, value in collated(source.load(source.draw(size))).items()}

    split = Split(loaded.test, torch.tensor([sample.label for sample in loaded.test]), "test")
    held_out = hold_out_samples(split, collated, TEST_BATCH, loaded.data.description)

    def score(model: Any, budgets: Sequence[int] = (1,)) -> dict[str, float]:
        return {str(K): 1 - held_out.value(model.eval(), K) for K in budgets}

    return sweeps.train(model, next_batch, args, size, "samples", **options), score


def perform(settings: Settings, run: Run) -> dict[str, Any]:
    row, loaded = ROWS[run.name], load(settings, run.task)
    config = model_config(row, run.task, settings)
    torch.manual_seed(run.seed)
    model = class_of(row)(config).float().to(settings.device)
    args = settings.arguments(run.task, row, run.rate, run.seed)
    trained, score = train_and_score(model, loaded, args, functools.partial(collate, loaded.data.reader))
    return sweeps.measure(model, trained, score, BUDGETS, METRIC)


def main(argv: list[str] | None = None) -> dict[str, Any]:
    p = common.parser(__doc__, rounds=None)
    sweeps.add_data(p)
    p.add_argument("--parameters", type=common.positive, default=120_000, help=f"of every model, to {TOLERANCE:.0%}%")
    p.add_argument(
        "--test_samples", type=common.positive, default=2000, help="at most, the same for every run of a task"
    )
    sweeps.add_arguments(p, ROWS, "runs/classification_tasks", 300, TASKS)
    args = p.parse_args(argv)
    small: Any = {"parameters": 50_000, "updates": min(args.updates, 3), "test_samples": 40} if args.quick else {}
    sizes = {name: getattr(args, name) for name in ("parameters", "updates", "test_samples")} | small
    device = str(common.pick_device(args.device))
    settings = Settings(args.data_dir, **sizes, quick=args.quick, device=device)
    records, report = sweeps.run("classification_tasks", args, Sweep(settings, perform, define, METRIC))
    report["results"] = sweeps.summarise_all(records, METRIC)
    return common.finish(report, args)


if __name__ == "__main__":
    main()
