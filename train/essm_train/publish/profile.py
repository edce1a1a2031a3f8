# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Calibration of a saved model: quality and speed at every budget, as its profile, presets and picture."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

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
from essm_train.measure.scoring import HeldOut, hold_out_samples
from essm_train.measure.timing import pick_device, threads
from essm_train.models import is_causal, is_pairs, load_model, read_saved_config
from essm_train.publish.arguments import CalibrateArguments
from essm_train.tasks.catalog import get_task
from modeling_essm import ESSMConfig
from modeling_essm.budgets import BudgetProfile, read_profile
from modeling_essm.budgets.profile import PROFILE_NAME
from modeling_essm.budgets.weights import weights_checksum
from modeling_essm.training.budget_dropout import BUDGETS, clip_budgets


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
    return hold_out_samples(split, functools.partial(collate, reader), args.eval_batch_size, title)


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
        raise ValueError(f"task {args.task!r} is one of {spec.script}, and {args.model} holds {kind}")
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
    if args.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device must be 'auto' or 'cpu' on this machine, which has no CUDA device, got 'cuda'")
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
    model = model.to(model.dtype if args.dtype == "auto" else getattr(torch, args.dtype))
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
