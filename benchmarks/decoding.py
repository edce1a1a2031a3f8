# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""How fast are tokens decoded, is it the same after 1k and 64k tokens of context, and what does a small budget save?

    python -m benchmarks.decoding
    python -m benchmarks.decoding --profile              operators of one step at batch 1, K = 4 and K = 32

The paper's 21M-parameter model with random weights and filter_length 131072, so that every context is legal. A context
is read once, in pieces, at batch 1, its state repeated for larger batches; then every round decodes greedily from each
(budget, context) in turn, so that a busy machine slows them alike. Times are of one model forward call with its
argmax, under inference_mode; fp32 on the CPU, bf16 on a GPU, eager.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable

import torch
from torch import Tensor

from modeling_essm import ESSMCache, ESSMConfig, ESSMForCausalLM

from . import common

PIECE = 2048  # tokens of one prefill call


@torch.inference_mode()
def prefill(model: ESSMForCausalLM, tokens: Tensor, contexts: list[int], budget: int) -> dict[int, ESSMCache]:
    """A cache (batch 1) after each context length, all read from one stream of tokens."""
    cache, caches, seen = ESSMCache(model.config), {}, 0
    for context in sorted(contexts):
        while seen < context:
            piece = tokens[:, seen : min(seen + PIECE, context)]
            model(piece, past_key_values=cache, use_cache=True, spectral_budget=budget, logits_to_keep=1)
            seen += piece.shape[1]
        caches[context] = copy.deepcopy(cache)
    return caches


@torch.inference_mode()
def repeat_rows(cache: ESSMCache, batch: int) -> ESSMCache:
    cache = copy.deepcopy(cache)
    cache.batch_repeat_interleave(batch)
    return cache


@torch.inference_mode()
def decode(model: ESSMForCausalLM, cache: ESSMCache, token: Tensor, budget: int, steps: int) -> Tensor:
    """Greedy steps from a cache, which advances; returns the last token (B, 1)."""
    for _ in range(steps):
        logits = model(token, past_key_values=cache, use_cache=True, spectral_budget=budget).logits
        token = logits[:, -1].argmax(-1, keepdim=True)
    return token


@torch.inference_mode()
def check(model: ESSMForCausalLM, tokens: Tensor, budgets: list[int]) -> float:
    """Single steps after a prefill must give the logits of one call over everything; raises otherwise."""
    tokens, worst = tokens[:, :150], 0.0
    for K in budgets:
        whole = model(tokens, spectral_budget=K).logits[:, -1]
        cache = prefill(model, tokens, [140], K)[140]
        for t in range(140, 150):
            step = model(tokens[:, t : t + 1], past_key_values=cache, use_cache=True, spectral_budget=K).logits[:, -1]
        tolerance = 1e-3 if whole.dtype == torch.float32 else 5e-2
        worst = max(worst, common.require_close(f"step against whole sequence, K = {K}", step, whole, tolerance))
    return worst


