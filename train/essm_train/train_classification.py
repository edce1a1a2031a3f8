# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Train an ES-SSM classifier of sequences with budget dropout, then measure its accuracy at every budget.

    essm-train-classification --train_file train.parquet --test_file test.parquet \\
        --features_column pixels --label_column label                      # numbers: one per position, or frames
    essm-train-classification --train_file reviews.jsonl --text_column text --max_length 1024
    essm-train-classification --dataset_name owner/name --text_column text --streaming \\
        --num_labels 4 --tokenizer_name gpt2 --max_steps 20000
    essm-train-classification --model_name_or_path runs/books/model --train_file reviews.jsonl \\
        --text_column text --learning_rate 1e-3                            # fine-tune weights; their head, or a new one
    accelerate launch --mixed_precision bf16 -m essm_train.train_classification arguments.yaml --learning_rate 1e-3
    essm-train-classification --help                                       # every argument

Selection never looks at the test data: without validation data, a tenth of the training rows is held out. A run that
was interrupted continues from its last checkpoint when started again, bit for bit as if nothing had happened; see
essm_train/run/loop.py. Left in `output_dir`: checkpoint-*, best and model (for from_pretrained), log.jsonl,
training.json, budget_sweep.json and budget_sweep.png.
"""

from __future__ import annotations

from essm_train.console import command
from essm_train.data.arguments import ClassificationArguments

run = command("essm_train.run.classifier:train_classifier", ClassificationArguments)

if __name__ == "__main__":
    run()
