# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""What to train on, as the arguments of the training scripts of language models and classifiers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

from essm_train.arguments import ModelArguments, RunArguments, arg, check_at_least


@dataclass
class CLMArguments(ModelArguments):
    """Text; the model is in ModelArguments, how to train in RunArguments."""

    output_dir: str = arg("runs/train_clm", "Where everything goes; a run found there is continued.")
    max_steps: int = arg(900, "Updates.")

    train_file: list[str] | None = arg(
        None,
        "Local files to train on: parquet, json(l) or csv with a column of text, or any others, each one "
        "document of UTF-8. A folder stands for all files in it.",
    )
    validation_file: list[str] | None = arg(None, "Held-out files; without them, the last tenth of the text.")
    dataset_name: str | None = arg(
        None,
        "Instead of files: a data set on the Hub, a local folder (of tables, or of text files, each one document) or "
        "parquet file.",
    )
    dataset_config_name: str | None = arg(None, "Which configuration of that data set.")
    text_column: str = arg("text", "The column that holds the text.")
    streaming: bool = arg(False, "Read while training instead of before: for text larger than memory.")
    shuffle_buffer: int = arg(1000, "With streaming: blocks among which the next one is drawn.")
    tokenizer_name: str | None = arg(
        None,
        "A tokenizer of the Hub, a local folder or a tokenizer.json; by default that of model_name_or_path, else bytes "
        "are tokens. One without an end-of-sequence token gets <eos>.",
    )
    replace_tokenizer: bool = arg(False, "Take tokenizer_name although model_name_or_path has another one.")
    block_size: int = arg(512, "Tokens per training sequence; at most filter_length.")

    validation_blocks: int = arg(32, "Held-out blocks that a validation reads.")
    sweep_blocks: int = arg(128, "Held-out blocks that the final sweep over all budgets reads.")

    # Where the text lies may change; what it says may not, and is compared by the hash of its tokens.
    RESUMABLE = RunArguments.RESUMABLE | {"train_file", "validation_file", "replace_tokenizer"}

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least(self, 1, "validation_blocks", "sweep_blocks", "shuffle_buffer")
        if self.validation_blocks > self.sweep_blocks:
            raise ValueError(
                f"validation_blocks must be at most sweep_blocks = {self.sweep_blocks}, got {self.validation_blocks}"
            )
        if self.train_file and self.dataset_name:
            raise ValueError("give train_file or dataset_name, not both")
        if self.replace_tokenizer and not (self.tokenizer_name and self.model_name_or_path):
            raise ValueError("replace_tokenizer needs tokenizer_name and model_name_or_path")
        if self.validation_file and not (self.train_file or self.dataset_name):
            raise ValueError("validation_file needs train_file or dataset_name")
        if (longest := self.fields().get("filter_length")) is not None:
            self.check_block_size(longest)

    def check_block_size(self, filter_length: int) -> None:
        """Raises ValueError if the filters do not cover a block."""
        if not 2 <= self.block_size <= filter_length:
            raise ValueError(f"block_size must be in [2, filter_length = {filter_length}], got {self.block_size}")


