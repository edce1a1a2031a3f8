# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""What is inside a trained ES-SSM: which channels its gates use, how far it can amplify, and what a budget costs.

    essm-analyze --model runs/train_clm/model --text_files some.txt --output_dir runs/analysis

What is measured, and how: essm_train/measure/analysis.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from essm_train.arguments import OVERWRITE_HELP, TRUST_HELP, arg, check_at_least
from essm_train.console import command


@dataclass
class AnalyzeArguments:
    """What to look into, and with which text."""

    model: str = field(metadata={"help": "Folder or Hub name of an ES-SSM language model."})
    text_files: list[str] = field(metadata={"help": "Text to run it on, read by the model's tokenizer, or as bytes."})
    output_dir: str = field(metadata={"help": "Where analysis.json, gates.png and cost.png go."})
    text_column: str = arg("text", "Of parquet, json(l) and csv files.")
    block_size: int | None = arg(None, "Tokens per block; by default 512, or filter_length if less.")
    max_blocks: int = arg(32, "Blocks to run, spread evenly over the text.")
    overwrite: bool = arg(False, OVERWRITE_HELP)
    trust_remote_code: bool = arg(False, TRUST_HELP)

    def __post_init__(self) -> None:
        check_at_least(self, 1, "max_blocks")
        check_at_least(self, 2, "block_size")


run = command("essm_train.measure.analysis:analyze", AnalyzeArguments)


if __name__ == "__main__":
    run()
