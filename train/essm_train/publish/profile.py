# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Calibration of a saved model: quality and speed at every budget, as its profile, presets and picture."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from essm_train.arguments import check_within, refuse
from essm_train.data.arguments import ClassificationArguments
from essm_train.data.classification import check_weights, class_names, load_test
from essm_train.data.readers import read_record
from essm_train.data.rows import collate
from essm_train.data.tokens import encoder_beside, open_tokenizer
from essm_train.files import check_writable, refuse_replacing, write_figure, write_json
from essm_train.measure import calibration
from essm_train.measure.calibration import measure_device, measure_quality
from essm_train.measure.evaluation import open_task, open_text
from essm_train.measure.plots import draw_profile
from essm_train.measure.scoring import HeldOut, hold_out_samples
from essm_train.measure.timing import pick_device, threads
from essm_train.models import budgets_to_measure, is_causal, load_model, read_saved_config
from essm_train.pairs import ESSMPairConfig
from essm_train.publish.arguments import CalibrateArguments
from essm_train.publish.hub import read_json
from essm_train.tasks.catalog import get_task
from modeling_essm import ESSMConfig
from modeling_essm.budgets import BudgetProfile, read_profile
from modeling_essm.budgets.profile import PROFILE_NAME
from modeling_essm.budgets.weights import same_weights, weights_checksum

_PRESETS = ("small", "medium", "full")  # of `BudgetProfile.presets`


def calibrate(args: CalibrateArguments) -> BudgetProfile:
    """Measure, and write the profile, the presets and the picture.

    Raises:
        ValueError, OSError: arguments, model, data or an existing profile that cannot work, or figures and presets that
            are there and would be replaced, before anything is measured.
    """
    folder = Path(args.model)
    config = read_saved_config(folder, pairs=True)
    causal, H, capacity = is_causal(config), config["filter_length"], config["num_spectral_channels"]
    longest = H - args.decode_tokens if causal else H
    if causal:
        check_within(args, f"[1, {H - 1}]", "decode_tokens")
    check_within(args, f"[1, {longest}]", "prompt_length")
    check_within(args, f"[2, {H}]", "block_size")
    check_within(args, f"[1, {capacity}]", "budgets")
    refuse({"device 'cuda' is not on this machine": args.device == "cuda" and not torch.cuda.is_available()})
    check_writable(folder)
    auto = AutoModelForCausalLM if causal else AutoModelForSequenceClassification
    model = load_model(auto, folder, trust_remote_code=args.trust_remote_code, dtype="auto").eval()
    model.to(pick_device(args.device))
    # One that is of other weights is refused: it may hold the figures of other devices.
    profile = read_profile(folder, model) if args.timing_only or (folder / PROFILE_NAME).exists() else None
    weights = weights_checksum(model)
    assert weights is not None  # nothing is offloaded
    model.to(model.dtype if args.dtype == "auto" else getattr(torch, args.dtype))
    if args.timing_only:
        assert profile is not None
        budgets = tuple(sorted({*(args.budgets or profile.quality.budgets), profile.quality.budgets[-1]}))
        if unknown := sorted(set(budgets) - set(profile.quality.budgets)):
            raise ValueError(f"budgets must be of {list(profile.quality.budgets)}, measured before, got {unknown}")
    else:
        budgets = budgets_to_measure(model, args.budgets)
        held_out = open_held_out(args, config)
    if not args.overwrite:
        refuse_replacing(_replaced(args, profile, config, calibration.device_name(model.device)), folder)
    with threads(args.threads or torch.get_num_threads()):
        if not args.timing_only:
            quality = measure_quality(model, held_out, budgets)
            profile = BudgetProfile(weights, tuple(model.config.capacities), quality)
        assert profile is not None
        length = min(args.prompt_length or profile.quality.length, longest)
        entry = measure_device(model, budgets, args.batch_sizes, length, args.decode_tokens, args.rounds)
    if (folder / PROFILE_NAME).exists():  # another device may have been measured meanwhile
        present = read_profile(folder)
        refuse({f"{folder / PROFILE_NAME} is of other weights now": not same_weights(present.weights, weights)})
        profile = replace(profile, devices=present.devices)
    profile = profile.merge(entry)
    path = profile.save(folder)
    record = read_json(folder / "config.json")
    there, chosen = record.get("budget_presets") or {}, profile.presets()
    if args.overwrite:
        presets = there | chosen
    else:  # new times, or fewer channels, may choose otherwise
        presets = there if args.timing_only else chosen | there
    write_json(folder / "config.json", record | {"budget_presets": presets})
    print(profile.table(entry.device))
    write_figure(path.with_suffix(".png"), draw_profile(profile))
    print(f"saved {path}, {path.with_suffix('.png').name}; presets in config.json: {presets}")
    return profile


def _replaced(
    args: CalibrateArguments, profile: BudgetProfile | None, config: dict[str, Any], device: str
) -> list[str]:
    """What another calibration, or a user, has left that this one would replace."""
    found, own = [], {} if profile is None else profile.presets()
    if profile is not None and not args.timing_only:
        found.append(f"the quality in {PROFILE_NAME}")
    if profile is not None and device in profile.devices:
        found.append(f"the figures of {device} in {PROFILE_NAME}")
    presets = {} if args.timing_only else config.get("budget_presets") or {}  # which it keeps
    return found + [f"the preset {name!r}" for name in _PRESETS if name in presets and presets[name] != own.get(name)]


def open_held_out(args: CalibrateArguments, config: dict[str, Any]) -> HeldOut:
    """The data that the arguments name, read as the model was trained.

    Raises:
        ValueError: data that cannot be read, or not of the model's kind. FileNotFoundError: a task's data is absent.
    """
    pairs = config["model_type"] == ESSMPairConfig.model_type
    script = "train_clm" if is_causal(config) else "train_retrieval" if pairs else "train_classification"
    meant = "train_clm" if args.text_files else get_task(args.task).script if args.task else "train_classification"
    if script != meant:
        raise ValueError(f"{args.model} was trained by {script}, and the data given is for {meant}")
    if args.text_files:
        block_size = args.block_size or min(512, config["filter_length"])
        encoder = encoder_beside(args.model)
        column = args.text_column or "text"
        return open_text(args.text_files, encoder, block_size, args.max_blocks, args.eval_batch_size, column)
    if args.task:
        return open_task(args.task, args.data_dir, args.scale, args.model, args.eval_batch_size)
    folder, saved = Path(args.model), ESSMConfig.from_pretrained(args.model)
    record, max_length = read_record(folder), saved.filter_length
    if args.text_column and (folder / "tokenizer_config.json").exists():
        max_length = min(max_length, open_tokenizer(args.model).model_max_length)
    same = ("test_file", "dataset_name", "dataset_config_name", "text_column", "features_column", "label_column")
    arguments = ClassificationArguments(
        **{name: getattr(args, name) for name in same},
        model_name_or_path=args.model,
        train_file=args.test_file,  # is not looked at
        max_length=record.get("max_length", max_length),
        frame_length=record.get("frame_length"),
    )
    title = args.dataset_name or ", ".join(Path(path).name for path in args.test_file or [])
    if (found := load_test(arguments, class_names(saved), record)) is None:
        raise ValueError(
            f"{title!r} has no split 'test' or 'validation' with labels, and rows of 'train' do not show how good a "
            "model is"
        )
    reader, split, names = found
    check_weights(arguments, saved, reader, len(names or saved.id2label), names)
    return hold_out_samples(split, functools.partial(collate, reader), args.eval_batch_size, title)
