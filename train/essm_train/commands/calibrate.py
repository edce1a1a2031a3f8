# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Which budget for this machine? Quality of a saved model at every budget, and its speed and memory on this device.

    python train/calibrate.py --model runs/x/model --text_files held_out.txt             # a language model
    python train/calibrate.py --model runs/y/model --test_file test.csv --features_column "t*"      # a classifier
    python train/calibrate.py --model runs/y/model --task smnist --data_dir data         # of train/list_tasks.py
    python train/calibrate.py --model runs/z/model --task retrieval --data_dir data      # of pairs of documents
    python train/calibrate.py --model runs/x/model --timing_only                         # the same on another device

Left in the model's folder: budget_profile.json, with which `choose_budget` answers; the presets "sweet-spot",
"collapse-boundary" and "full" in config.json, for `spectral_budget="sweet-spot"`; and budget_profile.png. Calibrated
again, quality and this device's figures are replaced; those of other devices and presets of other names stay.

Quality is bits per byte by the context rule of budget_sweep.py, or accuracy. The drop against the full budget is given
with its standard error over blocks or samples. Prefill is a forward pass over the whole prompt (a sample, for a
classifier), decode one greedy step after it, as `forward` runs it: what `generate` does around it comes on top. Times
are medians over rounds in which budgets and batch sizes take turns, memory is what a call needs beside the weights;
the inputs are random.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, HfArgumentParser

from essm_train.arguments import arg, check_at_least
from essm_train.commands.errors import command
from essm_train.data.arguments import ClassificationArguments
from essm_train.data.classification import load_test
from essm_train.data.labels import check_weights, class_names
from essm_train.data.readers import read_record
from essm_train.data.rows import collate
from essm_train.data.tokens import ByteEncoder, TokenizerEncoder, open_tokenizer
from essm_train.files import check_writable, write_figure, write_json
from essm_train.measure.calibration import measure_device, measure_quality
from essm_train.measure.evaluation import open_task, open_text
from essm_train.measure.plots import draw_profile
from essm_train.measure.scoring import HeldOut, Predictor, hold_out_samples
from essm_train.measure.timing import pick_device, threads
from essm_train.models import TRUST_HELP, is_causal, is_pairs, load_model, read_saved_config
from essm_train.tasks.catalog import get_task
from modeling_essm import ESSMConfig
from modeling_essm.budgets import BudgetProfile, read_profile
from modeling_essm.loading_essm import PROFILE_NAME, weights_checksum
from modeling_essm.training.budget_dropout import BUDGETS, clip_budgets

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass
class CalibrateArguments:
    """Arguments of the script."""

    model: str = field(metadata={"help": "Folder of a saved ES-SSM; the results go there too."})
    text_files: list[str] | None = arg(None, "Held-out text, for a language model.")
    test_file: list[str] | None = arg(
        None, "Held-out parquet, json(l) or csv files, for a classifier, with their columns:"
    )
    dataset_name: str | None = arg(None, "Or a data set of the Hub or a local folder, whose test split counts if any.")
    dataset_config_name: str | None = arg(None, "Which configuration of that data set.")
    text_column: str | None = arg(None, "As in train_classification.py.")
    features_column: str | None = arg(None, "As in train_classification.py.")
    label_column: str = arg("label", "As in train_classification.py.")
    task: str | None = arg(None, "Or a task of train/list_tasks.py, by its held-out data.")
    data_dir: str = arg("data", "Folder of the tasks' data.")
    scale: str = arg("full", "'full', 'medium' or 'small', as the model was trained.")
    timing_only: bool = arg(False, "Keep the quality measured before, needs no data.")
    budgets: list[int] | None = arg(None, "Budgets K, the full one always among them; by default those of training.")
    batch_sizes: list[int] = arg([1, 8], "Rows of a timed call.")
    prompt_length: int | None = arg(
        None, "Positions of a timed prefill; by default those of a held-out block or sample."
    )
    decode_tokens: int = arg(64, "Tokens decoded for one timing.")
    rounds: int = arg(7, "Rounds of timing; beyond a minute, three.")
    dtype: str = arg("auto", "auto (as saved), float32, bfloat16 or float16.")
    device: str = arg("auto", "auto, cpu or cuda.")
    threads: int | None = arg(None, "CPU threads, by default those torch takes.")
    block_size: int | None = arg(None, "With text_files: tokens per block, by default 512 or filter_length if less.")
    max_blocks: int = arg(256, "With text_files: blocks, spread evenly over the text.")
    eval_batch_size: int = arg(8, "Blocks or samples per forward pass for quality.")
    trust_remote_code: bool = arg(False, TRUST_HELP)

    def __post_init__(self) -> None:
        names = ("text_files", "test_file", "dataset_name", "task")
        given = [name for name in names if getattr(self, name)]
        if self.timing_only and given:
            raise ValueError(f"timing_only measures no quality: give it without {', '.join(given)}")
        if not self.timing_only and len(given) != 1:
            raise ValueError(f"give {', '.join(names)} or timing_only, one of them, got {given or 'none'}")
        check_at_least(self, 1, "decode_tokens", "rounds", "max_blocks", "eval_batch_size", "prompt_length", "threads")
        check_at_least(self, 1, "batch_sizes", "budgets")
        check_at_least(self, 2, "block_size")
        if self.dtype not in ("auto", *DTYPES):
            raise ValueError(f"dtype must be one of {['auto', *DTYPES]}, got {self.dtype!r}")
        if self.device not in ("auto", "cpu", "cuda"):
            raise ValueError(f"device must be one of ['auto', 'cpu', 'cuda'], got {self.device!r}")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ValueError("device must be 'auto' or 'cpu' on this machine, which has no CUDA device, got 'cuda'")


