# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Is it worth to refine a state where its objective asks for it? Elastic state models against what they compete with.

    python -m benchmarks.elastic_states --data_dir data --processes 2
    python -m benchmarks.elastic_states --tasks repair --only SSM ESM --seeds 0 --updates 50
    python -m benchmarks.elastic_states --table --runs_dir runs/elastic_states

Tasks: loops of real protein chains, and mazes that are seen five cells wide, with four times the updates
(`benchmarks.elastic_tasks`). All rows learn from the same chains and mazes in the same order, coming through them by
themselves, and by the objective of their last states and what an expert or a native chain says. The weights of every
row that learnt without refinement are also refined in use alone, by a corrector and a gate that have learnt nothing.
`benchmarks.elastic_measures` says what is measured, and which controls run with the same weights. A row that ran at
several --rates has its best one, by streams that are set aside.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from matplotlib import colormaps
from matplotlib.figure import Figure
from torch import Tensor
from transformers import LlamaConfig

from essm_train.baselines.sizes import count_parameters
from essm_train.files import write_figure
from modeling_essm import ESSMConfig
from modeling_essm.companions import ElasticStateConfig, ElasticStateModel, distillation_loss

from . import common, sweeps
from .elastic_measures import AROUND, STREAMS, controls, flops_of, told
from .elastic_tasks import TASKS, Measured, Repair, always
from .sweeps import Run, Sweep, fit, mean

METRIC = "metric"  # how a run names what its learning rate is chosen by
IN_USE = "refined in use"  # the control of a model that learnt without a corrector and a gate, and has new ones


@dataclass(frozen=True)
class Method:
    """How a row differs from the ESM.

    Attributes:
        backbone: "transformer" or "hybrid" in place of the model's own recurrence, sized to the ESM's parameters.
        refined: whether there is a corrector at work. frozen_metric: G stays I.
        everywhere: inner steps at every position, in training and after, in place of the gate's.
        share: of the ESM's parameters.
        distilled: weight, in the second half of training, of pulling proposals to the states they were refined to.
        refined_from: share of the updates that are done before states are refined.
    """

    backbone: str | None = None
    refined: bool = True
    share: float = 1.0
    frozen_metric: bool = False
    everywhere: int | None = None
    distilled: float = 0.0
    refined_from: float = 0.0
    fields: dict[str, Any] = field(default_factory=dict)
    # The better ones of 1e-3, 3e-3, 1e-2, 3e-2 for most rows; a row may want one beyond.
    rates: ClassVar[tuple[float, ...]] = (1e-2, 3e-2)

    @property
    def depth(self) -> int | None:
        """What it works with everywhere; None for the gate's."""
        return self.everywhere if self.refined else 0

    def depth_after(self, done: float) -> int | None:
        """What it learns with after this share of its updates."""
        return 0 if done < self.refined_from else self.depth


ROWS = {
    "SSM": Method(refined=False),
    "Transformer": Method("transformer", refined=False),
    "SSM + attention": Method("hybrid", refined=False),
    "ESM": Method(),
    "Transformer, small": Method("transformer", refined=False, share=2 / 3),
    "Transformer, large": Method("transformer", refined=False, share=3.0),
    "ESM, one step everywhere": Method(everywhere=1),
    "ESM, penalty 0": Method(fields={"compute_penalty": 0.0}),
    "ESM, penalty 0.3": Method(fields={"compute_penalty": 0.3}),
    "ESM, penalty 3": Method(fields={"compute_penalty": 3.0}),
    "ESM, metric I": Method(frozen_metric=True, fields={"metric": "diagonal"}),
    "ESM, diagonal metric": Method(fields={"metric": "diagonal"}),
    "ESM, low-rank metric": Method(fields={"metric": "low_rank"}),
    "ESM, relaxed gate": Method(fields={"gate_training": "relaxed"}),
    "ESM, distilled 0.1": Method(distilled=0.1),
    "ESM, distilled 1": Method(distilled=1.0),
    "ESM, from three quarters": Method(refined_from=0.75),
    "ESM, policy gradient": Method(fields={"gate_training": "policy_gradient"}),
}


@dataclass(frozen=True)
class Settings:
    data_dir: str
    updates: int
    batch_size: int = 8
    latent_size: int = 64
    hidden_size: int = 64
    max_refine_depth: int = 3
    compute_penalty: float = 0.03
    test_count: int = 44


@functools.cache
def open_task(settings: Settings, name: str) -> Any:
    return TASKS[name](settings.data_dir, settings.test_count)


