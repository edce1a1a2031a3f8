# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""How much of a trained diagonal SSM can go, by which ranking: AIRE-Prune, LAST and baselines at every ratio.

    python -m benchmarks.state_pruning --data_dir data --processes 2
    python -m benchmarks.state_pruning --tasks digits --only s5 --seeds 0 --updates 300
    python -m benchmarks.state_pruning --table --runs_dir runs/state_pruning

A run trains a model of more modes than its task needs, then prunes it by every method at every ratio, without training
in between, and measures the error on the same test samples. Tasks: MNIST averaged to 14 x 14 and read pixel by pixel,
the words of the first 512 bytes of IMDb reviews, and four spoken words. A method is a value of a mode (energy,
H-infinity, magnitude) and a scope: uniform ranks within each layer, global over all, and prefix relative to the better
modes of the layer, which makes AIRE-Prune of the energy, LAST of the H-infinity norm and LAMP of the magnitude; beside
them energies with the conjugates, random choice, and balanced truncation to the same number of modes in each layer.
Reported of each: the largest ratio up to which no ratio loses more than a point, paired with the whole model seed by
seed; the area under accuracy over ratio; the steepest fall between two ratios; how far energies of modes add up to the
energy of what is pruned; and every bound of `certificate` over the gain of what is pruned, on a dense grid. One JSON
file a run; a sweep that was killed goes on when it is started again.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
import json
import re
import statistics
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor, nn

from . import classification_tasks, common, sweep_tables, sweeps
from .classification_tasks import TEST_BATCH
from .sweeps import Run

RATIOS = tuple(round(0.05 * i, 2) for i in range(20))
LOOKED_AT = (0.2, 0.5, 0.8)  # where energies and certificates are compared with what they speak of
METRIC = "error"
RATE = 4e-3
POINT = 0.01
# Name: method of `importance`, scope of `allocate`; None truncates by balancing.
METHODS: dict[str, tuple[str | None, str]] = {
    "aire": ("aire", "global"),
    "aire_exact": ("aire_exact", "global"),
    "last": ("last", "global"),
    "lamp": ("lamp", "global"),
    "global energy": ("energy", "global"),
    "global hinf": ("hinf", "global"),
    "global magnitude": ("magnitude", "global"),
    "uniform energy": ("energy", "uniform"),
    "uniform hinf": ("hinf", "uniform"),
    "uniform magnitude": ("magnitude", "uniform"),
    "random": ("random", "uniform"),
    "balanced": (None, "uniform"),
}
PROFILED = {"aire": "-", "last": "--"}  # whose modes by layer are drawn
MODELS: dict[str, dict[str, Any]] = {
    "s5": {"parameterization": "s5", "state_size": 64, "bidirectional": True},
    "s4d": {"parameterization": "s4d", "state_size": 32, "bidirectional": True},
}


@dataclass(frozen=True)
class Task:
    """A task of `classification_tasks`, with images averaged over squares of `pool` pixels a side, and texts read as
    words that are hashed into `words` ids instead of byte by byte: a small model learns nothing from bytes so soon."""

    name: str
    pool: int = 1
    words: int = 0


TASKS = {"digits": Task("smnist", 2), "reviews": Task("text:max_length=512", words=4096), "words": Task("speech4")}


CHOICE = {"aire": "AIRE", "last": "LAST", "balanced": "balanced truncation", "random": "random"}


@dataclass(frozen=True)
class Settings:
    """What all runs of a table have in common."""

    data_dir: str | None
    updates: int
    hidden_size: int = 32
    num_hidden_layers: int = 2
    test_samples: int = 600
    quick: bool = False
    device: str = "cpu"

    def data(self) -> classification_tasks.Settings:
        return classification_tasks.Settings(
            self.data_dir, 0, self.updates, self.test_samples, quick=self.quick, device=self.device
        )

    def values(self) -> dict[str, Any]:
        """As JSON gives them back; in which folder the data lies is not part of them."""
        return {k: v for k, v in json.loads(json.dumps(dataclasses.asdict(self))).items() if k != "data_dir"}


# ---------------------------------------------------------------------------------------------------------------------
# One run.


