# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""The two streams that elastic state models are compared on: batches to learn from, streams to choose a learning rate
by, which are neither learnt from nor tested on, and what is measured of a model.

In both a model acts and lives with what it did: the chain goes on from where it put the last residue, and the walker
from where it went. What an objective knows of that past, the place reached or the values said before, is an input of
every model, so that those without refinement see it too.
Letters: B batch, L positions of a stream, F features.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from . import chains, mazes

SET_ASIDE = 6  # every such training chain is for validation
Depths = Callable[[Tensor], Any]  # of which positions (B,) are difficult now: refine_depth, or None for the gate's own


def gate(difficult: Tensor) -> None:
    """The depths that the model's own gate asks for."""


def always(depth: int | None) -> Depths:
    """The same depth everywhere; the gate's own for None."""
    return gate if depth is None else lambda difficult: depth


@dataclass
class Measured:
    """What a model did on test streams.

    Attributes:
        values: the metrics. depths: (B, L) int64, the K of each position. losses, refined: (B, L), the objective of
            proposals, and of the states that were committed.
        errors: (B, L) of proposals, by what the objective does not see: distance in bonds of the step from the native
            one, or 1 where the move that they speak for is on no shortest way.
        difficult: (B, L) bool. real: (B, L) bool, positions that exist.
    """

    values: dict[str, float]
    depths: Tensor
    losses: Tensor
    refined: Tensor
    errors: Tensor
    difficult: Tensor
    real: Tensor


@contextlib.contextmanager
def evaluated(model: Any) -> Iterator[None]:
    training = model.training
    model.eval()
    with torch.no_grad():
        yield
    model.train(training)


def told_of(output: Any) -> dict[str, Tensor]:
    """(B,) each: what a step says of its depth and of the objective."""
    fields = (output.refine_depths, output.proposal_losses, output.losses)
    return {name: x[:, 0] for name, x in zip(("depths", "losses", "refined"), fields)}


def stacked(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.stack([row[name] for row in rows], 1) for name in rows[0]}


