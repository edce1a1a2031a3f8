# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""The two streams that elastic state models are compared on: batches to learn from, and what is measured of a model.

Letters: B batch, L positions of a stream.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from essm_train.tasks import chains, mazes

Depths = Callable[[int], Any]  # refine_depth of a position; gives None for the gate's own


@dataclass
class Measured:
    """What a model did on test streams.

    Attributes:
        values: the metrics. depths: (B, L) int64, the K of each position. losses: (B, L), the objective of proposals.
        difficult: (B, L) bool. real: (B, L) bool, positions that exist.
    """

    values: dict[str, float]
    depths: Tensor
    losses: Tensor
    difficult: Tensor
    real: Tensor


class Repair:
    """Loops of real protein chains (`essm_train.tasks.chains`); the metric is the energy, the lower the better."""

    features, readouts, metric, longer = chains.FEATURES, 3, "energy", 1

    def __init__(self, data_dir: str | Path, test_windows: int = 44):
        self.train, held_out = chains.read_chains(Path(data_dir) / "protein_chains")
        self.test = chains.collate(chains.fixed_windows(held_out)[:test_windows])
        self.identity = {"train_chains": len(self.train), "test_windows": len(self.test["loop"])}

    def objective(self) -> Any:
        return chains.RepairEnergy()

    def batch(self, rng: np.random.Generator, size: int, model: Any) -> dict[str, Any]:
        return chains.collate([chains.draw(self.train, rng) for _ in range(size)])

    def loss(self, output: Any, batch: dict[str, Any]) -> Tensor:
        """(): squared distance from the native steps, in training alone."""
        return (output.readouts - batch["native"]).square().sum(-1).mean()

    @torch.no_grad()
    def measure(self, model: Any, **dials: Any) -> Measured:
        test = self.test
        output = model(test["input_features"], test["observations"], **dials)
        values = chains.quality(output.readouts, output.losses, test)
        real = torch.ones_like(test["loop"])
        return Measured(values, output.refine_depths, output.proposal_losses, test["loop"], real)

    @torch.no_grad()
    def references(self) -> dict[str, dict[str, float]]:
        """The metrics of the test windows "as read", with their disturbed loops, and of the "native" ones."""
        observations, objective = self.test["observations"], self.objective()
        found = {}
        for name, steps in {"as read": observations["step"], "native": self.test["native"]}.items():
            history, energies = objective.initial_history({n: x[:, 0] for n, x in observations.items()}), []
            for t in range(steps.shape[1]):
                seen = {n: x[:, t] for n, x in observations.items()}
                energies.append(objective(steps[:, t], seen, history))
                history = objective.commit(history, steps[:, t], seen)
            found[name] = chains.quality(steps, torch.stack(energies, 1), self.test)
        return found

    def stream(self) -> tuple[Tensor, Any]:
        """Features (L, F) and observations of one test window, to time steps on."""
        return self.test["input_features"][0], {name: x[0] for name, x in self.test["observations"].items()}


