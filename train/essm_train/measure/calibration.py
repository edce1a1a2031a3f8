# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""A model's budget profile: quality at every budget with its errors, time and memory on this device.

The drop against the full budget is given with its standard error over blocks or samples. Times are medians over rounds
in which budgets and batch sizes take turns, memory is what a call needs beside the weights; the inputs are random.
"""

from __future__ import annotations

import functools
import math
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

from essm_train.data.blocks import text_labels
from essm_train.data.readers import Reader
from essm_train.data.rows import LabelledData, Split, collate
from essm_train.measure.metric import ACCURACY, BITS_PER_BYTE, Metric
from essm_train.measure.scoring import Predictor, block_nats
from essm_train.measure.timing import check_peak_memory, decoder, paired, peak_memory
from modeling_essm import ESSMPairConfig
from modeling_essm.budgets.profile import DeviceProfile, Measurement, Quality, device_name

Case = tuple[int, int]  # batch size, budget


@dataclass(frozen=True)
class HeldOut:
    """Held-out data of one kind.

    Attributes:
        score: (model, K) to two (n,) float64 tensors, one entry per block or sample; the metric is the ratio of their
            sums.
        length: positions of the longest. description: for people.
    """

    metric: Metric
    score: Callable[[PreTrainedModel, int], tuple[Tensor, Tensor]]
    length: int
    description: str


def hold_out_blocks(
    input_ids: Tensor, special_ids: Sequence[int], bytes_per_token: float, batch_size: int, description: str
) -> HeldOut:
    """Bits and bytes of each block (n, L); special tokens are not scored."""
    labels = text_labels(input_ids, special_ids)
    num_bytes = (labels[:, 1:] != -100).sum(1).double() * bytes_per_token

    def score(model: PreTrainedModel, K: int) -> tuple[Tensor, Tensor]:
        return block_nats(model, input_ids, labels, K, batch_size) / math.log(2), num_bytes

    description = f"{description}; {len(input_ids)} blocks of {input_ids.shape[1]} tokens"
    return HeldOut(BITS_PER_BYTE, score, input_ids.shape[1], description)


def hold_out_samples(reader: Reader, split: Split, batch_size: int, description: str) -> HeldOut:
    """Hits among the samples of a split."""
    predict = Predictor(lambda samples: collate(reader, samples), batch_size)
    length = max(len(sample.values) for sample in split.samples)
    return _hits(predict, split, length, f"{description}; {len(split.samples):,} samples: {split.name}")


def hold_out_pairs(data: LabelledData, batch_size: int, description: str) -> HeldOut:
    """Hits among the held-out pairs of documents."""
    predict, split = Predictor(lambda samples: data.collate(samples, None), batch_size), data.held_out
    length = max(len(text) for pair in split.samples for text in pair[:2])
    return _hits(predict, split, length, f"{description}; {split.name}")


def _hits(predict: Predictor, split: Split, length: int, description: str) -> HeldOut:

    def score(model: PreTrainedModel, K: int) -> tuple[Tensor, Tensor]:
        hits = (predict(model, split.samples, K) == split.labels).double()
        return hits, torch.ones_like(hits)

    return HeldOut(ACCURACY, score, length, description)


def measure_quality(model: PreTrainedModel, held_out: HeldOut, budgets: Sequence[int]) -> Quality:
    """The metric at every budget and its standard errors, those of a ratio of sums."""
    values, influences = [], []  # of each sample on the ratio
    for K in budgets:
        print(f"quality: K={K}", flush=True)
        totals, weights = held_out.score(model, K)
        value = float(totals.sum() / weights.sum())
        values.append(value)
        influences.append((totals - value * weights) / weights.sum())
    n, full = len(influences[0]), values[-1]
    error = lambda influence: float((influence.square().sum() * n / max(1, n - 1)).sqrt())  # noqa: E731
    drops = [
        (influence - v / full * influences[-1]) / full if full else influence
        for influence, v in zip(influences, values)
    ]
    return Quality(
        *held_out.metric,
        data=held_out.description,
        samples=n,
        length=held_out.length,
        date=_today(),
        dtype=str(model.dtype)[6:],
        budgets=tuple(budgets),
        values=tuple(values),
        errors=tuple(map(error, influences)),
        drop_errors=tuple(map(error, drops)),
    )


@torch.inference_mode()
def measure_device(
    model: PreTrainedModel,
    budgets: Sequence[int],
    batch_sizes: Sequence[int],
    prompt_length: int,
    decode_tokens: int,
    rounds: int,
) -> DeviceProfile:
    """Prefill and, of a language model, decoding at every budget and batch size on the model's device."""
    causal = hasattr(model, "lm_head")
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # or the profiler tells of its every start and stop
    check_peak_memory(model.device)
    inputs = {size: random_inputs(model, size, prompt_length) for size in batch_sizes}
    keep = {"use_cache": True, "logits_to_keep": 1} if causal else {}
    cases = [(size, K) for size in batch_sizes for K in budgets]
    print(f"time and memory: prefill at batch sizes {list(batch_sizes)}", flush=True)
    prefills = {(size, K): functools.partial(model, **inputs[size], **keep, spectral_budget=K) for size, K in cases}
    caches = {case: prefills[case]().past_key_values for case in cases} if causal else {}
    positions = prompt_length * (2 if isinstance(model.config, ESSMPairConfig) else 1)  # of a sample
    rows = _measure("prefill", prefills, prefills, caches, positions, 1, model.device, rounds)
    if causal:
        print(f"time and memory: decode at batch sizes {list(batch_sizes)}", flush=True)
        token = {size: inputs[size]["input_ids"][:, -1:] for size in batch_sizes}
        decodes, steps = (
            {(size, K): decoder(model, caches[size, K], token[size], K, count) for size, K in cases}
            for count in (decode_tokens, 1)
        )
        rows += _measure("decode", decodes, steps, caches, 1, decode_tokens, model.device, rounds)
    return DeviceProfile(
        device_name(model.device),
        date=_today(),
        dtype=str(model.dtype)[6:],
        threads=torch.get_num_threads(),
        versions={"torch": torch.__version__, "transformers": transformers.__version__},
        prompt_length=prompt_length,
        rounds=rounds,
        weight_bytes=model.get_memory_footprint(),
        rows=tuple(rows),
    )


