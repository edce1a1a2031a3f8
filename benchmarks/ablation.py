# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""What each part of the gated block is worth, beside the paper's block and its peers; results/ablation_protocol.md.

    python -m benchmarks.ablation --train_file novels-train.parquet --validation_file novels-validation.parquet
    python -m benchmarks.ablation --only paper gated llama --updates 500 --processes 2   # Python's own sources
    python -m benchmarks.ablation --table --runs_dir runs/ablation                       # of the runs that are there

A run is a model, a learning rate and a seed: one JSON file in runs_dir, written when the run has ended. A sweep that
was killed goes on when it is started again: finished runs are skipped, others begin anew. Models have as many
parameters as asked for within 3%: widths give way first, then depth.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from modeling_essm import ESSMConfig, ESSMForCausalLM

from . import common, sweep_tables, sweeps
from .matched_models import TOLERANCE, Row, definition_of, matched_config
from .sweeps import Run

BUDGETS = (2, 4, 8)  # and the capacity
METRIC = "bits_per_byte"


# ---------------------------------------------------------------------------------------------------------------------
# What is compared.


def _gated(layers: int = 6, expansion: float = 2.0, feed_forward: float = 0.0, **fields: Any) -> Row:
    """The gated block of the protocol with some of its parts exchanged; mixing_size None is the width of a head."""
    base = {"block": "gated", "num_heads": 4, "mixing_size": 1, "conv_kernel_size": 4, "scaling_exponent": 0.0}
    base |= {"num_spectral_channels": 16, "embedding_initializer_range": 0.1}
    return Row(layers, base | fields, expansion, feed_forward)


_BASE, _CAPACITY_8 = _gated(), _gated(num_spectral_channels=8)
_FFN = _gated(layers=3, feed_forward=8 / 3, num_spectral_channels=8)
_MATRICES = _gated(expansion=1.0, mixing_size=None)
_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
_PEER_RATES = (1.5e-3, 3e-3, 6e-3)
_LLAMA = Row(5, peer="transformer", hidden_size=112, rates=_PEER_RATES)
# The library's own scale of new weights for Mamba-2.
_MAMBA2 = Row(4, {"initializer_range": 0.1}, peer="mamba2", hidden_size=160, rates=_PEER_RATES)
ROWS: dict[str, Row] = {
    "paper": Row(3, {"num_spectral_channels": 16}),
    "gated": _BASE,
    "gated, d 16": _gated(mixing_size=16),
    "gated, inner D": _gated(expansion=1.0),
    "gated, inner D, d 16": _gated(expansion=1.0, mixing_size=16),
    "gated, inner D, d D/4": _MATRICES,
    "gated, inner D, d D": _gated(expansion=1.0, mixing_size=None, num_heads=1),
    "gated, inner 3 D": _gated(expansion=3.0),
    "gated, 1 head": _gated(num_heads=1),
    "gated, 8 heads": _gated(num_heads=8),
    "gated, 16 heads": _gated(num_heads=16),
    "gated, 4 blocks": _gated(layers=4),
    "gated, 9 blocks": _gated(layers=9),
    "gated, FFN": _gated(layers=3, feed_forward=8 / 3),
    "gated, no convolution": _gated(conv_kernel_size=0),
    "gated, exponent 1/16": _gated(scaling_exponent=1 / 16),
    "gated, exponent 1/4": _gated(scaling_exponent=1 / 4),
    "gated, exponent 1/2": _gated(scaling_exponent=1 / 2),
    "gated, capacity 8, exponent 1/4": _gated(num_spectral_channels=8, scaling_exponent=1 / 4),
    "gated, no gating": _gated(gating="none"),
    "gated, capacity 8": _CAPACITY_8,
    "gated, capacity 32": _gated(num_spectral_channels=32),
    "gated, embeddings 0.02": _gated(embedding_initializer_range=0.02),
    "gated, half full": dataclasses.replace(_BASE, full_share=0.5),
    "gated, no budget dropout": dataclasses.replace(_BASE, full_share=1.0),
    "gated, authors' schedule": dataclasses.replace(_BASE, schedule="authors"),
    "gated, capacity 8, half full": dataclasses.replace(_CAPACITY_8, full_share=0.5),
    "gated, capacity 8, no budget dropout": dataclasses.replace(_CAPACITY_8, full_share=1.0),
    "gated, capacity 8, FFN": _FFN,
    "gated, capacity 8, 4 blocks, FFN 4/3": _gated(layers=4, feed_forward=4 / 3, num_spectral_channels=8),
    "gated, attention 1 in 6": dataclasses.replace(_gated(**_HEADS), attention_every=6),
    "gated, attention 1 in 3": dataclasses.replace(_gated(**_HEADS), attention_every=3),
    "llama": _LLAMA,
    "mamba2": _MAMBA2,
    "s4d": Row(3, peer="s4d", hidden_size=152, rates=_PEER_RATES),
    # As many updates as take the CPU time of the base row, or of "gated, capacity 8" (the peers, by `ablation_speed`).
    "gated, inner D, d D/4, equal time": dataclasses.replace(_MATRICES, updates=3 / 2),
    "gated, capacity 8, FFN, equal time": dataclasses.replace(_FFN, updates=4 / 3),
    "llama, equal time": dataclasses.replace(_LLAMA, updates=5 / 4),
    "mamba2, equal time": dataclasses.replace(_MAMBA2, updates=11 / 12),
}


