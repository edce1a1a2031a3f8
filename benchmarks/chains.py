# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Loop repair: a model mends one disturbed loop of a folded protein, residue by residue.

A chain is its C-alpha trace, in units of the 3.8 A between neighbours. A window has 64 residues, and one loop of 8 to
12 of them is disturbed: its torsions are kicked, so that its end misses the next residue, and its atoms are shaken. The
model reads the window from its start and says for each residue the step from the one before. It knows where the loop is
and where the chain goes on after it. States are refined on `RepairEnergy`, which needs no native structure. The poster
of elastic state models gives neither task nor energy in detail: both are ours.
Letters: B batch, L residues of a window, W committed steps that the energy looks back on.
"""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

BOND = 3.8  # A, between neighbouring C-alphas
BREAK = 4.2  # A, from which on they are no neighbours
WINDOW = 64
LOOP = (8, 12)
TEST_CHAINS = 16
FEATURES = 12  # the step as read, the one before, the flag of the loop, residues left, offset of the anchor, and 1
COLLISION = 4.0 / BOND  # atoms of which at least two are between should be further apart


def read_chain(path: Path) -> np.ndarray:
    """The longest unbroken stretch of C-alphas of the first model of a PDB file, gzipped or not: (n, 3) in A.

    Raises:
        ValueError: a file without C-alphas.
    """
    places: dict[str, list[float]] = {}
    with (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8") as lines:
        for line in lines:
            if line.startswith("ENDMDL"):
                break
            if line.startswith("ATOM") and line[12:16] == " CA ":  # the first of alternative places
                places.setdefault(line[21:27], [float(line[i : i + 8]) for i in (30, 38, 46)])
    if not places:
        raise ValueError(f"{path} has no C-alpha atom")
    chain = np.array([*places.values()])
    broken = np.flatnonzero(np.linalg.norm(np.diff(chain, axis=0), axis=1) > BREAK)
    return max(np.split(chain, broken + 1), key=len)


def read_chains(folder: str | Path) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Chains of at least a window, in units of a bond: to train on, and 16 to test on, chosen by the names alone.

    Raises:
        ValueError: fewer than 17 such chains.
    """
    chains = [chain / BOND for chain in map(read_chain, sorted(Path(folder).glob("*.pdb*"))) if len(chain) >= WINDOW]
    if len(chains) <= TEST_CHAINS:
        raise ValueError(
            f"{folder} has {len(chains)} chains of {WINDOW} residues, at least {TEST_CHAINS + 1} are needed"
        )
    order = np.random.default_rng(0).permutation(len(chains))
    return [chains[i] for i in order[TEST_CHAINS:]], [chains[i] for i in order[:TEST_CHAINS]]