@dataclass
class ClassificationArguments(ModelArguments):
    """Data; the model is in ModelArguments, how to train in RunArguments."""

    output_dir: str = arg("runs/train_classification", "Where everything goes; a run found there is continued.")
    full_budget_updates: int | None = arg(
        None,
        "With any schedule: updates at the full budget before all others; by default half of the updates "
        "that a new gated model is started with, of others none.",
    )

    train_file: list[str] | None = arg(None, "Local parquet, json(l) or csv files to train on, all of one kind.")
    validation_file: list[str] | None = arg(
        None, "Files to select by; without them, a random tenth of the training rows."
    )
    test_file: list[str] | None = arg(
        None, "Files for the final sweep, looked at once; without them it reports validation."
    )
    dataset_name: str | None = arg(
        None,
        "Instead of files: a data set on the Hub, or a local folder, of WAV files one folder per class.",
    )
    dataset_config_name: str | None = arg(None, "Which configuration of that data set.")
    streaming: bool = arg(False, "Read while training instead of before: for data larger than the disk.")
    shuffle_buffer: int = arg(1000, "With streaming: samples among which the next one is drawn.")
    text_column: str | None = arg(None, "The column that holds text. Give this one or features_column.")
    features_column: str | None = arg(
        None,
        "The column that holds a flat list of numbers per sample (pixels, mu-law codes, ..), each one a position, a "
        "list of frames, each one a list of as many numbers, or WAV files (of a folder of them: audio). A pattern such "
        "as 't*' stands for all columns of numbers of such names, in the order of the file.",
    )
    frame_length: int | None = arg(
        None, "So many consecutive numbers, frames or samples of a sound are one position; by default 1."
    )
    label_column: str = arg("label", "The column that holds the class, an integer from 0 or text.")
    num_labels: int | None = arg(None, "Classes; by default what the data says. Streams of plain integers need it.")
    max_length: int | None = arg(
        None, "Positions (bytes, tokens or frames) that are read of a sample; by default filter_length."
    )
    tokenizer_name: str | None = arg(
        None,
        "A tokenizer of the Hub, a local folder or a tokenizer.json; by default that of model_name_or_path, else bytes "
        "are tokens.",
    )
    replace_tokenizer: bool = arg(False, "Take tokenizer_name although model_name_or_path has another one.")
    feature_scale: str = arg(
        "auto",
        "'auto' maps columns of type uint8 from [0, 255] onto [-1, 1] and leaves others as they are; 'uint8' does so "
        "whatever the type; a number multiplies.",
    )
    validation_samples: int | None = arg(None, "At most so many validation samples, at random (of a stream the first).")
    test_samples: int | None = arg(None, "At most so many test samples, at random (of a stream the first).")
    eval_batch_size: int = arg(32, "Samples per process and forward pass of validation and sweep.")

    per_device_train_batch_size: int = arg(16, "Samples per process and forward pass.")
    classifier_pooling: str | None = arg(
        None,
        "What is classified: the 'mean' over all positions, or the 'last' one; by default 'mean', or as configured.",
    )

    RESUMABLE = RunArguments.RESUMABLE | {"eval_batch_size", "test_file", "test_samples", "replace_tokenizer"}

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("train_file", "validation_file", "test_file"):
            if isinstance(getattr(self, name), str):  # one name in a YAML file
                setattr(self, name, [getattr(self, name)])
        check_at_least(self, 1, "shuffle_buffer", "eval_batch_size", "validation_samples", "test_samples")
        check_at_least(self, 1, "max_length", "frame_length")
        if not self.train_file and not self.dataset_name:
            raise ValueError(
                "no data to train on: give --train_file data.parquet (or .jsonl, .csv) or --dataset_name owner/name, "
                "with --text_column or --features_column, and --label_column"
            )
        if self.train_file and self.dataset_name:
            raise ValueError("give train_file or dataset_name, not both")
        if (self.validation_file or self.test_file) and not self.train_file:
            raise ValueError("validation_file and test_file need train_file; a dataset has splits")
        if (self.text_column is None) == (self.features_column is None):
            raise ValueError(
                f"give text_column or features_column, and not both, got {self.text_column!r}, {self.features_column!r}"
            )
        if self.tokenizer_name and self.text_column is None:
            raise ValueError("tokenizer_name needs text_column")
        if self.replace_tokenizer and not (self.tokenizer_name and self.model_name_or_path):
            raise ValueError("replace_tokenizer needs tokenizer_name and model_name_or_path")
        if self.frame_length is not None and self.features_column is None:
            raise ValueError("frame_length needs features_column")
        check_at_least(self, 2, "num_labels")
        if self.source is None:
            self.classifier_pooling = self.classifier_pooling or "mean"
        if (longest := self.fields().get("filter_length")) is not None:
            self.set_max_length(longest)
        elif self.is_diagonal:  # which reads any length
            self.max_length = self.max_length or 1024
        if self.feature_scale not in ("auto", "uint8") and not _is_number(self.feature_scale):
            raise ValueError(f"feature_scale must be 'auto', 'uint8' or a number, got {self.feature_scale!r}")

    def set_max_length(self, filter_length: int) -> None:
        """By default what the filters cover. Raises ValueError if they do not cover it."""
        self.max_length = filter_length if self.max_length is None else self.max_length
        if self.max_length > filter_length:
            raise ValueError(f"max_length must be in [1, filter_length = {filter_length}], got {self.max_length}")


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text)) and float(text) != 0
    except ValueError:
        return False


@dataclass
class RetrievalArguments(ModelArguments):
    """Pairs of documents; the encoder and head are in ModelArguments, how to train in RunArguments."""

    output_dir: str = arg("runs/retrieval", "Where everything goes; a run found there is continued.")

    train_file: str | None = arg(None, "new_aan_pairs.train.tsv, or a file like it.")
    validation_file: str | None = arg(None, "new_aan_pairs.eval.tsv; without it, a random tenth of the training pairs.")
    test_file: str | None = arg(None, "new_aan_pairs.test.tsv, for the final sweep; without it, validation again.")
    max_length: int = arg(4000, "Bytes that are read of each document.")
    validation_samples: int | None = arg(None, "At most so many, at random.")
    test_samples: int | None = arg(None, "At most so many, at random.")
    eval_batch_size: int = arg(16, "Pairs per process and forward pass of validation and sweep.")
    per_device_train_batch_size: int = arg(8, "Pairs per process and forward pass.")

    NEW: ClassVar[Mapping[str, Any]] = MappingProxyType({"filter_length": 4096})
    CONFIGURATION: ClassVar[tuple[str, ...]] = ("essm", "pairs")
    RESUMABLE = RunArguments.RESUMABLE | {"eval_batch_size", "test_file", "test_samples"}

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.push_to_hub:
            raise ValueError("a classifier of pairs has no code that the Hub could run: leave out push_to_hub")
        if self.train_file is None:
            raise ValueError("no pairs to train on: give --train_file data/new_aan_pairs.train.tsv")
        check_at_least(self, 1, "eval_batch_size", "validation_samples", "test_samples")
        if (longest := self.fields().get("filter_length")) is not None:
            self.check_max_length(longest)

    def check_max_length(self, filter_length: int) -> None:
        """Raises ValueError unless filters of that length cover what is read of a document."""
        if not 1 <= self.max_length <= filter_length:
            raise ValueError(f"max_length must be in [1, filter_length = {filter_length}], got {self.max_length}")
