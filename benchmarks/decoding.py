# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""What does a decoded token cost: at each budget and context, beside peers, and against the reading of the weights?

    python -m benchmarks.decoding [--table contexts]     is it the same after 1k and 64k tokens?
    python -m benchmarks.decoding --table limit          time per token over that of reading the weights, also compiled
    python -m benchmarks.decoding --table peers          beside a Llama and a Mamba-2 of the same size
    python -m benchmarks.decoding --table prompt         memory and time of reading a prompt of a million bytes
    python -m benchmarks.decoding --config hub_configs/essm-elastic-21m

The paper's 21M-parameter model, or that of --config, with random weights; a budget above the capacity becomes it.
fp32 on the CPU, bf16 on a GPU, eager unless said. A step is one forward call with its argmax under inference_mode. In
every round all rows take turns. Before anything is timed, steps must give what one call over the whole text gives.
The bandwidth of memory is that of a sum over 256 MiB (2 GiB on a GPU) in the same rounds. A Llama's default cache is
copied at every step and cut back before each sample; Mamba-2 reads 128 tokens whatever the context, as its state has
one size.
"""

from __future__ import annotations

import argparse
import copy
import functools
import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import StaticCache

from essm_train.measure.timing import decode, decoder
from modeling_essm import ESSMCache, ESSMConfig, ESSMForCausalLM
from modeling_essm.decoding import compile_decoding
from modeling_essm.training.budget_dropout import clip_budgets

from . import common
from .training_step import make_models

PIECE = 2048  # tokens of one prefill call
MEMORY_BYTES = 256 << 20  # read to measure the bandwidth
CHECKED_STEPS = 6  # more than a short convolution has taps
SHORT = 128  # tokens that peers' steps are checked on


def begin(name: str, config: ESSMConfig, args: argparse.Namespace, **settings: Any) -> tuple[torch.device, dict]:
    dtype = str(common.dtype_of(common.pick_device(args.device)))[6:]
    return common.start(name, args, config, **settings, dtype=dtype)


def make_model(config: ESSMConfig, device: torch.device) -> ESSMForCausalLM:
    torch.manual_seed(0)
    return ESSMForCausalLM(config).eval().to(device, common.dtype_of(device))


@torch.inference_mode()
def prefill(model: ESSMForCausalLM, tokens: Tensor, budget: int) -> ESSMCache:
    """The cache after these tokens (1, n)."""
    cache = ESSMCache(model.config)
    for piece in tokens.split(PIECE, 1):
        model(piece, past_key_values=cache, use_cache=True, spectral_budget=budget, logits_to_keep=1)
    return cache


class Decoder:
    """A model with what it has read.

    Args:
        room: tokens of a static cache; None for the cache that the model makes.
    """

    def __init__(self, model: Any, budget: int | None = None, room: int | None = None):
        self.model, self.room = model, room
        self.name = "cache_params" if model.config.model_type == "mamba2" else "past_key_values"
        self.options = {"spectral_budget": budget} if budget else {}
        self.grows = model.config.model_type == "llama" and room is None
        self.forget()

    def forget(self) -> None:
        self.cache: Any = None if self.room is None else StaticCache(config=self.model.config, max_cache_len=self.room)

    @torch.inference_mode()
    def read(self, ids: Tensor) -> Tensor:
        """ids (1, n) -> logits (1, n, V); the cache goes on."""
        given = {self.name: self.cache} if self.cache is not None else {}
        out = self.model(ids, use_cache=True, **given, **self.options)
        self.cache = out[self.name]
        return out.logits

    @torch.inference_mode()
    def check(self, ids: Tensor) -> float:
        """Relative error of steps against one call; raises RuntimeError where they differ."""
        whole = self.model(ids, use_cache=False, **self.options).logits[:, -CHECKED_STEPS:]
        self.read(ids[:, :-CHECKED_STEPS])
        steps = torch.cat([self.read(token) for token in ids[:, -CHECKED_STEPS:].split(1, 1)], 1)
        self.forget()
        return common.require_close("steps against one call over the whole text", steps, whole)

    def sample(self, token: Tensor, context: int, steps: int) -> None:
        """So many steps: after the context in a cache that grows, else after those of the last sample."""
        if self.grows and (more := self.cache.get_seq_length() - context):
            self.cache.crop(-more)
        for _ in range(steps):
            self.read(token)


@torch.inference_mode()
def contexts_table(args: argparse.Namespace) -> dict[str, Any]:
    contexts = args.contexts or ([256, 1024] if args.quick else [1024, 16384, 65536])
    batches = args.batches or ([1] if args.quick else [1, 16])
    config = common.configuration(args.config, filter_length=131072, **({"num_hidden_layers": 2} if args.quick else {}))
    budgets = clip_budgets([4, 32] if args.quick else [2, 4, 8, 32], config.num_spectral_channels)
    steps = 8 if args.quick else 64
    settings = {"contexts": contexts, "batches": batches, "budgets": budgets, "steps": steps}
    device, report = begin("decoding", config, args, **settings)
    model = make_model(config, device)
    tokens = torch.randint(0, 256, (1, max([*contexts, 150])), device=device)
    report["relative_error"] = max(Decoder(model, K).check(tokens[:, :150]) for K in budgets)
    read = {(K, n): prefill(model, tokens[:, :n], K) for K in budgets for n in contexts}
    report["results"] = []
    threads = {1, torch.get_num_threads()} if device.type == "cpu" else {torch.get_num_threads()}
    for batch, count in itertools.product(batches, sorted(threads, reverse=True)):
        caches = copy.deepcopy(read)
        for cache in caches.values():
            cache.batch_repeat_interleave(batch)
        token = torch.zeros(batch, 1, dtype=torch.long, device=device)
        calls = {(K, context): decoder(model, cache, token, K, steps) for (K, context), cache in caches.items()}
        with common.threads(count):
            seconds = common.paired(calls, device, args.rounds, warmup=1, limit_seconds=120.0)
        for (K, context), samples in seconds.items():
            row: dict[str, Any] = {"batch": batch, "threads": count, "budget": K, "context": context}
            row["seconds_per_step"] = common.per(samples, steps)
            row["time_over_shortest_context"] = common.ratio(samples, seconds[K, min(contexts)])
            row["time_over_largest_budget"] = common.ratio(samples, seconds[max(budgets), context])
            report["results"].append(row | {"cache_bytes": caches[K, context].num_bytes})
    return report


def limit_table(args: argparse.Namespace) -> dict[str, Any]:
    config = common.configuration(args.config, **({"num_hidden_layers": 2, "hidden_size": 64} if args.quick else {}))
    budgets = clip_budgets([2, 32] if args.quick else [2, 4, 8, 16, 32], config.num_spectral_channels)
    device, report = begin("decoding_limit", config, args, batch=1, budgets=budgets, backend=args.backend)
    gpu = device.type == "cuda"
    eager = make_model(config, device)
    memory = torch.ones((MEMORY_BYTES >> (8 if args.quick else 0)) // 4 * (8 if gpu else 1), device=device)
    report["results"] = []
    for count in [torch.get_num_threads()] if gpu else sorted({1, torch.get_num_threads()}):
        with common.threads(count):
            compiled = compile_decoding(copy.deepcopy(eager), budgets, backend=args.backend)
            rows = measure_limit({"eager": eager, "compiled": compiled}, memory, budgets, args.rounds)
        report["results"] += [{"threads": count} | row for row in rows]
    return report


@torch.inference_mode()
def measure_limit(
    models: dict[str, ESSMForCausalLM], memory: Tensor, budgets: Sequence[int], rounds: int
) -> list[dict[str, Any]]:
    """A row for each budget; that compiled steps do not differ, `compile_decoding` has checked."""
    token = torch.zeros(1, 1, dtype=torch.long, device=memory.device)
    calls: dict[Any, Any] = {"memory": memory.sum}
    for K, (kind, model) in itertools.product(budgets, models.items()):
        calls[kind, K] = functools.partial(decode, model, prefill(model, token.expand(1, 8), K), token, K, 1)
    seconds = common.paired(calls, memory.device, rounds, warmup=3, sample_seconds=0.1, limit_seconds=120.0)
    rows = []
    for K in budgets:
        weights = common.weight_bytes(models["eager"], K)
        row: dict[str, Any] = {"budget": K, "weight_bytes": weights}
        row["bytes_per_second"] = common.rate(seconds["memory"], memory.nbytes)
        limit = [weights / memory.nbytes * s for s in seconds["memory"]]
        for kind in models:
            row[f"{kind}_seconds"] = common.spread(seconds[kind, K])
            row[f"{kind}_fraction"] = common.ratio(limit, seconds[kind, K])
        rows.append(row)
    return rows


def peers_table(args: argparse.Namespace) -> dict[str, Any]:
    contexts = args.contexts or ([128, 160] if args.quick else [1024, 16384])
    steps = 2 if args.quick else 16
    device = common.pick_device(args.device)
    room = max(contexts) + (args.rounds + 2) * max(steps, 64)  # each sample may repeat its steps until they last
    models = {name: m.to(device, common.dtype_of(device)).eval() for name, m in make_models(room, args).items()}
    configured = common.name_of(args.config) if args.config else "ES-SSM"
    settings = {"contexts": contexts, "steps": steps, "threads": 1, "rounds": args.rounds}
    device, report = begin("decoding_peers", models[configured].config, args, **settings)
    report["parameters"] = {name: model.num_parameters() for name, model in models.items()}
    rows: dict[str, tuple[str, int | None]] = {}
    for name in dict.fromkeys((configured, "ES-SSM")):
        rows |= {f"{name} K={K}": (name, K) for K in clip_budgets((4, 32), models[name].config.num_spectral_channels)}
    rows |= {label: (label.split(",")[0], None) for label in ("Llama", "Llama, static cache", "Mamba-2")}
    report["results"] = []
    with common.threads(1):
        for context in contexts:
            report["results"] += measure_peers(models, rows, context, room, steps, args.rounds)
    return report


def measure_peers(
    models: dict[str, Any], rows: dict[str, tuple[str, int | None]], context: int, room: int, steps: int, rounds: int
) -> list[dict[str, Any]]:
    """A row of the report for each of `rows`, a model's name and its budget by their label."""
    device = next(iter(models.values())).device
    ids = torch.randint(0, 256, (1, context), device=device)
    calls, sizes = {}, {}
    for label, (name, budget) in rows.items():
        one = Decoder(models[name], budget, room if label.endswith("static cache") else None)
        one.check(ids[:, :SHORT])
        for piece in ids[:, : SHORT if name == "Mamba-2" else context].split(PIECE, 1):
            one.read(piece)
        calls[label] = functools.partial(one.sample, ids[:, -1:], context, steps)
        sizes[label] = common.state_bytes(one.cache)
    seconds = common.paired(calls, device, rounds, warmup=1, limit_seconds=240.0)
    first, results = next(iter(rows)), []
    for label, samples in seconds.items():
        row = {"model": label, "context": context, "cache_bytes": sizes[label]}
        row["seconds_per_token"] = common.per(samples, steps)
        results.append(row | {"time_over_first": common.ratio(samples, seconds[first])})
    return results


