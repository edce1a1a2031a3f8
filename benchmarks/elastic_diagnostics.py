# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""What the inner steps of trained elastic state models do, and where their cost goes.

    python -m benchmarks.elastic_diagnostics --data_dir data --runs_dir runs/elastic_states

Runs every refining row of `benchmarks.elastic_states`, at its best rate and of all seeds whose weights are there, along
test streams one by one, with the depths that it works with. Reported, as means and deviations over seeds:
depths: percentiles, the share of positions at the cap, and the FLOPs of a position in the worst case, all steps;
steps, first to last: how many positions took it, the objective before and after, how often it lowered it, how often it
was kept, how often the trust region cut it, how often it was retracted, and how long it was in the norm of G before it
was cut; way: from proposals to what was committed, in the norm of G;
metric: the least and the greatest eigenvalue of G and their ratio; step size; thresholds of the gate;
cost: FLOPs and processor seconds of a position in the backbone, the objective of proposals, the gate, and of steps the
objective, its gradient, the metric with the trust region, and the rest, on four streams, which vary little;
of a relaxed gate: the objective with soft masks and with hard ones, on the same inputs of training streams.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from . import common, sweep_tables, sweeps
from .elastic_measures import Flops, cost
from .elastic_states import ROWS, Settings, load_trained, open_task, weights_of
from .elastic_tables import summarise
from .elastic_tasks import always
from .sweeps import Run

COSTLY = 4  # streams that costs are counted and timed on
PARTS = {  # which calls, from the outermost to the innermost, belong to which part
    "step": "rest",
    "step/propose": "backbone",
    "step/judge": "objective of proposals",
    "step/depths": "gate",
    "step/refine": "rest of steps",
    "step/refine/move": "rest of steps",
    "step/refine/judge": "objective of steps",
    "step/refine/gradient": "gradient",
    "step/refine/direction": "metric",
}