def batch_of(reader: Any, samples: Sequence[Any], task: Task, device: Any) -> dict[str, Tensor]:
    """Inputs and labels; of pooled images a row of pixels is a sequence (B, (side / pool)^2, 1)."""
    from essm_train.data.rows import collate

    batch, pool = collate(reader, list(samples)), task.pool
    if task.words:
        rows = [word_ids(sample.values, task.words) for sample in samples]
        ids = nn.utils.rnn.pad_sequence(rows, batch_first=True)  # with 0, which is no word
        batch = {"labels": batch["labels"], "input_ids": ids, "attention_mask": (ids > 0).long()}
    elif pool > 1 and (side := round(batch["input_features"].shape[1] ** 0.5)) % pool == 0:
        pixels = batch["input_features"].transpose(1, 2).unflatten(2, (side, side))
        batch = {"labels": batch["labels"], "input_features": F.avg_pool2d(pixels, pool).flatten(2).transpose(1, 2)}
    return {name: value.to(device) for name, value in batch.items()}


def word_ids(text: Any, count: int) -> Tensor:
    """Ids in [1, count) of the words of a text that is given as its bytes, the same in every process; at least one."""
    words = re.findall(rb"[a-z']+", bytes(byte for byte in text if byte < 256).lower()) or [b""]
    return torch.tensor([1 + zlib.crc32(word) % (count - 1) for word in words])


def model_fields(task: Task, settings: Any, data: Any) -> dict[str, Any]:
    """Of the configuration of a classifier of that task."""
    fields = {"num_labels": data.num_labels, "problem_type": "single_label_classification", **data.reader.config_fields}
    fields |= {"hidden_size": settings.hidden_size, "num_hidden_layers": settings.num_hidden_layers}
    return fields | ({"vocab_size": task.words, "pad_token_id": 0} if task.words else {})


def make_model(name: str, task: Task, settings: Settings, data: Any) -> nn.Module:
    from modeling_essm.companions import DiagonalSSMConfig, DiagonalSSMForSequenceClassification

    config = DiagonalSSMConfig(**model_fields(task, settings, data) | MODELS[name])
    return DiagonalSSMForSequenceClassification(config).float()


@torch.inference_mode()
def score(model: nn.Module, batches: Sequence[dict[str, Tensor]]) -> float:
    """The share of samples that are put into a wrong class."""
    model.eval()
    wrong = count = 0
    for batch in batches:
        inputs = {name: value for name, value in batch.items() if name != "labels"}
        wrong += int((model(**inputs).logits.argmax(-1) != batch["labels"]).sum())
        count += len(batch["labels"])
    return wrong / count


def sizes_at(ratio: float, modes: Sequence[int]) -> list[int]:
    """Modes that each layer keeps when all lose the same share, at least one."""
    return [max(1, n - round(ratio * n)) for n in modes]


def pruned(model: nn.Module, method: str, ratio: float, seed: int) -> tuple[nn.Module, list[int]]:
    """A smaller copy of a model, and the modes that each layer has left."""
    from modeling_essm.companions import allocate, balanced_truncate, elastic_layers, importance, prune, remove

    value, scope = METHODS[method]
    smaller = copy.deepcopy(model)
    if value is None:
        modes = [layer.read().lam.shape[-1] for layer in elastic_layers(model)]
        report = balanced_truncate(smaller, sizes=sizes_at(ratio, modes))
        return smaller, [layer.after for layer in report.layers]
    plan = allocate(importance(model, value, seed=seed), amount=ratio, scope=scope)
    prune(smaller, plan)
    remove(smaller)  # as masks, but faster
    return smaller, plan.kept


def additivity(model: nn.Module, ratio: float) -> list[float]:
    """Of each layer, the energy of the modes that AIRE prunes over the sum of their energies.

    The energy of a set is that of its complex impulse response, cross terms between modes included, of one direction.
    """
    from modeling_essm.companions import allocate, importance
    from modeling_essm.companions.pruning.mode_values import energy
    from modeling_essm.companions.systems import DiagonalSystem
    from modeling_essm.companions.truncation.gramians import gramians, matrices

    found = []
    for layer in allocate(importance(model, "aire"), amount=ratio).layers:
        system = layer.system
        assert system is not None
        gone = ~layer.keep
        if not gone.any():
            continue
        B = torch.where(gone if system.siso else gone[:, None], system.B, 0.0)
        part = DiagonalSystem(system.lam, B, system.C[0] if system.bidirectional else system.C, "complex")
        (P, _), (_, _, C) = gramians(part), matrices(part)
        together = float((C @ P @ C.mH).diagonal(dim1=-2, dim2=-1).sum().real)
        found.append(together / float(energy(part).sum()))
    return found