def open_samples(args: CalibrateArguments) -> HeldOut:
    """The files or data set that the arguments name, read as the classifier was trained: see its features.json or
    tokenizer. Raises ValueError if they cannot be read, or do not fit the model."""
    folder, config = Path(args.model), ESSMConfig.from_pretrained(args.model)
    record, max_length = read_record(folder), config.filter_length
    if args.text_column and (folder / "tokenizer_config.json").exists():
        max_length = min(max_length, open_tokenizer(args.model).model_max_length)
    arguments = ClassificationArguments(
        model_name_or_path=args.model,
        train_file=args.test_file,  # is not looked at
        test_file=args.test_file,
        dataset_name=args.dataset_name,
        dataset_config_name=args.dataset_config_name,
        text_column=args.text_column,
        features_column=args.features_column,
        label_column=args.label_column,
        max_length=record.get("max_length", max_length),
        frame_length=record.get("frame_length"),
    )
    reader, split, names = load_test(arguments, class_names(config), record)
    check_weights(arguments, config, reader, len(names or config.id2label), names)
    title = args.dataset_name or ", ".join(Path(path).name for path in args.test_file or [])
    return hold_out_samples(split, Predictor(functools.partial(collate, reader), args.eval_batch_size), title)


def open_held_out(args: CalibrateArguments, config: dict[str, Any]) -> HeldOut:
    """The data that the arguments name.

    Raises:
        ValueError: data that cannot be read, or not of the model's kind. FileNotFoundError: a task's data is absent.
    """
    causal, batch_size = is_causal(config), args.eval_batch_size
    if args.text_files:
        if not causal:
            raise ValueError("text_files measure language models; a classifier needs test_file, dataset_name or task")
        encoder: Any = ByteEncoder()
        if config["vocab_size"] != encoder.vocab_size:
            encoder = TokenizerEncoder(
                load_model(AutoTokenizer, args.model, trust_remote_code=args.trust_remote_code), "of the model"
            )
        block_size = args.block_size or min(512, config["filter_length"])
        return open_text(args.text_files, encoder, block_size, args.max_blocks, batch_size)

    if args.task is None:
        if causal:
            raise ValueError(
                "test_file and dataset_name measure classifiers; a language model needs text_files or task"
            )
        if is_pairs(config):
            raise ValueError("test_file and dataset_name hold single sequences; a classifier of pairs needs task")
        return open_samples(args)

    spec = get_task(args.task)
    kinds = {"train_clm": "a language model", "train_retrieval": "a classifier of pairs"}
    script = "train_clm" if causal else "train_retrieval" if is_pairs(config) else "train_classification"
    if script != spec.script:
        kind = kinds.get(script, "a classifier")
        raise ValueError(f"task {args.task!r} is one of {spec.script}.py, and {args.model} holds {kind}")
    return open_task(args.task, args.data_dir, args.scale, batch_size)


