# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""What each part of the elastic block is worth, beside the paper's block and peers; results/ablation_protocol.md.

    python -m benchmarks.ablation --train_file novels-train.parquet --validation_file novels-validation.parquet
    python -m benchmarks.ablation --only elastic mamba2 llama --updates 500 --processes 2   # Python's own sources
    python -m benchmarks.ablation --table --runs_dir runs/ablation                       # of the runs that are there

A run is a model, a learning rate and a seed (`benchmarks.sweeps`). Models have as many parameters as asked for within
3% (`benchmarks.matched_models`): an ES-SSM's widths give way before its depth, a peer's width and depth together.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Subset

from essm_train.baselines.models import BaselineForCausalLM
from essm_train.data.arguments import CLMArguments
from essm_train.data.samples import MapSamples
from essm_train.data.text import load_text
from essm_train.data.tokens import ByteEncoder
from essm_train.measure.scoring import hold_out_blocks
from modeling_essm import ESSMConfig, ESSMForCausalLM

from . import common, sweeps
from .matched_models import TOLERANCE, Row, matched_config
from .sweeps import Run, Sweep

BUDGETS = (1, 2, 3, 4, 6, 8)  # and the capacity
METRIC = "bits_per_byte"
EQUAL_COMPUTE = 2.75  # updates of "rows" that take as long as one of every separate model together (measured)


def _elastic(
    layers: int = 6,
    expansion: float = 2.0,
    feed_forward: float = 0.0,
    memory: float = 0.0,
    optimizer: str = "adamw",
    **fields: Any,
) -> Row:
    """The elastic block of the protocol with some of its parts exchanged."""
    fields = {"block": "elastic", "num_spectral_channels": 8} | fields
    return Row(layers, fields, expansion, feed_forward, memory=memory, schedule="family", optimizer=optimizer)


