# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Is it worth to refine a state where its objective asks for it? Elastic state models against what they compete with.

    python -m benchmarks.elastic_states --data_dir data --processes 2
    python -m benchmarks.elastic_states --tasks repair --only SSM ESM --seeds 0 --updates 50
    python -m benchmarks.elastic_states --table --runs_dir runs/elastic_states --time 5

Tasks: loops of real protein chains, and mazes that are seen five cells wide, with four times the updates, of which four
learn from what a model came through at once. Rows: the recurrence alone (SSM), the same of as many parameters as the
others (SSM, wide), a causal Transformer, a spectral layer with one of attention (SSM + attention), the elastic state
model (ESM), Transformers of two thirds of its parameters and of three times as many, and ESMs that learn and work with
one step everywhere, with another metric, another training of the gate, another penalty on depth, proposals that learn
from what they were refined to, or no refinement in the first three quarters of training. All learn from the same chains
and mazes in the same order, coming through them by themselves, and by the objective of their last states and what an
expert or a native chain says. With the weights of each gated ESM beside its own gate: no refinement, all of it, and its
mean depth spent everywhere alike, by chance in the gate's proportions, and where a position is difficult before it is
spent elsewhere; and its thresholds shifted, for a curve of quality by depth. With the weights of every row that learnt
without refinement the same, in use alone, by a corrector and a gate that have learnt nothing.
Reported: the metrics, mean depth, how well depth tells difficult positions (AUROC), its rank correlation with the
objective of the proposal and with how wrong the proposal is by what the objective does not see, the mean depth around
where difficult stretches begin, FLOPs of products, solves and attention a position as counted on sixteen test streams
(what is done element by element is not), and processor time there, with --time of all rows in turn; quality as a
multiple of the SSM's and FLOPs of the Transformer's. Of runs at several --rates each row has its best on streams that
are set aside. One JSON file a run, its weights beside it; a sweep that was killed goes on. With --compile objectives
are compiled for training, where there is a compiler, in two thirds of the time; costs are those without.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_model, save_model
from torch import Tensor

from . import common, sweeps
from .elastic_measures import IN_USE, STREAMS, auroc, controls, cost, step_seconds, times_in_turn, told
from .elastic_tables import METRICS, print_tables, summarise
from .elastic_tasks import TASKS, Measured, Repair, always
from .matched_models import Row
from .sweeps import Run

METRIC = "metric"  # how a run names what its learning rate is chosen by
RATES = (3e-3, 1e-2)  # the better ones of 1e-3, 3e-3, 1e-2, 3e-2 for most rows; a row may want one beyond


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
    "SSM, wide": Method(refined=False, fields={"latent_size": 96}),
    "ESM, one step everywhere": Method(everywhere=1),
    "ESM, penalty 0": Method(fields={"compute_penalty": 0.0}),
    "ESM, penalty 0.3": Method(fields={"compute_penalty": 0.3}),
    "ESM, penalty 3": Method(fields={"compute_penalty": 3.0}),
    "ESM, metric I": Method(frozen_metric=True, fields={"metric": "diagonal"}),
    "ESM, diagonal metric": Method(fields={"metric": "diagonal"}),
    "ESM, low-rank metric": Method(fields={"metric": "low_rank"}),
    "ESM, relaxed gate": Method(fields={"gate_training": "relaxed"}),
    "ESM, distilled 0.03": Method(distilled=0.03),
    "ESM, distilled 0.1": Method(distilled=0.1),
    "ESM, distilled 1": Method(distilled=1.0),
    "ESM, from three quarters": Method(refined_from=0.75),
    "ESM, policy gradient": Method(fields={"gate_training": "policy_gradient"}),
}


@dataclass(frozen=True)
class Settings:
    """What all runs of a table have in common."""

    data_dir: str
    updates: int
    batch_size: int = 8
    latent_size: int = 64
    hidden_size: int = 64
    max_refine_depth: int = 3
    compute_penalty: float = 0.03
    test_count: int = 44

    def values(self) -> dict[str, Any]:
        """As JSON gives them back; in which folder the data lies is not part of them."""
        return {k: v for k, v in dataclasses.asdict(self).items() if k != "data_dir"}


# ---------------------------------------------------------------------------------------------------------------------
# Models.


