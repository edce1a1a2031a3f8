# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""A trained model on a task at every budget: quality over seeds, retention, speed, peak memory, active parameters.

Language models are judged by bits per byte under the context rule of scoring.py, classifiers by accuracy on the test
split. Retention, sweet spot and collapse boundary: modeling_essm/budgets/curve.py.
"""

from __future__ import annotations

import functools
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from essm_train.data import classification, text
from essm_train.data.classification import class_names, record_of
from essm_train.data.documents import describe_files
from essm_train.data.text import read_blocks
from essm_train.data.tokens import Encoder, encoder_beside, file_of, open_tokenizer
from essm_train.files import sha256_of
from essm_train.measure.budget_sweep import sweep_budgets
from essm_train.measure.scoring import HeldOut, hold_out_blocks, hold_out_samples
from essm_train.measure.timing import peak_memory, working_device
from essm_train.models import budgets_to_measure, capacity_of, load_model, run_at_budget
from essm_train.tasks import retrieval
from essm_train.tasks.catalog import get_task, make_arguments
from modeling_essm.budgets.curve import BudgetCurve


@dataclass(frozen=True)
class Evaluation:
    """The measurements of one or more seeds.

    Attributes:
        curves: one per seed, of the same metric and budgets.
        peak_bytes, active_parameters: one entry per budget, of the first seed: they do not depend on the weights.
    """

    curves: tuple[BudgetCurve, ...]
    peak_bytes: tuple[int, ...] = ()
    active_parameters: tuple[int, ...] = ()

    @property
    def budgets(self) -> tuple[int, ...]:
        return self.curves[0].budgets

    @property
    def curve(self) -> BudgetCurve:
        """The means as one curve, the standard deviations over seeds as its errors (0 for one seed)."""
        values, speeds = ([*zip(*(getattr(c, name) for c in self.curves))] for name in ("values", "speeds"))
        deviations = tuple(statistics.stdev(each) if len(each) > 1 else 0.0 for each in values)
        means, speed = (tuple(map(statistics.fmean, columns)) for columns in (values, speeds))
        # Marked by quality alone, as in the paper: the times of one machine belong to one model's sweep.
        return replace(self.curves[0], values=means, speeds=speed, errors=deviations, timings=())

    def figures(self) -> list[str]:
        """Mean, and deviation of several seeds, of every budget."""
        curve, several = self.curve, len(self.curves) > 1
        return [f"{v:.4f}" + (f" ± {e:.4f}" if several else "") for v, e in zip(curve.values, curve.errors)]

    def record(self) -> dict[str, Any]:
        """For JSON."""
        curve = self.curve
        metric = {"name": curve.metric, "higher_is_better": curve.higher_is_better}
        seeds = {"values": [c.values for c in self.curves], "tokens_per_second": [c.speeds for c in self.curves]}
        costs = {"peak_bytes": self.peak_bytes, "active_parameters": self.active_parameters} if self.peak_bytes else {}
        summary = {"mean": curve.values, "deviation": curve.errors, "retention": curve.retention}
        marks = {"sweet_spot": curve.sweet_spot, "collapse_boundary": curve.collapse_boundary}
        found = {"metric": metric, "budgets": curve.budgets, **seeds, **costs, "seeds": len(self.curves)}
        return {**found, **summary, **marks}

    def markdown(self) -> str:
        """The table, in the form of the paper's Table 6."""
        curve, symbols = self.curve, {"sweet spot": "★", "collapse boundary": "▲"}
        lines = [f"| K | {curve.title} | retention | active parameters | tokens/s | peak memory, MiB | |"]
        lines.append("|---" * 7 + "|")
        columns = (self.budgets, self.figures(), curve.retention, self.active_parameters, curve.speeds, self.peak_bytes)
        for K, figure, kept, active, speed, peak in zip(*columns):
            marks = " ".join(f"{symbols[mark]} {mark}" for mark, at in curve.marks.items() if at == K)
            share = f"{active:,} ({active / self.active_parameters[-1]:.0%})"
            lines.append(f"| {K} | {figure} | {kept:.1%} | {share} | {speed:,.0f} | {peak / 2**20:.1f} | {marks} |")
        return "\n".join(lines) + "\n"


def open_text(
    paths: Sequence[str],
    encoder: Encoder,
    block_size: int,
    max_blocks: int,
    batch_size: int = 8,
    column: str = "text",
) -> HeldOut:
    """Held-out blocks of local files. Raises ValueError if they cannot be read."""
    blocks, density = read_blocks(list(paths), encoder, block_size, max_blocks, column)
    return hold_out_blocks(blocks, encoder.special_ids, density, batch_size, describe_files(paths))


