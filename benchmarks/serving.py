# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""What do users wait for when requests arrive by themselves, and how many tokens a second does a batch serve?

    python -m benchmarks.serving --model hub_configs/essm-novels-6m
    python -m benchmarks.serving --config hub_configs/essm-elastic-21m --loads 0.5 0.9

Requests arrive at random times (Poisson), with prompts of 16 to 512 bytes, 16 to 128 new tokens and a budget of 2, 4 or
the capacity, the same for every server: a `ContinuousBatch`, then one with a single row. A load is the share of what
the batch serves when all requests are there at once, which is measured first. Waiting is told from arrival. Other sizes
of a batch round otherwise: the share of requests that both answer alike shows where two tokens are nearly as likely.
Weights are random without --model. fp32 on the CPU, one thread; bf16 on a GPU.
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


@dataclass
class Arrival:
    """A request, and when things happened to it, in seconds from the start."""

    prompt: list[int]
    new: int
    budget: int
    at: float = 0.0
    times: list[float] = field(default_factory=list)  # of its tokens
    tokens: list[int] = field(default_factory=list)

    def take(self, token: int, now: float) -> None:
        self.tokens.append(token)
        self.times.append(now)


def draw_requests(count: int, capacity: int, quick: bool) -> list[Arrival]:
    rng, requests = np.random.default_rng(0), []
    longest, new = (24, 6) if quick else (512, 128)
    budgets = sorted({min(K, capacity) for K in (2, 4, capacity)})
    for _ in range(count):
        prompt = rng.integers(32, 127, int(np.exp(rng.uniform(np.log(16), np.log(longest))))).tolist()
        requests.append(Arrival(prompt, int(rng.integers(min(16, new), new + 1)), int(rng.choice(budgets))))
    return requests


def serve(model: ESSMForCausalLM, drawn: list[Arrival], rate: float | None, rows: int) -> tuple[list[Arrival], float]:
    """Answers of all requests, arriving at that many a second (None: all at once), and seconds to the last token."""
    rng = np.random.default_rng(1)
    at = np.zeros(len(drawn)) if rate is None else np.cumsum(rng.exponential(1 / rate, len(drawn)))
    arrivals = [replace(one, at=float(t), times=[], tokens=[]) for t, one in zip(at, drawn)]
    batch = ContinuousBatch(model, max_state_bytes=1 << 34, max_rows=rows, prefill_chunk_size=128)
    start, coming, requests = time.perf_counter(), list(arrivals), []
    now = lambda: time.perf_counter() - start  # noqa: E731
    while coming or batch:
        while coming and coming[0].at <= now():
            one = coming.pop(0)
            taken = lambda token, one=one: one.take(token, now())  # noqa: E731
            requests.append(batch.submit(one.prompt, one.new, one.budget, eos_token_id=[], on_token=taken))
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
    tokens, servers = sum(one.new for one in drawn), {"batch": args.rows, "one at a time": 1}
    serve(model, drawn[:2], None, args.rows)  # warm-up
    throughput: dict[str, list[float]] = {name: [] for name in servers}
    given: dict[str, list[list[int]]] = {}
    for _ in range(args.rounds):
        for name, rows in servers.items():
            answers, seconds = serve(model, drawn, None, rows)
            throughput[name].append(tokens / seconds)
            given[name] = [one.tokens for one in answers]
    speeds = {name: common.spread(values) for name, values in throughput.items()}
    result: dict[str, Any] = {"equal_answers": sum(a == b for a, b in zip(*given.values())) / len(drawn)}
    result |= {"tokens_per_second": speeds, "batch_over_one": common.ratio(*throughput.values()), "results": []}
    most = speeds["batch"]["median"] * len(drawn) / tokens  # requests a second
    for load in args.loads:
        for name, rows in servers.items():
            answers, seconds = serve(model, drawn, load * most, rows)
            row = {"server": name, "load": load, "requests_per_second": load * most}
            result["results"].append(row | {"tokens_per_second": tokens / seconds, "seconds": waiting(answers)})
    return result


def main(argv: list[str] | None = None) -> dict[str, Any]:
    p = common.parser(__doc__)
    common.add_config(p)
    p.add_argument("--model", type=Path, help="saved language model; else one of --config with random weights")
    p.add_argument("--rows", type=int, default=16, help="requests that run at once")
    p.add_argument("--requests", type=int)
    p.add_argument("--loads", type=float, nargs="+", default=[0.3, 0.6, 0.9])
    p.set_defaults(rounds=3)
    args = p.parse_args(argv)
    torch.manual_seed(0)
    if args.model is not None:
        model = ESSMForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    else:
        model = ESSMForCausalLM(common.configuration(args, **({"num_hidden_layers": 2} if args.quick else {})))
    count = args.requests or (6 if args.quick else 96)
    settings = {"rows": args.rows, "requests": count, "threads": 1, **common.model_settings(args, model.config)}
    settings |= {"config": args.model.name} if args.model is not None else {}
    device, report = common.start("serving", args, **settings)
    model = model.eval().to(device, common.dtype_of(device))
    with common.threads(1):
        report |= measure(model, draw_requests(count, model.config.num_spectral_channels, args.quick), args)
    speed = report["tokens_per_second"]
    print(f"{report['equal_answers']:.0%} of requests are answered alike")
    print(", ".join(f"{name}: {speed[name]['median']:.0f} tokens/s" for name in speed))
    return common.finish(report, args)


if __name__ == "__main__":
    main()
