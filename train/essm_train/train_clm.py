# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Train an ES-SSM language model with budget dropout, then measure it at every budget.

    accelerate launch -m essm_train.train_clm                                  # a few CPU minutes, no data needed
    essm-train-clm --train_file a.txt b.txt --validation_file c.txt --output_dir runs/books
    essm-train-clm --dataset_name owner/name --streaming --tokenizer_name gpt2 --max_steps 50000
    essm-train-clm --config_overrides hidden_size=256,num_hidden_layers=12 --train_file books.parquet
    essm-train-clm --config_name hub_configs/essm-21m --block_size 4096 --train_file books.parquet
    accelerate launch --mixed_precision bf16 -m essm_train.train_clm arguments.yaml --learning_rate 1e-3
    essm-train-clm --help                                                      # every argument

Several processes and nodes: train/launch/. Without data arguments it reads the sources of Python's standard library.
A run that was interrupted continues from its last checkpoint when started again, bit for bit as if nothing had happened
(on as many CPU threads); see essm_train/run/loop.py. Left in `output_dir`: checkpoint-*, best and model (for
from_pretrained), log.jsonl, training.json, budget_sweep.json and budget_sweep.png.
"""

from __future__ import annotations

from essm_train.console import command
from essm_train.data.arguments import CLMArguments

run = command("essm_train.run.language:train_language_model", CLMArguments)

if __name__ == "__main__":
    run()
