# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Mazes that are seen five cells wide: a model says how far the goal is from each cell around the walker.

A maze is a grid of walls and cells with some loops and doors. Walking into a closed door opens it, which takes a step.
The walker sees the 5 x 5 cells around it and where the goal lies. The model says for each of these cells how many steps
it takes to the goal, and the walker goes where that is least. States are refined on `ValueConsistency`, which knows no
way: values shall agree with their neighbours', with what was said before about the same cells (as in learning real-time
search, Korf 1990), and with the distance as the crow flies. The poster of elastic state models names a maze and nothing
else: task and objective are ours.
Letters: B batch of walkers, L steps, n side of the grid, V a value.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

WALL, CELL, DOOR = 0, 1, 2  # a door is closed; an open one is a cell
VIEW = 5
SIDE = VIEW // 2
OPENINGS, DOORS = 0.1, 0.08  # shares of walls between two cells that are opened, and of corridors with a door
MOVES = ((-1, 0), (0, 1), (1, 0), (0, -1))
FEATURES = 3 * VIEW**2 + 2 + 5  # kinds of cells, offset of the goal, the last action or none
READOUTS = VIEW**2
FAR = 1e6


def make_maze(rng: np.random.Generator, n: int) -> np.ndarray:
    """Kinds of cells (n, n): a spanning tree of the odd cells, some walls opened, some corridors with a door.

    Raises:
        ValueError: a side that is even or below 5.
    """
    if n % 2 == 0 or n < 5:
        raise ValueError(f"the side of a maze must be odd and at least 5, got {n}")
    maze = np.zeros((n, n), dtype=np.int8)
    path = [tuple(2 * rng.integers(n // 2, size=2) + 1)]
    maze[path[0]] = CELL
    while path:
        r, c = path[-1]
        ways = [(r + 2 * dr, c + 2 * dc) for dr, dc in MOVES]
        if ways := [(a, b) for a, b in ways if 0 < a < n and 0 < b < n and maze[a, b] == WALL]:
            a, b = ways[rng.integers(len(ways))]
            maze[(r + a) // 2, (c + b) // 2] = maze[a, b] = CELL
            path.append((a, b))
        else:
            path.pop()
    for r, c in np.argwhere(maze[1:-1, 1:-1] == WALL) + 1:
        if (r % 2) != (c % 2) and rng.random() < OPENINGS:  # between two cells
            maze[r, c] = CELL
    for r, c in np.argwhere(maze == CELL):
        free = [maze[r + dr, c + dc] == CELL for dr, dc in MOVES]
        if free in ([True, False, True, False], [False, True, False, True]) and rng.random() < DOORS:
            maze[r, c] = DOOR
    return maze


def distances(maze: np.ndarray, goal: tuple[int, int]) -> np.ndarray:
    """Steps from every cell to the goal, (n, n); FAR from walls. Entering a closed door takes two."""
    V, n = np.full(maze.shape, FAR), len(maze)
    V[goal] = 0.0
    while True:
        entered = np.pad(V + np.where(maze == DOOR, 2.0, 1.0), 1, constant_values=FAR)
        around = [entered[1 + dr : 1 + dr + n, 1 + dc : 1 + dc + n] for dr, dc in MOVES]
        new = np.where(maze != WALL, np.minimum(V, np.min(around, axis=0)), FAR)
        if np.array_equal(new, V):
            return V
        V = new


@dataclass
class Walk:
    """One walker in a maze of its own; `step` moves it, `observe` is what it sees.

    Attributes:
        optimal: steps from the start to the goal at best. steps: taken so far.
    """

    maze: np.ndarray
    at: tuple[int, int]
    goal: tuple[int, int]
    last: int = 4  # no action yet
    moved: tuple[int, int] = (0, 0)
    steps: int = 0
    to_goal: np.ndarray = field(init=False)
    optimal: int = field(init=False)

    def __post_init__(self) -> None:
        self.maze = self.maze.copy()
        self.to_goal = distances(self.maze, self.goal)
        self.optimal = int(self.to_goal[self.at])

    @property
    def arrived(self) -> bool:
        return self.at == self.goal

    @property
    def late(self) -> bool:
        """All steps are taken within which an arrival counts."""
        return self.steps >= 2 * self.optimal + 20

    def around(self) -> list[tuple[int, int]]:
        """The places that each move leads to."""
        return [(self.at[0] + dr, self.at[1] + dc) for dr, dc in MOVES]

    def costs(self) -> np.ndarray:
        """Steps to the goal by each move first, (4,), of an opened door too; FAR and more into a wall."""
        return np.array([self.to_goal[at] + (2.0 if self.maze[at] == DOOR else 1.0) for at in self.around()])

    def expert(self) -> int:
        """The action of a shortest way."""
        return int(self.costs().argmin())

    def step(self, action: int) -> None:
        """Move one cell; open a door instead of passing it; stay before a wall."""
        to = self.around()[action]
        self.moved = (0, 0)
        if self.maze[to] == DOOR:
            self.maze[to] = CELL
        elif self.maze[to] == CELL:
            self.at, self.moved = to, MOVES[action]
        self.last, self.steps = action, self.steps + 1

    def stay(self) -> None:
        """What is observed next is the same place again; no step is counted."""
        self.moved = (0, 0)

    def observe(self) -> dict[str, np.ndarray]:
        """view (5, 5) kinds; goal (2,) its offset; moved (2,) since the last observation; features (82,)."""
        r, c = self.at
        beyond = np.pad(self.maze, SIDE, constant_values=WALL)  # nothing lies beyond the maze
        view = beyond[r : r + VIEW, c : c + VIEW].astype(np.int64)
        goal = np.array([self.goal[0] - r, self.goal[1] - c], dtype=np.float32)
        kinds = np.eye(3, dtype=np.float32)[view].ravel()
        features = np.concatenate([kinds, goal / len(self.maze), np.eye(5, dtype=np.float32)[self.last]])
        return {"view": view, "goal": goal, "moved": np.array(self.moved, dtype=np.int64), "features": features}

    def difficult(self) -> bool:
        """Whether there is something to decide: a junction, or a door beside the walker."""
        kinds = [self.maze[at] for at in self.around()]
        return sum(kind != WALL for kind in kinds) >= 3 or DOOR in kinds


def new_walk(rng: np.random.Generator, n: int) -> Walk:
    """A maze with start and goal at least n steps apart."""
    while True:
        maze = make_maze(rng, n)
        cells = np.argwhere(maze == CELL)
        goal, start = ((int(r), int(c)) for r, c in cells[rng.integers(len(cells), size=2)])
        walk = Walk(maze, start, goal)
        if n <= walk.optimal < FAR:
            return walk


def stack(seen: list[dict[str, np.ndarray]]) -> dict[str, Tensor]:
    """Observations of B walkers as tensors (B, ..)."""
    return {name: torch.from_numpy(np.stack([each[name] for each in seen])) for name in seen[0]}


def costs_and_values(values: Tensor, view: Tensor) -> Tensor:
    """(B, 4) what each move costs in all, from V (B, 25) and the view (B, 5, 5); FAR into a wall."""
    entered = _entered(values.unflatten(-1, (VIEW, VIEW)), view)
    return torch.stack([entered[..., SIDE + dr, SIDE + dc] for dr, dc in MOVES], -1)


def _entered(V: Tensor, view: Tensor) -> Tensor:
    """(B, 5, 5): what it costs to enter each cell and to go on from there."""
    return torch.where(view == WALL, FAR, V + torch.where(view == DOOR, 2.0, 1.0))


class ValueConsistency(nn.Module):
    """How much the values of the cells in view contradict each other, what was said before, and the crow; (B,) >= 0.

    Means over the cells that are no walls:

        inner 3 x 3        (V(c) - softmin over neighbours of cost + V)^2, without the goal
        rim, known         (V(c) - what was committed of that cell)^2
        rim, new           relu(distance as the crow flies - V(c))^2
        the goal in view   V^2

    Args:
        n: side of the mazes: what is remembered is as wide as two of them.
        temperature: of the softmin.
    """

    def __init__(self, n: int, temperature: float = 0.1):
        super().__init__()
        self.n, self.side, self.temperature = n, 2 * n + VIEW, temperature

    def initial_history(self, observation: dict[str, Tensor]) -> dict[str, Tensor]:
        B = len(observation["goal"])
        memory = observation["goal"].new_zeros(B, self.side**2)
        start = torch.full((B, 2), self.n + SIDE, device=memory.device)
        return {"memory": memory, "known": torch.zeros_like(memory), "at": start}

    def _patch(self, history: dict[str, Tensor], observation: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Where in the memory the cells in view are, (B, 25), and the walker, (B, 2)."""
        at = history["at"] + observation["moved"]
        offsets = torch.arange(-SIDE, SIDE + 1, device=at.device)
        rows, columns = at[:, :1] + offsets, at[:, 1:] + offsets
        return (rows[:, :, None] * self.side + columns[:, None]).flatten(1), at

    def remembered(self, history: dict[str, Tensor], observation: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """What was committed of the cells in view, (B, 25), and where something was, (B, 25) bool; 0 elsewhere."""
        patch, _ = self._patch(history, observation)
        return history["memory"].gather(1, patch), history["known"].gather(1, patch) > 0

    def commit(self, history: dict[str, Tensor], y: Tensor, observation: dict[str, Tensor]) -> dict[str, Tensor]:
        """Remember the values of the inner cells."""
        patch, at = self._patch(history, observation)
        said, known = self.remembered(history, observation)
        inner = F.pad(torch.ones(VIEW - 2, VIEW - 2, device=y.device, dtype=torch.bool), (1, 1, 1, 1)).flatten()
        memory = history["memory"].scatter(1, patch, torch.where(inner, y.to(said.dtype), said))
        known_now = history["known"].scatter(1, patch, (known | inner).to(said.dtype))
        return {"memory": memory, "known": known_now, "at": at}

    def forward(self, y: Tensor, observation: dict[str, Tensor], history: dict[str, Tensor]) -> Tensor:
        """Args: y (B, 25), V row by row; observation: of `Walk.observe`; history: of `commit`."""
        V, view, goal = y.unflatten(1, (VIEW, VIEW)), observation["view"], observation["goal"]
        place = torch.arange(-SIDE, SIDE + 1, device=y.device, dtype=y.dtype)
        dr, dc = (goal[:, 0, None] - place).abs(), (goal[:, 1, None] - place).abs()
        crow = dr[:, :, None] + dc[:, None]  # (B, 5, 5), 0 at the goal
        free, inside, T = view != WALL, slice(1, VIEW - 1), self.temperature
        entered = _entered(V, view)
        around = torch.stack([entered[:, 1 + a : VIEW - 1 + a, 1 + b : VIEW - 1 + b] for a, b in MOVES])
        target = -T * torch.logsumexp(-around / T, 0)
        closed = (around >= FAR).all(0)  # a cell that nothing leads to
        said, known = (x.view_as(V) for x in self.remembered(history, observation))
        each = torch.where(known, (V - said.to(V.dtype)).square(), F.relu(crow - V).square())
        each[:, inside, inside] = torch.where(closed, 0.0, (V[:, inside, inside] - target).square())
        each = torch.where(crow == 0, V.square(), each)
        return (each * free).sum((1, 2)) / free.sum((1, 2)).clamp(min=1)
