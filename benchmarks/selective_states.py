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
from typing import Any

import torch
from torch import Tensor, nn

from essm_train.data.samples import MapSamples
from modeling_essm.companions import allocate, importance, prune, restore

from . import ablation, common, sweeps
from .ablation import Settings
from .matched_models import Row, definition_of, matched_config
from .sweeps import Run, Sweep, mean

ROW = Row(2, peer="mamba", hidden_size=128, rates=(6e-3,))
SIZES = (12, 8, 6, 4, 3, 2, 1)
CALIBRATION_BLOCKS = 16
METRIC = "bits per byte"
WAYS = {"exact energies": "aire_exact", "frozen energies": "aire", "random states": "random"}


@torch.no_grad()
def reduced(model: Any, bits: Any, calibration: list[Tensor], seed: int) -> dict[str, dict[str, float]]:
    """Bits per byte by way and number of states."""
    model.eval()
    found: dict[str, dict[str, float]] = {way: {} for way in WAYS}
    for way, method in WAYS.items():
        scores = importance(model, method, calibration=calibration, seed=seed)
        for size in (size for size in SIZES if size < len(scores.raw[0])):
            prune(model, allocate(scores, total=size * len(scores.raw), scope="uniform"))
            found[way][str(size)] = bits(model)["1"]
            restore(model)
    return found


def perform(settings: Settings, run: Run) -> dict[str, Any]:
    text, config = ablation.load(settings), matched_config(ROW, settings.parameters)
    torch.manual_seed(run.seed)
    model: nn.Module = ablation.make_model(config, settings.filter_length).to(settings.device)
    source = MapSamples(text.source.samples, run.seed)
    record = ablation.train(model, source, settings.arguments(ROW, run.rate, run.seed))
    drawn = source.load(source.draw(CALIBRATION_BLOCKS))
    calibration = list(torch.stack([torch.as_tensor(block.astype("int64")) for block in drawn]).split(4))
    if record["diverged"]:
        return record | {METRIC: None}
    bits = functools.partial(ablation.score, budgets=(1,), text=text)
    return record | {METRIC: bits(model), "reduced": reduced(model, bits, calibration, run.seed)}


def define(settings: Settings, run: Run) -> dict[str, Any]:
    return {"row": definition_of(ROW), "calibration_blocks": CALIBRATION_BLOCKS, "text": ablation.text_of(settings)}


def summarise(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Every way and number of states: the mean over seeds, and what it loses against the whole model, paired."""
    whole = [record for record in records if not record["diverged"]]
    return [
        {
            "way": way,
            "states": int(size),
            "seeds": [r["seed"] for r in whole],
            "bits_per_byte": mean([r["reduced"][way][size] for r in whole]),
            "loss": mean([r["reduced"][way][size] - r[METRIC]["1"] for r in whole]),
        }
        for way in (WAYS if whole else ())
        for size in whole[0]["reduced"][way]
    ]


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Perform what is missing, then print the table and write it."""
    p = common.parser(__doc__)
    p.add_argument("--train_file", nargs="+", help="text to train on; by default Python's own sources")
    p.add_argument("--validation_file", nargs="+", help="held-out text; by default the end of train_file")
    p.add_argument("--parameters", type=int, default=400_000, help="of the model")
    sweeps.add_arguments(p, {"mamba": ROW}, "runs/selective_states", updates=800)
    args = p.parse_args(argv)
    size = (60_000, min(args.updates, 3)) if args.quick else (args.parameters, args.updates)
    small: dict[str, Any] = {"validation_blocks": 32, "block_size": 256, "batch_size": 8}
    small |= {"batch_size": 2, "block_size": 64, "validation_blocks": 2} if args.quick else {}
    files = [None if paths is None else tuple(paths) for paths in (args.train_file, args.validation_file)]
    settings = Settings(*files, *size, **small, device=str(common.pick_device(args.device)))
    records = sweeps.records_of(args, Sweep(settings, perform, define, METRIC), lambda name: ROW.rates)
    device, report = common.start("selective_states", args, **records[0]["settings"])
    report["whole"] = mean([r[METRIC]["1"] for r in records if not r["diverged"]])
    report["results"] = summarise(records)
    return common.finish(report, args, device)


if __name__ == "__main__":
    main()