def make_model(settings: Settings, method: Method, task: Any) -> Any:
    """A new model of the row, at its share of the ESM's parameters, to 5%."""
    from modeling_essm.companions import ElasticStateConfig, ElasticStateModel

    fields = {name: getattr(settings, name) for name in ("latent_size", "hidden_size", "max_refine_depth")}
    fields |= {"num_input_features": task.features, "readout_size": task.readouts, "readout_hidden_size": 64}
    config = ElasticStateConfig(**fields | {"compute_penalty": settings.compute_penalty} | method.fields)
    if method.backbone is not None:
        config = matched_config(config, method.backbone, method.share)
    model = ElasticStateModel(config)
    if method.frozen_metric:
        model.corrector.metric.requires_grad_(False)
    return model.set_objective(task.objective())


def matched_config(config: Any, kind: str, share: float) -> Any:
    """The configuration around another backbone, without feedback, of the size that is nearest to that share.

    Raises:
        ValueError: no size is within 5%.
    """
    from modeling_essm.companions import ElasticStateConfig, ElasticStateModel

    def count(config: Any) -> int:
        with torch.device("meta"):
            return ElasticStateModel(config).num_parameters()

    def sized(width: int, inner: int) -> Any:
        given = {"feedback": False, "metric": "diagonal"}  # a metric that is not used has few weights
        fields = config.to_dict() | given | {"backbone_config": backbone_config(kind, width, inner)}
        return ElasticStateConfig(**{k: v for k, v in fields.items() if k != "auto_map"})

    target, found = share * count(config), []
    for width in (16, 24, 32, 40, 48, 56, 64):
        least, more = count(sized(width, 8)), count(sized(width, 12))  # their number is linear in the inner width
        steps = min(max(round((target - least) / (more - least)), 0), width - 2)
        found.append((abs(least + steps * (more - least) - target), sized(width, 8 + 4 * steps)))
    best = min(found, key=lambda each: each[0])[1]
    if abs(count(best) - target) > 0.05 * target:
        raise ValueError(f"no {kind} has {target:,.0f} parameters to 5%, the nearest {count(best):,}")
    return best


def backbone_config(kind: str, width: int, inner: int) -> Any:
    """One block of a Transformer, or a spectral layer and one of attention, each with its feed-forward layer."""
    from transformers import LlamaConfig

    from modeling_essm import ESSMConfig

    fields: dict[str, Any] = {"hidden_size": width, "intermediate_size": inner, "vocab_size": 8}
    fields |= {"num_attention_heads": 4, "num_key_value_heads": 4}
    if kind == "transformer":
        return LlamaConfig(**fields, num_hidden_layers=1)
    fields |= {"block": "gated", "num_hidden_layers": 2, "inner_size": width, "num_heads": 1, "mixing_size": 1}
    layers = ["linear_attention", "full_attention"]
    return ESSMConfig(**fields, layer_types=layers, num_spectral_channels=8, filter_length=512)


# ---------------------------------------------------------------------------------------------------------------------
# One run.


@functools.cache
def open_task(settings: Settings, name: str) -> Any:
    return TASKS[name](settings.data_dir, settings.test_count)


def train(model: Any, method: Method, task: Any, settings: Settings, run: Run) -> dict[str, Any]:
    """All updates, at a rate that warms up over a tenth and falls to zero; gates that relax harden on the way."""
    from modeling_essm.companions import distillation_loss

    seconds = 0.0
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=run.rate, weight_decay=0.01)
    warm = 0.1 if settings.updates != 10 else 0.2  # OneCycleLR divides by the updates of a warm-up less one
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, run.rate, total_steps=settings.updates, pct_start=warm)
    for update in range(settings.updates):
        depth = method.depth_after(update / settings.updates)
        if update % task.ahead == 0:
            rng = np.random.default_rng((run.seed, update))
            met = task.batch(rng, settings.batch_size * task.ahead, model, always(depth))
        batch = share(met, update % task.ahead, settings.batch_size)
        if method.fields.get("gate_training") == "relaxed":
            model.set_gate_temperature(0.1 ** (update / settings.updates))
        started = time.process_time()
        model.train()
        real = batch.get("real")
        mask = None if method.backbone else real  # other backbones take no mask
        output = model(
            batch["input_features"],
            batch["observations"],
            attention_mask=mask,
            refine_depth=depth,
            use_cache=False,
        )
        loss = output.loss
        if method.backbone:
            loss = mean_of((1 + model.config.proposal_weight) * output.losses, real)
        loss = loss + task.loss(output, batch)
        if method.distilled and update >= settings.updates / 2:
            loss = loss + method.distilled * distillation_loss(output, real)
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if not bool(torch.isfinite(loss + norm)):
            return {"diverged": True, "cpu_seconds": seconds}
        optimizer.step()
        scheduler.step()
        seconds += time.process_time() - started
    return {"diverged": False, "cpu_seconds": seconds}


