# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""A language model beside Llama and Mamba-2 of its size that read the same text: bits per byte, and time per token.

    python -m benchmarks.released --runs runs/release/essm-8mb runs/release/llama-8mb runs/release/mamba2-8mb \\
        --train_file novels-8mb.parquet --text_files novels-validation.parquet

Runs are folders of train_clm, on the text that --train_file names. ES-SSM is scored at 2, 4 and all of its
channels, each model on the same held-out blocks in fp32. Times are of decoding after a context, at batch 1 on one
thread, eager, all models in turn; the others decode by the library's own cache, and every model's steps must first
give what one call over the whole text gives. Below stand the floors of `benchmarks.text_floor`. The report also has
how each run learnt, which hub_configs/peers.py draws.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.utils import ModelOutput

from essm_train.baselines.models import BaselineForCausalLM
from essm_train.data.blocks import evaluation_blocks, to_stream
from essm_train.data.tokens import ByteEncoder
from essm_train.measure.scoring import hold_out_blocks
from essm_train.publish.hub import read_json
from modeling_essm import ESSMForCausalLM

from . import common
from .decoding import Decoder
from .text_floor import add_texts, floors, read_texts

BUDGETS = (2, 4)  # and the capacity
VALIDATION = re.compile(r"validation bits/byte K=(\d+)")  # in the log of a run; a baseline's K is 1


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
    """Its model in fp32 and the budget to score it at, by name; an ES-SSM at several budgets."""
    if read_json(folder / "model" / "config.json", "")["model_type"] == "essm":
        model = ESSMForCausalLM.from_pretrained(folder / "model", dtype=torch.float32).eval()
        budgets = common.clipped([*BUDGETS, model.config.num_spectral_channels], model.config)
        return {f"{folder.name} K={K}": (model, K) for K in budgets}
    return {folder.name: (BaselineForCausalLM.from_pretrained(folder / "model", dtype=torch.float32).eval(), 0)}


def learning_curve(folder: Path) -> dict[str, Any]:
    """How the run went: "parameters", "learning_rate", "seconds", and "points", [bytes read, bits per byte] by budget.

    Raises:
        ValueError: the run has not ended.
    """
    training = read_json(folder / "training.json", "; the run has not ended")
    curve = {name: training[name] for name in ("parameters", "seconds")}
    curve |= {"learning_rate": training["arguments"]["learning_rate"], "points": {}}
    for line in map(json.loads, (folder / "log.jsonl").read_text().splitlines()):
        for name, value in line.items():
            if found := VALIDATION.fullmatch(name):
                read = line["update"] * training["tokens_per_update"]
                curve["points"].setdefault(found[1], []).append([read, value])
    return curve


def decoder(model: Any, budget: int, context: Tensor, steps: int) -> Callable[[], None]:
    """A call that takes so many steps after context (1, n); checked."""
    one = Decoder(model if budget else WithCache(model), budget)
    one.check(context)
    one.read(context)
    return functools.partial(one.sample, context[:, -1:], context.shape[1], steps)


def main(argv: list[str] | None = None) -> dict:
    p = common.parser(__doc__)
    p.add_argument("--runs", nargs="+", type=Path, required=True, help="folders of train_clm, with a model in each")
    add_texts(p)
    p.add_argument("--block_size", type=int, default=1024, help="tokens per held-out block, and of context")
    p.add_argument("--max_blocks", type=int, default=256, help="held-out blocks, spread evenly over the text")
    p.add_argument("--steps", type=int, default=64, help="decoded tokens of one sample")
    args = p.parse_args(argv)
    train, held_out = read_texts(args)
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
    first = next(iter(models))
    report["results"] = []
    for name, (model, budget) in models.items():
        row = {"name": name, "parameters": sum(p.numel() for p in model.parameters())}
        row["bits_per_byte"] = text.value(model, budget)
        row["seconds_per_token"] = common.spread([s / args.steps for s in seconds[name]])
        report["results"].append(row | {"time_over_first": common.ratio(seconds[name], seconds[first])})
    report["floors"] = floors(train, held_out)
    common.table([report["floors"]])
    return common.finish(report, args, device)


if __name__ == "__main__":
    main()
