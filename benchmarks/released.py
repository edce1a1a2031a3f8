# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""A language model beside Llama and Mamba-2 of its size that read the same text: bits per byte, and time per token.

    python -m benchmarks.released --runs runs/release/essm-8mb runs/release/llama-8mb runs/release/mamba2-8mb \\
        --train_file novels-8mb.parquet --text_files novels-validation.parquet

Runs are folders of train_clm, on the text that --train_file names. ES-SSM is scored at 2, 4 and all of its
channels, each model on the same held-out blocks in fp32. Times are of decoding after a context, at batch 1 on one
thread, eager, all models in turn; the others decode by the library's own cache, and every model's steps must first
give what one call over the whole text gives. Below stand what a model of bytes has to beat: gzip -9, and counts of
three bytes. The report also has how each run learnt, which hub_configs/peers.py draws.
"""

from __future__ import annotations

import functools
import gzip
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.utils import ModelOutput

from essm_train.baselines.models import BaselineForCausalLM
from essm_train.data import documents
from essm_train.data.blocks import evaluation_blocks, to_stream
from essm_train.data.tokens import ByteEncoder
from essm_train.measure.scoring import hold_out_blocks
from essm_train.publish.hub import read_json
from modeling_essm import ESSMForCausalLM

from . import common
from .decoding import Decoder

BUDGETS = (2, 4)  # and the capacity
VALIDATION = re.compile(r"validation bits/byte K=(\d+)")  # in the log of a run; a baseline's K is 1
SYMBOLS = ByteEncoder.vocab_size
PIECE = 1 << 22  # symbols counted at a time


class WithCache:
    """A baseline that decodes by its backbone's own cache, as a whole it has none; called as a model of the library."""

    def __init__(self, model: BaselineForCausalLM):
        self.model, self.config = model, model.model.backbone.config

    def __call__(self, ids: Tensor, use_cache: bool, **cache: Any) -> Any:
        if not use_cache:
            return self.model(ids)
        embedded = self.model.model.embed_tokens(ids)
        out = self.model.model.backbone(inputs_embeds=embedded, use_cache=True, **cache)
        return ModelOutput(out, logits=self.model.lm_head(out.last_hidden_state))


def open_run(folder: Path) -> dict[str, tuple[Any, int]]:
    """Its model in fp32 and the budget to score it at, by name; an ES-SSM at several, a MatMamba cut to each."""
    if read_json(folder / "model" / "config.json", "")["model_type"] == "essm":
        model = ESSMForCausalLM.from_pretrained(folder / "model", dtype=torch.float32).eval()
        budgets = common.clipped([*BUDGETS, model.config.num_spectral_channels], model.config)
        return {f"{folder.name} K={K}": (model, K) for K in budgets}
    peer = BaselineForCausalLM.from_pretrained(folder / "model", dtype=torch.float32).eval()
    if sizes := peer.config.trained_budgets:
        return {f"{folder.name} K={K}": (peer.truncate(K), K) for K in sizes}
    return {folder.name: (peer, 1)}


def learning_curve(folder: Path) -> dict[str, Any]:
    """How the run went: "parameters", "learning_rate", "seconds", and "points", [bytes read, bits per byte] by budget.

    Raises:
        ValueError: the run has not ended.
    """
    training = read_json(folder / "training.json", "; the run has not ended")
    curve = {name: training[name] for name in ("parameters", "seconds")}
    curve |= {"learning_rate": training["arguments"]["learning_rate"], "points": {}}
    for line in map(json.loads, (folder / "log.jsonl").read_text(encoding="utf-8").splitlines()):
        for name, value in line.items():
            if found := VALIDATION.fullmatch(name):
                read = line["update"] * training["tokens_per_update"]
                curve["points"].setdefault(found[1], []).append([read, value])
    return curve


def decoder(model: Any, budget: int, context: Tensor, steps: int) -> Callable[[], None]:
    """A call that takes so many steps after context (1, n); checked."""
    one = Decoder(WithCache(model)) if isinstance(model, BaselineForCausalLM) else Decoder(model, budget)
    one.check(context)
    one.read(context)
    return functools.partial(one.sample, context[:, -1:], context.shape[1], steps)


