# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""What do a decoded token and the memory behind it cost, beside a Llama and a Mamba-2 of the same size?

    python -m benchmarks.decoding_peers
    python -m benchmarks.decoding_peers --config hub_configs/essm-gated-20m

The models are those of `benchmarks.training_step --table models`: random weights, parameters within 5% of each other,
Llama and Mamba-2 take the library's steps. Each reads a context at batch 1, then decodes; a step is one forward call,
under inference_mode, eager, in fp32 on one CPU thread or in bf16 on a GPU. Models take turns in every round. A Llama
has the library's default cache, which is copied at every step, and is cut back to the context before each sample, or a
static one with room for all samples. Mamba-2 reads 128 tokens whatever the context, as its state has one size and the
library's torch path reads slowly. Before anything is timed, a few steps of each model must give what one call over the
whole text gives. Bytes are of all tensors in the cache.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from transformers import StaticCache

from . import common
from .released import CHECKED_STEPS
from .training_step import make_models

PIECE = 2048  # tokens of one call that reads a context
SHORT = 128  # tokens that steps are checked on


def with_room(context: int, steps: int, rounds: int) -> int:
    """Tokens of a context and of all samples after it, each of which may repeat its steps until they last."""
    return context + (rounds + 2) * max(steps, 64)


class Decoder:
    """A model with what it has read; `room` is that of a static cache."""

    def __init__(self, model: Any, budget: int | None = None, room: int | None = None):
        self.model, self.room = model, room
        self.name = "cache_params" if model.config.model_type == "mamba2" else "past_key_values"
        self.options = {"spectral_budget": budget} if budget else {}
        self.grows = model.config.model_type == "llama" and room is None
        self.forget()

    def forget(self) -> None:
        self.cache = None if self.room is None else StaticCache(config=self.model.config, max_cache_len=self.room)

    @torch.inference_mode()
    def read(self, ids: Tensor) -> Tensor:
        """ids (1, n) -> logits (1, n, V); the cache goes on."""
        given = {self.name: self.cache} if self.cache is not None else {}
        out = self.model(ids, use_cache=True, **given, **self.options)
        self.cache = out[self.name]
        return out.logits

    @torch.inference_mode()
    def check(self, ids: Tensor) -> float:
        """Steps against one call; raises RuntimeError where they differ."""
        whole = self.model(ids, use_cache=False, **self.options).logits[:, -CHECKED_STEPS:]
        self.read(ids[:, :-CHECKED_STEPS])
        steps = torch.cat([self.read(token) for token in ids[:, -CHECKED_STEPS:].split(1, 1)], 1)
        self.forget()
        return common.require_close("steps", steps, whole, 1e-3 if whole.dtype == torch.float32 else 5e-2)

    def sample(self, token: Tensor, context: int, steps: int) -> None:
        """So many steps: after the context in a cache that grows, else after those of the last sample."""
        if self.grows and (more := self.cache.get_seq_length() - context):
            self.cache.crop(-more)
        for _ in range(steps):
            self.read(token)


def measure(
    models: dict[str, Any], rows: dict[str, tuple[str, int | None]], context: int, steps: int, device: Any, rounds: int
) -> list[dict[str, Any]]:
    """A row of the report for each of `rows`, a model's name and its budget by their label."""
    ids = torch.randint(0, 256, (1, context), device=device)
    decoders, calls = {}, {}
    read = {label: SHORT if name == "Mamba-2" else context for label, (name, _) in rows.items()}
    room = with_room(context, steps, rounds)
    for label, (name, budget) in rows.items():
        one = Decoder(models[name], budget, room if label.endswith("static cache") else None)
        decoders[label], error = one, one.check(ids[:, :SHORT])
        for piece in ids[:, : read[label]].split(PIECE, 1):
            one.read(piece)
        calls[label] = functools.partial(one.sample, ids[:, -1:], context, steps)
        print(f"{label}: steps agree with one call to {error:.1e}", flush=True)
    sizes = {label: common.state_bytes(one.cache) for label, one in decoders.items()}
    seconds: dict[str, list[float]] = common.paired(calls, device, rounds, warmup=1, limit_seconds=240.0)
    first = next(iter(rows))
    return [
        {
            "model": label,
            "context": context,
            "context_read": read[label],
            "cache_bytes": sizes[label],
            "seconds_per_token": common.spread([s / steps for s in seconds[label]]),
            "time_over_first": common.ratio(seconds[label], seconds[first]),
        }
        for label in rows
    ]


def main(argv: list[str] | None = None) -> dict[str, Any]:
    p = common.parser(__doc__)
    common.add_config(p)
    p.add_argument("--contexts", type=int, nargs="+", default=None)
    p.add_argument("--steps", type=int, default=16, help="decoded tokens of one sample")
    args = p.parse_args(argv)
    contexts = args.contexts or ([128, 160] if args.quick else [1024, 16384])
    if min(contexts) < SHORT:
        p.error(f"--contexts must be at least {SHORT}, got {args.contexts}")
    steps = 2 if args.quick else args.steps
    device = common.pick_device(args.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    made = make_models(with_room(max(contexts), steps, args.rounds), args)
    models = {name: model.to(device, dtype).eval() for name, model in made.items()}
    configured = next(reversed(models)) if args.config else "ES-SSM"
    settings = {"contexts": contexts, "steps": steps, "threads": 1, "dtype": str(dtype)[6:], "rounds": args.rounds}
    settings |= common.model_settings(args, models[configured].config)
    device, report = common.start("decoding_peers", args, **settings)
    report["parameters"] = {name: model.num_parameters() for name, model in models.items()}
    rows: dict[str, tuple[str, int | None]] = {}
    for name in dict.fromkeys((configured, "ES-SSM")):
        rows |= {f"{name} K={K}": (name, K) for K in common.clipped((4, 32), models[name].config)}
    rows |= {label: (label.split(",")[0], None) for label in ("Llama", "Llama, static cache", "Mamba-2")}
    report["results"] = []
    with common.threads(1):
        for context in contexts:
            report["results"] += measure(models, rows, context, steps, device, args.rounds)
    cells = []
    for r in report["results"]:
        relative = "{median:.2f}({min:.2f}-{max:.2f})".format(**r["time_over_first"])
        cells.append([r["model"].replace(" ", "_"), r["context"], common.ms(r["seconds_per_token"]), relative])
        cells[-1].append(r["cache_bytes"])
    common.table("model context ms(min-max) over_first cache_bytes", cells)
    sizes = {(r["model"], r["context"]): r["cache_bytes"] for r in report["results"]}
    growth = max(sizes[label, max(contexts)] / sizes[label, min(contexts)] for label in rows if "K=" in label)
    report["targets"] = [common.target("bytes of an ES-SSM's state, longest context over shortest", growth, most=1.0)]
    return common.finish(report, args, device)


if __name__ == "__main__":
    main()