def share(batch: dict[str, Any], index: int, size: int) -> dict[str, Any]:
    """The rows of a batch of one update, of nests of tensors too."""
    rows = slice(index * size, (index + 1) * size)
    return {name: share(x, index, size) if isinstance(x, dict) else x[rows] for name, x in batch.items()}


def mean_of(each: Tensor, real: Tensor | None) -> Tensor:
    """(): of (B, L) over the positions that exist."""
    return each.mean() if real is None else (each * real).sum() / real.sum().clamp(min=1)


def parameters_of(model: Any, method: Method) -> int:
    """Those that the row has a use for."""
    idle = () if method.refined else ("corrector.",)
    idle += () if method.depth is None else ("gate.",)
    return sum(p.numel() for name, p in model.named_parameters() if not name.startswith(idle))


def weights_of(path: Path) -> Path:
    """Where the weights of the run that this file tells of lie."""
    return path.with_suffix(".safetensors")


def load_trained(path: Path, task: Any) -> Any:
    """The model of a finished run, in eval mode.

    Raises:
        ValueError: a run that diverged, or whose weights are gone.
    """
    record = json.loads(path.read_text())
    if record["diverged"] or not weights_of(path).exists():
        raise ValueError(f"{weights_of(path)} does not exist: the run diverged, or delete {path.name} and train again")
    settings = Settings("", **record["settings"])
    model = make_model(settings, ROWS[record["model"]], task)
    load_model(model, str(weights_of(path)))
    return model.eval()


def compile_objective(model: Any, backend: str = "inductor") -> None:
    """Of a model: most of the time of an inner step goes into the many small operations of its objective."""
    import torch._dynamo.config
    from torch._functorch import config

    config.donated_buffer = False  # a loss and inner steps take gradients from the same graph
    torch._dynamo.config.recompile_limit = 64  # for as many rows as take a step, with a graph or without
    model.objective.compile(backend=backend)


def perform(settings: Settings, compiled: bool, run: Run, path: Path) -> dict[str, Any]:
    """Train on one thread, measure, write weights and then the file in one move, return what it holds."""
    from essm_train.files import write_json

    task, method = open_task(settings, run.task or ""), ROWS[run.name]
    with common.threads(1):
        torch.manual_seed(run.seed)
        model = make_model(settings, method, task)
        record: dict[str, Any] = {"task": run.task, "model": run.name, "rate": run.rate, "seed": run.seed}
        record |= {"settings": settings.values(), "definition": definition(settings, run)}
        long = dataclasses.replace(settings, updates=settings.updates * task.longer)
        if compiled:
            compile_objective(model)
        record |= {"parameters": parameters_of(model, method)} | train(model, method, task, long, run)
        if record["diverged"]:
            record[METRIC] = None
        else:
            model.eval()
            most, own = settings.max_refine_depth, task.measure(model, always(method.depth))
            record["own"], record[METRIC] = told(own, most), {"1": task.validate(model, always(method.depth))}
            record["controls"] = other_depths(task, model, method, own, most, run.seed)
            model.set_objective(task.objective())
            streams = min(STREAMS, settings.test_count)
            record["cost"] = cost(task, model, method.depth, streams)
            if IN_USE in record["controls"]:
                record["cost_in_use"] = cost(task, model, None, streams)
            save_model(model, str(weights_of(path)))
        record["machine"] = common.machine(torch.device("cpu"))
    write_json(path, record)
    return record


