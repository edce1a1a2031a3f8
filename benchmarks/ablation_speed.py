# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""How fast do the models of `benchmarks.ablation` learn, side by side: tokens a second of updates, each in its turn.

    python -m benchmarks.ablation_speed
    python -m benchmarks.ablation_speed --parameters 800000 --only "gated, capacity 8" mamba2

The speeds in the ablation's table are of runs made at different times; these are of paired rounds in one process. An
update is forward, backward and AdamW on 4 random blocks of 512 bytes, in fp32 on one CPU thread. Elastic models train
one budget of the discrete schedule after the other, all of them in each round, peers as often. Mamba-2 computes by
chunks (`essm_train.baselines.mamba`); "mamba2, library" is the same model by the library's own torch path.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer

from modeling_essm import ESSMForCausalLM
from modeling_essm.training.budget_dropout import BUDGETS

from . import common
from .ablation import ROWS, make_model
from .matched_models import matched_config
from .steps import make_optimizer

NAMES = ("gated, capacity 8", "gated, capacity 8, FFN", "mamba2", "mamba2, library", "s4d", "llama", "paper")
BLOCK, BATCH, FILTER_LENGTH = 512, 4, 4096
UPDATES = 5  # of a round; the discrete schedule has so many budgets up to 8


def updates(model: Any, block: int) -> Callable[[], None]:
    """A call that makes UPDATES updates."""
    optimizer = make_optimizer(model.train())
    ids = torch.randint(0, 256, (BATCH, block), device=model.device)
    capacity = model.config.num_spectral_channels if isinstance(model, ESSMForCausalLM) else None
    budgets = [None] if capacity is None else [K for K in BUDGETS if capacity >= K]

    def run() -> None:
        for i in range(UPDATES):
            K = budgets[i * len(budgets) // UPDATES]
            model(ids, labels=ids, **({} if K is None else {"spectral_budget": K})).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    return run


def measure(parameters: int, args: argparse.Namespace, device: torch.device) -> list[dict[str, Any]]:
    """A row for each model of that size."""
    block = 64 if args.quick else BLOCK
    calls, sizes = {}, {}
    for name in args.only:
        torch.manual_seed(0)
        model = make_model(matched_config(ROWS[name.removesuffix(", library")], parameters), FILTER_LENGTH).to(device)
        for module in list(model.modules()) if name.endswith(", library") else ():
            if isinstance(module, Mamba2Mixer):
                module.__class__ = Mamba2Mixer  # the same weights, without the mixer of essm_train
        calls[name], sizes[name] = updates(model, block), model.num_parameters()
    seconds = common.paired(calls, device, args.rounds, warmup=1, limit_seconds=600.0)
    tokens, first = UPDATES * BATCH * block, next(iter(calls))
    return [
        {
            "model": name,
            "parameters": sizes[name],
            "tokens_per_second": common.spread([tokens / s for s in samples]),
            "speed_over_first": common.ratio(seconds[first], samples),
        }
        for name, samples in seconds.items()
    ]


def main(argv: list[str] | None = None) -> dict[str, Any]:
    p = common.parser(__doc__)
    p.add_argument("--parameters", type=int, nargs="+", default=[800_000, 3_000_000])
    p.add_argument("--only", nargs="+", choices=[*ROWS, "mamba2, library"], default=[*NAMES], metavar="ROW")
    p.set_defaults(rounds=5)
    args = p.parse_args(argv)
    sizes = [60_000] if args.quick else args.parameters
    settings = {"block": 64 if args.quick else BLOCK, "batch": BATCH, "dtype": "float32", "threads": 1}
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
