# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""What essm-calibrate measures: quality at every budget with its errors, time and memory on this device."""

from __future__ import annotations

import functools
import os
import statistics
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

from essm_train.measure.scoring import HeldOut
from essm_train.measure.timing import decoder, paired, peak_memory
from essm_train.pairs import ESSMPairConfig
from modeling_essm.budgets.profile import DeviceProfile, Measurement, Quality, device_name
from modeling_essm.cache_essm import CACHE


def measure_quality(model: PreTrainedModel, held_out: HeldOut, budgets: Sequence[int]) -> Quality:
    """The metric at every budget and its standard errors, those of a ratio of sums.

    Raises:
        ValueError: a metric that is not finite, or fewer than two blocks or samples.
    """
    values, influences = [], []  # of each sample on the ratio
    for K in budgets:
        print(f"quality: K={K}", flush=True)
        totals, weights = held_out.score(model, K)
        values.append(held_out.metric_of(totals, weights, K))
        influences.append((totals - values[-1] * weights) / weights.sum())
    n, full = len(influences[0]), values[-1]
    if n < 2:
        raise ValueError(f"standard errors need at least two held-out blocks or samples, got {n}")
    of_drops = [(i - v / full * influences[-1]) / full if full else i for i, v in zip(influences, values)]

    def error(influence: Tensor) -> float:
        return float((influence.square().sum() * n / (n - 1)).sqrt())

    return Quality(
        *held_out.metric,
        budgets=tuple(budgets),
        values=tuple(values),
        errors=tuple(map(error, influences)),
        drop_errors=tuple(map(error, of_drops)),
        data=held_out.description,
        samples=n,
        length=held_out.length,
        date=_today(),
        dtype=str(model.dtype)[6:],
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
    """Prefill and, with a language model, decoding at every budget and batch size on the model's device."""
    causal, device = hasattr(model, "lm_head"), model.device
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # or the profiler tells of its every start and stop
    inputs = {size: random_inputs(model, size, prompt_length) for size in batch_sizes}
    keep = {"use_cache": True, "logits_to_keep": 1} if causal else {}
    cases = [(size, K) for size in batch_sizes for K in budgets]
    calls: dict[Any, Any] = {(s, K): functools.partial(model, **inputs[s], **keep, spectral_budget=K) for s, K in cases}
    positions = prompt_length * (2 if isinstance(model.config, ESSMPairConfig) else 1)  # of a sample
    phases = [("prefill", positions, 1, calls, calls)]
    caches = {case: calls[case]()[CACHE] for case in cases} if causal else {}
    if causal:
        many, one = (
            {(s, K): decoder(model, caches[s, K], inputs[s]["input_ids"][:, -1:], K, steps) for s, K in cases}
            for steps in (decode_tokens, 1)
        )
        phases.append(("decode", 1, decode_tokens, many, one))
    rows = []
    for phase, positions, steps, timed, measured in phases:
        print(f"time and memory: {phase} at batch sizes {list(batch_sizes)}", flush=True)
        for (size, K), samples in paired(timed, device, rounds, warmup=1, limit_seconds=60.0).items():
            ms = [1e3 * seconds / steps for seconds in samples]
            median = statistics.median(ms)
            speed = size * positions / median * 1e3
            held = caches[size, K].num_bytes if caches else 0
            peak = max(0, peak_memory(measured[size, K], device))
            rows.append(Measurement(phase, size, K, median, min(ms), max(ms), speed, peak, held))
    return DeviceProfile(
        device_name(device),
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


def _today() -> str:
    return datetime.now(UTC).date().isoformat()
