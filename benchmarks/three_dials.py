# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Three dials in one model: spectral budget K, state size n, and depth of refinement K_t. Which buys most?

    python -m benchmarks.three_dials --data_dir data --processes 2
    python -m benchmarks.three_dials --table --runs_dir runs/three_dials

An elastic state model, whose backbone is a spectral layer and after it a diagonal state space (S5), learns loops of
real protein chains once, with a random K of its eight channels and a random cap on K_t in every update. In these
weights K is set per call, states are removed after training (AIRE, all layers in one ranking), and depth is 0, 1, 3 or
what the gate asks for. For each combination: energy of held-out chains, distance from the native ones, and FLOPs a
position while streaming.
"""

from __future__ import annotations

import copy
import itertools
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor
from transformers import AutoConfig, AutoModel, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast

from essm_train.files import write_figure
from essm_train.run.steps import fit
from modeling_essm import ESSMConfig, ESSMModel
from modeling_essm.companions import (
    DiagonalSSMConfig,
    DiagonalSSMModel,
    ElasticStateConfig,
    ElasticStateModel,
    allocate,
    importance,
    prune,
    remove,
)

from . import common, sweeps
from .elastic_measures import STREAMS, flops_of
from .elastic_states import Settings, one_cycle, open_task
from .elastic_tasks import always
from .sweeps import Run, Sweep, mean

METRIC = "energy"
RATE = 3e-3
BUDGETS = (2, 4, 8)
STATES = 32
KEPT = (1.0, 0.5, 0.25)  # share of the modes
GATE = "gate"
DEPTHS = (0, 1, 3, GATE)
EVERYTHING = (max(BUDGETS), 1.0, GATE)


class TwoStageConfig(PreTrainedConfig):
    """A spectral model and a diagonal state space after it, both as dictionaries of their configurations."""

    model_type = "spectral_then_diagonal"

    def __init__(self, spectral: Any = None, diagonal: Any = None, **kwargs: Any):
        self.spectral, self.diagonal = spectral or {}, diagonal or {}
        self.hidden_size = self.diagonal.get("hidden_size", 0)
        super().__init__(**kwargs)


class TwoStageModel(PreTrainedModel):
    """(B, L, D) to (B, L, D); `past_key_values` holds the caches of both."""

    config_class = TwoStageConfig
    _is_stateful = True

    def __init__(self, config: TwoStageConfig):
        super().__init__(config)
        self.spectral = ESSMModel(ESSMConfig(**config.spectral))
        self.diagonal = DiagonalSSMModel(DiagonalSSMConfig(**config.diagonal))
        self.post_init()

    def forward(
        self,
        inputs_embeds: Tensor,
        past_key_values: Any = None,
        use_cache: bool = False,
        spectral_budget: int | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        first, second = past_key_values or (None, None)
        options: dict[str, Any] = {"use_cache": use_cache, "return_dict": True}
        budget = {"spectral_budget": spectral_budget}
        seen = self.spectral(inputs_embeds=inputs_embeds, past_key_values=first, **budget, **options)
        told = self.diagonal(inputs_embeds=seen.last_hidden_state, past_key_values=second, **options)
        caches = (seen.past_key_values, told.past_key_values) if use_cache else None
        return BaseModelOutputWithPast(last_hidden_state=told.last_hidden_state, past_key_values=caches)


AutoConfig.register(TwoStageConfig.model_type, TwoStageConfig, exist_ok=True)
AutoModel.register(TwoStageConfig, TwoStageModel, exist_ok=True)


def make_model(settings: Settings, task: Any) -> Any:
    """A new elastic state model around both stages, without feedback, so that sequences are read at once."""
    D = settings.hidden_size
    spectral = {"hidden_size": D, "intermediate_size": D, "vocab_size": 8, "block": "gated", "num_hidden_layers": 1}
    spectral |= {"inner_size": D, "num_heads": 1, "num_spectral_channels": max(BUDGETS), "filter_length": 512}
    diagonal = {"hidden_size": D, "state_size": STATES, "num_hidden_layers": 1, "vocab_size": 8}
    names = ("latent_size", "max_refine_depth", "compute_penalty")
    fields = {name: getattr(settings, name) for name in names} | {"feedback": False}
    fields |= {"num_input_features": task.features, "readout_size": task.readouts}
    config = ElasticStateConfig(**fields, backbone_config=TwoStageConfig(spectral, diagonal))
    return ElasticStateModel(config).set_objective(task.objective())


def train(model: Any, task: Any, settings: Settings, run: Run) -> dict[str, Any]:
    """All updates, with a random K of BUDGETS and a random cap on depth in each."""

    def batch(update: int) -> tuple[dict[str, Any], dict[str, int]]:
        rng = np.random.default_rng((run.seed, update))
        dials = {"spectral_budget": int(rng.choice(BUDGETS))}
        dials["max_refine_depth"] = int(rng.integers(settings.max_refine_depth + 1))
        return task.batch(rng, settings.batch_size, model, **dials), dials

    def losses(update: int, drawn: tuple[dict[str, Any], dict[str, int]]) -> list[Tensor]:
        batch, dials = drawn
        output = model(batch["input_features"], batch["observations"], use_cache=False, **dials)
        return [output.loss + task.loss(output, batch)]

    return fit(model, *one_cycle(model.parameters(), run.rate, settings.updates), settings.updates, batch, losses)


def smaller(model: Any, share: float) -> Any:
    """A copy whose diagonal state space keeps this share of its modes, by AIRE; the model itself for all of them."""
    if share == 1.0:
        return model
    model = copy.deepcopy(model)
    stage = model.source.backbone.diagonal
    prune(stage, allocate(importance(stage, "aire"), amount=1 - share))
    remove(stage)
    return model


def grid(model: Any, task: Any, streams: int) -> list[dict[str, Any]]:
    """Every combination of the dials: what was asked for, quality, mean depth and FLOPs."""
    found = []
    for kept in KEPT:
        small = smaller(model, kept)
        sizes = small.source.backbone.diagonal.config.state_sizes
        for K, depth in itertools.product(BUDGETS, DEPTHS):
            fixed = None if depth == GATE else int(depth)
            measured = task.measure(small, always(fixed), spectral_budget=K)
            row = {"budget": K, "kept": kept, "states": sizes, "depth": depth}
            row |= {"mean_depth": float(measured.depths.double().mean())} | measured.values
            found.append(row | {"flops": flops_of(task, small, fixed, streams, spectral_budget=K)})
    return found


def perform(settings: Settings, run: Run) -> dict[str, Any]:
    task = open_task(settings, "repair")
    torch.manual_seed(run.seed)
    model = make_model(settings, task)
    record = {"parameters": model.num_parameters()} | train(model, task, settings, run)
    record["grid"] = [] if record["diverged"] else grid(model.eval(), task, min(STREAMS, settings.test_count))
    whole = [row[METRIC] for row in record["grid"] if (row["budget"], row["kept"], row["depth"]) == EVERYTHING]
    return record | {METRIC: {"all": whole[0]} if whole else None}


def define(settings: Settings, run: Run) -> dict[str, Any]:
    return {"budgets": BUDGETS, "kept": KEPT, "depths": DEPTHS, "task": open_task(settings, "repair").identity}


def summarise(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Every combination: mean and deviation over seeds."""
    whole, results = [r["grid"] for r in records if not r["diverged"]], []
    for i, row in enumerate(whole[0] if whole else ()):
        result: dict[str, Any] = {name: row[name] for name in ("budget", "kept", "states", "depth")}
        for name in (METRIC, "rmsd_outside", "rmsd_loop", "gap", "mean_depth", "flops"):
            result[name] = mean([rows[i][name] for rows in whole])
        results.append(result | {"seeds": len(whole)})
    return results