def make_model(settings: Settings, method: Method, task: Any) -> Any:
    """A new model of the row, at its share of the ESM's parameters, to 5%."""
    names = ("latent_size", "hidden_size", "max_refine_depth", "compute_penalty")
    fields: dict[str, Any] = {name: getattr(settings, name) for name in names}
    fields |= {"num_input_features": task.features, "readout_size": task.readouts, "readout_hidden_size": 64}
    config = ElasticStateConfig(**fields | method.fields)
    if method.backbone is not None:
        config = matched_config(config, method.backbone, method.share)
    model = ElasticStateModel(config)
    if method.frozen_metric:
        model.corrector.metric.requires_grad_(False)
    return model.set_objective(task.objective())


def matched_config(config: Any, kind: str, share: float) -> Any:
    """The configuration around another backbone, without feedback, of the size that is nearest to that share: one block
    of a Transformer, or a spectral layer and one of attention, each with its feed-forward layer.

    Raises:
        ValueError: no size is within 5%.
    """

    def sized(width: int, inner: int) -> Any:
        sizes: dict[str, Any] = {"hidden_size": width, "intermediate_size": inner, "vocab_size": 8}
        sizes |= {"num_attention_heads": 4, "num_key_value_heads": 4}
        if kind == "transformer":
            backbone: Any = LlamaConfig(**sizes, num_hidden_layers=1)
        else:
            sizes |= {"block": "elastic", "num_hidden_layers": 2, "head_size": width // 8}
            sizes |= {"num_spectral_channels": 8, "filter_length": 512}
            backbone = ESSMConfig(**sizes, layer_types=["linear_attention", "full_attention"])
        # Of this metric few weights idle.
        given = {"feedback": False, "metric": "diagonal", "backbone_config": backbone}
        return ElasticStateConfig(**{k: v for k, v in (config.to_dict() | given).items() if k != "auto_map"})

    count = functools.partial(count_parameters, model_class=ElasticStateModel)
    target, found, unit = share * count(config), [], 4 if kind == "transformer" else 8  # one for each channel
    for width in (16, 24, 32, 40, 48, 56, 64):
        least, more = count(sized(width, 8)), count(sized(width, 8 + unit))  # linear in the inner width
        steps = min(max(round((target - least) / (more - least)), 0), 4 * (width - 2) // unit)
        found.append((abs(least + steps * (more - least) - target), sized(width, 8 + unit * steps)))
    apart, best = min(found, key=lambda each: each[0])
    if apart > 0.05 * target:
        raise ValueError(f"no {kind} has {target:,.0f} parameters to 5%, the nearest {count(best):,}")
    return best


def train(model: Any, method: Method, task: Any, settings: Settings, run: Run) -> dict[str, Any]:
    """All updates, at a rate that warms up over a tenth and falls to zero; gates that relax harden on the way."""
    updates = settings.updates * task.longer
    met: dict[str, Any] = {}

    def batch(update: int) -> dict[str, Any]:
        if update % task.ahead == 0:
            rng, depth = np.random.default_rng((run.seed, update)), method.depth_after(update / updates)
            met.update(task.batch(rng, settings.batch_size * task.ahead, model, always(depth)))
        if method.fields.get("gate_training") == "relaxed":
            model.set_gate_temperature(0.1 ** (update / updates))
        return share(met, update % task.ahead, settings.batch_size)

    def losses(update: int, batch: dict[str, Any]) -> list[Tensor]:
        real, depth = batch.get("real"), method.depth_after(update / updates)
        mask = None if method.backbone else real  # other backbones take no mask
        inputs = (batch["input_features"], batch["observations"])
        output = model(*inputs, attention_mask=mask, refine_depth=depth, use_cache=False)
        loss = output.loss
        if method.backbone:
            each = (1 + model.config.proposal_weight) * output.losses
            loss = each.mean() if real is None else (each * real).sum() / real.sum().clamp(min=1)
        loss = loss + task.loss(output, batch)
        if method.distilled and update >= updates / 2:
            loss = loss + method.distilled * distillation_loss(output, real)
        return [loss]

    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=run.rate, weight_decay=0.01)
    warm = 0.1 if updates != 10 else 0.2  # OneCycleLR divides by the updates of a warm-up less one
    cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, run.rate, total_steps=updates, pct_start=warm)
    return fit(model, optimizer, cycle, updates, batch, losses)


def share(batch: dict[str, Any], index: int, size: int) -> dict[str, Any]:
    """The rows of a batch of one update, of nests of tensors too."""
    rows = slice(index * size, (index + 1) * size)
    return {name: share(x, index, size) if isinstance(x, dict) else x[rows] for name, x in batch.items()}


def parameters_of(model: Any, method: Method) -> int:
    idle = (() if method.refined else ("corrector.",)) + (() if method.depth is None else ("gate.",))
    return sum(p.numel() for name, p in model.named_parameters() if not name.startswith(idle))


