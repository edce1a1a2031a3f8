# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Pathfinder and Path-X of Long Range Arena: are the two marked ends those of the same dashed path?

Two snakes of dashes ("paddles") grow side by side among shorter ones. One end of a snake and one end of the same snake
(label 1) or of the other (label 0) are marked by discs. After Linsley et al. (arXiv 1805.08315) and Kim et al. (arXiv
1906.01558), in the sizes of Tay et al. (arXiv 2011.04006); geometry and drawing are our own.

A snake is a polyline of equal links: link k runs from pivot k to pivot k+1 = pivot k + (length + 2 margin) u_k, and its
paddle is the middle `length` of it, so that gaps are 2 margin long. The turn d from u_k to u_k+1 has a density
proportional to cos^2(min(c |d|, pi/2)), c the continuity. Links keep 2 margin from all links that they do not continue:
closing the gaps joins what belongs together and nothing else.

Coordinates are (y, x) in pixels; the centre of the first pixel is (0.5, 0.5). They are multiples of 2^-14, directions
come from a table of such numbers, and everything computed from them is +, -, *, / and sqrt of IEEE doubles: an image
has the same bytes on every machine.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import ClassVar, NamedTuple

import numpy as np
import pyarrow as pa
from datasets import ClassLabel, Dataset, Features, List, Value

from essm_train.arguments import arg, check_at_least, check_within, refuse
from essm_train.tasks.shards import SPLITS, RowGenerator

LABELS = ("separate", "connected")
CONTOUR_LENGTHS = MappingProxyType({"baseline": 6, "intermediate": 9, "hard": 14})  # paddles of a marked snake

_DIRECTIONS = 1024  # of a full circle
_FINE = 1 << 14  # steps per pixel
_CANDIDATES = 24  # for the next link; the first one that is free is taken
_DISTRACTOR_TRIALS = 20
_MAX_ROUNDS = 50_000  # for an image


@dataclass
class Pathfinder(RowGenerator):
    """The data set of these parameters; the defaults are those of LRA's Pathfinder at 32 x 32.

    Raises:
        ValueError: parameters that no image can meet.
    """

    name: ClassVar[str] = "pathfinder32"
    seed: int = arg(0, "Same seed, same data.")
    train_size: int = arg(160_000, "Training images.")
    validation_size: int = arg(20_000, "Validation images.")
    test_size: int = arg(20_000, "Test images.")
    image_size: int = arg(32, "Height and width, pixels.")
    difficulty: str = arg("hard", "Length of the marked snakes: baseline 6, intermediate 9, hard 14 paddles.")
    contour_length: int | None = arg(None, "Instead of difficulty: that many paddles.")
    distractor_paddles: int = arg(20, "All distractors together; one has a third of contour_length.")
    paddle_length: int = arg(2, "Length of a dash in pixels.")
    paddle_thickness: float = arg(0.5, "Thickness of a dash in pixels.")
    paddle_margins: list[int] = arg([1], "Half of the gap between dashes, pixels; one is drawn per image.")
    paddle_contrast: float = arg(1.5, "Brightness of a dash where it covers a pixel; 1 is white.")
    marker_radius: float = arg(1.5, "Radius of the discs in pixels.")
    seed_distance: int = arg(7, "Between the first ends of the two snakes, pixels.")
    continuity: float = arg(1.0, "Larger is straighter: turns stay below 90 degrees over this.")
    padding: int = arg(1, "Border that stays empty, pixels.")
    rows_per_shard: int = arg(5_000, "Images in a file.")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least(self, 0, "seed", "distractor_paddles", "padding")
        check_at_least(self, 1, "paddle_length", "seed_distance", "paddle_margins")
        check_at_least(self, 0.5, "marker_radius", "continuity")
        check_at_least(self, 2, "contour_length")
        check_within(self, "(0, inf)", "paddle_thickness", "paddle_contrast")
        least = 4 * self.seed_distance + self.paddle_length
        unknown = f"difficulty must be one of {', '.join(CONTOUR_LENGTHS)}, got {self.difficulty!r}"
        small = f"image_size must be at least 4 seed_distance + paddle_length = {least}, got {self.image_size}"
        refuse({unknown: self.difficulty not in CONTOUR_LENGTHS, small: self.image_size < least})
        refuse({"paddle_margins must name at least one": not self.paddle_margins})

    @property
    def num_paddles(self) -> int:
        """The length of a marked snake."""
        return self.contour_length or CONTOUR_LENGTHS[self.difficulty]

    def rows(self, split: str, indices: range) -> pa.Table:
        """Columns pixels (image_size^2 x uint8, row by row) and label (0 or 1)."""
        scenes = [grow(self, split, index) for index in indices]
        columns = {"pixels": [render(self, scene).ravel() for scene in scenes], "label": [s.label for s in scenes]}
        pixels = List(Value("uint8"), length=self.image_size**2)
        features = Features({"pixels": pixels, "label": ClassLabel(names=list(LABELS))})
        return Dataset.from_dict(columns, features).data.table


