# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Does a budget keep a deadline when another process takes the core?

    python -m benchmarks.deadline --model hub_configs/essm-novels-6m

The model writes on one core, pinned to it, for --seconds each of: alone, beside a second process that computes on the
same core, and alone again. It does so with `DeadlineBudget`, then at its full size. The deadline is --milliseconds, or
1.25 times what a step at full size took before. Beside the report lies a picture of time and budget.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor

from essm_train.files import write_figure
from modeling_essm import ESSMForCausalLM
from modeling_essm.decoding import DeadlineBudget

from . import common

PHASES = ("alone", "beside another", "alone again")
SLACK = 1.25
BIN = 0.1  # seconds that a point of the picture stands for
PROMPT = b"She looked at him, and"
COLOURS = {"DeadlineBudget": "tab:blue", "full size": "tab:gray"}


def write(model: ESSMForCausalLM, budget_of: Callable[[int], int], seconds: float, nice: int) -> np.ndarray:
    """(steps, 3): when each step began, in seconds from the first one's end, how long it took, and its budget."""
    starts: list[tuple[float, int]] = []
    other: subprocess.Popen | None = None

    def timed(step: int) -> int:
        starts.append((time.perf_counter(), budget_of(step)))
        return starts[-1][1]

    def stop(ids: Tensor, scores: Any, **_: Any) -> Tensor:
        nonlocal other
        phase = int((time.perf_counter() - starts[min(1, len(starts) - 1)][0]) / seconds)
        if phase == 1 and other is None:
            other = subprocess.Popen([sys.executable, "-c", f"import os; os.nice({nice})\nwhile True: pass"])
        elif phase > 1 and other is not None:
            other.kill()
        return torch.full((len(ids),), phase >= len(PHASES), device=ids.device)

    ids = torch.tensor([list(PROMPT)])
    options: dict[str, Any] = {"max_new_tokens": 1 << 20, "do_sample": True, "eos_token_id": None}
    try:
        model.generate(ids, step_budgets=timed, stopping_criteria=[stop], **options)
    finally:
        if other is not None:
            other.kill()
            other.wait()
    at, budgets = np.array(starts[1:]).T
    return np.stack([at[:-1] - at[0], np.diff(at), budgets[:-1]], 1)


def binned(steps: np.ndarray) -> dict[str, list[float]]:
    """Means of the steps that began within each BIN."""
    groups = [steps[steps[:, 0] // BIN == i] for i in np.unique(steps[:, 0] // BIN)]
    means = np.array([group.mean(0) for group in groups]).round(5)
    return {name: column.tolist() for name, column in zip(("at", "seconds", "budget"), means.T)}


def draw(report: dict[str, Any], path: Path) -> None:
    settings = report["settings"]
    figure = Figure(figsize=(8, 4.6), layout="constrained")
    times, budgets = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    for name, series in report["series"].items():
        milliseconds = 1e3 * np.array(series["seconds"])
        times.plot(series["at"], milliseconds, color=COLOURS[name], label=name)
        budgets.plot(series["at"], series["budget"], color=COLOURS[name])
    times.axhline(settings["milliseconds"], color="tab:red", linestyle="--", linewidth=1, label="deadline")
    for axes in (times, budgets):
        axes.axvspan(settings["seconds"], 2 * settings["seconds"], color="black", alpha=0.07, linewidth=0)
        axes.grid(alpha=0.3)
    times.set(ylabel="ms a token", ylim=(0, None))
    times.legend(loc="upper right")
    budgets.set(
        ylabel=f"budget K, means of {BIN} s",
        xlabel="seconds; in the shaded part a second process computes on the same core",
    )
    budgets.set_yticks(settings["budgets"])
    write_figure(path, figure)


def main(argv: list[str] | None = None) -> dict[str, Any]:
    p = common.parser(__doc__, rounds=None, on_cpu=True)
    p.add_argument("--model", type=Path, required=True, help="saved language model of bytes")
    p.add_argument(
        "--milliseconds", type=common.above_zero, help=f"deadline of a token; default {SLACK} of a step at full size"
    )
    p.add_argument("--seconds", type=common.above_zero, default=4.0, help="of each of the three phases")
    p.add_argument("--nice", type=int, default=4, help="of the second process; at 0 it takes half of the core")
    args = p.parse_args(argv)
    if not hasattr(os, "sched_setaffinity"):
        raise SystemExit("this benchmark pins processes to a core, which this system cannot")
    torch.manual_seed(0)
    model = ESSMForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    allowed, seconds = os.sched_getaffinity(0), 0.3 if args.quick else args.seconds
    os.sched_setaffinity(0, {min(allowed)})
    try:
        with common.threads(1):
            measured = DeadlineBudget(model, 1e6).seconds
            milliseconds = args.milliseconds or 1e3 * SLACK * measured[max(measured)]
            shape = {
                "config": common.name_of(args.model),
                "budgets": [*measured],
                "seconds": seconds,
                "nice": args.nice,
            }
            _, report = common.start("deadline", args, milliseconds=milliseconds, **shape, threads=1)
            runs: dict[str, Callable[[int], int]] = {"DeadlineBudget": DeadlineBudget(model, milliseconds, measured)}
            runs["full size"] = lambda step: max(measured)
            taken = {name: write(model, budget_of, seconds, args.nice) for name, budget_of in runs.items()}
    finally:
        os.sched_setaffinity(0, allowed)
    report["alone_seconds"] = measured
    report["results"] = [
        {"run": name, "phase": phase, "seconds_per_token": part[:, 1].mean(), "budget": part[:, 2].mean()}
        | {"tokens": len(part), "changes": int((np.diff(part[:, 2]) != 0).sum())}
        for name, steps in taken.items()
        for i, phase in enumerate(PHASES)
        if len(part := steps[steps[:, 0] // seconds == i])
    ]
    report["series"] = {name: binned(steps) for name, steps in taken.items()}
    draw(report, args.report.with_suffix(".png"))
    return common.finish(report, args)


if __name__ == "__main__":
    main()