def perform(settings: Settings, run: Run) -> dict[str, Any]:
    task, method = open_task(settings, run.task), ROWS[run.name]
    torch.manual_seed(run.seed)
    model = make_model(settings, method, task)
    record = {"parameters": parameters_of(model, method)} | train(model, method, task, settings, run)
    if record["diverged"]:
        return record | {METRIC: None}
    model.eval()
    most, own = settings.max_refine_depth, task.measure(model, always(method.depth))
    record |= {"own": told(own), METRIC: {"1": task.validate(model, always(method.depth))}}
    record["controls"] = other_depths(task, model, method, own, most, run.seed)
    model.set_objective(task.objective())
    streams = min(STREAMS, settings.test_count)
    for control, depth in ((record["own"], method.depth), (record["controls"].get(IN_USE), None)):
        if control is not None:
            control["flops"] = flops_of(task, model, depth, streams)
    return record


def other_depths(task: Any, model: Any, method: Method, own: Measured, most: int, seed: int) -> dict[str, Any]:
    """The same weights with other depths than the row's own. A model that learnt without refinement is refined in use
    by a corrector and a gate as they were made."""
    if method.depth is None:
        return controls(task, model, own, most, seed)
    if method.refined:
        return {}
    in_use = task.measure(model)
    return {IN_USE: told(in_use)} | controls(task, model, in_use, most, seed)


def define(settings: Settings, run: Run) -> dict[str, Any]:
    return {"task": open_task(settings, run.task).identity, "row": dataclasses.asdict(ROWS[run.name])}


TOLD = ["mean_depth", "auroc", "rank_correlation", "error_correlation", "error_correlation_difficult"]
TOLD += ["depth_difficult", "depth_easy", "proposal_objective", "objective", "flops"]


def summarise(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Every row at its best rate, and its controls, of every task, in this order: means and deviations over seeds."""
    results, curves = [], {}
    for task, model in itertools.product(TASKS, ROWS):
        runs = [record for record in records if (record["task"], record["model"]) == (task, model)]
        rates, whole = sweeps.at_best_rate(runs, METRIC) if runs else ({}, [])
        curves[task, model] = {run["seed"]: curve_of(run) for run in whole if run["controls"]}
        for control in (None, *whole[0]["controls"]) if whole else ():
            found = [r["own"] if control is None else r["controls"][control] for r in whole]
            row: dict[str, Any] = {"task": task, "model": model, "control": control}
            row |= {"seeds": [r["seed"] for r in whole], "parameters": whole[0]["parameters"]}
            row |= {"rate": whole[0]["rate"], "rates": {f"{rate:g}": value for rate, value in rates.items()}}
            for name in (*found[0]["values"], *TOLD):
                values = [f["values"].get(name, f.get(name, math.nan)) for f in found]
                if all(map(math.isfinite, values)):  # no correlation where depth is constant, no detour without arrival
                    row[name] = mean(values)
            if control is None and (aligned := [f["around_events"] for f in found if "around_events" in f]):
                row["around_events"] = [None if None in at else mean([*at]) for at in zip(*aligned)]
            results.append(row)
    return [row | against_peers(row, results, curves) for row in results]


def of_gate(control: str | None) -> bool:
    """Whether depths are the gate's, whatever its thresholds: none and all are the ends of that."""
    return control in (None, "none", "all", IN_USE) or control.startswith("thresholds")


def curve_of(run: dict[str, Any]) -> list[tuple[float, float]]:
    """Mean depths, rising, and the task's metric there, of one run with a gate."""
    found = [run["own"], *(each for control, each in run["controls"].items() if of_gate(control))]
    return sorted((each["mean_depth"], each["values"][TASKS[run["task"]].metric]) for each in found)


def against_peers(
    row: dict[str, Any], results: list[dict[str, Any]], curves: dict[tuple[str, str], dict[int, Any]]
) -> dict[str, Any]:
    """Where those peers are: "over_ssm", the task's metric as a multiple, "flops_over_transformer", and what the seeds
    of a row with a gate reach at the mean depth of the ESM's, "at_esm_depth", and there above the ESM of that seed,
    "minus_esm"."""
    task, metric, found = row["task"], TASKS[row["task"]].metric, {}
    peers = {r["model"]: r for r in results if r["task"] == task and r["control"] is None}
    if "SSM" in peers and (least := peers["SSM"][metric]["mean"]):
        found["over_ssm"] = row[metric]["mean"] / least
    if "Transformer" in peers and "flops" in row:
        found["flops_over_transformer"] = row["flops"]["mean"] / peers["Transformer"]["flops"]["mean"]
    if "ESM" in peers and row["control"] is None and curves[task, row["model"]]:
        depth = peers["ESM"]["mean_depth"]["mean"]
        mine, theirs = (
            {seed: float(np.interp(depth, *np.transpose(curve))) for seed, curve in curves[task, model].items()}
            for model in (row["model"], "ESM")
        )
        found["at_esm_depth"] = mean([*mine.values()])
        if shared := [mine[seed] - theirs[seed] for seed in mine if seed in theirs]:
            found["minus_esm"] = mean(shared) | {"seeds": len(shared)}
    return found


def draw_rows(results: list[dict[str, Any]]) -> Figure:
    """Quality by FLOPs for every row, hollow where it is refined in use alone, and depth about where difficult
    stretches begin; a column a task."""
    tasks = [*dict.fromkeys(r["task"] for r in results)]
    figure = Figure(figsize=(8 * len(tasks), 8), layout="constrained")
    panels = figure.subplots(2, len(tasks), squeeze=False, height_ratios=(5, 3))
    for axes, below, task in zip(*panels, tasks):
        metric = TASKS[task].metric
        for r in (r for r in results if r["task"] == task and r["control"] in (None, IN_USE)):
            own, color = r["control"] is None, color_of(r["model"])
            style = {"marker": "o" if r["model"].startswith("ESM") else "s", "color": color, "capsize": 2}
            style |= {"label": r["model"]} if own else {"markerfacecolor": "none"}
            axes.errorbar(r["flops"]["mean"], r[metric]["mean"], yerr=r[metric]["deviation"], **style)
            aligned = [np.nan if at is None else at["mean"] for at in r.get("around_events", [])]
            below.plot(np.arange(len(aligned)) - AROUND, aligned, color=color)
        axes.set(xscale="log", xlabel="FLOPs a position", ylabel=metric, title=task)
        axes.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1, 1))
        below.set(xlabel="steps after a difficult stretch begins", ylabel="mean depth K_t", ylim=(0, None))
    return figure


