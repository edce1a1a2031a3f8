# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""How fast do the models of `benchmarks.ablation` learn, side by side: tokens a second of updates, each in its turn.

    python -m benchmarks.ablation_speed
    python -m benchmarks.ablation_speed --parameters 800000 --only "gated, capacity 8" mamba2

The speeds in the ablation's table are of runs made at different times; these are of paired rounds in one process. An
update is forward, backward and AdamW on 4 random blocks of 512 bytes, in fp32 on one CPU thread. In a round an elastic
model makes one update at each budget of the discrete schedule, and a peer makes five. Mamba-2 computes by chunks
(`essm_train.baselines.mamba`); "mamba2, library" is the same model by the library's own torch path.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer

from modeling_essm import ESSMForCausalLM
from modeling_essm.training.budget_dropout import BUDGETS, clip_budgets

from . import common
from .ablation import ROWS, make_model
from .matched_models import matched_config
from .steps import make_optimizer

NAMES = ("gated, capacity 8", "gated, capacity 8, FFN", "mamba2", "mamba2, library", "s4d", "llama", "paper")
BLOCK, BATCH, FILTER_LENGTH = 512, 4, 4096
UPDATES = 5  # of a peer in a round


def updates(model: Any, block: int) -> tuple[Callable[[], None], int]:
    """A call that makes the updates of a round, and their tokens."""
    optimizer = make_optimizer(model.train())
    ids = torch.randint(0, 256, (BATCH, block), device=model.device)
    options: list[dict[str, int]] = [{}] * UPDATES
    if isinstance(model, ESSMForCausalLM):
        options = [{"spectral_budget": K} for K in clip_budgets(BUDGETS, model.config.num_spectral_channels)]

    def run() -> None:
        for option in options:
            model(ids, labels=ids, **option).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    return run, len(options) * ids.numel()


def measure(parameters: int, args: argparse.Namespace, device: torch.device) -> list[dict[str, Any]]:
    """A row for each model of that size."""
    block = 64 if args.quick else BLOCK
    calls, tokens, sizes = {}, {}, {}
    for name in args.only:
        torch.manual_seed(0)
        model = make_model(matched_config(ROWS[name.removesuffix(", library")], parameters), FILTER_LENGTH).to(device)
        if name.endswith(", library"):
            as_the_library(model)
        (calls[name], tokens[name]), sizes[name] = updates(model, block), model.num_parameters()
    seconds = common.paired(calls, device, args.rounds, warmup=1, limit_seconds=600.0)
    speeds = {name: [tokens[name] / s for s in samples] for name, samples in seconds.items()}
    first = next(iter(calls))
    return [
        {
            "model": name,
            "parameters": sizes[name],
            "tokens_per_second": common.spread(speed),
            "speed_over_first": common.ratio(speed, speeds[first]),
        }
        for name, speed in speeds.items()
    ]


def as_the_library(model: torch.nn.Module) -> None:
    """Let a Mamba-2 compute as transformers does, with the same weights."""
    for module in model.modules():
        if isinstance(module, Mamba2Mixer):
            module.__class__ = Mamba2Mixer


def main(argv: list[str] | None = None) -> dict[str, Any]:
    p = common.parser(__doc__)
    p.add_argument("--parameters", type=int, nargs="+", default=[800_000, 3_000_000])
    p.add_argument("--only", nargs="+", choices=[*ROWS, "mamba2, library"], default=[*NAMES], metavar="ROW")
    p.set_defaults(rounds=5)
    args = p.parse_args(argv)
    sizes = [60_000] if args.quick else args.parameters
    settings = {"block": 64 if args.quick else BLOCK, "batch": BATCH, "dtype": "float32", "threads": 1}
    settings["rounds"] = args.rounds
    device, report = common.start("ablation_speed", args, **settings)
    report["results"] = []
    with common.threads(1):
        for size in sizes:
            report["results"] += measure(size, args, device)
    cells = []
    for r in report["results"]:
        relative = "{median:.2f}({min:.2f}-{max:.2f})".format(**r["speed_over_first"])
        speed = "{median:,.0f}({min:,.0f}-{max:,.0f})".format(**r["tokens_per_second"])
        cells.append([r["model"].replace(" ", "_"), r["parameters"], speed, relative])
    common.table("model parameters tokens/s(min-max) speed_over_first", cells)
    report["targets"] = []
    return common.finish(report, args, device)


if __name__ == "__main__":
    main()