def prompt_table(args: argparse.Namespace) -> dict[str, Any]:
    lengths = sorted(args.contexts or ([256, 512] if args.quick else [1 << 14, 1 << 16, 1 << 18, 1 << 20]))
    chunk = 128 if args.quick else 8192
    small = {"num_hidden_layers": 2, "hidden_size": 32} if args.quick else {}
    config = common.configuration(args.config, filter_length=512 if args.quick else max(*lengths, 1 << 20), **small)
    K = min(4, config.num_spectral_channels)
    device, report = begin("decoding_prompt", config, args, budget=K, chunk=chunk, threads=torch.get_num_threads())
    model = make_model(config, device)
    ids = torch.randint(0, 256, (1, lengths[-1]), generator=torch.Generator().manual_seed(0)).to(device)
    read_prompt(model, ids[:, : 2 * chunk], K, chunk)  # constants of the basis
    shapes = [(lengths[0], None), *((length, chunk) for length in lengths)]
    calls = {shape: functools.partial(read_prompt, model, ids[:, : shape[0]], K, shape[1]) for shape in shapes}
    seconds = common.paired(calls, device, args.rounds, warmup=1, limit_seconds=240.0)
    report["results"] = [
        {"length": length, "chunk": size, "tokens_per_second": common.rate(samples, length)}
        | {"peak_bytes": common.peak_memory(calls[length, size], device)}
        for (length, size), samples in seconds.items()
    ]
    states = (read_prompt(model, ids[:, : lengths[0]], K, size).layers for size in (chunk, None))
    for in_pieces, whole in zip(*states):
        common.require_close("state", in_pieces.tensors["features"], whole.tensors["features"])
    return report


