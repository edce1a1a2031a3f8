# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Do per-layer budgets beat one budget for all layers, of the same total, on trained models?

    python -m benchmarks.budget_allocation --models runs/a/model runs/b/model --text_files c.txt --calibration_files d
    python -m benchmarks.budget_allocation --models runs/seed*/model --task smnist --data_dir data --scale small

Several models are seeds of one experiment. Totals are --averages times the number of layers. For each, held-out quality
(bits per byte, or accuracy on the test split) of: the uniform budget; the lists of every method of
modeling_essm/budgets/allocation.py; --random lists drawn uniformly from all legal ones. Lists are chosen on calibration
data that is never evaluated on: --calibration_files, or the first samples of a task's training data. The evaluation
data of a task is what train/evaluate_model.py reads; --evaluation_size takes that many blocks or samples, evenly.

gain is the improvement over uniform within a model, positive where better in either metric, with the standard deviation
(n - 1) over models; beaten is the part of the random lists that are worse.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedModel

from modeling_essm.budgets.allocation import allocate_spectral_budget, even_budgets
from modeling_essm.channels import spectral_mixers

from . import common

METHODS = {  # name: method, with calibration
    "loss": ("loss", True),
    "distortion": ("distortion", True),
    "aire": ("aire", True),
    "aire, no data": ("aire", False),
}


@dataclass(frozen=True)
class Data:
    """What lists are chosen on and judged by.

    Attributes:
        calibration: batches with labels. quality: (model, list) to the metric on held-out data.
        auto: class that loads the models. description: for people.
    """

    calibration: list[dict[str, Tensor]]
    quality: Callable[[PreTrainedModel, list[int]], float]
    auto: Any
    metric: str
    higher_is_better: bool
    description: str


def language_data(held_out: Tensor, calibration: Tensor, batch_size: int, description: str) -> Data:
    """Blocks of byte ids (n, L) to evaluate and to calibrate on."""
    from essm_train.data.blocks import text_labels
    from essm_train.measure.scoring import num_scored, total_nats

    labels = text_labels(held_out)

    def bits_per_byte(model: PreTrainedModel, budgets: list[int]) -> float:
        nats = total_nats(model, held_out, labels, budgets, batch_size)  # type: ignore[arg-type]
        return nats / math.log(2) / num_scored(labels)

    batches = [{"input_ids": ids, "labels": text_labels(ids)} for ids in calibration.split(batch_size)]
    description += (
        f"; {len(calibration)} blocks to calibrate on, {len(held_out)} held out, of {held_out.shape[1]} bytes"
    )
    return Data(batches, bits_per_byte, AutoModelForCausalLM, "bits_per_byte", False, description)


def open_text(args: argparse.Namespace) -> Data:
    """Local files as bytes. Raises ValueError if a file is there to calibrate on and to be evaluated on."""
    from essm_train.data.blocks import evaluation_blocks, to_stream
    from essm_train.data.documents import read_files
    from essm_train.data.tokens import ByteEncoder

    if not args.calibration_files:
        raise ValueError("--text_files need --calibration_files: lists are not chosen on the data that judges them")
    digests = [
        {hashlib.sha256(Path(path).read_bytes()).hexdigest() for path in paths}
        for paths in (args.text_files, args.calibration_files)
    ]
    if digests[0] & digests[1]:
        raise ValueError("--calibration_files and --text_files must not share a file: lists would know their judge")
    held_out, calibration = (
        evaluation_blocks(to_stream(read_files(paths), ByteEncoder())[0], args.block_size, size)
        for paths, size in (
            (args.text_files, args.evaluation_size or 64),
            (args.calibration_files, args.calibration_size),
        )
    )
    return language_data(held_out, calibration, args.batch_size, ", ".join(Path(p).name for p in args.text_files))


