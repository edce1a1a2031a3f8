# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""How many states does a trained Mamba need? Energies of states against balanced truncation of its average.

    python -m benchmarks.selective_states --train_file novels-train.parquet --validation_file novels-validation.parquet
    python -m benchmarks.selective_states --quick

A Mamba of two layers and 16 states reads text; then every layer is left with n states, without training, in five ways:

    exact energies      states kept by their energy along calibration text (`importance`, "aire_exact")
    frozen energies     the same with frozen-time energies ("aire")
    random states       drawn anew for every seed
    balanced average    delta, B and C stay functions of the input; each channel's states are projected on the leading
                        balanced directions of its recurrence averaged over the text (CompreSSM, A.2)
    average alone       that average in place of the recurrence, truncated: nothing depends on the input

The first three drop states for all channels of a layer at once, and shorten x_proj; a projection is the channel's own
and makes its recurrence dense, so at equal n it keeps the layer's weights and costs n times the work. An average has
fewer directions above rounding than 16, and no row with more. Reported: bits per byte of the same held-out blocks by n,
seed by seed. One JSON file a seed; a sweep that was killed goes on.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

from . import ablation, common, sweep_tables, sweeps
from .ablation import Settings
from .matched_models import Row
from .sweeps import Run

ROW = Row(2, peer="mamba", hidden_size=128, rates=(6e-3,))
SIZES = (12, 8, 6, 4, 3, 2, 1)
CALIBRATION_BLOCKS = 16
METRIC = "bits per byte"
TOLERANCE = 1e-3  # fp32, of logits; the whole recurrence in our own loop against the library's
ENERGIES = {"exact energies": "aire_exact", "frozen energies": "aire", "random states": "random"}
WAYS = (*ENERGIES, "balanced average", "average alone")
Projection = tuple[Tensor, Tensor]  # T (D, N, r) and its left inverse (D, r, N)


# ---------------------------------------------------------------------------------------------------------------------
# Recurrences that the library's layer cannot have. Letters: b batch, L steps, D channels, N states, r of them kept.


def projected_scan(u: Tensor, steps: Any, projection: Projection) -> Tensor:
    """y (b, L, D) of x_t = T^+ diag(a_t) T x_{t-1} + T^+ delta_t B_t u_t, y_t = C_t T x_t, for u (b, L, D)."""
    T, left = projection
    delta, B, C = steps.delta[:, :, 0], steps.B[:, :, 0], steps.C[:, :, 0]
    x = torch.zeros(len(u), T.shape[0], T.shape[2], dtype=T.dtype)
    outputs = []
    for t in range(u.shape[1]):
        a = (delta[:, t, :, None] * steps.A[0]).exp()
        driven = a * torch.einsum("dnr,bdr->bdn", T, x) + (delta[:, t] * u[:, t])[..., None] * B[:, t, None]
        x = torch.einsum("drn,bdn->bdr", left, driven)
        outputs.append(torch.einsum("bn,dnr,bdr->bd", C[:, t], T, x))
    return torch.stack(outputs, 1)


def fixed_scan(u: Tensor, system: Any) -> Tensor:
    """y (b, L, D) of every channel's own fixed system, for u (b, L, D)."""
    x = torch.zeros(len(u), *system.lam.shape, dtype=system.lam.dtype)
    outputs = []
    for t in range(u.shape[1]):
        x = system.lam * x + system.B * u[:, t, :, None]
        outputs.append((system.C * x).sum(-1).real)
    return torch.stack(outputs, 1)


class Replaced(nn.Module):
    """A Mamba layer around another recurrence: convolution, gate and projections are its own."""

    def __init__(self, layer: Any, projection: Projection | None, system: Any):
        super().__init__()
        self.layer, self.projection, self.system = layer, projection, system

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """(b, L, hidden) in and out."""
        layer = self.layer
        u, gate = layer.in_proj(hidden_states).chunk(2, dim=-1)
        u = layer.act(layer.conv1d(u.transpose(1, 2))[..., : u.shape[1]].transpose(1, 2)).double()
        if self.projection is None:
            y = fixed_scan(u, self.system)
        else:
            from modeling_essm.companions.pruning.mamba_states import MambaAdapter

            y = projected_scan(u, MambaAdapter().steps(layer, hidden_states, None), self.projection)
        return layer.out_proj((y + layer.D * u).to(gate.dtype) * layer.act(gate))