class Repair:
    """Loops of real protein chains (`benchmarks.chains`); the metric is the energy, the lower the better.

    Beside the chain as it was read every model is told how far it has drifted: where the chain as read is, less where
    its own ends.
    """

    features, readouts, metric, longer = chains.FEATURES + 3, 3, "energy", 1
    ahead = 1  # updates that a model comes through the streams of at once

    def __init__(self, data_dir: str | Path, test_count: int = 44):
        known, held_out = chains.read_chains(Path(data_dir) / "protein_chains")
        self.train = [chain for i, chain in enumerate(known) if i % SET_ASIDE]
        self.validation = chains.collate(chains.fixed_windows(known[::SET_ASIDE])[:test_count])
        self.test = chains.collate(chains.fixed_windows(held_out)[:test_count])
        self.identity: dict[str, Any] = {"train_chains": len(self.train), "test_windows": len(self.test["loop"])}
        self.identity |= {"validation_windows": len(self.validation["loop"]), "closed_loop": True}
        self.identity["sha256"] = hashlib.sha256(b"".join(map(np.ndarray.tobytes, known + held_out))).hexdigest()

    def objective(self) -> Any:
        return chains.RepairEnergy()

    def follow(
        self, model: Any, batch: dict[str, Any], depths: Depths = gate, errors: bool = False, **dials: Any
    ) -> dict[str, Tensor]:
        """The model along the chains of a batch, in eval mode: what it was given and what it said, (B, L, ..)."""
        place, cache, rows = torch.zeros_like(batch["native"][:, 0]), None, []
        with evaluated(model):
            for t in range(batch["native"].shape[1]):
                seen = {name: x[:, t] for name, x in batch["observations"].items()}
                given = torch.cat([batch["input_features"][:, t], seen["place"] - seen["step"] - place], 1)
                output = model.step(given, cache, seen, refine_depth=depths(batch["loop"][:, t]), **dials)
                cache, y = output.cache, output.readouts[:, 0]
                place = place + y
                rows.append({"features": given, "readouts": y} | told_of(output))
                if errors:
                    proposed = model.readout(output.proposals[:, 0]).to(y.dtype)
                    rows[-1]["errors"] = (proposed - batch["native"][:, t]).norm(dim=-1)
        return stacked(rows)

    def batch(self, rng: np.random.Generator, size: int, model: Any, depths: Depths = gate) -> dict[str, Any]:
        """Windows as the model, as it is now, comes through them."""
        batch = chains.collate([chains.draw(self.train, rng) for _ in range(size)])
        return batch | {"input_features": self.follow(model, batch, depths)["features"]}

    def loss(self, output: Any, batch: dict[str, Any]) -> Tensor:
        """(): squared distance from the native steps, in training alone."""
        return (output.readouts - batch["native"]).square().sum(-1).mean()

    def validate(self, model: Any, depths: Depths) -> float:
        found = self.follow(model, self.validation, depths)
        return chains.quality(found["readouts"], found["refined"], self.validation)[self.metric]

    def measure(self, model: Any, depths: Depths = gate, **dials: Any) -> Measured:
        found, loop = self.follow(model, self.test, depths, errors=True, **dials), self.test["loop"]
        values = chains.quality(found["readouts"], found["refined"], self.test)
        told = {name: found[name] for name in ("depths", "losses", "refined", "errors")}
        return Measured(values, **told, difficult=loop, real=torch.ones_like(loop))

    def stream(self, model: Any, index: int, depths: Depths) -> int:
        """Run the model along one test window, batch 1; its positions."""
        one: dict[str, Any] = {name: x[index : index + 1] for name, x in self.test.items() if isinstance(x, Tensor)}
        one["observations"] = {name: x[index : index + 1] for name, x in self.test["observations"].items()}
        return self.follow(model, one, depths)["readouts"].shape[1]

    @torch.no_grad()
    def references(self) -> dict[str, dict[str, float]]:
        """What a model finds that copies the test windows "as read", with their disturbed loops, or "native"."""
        observations, objective, found = self.test["observations"], self.objective(), {}
        for name, steps in {"as read": observations["step"], "native": self.test["native"]}.items():
            history, rows = objective.initial_history({n: x[:, 0] for n, x in observations.items()}), []
            for t in range(steps.shape[1]):
                seen = {n: x[:, t] for n, x in observations.items()}
                rows.append(objective(steps[:, t], seen, history))
                history = objective.commit(history, steps[:, t], seen)
            found[name] = chains.quality(steps, torch.stack(rows, 1), self.test)
        return found


