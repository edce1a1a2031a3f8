# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""How Hankel singular values move while a model trains (CompreSSM, Lemma 3.1 and Fig. 2, 5-8).

Truncation in training rests on their order staying what it is. One update turns the Hankel operator H into H', and

    |sigma_i' - sigma_i| <= ||H' - H||  for all i         (Weyl; Lemma 3.1)

The tracker records, layer by layer and step by step: sigma, the right-hand side, the largest movement of a sigma, the
smallest gap between neighbours, the share of the bottom r in the sum, and order swaps. A direction is followed from one
step to the next by its input-side singular function v_i: the matrix |<v_i, v_j'>|^2 is matched by linear assignment,
and a swap is a pair of matched directions whose order is reversed.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..systems import DiagonalSystem, check_stable, diagonal_layers
from .balancing import NOISE, balance, cross_gramian, gramians, matrices
from .training import unwrap

FIGURES = ("distance", "movement", "gap", "swaps", "bottom_share")  # one number for each step


def hankel_distance(one: DiagonalSystem, other: DiagonalSystem) -> float:
    """||H - H'||, the largest singular value of the difference of the Hankel operators of two systems.

    Their numbers of modes may differ, their inputs and outputs not. Raises ValueError for a mode outside the unit
    circle, or for systems with a recurrence for each channel (take `channels` of them).
    """
    if one.siso or other.siso:
        raise ValueError("hankel_distance takes systems of lam (n,); use `channels` for one recurrence per channel")
    check_stable(one)
    check_stable(other)
    lam, B, C = (torch.cat(pair, dim) for pair, dim in zip(zip(matrices(one), matrices(other)), (0, 0, 1)))
    C = C * torch.cat([torch.ones_like(one.lam.real), -torch.ones_like(other.lam.real)])
    sigma = balance(cross_gramian(lam, B, lam, B), cross_gramian(lam.conj(), C.mH, lam.conj(), C.mH)).sigma
    return float(sigma[0]) if len(sigma) else 0.0


def direction_overlaps(one: DiagonalSystem, other: DiagonalSystem) -> Tensor:
    """|<v_i, v_j'>|^2 (n, n') of the input-side singular functions v_i of two Hankel operators.

    With C = [B, A B, A^2 B, ..] the v_i are the rows of Sigma^(-1/2) T^+ C, and C C'^H has a closed form. Directions
    whose sigma is rounding have rows and columns of zeros.
    """
    halves = []
    for system in (one, other):
        balancing = balance(*gramians(system))
        root = torch.where(balancing.sigma > NOISE * balancing.sigma[:1], balancing.sigma, torch.inf)
        halves.append(balancing.reduced / root[:, None])  # Sigma^(-1/2) T^+ = Sigma^(-1) U^H Lo^H
    cross = cross_gramian(one.lam, matrices(one)[1], other.lam, matrices(other)[1])
    return (halves[0] @ cross @ halves[1].mH).abs().square()


def linear_assignment(scores: np.ndarray) -> np.ndarray:
    """The column of each row such that columns are distinct and the sum of scores is largest.

    Rows enter one by one, each along the cheapest path that alternates between unmatched and matched pairs
    (Jonker and Volgenant 1987): O(n^3).

    Args:
        scores: (n, m) finite, n <= m.
    Returns:
        (n,) integers.
    """
    n, m = scores.shape
    if n > m or not np.isfinite(scores).all():
        raise ValueError(f"scores must be finite and of no more rows than columns, got {scores.shape}")
    cost = -np.asarray(scores, dtype=float)
    rows, columns = np.zeros(n), np.zeros(m)  # dual prices
    owner = np.full(m, -1)
    for start in range(n):
        nearest, before = np.full(m, np.inf), np.full(m, -1)
        open_columns, row, column, length = np.ones(m, dtype=bool), start, -1, 0.0
        visited_rows = [(start, 0.0)]
        while True:
            through = length + cost[row] - rows[row] - columns
            better = open_columns & (through < nearest)
            nearest[better], before[better] = through[better], column
            column = int(np.argmin(np.where(open_columns, nearest, np.inf)))
            open_columns[column], length = False, nearest[column]
            if owner[column] < 0:
                break
            row = int(owner[column])
            visited_rows.append((row, length))
        for visited, at in visited_rows:
            rows[visited] += length - at
        closed = ~open_columns
        columns[closed] -= length - nearest[closed]
        while column >= 0:  # shift the matches along the path
            previous = int(before[column])
            owner[column] = start if previous < 0 else owner[previous]
            column = previous
    assigned = np.full(n, -1)
    assigned[owner[owner >= 0]] = np.flatnonzero(owner >= 0)
    return assigned


def count_swaps(assigned: Sequence[int] | np.ndarray) -> int:
    """Pairs i < j whose directions have changed their order."""
    order = np.asarray(assigned)
    return int(np.triu(order[:, None] > order[None, :], 1).sum())