class Maze:
    """Mazes of 11 x 11 (`essm_train.tasks.mazes`); the metric is the share of unseen ones that are not solved."""

    features, readouts, metric, side, length = mazes.FEATURES, mazes.READOUTS, "failures", 11, 40
    longer = 4  # updates over those of a table: after as many as chains need, half of the walkers are still lost

    def __init__(self, data_dir: str | Path = "", test_mazes: int = 100):
        self.test_mazes = test_mazes
        self.identity = {"side": self.side, "test_mazes": test_mazes, "longer": self.longer}

    def objective(self) -> Any:
        return mazes.ValueConsistency(self.side)

    def batch(self, rng: np.random.Generator, size: int, model: Any) -> dict[str, Any]:
        """Walks of 40 steps: half of the batches follow the expert, half its own proposals; 15% of steps are random.

        What comes after an arrival does not count.
        """
        walks = [mazes.new_walk(rng, self.side) for _ in range(size)]
        own, cache, training = rng.random() < 0.5, None, model.training
        model.eval()
        rows: list[dict[str, Tensor]] = []
        for _ in range(self.length):
            seen = mazes.stack([walk.observe() for walk in walks])
            seen["real"] = torch.tensor([not walk.arrived for walk in walks])
            seen["expert"] = torch.tensor([walk.expert() for walk in walks])
            actions = seen["expert"].tolist()
            if own:
                with torch.no_grad():
                    output = model.step(seen["features"], cache, observation_of(seen), refine_depth=0)
                cache = output.past_key_values
                actions = mazes.costs_and_values(output.readouts[:, 0], seen["view"]).argmin(-1).tolist()
            for walk, action in zip(walks, actions):
                if walk.arrived:
                    walk.stay()
                else:
                    walk.step(int(rng.integers(4)) if rng.random() < 0.15 else action)
            rows.append(seen)
        model.train(training)
        seen = {name: torch.stack([row[name] for row in rows], 1) for name in rows[0]}
        return {"input_features": seen["features"], "observations": observation_of(seen), **seen}

    def loss(self, output: Any, batch: dict[str, Any]) -> Tensor:
        """(): cross-entropy of the moves that the values speak for against the expert's, in training alone."""
        costs = mazes.costs_and_values(output.readouts, batch["view"]).clamp(max=100.0)
        each = F.cross_entropy(-costs.flatten(0, 1), batch["expert"].flatten(), reduction="none")
        real = batch["real"].flatten()
        return (each * real).sum() / real.sum().clamp(min=1)

    @torch.no_grad()
    def measure(self, model: Any, **dials: Any) -> Measured:
        """Streams of walkers that go where the values say, until all have arrived or are late.

        A tensor refine_depth (B, L) gives the depth of each position; beyond L it begins again.
        """
        rng = np.random.default_rng(12345)  # mazes that no training seed draws
        walks = [mazes.new_walk(rng, self.side) for _ in range(self.test_mazes)]
        depths = dials.pop("refine_depth", None)
        cache, kept = None, {name: [] for name in ("depths", "losses", "difficult", "real")}
        while not all(walk.arrived or walk.late for walk in walks):
            seen, t = mazes.stack([walk.observe() for walk in walks]), len(kept["real"])
            depth = depths[:, t % depths.shape[1]] if isinstance(depths, Tensor) else depths
            output = model.step(seen["features"], cache, observation_of(seen), refine_depth=depth, **dials)
            cache = output.past_key_values
            kept["real"].append(torch.tensor([not (walk.arrived or walk.late) for walk in walks]))
            kept["difficult"].append(torch.tensor([walk.difficult() for walk in walks]))
            kept["depths"].append(output.refine_depths[:, 0])
            kept["losses"].append(output.proposal_losses[:, 0])
            actions = mazes.costs_and_values(output.readouts[:, 0], seen["view"]).argmin(-1).tolist()
            for walk, action in zip(walks, actions):
                if walk.arrived or walk.late:
                    walk.stay()
                else:
                    walk.step(action)
        stacked = {name: torch.stack(values, 1) for name, values in kept.items()}
        failed = [walk for walk in walks if not walk.arrived]
        arrived = [walk.steps / walk.optimal for walk in walks if walk.arrived]
        values = {"failures": len(failed) / len(walks), "detour": float(np.mean(arrived)) if arrived else float("nan")}
        return Measured(values, **stacked)

    def stream(self) -> tuple[Tensor, Any]:
        """Features (L, F) and observations of one expert's walk, to time steps on."""
        walk, rows = mazes.new_walk(np.random.default_rng(7), self.side), []
        while not walk.arrived:
            rows.append(walk.observe())
            walk.step(walk.expert())
        seen = mazes.stack(rows)
        return seen["features"], observation_of(seen)


def observation_of(seen: dict[str, Tensor]) -> dict[str, Tensor]:
    """What the objective sees."""
    return {name: seen[name] for name in ("view", "goal", "moved")}


TASKS: dict[str, Any] = {"repair": Repair, "maze": Maze}