@torch.inference_mode()
def read_prompt(model: ESSMForCausalLM, ids: Tensor, budget: int, chunk: int | None) -> ESSMCache:
    options = {"max_new_tokens": 1, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    options |= {"spectral_budget": budget, "prefill_chunk_size": chunk, "return_dict_in_generate": True}
    return model.generate(ids, **options).past_key_values


TABLES = {"contexts": contexts_table, "limit": limit_table, "peers": peers_table, "prompt": prompt_table}


def main(argv: list[str] | None = None) -> dict[str, Any]:
    p = common.parser(__doc__)
    common.add_config(p)
    p.add_argument("--table", choices=TABLES, default="contexts")
    p.add_argument(
        "--contexts", type=common.positive, nargs="+", help=f"tokens read before, of peers at least {SHORT}; or prompts"
    )
    p.add_argument("--batches", type=common.positive, nargs="+", help="of contexts")
    p.add_argument("--backend", default="inductor", help="of limit: compiles the steps")
    args = p.parse_args(argv)
    if args.table == "peers" and args.contexts and min(args.contexts) < SHORT:
        p.error(f"--contexts of peers must be at least {SHORT}, got {min(args.contexts)}")
    return common.finish(TABLES[args.table](args), args)


if __name__ == "__main__":
    main()