def certificates(model: nn.Module, ratio: float) -> list[dict[str, float]]:
    """Of each layer, the bounds on the gain of what AIRE prunes, and that gain as "measured"."""
    from modeling_essm.companions import allocate, hinf_norm, importance

    plan = allocate(importance(model, "aire"), amount=ratio)
    found = []
    for layer, bounds in zip(plan.layers, plan.certificate()):
        assert layer.system is not None
        if not layer.keep.all():
            found.append(bounds | {"measured": hinf_norm(layer.system, ~layer.keep)})
    return found


def perform(settings: Settings, run: Run, path: Path) -> dict[str, Any]:
    """Train on one thread, prune, measure, write the file in one move, return what it holds."""
    from essm_train.data.samples import MapSamples
    from essm_train.files import write_json
    from essm_train.models import run_at_budget

    task = TASKS[run.task or ""]
    data, test, identity = classification_tasks.load(settings.data(), task.name)
    args = settings.data().arguments(task.name, rate=run.rate, seed=run.seed)
    device = torch.device(settings.device)
    with common.threads(1):
        torch.manual_seed(run.seed)
        model = make_model(run.name, task, settings, data).to(device)
        source, size = MapSamples(data.source.samples, run.seed), args.per_device_train_batch_size

        def next_forward() -> Any:
            batch = batch_of(data.reader, source.load(source.draw(size)), task, device)
            return functools.partial(run_at_budget, model, batch)

        record: dict[str, Any] = {"task": run.task, "model": run.name, "rate": run.rate, "seed": run.seed}
        record |= {"settings": settings.values(), "definition": definition(run, identity), "metric": "accuracy"}
        record |= {"parameters": sum(p.numel() for p in model.parameters())}
        record |= sweeps.train(model, next_forward, args, size, "samples")
        starts = range(0, len(test), TEST_BATCH)
        batches = [batch_of(data.reader, test[i : i + TEST_BATCH], task, device) for i in starts]
        started = time.process_time()
        record[METRIC] = None if record["diverged"] else {"1": score(model, batches)}
        record["pruned"] = {}
        ratios = RATIOS[:: 9 if settings.quick else 1]
        for method in METHODS if not record["diverged"] else ():
            errors, kept = [], []
            for ratio in ratios:
                smaller, modes = pruned(model, method, ratio, run.seed)
                errors.append(score(smaller, batches))
                kept.append(modes)
            record["pruned"][method] = {"ratios": ratios, "errors": errors, "kept": kept}
        looked_at = () if record["diverged"] else LOOKED_AT
        record["additivity"] = {str(ratio): additivity(model, ratio) for ratio in looked_at}
        record["certificates"] = {str(ratio): certificates(model, ratio) for ratio in looked_at}
        record["scoring_cpu_seconds"] = time.process_time() - started
        record["machine"] = common.machine(device)
    write_json(path, record)
    return record


def definition(run: Run, identity: dict[str, Any]) -> dict[str, Any]:
    task = dataclasses.asdict(TASKS[run.task or ""])
    return json.loads(json.dumps({"task": task | identity, "model": MODELS[run.name]}))


# ---------------------------------------------------------------------------------------------------------------------
# All runs.


def largest_within(errors: Sequence[float], ratios: Sequence[float], most: float = POINT) -> float:
    """The largest ratio up to which none loses more than so much against the first, the whole model."""
    lost = [error - errors[0] > most + 1e-9 for error in errors]
    return ratios[lost.index(True) - 1] if True in lost else ratios[-1]


def area_of(curve: dict[str, Any]) -> float:
    """Mean accuracy over the ratios."""
    ratios = curve["ratios"]
    return float(np.trapezoid([1 - e for e in curve["errors"]], ratios)) / (ratios[-1] - ratios[0])