def open_task(args: argparse.Namespace) -> Data:
    """A task that train/list_tasks.py names, as train/evaluate_model.py reads it, calibrated on its training data."""
    from essm_train.tasks.catalog import get_task, make_arguments

    arguments = make_arguments(args.task, args.data_dir, args.scale)
    spec = get_task(args.task)
    if spec.script == "train_clm":
        from essm_train.data.text import load_text
        from essm_train.data.tokens import ByteEncoder

        text = load_text(arguments, ByteEncoder())
        blocks = text.source.load(text.source.draw(args.calibration_size))
        calibration = torch.from_numpy(np.stack(blocks).astype(np.int64))
        held_out = text.held_out[spread_over(len(text.held_out), args.evaluation_size)]
        return language_data(held_out, calibration, args.batch_size, spec.title)
    if spec.script == "train_classification":
        return classification_data(arguments, args, spec.title)
    raise ValueError(f"task {args.task!r} must be a language or classification task, not one of {spec.script}.py")


def classification_data(arguments: Any, args: argparse.Namespace, title: str) -> Data:
    """The test split (or the validation split where there is none), and training samples to calibrate on."""
    from essm_train.data.classification import load_classification
    from essm_train.data.rows import collate
    from essm_train.models import run_at_budget

    data = load_classification(arguments)
    split = data.test or data.validation
    rows = spread_over(len(split.samples), args.evaluation_size)
    samples = [split.samples[int(row)] for row in rows]

    def batches_of(samples: Sequence[Any]) -> Iterator[dict[str, Tensor]]:
        for start in range(0, len(samples), args.batch_size):
            yield collate(data.reader, samples[start : start + args.batch_size])

    @torch.no_grad()
    def accuracy(model: PreTrainedModel, budgets: list[int]) -> float:
        right = 0
        for batch in batches_of(samples):
            labels = batch.pop("labels")
            inputs = {name: value.to(model.device) for name, value in batch.items()}
            logits = run_at_budget(model, inputs, budgets).logits  # type: ignore[arg-type]
            right += int((logits.argmax(-1).cpu() == labels).sum())
        return right / len(samples)

    drawn = data.source.load(data.source.draw(args.calibration_size))
    description = f"{title}; {len(drawn)} training samples to calibrate on, {len(rows)} of {split.name} held out"
    return Data([*batches_of(drawn)], accuracy, AutoModelForSequenceClassification, "accuracy", True, description)


def spread_over(count: int, wanted: int | None) -> Tensor:
    """At most `wanted` indices, evenly spread; all of them for None."""
    return torch.from_numpy(np.linspace(0, count - 1, min(count, wanted or count)).round().astype(np.int64))


def random_lists(count: int, total: int, capacities: Sequence[int], min_budget: int, seed: int) -> list[list[int]]:
    """Lists with that total, each legal one equally likely, drawn with replacement."""
    spare = total - min_budget * len(capacities)
    ways = [[1] + [0] * spare]  # ways[0][s]: how many lists of the layers so far, from the last on, spend s
    for capacity in reversed(capacities):
        ways.insert(
            0, [sum(ways[0][s - x] for x in range(min(s, capacity - min_budget) + 1)) for s in range(spare + 1)]
        )
    rng, lists = random.Random(seed), []
    for _ in range(count):
        left, budgets = spare, []
        for layer, capacity in enumerate(capacities):
            extra = range(min(left, capacity - min_budget) + 1)
            (x,) = rng.choices(extra, [ways[layer + 1][left - x] for x in extra])
            budgets.append(min_budget + x)
            left -= x
        lists.append(budgets)
    return lists