class Maze:
    """Mazes of 11 x 11 (`benchmarks.mazes`); the metric is the share of unseen ones that are not solved.

    Beside what it sees every model is told what it said before of the cells in view, and of which it said something.
    """

    features, readouts, metric, side, length = mazes.FEATURES + 2 * 25, mazes.READOUTS, "failures", 11, 40
    longer = 4  # updates over those of a table: after as many as chains need, half of the walkers are still lost
    ahead = 4  # updates whose walks are walked at once
    test_seed, validation_seed = 12345, 54321  # mazes that no training seed draws

    def __init__(self, data_dir: str | Path = "", test_count: int = 44):
        self.test_mazes = 5 * test_count  # a maze says less than a window of a chain: solved, or not
        self.starts: dict[int, list[mazes.Walk]] = {}  # by seed
        self.identity = {"side": self.side, "test_mazes": self.test_mazes, "longer": self.longer}
        self.identity |= {"told_its_values": True, "ahead": self.ahead}

    def objective(self) -> Any:
        return mazes.ValueConsistency(self.side)

    def follow(
        self,
        model: Any,
        walks: list[mazes.Walk],
        depths: Depths = gate,
        errors: bool = False,
        act: Callable[[int, dict[str, Tensor]], Any] | None = None,
        **dials: Any,
    ) -> dict[str, Tensor]:
        """What walkers see, and what the model, in eval mode, says and does, (B, L, ..).

        Args:
            act: the actions at a position, of what is known there, for `length` positions; by default walkers go where
                the values say, until all have arrived or are late, after which positions do not exist.
        """
        memory, history, cache = self.objective(), None, None
        rows: list[dict[str, Tensor]] = []
        with evaluated(model):
            while len(rows) < self.length if act else not all(walk.arrived or walk.late for walk in walks):
                seen = mazes.stack([walk.observe() for walk in walks])
                here = observation_of(seen)
                history = memory.initial_history(here) if history is None else history
                said, known = memory.remembered(history, here)
                given = torch.cat([seen["features"], said / self.side, known.to(said.dtype)], 1)
                difficult = torch.tensor([walk.difficult() for walk in walks])
                output = model.step(given, cache, here, refine_depth=depths(difficult), **dials)
                cache, history = output.cache, memory.commit(history, output.readouts[:, 0], here)
                row = seen | told_of(output) | {"features": given, "difficult": difficult}
                row["expert"] = torch.tensor([walk.expert() for walk in walks])
                row["real"] = torch.tensor([not (walk.arrived or (not act and walk.late)) for walk in walks])
                row["actions"] = mazes.costs_and_values(output.readouts[:, 0], seen["view"]).argmin(-1)
                if errors:
                    proposed = model.readout(output.proposals[:, 0]).to(output.readouts.dtype)
                    moves = mazes.costs_and_values(proposed, seen["view"]).argmin(-1).tolist()
                    wrong = [walk.costs()[move] > walk.costs().min() for walk, move in zip(walks, moves)]
                    row["errors"] = torch.tensor(wrong, dtype=torch.float32)
                actions = act(len(rows), row) if act else row["actions"].tolist()
                rows.append(row)
                for walk, action, real in zip(walks, actions, row["real"].tolist()):
                    if real:
                        walk.step(action)
                    else:
                        walk.stay()
        return stacked(rows)

    def batch(self, rng: np.random.Generator, size: int, model: Any, depths: Depths = gate) -> dict[str, Any]:
        """Walks of 40 steps: half of the calls follow the expert, half the model; 15% of steps are random.

        What comes after an arrival does not count. Mazes, and the steps that are random, are those of `rng` whatever
        the model does.
        """
        walks = [mazes.new_walk(rng, self.side) for _ in range(size)]
        guide = "actions" if rng.random() < 0.5 else "expert"
        noisy, noise = rng.random((self.length, size)) < 0.15, rng.integers(4, size=(self.length, size))

        def act(t: int, row: dict[str, Tensor]) -> list[int]:
            return np.where(noisy[t], noise[t], row[guide].numpy()).tolist()

        seen = self.follow(model, walks, depths, act=act)
        return seen | {"input_features": seen["features"], "observations": observation_of(seen)}

    def loss(self, output: Any, batch: dict[str, Any]) -> Tensor:
        """(): cross-entropy of the moves that the values speak for against the expert's, in training alone."""
        costs = mazes.costs_and_values(output.readouts, batch["view"]).clamp(max=100.0)
        each = F.cross_entropy(-costs.flatten(0, 1), batch["expert"].flatten(), reduction="none")
        real = batch["real"].flatten()
        return (each * real).sum() / real.sum().clamp(min=1)

    def walks(self, seed: int) -> list[mazes.Walk]:
        """Test mazes before the first step, always the same ones for a seed."""
        if seed not in self.starts:
            rng = np.random.default_rng(seed)
            self.starts[seed] = [mazes.new_walk(rng, self.side) for _ in range(self.test_mazes)]
        return copy.deepcopy(self.starts[seed])

    def validate(self, model: Any, depths: Depths) -> float:
        walks = self.walks(self.validation_seed)
        self.follow(model, walks, depths)
        return 1 - sum(walk.arrived for walk in walks) / len(walks)

    def measure(self, model: Any, depths: Depths = gate, **dials: Any) -> Measured:
        walks = self.walks(self.test_seed)
        seen = self.follow(model, walks, depths, errors=True, **dials)
        arrived = [walk.steps / walk.optimal for walk in walks if walk.arrived]
        values = {"failures": 1 - len(arrived) / len(walks)}
        values["detour"] = float(np.mean(arrived)) if arrived else float("nan")
        names = ("depths", "losses", "refined", "errors", "difficult", "real")
        return Measured(values, **{name: seen[name] for name in names})

    def stream(self, model: Any, index: int, depths: Depths) -> int:
        """Run the model through one test maze, batch 1; its positions."""
        return self.follow(model, self.walks(self.test_seed)[index : index + 1], depths)["real"].shape[1]


def observation_of(seen: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: seen[name] for name in ("view", "goal", "moved")}


TASKS: dict[str, Any] = {"repair": Repair, "maze": Maze}