@contextmanager
def replaced(owner: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """A method of this object alone is what `make` makes of it, or of what took its place before."""
    replacement = vars(owner).get(name)
    setattr(owner, name, make(getattr(owner, name)))
    try:
        yield
    finally:
        delattr(owner, name)
        if replacement is not None:
            setattr(owner, name, replacement)


# ---------------------------------------------------------------------------------------------------------------------
# Steps.


@dataclass
class Step:
    """One inner step of one position: its place in the order, the objective before it and where it led, its length
    |v|_G before the trust region, and whether that cut it and the state was retracted."""

    index: int
    before: float
    length: float = 0.0
    cut: bool = False
    retracted: bool = False
    after: float = float("nan")

    @property
    def kept(self) -> bool:
        return self.after <= self.before


class Steps:
    """Watches the steps of a model on streams of batch 1 while it is entered.

    Attributes:
        taken: all of them. ways: |z_K - z_0|_G of each position that took any.
    """

    def __init__(self, model: Any):
        if model.config.acceptance != "reject":
            raise ValueError(f'steps are told apart where acceptance is "reject", got {model.config.acceptance!r}')
        self.corrector, self.taken, self.ways = model.corrector, list[Step](), list[float]()
        self.moved = False  # the next judgement is of where a step leads
        self.index = 0

    def __enter__(self) -> Steps:
        self.stack = ExitStack()
        for name in ("refine", "direction", "retract", "move", "judge"):
            self.stack.enter_context(replaced(self.corrector, name, getattr(self, f"_{name}")))
        return self

    def __exit__(self, *error: object) -> None:
        self.stack.close()

    def _refine(self, original: Any) -> Any:
        def refine(start: Any, depths: Tensor, *args: Any) -> Any:
            self.index, self.objective = 0, float(start.losses)
            end = original(start, depths, *args)
            if self.index:
                self.ways.append(float(self.corrector.metric.norm(end.z - start.z)))
            return end

        return refine

    def _direction(self, original: Any) -> Any:
        def direction(g: Tensor, solve: Callable[[Tensor], Tensor]) -> Tensor:
            v, whole = original(g, solve), -solve(g)
            self.index += 1
            step = Step(self.index, self.objective, float((-(g * whole).sum()).clamp(min=0).sqrt()))
            step.cut = float(v.norm()) < 0.999 * float(whole.norm())
            self.taken.append(step)
            return v

        return direction

    def _move(self, original: Any) -> Any:
        def move(*args: Any) -> Tensor:
            self.moved = True
            return original(*args)

        return move

    def _retract(self, original: Any) -> Any:
        def retract(z: Tensor) -> Tensor:
            there = original(z)
            if self.moved:  # and not of a proposal
                self.taken[-1].retracted = float(there.norm()) < 0.999 * float(z.norm())
            return there

        return retract

    def _judge(self, original: Any) -> Any:
        def judge(*args: Any, **kwargs: Any) -> Any:
            found = original(*args, **kwargs)
            if self.moved:
                self.moved, step = False, self.taken[-1]
                step.after = float(found.losses)
                self.objective = step.after if step.kept else step.before
            return found

        return judge


def told_of_steps(steps: list[Step], positions: int, most: int) -> list[dict[str, float]]:
    """Of each step in order, up to the first that no position took; "taken" is the share of positions."""
    found = []
    for index in range(1, most + 1):
        rows = [step for step in steps if step.index == index]
        if not rows:
            break
        row = {"taken": len(rows) / positions, "before": statistics.fmean(s.before for s in rows)}
        row["after"] = statistics.fmean(s.after if s.kept else s.before for s in rows)
        row["lowered"] = statistics.fmean(s.after < s.before for s in rows)
        row |= {name: statistics.fmean(getattr(s, name) for s in rows) for name in ("kept", "cut", "retracted")}
        lengths = [s.length for s in rows]
        found.append(row | {f"length_p{p}": float(np.percentile(lengths, p)) for p in (5, 50, 95)})
    return found


# ---------------------------------------------------------------------------------------------------------------------
# Cost.


class Parts:
    """Where a counter goes up while a model's steps run, call by call; what a call calls is not its own.

    Args:
        read: the counter, for instance a clock.
    Attributes:
        spent: by part, of PARTS.
    """

    def __init__(self, model: Any, read: Callable[[], float]):
        self.model, self.read, self.spent = model, read, dict.fromkeys(PARTS.values(), 0.0)
        self.path, self.inner = list[str](), [0.0]

    def __enter__(self) -> Parts:
        model, self.stack = self.model, ExitStack()
        methods = {"step": model, "depths": model.gate}
        methods |= dict.fromkeys(("refine", "judge", "gradient", "direction", "move"), model.corrector)
        for name, owner in methods.items():
            self.stack.enter_context(replaced(owner, name, lambda f, name=name: self._counted(f, name)))
        self.stack.enter_context(replaced(model.source, "start", self._starting))
        return self

    def __exit__(self, *error: object) -> None:
        self.stack.close()

    def _counted(self, original: Any, name: str) -> Any:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.path.append(name)
            self.inner.append(0.0)
            started = self.read()
            try:
                return original(*args, **kwargs)
            finally:
                whole = self.read() - started
                self.spent[PARTS["/".join(self.path)]] += whole - self.inner.pop()
                self.inner[-1] += whole
                self.path.pop()

        return counted

    def _starting(self, original: Any) -> Any:
        """Some backbones run in `start`, others in what it returns."""
        start = self._counted(original, "propose")
        return lambda *args: self._counted(start(*args), "propose")


@torch.no_grad()
def parts_of(task: Any, model: Any, depth: int | None, streams: int) -> dict[str, dict[str, float]]:
    """ "flops" and "seconds" of a position, by part, on test streams at batch 1."""
    found = {}
    with Flops() as flops, Parts(model, lambda: float(flops.total)) as parts:
        positions = sum(task.stream(model, i, always(depth)) for i in range(streams))
    found["flops"] = {name: spent / positions for name, spent in parts.spent.items()}
    with Parts(model, time.process_time) as parts:
        positions = sum(task.stream(model, i, always(depth)) for i in range(streams))
    found["seconds"] = {name: spent / positions for name, spent in parts.spent.items()}
    return found


# ---------------------------------------------------------------------------------------------------------------------
# A model, and all of them.


@torch.no_grad()
def hardened(task: Any, model: Any, temperature: float, streams: int, seed: int = 0) -> dict[str, float]:
    """The objective of a relaxed gate with its soft masks at this temperature and with hard ones, "soft" and "hard",
    and the depth of both, on the same inputs of training streams; steps are accepted alike."""
    batch = task.batch(np.random.default_rng(seed), streams, model)
    real = batch.get("real", torch.ones(batch["input_features"].shape[:2], dtype=torch.bool))
    config, inputs = model.config, (batch["input_features"], batch["observations"])
    before = config.gate_temperature, config.training_acceptance
    model.set_gate_temperature(temperature)
    config.training_acceptance = config.acceptance
    found = {}
    for name, training in {"soft": True, "hard": False}.items():
        output = model.train(training)(*inputs, attention_mask=real, use_cache=False)
        found[name] = float(output.losses[real].mean())
        found[f"{name}_depth"] = float(output.expected_depths[real].mean())
    config.gate_temperature, config.training_acceptance = before
    return found


@torch.no_grad()
def diagnose(task: Any, model: Any, record: dict[str, Any], streams: int) -> dict[str, Any]:
    """All that is reported of the model of a finished run."""
    depth, most = ROWS[record["model"]].depth, record["settings"]["max_refine_depth"]
    histogram = np.repeat(np.arange(most + 1), record["own"]["histogram"])
    found: dict[str, Any] = {"depths": {f"p{p}": float(np.percentile(histogram, p)) for p in (50, 95, 99)}}
    found["depths"]["at_cap"] = float((histogram == most).mean())
    few = min(streams, COSTLY)
    found["depths"]["worst_case_flops"] = cost(task, model, most, few)["flops"]
    with Steps(model) as steps:
        positions = sum(task.stream(model, i, always(depth)) for i in range(streams))
    found["steps"] = told_of_steps(steps.taken, positions, most)
    found["way"] = statistics.fmean(steps.ways) if steps.ways else 0.0
    eigenvalues = torch.linalg.eigvalsh(model.corrector.metric.matrix())
    found["metric"] = {"least": float(eigenvalues[0]), "greatest": float(eigenvalues[-1])}
    found["metric"]["condition"] = float(eigenvalues[-1] / eigenvalues[0])
    found |= {"step_size": float(model.corrector.step_size), "thresholds": model.gate.thresholds.tolist()}
    found["cost"] = parts_of(task, model, depth, few)
    if model.config.gate_training == "relaxed":
        updates = record["settings"]["updates"] * task.longer
        found["hardened"] = hardened(task, model, 0.1 ** ((updates - 1) / updates), streams)
    return found


def over_seeds(found: list[Any]) -> Any:
    """Nests of numbers to one of means and deviations; of lists as many as all have."""
    first = found[0]
    if isinstance(first, dict):
        return {name: over_seeds([f[name] for f in found]) for name in first}
    if isinstance(first, list):
        return [over_seeds([*each]) for each in zip(*found)]
    return sweep_tables.mean(found)


def print_tables(results: list[dict[str, Any]]) -> None:
    for task in dict.fromkeys(r["task"] for r in results):
        print(f"\n{task}: inner steps")
        columns = ("taken", "before", "after", "lowered", "cut", "retracted", "length_p50")
        rows = []
        for r in (r for r in results if r["task"] == task):
            name = r["model"].replace(" ", "_")
            for index, step in enumerate(r["steps"], 1):
                shown = [sweep_tables.shown(step[column]) for column in columns]
                rows.append([name, len(r["seeds"]), index, *shown])
        common.table(f"row seeds step {' '.join(columns)}", rows)
        print(f"\n{task}: depths, metric, and the shares of FLOPs and of time by part")
        parts = [*dict.fromkeys(PARTS.values())]
        rows = []
        for r in (r for r in results if r["task"] == task):
            whole = {unit: sum(x["mean"] for x in spent.values()) for unit, spent in r["cost"].items()}
            shown = [f"{r['depths'][name]['mean']:.2f}" for name in ("p50", "p95", "p99", "at_cap")]
            shown += [f"{r['depths']['worst_case_flops']['mean']:,.0f}", f"{r['metric']['condition']['mean']:.1f}"]
            for part in parts:
                shares = [r["cost"][unit][part]["mean"] / whole[unit] for unit in ("flops", "seconds")]
                shown.append("/".join(f"{share:.0%}" for share in shares))
            rows.append([r["model"].replace(" ", "_"), *shown])
        common.table(
            f"row p50 p95 p99 at_cap worst_flops condition {' '.join(p.replace(' ', '_') for p in parts)}", rows
        )
    for r in (r for r in results if "hardened" in r):
        told = ", ".join(f"{name} {sweep_tables.shown(x)}" for name, x in r["hardened"].items())
        print(f"\n{r['task']}, {r['model']}: {told}")


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Diagnose what was trained, print the tables and write them."""
    p = common.parser(__doc__)
    p.set_defaults(device="cpu")
    p.add_argument("--data_dir", default="data", help="folder with protein_chains")
    p.add_argument("--runs_dir", type=Path, default=Path("runs/elastic_states"))
    p.add_argument("--streams", type=int, default=44, help="test streams of each model")
    args = p.parse_args(argv)
    if args.streams < 1:
        p.error(f"--streams must be at least 1, got {args.streams}")
    records = sweeps.collect(args.runs_dir)
    settings = Settings(args.data_dir, **records[0]["settings"])
    streams = min(args.streams, settings.test_count)
    device, report = common.start("elastic_diagnostics", args, streams=streams, **settings.values())
    report["results"] = []
    rows = [r for r in summarise(records, ROWS) if r["control"] is None and ROWS[r["model"]].refined]
    by_run = {(r["task"], r["model"], r["rate"], r["seed"]): r for r in records}
    for row in rows:
        task, found, seeds = open_task(settings, row["task"]), [], []
        for seed in row["seeds"]:
            path = args.runs_dir / Run(row["model"], row["rate"], seed, row["task"]).file
            if not weights_of(path).exists():
                print(f"left out: {weights_of(path)} does not exist")
                continue
            with common.threads(1):
                record = by_run[row["task"], row["model"], row["rate"], seed]
                found.append(diagnose(task, load_trained(path, task), record, streams))
            seeds.append(seed)
        if found:
            kept = {name: row[name] for name in ("task", "model", "rate")}
            report["results"].append(kept | {"seeds": seeds} | over_seeds(found))
    print_tables(report["results"])
    return common.finish(report, args, device)


if __name__ == "__main__":
    main()
