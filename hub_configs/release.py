# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Make a trained run a folder of this one that loads from a clone, weights and all.

    python hub_configs/release.py --run runs/release/essm-novels-6m --name essm-novels-6m --text_files heldout.txt \\
        --prompts "It was" "My dear"

The folder holds weights in bf16, config, tokenizer and a file that imports the installed package. Its quality and speed
at every budget are measured here, and its card tells them, with samples, file sizes and how it was trained. A folder
that is there is refused: its card may have been edited by hand.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torchao.quantization import Int8WeightOnlyConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, TorchAoConfig

from essm_train.arguments import arg, refuse
from essm_train.console import command
from essm_train.data.text import read_blocks
from essm_train.data.tokens import ByteEncoder
from essm_train.files import filling, write_json
from essm_train.measure.budget_sweep import save_sweep, sweep_budgets
from essm_train.measure.scoring import HeldOut, hold_out_blocks
from essm_train.publish.arguments import CalibrateArguments
from essm_train.publish.hub import PACKAGE_CODE, read_json
from essm_train.publish.model_card import write_model_card
from essm_train.publish.profile import calibrate
from modeling_essm.budgets.profile import device_name

CODE = Path(__file__).parent / "essm-tiny" / PACKAGE_CODE
SAMPLE_BUDGETS = (1, 2, 4)  # and the full one
SIZE_BLOCKS = 64  # of the held-out ones: every file size is scored on them
CARD = """---
license: apache-2.0
library_name: transformers
pipeline_tag: text-generation
tags: [essm, state-space-model, elastic-inference]
widget: [{{text: {prompt}}}]
---

# {name}

{text} Trained once, it runs with any number of its spectral channels, chosen per call with `spectral_budget`
([Song, Yin, Hu and Wang](https://arxiv.org/abs/2601.22488v2)).

<!-- model -->

<!-- results -->

## What it writes

Temperature 0.7, seed 0, 120 bytes. Each is the first draw; none was chosen.

{samples}

## File sizes

Bits per byte of the first {blocks} of the held-out blocks.

| weights | channels | MB | bits per byte |
|---|---|---|---|
{sizes}

<!-- training -->

<!-- loading -->

<!-- limits -->
"""


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
    """120 bytes at temperature 0.7 out of all, seed 0; the prompt in bold."""
    torch.manual_seed(0)
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    options: dict[str, Any] = {"do_sample": True, "temperature": 0.7, "top_k": 0}
    ids = model.generate(ids, spectral_budget=budget, max_new_tokens=120, **options)[0]
    written = tokenizer.decode(ids, skip_special_tokens=True).removeprefix(prompt)
    return f"- K = {budget}: **{prompt}**{' '.join(written.split(chr(10)))}"


def size_rows(source: Path, budgets: list[int], data: HeldOut) -> list[str]:
    """File size and bits per byte of prefixes in bf16, and of all channels in int8, as rows of a Markdown table."""
    formats = [("bf16", K, {}) for K in budgets]
    formats.append(("int8, all else bf16", budgets[-1], {"quantization_config": TorchAoConfig(Int8WeightOnlyConfig())}))
    rows = []
    for name, K, options in formats:
        model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16, spectral_capacity=K, **options)
        with tempfile.TemporaryDirectory() as work:
            model.save_pretrained(work)
            size = (Path(work) / "model.safetensors").stat().st_size
        bits = data.value(model.float() if name == "bf16" else model, K)
        rows.append(f"| {name} | {K} | {size / 1e6:.2f} | {bits:.4f} |")
    return rows


def write_config_file(path: Path, record: dict[str, Any]) -> None:
    """Without the library's version, which would change the file at every upgrade."""
    fields = {name: value for name, value in sorted(record.items()) if name != "transformers_version"}
    write_json(path, fields)


def release(args: ReleaseArguments, root: Path) -> Path:
    """Write `root`/`args.name`; the folder.

    Raises:
        ValueError: the run has not ended, or the folder is there. OSError: no such text, or the run has no model.
    """
    run, folder = Path(args.run_dir), root / args.name
    refuse({f"{folder} is there already: give another name, or move it away": folder.exists()})
    source, training = run / "model", read_json(run / "training.json", "; the run has not ended")
    blocks, _ = read_blocks(args.text_files, ByteEncoder(), args.block_size, args.max_blocks)
    held_out, few = (
        hold_out_blocks(part, ByteEncoder.special_ids, 1.0, 8, "held-out text")
        for part in (blocks, blocks[:SIZE_BLOCKS])
    )
    with filling(folder) as new:
        model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
        tokenizer = AutoTokenizer.from_pretrained(source)
        model.save_pretrained(new)
        tokenizer.save_pretrained(new)
        for path in new.glob("*.py"):
            path.unlink()
        shutil.copy(CODE, new)
        auto_map = {auto: f"{CODE.stem}.{name.split('.')[1]}" for auto, name in model.config.auto_classes.items()}
        write_config_file(new / "config.json", read_json(new / "config.json") | {"auto_map": auto_map})
        write_config_file(new / "generation_config.json", read_json(new / "generation_config.json"))

        model = model.float()  # the rounded weights in the arithmetic of a CPU
        hardware = f"{device_name(torch.device('cpu'))}, fp32"
        blocks_of = {"block_size": args.block_size, "max_blocks": args.max_blocks, "overwrite": True}
        # The same blocks and arithmetic, the profile's times and errors: so its presets are what the card marks.
        profile = calibrate(
            CalibrateArguments(str(new), args.text_files, dtype="float32", rounds=args.rounds, **blocks_of)
        )
        measured = {"timings": profile.quality.timings, "drop_errors": profile.quality.drop_errors}
        sweep = dataclasses.replace(sweep_budgets(model, held_out), **measured)
        save_sweep(sweep, new, blocks=len(blocks), block_size=args.block_size, hardware=hardware)
        capacity = model.config.num_spectral_channels
        budgets = [*(K for K in SAMPLE_BUDGETS if capacity > K), capacity]
        with tempfile.TemporaryDirectory() as work:
            card = Path(work) / "template.md"
            text = CARD.format(
                name=args.name,
                text=args.text,
                prompt=json.dumps(args.prompts[0]),
                samples="\n".join(sample(model, tokenizer, prompt, K) for prompt in args.prompts for K in budgets),
                blocks=len(blocks[:SIZE_BLOCKS]),
                sizes="\n".join(size_rows(source, budgets, few)),
            )
            card.write_text(text, encoding="utf-8")
            sweep, local = read_json(new / "budget_sweep.json"), f"{root.name}/{args.name}"
            write_model_card(new, sweep=sweep, training=training, hub_model_id=args.name, template=card, local=local)
    return folder


def main(args: ReleaseArguments) -> None:
    """Release a run from the command line."""
    folder = release(args, Path(__file__).resolve().parent)
    size = sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
    print(f"wrote {folder}, {size / 1e6:.1f} MB")


if __name__ == "__main__":
    command(main, ReleaseArguments)()