_BASE = _elastic()
_MUON = _elastic(optimizer="muon")
_WIDE = _elastic(expansion=4.0, optimizer="muon")
_PEER_RATES = (1.5e-3, 3e-3, 6e-3)
ROWS: dict[str, Row] = {
    "paper": Row(3, {"num_spectral_channels": 16}),
    "elastic": _BASE,
    "elastic, memory": _elastic(memory=1 / 8),
    "elastic, 4 blocks": _elastic(layers=4),
    "elastic, 9 blocks": _elastic(layers=9),
    "elastic, FFN": _elastic(layers=3, feed_forward=8 / 3),
    "elastic, no convolution": _elastic(conv_kernel_size=1),
    "elastic, exponent 1/16": _elastic(scaling_exponent=1 / 16),
    "elastic, exponent 1/4": _elastic(scaling_exponent=1 / 4),
    "elastic, rows": dataclasses.replace(_BASE, schedule="rows"),
    "elastic, rows, equal compute": dataclasses.replace(_BASE, schedule="rows", updates=EQUAL_COMPUTE),
    "elastic, rows, equal compute and text": dataclasses.replace(
        _BASE, schedule="rows", updates=EQUAL_COMPUTE, rereads=True
    ),
    "elastic, full alone": dataclasses.replace(_BASE, full_share=1.0),
    **{f"elastic, K = {K} alone": dataclasses.replace(_BASE, full_share=1.0, channels=K) for K in (1, 2, 4)},
    "elastic, muon": _MUON,
    "elastic, muon, rows, equal compute": dataclasses.replace(_MUON, schedule="rows", updates=EQUAL_COMPUTE),
    "elastic, muon, full alone": dataclasses.replace(_MUON, full_share=1.0),
    **{f"elastic, muon, K = {K} alone": dataclasses.replace(_MUON, full_share=1.0, channels=K) for K in (1, 2, 4)},
    "elastic, muon, 4 channels": _elastic(num_spectral_channels=4, optimizer="muon"),
    "elastic, muon, 16 channels": _elastic(num_spectral_channels=16, optimizer="muon"),
    "elastic, muon, inner D": _elastic(expansion=1.0, optimizer="muon"),
    "elastic, muon, inner 3 D": _elastic(expansion=3.0, optimizer="muon"),
    "elastic, muon, inner 4 D": _WIDE,
    "elastic, muon, inner 4 D, full alone": dataclasses.replace(_WIDE, full_share=1.0),
    **{
        f"elastic, muon, inner 4 D, K = {K} alone": dataclasses.replace(_WIDE, full_share=1.0, channels=K)
        for K in (1, 2, 4)
    },
    "elastic, muon, inner 4 D, rows, equal compute": dataclasses.replace(_WIDE, schedule="rows", updates=EQUAL_COMPUTE),
    "elastic, muon, 3 blocks, inner 4 D": _elastic(layers=3, expansion=4.0, optimizer="muon"),
    "elastic, muon, FFN": _elastic(layers=3, feed_forward=8 / 3, optimizer="muon"),
    **{
        f"elastic, muon, FFN, inner {n} D": _elastic(layers=3, feed_forward=8 / 3, expansion=n, optimizer="muon")
        for n in (3, 4, 6)
    },
    "elastic, muon, gate of 1 unit": _elastic(gate_hidden_size=8, optimizer="muon"),
    "elastic, muon, gate of 16 units": _elastic(gate_hidden_size=128, optimizer="muon"),
    "llama": Row(5, peer="transformer", hidden_size=112, rates=_PEER_RATES),
    # The library's own scale of new weights for Mamba-2.
    "mamba2": Row(4, {"initializer_range": 0.1}, peer="mamba2", hidden_size=160, rates=_PEER_RATES),
    # MatMamba's rule: Mamba-2 with nested heads, 1, 2, 4 and 8 eighths of them in every update, all on the whole batch.
    "mamba2, nested": Row(
        4, {"initializer_range": 0.1}, peer="matmamba", hidden_size=160, rates=_PEER_RATES, schedule="sandwich"
    ),
    "s4d": Row(3, peer="s4d", hidden_size=152, rates=_PEER_RATES),
}
ROWS |= {
    f"{name}, muon": dataclasses.replace(ROWS[name], optimizer="muon")
    for name in ("paper", "llama", "mamba2", "mamba2, nested", "s4d")
}
# Of as many parameters, so of 6 blocks of 136, and of 4 blocks with 2.8 and 3.7 times the width inside.
ROWS |= {
    "mamba2, muon, 6 blocks": dataclasses.replace(ROWS["mamba2, muon"], layers=6),
    "mamba2, muon, inner 3 D": dataclasses.replace(ROWS["mamba2, muon"], hidden_size=136),
    "mamba2, muon, inner 4 D": dataclasses.replace(ROWS["mamba2, muon"], hidden_size=120),
}


@dataclass(frozen=True)
class Settings:
    """What all runs of a table have in common; training is otherwise at the defaults of train_clm."""

    train_file: Any
    validation_file: Any
    parameters: int
    updates: int
    batch_size: int = 4
    block_size: int = 512
    validation_blocks: int = 64
    filter_length: int = 4096
    device: str = "cpu"

    def arguments(self, row: Row | None = None, rate: float = 0.0, seed: int = 0) -> CLMArguments:
        """A run as arguments of train_clm, without the model's sizes."""
        return CLMArguments(
            train_file=self.train_file,
            validation_file=self.validation_file,
            block_size=self.block_size,
            validation_blocks=self.validation_blocks,
            sweep_blocks=self.validation_blocks,
            per_device_train_batch_size=self.batch_size,
            **sweeps.training_arguments(row or Row(1), self.updates, rate, seed),
        )


def add_arguments(p: argparse.ArgumentParser) -> None:
    p.add_argument("--train_file", nargs="+", help="text to train on; by default Python's own sources")
    p.add_argument("--validation_file", nargs="+", help="held-out text; by default the end of train_file")
    p.add_argument("--parameters", type=common.positive, default=800_000, help=f"of every model, to {TOLERANCE:.0%}%")