@dataclass
class PathX(Pathfinder):
    """The data set of these parameters; the defaults are those of LRA's Path-X. Raises ValueError as `Pathfinder`."""

    name: ClassVar[str] = "pathx"
    image_size: int = arg(128, "Height and width, pixels.")
    distractor_paddles: int = arg(35, "All distractors together; one has a third of contour_length.")
    paddle_length: int = arg(5, "Length of a dash in pixels.")
    paddle_thickness: float = arg(1.5, "Thickness of a dash in pixels.")
    paddle_margins: list[int] = arg([2, 3], "Half of the gap between dashes, pixels; one is drawn per image.")
    paddle_contrast: float = arg(0.9, "Brightness of a dash where it covers a pixel; 1 is white.")
    marker_radius: float = arg(3.0, "Radius of the discs in pixels.")
    seed_distance: int = arg(20, "Between the first ends of the two snakes, pixels.")
    continuity: float = arg(1.8, "Larger is straighter: turns stay below 90 degrees over this.")
    rows_per_shard: int = arg(1_000, "Images in a file.")


class Scene(NamedTuple):
    """Geometry of an image.

    Attributes:
        snakes: (links, 4) each, pivots (y, x) where links begin and their unit vectors, to 2^-14. The first two are the
            long ones; distractors for which there was no room are left out.
        margin: pixels. markers: (2, 2) centres of the discs. label: 0 or 1.
    """

    snakes: list[np.ndarray]
    margin: int
    markers: np.ndarray
    label: int


# ---------------------------------------------------------------------------------------------------------------------
# Growing.


@lru_cache
def _unit_vectors() -> np.ndarray:
    """(2, _DIRECTIONS): (sin, cos) rounded to 2^-14."""
    angles = (2 * math.pi * k / _DIRECTIONS for k in range(_DIRECTIONS))
    return np.array([(round(math.sin(a) * _FINE), round(math.cos(a) * _FINE)) for a in angles]).T / _FINE


@lru_cache
def _turns(continuity: float) -> np.ndarray:
    """(4096,) turns in steps of the circle, equally likely: quantiles of the density cos^2(c d), |d| < pi / 2c.

    Its distribution function is 1/2 + (z + sin(z) cos(z)) / pi at z = c d; inverted by bisection.
    """
    count, turns = 4096, []
    for k in range(count):
        wanted, low, high = (k + 0.5) / count, -math.pi / 2, math.pi / 2
        for _ in range(50):
            z = (low + high) / 2
            below = 0.5 + (z + math.sin(z) * math.cos(z)) / math.pi < wanted
            low, high = (z, high) if below else (low, z)
        turn = max(-math.pi, min(math.pi, low / continuity))
        turns.append(round(turn * _DIRECTIONS / (2 * math.pi)))
    return np.array(turns)