# ---------------------------------------------------------------------------------------------------------------------
# One run.


@dataclass(frozen=True)
class Settings:
    """What all runs of a table have in common; training is otherwise at the defaults of train_clm.py."""

    train_file: tuple[str, ...] | None
    validation_file: tuple[str, ...] | None
    parameters: int
    updates: int
    batch_size: int = 4
    block_size: int = 512
    validation_blocks: int = 64
    filter_length: int = 4096
    device: str = "cpu"

    def arguments(self, row: Row | None = None, rate: float = 0.0, seed: int = 0) -> Any:
        """A run as arguments of train_clm.py, without the model's sizes."""
        from essm_train.data.arguments import CLMArguments

        return CLMArguments(
            train_file=self.train_file,
            validation_file=self.validation_file,
            block_size=self.block_size,
            filter_length=self.filter_length,
            validation_blocks=self.validation_blocks,
            sweep_blocks=self.validation_blocks,
            per_device_train_batch_size=self.batch_size,
            **sweeps.training_arguments(row or Row(1), self.updates, rate, seed),
        )


@functools.cache
def load(settings: Settings) -> tuple[Any, dict[str, Any]]:
    """The text, and what must be the same of a run that is found: settings, and hashes of what is read.

    In which folder the text lies is not part of it.
    """
    from essm_train.data.text import load_text
    from essm_train.data.tokens import ByteEncoder

    text = load_text(settings.arguments(), ByteEncoder())
    values = {k: v for k, v in dataclasses.asdict(settings).items() if not k.endswith("_file")}
    held_out = hashlib.sha256(text.held_out.numpy().tobytes()).hexdigest()
    data = {"data": text.description, "training_text": text.sha256, "validation_blocks_hash": held_out}
    return text, values | data


def perform(settings: Settings, run: Run, path: Path) -> dict[str, Any]:
    """Train on one thread, measure, write the file in one move, return what it holds."""
    from essm_train.data.samples import MapSamples

    text, values = load(settings)
    row = ROWS[run.name]

    def make(config: Any) -> nn.Module:
        return make_model(config, settings.filter_length)

    def fit(model: nn.Module) -> dict[str, Any]:
        source = MapSamples(text.source.samples, run.seed)  # the order that train_clm.py has at this seed
        return train(model, source, settings.arguments(row, run.rate, run.seed))

    def measured(model: nn.Module, budgets: Sequence[int]) -> dict[str, float]:
        return score(model, text.held_out, budgets)

    wanted = {"settings": values, "definition": definition_of(row)}
    config = matched_config(row, settings.parameters)
    return sweeps.measure(run, path, wanted, config, make, fit, measured, BUDGETS, METRIC, settings.block_size)


def make_model(config: Any, filter_length: int) -> nn.Module:
    """A new language model of bytes in fp32, with filters of that length."""
    if isinstance(config, ESSMConfig):
        return ESSMForCausalLM(ESSMConfig.from_dict(config.to_dict(), filter_length=filter_length)).float()
    from essm_train.baselines.models import BaselineForCausalLM

    return BaselineForCausalLM(config).float()


def train(model: nn.Module, source: Any, args: Any) -> dict[str, Any]:
    """All updates on blocks that are drawn from the source."""
    from essm_train.models import run_at_budget

    def next_forward() -> Callable[[int], Any]:
        blocks = source.load(source.draw(args.per_device_train_batch_size))
        ids = torch.from_numpy(np.stack(blocks).astype(np.int64)).to(model.device)
        return functools.partial(run_at_budget, model, {"input_ids": ids, "labels": ids})

    return sweeps.train(model, next_forward, args, args.per_device_train_batch_size * args.block_size)


def score(model: nn.Module, held_out: torch.Tensor, budgets: Sequence[int]) -> dict[str, float]:
    """Bits per byte of the blocks at every budget, as the final sweep of train_clm.py has them."""
    from essm_train.data.blocks import text_labels
    from essm_train.measure.scoring import num_scored, total_nats

    labels = text_labels(held_out)
    scale = 1 / (math.log(2) * num_scored(labels))
    return {str(K): total_nats(model.eval(), held_out, labels, K, 8) * scale for K in budgets}


# ---------------------------------------------------------------------------------------------------------------------
# All runs.