def runs_of(stream: np.ndarray, order: int) -> np.ndarray:
    """Every run of `order` symbols as one number."""
    number = np.zeros(max(0, len(stream) - order + 1), np.int64)
    for i in range(order):
        number = number * SYMBOLS + stream[i : i + len(number)]
    return number


def trigram_bits(train: np.ndarray, held_out: np.ndarray) -> float:
    """Bits per symbol of held_out, ids below SYMBOLS, from its third on.

    Contexts that the training text has not fall back on two bytes, on one, and on none (Witten and Bell, 1991):
    p(c | ab) = (n(abc) + T(ab) p(c | b)) / (n(ab) + T(ab)), where T counts in how many ways a context goes on.
    """
    probability = np.full(len(held_out) - 2, 1 / SYMBOLS)
    for order in (1, 2, 3):
        counts = np.zeros(SYMBOLS**order, np.int64)
        for start in range(0, len(train), PIECE):
            counts += np.bincount(runs_of(train[start : start + PIECE + order - 1], order), minlength=len(counts))
        by_context = counts.reshape(-1, SYMBOLS)
        symbols = runs_of(held_out, order)[3 - order :]
        seen, total = counts[symbols], by_context.sum(1)[symbols // SYMBOLS]
        ways = (by_context > 0).sum(1)[symbols // SYMBOLS]
        mixed = (seen + ways * probability) / np.maximum(total + ways, 1)
        probability = np.where(total > 0, mixed, probability)
    return float(-np.log2(probability).mean())


def floors(train: list[str], held_out: list[str]) -> dict[str, float]:
    """Bits per byte of the held-out text as one file by gzip -9, and by counts of three bytes of the other text."""
    text, encoder = "".join(held_out).encode(), ByteEncoder()
    trigram = trigram_bits(to_stream(train, encoder)[0], to_stream(held_out, encoder)[0])
    return {"gzip -9": 8 * len(gzip.compress(text, 9)) / len(text), "trigram": trigram}


def main(argv: list[str] | None = None) -> dict[str, Any]:
    p = common.parser(__doc__)
    p.add_argument("--runs", nargs="+", type=Path, required=True, help="folders of train_clm, with a model in each")
    p.add_argument("--train_file", nargs="+", required=True, help="the text that they read")
    p.add_argument("--text_files", nargs="+", required=True, help="held-out text of the same kind")
    p.add_argument("--block_size", type=int, default=1024, help="tokens per held-out block, and of context")
    p.add_argument("--max_blocks", type=int, default=256, help="held-out blocks, spread evenly over the text")
    p.add_argument("--steps", type=int, default=64, help="decoded tokens of one sample")
    args = p.parse_args(argv)
    train, held_out = (list(documents.read_files(paths)) for paths in (args.train_file, args.text_files))
    if args.quick:
        train, held_out, args.max_blocks, args.steps = train[:3], held_out[:1], 2, 4
    settings = {name: getattr(args, name) for name in ("block_size", "max_blocks", "steps")}
    device, report = common.start("released", args, threads=1, dtype="float32", **settings)
    blocks = evaluation_blocks(to_stream(held_out, ByteEncoder())[0], args.block_size, args.max_blocks)
    text = hold_out_blocks(blocks, ByteEncoder.special_ids, 1.0, 8, "held-out text")
    report["curves"] = {folder.name: learning_curve(folder) for folder in args.runs}
    models = {name: row for folder in args.runs for name, row in open_run(folder).items()}
    with common.threads(1):
        calls = {name: decoder(*row, blocks[:1], args.steps) for name, row in models.items()}
        seconds = common.paired(calls, device, args.rounds, warmup=1)
    first, report["results"] = next(iter(models)), []
    for name, (model, budget) in models.items():
        row = {"name": name, "parameters": sum(p.numel() for p in model.parameters())}
        row |= {"bits_per_byte": text.value(model, budget), "seconds_per_token": common.per(seconds[name], args.steps)}
        report["results"].append(row | {"time_over_first": common.ratio(seconds[name], seconds[first])})
    report["floors"] = floors(train, held_out)
    common.table([report["floors"]])
    return common.finish(report, args)


if __name__ == "__main__":
    main()