def settings_of(args: argparse.Namespace) -> Settings:
    fields: dict[str, Any] = {"parameters": args.parameters, "updates": args.updates}
    if args.quick:
        fields |= {"parameters": 60_000, "updates": min(args.updates, 3), "batch_size": 2, "block_size": 64}
        fields |= {"validation_blocks": 4, "filter_length": 512}
    train_file, validation_file = (paths and tuple(paths) for paths in (args.train_file, args.validation_file))
    return Settings(train_file, validation_file, **fields, device=str(common.pick_device(args.device)))


@functools.cache
def load(settings: Settings) -> Any:
    return load_text(settings.arguments(), ByteEncoder())


def define(settings: Settings, run: Run) -> dict[str, Any]:
    """The row and the text, with hashes. Raises ValueError if there is no model of that size."""
    row, text = ROWS[run.name], load(settings)
    config = matched_config(row, settings.parameters)
    held_out = hashlib.sha256(text.held_out.numpy().tobytes()).hexdigest()
    return row.definition(config) | {"text": {"data": text.description, "training": text.sha256, "held_out": held_out}}


def make_model(config: Any, filter_length: int) -> Any:
    """A new language model of bytes in fp32, with filters of that length."""
    if isinstance(config, ESSMConfig):
        return ESSMForCausalLM(ESSMConfig.from_dict(config.to_dict(), filter_length=filter_length)).float()
    return BaselineForCausalLM(config).float()


def train(settings: Settings, row: Row, run: Run) -> tuple[Any, dict[str, Any]]:
    """A new model after all updates, on the blocks in train_clm's order, and how it was trained."""
    args, samples = settings.arguments(row, run.rate, run.seed), load(settings).source.samples
    source = MapSamples(samples, run.seed)
    if row.rereads:
        samples = Subset(samples, source.draw(settings.updates * settings.batch_size))
        source = MapSamples(samples, run.seed)
    torch.manual_seed(run.seed)
    model = make_model(matched_config(row, settings.parameters), settings.filter_length).to(settings.device)

    def next_batch() -> dict[str, Tensor]:
        blocks = source.load(source.draw(settings.batch_size))
        ids = torch.from_numpy(np.stack(blocks).astype(np.int64)).to(model.device)
        return {"input_ids": ids, "labels": ids}

    return model, sweeps.train(model, next_batch, args, settings.batch_size * settings.block_size)


def score(model: Any, budgets: Sequence[int], text: Any) -> dict[str, float]:
    """Bits per byte of the held-out blocks at every budget, as the final sweep of train_clm has them."""
    special = ByteEncoder.special_ids
    held_out = hold_out_blocks(text.held_out, special, text.bytes_per_token, 8, text.description)
    return {str(K): held_out.value(model.eval(), K) for K in budgets}


def perform(settings: Settings, run: Run) -> dict[str, Any]:
    model, trained = train(settings, ROWS[run.name], run)
    scored = functools.partial(score, text=load(settings))
    return sweeps.measure(model, trained, scored, BUDGETS, METRIC, settings.block_size)


def difference(result: dict[str, Any], other: dict[str, Any]) -> dict[str, float] | None:
    """Bits per byte at the full budget above the other model's, seed by seed; None where they share no seed.

    A separate model of a smaller size is held against the other model at that size."""
    size = str(result["definition"]["channels"] or "")
    mine, theirs = (
        {seed: bits.get(size, [*bits.values()][-1]) for seed, bits in r.get("by_seed", {}).items()}
        for r in (result, other)
    )
    shared = [mine[seed] - theirs[seed] for seed in mine if seed in theirs]
    return sweeps.mean(shared) if shared else None


def main(argv: list[str] | None = None) -> dict[str, Any]:
    p = common.parser(__doc__, rounds=None)
    add_arguments(p)
    sweeps.add_arguments(p, ROWS, "runs/ablation", 500)
    args = p.parse_args(argv)
    sweep = Sweep(settings_of(args), perform, define, METRIC)
    records, report = sweeps.run("ablation", args, sweep)
    report["results"] = sweeps.summarise_all(records, METRIC)
    base: dict[str, Any] = next((r for r in report["results"] if r["model"] == "elastic"), {})
    for result in report["results"]:
        result["against_elastic"] = difference(result, base)
    return common.finish(report, args)


if __name__ == "__main__":
    main()