@contextmanager
def recurrences(model: nn.Module, made: dict[str, Replaced]) -> Iterator[None]:
    """The model with other layers, by name, and as it was afterwards."""
    for name, layer in made.items():
        model.set_submodule(name, layer)
    try:
        yield
    finally:
        for name, layer in made.items():
            model.set_submodule(name, layer.layer)


def balanced(model: nn.Module, systems: dict[str, Any], size: int) -> dict[str, Replaced]:
    """Every layer with the leading balanced directions of its average: so many, or as many as are above rounding."""
    from modeling_essm.companions.truncation.gramians import balance, gramians

    made = {}
    for name, system in systems.items():
        balancing = balance(*(gramian.real for gramian in gramians(system)))
        projection = balancing.transform(min(size, int(balancing.rank.min())))
        made[name] = Replaced(model.get_submodule(name), projection, None)
    return made


def averages(model: nn.Module, systems: dict[str, Any], size: int) -> dict[str, Replaced]:
    """Every layer with its average, truncated by balancing, in place of the selective recurrence."""
    from modeling_essm.companions import truncate

    return {
        name: Replaced(model.get_submodule(name), None, truncate(system, size=size).system)
        for name, system in systems.items()
    }


# ---------------------------------------------------------------------------------------------------------------------
# One run.


def bits(model: nn.Module, held_out: Tensor) -> float:
    return ablation.score(model, held_out, (1,))["1"]


def check_replacement(model: Any, ids: Tensor) -> None:
    """Our own loop, with nothing projected, gives what the library's layer gives. Raises RuntimeError if not."""
    from modeling_essm.companions.truncation.selective_average import selective_layers

    expected = model(ids).logits
    layers = selective_layers(model)
    identities = {name: torch.eye(m.A_log.shape[1]).double().expand(len(m.A_log), -1, -1) for name, m in layers.items()}
    whole = {name: Replaced(layer, (identities[name], identities[name]), None) for name, layer in layers.items()}
    with recurrences(model, whole):
        common.require_close("the recurrence as a loop", model(ids).logits, expected, TOLERANCE)


@torch.no_grad()
def measure(model: Any, held_out: Tensor, calibration: list[Tensor], seed: int) -> dict[str, dict[str, float]]:
    """Bits per byte by way and number of states."""
    from modeling_essm.companions import allocate, averaged_systems, importance, prune, restore

    model.eval()
    check_replacement(model, held_out[:2, :64])
    found: dict[str, dict[str, float]] = {way: {} for way in WAYS}
    for way, method in ENERGIES.items():
        scores = importance(model, method, calibration=calibration, seed=seed)
        states = len(scores.raw[0])
        for size in (size for size in SIZES if size < states):
            prune(model, allocate(scores, total=size * len(scores.raw), scope="uniform"))
            found[way][str(size)] = bits(model, held_out)
            restore(model)
    systems = averaged_systems(model, calibration)
    for way, make in (("balanced average", balanced), ("average alone", averages)):
        for size in (size for size in SIZES if size < states):
            with recurrences(model, make(model, systems, size)):
                found[way][str(size)] = bits(model, held_out)
    return found


def perform(settings: Settings, run: Run, path: Path) -> dict[str, Any]:
    """Train on one thread, reduce, measure, write the file in one move, return what it holds."""
    from essm_train.data.samples import MapSamples
    from essm_train.files import write_json

    text, values = ablation.load(settings)
    with common.threads(1):
        torch.manual_seed(run.seed)
        config = ablation.matched_config(ROW, settings.parameters)
        model: Any = ablation.make_model(config, settings.filter_length).to(settings.device)
        record: dict[str, Any] = {"model": run.name, "rate": run.rate, "seed": run.seed, "settings": values}
        record |= {"definition": definition(), "parameters": sum(p.numel() for p in model.parameters())}
        source = MapSamples(text.source.samples, run.seed)
        record |= ablation.train(model, source, settings.arguments(ROW, run.rate, run.seed))
        started = time.process_time()
        drawn = source.load(source.draw(CALIBRATION_BLOCKS))
        calibration = list(torch.stack([torch.as_tensor(block.astype("int64")) for block in drawn]).split(4))
        if record["diverged"]:
            record[METRIC], record["reduced"] = None, {}
        else:
            record[METRIC] = {"1": bits(model, text.held_out)}
            record["reduced"] = measure(model, text.held_out, calibration, run.seed)
        record["measuring_cpu_seconds"] = time.process_time() - started
        record["machine"] = common.machine(torch.device(settings.device))
    write_json(path, record)
    return record