def draw(results: list[dict[str, Any]]) -> Figure:
    """Energy by FLOPs: a line along depth for each K (colour) and share of states (marker)."""
    figure = Figure(figsize=(9, 5.5), layout="constrained")
    axes = figure.subplots()
    for (i, K), (marker, kept) in itertools.product(enumerate(BUDGETS), zip("osv", KEPT)):
        rows = [r for r in results if r["budget"] == K and r["kept"] == kept]
        points = {r["depth"]: (r["flops"]["mean"], r[METRIC]["mean"]) for r in rows}
        style = {"color": f"C{i}", "linewidth": 0.8, "markersize": 6, "label": f"K {K}, {kept:.0%} of states"}
        axes.plot(*zip(*sorted(points.values())), marker=marker, **style)
        axes.plot(*points[GATE], marker=marker, color="black", markersize=3)
    axes.set(xlabel="FLOPs a position", ylabel="energy of the repaired chain", yscale="log")
    axes.legend(fontsize=8, title="black centre: the gate's own depth", title_fontsize=8)
    return figure


def main(argv: list[str] | None = None) -> dict[str, Any]:
    p = common.parser(__doc__)
    p.add_argument("--data_dir", default="data", help="folder with protein_chains")
    sweeps.add_arguments(p, ["three dials"], "runs/three_dials", 400)
    args = p.parse_args(argv)
    small: dict[str, int] = {"batch_size": 1, "test_count": 1} if args.quick else {}
    small |= {"latent_size": 32, "hidden_size": 32}
    settings = Settings(args.data_dir, min(args.updates, 2) if args.quick else args.updates, **small)
    records, report = sweeps.run("three_dials", args, Sweep(settings, perform, define, METRIC), lambda name: (RATE,))
    report["results"] = summarise(records)
    write_figure(common.report_path(report, args).with_suffix(".png"), draw(report["results"]), dpi=110)
    return common.finish(report, args)


if __name__ == "__main__":
    main()