def _frame(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Unit vectors along b-c, across it in the plane of the three atoms, and out of that."""
    axis = (c - b) / np.linalg.norm(c - b)
    normal = np.cross(b - a, axis)
    normal /= np.linalg.norm(normal)
    return axis, np.cross(normal, axis), normal


def place_next(atoms: np.ndarray, length: float, angle: float, torsion: float) -> np.ndarray:
    """The atom that follows three others a, b, c: its distance from c, the angle at c, the torsion about b-c."""
    axis, across, out = _frame(*atoms)
    along, aside = -np.cos(angle), np.sin(angle)
    return atoms[2] + length * (along * axis + aside * (np.cos(torsion) * across + np.sin(torsion) * out))


def internal(atoms: np.ndarray) -> tuple[float, float, float]:
    """Length, angle and torsion, in radians, that put the last of four atoms where it is."""
    axis, across, out = _frame(*atoms[:3])
    step = atoms[3] - atoms[2]
    length = float(np.linalg.norm(step))
    angle = np.arccos(np.clip(-(step @ axis) / length, -1, 1))
    return length, float(angle), float(np.arctan2(step @ out, step @ across))


class Window(NamedTuple):
    """native and read (64, 3); the first residue of the disturbed loop, and the first after it."""

    native: np.ndarray
    read: np.ndarray
    start: int
    stop: int


def disturb(native: np.ndarray, rng: np.random.Generator, kick: float = np.pi / 3, shake: float = 0.15) -> Window:
    """One loop with torsions kicked by N(0, kick) radians and atoms moved by N(0, shake) bonds; the rest stays."""
    length = int(rng.integers(LOOP[0], LOOP[1] + 1))
    start = int(rng.integers(4, len(native) - length - 3))
    read = native.copy()
    for i in range(start, start + length):
        distance, angle, torsion = internal(native[i - 3 : i + 1])
        read[i] = place_next(read[i - 3 : i], distance, angle, torsion + rng.normal(0, kick))
    read[start : start + length] += rng.normal(0, shake, (length, 3))
    return Window(native, read, start, start + length)


def draw(chains: list[np.ndarray], rng: np.random.Generator) -> Window:
    """A window anywhere in any chain, turned at random, with its first residue at the origin."""
    chain = chains[rng.integers(len(chains))]
    first = int(rng.integers(len(chain) - WINDOW + 1))
    turn, triangle = np.linalg.qr(rng.normal(size=(3, 3)))
    turn = turn * np.sign(np.diag(triangle))  # of all orthogonal matrices alike
    turn = turn * np.sign(np.linalg.det(turn))  # chains are chiral: no mirror images
    return disturb((chain[first : first + WINDOW] - chain[first]) @ turn.T, rng)


def fixed_windows(chains: list[np.ndarray]) -> list[Window]:
    """Windows side by side over all chains, each disturbed in its own way, always the same."""
    return [
        disturb(chain[first : first + WINDOW] - chain[first], np.random.default_rng((i, first)))
        for i, chain in enumerate(chains)
        for first in range(0, len(chain) - WINDOW + 1, WINDOW // 2)
    ]


def collate(windows: list[Window]) -> dict[str, Any]:
    """Tensors of a batch, fp32, L = 63 steps from residue to residue. Places count from the first residue.

    Returns:
        input_features (B, L, 12); observations, a dict of "step" (B, L, 3) as read, "place" (B, L, 3) as read, "loop"
        (B, L) 1 in the loop, "left" (B, L) residues until the anchor, "anchor" (B, L, 3), the first residue after the
        loop and 0 elsewhere; native (B, L, 3), the steps; loop (B, L) bool.
    """
    rows = []
    for native, read, start, stop in windows:
        read = read - read[0]
        places, steps, at = read[1:], np.diff(read, axis=0), np.arange(1, len(read))
        inside = (at >= start) & (at < stop)
        left, anchor = np.where(inside, stop - at, 0), np.where(inside[:, None], read[stop], 0.0)
        before = np.concatenate([np.zeros((1, 3)), steps[:-1]])
        offset = np.where(inside[:, None], read[stop] - places, 0.0)
        features = [steps, before, inside[:, None], left[:, None] / LOOP[1], offset / 4, np.ones((len(at), 1))]
        rows.append((np.concatenate(features, 1), steps, places, inside, left, anchor, np.diff(native, axis=0)))
    columns = [torch.tensor(np.stack(column), dtype=torch.float32) for column in zip(*rows)]
    observations = dict(zip(("step", "place", "loop", "left", "anchor"), columns[1:]))
    loop = observations["loop"].bool()
    return {"input_features": columns[0], "observations": observations, "native": columns[-1], "loop": loop}


class RepairEnergy(nn.Module):
    """How far a step is from what chains do, from what was read, and from where the loop must end; (B,) >= 0.

    With y the step, p the place that it leads to, and the steps before it as they were committed:

        4 (|y| - 1)^2                                   length, in bonds
        + 2 d(cos(y, y'), [-0.17, 0.87])^2              the angle at the atom between 80 and 150 degrees
        + mean softplus(8 (1.05 - |p - p_j|)) / 2       collisions with the last committed atoms but two
        + outside the loop  |p - place|^2
        + inside            2 relu(|p - anchor| - 0.9 left)^2 + |y - step|^2 / 20
    """

    look_back = 12

    def initial_history(self, observation: dict[str, Tensor]) -> dict[str, Tensor]:
        place = observation["place"]
        steps, count = place.new_zeros(len(place), self.look_back, 3), place.new_zeros(len(place))
        return {"steps": steps, "place": torch.zeros_like(place), "count": count}

    def commit(self, history: dict[str, Tensor], y: Tensor, observation: Any) -> dict[str, Tensor]:
        steps = torch.cat([history["steps"][:, 1:], y[:, None]], 1)
        return {"steps": steps, "place": history["place"] + y, "count": history["count"] + 1}

    def forward(self, y: Tensor, observation: dict[str, Tensor], history: dict[str, Tensor]) -> Tensor:
        """Args: y (B, 3); observation: of `collate`, at one residue; history: of `commit`."""
        steps, count, place = history["steps"], history["count"], history["place"] + y
        length = y.norm(dim=-1).clamp(min=1e-4)
        energy = 4 * (length - 1).square()
        before = steps[:, -1]
        cosine = (y * before).sum(-1) / (length * before.norm(dim=-1).clamp(min=1e-4))
        beyond = F.relu(cosine - 0.87) + F.relu(-0.17 - cosine)
        energy = energy + torch.where(count > 0, 2 * beyond.square(), 0.0)
        back = steps.flip(1).cumsum(1) + y[:, None]  # to the atoms 2, 3, .. before
        distance = back.square().sum(-1).clamp(min=1e-8).sqrt()
        number = torch.arange(self.look_back, device=y.device)
        there = (count[:, None] > number) & (number > 0)  # the atom two before is what angles are about
        crowded = F.softplus(8 * (COLLISION - distance)) / 2
        energy = energy + (crowded * there).sum(1) / there.sum(1).clamp(min=1)
        reach = F.relu((place - observation["anchor"]).norm(dim=-1).clamp(min=1e-4) - 0.9 * observation["left"])
        inside = 2 * reach.square() + (y - observation["step"]).square().sum(-1) / 20
        outside = (place - observation["place"]).square().sum(-1)
        return energy + torch.where(observation["loop"] > 0, inside, outside)


def quality(steps: Tensor, energies: Tensor, batch: dict[str, Any]) -> dict[str, float]:
    """How good committed steps (B, L, 3) with their energies (B, L) are: means over the windows.

    Returns:
        "energy" of all residues; "rmsd_outside" and "rmsd_loop", root mean squares in A of the distance from the native
        place; "gap", how far the loop's end is from one bond before the anchor, in A.
    """
    places, loop, last = steps.cumsum(1), batch["loop"], batch["observations"]["left"] == 1
    off = (places - batch["native"].cumsum(1)).square().sum(-1)
    gaps = (places[last] - batch["observations"]["anchor"][last]).norm(dim=-1) - 1
    found = {"rmsd_outside": off[~loop].mean().sqrt(), "rmsd_loop": off[loop].mean().sqrt(), "gap": gaps.abs().mean()}
    return {"energy": float(energies.mean())} | {name: float(value) * BOND for name, value in found.items()}
