# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""How a finished model is calibrated, exported, pruned and pushed, as arguments. Nothing here imports torch."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, field
from typing import Any, Literal

from essm_train.arguments import (
    DATA_HELP,
    OVERWRITE_HELP,
    TRUST_HELP,
    arg,
    check_at_least,
    check_needed,
    check_within,
    refuse,
)

PACKAGES = {"onnx": ("onnx", "onnxscript", "onnxruntime"), "torch": (), "executorch": ("executorch",)}


@dataclass
class CalibrateArguments:
    """Which model to measure, on which data and how."""

    model: str = field(metadata={"help": "Folder of a saved ES-SSM; the results go there too."})
    text_files: list[str] | None = arg(None, "Held-out text, for a language model.")
    test_file: list[str] | None = arg(None, "Held-out parquet, json(l) or csv files, for a classifier.")
    dataset_name: str | None = arg(None, "Or a data set of the Hub or a local folder, whose test split counts if any.")
    dataset_config_name: str | None = arg(None, "Which configuration of that data set.")
    text_column: str | None = arg(None, "Of text_files, by default text; of rows as in essm-train-classification.")
    features_column: str | None = arg(None, "As in essm-train-classification.")
    label_column: str = arg("label", "As in essm-train-classification.")
    task: str | None = arg(None, "Or a task of essm-list-tasks, by its held-out data.")
    data_dir: str | None = arg(None, DATA_HELP)
    scale: str = arg("full", "'full', 'medium' or 'small', as the model was trained.")
    timing_only: bool = arg(False, "Keep the quality measured before, needs no data.")
    budgets: list[int] | None = arg(None, "Budgets K, the full one always among them, by default as in essm-sweep.")
    batch_sizes: list[int] = arg([1, 8], "Rows of a timed call.")
    prompt_length: int | None = arg(None, "Positions of a timed prefill; by default those of a held-out sample.")
    decode_tokens: int = arg(64, "Tokens decoded for one timing.")
    rounds: int = arg(7, "Rounds of timing; beyond a minute, three.")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = arg("auto", "Of the weights; auto is as saved.")
    device: Literal["auto", "cpu", "cuda"] = arg("auto", "Where to measure.")
    threads: int | None = arg(None, "CPU threads, by default those torch takes.")
    block_size: int | None = arg(None, "With text_files: tokens per block, by default 512 or filter_length if less.")
    max_blocks: int = arg(256, "With text_files: blocks, spread evenly over the text.")
    eval_batch_size: int = arg(8, "Blocks or samples per forward pass for quality.")
    overwrite: bool = arg(False, "Replace the quality, this device's figures and the presets that are there.")
    trust_remote_code: bool = arg(False, TRUST_HELP)

    def __post_init__(self) -> None:
        names = ("text_files", "test_file", "dataset_name", "task", "timing_only")
        given = [name for name in names if getattr(self, name)]
        if len(given) != 1:
            raise ValueError(f"give {' or '.join(names)}, one of them, got {', '.join(given) or 'none'}")
        check_at_least(self, 1, "decode_tokens", "rounds", "max_blocks", "eval_batch_size", "prompt_length", "threads")
        check_at_least(self, 1, "batch_sizes", "budgets")
        check_at_least(self, 2, "block_size")
        check_needed(self, dataset_config_name="dataset_name", data_dir="task", scale="task", block_size="text_files")


@dataclass
class ExportArguments:
    """Which model to write, in which format, and where."""

    model: str = field(metadata={"help": "Folder of a saved ES-SSM."})
    output_dir: str = field(metadata={"help": "New folder."})
    overwrite: bool = arg(False, "Replace an earlier export.")
    spectral_budget: list[str] = arg(
        [], "Budgets: K, K,K,.. of the layers, or a preset's name; by default the config's."
    )
    format: Literal["onnx", "torch", "executorch"] = arg("onnx", "For which runtime.")
    int8: bool = arg(False, "With onnx: matrices of 8 bits and a scale for each output.")
    max_length: int | None = arg(None, "Most positions of one call, by default filter_length.")

    def __post_init__(self) -> None:
        refuse({f"int8 needs format 'onnx', got {self.format!r}": self.int8 and self.format != "onnx"})
        missing = " ".join(name for name in PACKAGES[self.format] if importlib.util.find_spec(name) is None)
        refuse({f"format {self.format!r} needs packages that are not here: pip install {missing}": missing})

    @property
    def budgets(self) -> list[Any]:
        """What `resolve_budget` understands, each."""

        def number(word: str) -> Any:
            return int(word) if word.removeprefix("-").isdecimal() else word

        words = [word.split(",") for word in self.spectral_budget]
        return [number(word[0]) if len(word) == 1 else list(map(number, word)) for word in words] or [None]