def store_presets(folder: Path, presets: dict[str, int]) -> None:
    """Put them among config.json's budget_presets; all else in it stays, presets of other names too."""
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config["budget_presets"] = {**(config.get("budget_presets") or {}), **presets}
    write_json(path, config)


def choose_budgets(wanted: Sequence[int] | None, capacity: int, known: Sequence[int] | None) -> tuple[int, ...]:
    """The budgets to measure.

    Args:
        wanted: those asked for. known: those that have a quality, when only times are measured.
    Raises:
        ValueError: one above the capacity, or without a quality.
    """
    if known is not None:
        unknown = sorted(set(wanted or ()) - set(known))
        if unknown:
            raise ValueError(f"budgets must be among those with a quality, {list(known)}, got {unknown}")
        return tuple(sorted(set(wanted or known)))
    if wanted and max(wanted) > capacity:
        raise ValueError(f"budgets must be in [1, {capacity}], got {max(wanted)}")
    return clip_budgets((*(wanted or BUDGETS), capacity), capacity)


def check_lengths(args: CalibrateArguments, config: dict[str, Any]) -> int:
    """The longest prompt. Raises ValueError if what was asked for passes the model's filter_length."""
    longest = config["filter_length"]
    longest_prompt = longest - args.decode_tokens if is_causal(config) else longest
    if longest_prompt < 1:
        raise ValueError(f"decode_tokens must be in [1, {longest - 1}] (filter_length - 1), got {args.decode_tokens}")
    if args.prompt_length is not None and args.prompt_length > longest_prompt:
        raise ValueError(
            f"prompt_length must be in [1, {longest_prompt}] (filter_length - decode_tokens), got {args.prompt_length}"
        )
    if args.block_size is not None and args.block_size > longest:
        raise ValueError(f"block_size must be in [2, {longest}] (filter_length), got {args.block_size}")
    return longest_prompt


def calibrate(args: CalibrateArguments) -> BudgetProfile:
    """Measure, and write the profile, the presets and the picture.

    Raises:
        ValueError: arguments, model, data or an existing profile that cannot work, before anything is measured.
        FileNotFoundError: the task's data, or with timing_only the profile, is absent.
    """
    folder = Path(args.model)
    config = read_saved_config(folder, pairs=True)
    longest = check_lengths(args, config)
    check_writable(folder)
    device = pick_device(args.device)
    load = AutoModelForCausalLM if is_causal(config) else AutoModelForSequenceClassification
    model = load_model(load, folder, trust_remote_code=args.trust_remote_code, dtype="auto").to(device).eval()
    present = None
    if args.timing_only or (folder / PROFILE_NAME).exists():
        present = read_profile(folder, model)
    weights = weights_checksum(model)
    assert weights is not None  # nothing is offloaded
    model = model.to(DTYPES.get(args.dtype, model.dtype))
    known = present.quality.budgets if args.timing_only and present is not None else None
    budgets = choose_budgets(args.budgets, config["num_spectral_channels"], known)
    held_out = None if args.timing_only else open_held_out(args, config)

    with threads(args.threads or torch.get_num_threads()):
        if held_out is None:
            assert present is not None
            profile = present
        else:
            quality = measure_quality(model, held_out, budgets)
            capacities = tuple(model.config.capacities)
            profile = BudgetProfile(weights, capacities, quality, present.devices if present else {})
        length = args.prompt_length or profile.quality.length
        entry = measure_device(model, budgets, args.batch_sizes, min(length, longest), args.decode_tokens, args.rounds)
    profile = profile.merge(entry)
    path = profile.save(folder)
    store_presets(folder, profile.presets())
    print(profile.table(entry.device))
    write_figure(path.with_suffix(".png"), draw_profile(profile))
    print(f"saved {path}, {path.with_suffix('.png').name}; presets in config.json: {profile.presets()}")
    return profile


def main(argv: Sequence[str] | None = None) -> BudgetProfile:
    """From the command line."""
    (args,) = HfArgumentParser(CalibrateArguments).parse_args_into_dataclasses(argv)
    return calibrate(args)


run = command(main)


if __name__ == "__main__":
    run()
