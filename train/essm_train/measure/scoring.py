# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""How a model is scored at a budget: bits of blocks of text, and predicted classes of samples.

Validation, sweeps, evaluation, pruning and calibration all score here. A metric is a ratio of sums over held-out
blocks or samples: bits over bytes, or hits over samples.

Context rule of language models: the text is cut into blocks that share one token with the next. The first token of a
block is context only; every other byte is predicted once, from the bytes before it in its own block. Special tokens
are not scored. A model that is uniform over 256 symbols gets 8 bits per byte.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from accelerate import PartialState
from accelerate.utils import reduce
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedModel

from essm_train.data.blocks import text_labels
from essm_train.data.rows import Split
from essm_train.data.samples import even_shares
from essm_train.models import run_at_budget


class Metric(NamedTuple):
    """What models are judged by."""

    name: str
    higher_is_better: bool

    def compute(self, totals: Tensor, weights: Tensor) -> float:
        """Of two (n,) columns, by the `evaluate` library: nothing is fetched."""
        return float(_ratio().compute(totals=totals.tolist(), weights=weights.tolist())["ratio"])


@functools.cache
def _ratio() -> Any:
    from essm_train.measure.ratio import Ratio

    return Ratio(keep_in_memory=True)


BITS_PER_BYTE = Metric("bits_per_byte", higher_is_better=False)
ACCURACY = Metric("accuracy", higher_is_better=True)


@dataclass(frozen=True)
class HeldOut:
    """Held-out data of one kind.

    Attributes:
        score: (model, K) to the two (n,) columns of the metric, float64, one entry per block or sample.
        inputs: one batch of the model's inputs, on the CPU. longest: see `length`. description: for people.
        auto_class: that loads models of this kind.
    """

    metric: Metric
    score: Callable[[PreTrainedModel, int], tuple[Tensor, Tensor]]
    inputs: dict[str, Tensor]
    longest: Callable[[], int]
    description: str
    auto_class: Any

    @functools.cached_property
    def length(self) -> int:
        """Positions of the longest block or sample, all of which are read for it, once."""
        return self.longest()

    def value(self, model: PreTrainedModel, budget: int, finite: bool = True) -> float:
        """The metric at that budget. Raises ValueError if it must be finite and is not."""
        return self.metric_of(*self.score(model, budget), budget, finite)

    def metric_of(self, totals: Tensor, weights: Tensor, budget: int, finite: bool = True) -> float:
        """The same of columns that `score` gave."""
        value = self.metric.compute(totals, weights)
        if finite and not math.isfinite(value):
            raise ValueError(f"{self.metric.name} of {self.description} at K={budget} must be finite, got {value}")
        return value


def hold_out_blocks(
    input_ids: Tensor, special_ids: Sequence[int], bytes_per_token: float, batch_size: int, description: str
) -> HeldOut:
    """Bits and bytes of blocks (n, L), for language models; processes share them out, and every one must score.

    Args:
        special_ids: tokens that are not scored. bytes_per_token: what every other one stands for.
    """
    labels = text_labels(input_ids, special_ids)
    num_bytes = (labels[:, 1:] != -100).sum(1).double() * bytes_per_token

    def score(model: PreTrainedModel, K: int) -> tuple[Tensor, Tensor]:
        def nats(rows: slice) -> Tensor:
            return block_nats(model, input_ids[rows], labels[rows], K, batch_size)

        return _shared_out(nats, len(input_ids), batch_size, model.device) / math.log(2), num_bytes

    description = f"{description}; {len(input_ids)} blocks of {input_ids.shape[1]} tokens"
    inputs = {"input_ids": input_ids[:batch_size]}
    return HeldOut(BITS_PER_BYTE, score, inputs, lambda: input_ids.shape[1], description, AutoModelForCausalLM)


def hold_out_samples(
    split: Split,
    collate: Callable[[list[Any]], dict[str, Tensor]],
    batch_size: int,
    description: str,
) -> HeldOut:
    """Hits among samples, for classifiers; processes share them out, and every one must score.

    Args:
        collate: samples to the model's inputs and labels, as CPU tensors. batch_size: samples per forward pass.
    """
    samples = split.samples

    def inputs(rows: slice) -> dict[str, Tensor]:
        batch = collate([samples[row] for row in range(len(samples))[rows]])
        return {name: value for name, value in batch.items() if name != "labels"}

    @torch.no_grad()
    def score(model: PreTrainedModel, K: int) -> tuple[Tensor, Tensor]:
        def hits(rows: slice) -> Tensor:
            batch = {name: value.to(model.device) for name, value in inputs(rows).items()}
            logits = run_at_budget(model, batch, K).logits
            hit = logits.argmax(-1) == split.labels[rows].to(logits.device)
            return hit.float().where(logits.isfinite().all(-1), math.nan)

        found = _shared_out(hits, len(samples), batch_size, model.device)
        return found, torch.ones_like(found)

    def longest() -> int:
        return max(len(part) for sample in samples for part in sample[:-1])

    description = f"{description}; {split.name}"
    first = inputs(slice(batch_size))
    return HeldOut(ACCURACY, score, first, longest, description, AutoModelForSequenceClassification)


def _shared_out(score: Callable[[slice], Tensor], count: int, batch_size: int, device: torch.device) -> Tensor:
    """(count,) float64 on the CPU: what `score` gives for the rows of each batch, on every process.

    Each process makes the same number of calls, as sharded weights need.
    """
    run, batches = PartialState(), [slice(first, first + batch_size) for first in range(0, count, batch_size)]
    found = torch.zeros(count, dtype=torch.float64)
    mine = [(i, score(batches[i or 0])) for i in even_shares(len(batches), run.process_index, run.num_processes)]
    for i, values in mine:  # nothing above waits for the device
        if i is not None:  # else it only kept step with the other processes
            found[batches[i]] = values.cpu().double()
    return found if run.num_processes == 1 else reduce(found.to(device), "sum").cpu()


@torch.no_grad()
def block_nats(model: PreTrainedModel, input_ids: Tensor, labels: Tensor, budget: int, batch_size: int) -> Tensor:
    """(n,) float64: the summed cross-entropy of each block, on the CPU.

    Args:
        input_ids: (n, L) int64 blocks. labels: (n, L), the same before shifting, -100 where a token is not scored.
        batch_size: blocks per forward pass.
    """
    found = []
    for ids, targets in zip(input_ids.split(batch_size), labels.split(batch_size)):
        logits = run_at_budget(model, {"input_ids": ids.to(model.device)}, budget).logits
        # Flat, because CUDA has no deterministic loss of a (B, V, L) input.
        flat = targets[:, 1:].to(logits.device).flatten()
        nats = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), flat, reduction="none")
        found.append(nats.view(len(ids), -1).double().sum(1).cpu())
    return torch.cat(found)