def definition() -> dict[str, Any]:
    """What a run found must have been made with."""
    row = {name: value for name, value in dataclasses.asdict(ROW).items() if name != "rates"}
    return {"row": row, "calibration_blocks": CALIBRATION_BLOCKS, "sizes": [*SIZES]}


# ---------------------------------------------------------------------------------------------------------------------
# All runs.


def summarise(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of every way and number of states the mean over seeds, and what it loses against the whole model, paired.

    An average has fewer directions above rounding than a layer has states: asked for more it gives the same model
    again, and those rows are left out.
    """
    whole = [record for record in records if not record["diverged"]]

    def sizes(way: str) -> list[str]:
        ascending = sorted(whole[0]["reduced"][way], key=int)
        before = [None, *ascending]
        same = [all(r["reduced"][way][n] == r["reduced"][way].get(m) for r in whole) for m, n in zip(before, ascending)]
        return [n for n, repeated in zip(ascending, same) if way in ENERGIES or not repeated][::-1]

    return [
        {
            "way": way,
            "states": int(size),
            "seeds": [r["seed"] for r in whole],
            "bits_per_byte": sweep_tables.mean([r["reduced"][way][size] for r in whole]),
            "loss": sweep_tables.mean([r["reduced"][way][size] - r[METRIC]["1"] for r in whole]),
        }
        for way in (WAYS if whole else ())
        for size in sizes(way)
    ]


def draw(results: list[dict[str, Any]]) -> Figure:
    """What every way loses by the number of states, with one deviation over seeds."""
    figure = Figure(figsize=(6, 4.5), layout="constrained")
    axes = figure.subplots()
    for way in WAYS:
        rows = [r for r in results if r["way"] == way]
        means, spreads = ([r["loss"][name] for r in rows] for name in ("mean", "deviation"))
        axes.errorbar([r["states"] for r in rows], means, spreads, marker="o", markersize=4, capsize=3, label=way)
    axes.set(xlabel="states kept of 16", ylabel="loss in bits per byte")
    axes.set_yscale("symlog", linthresh=0.01)
    axes.set_ylim(bottom=-0.005)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    return figure


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Perform what is missing, then print the table, draw it and write both."""
    from essm_train.files import write_figure

    p = common.parser(__doc__)
    p.add_argument("--train_file", nargs="+", help="text to train on; by default Python's own sources")
    p.add_argument("--validation_file", nargs="+", help="held-out text; by default the end of train_file")
    p.add_argument("--parameters", type=int, default=400_000, help="of the model")
    sweeps.add_arguments(p, {"mamba": ROW}, "runs/selective_states", updates=800)
    args = p.parse_args(argv)
    sweeps.check_arguments(p, args, "parameters")
    if not args.table:
        size = (60_000, min(args.updates, 3)) if args.quick else (args.parameters, args.updates)
        small: dict[str, Any] = {"validation_blocks": 32, "block_size": 256, "batch_size": 8}
        small |= {"batch_size": 2, "block_size": 64, "validation_blocks": 2} if args.quick else {}
        files = [None if paths is None else tuple(paths) for paths in (args.train_file, args.validation_file)]
        settings = Settings(*files, *size, **small, device=str(common.pick_device(args.device)))
        _, values = ablation.load(settings)
        runs = sweeps.runs_of({"mamba": ROW}, ["mamba"], args)
        sweeps.sweep(
            runs,
            args.runs_dir,
            args.processes,
            functools.partial(perform, settings),
            lambda run: values | {"definition": definition()},
            METRIC,
        )
    records = sweeps.collect(args.runs_dir)
    device, report = common.start("selective_states", args, **records[0]["settings"])
    report["whole"] = sweep_tables.mean([r[METRIC]["1"] for r in records if not r["diverged"]])
    report["results"] = summarise(records)
    print(f"\nAll states: {sweep_tables.shown(report['whole'])} bits per byte")
    rows = [
        [r["way"].replace(" ", "_"), r["states"], *(sweep_tables.shown(r[name]) for name in ("bits_per_byte", "loss"))]
        for r in report["results"]
    ]
    common.table("way states bits_per_byte loss", rows)
    write_figure(common.report_path(report, args, device).with_suffix(".png"), draw(report["results"]))
    return common.finish(report, args, device)


if __name__ == "__main__":
    main()