def other_depths(task: Any, model: Any, method: Method, own: Measured, most: int, seed: int) -> dict[str, Any]:
    """The same weights with other depths than the row's own. A model that learnt without refinement is refined in use
    by a corrector and a gate as they were made."""
    if method.depth is None:
        return controls(task, model, own, most, seed)
    if method.refined:
        return {}
    in_use = task.measure(model)
    return {IN_USE: told(in_use, most)} | controls(task, model, in_use, most, seed)


def definition(settings: Settings, run: Run) -> dict[str, Any]:
    """What a run found must have been made with."""
    task = open_task(settings, run.task or "").identity
    return json.loads(json.dumps({"task": task, "row": dataclasses.asdict(ROWS[run.name])}))


# ---------------------------------------------------------------------------------------------------------------------
# All runs.


def time_rows(results: list[dict[str, Any]], settings: Settings, runs_dir: Path, rounds: int) -> None:
    """Write in each row "seconds_in_turn", those a position of the model of its first seed: median, least and most.

    Raises:
        ValueError: weights are gone.
    """
    for task in dict.fromkeys(r["task"] for r in results):
        opened, timers = open_task(settings, task), {}
        for row in (r for r in results if r["task"] == task and r["control"] is None):
            run = Run(row["model"], row["rate"], row["seeds"][0], task)
            model, depth = load_trained(runs_dir / run.file, opened), ROWS[row["model"]].depth
            timers[row["model"]] = functools.partial(
                step_seconds, opened, model, depth, min(STREAMS, settings.test_count)
            )
        with common.threads(1):
            found = times_in_turn(timers, rounds)
        for row in (r for r in results if r["task"] == task and r["control"] is None):
            row["seconds_in_turn"] = found[row["model"]]


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Perform what is missing, then print the tables and write them."""
    p = common.parser(__doc__)
    p.add_argument("--tasks", nargs="+", default=[*TASKS], choices=TASKS)
    p.add_argument("--data_dir", default="data", help="folder with protein_chains")
    p.add_argument("--time", type=int, default=0, metavar="ROUNDS", help="time the models of all rows anew, in turn")
    p.add_argument("--compile", action="store_true", help="compile objectives to train with")
    sweeps.add_arguments(p, {name: Row(1, rates=RATES) for name in ROWS}, "runs/elastic_states", updates=400)
    args = p.parse_args(argv)
    sweeps.check_arguments(p, args)
    if args.time < 0:
        p.error(f"--time must be at least 0 rounds, got {args.time}")
    names = args.only or [*ROWS]
    if not args.table:
        settings = Settings(args.data_dir, args.updates)
        if args.quick:
            settings = dataclasses.replace(settings, updates=min(args.updates, 2), test_count=2, batch_size=2)
        rows = {name: Row(1, rates=RATES) for name in names}
        runs = sweeps.runs_of(rows, names, args, args.tasks)

        def wanted(run: Run) -> dict[str, Any]:
            return settings.values() | {"definition": definition(settings, run)}

        sweeps.sweep(
            runs, args.runs_dir, args.processes, functools.partial(perform, settings, args.compile), wanted, METRIC
        )
    records = sweeps.collect_tasks(args.runs_dir, names, args.tasks)
    device, report = common.start("elastic_states", args, **records[0]["settings"])
    report["results"] = summarise(records, ROWS)
    if args.time:
        measured = Settings(args.data_dir, **records[0]["settings"])
        time_rows(report["results"], measured, args.runs_dir, args.time)
    print_tables(report["results"])
    if "repair" in args.tasks and (Path(args.data_dir) / "protein_chains").is_dir():
        report["references"] = {
            name: found.values | {"objective_auroc": auroc(found.losses.flatten(), found.difficult.flatten())}
            for name, found in Repair(args.data_dir, records[0]["settings"]["test_count"]).references().items()
        }
        metrics = [*(name for name in METRICS if name in report["references"]["native"]), "objective_auroc"]
        rows = [
            [name.replace(" ", "_"), *(f"{values[m]:.4f}" for m in metrics)]
            for name, values in report["references"].items()
        ]
        print("\nthe chains of repair themselves, and how well their objective tells loops")
        common.table(f"chain {' '.join(metrics)}", rows)
    return common.finish(report, args, device)


if __name__ == "__main__":
    main()
