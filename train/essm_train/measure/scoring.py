# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""How a model is scored at a budget: nats of text, in total or by block, and predicted classes of samples.

Validation, sweeps, evaluation and calibration all score here. `total_nats` adds up in fp32 within a batch, in the order
that validations always had; `block_nats` in fp64: they agree to fp32 rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import Tensor
from transformers import PreTrainedModel

from essm_train.data.samples import even_shares
from essm_train.models import run_at_budget


def num_scored(labels: Tensor) -> int:
    """How many targets `total_nats` sums over."""
    return int((labels[:, 1:] != -100).sum())


def total_nats(model: PreTrainedModel, input_ids: Tensor, labels: Tensor, budget: int, batch_size: int) -> float:
    """Summed cross-entropy of all scored targets, in nats; arguments as in `sweep_budgets`."""
    total = 0.0  # not sum(), whose rounding is another from Python 3.12 on
    for nats in _cross_entropies(model, input_ids, labels, budget, batch_size, "sum"):
        total += nats.item()
    return total


def block_nats(model: PreTrainedModel, input_ids: Tensor, labels: Tensor, budget: int, batch_size: int) -> Tensor:
    """(n,) float64: the summed cross-entropy of each block, on the CPU; arguments as in `sweep_budgets`."""
    width = input_ids.shape[1] - 1
    batches = _cross_entropies(model, input_ids, labels, budget, batch_size, "none")
    return torch.cat([nats.view(-1, width).double().sum(1).cpu() for nats in batches])


@torch.no_grad()
def _cross_entropies(
    model: PreTrainedModel, input_ids: Tensor, labels: Tensor, budget: int, batch_size: int, reduction: str
) -> Iterator[Tensor]:
    """The loss of each batch: () for reduction "sum", (b * (L - 1),) fp32 for "none", 0 where unscored."""
    for start in range(0, len(input_ids), batch_size):
        rows = slice(start, start + batch_size)
        logits = run_at_budget(model, {"input_ids": input_ids[rows].to(model.device)}, budget).logits
        targets = labels[rows, 1:].to(logits.device)
        # Flat: of a (B, V, L) input CUDA has no deterministic loss.
        yield F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), targets.flatten(), reduction=reduction)


class Predictor:
    """Predicted classes of held-out samples.

    Args:
        collate: samples to the model's inputs and labels, as CPU tensors. batch_size: samples per forward pass.
        accelerator: shares the samples out among its processes, by default all there are. Every process makes the same
            number of forward passes, as sharded weights need, and gets all predictions.
    """

    def __init__(
        self, collate: Callable[[list[Any]], dict[str, Tensor]], batch_size: int, accelerator: Accelerator | None = None
    ):
        self.accelerator, self.collate, self.batch_size = accelerator or Accelerator(), collate, batch_size

    def batch(self, samples: Sequence[Any], start: int = 0) -> dict[str, Tensor]:
        """One batch of inputs, without labels, on the CPU."""
        rows = range(start, min(start + self.batch_size, len(samples)))
        batch = self.collate([samples[row] for row in rows])
        return {name: value for name, value in batch.items() if name != "labels"}

    @torch.no_grad()
    def __call__(self, model: PreTrainedModel, samples: Sequence[Any], budget: int) -> Tensor:
        """(n,) int64 classes, on the CPU."""
        starts = range(0, len(samples), self.batch_size)
        found = torch.zeros(len(samples), dtype=torch.int64, device=model.device)
        for i in even_shares(len(starts), self.accelerator.process_index, self.accelerator.num_processes):
            start = starts[i or 0]
            batch = {name: value.to(model.device) for name, value in self.batch(samples, start).items()}
            logits = run_at_budget(model, batch, budget).logits
            if i is not None:
                found[start : start + len(logits)] = logits.argmax(-1) + 1  # 0 where another process predicts
        return self.accelerator.reduce(found, "sum").cpu() - 1
