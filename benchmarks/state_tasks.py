# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""The tasks on which diagonal SSMs are pruned and truncated: those of `benchmarks.classification_tasks` made small.

Images are averaged over squares, and texts are read as hashed words instead of byte by byte: a small model learns
nothing from bytes so soon.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from essm_train.data.rows import collate
from modeling_essm.companions import DiagonalSSMConfig, DiagonalSSMForSequenceClassification

from . import classification_tasks
from .sweeps import Run

METRIC = "error"


@dataclass(frozen=True)
class Task:
    """A task of the catalogue; pixels averaged over `pool` x `pool`, or texts as ids of `words` hashed words."""

    name: str
    pool: int = 1
    words: int = 0


TASKS = {
    "digits": Task("smnist", 2),
    "pictures": Task("image", 2),
    "reviews": Task("text:max_length=512", words=4096),
    "words": Task("speech4"),
}


@dataclass(frozen=True)
class Settings:
    data_dir: str | None
    updates: int
    hidden_size: int
    num_hidden_layers: int
    test_samples: int
    state_size: int = 0
    warmup: int = 50
    quick: bool = False
    device: str = "cpu"

    def data(self) -> classification_tasks.Settings:
        sizes = (0, self.updates, self.test_samples)
        return classification_tasks.Settings(self.data_dir, *sizes, quick=self.quick, device=self.device)


def identity(settings: Settings, run: Run) -> dict[str, Any]:
    task = TASKS[run.task]
    return dataclasses.asdict(task) | classification_tasks.load(settings.data(), task.name).identity


def batch_of(reader: Any, task: Task, samples: Sequence[Any]) -> dict[str, Tensor]:
    """Inputs and labels; of pooled images a row of pixels is a sequence (B, (side / pool)^2, 1)."""
    batch, pool = collate(reader, list(samples)), task.pool
    if task.words:
        rows = [word_ids(sample.values, task.words) for sample in samples]
        ids = nn.utils.rnn.pad_sequence(rows, batch_first=True)  # with 0, which is no word
        return {"labels": batch["labels"], "input_ids": ids, "attention_mask": (ids > 0).long()}
    if pool > 1 and (side := round(batch["input_features"].shape[1] ** 0.5)) % pool == 0:
        pixels = batch["input_features"].transpose(1, 2).unflatten(2, (side, side))
        return {"labels": batch["labels"], "input_features": F.avg_pool2d(pixels, pool).flatten(2).transpose(1, 2)}
    return batch


def word_ids(text: Any, count: int) -> Tensor:
    """Ids in [1, count) of the words of a text that is given as its bytes, the same in every process; at least one."""
    words = re.findall(rb"[a-z']+", bytes(byte for byte in text if byte < 256).lower()) or [b""]
    return torch.tensor([1 + zlib.crc32(word) % (count - 1) for word in words])


def trained(
    settings: Settings, run: Run, fields: dict[str, Any], after_step: Callable[..., object] | None = None
) -> tuple[Any, dict[str, Any], Callable[[nn.Module], float]]:
    """Train a new diagonal SSM with these fields of its configuration.

    Args:
        after_step: called with the model, the optimizer and the update just done.
    Returns:
        the model, how it was trained and its error, and what scores a model on the test samples.
    """
    task = TASKS[run.task]
    loaded = classification_tasks.load(settings.data(), task.name)
    args = settings.data().arguments(task.name, rate=run.rate, seed=run.seed)
    args.warmup_steps = settings.warmup
    fields = {"num_labels": loaded.data.num_labels, "problem_type": "single_label_classification"} | fields
    fields |= loaded.data.reader.config_fields | ({"vocab_size": task.words, "pad_token_id": 0} if task.words else {})
    fields |= {"hidden_size": settings.hidden_size, "num_hidden_layers": settings.num_hidden_layers}
    torch.manual_seed(run.seed)
    model = DiagonalSSMForSequenceClassification(DiagonalSSMConfig(**fields)).float().to(settings.device)
    hook = {} if after_step is None else {"after_step": functools.partial(after_step, model)}
    collated = functools.partial(batch_of, loaded.data.reader, task)
    record = {"parameters": model.num_parameters()}  # before it shrinks
    found, score = classification_tasks.train_and_score(model, loaded, args, collated, **hook)
    record |= found
    return model, record | {METRIC: None if record["diverged"] else score(model)}, lambda model: score(model)["1"]
