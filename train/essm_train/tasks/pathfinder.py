# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Pathfinder and Path-X of Long Range Arena: are the two marked ends those of the same dashed path?

Two snakes of dashes ("paddles") grow side by side among shorter ones. One end of a snake and one end of the same snake
(label 1) or of the other (label 0) are marked by discs. After Linsley et al. (arXiv 1805.08315) and Kim et al. (arXiv
1906.01558), in the sizes of Tay et al. (arXiv 2011.04006); geometry and drawing are our own.

A snake is a polyline of equal links: link k runs from pivot k to pivot k+1 = pivot k + (length + 2 margin) u_k, and its
paddle is the middle `length` of it, so that gaps are 2 margin long. The turn d from u_k to u_k+1 has a density
proportional to cos^2(min(c |d|, pi/2)), c the continuity. Links keep `clearance` (2 margin) from all links that they do
not continue: closing the gaps joins what belongs together and nothing else.

Coordinates are (y, x) in pixels; the centre of the first pixel is (0.5, 0.5). They are multiples of 2^-14, directions
come from a table of such numbers, and everything computed from them is +, -, *, / and sqrt of IEEE doubles, element by
element: an image has the same bytes on every machine, alone or in a batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from datasets import ClassLabel, Features, List, Value

from essm_train.arguments import arg, check_at_least
from essm_train.tasks.shards import SPLITS, RowGenerator

LABELS = ("separate", "connected")
CONTOUR_LENGTHS = MappingProxyType({"baseline": 6, "intermediate": 9, "hard": 14})  # paddles of a marked snake

_DIRECTIONS = 1024  # of a full circle
_FINE = 1 << 14  # steps per pixel
_CANDIDATES = 24  # for the next link; the first one that is free is taken
_ROUNDS = 32  # for which random numbers are drawn at once
_DISTRACTOR_TRIALS = 20
_MAX_ROUNDS = 50_000  # for an image
_BATCH = 250  # images that grow at once