def measure(model: PreTrainedModel, data: Data, averages: Sequence[int], args: argparse.Namespace) -> dict[str, Any]:
    """Quality at full budget, and at every average of the uniform list, of each method's and of random ones."""
    capacities = [len(mixer.channel_mixing) for mixer in spectral_mixers(model)]
    known: dict[tuple[int, ...], float] = {}

    def quality(budgets: list[int]) -> float:
        if tuple(budgets) not in known:
            known[tuple(budgets)] = data.quality(model, budgets)
        return known[tuple(budgets)]

    found: dict[str, Any] = {"full": quality(capacities), "averages": {}}
    for average in averages:
        total = average * len(capacities)
        uniform = even_budgets(total, capacities, args.min_budget)
        rows: dict[str, Any] = {"uniform": {"list": uniform, "quality": quality(uniform)}}
        for name, (method, calibrated) in METHODS.items():
            start = time.perf_counter()
            calibration = data.calibration if calibrated else None
            budgets = allocate_spectral_budget(model, total, method, calibration, args.min_budget)
            seconds = time.perf_counter() - start
            rows[name] = {"list": budgets, "quality": quality(budgets), "seconds": seconds}
        lists = random_lists(args.random, total, capacities, args.min_budget, args.seed)
        rows["random"] = {"lists": lists, "qualities": [quality(budgets) for budgets in lists]}
        found["averages"][average] = rows
    return found


def summarise(measured: Sequence[dict[str, Any]], average: int, sign: int) -> list[dict[str, Any]]:
    """One row per method and average over all models; sign is 1 where higher is better, else -1."""
    rows = []
    for name in ("uniform", *METHODS, "random"):
        qualities, gains, beaten = [], [], []
        for model in measured:
            found = model["averages"][average]
            others = found["random"]["qualities"]
            value = statistics.fmean(others) if name == "random" else found[name]["quality"]
            qualities.append(value)
            gains.append(sign * (value - found["uniform"]["quality"]))
            beaten.append(statistics.fmean(sign * (value - other) > 0 for other in others))
        row: dict[str, Any] = {"average": average, "method": name, "quality": _mean_and_deviation(qualities)}
        row |= {"gain": _mean_and_deviation(gains), "beaten": statistics.fmean(beaten)}
        if name in METHODS:
            row["seconds"] = common.spread([model["averages"][average][name]["seconds"] for model in measured])
        rows.append(row)
    return rows


def _mean_and_deviation(values: Sequence[float]) -> dict[str, float]:
    return {"mean": statistics.fmean(values), "deviation": statistics.stdev(values) if len(values) > 1 else 0.0}


def show(measured: Sequence[dict[str, Any]], rows: Sequence[dict[str, Any]]) -> None:
    """Print the rows of one average, with the list of the first model."""
    cells = []
    for row in rows:
        first = measured[0]["averages"][row["average"]].get(row["method"], {}).get("list", "-")
        quality, gain = ("{mean:.4f}±{deviation:.4f}".format(**row[key]) for key in ("quality", "gain"))
        seconds = f"{row['seconds']['median']:.1f}" if "seconds" in row else "-"
        cells.append([row["average"], row["method"], quality, gain, f"{row['beaten']:.0%}", seconds, first])
    common.table("average method quality gain beaten seconds list_of_the_first_model", cells)
    print(flush=True)