@dataclass
class PruneArguments:
    """Which model to prune, by what and how far."""

    model: str = field(metadata={"help": "Folder or Hub name of a trained diagonal SSM, Mamba or Mamba-2."})
    output_dir: str = field(metadata={"help": "Where the smaller model and what was measured go."})
    amount: float | None = arg(
        None, "Share of the modes to prune, in (0, 1); with granularity 'mode_index' of their ranks."
    )
    max_loss: float | None = arg(
        None, "Instead of amount: the most accuracy (0.01 is a point) or bits per byte to lose."
    )
    method: Literal["aire", "aire_exact", "last", "lamp", "magnitude", "energy", "hinf", "hankel", "random"] = arg(
        "aire", "How modes are ranked."
    )
    scope: Literal["global", "uniform"] = arg(
        "global", "'global' ranks over all layers, 'uniform' takes the same share of each."
    )
    granularity: Literal["mode", "mode_index"] = arg(
        "mode", "'mode' prunes single ones, 'mode_index' (S4D) as many of every channel."
    )
    bidirectional: Literal["paper", "exact", "released"] = arg("paper", "How two directions count.")
    task: str | None = arg(None, "Held-out data: of a task that essm-list-tasks names, or of your own .yaml file.")
    data_dir: str | None = arg(None, DATA_HELP)
    scale: str = arg("full", "'full', 'medium' or 'small', as the model was trained.")
    text_files: list[str] | None = arg(None, "Held-out text of a language model, instead of a task.")
    block_size: int = arg(512, "Tokens per block of held-out and calibration text.")
    max_blocks: int = arg(64, "Blocks of each, spread evenly over the text.")
    calibration_files: list[str] | None = arg(None, "Text that the energies of Mamba's states are measured on.")
    horizon: int | None = arg(None, "Steps that energies are summed over, for modes with |lam| >= 1; by default all.")
    step: float = arg(0.05, "Between the ratios that are measured.")
    seed: int = arg(0, "Seed of the method 'random'.")
    overwrite: bool = arg(False, OVERWRITE_HELP)
    trust_remote_code: bool = arg(False, TRUST_HELP)

    def __post_init__(self) -> None:
        for one, other in (("amount", "max_loss"), ("task", "text_files")):
            values = getattr(self, one), getattr(self, other)
            refuse({f"give {one} or {other}, got {values[0]} and {values[1]}": values.count(None) != 1})
        check_needed(self, data_dir="task", scale="task")
        check_within(self, "(0, 1)", "amount")
        check_within(self, "[0.001, 0.5]", "step")
        check_at_least(self, 0, "max_loss", "seed")
        check_at_least(self, 1, "horizon", "max_blocks")
        check_at_least(self, 2, "block_size")

    @property
    def ratios(self) -> tuple[float, ...]:
        """Shares to measure, ascending; the first is 0."""
        count = int(round(0.999 / self.step, 9))
        ladder = {round(i * self.step, 6) for i in range(count + 1)} | ({self.amount} if self.amount else set())
        return tuple(sorted(ladder))


@dataclass
class PushArguments:
    """How a run is pushed."""

    run: str = field(metadata={"help": "Folder of a run, which holds model/; or a saved model folder itself."})
    hub_model_id: str | None = arg(None, "'name' or 'org/name'.")
    private: bool = arg(False, "Create the repository private.")
    template: str | None = arg(None, "Card template, such as hub_configs/essm-21m/README.md; else a plain card.")
    commit_message: str = arg("Upload ES-SSM model", "First line of the commit.")
    card_only: bool = arg(False, "Write model/README.md and stop.")
    replace_card: list[str] = arg([], "Which card may be replaced though it was edited by hand: local, hub or both.")
    dry_run: bool = arg(False, "Say which files would be published and which not, write nothing, and stop.")

    def __post_init__(self) -> None:
        named = self.card_only or self.dry_run or self.hub_model_id
        unknown = [name for name in self.replace_card if name not in ("local", "hub")]
        refuse({f"replace_card must be local, hub or both, got {' '.join(unknown)}": unknown})
        refuse({"hub_model_id is needed to push: --hub_model_id org/name": not named})