def summarise(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Every method on every task and model: means and deviations over seeds."""
    results = []
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for record in records:
        groups.setdefault((record["task"], record["model"]), []).append(record)
    for (task, model), runs in groups.items():
        whole = [r for r in runs if not r["diverged"]]
        reference = [area_of(r["pruned"]["aire"]) for r in whole]
        for method in METHODS if whole else ():
            curves = [r["pruned"][method] for r in whole]
            ratios = curves[0]["ratios"]
            accuracies = [[1 - e for e in curve["errors"]] for curve in curves]
            area = [area_of(curve) for curve in curves]
            fall = [max(a - b for a, b in itertools.pairwise(values)) for values in accuracies]
            results.append(
                {
                    "task": task,
                    "model": model,
                    "method": method,
                    "seeds": [r["seed"] for r in whole],
                    "accuracy": sweep_tables.mean([1 - r[METRIC]["1"] for r in whole]),
                    "largest_within_a_point": sweep_tables.mean(
                        [largest_within(curve["errors"], ratios) for curve in curves]
                    ),
                    "area": sweep_tables.mean(area),
                    "area_minus_aire": sweep_tables.mean([a - b for a, b in zip(area, reference)]),
                    "steepest_fall": sweep_tables.mean(fall),
                    "ratios": ratios,
                    "curve": [sweep_tables.mean([values[i] for values in accuracies]) for i in range(len(ratios))],
                    "lost": [
                        sweep_tables.mean([values[0] - values[i] for values in accuracies]) for i in range(len(ratios))
                    ],
                    "kept_by_layer": [
                        [statistics.fmean(curve["kept"][i][layer] for curve in curves) for layer in range(len(kept))]
                        for i, kept in enumerate(curves[0]["kept"])
                    ],
                    "additivity": {
                        ratio: [x for r in whole for x in r["additivity"][ratio]] for ratio in whole[0]["additivity"]
                    },
                }
            )
    return results


def tightness(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Bounds over measured gains, over layers, seeds and ratios: least, median and largest, by task and model."""
    groups: dict[tuple[str, str], list[dict[str, float]]] = {}
    for record in records:
        found = [layer for layers in record["certificates"].values() for layer in layers]
        groups.setdefault((record["task"], record["model"]), []).extend(found)
    rows = []
    for (task, model), found in groups.items():
        for bound in (name for name in found[0] if name != "measured") if found else ():
            over = sorted(layer[bound] / layer["measured"] for layer in found)
            rows.append({"task": task, "model": model, "bound": bound, "layers": len(over)})
            rows[-1] |= {"least": over[0], "median": statistics.median(over), "largest": over[-1]}
    return rows


def print_tables(results: list[dict[str, Any]]) -> None:
    """A table for each task and model, the largest area first."""
    for task, model in dict.fromkeys((r["task"], r["model"]) for r in results):
        rows = sorted(
            (r for r in results if (r["task"], r["model"]) == (task, model)), key=lambda r: -r["area"]["mean"]
        )
        first = rows[0]
        print(f"\n{task}, {model}: accuracy {sweep_tables.shown(first['accuracy'])}, {len(first['seeds'])} seeds")
        names, signs = ("area", "area_minus_aire", "largest_within_a_point", "steepest_fall"), ("", "+", "", "")
        common.table(
            f"method {' '.join(names)}",
            [[r["method"], *(sweep_tables.shown(r[name], sign) for name, sign in zip(names, signs))] for r in rows],
        )


def draw(results: list[dict[str, Any]]) -> Figure:
    """Over the share that is pruned, for each task and model: accuracy above, modes kept by layer below."""
    panels = list(dict.fromkeys((r["task"], r["model"]) for r in results))
    figure = Figure(figsize=(3.6 * len(panels), 7), layout="constrained")
    styles = {"global": "-", "uniform": "--"}
    grid, profiles = figure.subplots(2, len(panels), squeeze=False, height_ratios=(5, 3))
    for axes, below, panel in zip(grid, profiles, panels):
        for i, result in enumerate(r for r in results if (r["task"], r["model"]) == panel):
            value, scope = METHODS[result["method"]]
            style = ":" if value in (None, "random") else styles[scope]
            mean = [point["mean"] for point in result["curve"]]
            wide = {"linewidth": 2.2 if result["method"] in ("aire", "last", "balanced") else 1.1}
            axes.plot(result["ratios"], mean, style, color=f"C{i % 10}", label=result["method"], **wide)
        for name, style in PROFILED.items():
            result = next(r for r in results if (r["task"], r["model"], r["method"]) == (*panel, name))
            for layer, kept in enumerate(zip(*result["kept_by_layer"])):
                below.plot(result["ratios"], kept, style, color=f"C{layer}", label=f"{name}, layer {layer}")
        axes.set_title(", ".join(panel))
        axes.set_ylabel("accuracy")
        axes.set_ylim(0, 1)
        below.set_ylabel("modes kept")
        below.set_ylim(bottom=0)
        below.set_xlabel("share of modes pruned")
        below.legend(fontsize=8)
        for each in (axes, below):
            each.grid(alpha=0.3)
    handles, labels = grid[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=6, fontsize=8)
    return figure


def draw_choice(results: list[dict[str, Any]]) -> Figure:
    """What to use when: accuracy that AIRE, LAST and balanced truncation lose with as many modes left in all.

    The band is a deviation over seeds.
    """
    panels = list(dict.fromkeys((r["task"], r["model"]) for r in results))
    figure = Figure(figsize=(4 * len(panels) / 2, 6.5), layout="constrained")
    grid = figure.subplots(2, -(-len(panels) // 2), squeeze=False)
    for axes, panel in zip(grid.T.flat, panels):
        for color, (method, label) in zip(("C0", "C3", "C2", "0.6"), CHOICE.items()):
            result = next(r for r in results if (r["task"], r["model"], r["method"]) == (*panel, method))
            lost, wide = (100 * np.array([x[name] for x in result["lost"]]) for name in ("mean", "deviation"))
            axes.plot(result["ratios"], lost, color=color, label=label)
            axes.fill_between(result["ratios"], lost - wide, lost + wide, color=color, alpha=0.12, linewidth=0)
        axes.axhline(1, color="black", linewidth=0.8, linestyle=":")
        axes.set(title=", ".join(panel), xlabel="share of modes removed", ylabel="points of accuracy lost")
        axes.set_ylim(-3, 40)
        axes.grid(alpha=0.3)
    figure.legend(*grid[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=len(CHOICE), fontsize=9)
    return figure


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Perform what is missing, then print the tables, draw the curves and write both."""
    from essm_train.files import write_figure

    p = common.parser(__doc__)
    p.add_argument("--tasks", nargs="+", default=[*TASKS], choices=TASKS)
    p.add_argument("--data_dir", help="data folders, separated as in PATH; by default $ESSM_DATA, or data")
    p.add_argument("--test_samples", type=int, default=600, help="at most, the same for every run of a task")
    rows = {name: classification_tasks.Row(2, rates=(RATE,)) for name in MODELS}
    sweeps.add_arguments(p, rows, "runs/state_pruning", updates=600)
    args = p.parse_args(argv)
    sweeps.check_arguments(p, args, "test_samples")
    names = args.only or [*MODELS]
    if not args.table:
        device = str(common.pick_device(args.device))
        settings = Settings(args.data_dir, args.updates, test_samples=args.test_samples, device=device)
        if args.quick:
            small = {"updates": min(args.updates, 3), "hidden_size": 8, "test_samples": 20, "quick": True}
            settings = dataclasses.replace(settings, **small)
        runs = sweeps.runs_of(rows, names, args, args.tasks)

        def wanted(run: Run) -> dict[str, Any]:
            identity = classification_tasks.load(settings.data(), TASKS[run.task or ""].name).identity
            return settings.values() | {"definition": definition(run, identity)}

        sweeps.sweep(runs, args.runs_dir, args.processes, functools.partial(perform, settings), wanted, METRIC)
    records = sweeps.collect_tasks(args.runs_dir, names, args.tasks)
    device, report = common.start("state_pruning", args, **records[0]["settings"])
    report["results"], report["certificates"] = summarise(records), tightness(records)
    print_tables(report["results"])
    print("\nBounds over measured gains")
    common.table("task model bound layers least median largest", [[*row.values()] for row in report["certificates"]])
    path = common.report_path(report, args, device)
    write_figure(path.with_suffix(".png"), draw(report["results"]))
    write_figure(path.with_name(f"{path.stem}_choice.png"), draw_choice(report["results"]))
    return common.finish(report, args, device)


if __name__ == "__main__":
    main()
