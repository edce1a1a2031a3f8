# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Quality and speed of one model at every spectral budget: bits per byte, tokens/s, a table, a curve and a JSON file.

    essm-sweep --model runs/train_clm/model --text_files some.txt --output_dir runs/sweep

What is measured, and how: essm_train/measure/budget_sweep.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from essm_train.arguments import OVERWRITE_HELP, TRUST_HELP, arg, check_at_least
from essm_train.console import command
from essm_train.files import claim


@dataclass
class SweepArguments:
    """Which model to measure at every budget, on which text."""

    model: str = field(metadata={"help": "Folder or Hub name of an ES-SSM causal language model."})
    text_files: list[str] = field(metadata={"help": "Held-out text, read by the model's tokenizer, or as bytes."})
    output_dir: str = field(metadata={"help": "Where budget_sweep.json and budget_sweep.png go."})
    budgets: list[int] | None = arg(
        None, "Budgets K to evaluate, by default 2, 3, 4, 6, 8, .., 32 and the smallest one of training."
    )
    text_column: str = arg("text", "Of parquet, json(l) and csv files.")
    block_size: int | None = arg(
        None, "Tokens per block, the longest context; by default 512, or filter_length if less."
    )
    max_blocks: int = arg(256, "Blocks to evaluate, spread evenly over the text.")
    batch_size: int = arg(8, "Blocks per forward pass.")
    overwrite: bool = arg(False, OVERWRITE_HELP)
    trust_remote_code: bool = arg(False, TRUST_HELP)

    def __post_init__(self) -> None:
        check_at_least(self, 1, "budgets", "max_blocks", "batch_size")
        check_at_least(self, 2, "block_size")


def main(args: SweepArguments) -> None:
    """Sweep a saved model."""
    from transformers import PreTrainedConfig

    from essm_train.data.tokens import encoder_beside
    from essm_train.measure.budget_sweep import SWEEP_FILES, save_sweep, sweep_budgets
    from essm_train.measure.evaluation import load_for, open_text
    from essm_train.measure.timing import working_device

    output_dir = Path(args.output_dir)
    claim(output_dir, SWEEP_FILES, overwrite=args.overwrite)
    block_size = args.block_size or min(512, PreTrainedConfig.get_config_dict(args.model)[0].get("filter_length", 512))
    texts, encoder = args.text_files, encoder_beside(args.model)
    held_out = open_text(texts, encoder, block_size, args.max_blocks, args.batch_size, args.text_column)
    model = load_for(held_out, args.model, args.trust_remote_code).to(working_device())
    sweep = sweep_budgets(model, held_out, args.budgets)
    print(sweep.table())
    # Published beside a model, so without places of this machine.
    name = Path(args.model).name if Path(args.model).is_dir() else args.model
    save_sweep(sweep, output_dir, model=name, data=held_out.description, block_size=block_size)


run = command(main, SweepArguments)


if __name__ == "__main__":
    run()