def draw(report: dict[str, Any]) -> Figure:
    """Quality over the average budget: one line per method with deviations, random lists as dots."""
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for i, name in enumerate(("uniform", *METHODS)):
        rows = [row for row in report["results"] if row["method"] == name]
        means, deviations = ([row["quality"][key] for row in rows] for key in ("mean", "deviation"))
        x = [row["average"] * 1.01 ** (i - 2) for row in rows]  # side by side
        style = "o--" if name == "uniform" else "o-"
        axes.errorbar(x, means, deviations, fmt=style, markersize=4, capsize=2, label=name, color=f"C{i}")
    dots = [
        (int(average), value)
        for model in report["models"]
        for average, found in model["averages"].items()
        for value in found["random"]["qualities"]
    ]
    axes.scatter(*zip(*dots), s=6, color="gray", alpha=0.4, zorder=1, label="random lists")
    averages = report["settings"]["averages"]
    axes.set_xscale("log", base=2)
    axes.set_xticks(averages, [str(average) for average in averages])
    axes.set_xlabel("spectral budget K, mean over layers")
    axes.set_ylabel(report["metric"].replace("_", " "))
    axes.set_title("The same total, distributed over the layers", fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend()
    return figure


def main(argv: list[str] | None = None) -> dict[str, Any]:
    from essm_train.models import TRUST_HELP, load_model

    p = common.parser(__doc__)
    p.add_argument("--models", nargs="+", required=True, help="saved folders, seeds of one experiment")
    p.add_argument("--text_files", nargs="+", help="held-out text, read as bytes")
    p.add_argument("--calibration_files", nargs="+", help="other text to choose lists on")
    p.add_argument("--task", help="instead of files: a task that train/list_tasks.py names")
    p.add_argument("--data_dir", default="data", help="folder of the tasks' data")
    p.add_argument("--scale", default="full", help="'full', 'medium' or 'small', as the models were trained")
    p.add_argument("--averages", type=int, nargs="+", default=[3, 4, 6, 8], help="totals over the number of layers")
    p.add_argument("--random", type=int, default=20, help="random lists for each total")
    p.add_argument("--min_budget", type=int, default=2, help="least budget of any layer")
    p.add_argument("--block_size", type=int, default=512, help="bytes in a block of text files")
    p.add_argument("--batch_size", type=int, default=8, help="blocks or samples per forward pass")
    p.add_argument("--calibration_size", type=int, default=64, help="blocks or samples to choose lists on")
    p.add_argument(
        "--evaluation_size", type=int, help="blocks or samples to judge by; 64 blocks of files, all of a task"
    )
    p.add_argument("--seed", type=int, default=0, help="of the random lists")
    p.add_argument("--trust_remote_code", action="store_true", help=TRUST_HELP)
    args = p.parse_args(argv)
    if bool(args.text_files) == bool(args.task):
        p.error("give --text_files or --task")
    if args.quick:
        args.averages, args.random = args.averages[:2], min(args.random, 3)
        args.calibration_size, args.evaluation_size = 4, 8
    names = "averages random min_budget batch_size calibration_size evaluation_size seed"
    settings = {name: getattr(args, name) for name in names.split()}
    device, report = common.start("budget_allocation", args, task=args.task, scale=args.scale, **settings)
    data = open_text(args) if args.text_files else open_task(args)
    report |= {"data": data.description, "metric": data.metric, "models": []}
    print(f"data: {data.description}\n", flush=True)
    for folder in args.models:
        model = load_model(data.auto, folder, trust_remote_code=args.trust_remote_code).to(device).eval()
        name = "/".join(Path(folder).parts[-3:])
        report["models"].append({"model": name, **measure(model, data, args.averages, args)})
        print(f"{name}: {data.metric} {report['models'][-1]['full']:.4f} at full budget", flush=True)
    sign = 1 if data.higher_is_better else -1
    report["results"] = []
    for average in args.averages:
        rows = summarise(report["models"], average, sign)
        show(report["models"], rows)
        report["results"] += rows
    by_name = {(row["average"], row["method"]): row["gain"]["mean"] for row in report["results"]}
    over_random = min(by_name[average, "loss"] - by_name[average, "random"] for average in args.averages)
    report["targets"] = [
        common.target("gain of 'loss' over uniform, least", min(by_name[a, "loss"] for a in args.averages), least=0.0),
        common.target("gain of 'loss' over the mean of random lists, least", over_random, least=0.0),
    ]
    kind = "cpu" if device.type == "cpu" else report["machine"]["gpu"].lower().replace(" ", "-")
    quick = "-quick" * args.quick
    args.out = args.out or common.RESULTS / f"budget_allocation-{args.task or 'text'}-{kind}{quick}.json"
    common.finish(report, args, device)
    draw(report).savefig(args.out.with_suffix(".png"), dpi=150)
    return report


if __name__ == "__main__":
    main()
