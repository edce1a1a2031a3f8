# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""How fast are tokens decoded, is it the same after 1k and 64k tokens of context, and what does a small budget save?

    python -m benchmarks.decoding
    python -m benchmarks.decoding --table limit          time per token against the reading of the weights
    python -m benchmarks.decoding --profile              operators of one step at batch 1, K = 4 and the capacity
    python -m benchmarks.decoding --config hub_configs/essm-gated-20m

The paper's 21M-parameter model, or that of --config, with random weights and filter_length 131072, so that every
context is legal; a budget above the capacity becomes it. A context is read once, in pieces, at batch 1, its state
repeated for larger batches; then every round decodes greedily from each (budget, context) in turn, so that a busy
machine slows them alike. Times are of one model forward call with its argmax, under inference_mode; fp32 on the CPU,
bf16 on a GPU, eager.

`--table limit`: no step at batch 1 can be faster than its weights are read. The fraction of that limit reached is the
bytes of the weights that a budget reads, over the memory bandwidth, over the time of a step, eager and compiled; the
bandwidth (a sum over memory many times larger than the caches) is measured within every round, beside the steps.
"""

from __future__ import annotations

import argparse
import copy
import functools
import itertools
from collections.abc import Callable

import torch
from torch import Tensor

from essm_train.measure.timing import decode, decoder
from modeling_essm import ESSMCache, ESSMForCausalLM
from modeling_essm.decoding import compile_decoding

from . import common

PIECE = 2048  # tokens of one prefill call
MEMORY_BYTES = 256 << 20  # read to measure the bandwidth
CHECKED_STEPS = 6  # compiled against eager: more than a short convolution has taps


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


def main(argv: list[str] | None = None) -> dict:
    p = common.parser(__doc__)
    common.add_config(p)
    p.add_argument("--contexts", type=int, nargs="+", default=None)
    p.add_argument("--batches", type=int, nargs="+", default=None)
    p.add_argument("--steps", type=int, default=64, help="decoded tokens of one sample")
    p.add_argument("--table", choices=("contexts", "limit"), default="contexts")
    p.add_argument("--backend", default="inductor", help="of the compiled steps")
    p.add_argument("--profile", action="store_true", help="also print one step's operators")
    args = p.parse_args(argv)
    if args.table == "limit":
        return main_limit(args)
    contexts = args.contexts or ([256, 1024] if args.quick else [1024, 16384, 65536])
    batches = args.batches or ([1] if args.quick else [1, 16])
    config = common.configuration(args, filter_length=131072, **({"num_hidden_layers": 2} if args.quick else {}))
    budgets = common.clipped([4, 32] if args.quick else [2, 4, 8, 32], config)
    steps = 8 if args.quick else args.steps
    settings = {"contexts": contexts, "batches": batches, "budgets": budgets, "steps": steps, "warmup": 1}
    device, report = common.start("decoding", args, **settings, **common.model_settings(args, config))
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
    for batch, K in itertools.product(batches, common.clipped([4, 32], config)) if args.profile else ():
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
    small, large = common.clipped([4, 32], model.config)[0], max(caches)
    name = f"step_of_{small}_over_{large}"
    ratios[name] = {c: common.ratio(seconds[small, c], seconds[large, c]) for c in contexts}
    ratios["flatness"] = {}
    for K in caches:
        medians = [r["seconds_per_step"]["median"] for r in new if r["budget"] == K]
        ratios["flatness"][K] = max(medians) / min(medians)
    report["ratios"].append(ratios)
    relative = ", ".join("{}: {median:.3f} ({min:.3f}-{max:.3f})".format(c, **r) for c, r in ratios[name].items())
    print(f"step(K={small}) / step(K={large}) at context {relative}")
    print("slowest / fastest context: " + ", ".join(f"K={K} {r:.3f}" for K, r in ratios["flatness"].items()))


def main_limit(args: argparse.Namespace) -> dict:
    """Fraction of the memory-bound speed that a step reaches at batch 1."""
    config = common.configuration(args, **({"num_hidden_layers": 2, "hidden_size": 64} if args.quick else {}))
    budgets = common.clipped([2, 4, 8, 16, 32], config)
    settings = {"batch": 1, "budgets": budgets, "backend": args.backend, **common.model_settings(args, config)}
    device, report = common.start("decoding_limit", args, **settings)
    gpu = device.type == "cuda"
    dtype = torch.bfloat16 if gpu else torch.float32
    torch.manual_seed(0)
    eager = ESSMForCausalLM(config).eval().to(device, dtype)
    report["settings"] |= {"parameters": eager.num_parameters(), "dtype": str(dtype)[6:]}
    memory = torch.ones((MEMORY_BYTES >> (8 if args.quick else 0)) // 4 * (8 if gpu else 1), device=device)
    report["results"] = []
    counts = sorted({1, torch.get_num_threads()}) if not gpu else [torch.get_num_threads()]
    for count in counts:
        with common.threads(count):
            compiled = compile_decoding(copy.deepcopy(eager), budgets, backend=args.backend)
            for K in budgets:
                report["results"].append(measure_limit(eager, compiled, memory, K, count, args.rounds))
    header = "threads K MiB GB/s limit_ms eager_ms compiled_ms eager_fraction compiled_fraction"
    rows = []
    for r in report["results"]:
        bandwidth = r["bytes_per_second"]["median"]
        row = [
            r["threads"],
            r["budget"],
            r["weight_bytes"] / 2**20,
            bandwidth / 1e9,
            r["weight_bytes"] / bandwidth * 1e3,
        ]
        row += [r[f"{kind}_seconds"]["median"] * 1e3 for kind in ("eager", "compiled")]
        rows.append(row + [r[f"{kind}_fraction"]["median"] for kind in ("eager", "compiled")])
    common.table(header, rows)
    report["targets"] = [
        common.target(f"K = {r['budget']}, {r['threads']} threads: fraction of the limit, compiled", value, least=0.5)
        for r in report["results"]
        for value in [r["compiled_fraction"]["median"]]
    ]
    return common.finish(report, args, device)


@torch.inference_mode()
def measure_limit(
    eager: ESSMForCausalLM, compiled: ESSMForCausalLM, memory: Tensor, K: int, count: int, rounds: int
) -> dict:
    """One budget and thread count; raises RuntimeError where compiled steps differ."""
    token = torch.zeros(1, 1, dtype=torch.long, device=memory.device)
    models = {"eager": eager, "compiled": compiled}
    caches, logits = {}, {}
    for kind, model in models.items():
        caches[kind] = prefill(model, token.expand(1, 8), [8], K)[8]
        cache = copy.deepcopy(caches[kind])
        steps = [model(token, past_key_values=cache, spectral_budget=K).logits for _ in range(CHECKED_STEPS)]
        logits[kind] = torch.cat(steps, 1)
    tolerance = 1e-4 if logits["eager"].dtype == torch.float32 else 5e-2
    error = common.require_close(f"compiled step, K = {K}", logits["compiled"], logits["eager"], tolerance)
    calls: dict[str, Callable] = {"memory": lambda: memory.sum()}
    calls |= {kind: functools.partial(decode, model, caches[kind], token, K, 1) for kind, model in models.items()}
    seconds = common.paired(calls, memory.device, rounds, warmup=3, sample_seconds=0.1)
    read = common.weight_bytes(eager, K)
    row = {"threads": count, "budget": K, "weight_bytes": read, "relative_error": error}
    row["bytes_per_second"] = common.spread([memory.nbytes / s for s in seconds["memory"]])
    limit = [read / memory.nbytes * s for s in seconds["memory"]]
    for kind in models:
        row[f"{kind}_seconds"] = common.spread(seconds[kind])
        row[f"{kind}_fraction"] = common.ratio(limit, seconds[kind])
    return row


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