def open_task(name: str, data_dir: str | None, scale: str, model: str, batch_size: int | None = None) -> HeldOut:
    """The held-out data of a task that `essm-list-tasks` names, as its script reads it.

    Args:
        model: reads text by its tokenizer and numbers as its features.json says.
        batch_size: blocks or samples per forward pass; by default 8 blocks, or what the task evaluates by.
    Raises:
        ValueError: unknown task or scale, or data that cannot be read. FileNotFoundError: absent data.
    """
    spec, args = get_task(name), make_arguments(name, data_dir, scale)
    title = f"{spec.title} ({scale} scale)"
    if spec.script == "train_clm":
        encoder = encoder_beside(model)
        blocks, density = text.load_held_out(args, encoder)
        return hold_out_blocks(blocks, encoder.special_ids, density, batch_size or 8, title)
    collate: Any
    if spec.script == "train_retrieval":
        split, collate = retrieval.load_held_out(args), retrieval.collate
    else:
        # Its features.json and tokenizer count, not the task's.
        args.model_name_or_path, args.feature_scale, args.tokenizer_name = model, "auto", None
        record = record_of(model)
        for name in ("max_length", "frame_length"):
            setattr(args, name, record.get(name, getattr(args, name)))
        if args.text_column and file_of(model, "tokenizer_config.json"):
            longest = open_tokenizer(model).model_max_length
            args.max_length = min(args.max_length or longest, longest)
        split, collate = classification.load_held_out(args, _classes(model), record)
    return hold_out_samples(split, collate, batch_size or args.eval_batch_size, title)


def _classes(model: str) -> list[str]:
    """Names of a saved model's classes, in its order."""
    return class_names(PreTrainedConfig.from_dict(PreTrainedConfig.get_config_dict(model)[0]))


def load_for(held_out: HeldOut, folder: str, trust_remote_code: bool = False) -> PreTrainedModel:
    """A saved model, in evaluation mode.

    Raises:
        ValueError: it is of another task, or reads less than the data's longest sequence; or needs its own code without
            `trust_remote_code`.
    """
    options = {"trust_remote_code": trust_remote_code, "output_loading_info": True}
    model, found = load_model(held_out.auto_class, folder, **options)
    if found["missing_keys"]:
        raise ValueError(f"{folder} is not a model of this task: it lacks {', '.join(sorted(found['missing_keys']))}")
    made_as, config = model.config.architectures, model.config
    if made_as and type(model).__name__ not in made_as:
        raise ValueError(f"{folder} is not a model of this task: it is {', '.join(made_as)}")
    if held_out.length > (longest := getattr(config, "filter_length", held_out.length)):
        raise ValueError(
            f"{folder} reads up to filter_length = {longest} positions, got {held_out.length} of "
            f"{held_out.description}: name another scale, or a block_size"
        )
    return model.eval()


def _check_alike(configs: Mapping[str, PreTrainedConfig]) -> None:
    """Saved models must be seeds of one experiment: the data is read as the first of them says."""
    expected: dict[str, Any] = {}
    for folder, config in configs.items():
        tokenizer = file_of(folder, "tokenizer.json")
        found = {
            "capacity": getattr(config, "num_spectral_channels", 1),
            "trained_budgets": getattr(config, "trained_budgets", None),  # of which the smallest one is measured
            "number of classes": config.num_labels,
            "classes": _classes(folder),
            "features.json": record_of(folder),
            "tokenizer.json of SHA-256": tokenizer and sha256_of(Path(tokenizer)),
        }
        for name, value in found.items():
            if value != expected.setdefault(name, value):
                raise ValueError(f"{folder} has the {name} {value}, and {next(iter(configs))} {expected[name]}")


def evaluate_models(
    folders: Sequence[str], held_out: HeldOut, budgets: Sequence[int] | None = None, trust_remote_code: bool = False
) -> Evaluation:
    """Sweep every model; memory and active parameters of the first.

    Raises:
        ValueError: models of different capacity or classes, or that read data in different ways, one named twice, and
            as `load_for`.
    """
    if len({os.path.realpath(folder) for folder in folders}) < len(folders):
        raise ValueError(f"models must be different ones, got {list(folders)}")
    if len(folders) > 1:  # all of them, before the first sweep
        _check_alike({folder: load_for(held_out, folder, trust_remote_code).config for folder in folders})
    sweeps: list[BudgetCurve] = []
    peaks, active = [], []
    for folder in folders:
        model = load_for(held_out, folder, trust_remote_code).to(working_device())
        capacity = capacity_of(model)
        wanted = budgets_to_measure(model, budgets)
        batch = {name: value.to(model.device) for name, value in held_out.inputs.items()}
        for K in wanted if not sweeps else ():
            with torch.no_grad():
                call = functools.partial(run_at_budget, model, batch, K)
                call()  # constants made once do not count
                peaks.append(peak_memory(call, model.device))
            if hasattr(model, "num_active_parameters"):
                active.append(model.num_active_parameters(K))
            else:  # a nested Mamba-2 is cut
                active.append((model.truncate(K) if capacity > 1 else model).num_parameters())
        sweeps.append(sweep_budgets(model, held_out, wanted))
    return Evaluation(tuple(sweeps), tuple(peaks), tuple(active))
