# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""What to train on, as the arguments of the training scripts of language models and classifiers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, Literal

from essm_train.arguments import ModelArguments, RunArguments, arg, check_at_least, check_needed


@dataclass
class SequenceArguments(ModelArguments):
    """A model of sequences that its filters cover."""

    LENGTH: ClassVar[str] = "max_length"  # the argument that says how long they are
    SHORTEST: ClassVar[int] = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if (longest := self.fields().get("filter_length")) is not None:
            self.check_length(longest)

    def check_length(self, filter_length: int) -> None:
        """By default what the filters cover. Raises ValueError if they do not cover it."""
        if (length := getattr(self, self.LENGTH)) is None:
            setattr(self, self.LENGTH, filter_length)
        elif not self.SHORTEST <= length <= filter_length:
            raise ValueError(
                f"{self.LENGTH} must be in [{self.SHORTEST}, filter_length = {filter_length}], got {length}"
            )


@dataclass
class DataArguments(SequenceArguments):
    """Files and data sets, and how text becomes tokens."""

    train_file: list[str] | None = arg(
        None, "Files of parquet, json(l) or csv, or folders of them; each other file is one document of UTF-8."
    )
    validation_file: list[str] | None = arg(
        None, "Held-out files; without them, the last tenth of a language model's text, or a random tenth of the rows."
    )
    dataset_name: str | None = arg(
        None, "Instead of files: a data set on the Hub, or a folder of tables, texts, or WAV files, a folder per class."
    )
    dataset_config_name: str | None = arg(None, "Which configuration of that data set.")
    streaming: bool = arg(False, "Read while training instead of before: for data larger than memory or disk.")
    shuffle_buffer: int = arg(1000, "With streaming: blocks or samples among which the next one is drawn.")
    tokenizer_name: str | None = arg(
        None, "A tokenizer of the Hub, a folder or a tokenizer.json; by default that of model_name_or_path, else bytes."
    )
    replace_tokenizer: bool = arg(False, "Take tokenizer_name although model_name_or_path has another one.")

    RESUMABLE = RunArguments.RESUMABLE | {"replace_tokenizer"}

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least(self, 1, "shuffle_buffer")
        check_needed(self, dataset_config_name="dataset_name")
        if self.train_file and self.dataset_name:
            raise ValueError("give train_file or dataset_name, not both")
        if self.replace_tokenizer and not (self.tokenizer_name and self.model_name_or_path):
            raise ValueError("replace_tokenizer needs tokenizer_name and model_name_or_path")


@dataclass
class CLMArguments(DataArguments):
    """A language model and the text that it learns."""

    output_dir: str = arg("runs/train_clm", "Where everything goes; a run found there is continued.")
    budget_schedule: str | None = arg(
        None,
        "Budgets of each update: rows, family, discrete, uniform, authors, sandwich or full (docs/train.md); by "
        "default 'rows' for the elastic block and 'discrete' for others.",
    )
    optimizer: Literal["adamw", "muon"] | None = arg(
        None,
        "'muon' (for matrices of linear layers, AdamW for all else) or 'adamw', which it is by default from weights.",
    )
    max_steps: int = arg(900, "Updates.")
    text_column: str = arg("text", "The column that holds the text.")
    block_size: int = arg(512, "Tokens per training sequence; at most filter_length.")
    validation_blocks: int = arg(32, "Held-out blocks that a validation reads.")
    sweep_blocks: int = arg(128, "Held-out blocks that the final sweep over all budgets reads.")

    LENGTH, SHORTEST = "block_size", 2
    # Where the text lies may change; what it says may not, and is compared by the hash of its tokens.
    RESUMABLE = DataArguments.RESUMABLE | {"train_file", "validation_file"}

    def __post_init__(self) -> None:
        super().__post_init__()
        self.optimizer = self.optimizer or ("adamw" if self.model_name_or_path else "muon")
        check_at_least(self, 1, "validation_blocks", "sweep_blocks")
        check_at_least(self, 2, "block_size")
        if self.validation_blocks > self.sweep_blocks:
            raise ValueError(
                f"validation_blocks must be at most sweep_blocks = {self.sweep_blocks}, got {self.validation_blocks}"
            )
        if self.validation_file and not (self.train_file or self.dataset_name):
            raise ValueError("validation_file needs train_file or dataset_name")


@dataclass
class ClassificationArguments(DataArguments):
    """A classifier and the rows that it learns."""

    output_dir: str = arg("runs/train_classification", "Where everything goes; a run found there is continued.")
    full_budget_updates: int | None = arg(
        None, "Updates at the full budget before all others; by default half of a new elastic model's, else none."
    )
    test_file: list[str] | None = arg(None, "Files for the final sweep; without them it reports validation.")
    text_column: str | None = arg(None, "The column that holds text. Give this one or features_column.")
    features_column: str | None = arg(
        None,
        "The column of flat lists of numbers, each one a position, of lists of frames, each as many numbers, or of WAV "
        "files (of a folder of them: audio). 't*' stands for all columns of numbers of such names, in their order.",
    )
    frame_length: int | None = arg(None, "So many numbers, frames or samples of a sound are a position; by default 1.")
    label_column: str = arg("label", "The column that holds the class, an integer from 0 or text.")
    num_labels: int | None = arg(None, "Classes; by default what the data says. Streams of plain integers need it.")
    max_length: int | None = arg(None, "Positions that are read of a sample; by default filter_length.")
    feature_scale: str = arg(
        "auto",
        "'auto' maps [0, 255] onto [-1, 1] where the type is uint8, 'uint8' whatever it is; a number multiplies.",
    )
    validation_samples: int | None = arg(None, "At most so many validation samples, at random (of a stream the first).")
    test_samples: int | None = arg(None, "At most so many test samples, at random (of a stream the first).")
    eval_batch_size: int = arg(32, "Samples per process and forward pass of validation and sweep.")
    per_device_train_batch_size: int = arg(16, "Samples per process and forward pass.")
    classifier_pooling: str | None = arg(
        None, "What is classified: the 'mean' of all positions, or the 'last' one; by default 'mean', or as configured."
    )

    RESUMABLE = DataArguments.RESUMABLE | {"eval_batch_size", "test_file", "test_samples"}

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least(self, 1, "eval_batch_size", "validation_samples", "test_samples", "max_length", "frame_length")
        check_at_least(self, 2, "num_labels")
        if not self.train_file and not self.dataset_name:
            raise ValueError(
                "no data to train on: give --train_file data.parquet (or .jsonl, .csv) or --dataset_name owner/name, "
                "with --text_column or --features_column, and --label_column"
            )
        if (self.validation_file or self.test_file) and not self.train_file:
            raise ValueError("validation_file and test_file need train_file; a dataset has splits")
        if (self.text_column is None) == (self.features_column is None):
            raise ValueError(
                f"give text_column or features_column, and not both, got {self.text_column!r}, {self.features_column!r}"
            )
        check_needed(self, tokenizer_name="text_column", frame_length="features_column")
        if self.is_diagonal:  # which reads any length
            self.max_length = self.max_length or 1024
        try:
            usable = self.feature_scale in ("auto", "uint8") or 0 < abs(float(self.feature_scale)) < math.inf
        except ValueError:
            usable = False
        if not usable:
            raise ValueError(f"feature_scale must be 'auto', 'uint8' or a number, got {self.feature_scale!r}")


@dataclass
class RetrievalArguments(SequenceArguments):
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