class HankelTracker:
    """Records a model's layers with many inputs and outputs: call it after each update, then `save` or `plot_tracking`.

    Args:
        model: read at each call. bottom: share of the modes that count as the bottom ones, r = round(bottom n).
    Attributes:
        steps: of each call. sigma: by layer, a list of (n,) arrays; n may fall on the way.
        figures: by layer and by name in FIGURES, a list of numbers: NaN at the first step, and for all but
            bottom_share and gap after a change of n. A gap counts neighbours above rounding only.
    Raises:
        ValueError: no such layer, bottom outside (0, 1).
    """

    def __init__(self, model: nn.Module, bottom: float = 0.5):
        if not 0.0 < bottom < 1.0:
            raise ValueError(f"bottom must be in (0, 1), got {bottom}")
        self.model, self.bottom = unwrap(model), bottom
        names = [layer.name for layer in diagonal_layers(self.model) if not layer.read().siso]
        if not names:
            raise ValueError("tracking needs a layer with lti() and set_lti() whose lam is (n,), the model has none")
        self.steps: list[int] = []
        self.sigma: dict[str, list[np.ndarray]] = {name: [] for name in names}
        self.figures: dict[str, dict[str, list[float]]] = {name: {f: [] for f in FIGURES} for name in names}
        self._last: dict[str, DiagonalSystem] = {}

    def __call__(self, step: int) -> None:
        """Record the present weights. Raises ValueError for a mode outside the unit circle."""
        self.steps.append(step)
        layers = {layer.name: layer for layer in diagonal_layers(self.model)}
        for name in self.sigma:
            system = layers[name].read()
            values = dict.fromkeys(FIGURES, float("nan"))
            sigma = np.empty(0)
            if system.modes:  # a layer can have lost all
                sigma = balance(*gramians(system)).sigma.numpy()
                values |= self._at(sigma)
            last = self._last.get(name)
            if system.modes and last is not None and len(last.lam) == len(system.lam):
                values |= {
                    "distance": hankel_distance(last, system),
                    "movement": float(np.abs(sigma - self.sigma[name][-1]).max()),
                    "swaps": float(count_swaps(linear_assignment(direction_overlaps(last, system).numpy()))),
                }
            for figure, value in values.items():
                self.figures[name][figure].append(value)
            self.sigma[name].append(sigma)
            self._last[name] = system

    def _at(self, sigma: np.ndarray) -> dict[str, float]:
        r, total = round(self.bottom * len(sigma)), sigma.sum()
        real = sigma[sigma > NOISE * sigma[0]]
        return {
            "gap": float(np.diff(-real).min()) if len(real) > 1 else float("nan"),
            "bottom_share": float(sigma[len(sigma) - r :].sum() / total) if total > 0 else 0.0,
        }

    def arrays(self) -> dict[str, np.ndarray]:
        """steps (S,), and for each layer `name/sigma` (S, n), NaN where a layer has shrunk, and `name/figure` (S,)."""
        found = {"steps": np.array(self.steps)}
        for name, rows in self.sigma.items():
            sigma = np.full((len(rows), max(map(len, rows), default=0)), np.nan)
            for row, values in zip(sigma, rows):
                row[: len(values)] = values
            found[f"{name}/sigma"] = sigma
            found |= {f"{name}/{figure}": np.array(values) for figure, values in self.figures[name].items()}
        return found

    def save(self, path: str | Path) -> None:
        """Write `arrays` as .npz, or as .json with null for NaN. Raises ValueError for another suffix."""
        path = Path(path)
        if path.suffix == ".npz":
            np.savez_compressed(path, **self.arrays())  # type: ignore[arg-type]
        elif path.suffix == ".json":
            lists = {name: _plain(array.tolist()) for name, array in self.arrays().items()}
            path.write_text(json.dumps(lists, allow_nan=False))
        else:
            raise ValueError(f"path must end with .npz or .json, got {str(path)!r}")


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return None if value != value else value


def plot_tracking(tracked: dict[str, np.ndarray], layer: str) -> Any:
    """A matplotlib Figure of one layer of `HankelTracker.arrays`: sigma over steps, movement and its bound beside the
    gap, swaps. Needs matplotlib; raises KeyError for an unknown layer."""
    from matplotlib.figure import Figure

    steps, sigma = tracked["steps"], tracked[f"{layer}/sigma"]
    figure = Figure(figsize=(8, 8), layout="constrained")
    top, middle, bottom = figure.subplots(3, 1, sharex=True)
    top.semilogy(steps, sigma, linewidth=0.8)
    top.set_ylabel("Hankel singular values")
    for name, label in (
        ("distance", "bound $\\|H' - H\\|$"),
        ("movement", "largest movement"),
        ("gap", "smallest gap"),
    ):
        middle.semilogy(steps, tracked[f"{layer}/{name}"], label=label)
    middle.set_ylabel("per update")
    middle.legend()
    bottom.plot(steps, tracked[f"{layer}/swaps"], ".", label="order swaps")
    share = bottom.twinx()
    share.plot(steps, tracked[f"{layer}/bottom_share"], color="tab:orange", label="share of the bottom")
    share.set_ylabel("share of the bottom modes", color="tab:orange")
    share.set_ylim(bottom=0)
    bottom.set_ylabel("order swaps")
    bottom.set_xlabel("update")
    top.set_title(layer or "model")
    return figure