def profile_step(model: ESSMForCausalLM, cache: ESSMCache, token: Tensor, budget: int, device: torch.device) -> dict:
    """Print torch.profiler's table of one step; returns operator calls and GPU kernels."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    cache = copy.deepcopy(cache)
    decode(model, cache, token, budget, 8)
    with torch.profiler.profile(activities=activities) as profile:
        decode(model, cache, token, budget, 1)
    averages = profile.key_averages()
    print(averages.table(sort_by="self_cpu_time_total", row_limit=20, max_name_column_width=40))
    on_cpu = torch.autograd.DeviceType.CPU
    calls = sum(e.count for e in averages if e.device_type == on_cpu and e.key.startswith("aten::"))
    kernels = sum(e.count for e in averages if e.device_type != on_cpu)
    print(
        f"batch {token.shape[0]}, K = {budget}: {calls} operator calls (nested ones too), {kernels} GPU kernels a step"
    )
    return {"batch": token.shape[0], "budget": budget, "operator_calls": calls, "gpu_kernels": kernels}


def decoder(model: ESSMForCausalLM, cache: ESSMCache, token: Tensor, K: int, steps: int) -> Callable[[], Tensor]:
    """A call that decodes from its own copy of the cache, so that every round starts at the stated context."""
    return lambda: decode(model, copy.deepcopy(cache), token, K, steps)


def main(argv: list[str] | None = None) -> dict:
    p = common.parser(__doc__)
    p.add_argument("--contexts", type=int, nargs="+", default=None)
    p.add_argument("--batches", type=int, nargs="+", default=None)
    p.add_argument("--steps", type=int, default=64, help="decoded tokens of one sample")
    p.add_argument("--profile", action="store_true", help="also print one step's operators")
    args = p.parse_args(argv)
    contexts = args.contexts or ([256, 1024] if args.quick else [1024, 16384, 65536])
    batches = args.batches or ([1] if args.quick else [1, 16])
    budgets = [4, 32] if args.quick else [2, 4, 8, 32]
    steps = 8 if args.quick else args.steps
    config = ESSMConfig(filter_length=131072, **({"num_hidden_layers": 2} if args.quick else {}))
    settings = {"contexts": contexts, "batches": batches, "budgets": budgets, "steps": steps, "warmup": 1}
    settings |= {"layers": config.num_hidden_layers, "width": config.hidden_size}
    device, report = common.start("decoding", args, **settings)
    gpu = device.type == "cuda"
    dtype = torch.bfloat16 if gpu else torch.float32
    torch.manual_seed(0)
    model = ESSMForCausalLM(config).eval().to(device, dtype)
    tokens = torch.randint(0, 256, (1, max([*contexts, 150])), device=device)
    report["settings"] |= {"parameters": sum(p.numel() for p in model.parameters()), "dtype": str(dtype)[6:]}
    report["relative_error"] = check(model, tokens, budgets)
    print(
        f"{report['settings']['parameters']} parameters, {dtype}; steps agree with one call over the whole sequence to "
        f"{report['relative_error']:.1e}"
    )
    caches = {K: prefill(model, tokens, contexts, K) for K in budgets}
    report["results"], report["ratios"], report["profiles"] = [], [], []
    counts = sorted({1, torch.get_num_threads()}, reverse=True) if not gpu else [torch.get_num_threads()]
    for batch, count in itertools.product(batches, counts):
        with common.threads(count):
            measure(model, caches, batch, count, steps, device, args.rounds, report)
    for batch, K in itertools.product(batches, (4, 32)) if args.profile else ():
        token = tokens[:, -1:].expand(batch, 1).contiguous()
        cache = repeat_rows(caches[K][min(contexts)], batch)
        report["profiles"].append(profile_step(model, cache, token, K, device))
    report["targets"] = targets(report)
    return common.finish(report, args, device)


def measure(
    model: ESSMForCausalLM,
    caches: dict[int, dict[int, ESSMCache]],
    batch: int,
    count: int,
    steps: int,
    device: torch.device,
    rounds: int,
    report: dict,
) -> None:
    """Append the rows and ratios of one batch size and thread count to the report, and print them."""
    token = torch.zeros(batch, 1, dtype=torch.long, device=device)
    rows_caches = {(K, c): repeat_rows(cache, batch) for K, by in caches.items() for c, cache in by.items()}
    calls = {(K, c): decoder(model, cache, token, K, steps) for (K, c), cache in rows_caches.items()}
    seconds = common.paired(calls, device, rounds, warmup=1, limit_seconds=120.0)
    new = []
    for (K, context), samples in seconds.items():
        step = common.spread([s / steps for s in samples])
        row = {"batch": batch, "threads": count, "budget": K, "context": context, "seconds_per_step": step}
        row |= {"tokens_per_second": batch / step["median"], "cache_bytes": rows_caches[K, context].num_bytes}
        new.append(row)
    header = "batch threads K context step_ms(min-max) tokens/s cache_bytes"
    columns = ("batch", "threads", "budget", "context")
    common.table(
        header,
        [
            [
                *[r[c] for c in columns],
                common.ms(r["seconds_per_step"]),
                f"{r['tokens_per_second']:.1f}",
                r["cache_bytes"],
            ]
            for r in new
        ],
    )
    report["results"] += new
    contexts = sorted({c for _, c in seconds})
    ratios = {"batch": batch, "threads": count}
    ratios["step_of_4_over_32"] = {c: common.ratio(seconds[4, c], seconds[32, c]) for c in contexts}
    ratios["flatness"] = {}
    for K in caches:
        medians = [r["seconds_per_step"]["median"] for r in new if r["budget"] == K]
        ratios["flatness"][K] = max(medians) / min(medians)
    report["ratios"].append(ratios)
    relative = ", ".join(
        "{}: {median:.3f} ({min:.3f}-{max:.3f})".format(c, **r) for c, r in ratios["step_of_4_over_32"].items()
    )
    print(f"step(K=4) / step(K=32) at context {relative}")
    print("slowest / fastest context: " + ", ".join(f"K={K} {r:.3f}" for K, r in ratios["flatness"].items()))


def targets(report: dict) -> list[dict]:
    """Cache constant in context and falling with K; steps flat in context."""
    sizes: dict[tuple[int, int], set[int]] = {}
    for r in report["results"]:
        sizes.setdefault((r["batch"], r["budget"]), set()).add(r["cache_bytes"])
    growth = max(max(s) / min(s) for s in sizes.values())
    by_budget = [max(s) for (b, _), s in sorted(sizes.items()) if b == report["settings"]["batches"][0]]
    falls = max(small / large for small, large in itertools.pairwise(by_budget))
    flatness = max(r for ratios in report["ratios"] for r in ratios["flatness"].values())
    return [
        common.target("cache bytes, longest context over shortest, worst", growth, most=1.0),
        common.target("cache bytes, a budget over the next larger, worst", falls, most=0.999),
        common.target("step time, slowest context over fastest, worst", flatness, most=1.05),
    ]


if __name__ == "__main__":
    main()
