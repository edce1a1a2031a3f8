# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Make a trained run a folder of this one that loads from a clone, weights and all.

    python hub_configs/release.py --run runs/release/essm-novels-6m --name essm-novels-6m --text_files heldout.txt \\
        --prompts "It was" "My dear"

Written: weights in bf16, config, generation config and tokenizer, a budget profile measured here, the presets that
follow from it, and a card: quality at every budget of what is published, samples, file sizes, training; `peers.py` sets
others of its size beside it. `code` is a link to the package, as in the other folders. The folder is replaced when all
of it stands.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from make import CODE, PACKAGE, write_config_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from essm_train.arguments import arg
from essm_train.console import command
from essm_train.data.blocks import text_labels
from essm_train.data.text import read_blocks
from essm_train.data.tokens import ByteEncoder
from essm_train.files import publish, temporary_folder
from essm_train.measure.budget_sweep import save_sweep, sweep_budgets
from essm_train.measure.scoring import hold_out_blocks, num_scored, total_nats
from essm_train.publish.arguments import CalibrateArguments
from essm_train.publish.hub import read_json
from essm_train.publish.model_card import write_model_card
from essm_train.publish.profile import calibrate
from modeling_essm.budgets.profile import device_name

SAMPLE_BUDGETS = (2, 4)
SIZE_BLOCKS = 64  # of the held-out ones: every format is scored
FORMATS = {"bf16": {"dtype": torch.bfloat16}, "int8": {"quantization_config": "int8"}}
FORMATS["int4"] = {"quantization_config": "int4"}


@dataclass
class ReleaseArguments:
    """Arguments of the script."""

    run_dir: str = field(metadata={"aliases": ["--run"], "help": "Folder of a finished run of essm-train-clm."})
    name: str = field(metadata={"help": "Of the folder to write, beside this file."})
    text_files: list[str] = field(metadata={"help": "Held-out text, read as bytes."})
    rounds: int = arg(7, "Of timing, for the profile.")
    text: str = arg("A byte-level language model.", "What it is, for the card.")
    prompts: list[str] = arg(["It was", "My dear"], "What the samples begin with.")
    block_size: int = arg(1024, "Tokens per held-out block.")
    max_blocks: int = arg(256, "Held-out blocks, spread evenly over the text.")


def sample(model: Any, tokenizer: Any, prompt: str, budget: int) -> str:
    """120 bytes at temperature 0.7, seed 0; the prompt in bold."""
    torch.manual_seed(0)
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    ids = model.generate(ids, spectral_budget=budget, max_new_tokens=120, do_sample=True, temperature=0.7)[0]
    written = tokenizer.decode(ids, skip_special_tokens=True).removeprefix(prompt)
    return f"**{prompt}**{' '.join(written.split(chr(10)))}"


def size_rows(source: Path, capacity: int, blocks: Tensor, work: Path) -> list[str]:
    """File size and bits per byte of every format, and of prefixes in bf16, as rows of a Markdown table."""
    labels, rows = text_labels(blocks), []
    for name, options in FORMATS.items():
        for K in (*SAMPLE_BUDGETS, capacity) if name == "bf16" else (capacity,):
            model = AutoModelForCausalLM.from_pretrained(source, spectral_capacity=K, **options)
            model.save_pretrained(work / f"{name}-{K}")
            size = (work / f"{name}-{K}" / "model.safetensors").stat().st_size
            model = model.float() if name == "bf16" else model
            bits = total_nats(model, blocks, labels, K, 8) / num_scored(labels) / math.log(2)
            rows.append(f"| {name} | {K} | {size / 1e6:.2f} | {bits:.4f} |")
    return rows


def template(args: ReleaseArguments, samples: list[str], sizes: list[str], size_blocks: int) -> str:
    """The card with the markers that `write_model_card` fills."""
    return f"""---
license: apache-2.0
library_name: transformers
pipeline_tag: text-generation
tags: [essm, state-space-model, elastic-inference]
widget: [{{text: {json.dumps(args.prompts[0])}}}]
---

# {args.name}

{args.text} Trained once, it runs with any number of its spectral channels, chosen per call with `spectral_budget`
([Song et al.](https://arxiv.org/abs/2601.22488)).

<!-- model -->

<!-- results -->

## What it writes

Temperature 0.7, seed 0, 120 bytes; the first of one draw each, none was chosen.

{chr(10).join(samples)}

## File sizes

Bits per byte of the first {size_blocks} of the held-out blocks.

| weights | channels | MB | bits per byte |
|---|---|---|---|
{chr(10).join(sizes)}

<!-- training -->

<!-- loading -->

<!-- limits -->
"""


def release(args: ReleaseArguments, root: Path) -> Path:
    """Write `root`/`args.name`; the folder.

    Raises:
        ValueError: the run has not ended. OSError: no such text, or the run has no model.
    """
    run, folder = Path(args.run_dir), root / args.name
    source, training = run / "model", read_json(run / "training.json", "; the run has not ended")
    blocks, _ = read_blocks(args.text_files, ByteEncoder(), args.block_size, args.max_blocks)
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16),
        AutoTokenizer.from_pretrained(source),
    )
    new = temporary_folder(folder)
    model.save_pretrained(new)
    tokenizer.save_pretrained(new)
    for path in new.glob("*.py"):
        path.unlink()
    (new / CODE).symlink_to(os.path.relpath(PACKAGE, root.resolve() / "name"), target_is_directory=True)
    model.config.auto_map = {auto: f"{CODE}/{reference}" for auto, reference in model.config.auto_classes.items()}
    write_config_file(new / "config.json", model.config.to_json_string(use_diff=True))
    write_config_file(new / "generation_config.json", model.generation_config.to_json_string())
    model = model.float()  # the rounded weights in the arithmetic of a CPU
    sweep = sweep_budgets(model, hold_out_blocks(blocks, ByteEncoder.special_ids, 1.0, 8, "held-out text"))
    hardware = f"{device_name(torch.device('cpu'))}, fp32"
    save_sweep(sweep, new, blocks=len(blocks), block_size=args.block_size, hardware=hardware)
    calibrate(  # the same blocks in the same arithmetic, so that its presets are what the card marks
        CalibrateArguments(
            str(new),
            args.text_files,
            dtype="float32",
            block_size=args.block_size,
            max_blocks=args.max_blocks,
            rounds=args.rounds,
        )
    )
    capacity = model.config.num_spectral_channels
    budgets = dict.fromkeys((*(K for K in SAMPLE_BUDGETS if capacity > K), capacity))
    samples = [f"- K = {K}: {sample(model, tokenizer, prompt, K)}" for prompt in args.prompts for K in budgets]
    with tempfile.TemporaryDirectory() as work:
        card = Path(work) / "template.md"
        few = blocks[:SIZE_BLOCKS]
        card.write_text(template(args, samples, size_rows(source, capacity, few, Path(work)), len(few)))
        record = read_json(new / "budget_sweep.json", "")
        picture = new / "budget_sweep.png"
        facts = {"sweep": record, "training": training, "local": f"{root.name}/{args.name}"}
        write_model_card(new, **facts, hub_model_id=args.name, template=card, picture=picture)
    publish(new, folder)
    return folder


def main(args: ReleaseArguments) -> None:
    """Release a run from the command line."""
    folder = release(args, Path(__file__).resolve().parent)
    size = sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
    print(f"wrote {folder}, {size / 1e6:.1f} MB")


if __name__ == "__main__":
    command(main, ReleaseArguments)()