def _along(link: np.ndarray, distance: float) -> np.ndarray:
    """The point (2, 1) so far along a link."""
    return link[:2, None] + distance * link[2:4, None]


class _Growth:
    """The snakes of an image while they grow; a link is (pivot y, x, unit y, x, number of its direction)."""

    def __init__(self, task: Pathfinder, rng: np.random.Generator, margin: int):
        self.task, self.rng, self.margin = task, rng, margin
        self.length = float(task.paddle_length + 2 * margin)
        points = task.paddle_length + 2 * max(task.paddle_margins)  # on a candidate, to be tested
        self.along = np.arange(points + 1) / points * self.length
        self.cells_per_pixel = max(1, 2 // min(task.paddle_margins))
        self.snakes: list[list[np.ndarray]] = [[], []]
        self.rounds = 0

    def extend(self, snake: list[np.ndarray]) -> bool:
        """Append the first of 24 random links that lies inside and clear of all others; False if none does."""
        task, margin, units, u = self.task, self.margin, _unit_vectors(), self.rng.random((_CANDIDATES, 3)).T
        self.rounds += 1
        if self.rounds > _MAX_ROUNDS:
            raise ValueError(
                f"no room for two snakes of {task.num_paddles} paddles at image_size {task.image_size}: choose fewer, "
                "shorter or closer ones"
            )
        inner = 2 * task.seed_distance if snake is self.snakes[0] and not snake else task.padding + margin
        if snake:
            theta = (int(snake[-1][4]) + _turns(task.continuity)[(u[0] * 4096).astype(int)]) % _DIRECTIONS
        else:
            theta = (u[0] * _DIRECTIONS).astype(int)
        gap = margin * units[:, theta]
        if snake:
            pivot = np.tile(_along(snake[-1], self.length), _CANDIDATES)
        elif snake is self.snakes[1]:
            around = units[:, (u[1] * _DIRECTIONS).astype(int)]
            pivot = _along(self.snakes[0][0], margin) + task.seed_distance * around - gap
        else:
            pivot = inner + np.floor(u[1:] * (task.image_size - 2 * inner) * _FINE) / _FINE - gap
        ends = np.stack([pivot + gap, pivot + gap + task.paddle_length * units[:, theta]])
        inside = ((ends >= inner) & (ends <= task.image_size - inner)).all((0, 1))
        pivot, theta = pivot[:, inside], theta[inside]
        free = np.flatnonzero(self._clear(pivot, units[:, theta], snake[-1:]))
        if len(free):
            direction = theta[free[0]]
            snake.append(np.array([*pivot[:, free[0]], *units[:, direction], direction]))
        return len(free) > 0

    def _clear(self, pivot: np.ndarray, unit: np.ndarray, continued: list[np.ndarray]) -> np.ndarray:
        """(C,): whether candidates (2, C) keep 2 margin from all links but the one that they continue.

        What is tested are the centres of the cells of a grid, finer than the gaps, that a candidate runs through.
        """
        links = [link for snake in self.snakes for link in snake if not continued or link is not continued[0]]
        if not links:
            return np.ones(len(pivot.T), bool)
        y, x, unit_y, unit_x, _ = np.array(links).T
        cells = np.floor((pivot[..., None] + self.along * unit[..., None]) * self.cells_per_pixel)
        dy, dx = ((cells + 0.5) / self.cells_per_pixel)[..., None] - np.stack([y, x])[:, None, None]
        along, across = dy * unit_y + dx * unit_x, dy * unit_x - dx * unit_y
        beyond = np.maximum(np.maximum(-along, along - self.length), 0.0)
        return (across * across + beyond * beyond > (2.0 * self.margin) ** 2).all((1, 2))

    def grow_marked(self) -> None:
        """The two long snakes, the shorter one in turn.

        At its failure number f, a snake loses as many links as the largest power of two in f; if these are all, both
        begin again.
        """
        failures = [0, 0]
        while min(map(len, self.snakes)) < self.task.num_paddles:
            s = int(len(self.snakes[1]) < len(self.snakes[0]))
            snake = self.snakes[s]
            if not self.extend(snake):
                failures[s] += 1
                lost = failures[s] & -failures[s]
                del snake[-lost:]
                if not snake:
                    self.snakes, failures = [[], []], [0, 0]

    def grow_distractors(self) -> None:
        """Short snakes one after the other; each begins again where it meets no room, but not forever."""
        length = max(1, self.task.num_paddles // 3)
        for _ in range(self.task.distractor_paddles // length):
            snake: list[np.ndarray] = []
            self.snakes.append(snake)
            trials = 0
            while len(snake) < length and trials < _DISTRACTOR_TRIALS:
                if not self.extend(snake):
                    snake.clear()
                    trials += 1


def grow(task: Pathfinder, split: str, index: int) -> Scene:
    """The geometry of an image, a function of (task, split, index) alone.

    Raises:
        ValueError: there is no room for snakes of this length.
    """
    rng = np.random.Generator(np.random.PCG64([task.seed, SPLITS.index(split), index]))
    coins = rng.random(4)
    label, origin = int(coins[0] < 0.5), int(coins[1] < 0.5)
    margin = task.paddle_margins[int(coins[2] * len(task.paddle_margins))]
    growth = _Growth(task, rng, margin)
    growth.grow_marked()
    growth.grow_distractors()
    snakes = [np.array(snake)[:, :4] for snake in growth.snakes if snake]
    # Markers: the first end of a snake, and the last end of the same or of the other.
    first, last = snakes[origin][0], snakes[origin if label else 1 - origin][-1]
    ends = [first[:2] + margin * first[2:], last[:2] + (margin + task.paddle_length) * last[2:]]
    return Scene(snakes, margin, np.stack(ends), label)


# ---------------------------------------------------------------------------------------------------------------------
# Drawing.


def render(task: Pathfinder, scene: Scene) -> np.ndarray:
    """(size, size) uint8: paddles, each pixel as bright as the part of it that they cover, and white discs.

    Where they overlap, the brighter counts. A pixel is taken as a square that is turned like the paddle.
    """
    half = math.ceil(max((task.paddle_length + task.paddle_thickness) / 2, task.marker_radius) + 0.5) + 1
    image = np.zeros((task.image_size + 2 * half,) * 2)

    def around(centres: np.ndarray) -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
        """Pixels near centres (n, 2), as indices (n, w, 1) and (n, 1, w), and their offsets from them."""
        y, x = (np.floor(centres).astype(int)[:, :, None] + np.arange(-half, half + 1)).swapaxes(0, 1)
        offsets = (y + 0.5 - centres[:, :1])[:, :, None], (x + 0.5 - centres[:, 1:])[:, None]
        return (y[:, :, None] + half, x[:, None] + half), offsets

    def covered(distance: np.ndarray, width: float) -> np.ndarray:
        """Length of [distance - 1/2, distance + 1/2] inside of [-width/2, width/2]."""
        distance = np.abs(distance)
        return np.maximum(np.minimum(distance + 0.5, width / 2) - np.maximum(distance - 0.5, -width / 2), 0.0)

    links = np.concatenate(scene.snakes)
    unit_y, unit_x = links[:, 2:].T[..., None, None]
    pixels, (dy, dx) = around(links[:, :2] + (scene.margin + task.paddle_length / 2) * links[:, 2:])
    area = covered(dy * unit_y + dx * unit_x, task.paddle_length)
    area = area * covered(dy * unit_x - dx * unit_y, task.paddle_thickness)
    np.maximum.at(image, pixels, task.paddle_contrast * area)
    pixels, (dy, dx) = around(scene.markers)
    np.maximum.at(image, pixels, task.marker_radius + 0.5 - np.sqrt(dy * dy + dx * dx))
    return np.floor(np.minimum(image[half:-half, half:-half], 1.0) * 255 + 0.5).astype(np.uint8)