def sweep(settings: Settings, runs: Sequence[Run], folder: Path, processes: int) -> None:
    """Perform the runs that are not there yet.

    Raises:
        ValueError: a run was found that has other settings, or a model cannot be made; before any work.
    """
    _, values = load(settings)
    for name in dict.fromkeys(run.name for run in runs):
        matched_config(ROWS[name], settings.parameters)

    def wanted(run: Run) -> dict[str, Any]:
        return values | {"definition": definition_of(ROWS[run.name])}

    sweeps.sweep(runs, folder, processes, functools.partial(perform, settings), wanted, METRIC)


def summarise(records: list[dict[str, Any]]) -> dict[str, Any]:
    """One model at its best rate; `sweep_tables.summarise`."""
    return sweep_tables.summarise(records, METRIC)


def difference(result: dict[str, Any], other: dict[str, Any]) -> dict[str, float] | None:
    """Bits per byte at the full budget above the other model's, seed by seed; None where they share no seed."""
    mine, theirs = (
        {seed: list(bits.values())[-1] for seed, bits in r.get("by_seed", {}).items()} for r in (result, other)
    )
    shared = [mine[seed] - theirs[seed] for seed in mine if seed in theirs]
    return sweep_tables.mean(shared) if shared else None


def full(result: dict[str, Any]) -> float:
    """Mean bits per byte at the full budget; infinite if every rate diverged."""
    return sweep_tables.at_full_budget(result, METRIC)


def print_table(results: list[dict[str, Any]]) -> None:
    rows = []
    for r in results:
        bits = r.get(METRIC, {})
        cells = [bits.get(str(K)) for K in BUDGETS] + [(list(bits.values()) or [None])[-1]]
        against = sweep_tables.shown(r["against_gated"], "+")
        rows.append([*sweep_tables.columns(r), *map(sweep_tables.shown, cells), against, sweep_tables.speed(r)])
    budgets = " ".join(f"K={K}" for K in BUDGETS)
    common.table(f"{sweep_tables.COLUMNS} {budgets} full full-gated tokens/CPU_s", rows)
    print("* the best rate is the smallest or the largest tried; full-gated: the difference, seed by seed")


def targets_of(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The goals for the best gated model, as far as there are the models that they compare with."""
    found = {r["model"]: r for r in results if r["best_rate"] is not None}
    equal_text = {name for name, row in ROWS.items() if row.updates == 1}
    gated = [found[name] for name in found if name.startswith("gated") and name in equal_text]
    gated = [r for r in gated if ROWS[r["model"]].full_share < 1]  # elastic ones
    if not gated:
        return []
    best = min(gated, key=full)
    bits, name = {K: value["mean"] for K, value in best["bits_per_byte"].items()}, best["model"]
    targets = [
        common.target(f"{name}: bits per byte at K={K} over full", bits[K] / full(best), most=most)
        for K, most in (("4", 1.007), ("2", 1.015))
    ]
    for peer, most in (("mamba2", 1.0), ("llama", None)):
        if peer in found:
            limit = full(found[peer]) if most else full(found[peer]) - 0.1
            targets.append(common.target(f"{name}: bits per byte against {peer}", full(best), most=limit))
    return targets


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Perform what is missing, then print the table and write it, with every rate and the spread over seeds."""
    p = common.parser(__doc__)
    p.add_argument("--train_file", nargs="+", help="text to train on; by default Python's own sources")
    p.add_argument("--validation_file", nargs="+", help="held-out text; by default the end of train_file")
    p.add_argument("--parameters", type=int, default=800_000, help=f"of every model, to {TOLERANCE:.0%}%")
    sweeps.add_arguments(p, ROWS, "runs/ablation", updates=500)
    args = p.parse_args(argv)
    sweeps.check_arguments(p, args, "parameters")
    names = args.only or [*ROWS]
    if not args.table:
        size = (60_000, min(args.updates, 3)) if args.quick else (args.parameters, args.updates)
        small = {"batch_size": 2, "block_size": 64, "validation_blocks": 4, "filter_length": 512} if args.quick else {}
        device = str(common.pick_device(args.device))
        files = [None if paths is None else tuple(paths) for paths in (args.train_file, args.validation_file)]
        settings = Settings(*files, *size, **small, device=device)
        sweep(settings, sweeps.runs_of(ROWS, names, args), args.runs_dir, args.processes)
    records = [record for record in sweeps.collect(args.runs_dir) if record["model"] in names]
    device, report = common.start("ablation", args, **records[0]["settings"])
    by_name = {name: [r for r in records if r["model"] == name] for name in names}
    report["results"] = sorted((summarise(runs) for runs in by_name.values() if runs), key=full)
    gated = next((r for r in report["results"] if r["model"] == "gated"), {})
    for result in report["results"]:
        result["against_gated"] = difference(result, gated)
    print_table(report["results"])
    report["targets"] = targets_of(report["results"])
    return common.finish(report, args, device)


if __name__ == "__main__":
    main()
