# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""How fast do the models of `benchmarks.ablation` learn, side by side: tokens a second of updates, each in its turn.

    python -m benchmarks.ablation_speed
    python -m benchmarks.ablation_speed --parameters 800000 --only elastic mamba2

The speeds in the ablation's table are of runs made at different times; these are of paired rounds in one process. An
update is forward, backward and a step of its row's optimizer on 4 random blocks of 512 bytes, in fp32 on one CPU
thread, at the budgets of its row's schedule. In a round a model makes five updates, or where they have one budget each,
one at every budget. Mamba-2 computes by chunks (`essm_train.baselines.mamba`); "mamba2, library" is the same model by
the library's own torch path.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer

from essm_train.arguments import RunArguments
from essm_train.models import run_part
from essm_train.run.loop import make_schedule
from essm_train.run.steps import make_optimizer, update
from modeling_essm.training.budget_dropout import Part, budget_losses

from . import common, sweeps
from .ablation import ROWS, make_model
from .matched_models import Row, matched_config

NAMES = ("elastic", "elastic, memory", "elastic, FFN", "mamba2", "mamba2, library", "s4d", "llama", "paper")
BATCH, FILTER_LENGTH = 4, 4096
UPDATES = 5  # in a round


def updates(model: Any, row: Row, block: int) -> tuple[Callable[[], None], int]:
    """A call that makes the updates of a round, and their tokens."""
    args = RunArguments(**sweeps.training_arguments(row, UPDATES, 1e-3, 0))
    schedule, optimizer = make_schedule(args, model), make_optimizer(model.train(), args)
    ids = torch.randint(256, (BATCH, block), device=model.device)
    run = functools.partial(run_part, model, {"input_ids": ids, "labels": ids})
    if len(schedule.budgets) > 1 and len(schedule(UPDATES)) == 1:
        parts: list[tuple[Part, ...]] = [(Part(K, slice(None), 1.0, 1.0),) for K in schedule.budgets]
    else:
        parts = [schedule.parts(i, BATCH) for i in range(UPDATES)]

    def call() -> None:
        for each in parts:
            losses = budget_losses(run, each, labels=ids, distillation_weight=args.distillation_weight or 0.0)
            update(optimizer, losses, model.parameters())

    return call, len(parts) * BATCH * block


def measure(parameters: int, names: list[str], block: int, rounds: int, device: torch.device) -> list[dict[str, Any]]:
    calls, tokens, sizes, rows = {}, {}, {}, []
    for name in names:
        torch.manual_seed(0)
        row = ROWS[name.removesuffix(", library")]
        model = make_model(matched_config(row, parameters), FILTER_LENGTH).to(device)
        for module in model.modules() if name.endswith(", library") else ():
            if isinstance(module, Mamba2Mixer):
                module.__class__ = Mamba2Mixer  # which computes as transformers does, with the same weights
        (calls[name], tokens[name]), sizes[name] = updates(model, row, block), model.num_parameters()
    seconds = common.paired(calls, device, rounds, warmup=1, limit_seconds=600.0)
    speeds = {name: [tokens[name] / s for s in samples] for name, samples in seconds.items()}
    for name, speed in speeds.items():
        measured = {"model": name, "parameters": sizes[name], "tokens_per_second": common.spread(speed)}
        rows.append(measured | {"speed_over_first": common.ratio(speed, speeds[names[0]])})
    return rows


def main(argv: list[str] | None = None) -> dict[str, Any]:
    p = common.parser(__doc__, rounds=5)
    p.add_argument("--parameters", type=common.positive, nargs="+", default=[800_000, 3_000_000])
    p.add_argument("--only", nargs="+", choices=[*ROWS, "mamba2, library"], default=[*NAMES], metavar="ROW")
    args = p.parse_args(argv)
    sizes, block = ([60_000], 64) if args.quick else (args.parameters, 512)
    settings = {"block": block, "batch": BATCH, "dtype": "float32", "threads": 1, "rounds": args.rounds}
    device, report = common.start("ablation_speed", args, **settings)
    with common.threads(1):
        report["results"] = [row for size in sizes for row in measure(size, args.only, block, args.rounds, device)]
    return common.finish(report, args)


if __name__ == "__main__":
    main()
