# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""How many states does a trained Mamba need, by which energy of its states?

    python -m benchmarks.selective_states --train_file novels-train.parquet --validation_file novels-validation.parquet

A Mamba of two layers and 16 states reads text; then every layer is left with n states, for all channels at once and
without training:

    exact energies      states kept by their energy along calibration text (`importance`, "aire_exact")
    frozen energies     the same with frozen-time energies ("aire")
    random states       drawn anew for every seed

Reported: bits per byte of the same held-out blocks by n, seed by seed.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

import numpy as np
import torch
from torch import Tensor

from modeling_essm.companions import allocate, importance, prune, restore

from . import ablation, common, sweeps
from .ablation import Settings
from .matched_models import Row
from .sweeps import Run, Sweep, mean

ROW = Row(2, peer="mamba", hidden_size=128, rates=(6e-3,))
SIZES = (12, 8, 6, 4, 3, 2, 1)
CALIBRATION_BLOCKS = 16
METRIC = "bits per byte"
WAYS = {"exact energies": "aire_exact", "frozen energies": "aire", "random states": "random"}


@torch.no_grad()
def reduced(model: Any, bits: Any, calibration: list[Tensor], seed: int) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {way: {} for way in WAYS}
    for way, method in WAYS.items():
        scores = importance(model.eval(), method, calibration=calibration, seed=seed)
        for size in (size for size in SIZES if size < len(scores.raw[0])):
            prune(model, allocate(scores, total=size * len(scores.raw), scope="uniform"))
            found[way][str(size)] = bits(model)["1"]
            restore(model)
    return found


def perform(settings: Settings, run: Run) -> dict[str, Any]:
    model, record, source = ablation.train(settings, ROW, run)
    if record["diverged"]:
        return record | {METRIC: None}
    drawn = np.stack(source.load(source.draw(CALIBRATION_BLOCKS))).astype(np.int64)
    bits = functools.partial(ablation.score, budgets=(1,), text=ablation.load(settings))
    calibration = list(torch.from_numpy(drawn).split(4))
    return record | {METRIC: bits(model), "reduced": reduced(model, bits, calibration, run.seed)}


def define(settings: Settings, run: Run) -> dict[str, Any]:
    return ablation.define(settings, run, ROW) | {"calibration_blocks": CALIBRATION_BLOCKS}


def summarise(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    whole, results = [record for record in records if not record["diverged"]], []
    for way, size in itertools.product(WAYS, whole[0]["reduced"]["random states"]) if whole else ():
        row = {"way": way, "states": int(size), "seeds": [r["seed"] for r in whole]}
        row["bits_per_byte"] = mean([r["reduced"][way][size] for r in whole])
        results.append(row | {"loss": mean([r["reduced"][way][size] - r[METRIC]["1"] for r in whole])})
    return results


def main(argv: list[str] | None = None) -> dict[str, Any]:
    p = common.parser(__doc__)
    ablation.add_arguments(p, 400_000)
    sweeps.add_arguments(p, {"mamba": ROW}, "runs/selective_states", 800)
    args = p.parse_args(argv)
    settings = ablation.settings_of(args, validation_blocks=32, block_size=256, batch_size=8)
    records, report = sweeps.run("selective_states", args, Sweep(settings, perform, define, METRIC))
    report["whole"] = mean([r[METRIC]["1"] for r in records if not r["diverged"]])
    report["results"] = summarise(records)
    return common.finish(report, args)


if __name__ == "__main__":
    main()
