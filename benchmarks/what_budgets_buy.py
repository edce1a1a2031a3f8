# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""How far back does a budget K reach: by what the first K filters span, and by what trained models remember?

    python -m benchmarks.what_budgets_buy                # 13 short runs, then report and figure

Exact part. The share of energy of a response h(tau) that the span of the first K filters holds is |Phi^T h|^2 / |h|^2,
as the filters are orthonormal: for the impulse at lag tau (a delay), exp(-lag / tau) and a window of tau steps. The
horizon of K is the tau up to which the share is at least a level, `growth` its factor per channel. Beside it stands the
error of the best linear read-out of a delay from the features of noise.

Trained part. An elastic model of 8 channels for every delay, and its error at every budget, which is also the width
that it runs. Noise is white, of at most 0.01 cycles a step, or of at most one cycle per delay. Runs are those of
`benchmarks.memory_probes`.
"""

from __future__ import annotations

import argparse
import itertools
import math
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from essm_train.files import write_figure
from modeling_essm.spectral_basis import spectral_basis

from . import common, memory_probes, sweeps
from .sweeps import Sweep

BUDGETS = (2, 3, 4, 6, 8, 12, 16, 24, 32)  # of the exact part
LENGTHS = (512, 4096, 32768)
LEVELS = {"impulse": 0.5, "exponential": 0.9, "window": 0.9}  # of the share, for a horizon
CLAIM = 1.9  # growth per channel, as earlier notes of the project had it
MODEL = "elastic"
NOISE = 1e-3


def delay(tau: int, band: float) -> str:
    """A task whose samples are twice as long as the delay, and at least 64."""
    kind, rest = ("delay-white", "") if band == 0.5 else ("delay-band", f",band={band:g}")
    return f"{kind}:length={max(64, 2 * tau)},tau={tau}{rest}"


DELAYS = {  # by the kind of noise
    "white": [delay(tau, 0.5) for tau in (1, 4, 16, 64)],
    "0.01 cycles a step": [delay(tau, 0.01) for tau in (16, 64, 256, 1024)],
    "one cycle per delay": [delay(tau, 1 / tau) for tau in (4, 16, 64, 256, 1024)],
}
QUICK = {"white": [delay(1, 0.5)], "one cycle per delay": [delay(4, 0.25)]}


def shares(filter_length: int, num_channels: int, kind: str, taus: np.ndarray) -> np.ndarray:
    """(T, K): of the energy of the response with each tau, what the first 1, 2, .., K filters span.

    Args:
        kind: "impulse", "exponential" or "window". taus: (T,), integers in [0, H) of the impulse, [1, H] of the window.
    """
    phi = spectral_basis(filter_length).filters(num_channels)
    if kind == "impulse":
        return np.cumsum(phi[taus.astype(int)] ** 2, 1)
    if kind == "window":
        return np.cumsum(np.cumsum(phi, 0)[taus.astype(int) - 1] ** 2, 1) / taus[:, None]
    parts = []
    for block in np.array_split(taus, max(1, len(taus) * filter_length // 2**22)):
        h = np.exp(-np.arange(filter_length) / block[:, None])
        parts.append(np.cumsum((h @ phi) ** 2, 1) / (h**2).sum(1)[:, None])
    return np.concatenate(parts)


def horizon(taus: np.ndarray, share: np.ndarray, level: float) -> float:
    """The last tau (ascending) before the share first falls below the level: 0 if at once, inf if never."""
    below = np.flatnonzero(share < level)
    if not len(below):
        return math.inf
    return float(taus[below[0] - 1]) if below[0] else 0.0


def horizons(filter_length: int, kind: str) -> dict[str, Any]:
    """The horizon of every budget, and growth: the factor per channel from the budget before, or None.

    Exponentials are looked at up to a time constant of H / 4: what lies beyond H is then 3e-4 of their energy.
    """
    last = {"impulse": filter_length - 1, "window": filter_length, "exponential": filter_length / 4}[kind]
    taus = np.geomspace(0.5, last, 2000)
    if kind != "exponential":
        taus = np.unique(np.maximum(1, taus.round()))
    held = shares(filter_length, max(BUDGETS), kind, taus)
    found = {K: horizon(taus, held[:, K - 1], LEVELS[kind]) for K in BUDGETS}
    growth = {}
    for K, after in itertools.pairwise(BUDGETS):
        known = found[K] > 0 and found[after] < math.inf
        growth[f"{K} to {after}"] = (found[after] / found[K]) ** (1 / (after - K)) if known else None
    shown = {str(K): value if value < math.inf else None for K, value in found.items()}
    return {"filter_length": filter_length, "response": kind, "level": LEVELS[kind], "horizon": shown, "growth": growth}


def readout_errors(filter_length: int, band: float, tau: int) -> dict[str, float]:
    """Relative error of the best linear read-out of x(t - tau) from K features of noise up to `band` cycles a step.

    With real c, E |x(t - tau) - sum_k c_k (phi_k * x)(t)|^2 is the mean over the noise's frequencies of
    |e^{-i w tau} - sum_k c_k Phi_k(w)|^2, here at those of the 2 H evenly spaced ones. White noise of variance NOISE
    on the input adds NOISE |c|^2, as the filters are orthonormal: without it, differences of nearly equal features
    would tell all of a smooth signal's past.
    """
    steps = np.arange(filter_length + 1) / (2 * filter_length)
    inside = np.flatnonzero((steps > 0) & (steps <= band) | (band == 0.5))
    weight = np.where((inside == 0) | (inside == filter_length), 0.5, 1.0)  # these have no mirror image
    root = np.sqrt(weight / weight.sum())
    phi = spectral_basis(filter_length).filters(max(BUDGETS))
    response = root[:, None] * np.fft.rfft(phi, 2 * filter_length, axis=0)[inside]  # (F, K)
    wanted = root * np.exp(-2j * np.pi * steps[inside] * tau)
    target = np.concatenate([wanted.real, wanted.imag, np.zeros(max(BUDGETS))])
    matrix = np.concatenate([response.real, response.imag, math.sqrt(NOISE) * np.eye(max(BUDGETS))])
    errors = {}
    for K in BUDGETS:
        solution = np.linalg.lstsq(matrix[:, :K], target, rcond=None)[0]
        errors[str(K)] = float(np.square(target - matrix[:, :K] @ solution).sum())
    return errors


def analytic(names: list[str], lengths: tuple[int, ...], filter_length: int) -> dict[str, Any]:
    errors = []
    for name in names:
        task: Any = sweeps.choose_task(memory_probes.TASKS, name)
        found = readout_errors(filter_length, task.band, task.tau)
        errors.append({"task": name, "tau": task.tau, "band": task.band, "error": found})
    return {"horizons": [horizons(H, kind) for kind in LEVELS for H in lengths], "readout_errors": errors}


def draw(results: dict[str, Any], delays: dict[str, list[str]], filter_length: int) -> Figure:
    """Error against K, a panel for each kind of noise and a line for each delay; and the horizons."""
    figure = Figure(figsize=(10.5, 7.6), layout="constrained")
    panels = figure.subplots(2, 2).flatten()
    exact = {row["task"]: row for row in results["analytic"]["readout_errors"]}
    trained = {row["task"]: row.get("error", {}) for row in results["trained"]}
    for axes, (kind, names) in zip(panels, delays.items()):
        for i, name in enumerate(names):
            axes.plot(BUDGETS, [*exact[name]["error"].values()], ":", color=f"C{i}", linewidth=1.2)
            errors = {int(K): error["mean"] for K, error in trained.get(name, {}).items()}
            style: dict[str, Any] = {"color": f"C{i}", "markersize": 3.5, "label": f"{exact[name]['tau']}"}
            axes.plot(list(errors), list(errors.values()), "o-", **style)
        axes.set(title=f"noise: {kind}", xlabel="budget K", ylabel="squared error / variance")
        axes.set(xscale="log", yscale="log", ylim=(1e-5, 4))
        title = "delay, trained (dotted: linear read-out)"
        axes.legend(title=title, fontsize=8, title_fontsize=8, ncols=5, loc="lower left")
    for axes in panels[:3]:
        axes.set_xticks((1, *BUDGETS), [str(K) for K in (1, *BUDGETS)])
        axes.minorticks_off()
    axes = panels[3]
    labels = {"impulse": "impulse, half", "exponential": "exponential, 90%", "window": "window, 90%"}
    for row in results["analytic"]["horizons"]:
        if row["filter_length"] == filter_length:
            held = {int(K): value for K, value in row["horizon"].items() if value}
            axes.plot(list(held), list(held.values()), "o-", markersize=3.5, label=labels[row["response"]])
    few = [K for K in BUDGETS if K <= 12]
    line = [6.3 * CLAIM ** (K - 2) for K in few]  # through the exponential's at K = 2
    axes.plot(few, line, "--", color="gray", linewidth=1, label=f"{CLAIM} per channel")
    axes.set(title="horizon of the first K filters (exact)", xlabel="budget K", ylabel="steps", yscale="log")
    axes.legend(fontsize=8)
    return figure


def main(argv: list[str] | None = None) -> dict[str, Any]:
    p = common.parser(__doc__, rounds=None)
    sweeps.add_arguments(p, {MODEL: None}, "runs/what_budgets_buy", 300, rate=5e-3, seeds=[0])
    p.add_argument("--parameters", type=common.positive, default=30_000, help="of every model")
    args: argparse.Namespace = p.parse_args(argv)
    delays, filter_length, lengths = (QUICK, 512, (512,)) if args.quick else (DELAYS, 4096, LENGTHS)
    args.tasks = args.usual_tasks = [name for group in delays.values() for name in group]
    fields: Any = {"parameters": args.parameters, "updates": args.updates}
    if args.quick:
        fields = {"parameters": 12_000, "updates": min(args.updates, 3), "positions": 128, "held_out": 128}
    settings = memory_probes.Settings(**fields, device=str(common.pick_device(args.device)))
    sweep = Sweep(settings, memory_probes.perform, memory_probes.define, memory_probes.METRIC)
    records, report = sweeps.run("what_budgets_buy", args, sweep)
    results: dict[str, Any] = {"analytic": analytic(args.tasks, lengths, filter_length)}
    results["trained"] = sweeps.summarise_all(records, memory_probes.METRIC)
    for rows in (*results["analytic"].values(), results["trained"]):
        common.table(rows)
    figure = draw(results, delays, filter_length)
    write_figure(args.report.with_suffix(".png"), figure, dpi=130)
    return common.finish(report | {"results": results}, args)


if __name__ == "__main__":
    main()