def draw_depths(results: list[dict[str, Any]]) -> Figure:
    """Quality by mean depth of every row that can be refined, the thresholds of its gate shifted, its own depth
    marked; and the ESM's mean depth spent otherwise. A panel a task."""
    tasks = [*dict.fromkeys(r["task"] for r in results)]
    figure = Figure(figsize=(9 * len(tasks), 5.5), layout="constrained")
    for axes, task in zip(figure.subplots(1, len(tasks), squeeze=False)[0], tasks):
        metric = TASKS[task].metric
        for model in ROWS:
            rows = [r for r in results if (r["task"], r["model"]) == (task, model)]
            points = sorted((r["mean_depth"]["mean"], r[metric]["mean"]) for r in rows if of_gate(r["control"]))
            if len(points) > 1:
                axes.plot(*zip(*points), color=color_of(model), label=model)
            for r in rows if model == "ESM" else ():
                mark = {None: "o", "mean everywhere": "x", "by chance": "+", "where difficult": "^"}.get(r["control"])
                axes.plot(r["mean_depth"]["mean"], r[metric]["mean"], mark or ",", color="black")
        axes.set(xlabel="mean depth K", ylabel=metric, title=task)
        axes.set_xscale("symlog", linthresh=0.1)  # most is decided below one step
        axes.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1, 1))
    return figure


def color_of(model: str) -> Any:
    return "black" if model == "ESM" else colormaps["tab20"]([*ROWS].index(model))


def main(argv: list[str] | None = None) -> dict[str, Any]:
    p = common.parser(__doc__, rounds=None, on_cpu=True)
    p.add_argument("--data_dir", default="data", help="folder with protein_chains")
    sweeps.add_arguments(p, ROWS, "runs/elastic_states", 400, TASKS)
    args = p.parse_args(argv)
    small: dict[str, int] = {"batch_size": 2, "test_count": 2} if args.quick else {}
    settings = Settings(args.data_dir, min(args.updates, 2) if args.quick else args.updates, **small)
    records, report = sweeps.run("elastic_states", args, Sweep(settings, perform, define, METRIC))
    report["results"] = summarise(records)
    if any(r["task"] == "repair" for r in records) and Path(args.data_dir, "protein_chains").is_dir():
        report["references"] = Repair(args.data_dir, records[0]["settings"]["test_count"]).references()
        print(f"\nthe chains of repair themselves: {report['references']}")
    for name, figure in {"": draw_rows(report["results"]), "_depths": draw_depths(report["results"])}.items():
        write_figure(args.report.with_name(f"{args.report.stem}{name}.png"), figure, dpi=110)
    return common.finish(report, args)


if __name__ == "__main__":
    main()