def random_inputs(model: PreTrainedModel, batch_size: int, length: int) -> dict[str, Tensor]:
    """What the model reads: (B, L) ids, (B, 2, L) of pairs of documents, or (B, L, F) features."""
    config, generator = model.config, torch.Generator().manual_seed(0)
    if config.num_input_features is not None:
        features = torch.rand(batch_size, length, config.num_input_features, generator=generator) * 2 - 1
        return {"input_features": features.to(model.device, model.dtype)}
    shape = (batch_size, 2, length) if isinstance(config, ESSMPairConfig) else (batch_size, length)
    ids = torch.randint(0, min(256, config.vocab_size), shape, generator=generator)
    return {"input_ids": ids.to(model.device)}


def _measure(
    phase: str,
    calls: Mapping[Case, Callable[[], Any]],
    memory_calls: Mapping[Case, Callable[[], Any]],
    caches: dict[Case, Any],
    positions: int,
    steps: int,
    device: torch.device,
    rounds: int,
) -> list[Measurement]:
    """Rows of one phase: time of `calls`, each `steps` steps of `positions`, and memory of `memory_calls`."""
    seconds = paired(calls, device, rounds, warmup=1, limit_seconds=60.0)
    rows = []
    for (size, K), samples in seconds.items():
        ms = [1e3 * s / steps for s in samples]
        median = statistics.median(ms)
        speed = size * positions / median * 1e3
        peak = max(0, peak_memory(memory_calls[size, K], device))
        cache_bytes = caches[size, K].num_bytes if caches else 0
        rows.append(Measurement(phase, size, K, median, min(ms), max(ms), speed, peak, cache_bytes))
    return rows


def _today() -> str:
    return datetime.now(UTC).date().isoformat()
