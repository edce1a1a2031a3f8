# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""What does a batch serve when most requests ask for a small size, and how long do users wait?

    python -m benchmarks.serving --model hub_configs/essm-novels-6m
    python -m benchmarks.serving --model hub_configs/essm-novels-6m --requests 96 --loads 0.9

Prompts have 16 to 512 bytes and answers 16 to 128. The same requests go to four servers: at full size, where `--rows`
rows fit; with two thirds of them at the preset "small", or K = 2, in the same bytes of state; those in no more rows
than at full size; and those one at a time. What each serves when all requests are there at once is measured in rounds
that take turns. Then requests arrive at random times (Poisson): a load is the share of what is served at full size.
Waiting is told from arrival. Batches of other sizes round otherwise: the share of requests that are answered as one at
a time shows where two tokens are nearly as likely. fp32 on the CPU, one thread; bf16 on a GPU.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from modeling_essm import ESSMForCausalLM
from modeling_essm.decoding import ContinuousBatch

from . import common

PERCENTILES = (50, 90, 99)
SIZES = ("small", "full")


@dataclass
class Arrival:
    """A request, and when things happened to it, in seconds from the start."""

    prompt: list[int]
    new: int
    size: str
    at: float = 0.0
    times: list[float] = field(default_factory=list)  # of its tokens
    tokens: list[int] = field(default_factory=list)

    def take(self, token: int, now: float) -> None:
        self.tokens.append(token)
        self.times.append(now)


def draw_requests(count: int, quick: bool) -> list[Arrival]:
    """Two of three are small."""
    rng, requests = np.random.default_rng(0), []
    longest, new = (24, 6) if quick else (512, 128)
    for i in range(count):
        prompt = rng.integers(32, 127, int(np.exp(rng.uniform(np.log(16), np.log(longest))))).tolist()
        requests.append(Arrival(prompt, int(rng.integers(min(16, new), new + 1)), SIZES[i % 3 == 2]))
    return requests


def serve(
    model: ESSMForCausalLM, drawn: list[Arrival], rate: float | None, **limits: Any
) -> tuple[list[Arrival], float]:
    """Answers of all requests, arriving at that many a second (None: all at once), and seconds to the last token."""
    rng = np.random.default_rng(1)
    at = np.zeros(len(drawn)) if rate is None else np.cumsum(rng.exponential(1 / rate, len(drawn)))
    arrivals = [replace(one, at=float(t), times=[], tokens=[]) for t, one in zip(at, drawn)]
    batch = ContinuousBatch(model, prefill_chunk_size=256, **limits)
    start, coming, requests = time.perf_counter(), list(arrivals), []
    now = lambda: time.perf_counter() - start  # noqa: E731
    while coming or batch:
        while coming and coming[0].at <= now():
            one = coming.pop(0)
            taken = lambda token, one=one: one.take(token, now())  # noqa: E731
            requests.append(batch.submit(one.prompt, one.new, one.size, eos_token_id=[], on_token=taken))
        if batch:
            batch.step()
        elif coming:
            time.sleep(max(0.0, min(0.01, coming[0].at - now())))
    failed = [request.error for request in requests if request.status != "finished"]
    if failed:
        raise RuntimeError(f"{len(failed)} of {len(requests)} requests failed, the first with: {failed[0]!r}")
    return arrivals, now()


def waiting(arrivals: list[Arrival]) -> dict[str, dict[str, float]]:
    samples: dict[str, Any] = {
        "first token": [one.times[0] - one.at for one in arrivals],
        "between tokens": [gap for one in arrivals for gap in np.diff(one.times)],
        "last token": [one.times[-1] - one.at for one in arrivals],
    }
    return {what: {f"p{p}": float(np.percentile(values, p)) for p in PERCENTILES} for what, values in samples.items()}


def measure(model: ESSMForCausalLM, drawn: list[Arrival], args: argparse.Namespace) -> dict[str, Any]:
    device = model.device
    state = model(torch.zeros(1, 1, dtype=torch.int64, device=device), spectral_budget="full").past_key_values.num_bytes
    room, full = {"max_state_bytes": args.rows * state}, [replace(one, size="full") for one in drawn]
    servers: dict[str, tuple[list[Arrival], dict[str, int]]] = {
        "full": (full, room),
        "mixed": (drawn, room),
        "mixed, as many rows": (drawn, room | {"max_rows": args.rows}),
        "mixed, one at a time": (drawn, room | {"max_rows": 1}),
    }
    serve(model, drawn[:3], None, **room)  # warm-up
    tokens, given = sum(one.new for one in drawn), {}
    throughput: dict[str, list[float]] = {name: [] for name in servers}
    for _ in range(args.rounds):
        for name, (requests, limits) in servers.items():
            given[name], seconds = serve(model, requests, None, **limits)
            throughput[name].append(tokens / seconds)
    mixed, alone = (given[name] for name in ("mixed", "mixed, one at a time"))
    result: dict[str, Any] = {"equal_answers": sum(a.tokens == b.tokens for a, b in zip(mixed, alone)) / len(drawn)}
    result["tokens_per_second"] = {name: common.spread(values) for name, values in throughput.items()}
    result["over_full"] = {name: common.ratio(values, throughput["full"]) for name, values in throughput.items()}
    result["results"] = []
    for load in args.loads:
        rate = load * result["tokens_per_second"]["full"]["median"] * len(drawn) / tokens
        for name in ("full", "mixed"):
            requests, limits = servers[name]
            answers, seconds = serve(model, requests, rate, **limits)
            for size in sorted({one.size for one in answers}, key=SIZES.index):
                these = [one for one in answers if one.size == size]
                row = {"server": name, "load": load, "requests_per_second": rate, "size": size, "requests": len(these)}
                speed = sum(one.new for one in these) / seconds
                result["results"].append(row | {"tokens_per_second": speed, "seconds": waiting(these)})
    return result


def main(argv: list[str] | None = None) -> dict[str, Any]:
    p = common.parser(__doc__, rounds=3)
    p.add_argument("--model", type=Path, required=True, help="saved language model")
    p.add_argument("--rows", type=common.positive, default=16, help="requests at full size that run at once")
    p.add_argument("--requests", type=common.positive)
    p.add_argument("--loads", type=common.above_zero, nargs="+", default=[0.5, 0.9])
    args = p.parse_args(argv)
    model = ESSMForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    capacity, presets = model.config.num_spectral_channels, model.config.budget_presets or {}
    sizes = {"small": presets.get("small", 2), "full": capacity}
    model.config.budget_presets = sizes
    count = args.requests or (6 if args.quick else 96)
    settings = {"rows": args.rows, "requests": count, "sizes": sizes, "threads": 1}
    device, report = common.start("serving", args, config=common.name_of(args.model), **settings)
    model = model.eval().to(device, common.dtype_of(device))
    with common.threads(1):
        report |= measure(model, draw_requests(count, args.quick), args)
    print(f"{report['equal_answers']:.0%} of the mixed requests are answered as one at a time")
    for name, speed in report["tokens_per_second"].items():
        print(f"{name}: {speed['median']:.0f} tokens/s, {report['over_full'][name]['median']:.2f} of full size")
    return common.finish(report, args)


if __name__ == "__main__":
    main()