@dataclass(frozen=True)
class Pathfinder(RowGenerator):
    """The data set of these parameters; the defaults are those of LRA's Pathfinder at 32 x 32.

    Raises:
        ValueError: parameters that no image can meet.
    """

    name: str = "pathfinder32"
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
    paddle_margins: tuple[int, ...] = arg((1,), "Half of the gap between dashes, pixels; one is drawn per image.")
    paddle_contrast: float = arg(1.5, "Brightness of a dash where it covers a pixel; 1 is white.")
    marker_radius: float = arg(1.5, "Radius of the discs in pixels.")
    seed_distance: int = arg(7, "Between the first ends of the two snakes, pixels.")
    continuity: float = arg(1.0, "Larger is straighter: turns stay below 90 degrees over this.")
    padding: int = arg(1, "Border that stays empty, pixels.")
    rows_per_shard: int = arg(5_000, "Images in a file.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.difficulty not in CONTOUR_LENGTHS:
            raise ValueError(f"difficulty must be one of {', '.join(CONTOUR_LENGTHS)}, got {self.difficulty!r}")
        check_at_least(self, 0, "seed", "distractor_paddles", "padding")
        check_at_least(self, 1, "paddle_length", "seed_distance")
        check_at_least(self, 0.5, "marker_radius", "continuity")
        check_at_least(self, 2, "contour_length")
        for name in ("paddle_thickness", "paddle_contrast"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        if not self.paddle_margins or min(self.paddle_margins) < 1:
            raise ValueError(f"paddle_margins must be integers of at least 1, got {self.paddle_margins}")
        if self.image_size - 4 * self.seed_distance < self.paddle_length:
            raise ValueError(
                f"image_size must be at least 4 seed_distance + paddle_length = "
                f"{4 * self.seed_distance + self.paddle_length}, got {self.image_size}"
            )

    @property
    def num_paddles(self) -> int:
        """The length of a marked snake."""
        return self.contour_length or CONTOUR_LENGTHS[self.difficulty]

    @property
    def snake_lengths(self) -> tuple[int, ...]:
        """Paddles of each snake that is tried: the two that are marked, then distractors."""
        short = max(1, self.num_paddles // 3)
        return (self.num_paddles,) * 2 + (short,) * (self.distractor_paddles // short)

    def rows(self, split: str, indices: range, attempts: Mapping[int, int]) -> pa.Table:
        """Columns pixels (image_size^2 x uint8, row by row) and label (0 or 1)."""
        images, labels = [], []
        for first in range(indices.start, indices.stop, _BATCH):
            scenes = grow_scenes(self, split, range(first, min(first + _BATCH, indices.stop)))
            images.append(render(self, scenes))
            labels.append(scenes.label)
        pixels = pa.array(np.concatenate(images).reshape(-1))
        area = self.image_size**2
        features = Features({"pixels": List(Value("uint8"), length=area), "label": ClassLabel(names=list(LABELS))})
        columns = [pa.FixedSizeListArray.from_arrays(pixels, area), pa.array(np.concatenate(labels))]
        return pa.Table.from_arrays(columns, schema=features.arrow_schema)


PATHX: Mapping[str, Any] = MappingProxyType(
    {
        "name": "pathx",
        "image_size": 128,
        "distractor_paddles": 35,
        "paddle_length": 5,
        "paddle_thickness": 1.5,
        "paddle_margins": (2, 3),
        "paddle_contrast": 0.9,
        "marker_radius": 3.0,
        "seed_distance": 20,
        "continuity": 1.8,
        "rows_per_shard": 1_000,
    }
)


class Scenes(NamedTuple):
    """Geometry of n images, S links each in the order of `Layout`.

    Attributes:
        start: (n, S, 2) pivots (y, x) where links begin. direction: (n, S, 2) unit vectors, to 2^-14.
        placed: (n, S) bool; distractors for which there was no room are not.
        margin: (n,) pixels. markers: (n, 2, 2) centres of the discs. label: (n,) int64.
    """

    start: np.ndarray
    direction: np.ndarray
    placed: np.ndarray
    margin: np.ndarray
    markers: np.ndarray
    label: np.ndarray


class Layout(NamedTuple):
    """In which order links are placed: the two long snakes in turn, then one distractor after the other.

    Attributes:
        snake: (S,) whose link it is. before: (S,) the link that it continues, or -1.
        first: (S,) the first link of its snake. next_snake: (S,) where the next distractor begins.
    """

    snake: np.ndarray
    before: np.ndarray
    first: np.ndarray
    next_snake: np.ndarray


@lru_cache
def layout(snake_lengths: tuple[int, ...]) -> Layout:
    """The order of all links of snakes with so many."""
    long = snake_lengths[0]
    snake = [k % 2 for k in range(2 * long)]
    before = [k - 2 if k >= 2 else -1 for k in range(2 * long)]
    first = [k % 2 for k in range(2 * long)]
    next_snake = [2 * long] * (2 * long)
    for number, length in enumerate(snake_lengths[2:], 2):
        begin = len(snake)
        snake += [number] * length
        before += [-1, *range(begin, begin + length - 1)]
        first += [begin] * length
        next_snake += [begin + length] * length
    return Layout(np.array(snake), np.array(before), np.array(first), np.array(next_snake))


# ---------------------------------------------------------------------------------------------------------------------
# Growing. One round places, or fails to place, the next link of every image that is not finished.


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


def _distance2(offset: Iterable[np.ndarray], unit: np.ndarray, length: np.ndarray) -> np.ndarray:
    """(...) squared distance of points from a segment: their offset (2, ...) from its beginning, its direction."""
    dy, dx = offset
    along = dy * unit[0] + dx * unit[1]
    across = dy * unit[1] - dx * unit[0]
    beyond = np.maximum(np.maximum(-along, along - length), 0.0)
    return across * across + beyond * beyond


class _Ground:
    """How many links are near each place of each image: on a grid finer than the gaps, with a border for stamps.

    Attributes:
        links: (n, G, G) uint8, links within `clearance` of the centres of cells.
    """

    def __init__(self, task: Pathfinder, length: np.ndarray, clearance: np.ndarray):
        self.length, self.clearance = length, clearance
        self.per_pixel = max(1, 2 // min(task.paddle_margins))
        self.reach = math.ceil((length.max() / 2 + clearance.max()) * self.per_pixel) + 1
        side = task.image_size * self.per_pixel + 2 * self.reach
        self.links = np.zeros((len(length), side, side), np.uint8)

    def at(self, images: np.ndarray, points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Centres (2, a, C, P) of the cells that points of `images` (a,) lie in, and the links near them (a, C, P)."""
        cell = np.floor(points * self.per_pixel)
        rows, columns = np.clip(cell.astype(int) + self.reach, 0, self.links.shape[1] - 1)
        return (cell + 0.5) / self.per_pixel, self.links[images[:, None, None], rows, columns]

    def count(self, images: np.ndarray, pivot: np.ndarray, unit: np.ndarray, change: int) -> None:
        """Add or take away one link of each of the images (m,), which begins at pivot (2, m)."""
        length = self.length[images, None, None]
        middle = np.floor((pivot + self.length[images] / 2 * unit) * self.per_pixel).astype(int)
        rows, columns = middle[:, :, None] + np.arange(-self.reach, self.reach + 1)
        centre = rows[:, :, None] + 0.5, columns[:, None, :] + 0.5
        offset = (centre[axis] / self.per_pixel - pivot[axis, :, None, None] for axis in range(2))
        near = _distance2(offset, unit[:, :, None, None], length) <= (self.clearance[images] ** 2)[:, None, None]
        place = images[:, None, None], rows[:, :, None] + self.reach, columns[:, None, :] + self.reach
        add = np.add if change > 0 else np.subtract
        self.links[place] = add(self.links[place], near, dtype=np.uint8)


class _Growth:
    """n images while their snakes grow, S links each; a images are alive, C candidates are tried for a link.

    Attributes:
        slot: (n,) the link to be placed. trials: (n,) of the present distractor.
        grown, failures: (n, 2) of the marked snakes. start, angle, placed: (n, S, 2), (n, S) and (n, S) of the links.
    """

    def __init__(self, task: Pathfinder, margin: np.ndarray):
        self.task, self.margin, self.order = task, margin, layout(task.snake_lengths)
        self.units, self.turns = _unit_vectors(), _turns(task.continuity)
        self.length = (task.paddle_length + 2 * margin).astype(float)
        self.clearance = 2.0 * margin
        self.steps = int(self.length.max()) + 1  # on a candidate, to be tested
        self.ground = _Ground(task, self.length, self.clearance)
        self.without_last = self.ground.links.copy()  # as it was before the present distractor
        n, S = len(margin), len(self.order.snake)
        self.slot, self.trials = np.zeros(n, int), np.zeros(n, int)
        self.grown, self.failures = np.zeros((n, 2), int), np.zeros((n, 2), int)
        self.start, self.angle, self.placed = np.zeros((n, S, 2)), np.zeros((n, S), int), np.zeros((n, S), bool)

    def candidates(self, live: np.ndarray, u: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Links that continue a snake, or begin one, from random numbers u (3, a, C).

        Returns:
            pivot (2, a, C), theta (a, C), and free (a, C): inside, and on free ground.
        """
        task, size, k = self.task, self.task.image_size, self.slot[live]
        L, margin, start, angle, units = self.length[live, None], self.margin, self.start, self.angle, self.units
        before = self.order.before[k]
        begins = (before < 0)[:, None]
        turned = angle[live, before][:, None] + self.turns[(u[0] * len(self.turns)).astype(int)]
        theta = np.where(begins, (u[0] * _DIRECTIONS).astype(int), turned % _DIRECTIONS)
        unit = units[:, theta]  # (2, a, C)
        gap = margin[live, None] * unit
        inner = np.where(k == 0, 2 * task.seed_distance, task.padding + margin[live])[:, None]
        tail = inner + np.floor(u[1:] * (size - 2 * inner) * _FINE) / _FINE
        seed_tail = start[live, 0].T + margin[live] * units[:, angle[live, 0]]
        beside = seed_tail[:, :, None] + task.seed_distance * units[:, (u[1] * _DIRECTIONS).astype(int)]
        last_start, last_unit = start[live, before].T[:, :, None], units[:, angle[live, before]][:, :, None]
        pivot = np.where((k == 1)[:, None], beside, tail) - gap
        pivot = np.where(begins, pivot, last_start + L * last_unit)
        tail, head = pivot + gap, pivot + gap + task.paddle_length * unit

        free = ((tail >= inner) & (tail <= size - inner) & (head >= inner) & (head <= size - inner)).all(0)
        along = np.arange(self.steps) / (self.steps - 1) * L  # (a, P)
        centre, count = self.ground.at(live, pivot[..., None] + along[:, None] * unit[..., None])
        continued = _distance2(centre - last_start[..., None], last_unit[..., None], L[..., None])
        continued = (continued <= (self.clearance[live] ** 2)[:, None, None]) & ~begins[..., None]
        return pivot, theta, free & (count == continued).all(2)  # the link that is continued is not counted

    def place(self, won: np.ndarray, pivot: np.ndarray, theta: np.ndarray) -> None:
        """Put links of those images (w,), pivots (2, w) and directions (w,), into their slots."""
        order, slot = self.order, self.slot
        new = won[order.first[slot[won]] == slot[won]]
        self.without_last[new] = self.ground.links[new]
        self.start[won, slot[won]], self.angle[won, slot[won]] = pivot.T, theta
        self.placed[won, slot[won]] = True
        self.ground.count(won, pivot, self.units[:, theta], 1)
        k = slot[won]
        marked = order.snake[k] < 2
        self.grown[won[marked], order.snake[k[marked]]] += 1
        self.trials[won[order.next_snake[k] == k + 1]] = 0  # a snake is complete
        slot[won] += 1

    def shorten_marked(self, back: np.ndarray, snake: np.ndarray) -> None:
        """A marked snake of those images, for which there was no room, loses its newest links.

        After its failure number f as many as the largest power of two in f; if these are all, both begin again.
        """
        grown, failures, num_paddles = self.grown, self.failures, self.task.num_paddles
        failures[back, snake] += 1
        keep = grown[back, snake] - (failures[back, snake] & -failures[back, snake])
        again = back[keep < 1]
        grown[again], failures[again], self.placed[again], self.ground.links[again] = 0, 0, False, 0
        back, snake, keep = back[keep >= 1], snake[keep >= 1], keep[keep >= 1]
        for link in range(keep.min(initial=num_paddles), num_paddles):
            chosen = (keep <= link) & (link < grown[back, snake])
            images, s = back[chosen], 2 * link + snake[chosen]
            if not len(images):
                continue
            self.placed[images, s] = False
            self.ground.count(images, self.start[images, s].T, self.units[:, self.angle[images, s]], -1)
        grown[back, snake] = keep

    def restart_distractor(self, lost: np.ndarray) -> None:
        """The distractor of those images, for which there was no room, begins again, but not forever."""
        order, k = self.order, self.slot[lost]
        begun = lost[order.first[k] != k]
        self.ground.links[begun] = self.without_last[begun]
        self.placed[lost[:, None], np.arange(len(order.snake))] &= order.snake != order.snake[k][:, None]
        self.trials[lost] += 1
        given_up = self.trials[lost] == _DISTRACTOR_TRIALS
        self.slot[lost] = np.where(given_up, order.next_snake[k], order.first[k])
        self.trials[lost[given_up]] = 0

    def round(self, live: np.ndarray, u: np.ndarray) -> None:
        """Place the next link of those images (a,), or fail to."""
        pivot, theta, free = self.candidates(live, u)
        chosen, found = free.argmax(1), free.any(1)  # the first free one is taken
        c = chosen[found]
        self.place(live[found], pivot[:, found, c], theta[found, c])
        lost = live[~found]
        snake = self.order.snake[self.slot[lost]]
        self.shorten_marked(lost[snake < 2], snake[snake < 2])
        self.restart_distractor(lost[snake >= 2])
        # The shorter one of the marked snakes grows next.
        unfinished = live[self.grown[live].min(1) < self.task.num_paddles]
        snake = (self.grown[unfinished, 1] < self.grown[unfinished, 0]).astype(int)
        self.slot[unfinished] = 2 * self.grown[unfinished, snake] + snake


def grow_scenes(task: Pathfinder, split: str, indices: range) -> Scenes:
    """The geometry of these images; each is a function of (task, split, index) alone.

    Raises:
        ValueError: an image has no room for snakes of this length.
    """
    n, S = len(indices), len(layout(task.snake_lengths).snake)
    streams = [np.random.Generator(np.random.PCG64([task.seed, SPLITS.index(split), i])) for i in indices]
    coins = np.stack([stream.random(4) for stream in streams])
    label, origin = (coins[:, 0] < 0.5).astype(np.int64), (coins[:, 1] < 0.5).astype(np.int64)
    margin = np.array(task.paddle_margins)[(coins[:, 2] * len(task.paddle_margins)).astype(int)]
    growth = _Growth(task, margin)
    numbers = np.empty((n, 0, 0, 0))
    for r in range(_MAX_ROUNDS):
        live = np.flatnonzero(growth.slot < S)
        if not len(live):
            break
        if r % _ROUNDS == 0:
            numbers = np.empty((n, _ROUNDS, _CANDIDATES, 3))
            for i in live:
                numbers[i] = streams[i].random((_ROUNDS, _CANDIDATES, 3))
        growth.round(live, np.moveaxis(numbers[live, r % _ROUNDS], -1, 0))
    else:
        raise ValueError(
            f"image {indices[int(np.flatnonzero(growth.slot < S)[0])]} of {split} has no room for two snakes of "
            f"{task.num_paddles} paddles at image_size {task.image_size}: choose fewer, shorter or closer ones"
        )

    # Markers: the first end of a snake, and the last end of the same or of the other.
    every, direction = np.arange(n), growth.units.T[growth.angle]
    terminal = np.where(label == 1, origin, 1 - origin)
    last = 2 * (task.num_paddles - 1) + terminal
    to_head = (margin + task.paddle_length)[:, None] * direction[every, last]
    first_end = growth.start[every, origin] + margin[:, None] * direction[every, origin]
    markers = np.stack([first_end, growth.start[every, last] + to_head], axis=1)
    return Scenes(growth.start, direction, growth.placed, margin, markers, label)


# ---------------------------------------------------------------------------------------------------------------------
# Drawing.


def render(task: Pathfinder, scenes: Scenes) -> np.ndarray:
    """(n, size, size) uint8 images: paddles, each pixel as bright as the part of it that they cover, and white discs.

    Where they overlap, the brighter counts. A pixel is taken as a square that is turned like the paddle.
    """
    n, size = len(scenes.label), task.image_size
    half = math.ceil((task.paddle_length + task.paddle_thickness) / 2 + 0.5) + 1
    half = max(half, math.ceil(task.marker_radius + 0.5) + 1)
    image = np.zeros((n, size + 2 * half, size + 2 * half))
    window, every = np.arange(-half, half + 1), np.arange(n)

    def draw(images: np.ndarray, centre: np.ndarray, brightness: Any) -> None:
        """Brighten a window around centres (m, 2) to brightness(dy, dx), distances of pixel centres from them."""
        middle = np.floor(centre).astype(int)
        rows, columns = middle[:, 0, None] + window, middle[:, 1, None] + window
        dy = (rows + 0.5 - centre[:, 0, None])[:, :, None]
        dx = (columns + 0.5 - centre[:, 1, None])[:, None, :]
        place = images[:, None, None], rows[:, :, None] + half, columns[:, None, :] + half
        image[place] = np.maximum(image[place], brightness(dy, dx))

    def covered(distance: np.ndarray, width: float) -> np.ndarray:
        """Length of [distance - 1/2, distance + 1/2] inside of [-width/2, width/2]."""
        distance = np.abs(distance)
        return np.maximum(np.minimum(distance + 0.5, width / 2) - np.maximum(distance - 0.5, -width / 2), 0.0)

    for s in range(scenes.start.shape[1]):
        images = np.flatnonzero(scenes.placed[:, s])
        unit = scenes.direction[images, s]
        centre = scenes.start[images, s] + (scenes.margin[images] + task.paddle_length / 2)[:, None] * unit
        uy, ux = unit[:, 0, None, None], unit[:, 1, None, None]

        def paddle(dy: np.ndarray, dx: np.ndarray, uy: np.ndarray = uy, ux: np.ndarray = ux) -> np.ndarray:
            along, across = dy * uy + dx * ux, dy * ux - dx * uy
            area = covered(along, task.paddle_length) * covered(across, task.paddle_thickness)
            return task.paddle_contrast * area

        draw(images, centre, paddle)
    for m in range(2):
        draw(every, scenes.markers[:, m], lambda dy, dx: task.marker_radius + 0.5 - np.sqrt(dy * dy + dx * dx))
    image = image[:, half : half + size, half : half + size]
    return np.floor(np.minimum(image, 1.0) * 255 + 0.5).astype(np.uint8)
