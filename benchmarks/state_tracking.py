# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Does the order of a layer's Hankel singular values settle early enough to truncate in the warm-up (Lemma 3.1)?

    python -m benchmarks.state_tracking --data_dir data
    python -m benchmarks.state_tracking --quick --data_dir data

An LRU of one block reads MNIST averaged to 14 x 14 pixel by pixel; `HankelTracker` looks at it after every update, with
8 modes and with 64. Told for the warm-up (a tenth of the run), the rest of the first half, and the second half: in what
share of the updates no singular value moved further than the bound of the lemma (it must be all); in what share twice
the bound is below the smallest gap, so that the lemma alone says that the order stayed; in what share it stayed; swaps
an update; and the share of the sum that the bottom half holds, which is what a truncation throws away. The modes that
are the bottom half when the warm-up ends are followed to the end of the run by their overlaps, and it is told how many
are there still.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from . import classification_tasks, common
from .state_truncation import METRIC, RATE, TASKS, Settings, trained
from .sweeps import Run

SIZES = (8, 64)


class Follower:
    """A tracker that is made at the first update, and that remembers the system where the warm-up ends."""

    def __init__(self, warmup: int):
        self.warmup = warmup
        self.tracker: Any = None
        self.early: Any = None
        self.last: Any = None

    def __call__(self, model: nn.Module, optimizer: Any, update: int) -> None:
        from modeling_essm.companions import HankelTracker
        from modeling_essm.companions.truncation.models import diagonal_layers, read_layer

        if self.tracker is None:
            self.tracker = HankelTracker(model)
        self.tracker(update)
        (layer,) = diagonal_layers(model).values()
        self.last = read_layer(layer)
        if update == self.warmup:
            self.early = self.last


def phases(updates: int, warmup: int) -> dict[str, slice]:
    """Rows of the tracker's figures; the first row has nothing before it."""
    half = updates // 2
    return {"warm-up": slice(1, warmup), "first half": slice(warmup, half), "second half": slice(half, updates)}


def summarise(figures: dict[str, np.ndarray], rows: slice) -> dict[str, float]:
    """What the module's text lists, of one layer's figures over those updates."""
    distance, movement, gap, swaps = (figures[name][rows] for name in ("distance", "movement", "gap", "swaps"))
    return {
        "within_bound": float((movement <= distance * (1 + 1e-6)).mean()),
        "order_proved": float((2 * distance < gap).mean()),
        "order_kept": float((swaps == 0).mean()),
        "swaps_an_update": float(swaps.mean()),
        "median_movement_over_gap": float(np.median(movement / gap)),
        "bottom_share": float(figures["bottom_share"][rows][-1]),
    }


def still_there(early: Any, last: Any) -> float:
    """Of the bottom half of the early directions, the share whose counterpart is in the bottom half at the end.

    A direction's counterpart is that of `direction_overlaps`, matched by linear assignment.
    """
    from modeling_essm.companions.truncation.tracking import direction_overlaps, linear_assignment

    assigned = linear_assignment(direction_overlaps(early, last).numpy())
    bottom = assigned[len(assigned) // 2 :]
    return float((bottom >= len(assigned) // 2).mean())


def measure(settings: Settings, seed: int) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """One run: what is told of it, and all that was tracked. Raises RuntimeError if it diverged."""
    follower = Follower(settings.warmup)
    run = Run("full", RATE, seed, "digits")
    sizes = [settings.state_size] * settings.num_hidden_layers
    record = trained(settings, run, TASKS["digits"], sizes, follower)
    arrays = follower.tracker.arrays()
    (layer,) = follower.tracker.sigma
    figures = {name.removeprefix(f"{layer}/"): values for name, values in arrays.items()}
    if record["diverged"]:
        raise RuntimeError(f"the run of {settings.state_size} modes diverged at seed {seed}")
    result: dict[str, Any] = {"modes": settings.state_size, "seed": seed, "accuracy": 1 - record[METRIC]}
    result |= {"still_in_the_bottom": still_there(follower.early, follower.last)}
    spans = phases(settings.updates, settings.warmup)
    return result | {"phases": {name: summarise(figures, rows) for name, rows in spans.items()}}, arrays | {
        "layer": layer
    }


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Train and track every size at every seed, print, draw the first seed of each, write."""
    from essm_train.files import write_figure
    from modeling_essm.companions import plot_tracking

    p = common.parser(__doc__)
    p.add_argument("--data_dir", help="data folders, separated as in PATH; by default $ESSM_DATA, or data")
    p.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    p.add_argument("--updates", type=int, default=2000)
    args = p.parse_args(argv)
    if args.updates < 20:
        p.error(f"--updates must be at least 20, got {args.updates}")
    settings = Settings(args.data_dir, args.updates, test_samples=1000, device=str(common.pick_device(args.device)))
    if args.quick:
        settings = dataclasses.replace(settings, updates=20, test_samples=20, quick=True)
    device, report = common.start("state_tracking", args, **settings.values(), seeds=args.seeds)
    out: Path = common.report_path(report, args, device)
    report["data"] = classification_tasks.load(settings.data(), TASKS["digits"].name).identity
    report["results"] = []
    with common.threads(1):
        for modes in SIZES:
            for seed in args.seeds[: 1 if args.quick else None]:
                result, arrays = measure(dataclasses.replace(settings, state_size=modes), seed)
                report["results"].append(result)
                if seed == args.seeds[0]:
                    figure = plot_tracking(arrays, str(arrays["layer"]))
                    figure.axes[0].set_title(f"{modes} modes, seed {seed}")
                    write_figure(out.with_name(f"{out.stem}_{modes}.png"), figure)
    rows = []
    for result in report["results"]:
        for name, found in result["phases"].items():
            head = [result["modes"], result["seed"], f"{result['accuracy']:.3f}", name.replace(" ", "_")]
            rows.append([*head, *found.values(), result["still_in_the_bottom"]])
    names = [*next(iter(report["results"][0]["phases"].values()))]
    common.table(f"modes seed accuracy phase {' '.join(names)} still_in_the_bottom", rows)
    return common.finish(report, args, device)


if __name__ == "__main__":
    main()
