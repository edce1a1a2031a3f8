# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""A tiny classification run: its data, its command line, and what it left."""

import json
from pathlib import Path

import datasets
import numpy as np
import torch
from helpers import ROOT
from training_run import options

from essm_train.arguments import parse_arguments
from essm_train.data.arguments import ClassificationArguments
from essm_train.data.classification import load_classification
from essm_train.run.checkpoints import list_checkpoints
from essm_train.run.classifier import train_classifier

TRAIN = ROOT / "train"


# Eight updates, checkpoints after 3, 6 and 8; dropout makes the random states matter.
TINY = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_spectral_channels": 8,
    "filter_length": 512,
    "max_length": 40,
    "per_device_train_batch_size": 4,
    "eval_batch_size": 8,
    "max_steps": 8,
    "warmup_steps": 2,
    "learning_rate": 0.01,
    "dropout": 0.1,
    "eval_steps": 4,
    "save_steps": 3,
    "cpu_threads": 1,  # more would wait for each other
}

NO_SIZES = dict.fromkeys(("hidden_size", "num_hidden_layers", "num_spectral_channels", "filter_length", "max_length"))
ONCE = NO_SIZES | {"max_steps": 1, "learning_rate": 0.0, "dropout": None}  # one update that changes nothing


def texts(count: int, seed: int) -> dict[str, list]:
    """Of class 1 if three quarters of the bytes are "a", of class 0 if a quarter is; 20 to 48 bytes."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(2, size=count)
    rows = ["".join(rng.choice(["a", "ü"], rng.integers(16, 40), p=[p, 1 - p])) for p in 0.25 + 0.5 * labels]
    return {"text": rows, "label": labels.tolist()}


def signals(count: int, seed: int) -> dict[str, list]:
    """24 numbers in [0, 255] about one of three means."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(3, size=count)
    return {"pixels": (rng.integers(0, 90, (count, 24)) + 80 * labels[:, None]).tolist(), "label": labels.tolist()}


PIXELS = {"pixels": datasets.List(datasets.Value("uint8")), "label": datasets.Value("int64")}


def write(folder: Path, name: str, columns: dict[str, list], features: dict | None = None) -> str:
    """A parquet, jsonl or csv file; its path."""
    path = folder / name
    table = datasets.Dataset.from_dict(columns, features=None if features is None else datasets.Features(features))
    {".parquet": table.to_parquet, ".jsonl": table.to_json, ".csv": table.to_csv}[path.suffix](path)
    return str(path)


def command_line(values: dict) -> list[str]:
    return options(ClassificationArguments, values)


def train(arguments: list[str]) -> None:
    train_classifier(parse_arguments(ClassificationArguments, arguments))


RUNS = {"pixels": {"kind": "pixels"}, "streamed text": {"kind": "text", "streaming": True}}


def final_tensors(output_dir: Path) -> list[torch.Tensor]:
    """Weights and optimizer moments of the last checkpoint."""
    checkpoint = list_checkpoints(output_dir)[-1]
    weights = torch.load(checkpoint / "pytorch_model.bin")
    moments = torch.load(checkpoint / "optimizer.bin")["state"]
    return [*weights.values(), *(t for state in moments.values() for t in state.values())]


def same(a: Path, b: Path) -> bool:
    return all(torch.equal(x, y) for x, y in zip(final_tensors(a), final_tensors(b), strict=True))


def read(path: Path) -> dict:
    return json.loads(path.read_text())


def load(arguments: list[str]):
    return load_classification(parse_arguments(ClassificationArguments, arguments))
