# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""essm_train/tasks/pathfinder.py: what the labels say is true of the drawn paths, checked by flood fill."""

import dataclasses
import math
from collections import deque

import numpy as np
import pytest

from essm_train.tasks.pathfinder import PATHX, Pathfinder, Scenes, grow_scenes, layout, render

ZOOM = 8  # cells per pixel of the raster below
SETS = {"hard": (Pathfinder(), 30), "pathx": (Pathfinder(**PATHX), 8)}
TINY = Pathfinder(contour_length=3, distractor_paddles=4)  # quick to grow


@pytest.fixture(scope="module", params=SETS)
def drawn(request) -> tuple[Pathfinder, Scenes]:
    task, count = SETS[request.param]
    return task, grow_scenes(task, "train", range(count))


def flood(raster: np.ndarray, begin: tuple[int, int]) -> np.ndarray:
    """Cells of a boolean raster that are joined to `begin`, over edges and corners."""
    reached = np.zeros_like(raster)
    reached[begin] = raster[begin]
    queue = deque([begin] if raster[begin] else [])
    while queue:
        y, x = queue.popleft()
        for near in ((y + dy, x + dx) for dy in (-1, 0, 1) for dx in (-1, 0, 1)):
            inside = all(0 <= c < side for c, side in zip(near, raster.shape))
            if inside and raster[near] and not reached[near]:
                reached[near] = True
                queue.append(near)
    return reached


def raster(task: Pathfinder, scenes: Scenes, image: int, gaps: bool) -> np.ndarray:
    """All paddles of an image as thin lines on a fine grid; without gaps, whole links."""
    cells = np.zeros((task.image_size * ZOOM, task.image_size * ZOOM), bool)
    margin = scenes.margin[image]
    along = np.linspace(margin, margin + task.paddle_length, 10 * ZOOM * task.paddle_length)
    if not gaps:
        along = np.linspace(0, task.paddle_length + 2 * margin, 20 * ZOOM * task.paddle_length)
    for link in np.flatnonzero(scenes.placed[image]):
        points = scenes.start[image, link] + along[:, None] * scenes.direction[image, link]
        cells[tuple(np.floor(points * ZOOM).astype(int).T)] = True
    return cells


def cell(point: np.ndarray) -> tuple[int, int]:
    y, x = np.floor(point * ZOOM).astype(int)
    return int(y), int(x)


def around(raster: np.ndarray, point: np.ndarray) -> tuple[int, int]:
    """A set cell next to a point, which may lie on the edge between two."""
    y, x = cell(point)
    return next((y + dy, x + dx) for dy in (0, -1, 1) for dx in (0, -1, 1) if raster[y + dy, x + dx])


def test_closing_the_gaps_joins_the_markers_exactly_if_the_label_says_so(drawn):
    task, scenes = drawn
    for image, label in enumerate(scenes.label):
        cells = raster(task, scenes, image, gaps=False)
        reached = flood(cells, around(cells, scenes.markers[image, 0]))
        assert reached[around(cells, scenes.markers[image, 1])] == label, image


def test_with_the_gaps_nothing_is_joined(drawn):
    task, scenes = drawn
    for image in range(4):
        cells, parts = raster(task, scenes, image, gaps=True), 0
        while cells.any():
            y, x = (int(c[0]) for c in np.nonzero(cells))
            cells &= ~flood(cells, (y, x))
            parts += 1
        assert parts == scenes.placed[image].sum()


def test_markers_are_ends_of_the_two_long_snakes(drawn):
    task, scenes = drawn
    last = 2 * task.num_paddles - 2
    for image, label in enumerate(scenes.label):
        assert scenes.placed[image, : last + 2].all()
        margin, first, other = scenes.margin[image], scenes.markers[image, 0], scenes.markers[image, 1]
        starts, units = scenes.start[image], scenes.direction[image]
        tails = [starts[s] + margin * units[s] for s in (0, 1)]
        heads = [starts[last + s] + (margin + task.paddle_length) * units[last + s] for s in (0, 1)]
        begins = [s for s in (0, 1) if np.allclose(first, tails[s])]
        ends = [s for s in (0, 1) if np.allclose(other, heads[s])]
        assert (begins == ends) == bool(label) and len(begins) == len(ends) == 1
        assert math.dist(*tails) == pytest.approx(task.seed_distance, abs=2e-3)  # directions are rounded to 2^-14
        inner = 2 * task.seed_distance
        assert (tails[0] >= inner).all() and (tails[0] <= task.image_size - inner).all()


def test_links_continue_turn_little_and_stay_inside(drawn):
    task, scenes = drawn
    before = layout(task.snake_lengths).before
    length = task.paddle_length + 2 * scenes.margin
    largest = 0.0
    for link in np.flatnonzero(before >= 0):
        images = np.flatnonzero(scenes.placed[:, link])
        assert scenes.placed[images, before[link]].all()
        unit, old = scenes.direction[images, link], scenes.direction[images, before[link]]
        end = scenes.start[images, before[link]] + length[images, None] * old
        np.testing.assert_array_equal(scenes.start[images, link], end)  # so that gaps are 2 margin long
        turn = np.arccos(np.clip((unit * old).sum(1) / np.sqrt((unit**2).sum(1) * (old**2).sum(1)), -1, 1))
        largest = max(largest, turn.max(initial=0.0))
    assert 0.5 < largest * task.continuity / (math.pi / 2) <= 1 + 2 * math.pi / 1024  # one step of the circle
    images, links = np.nonzero(scenes.placed)
    tail = scenes.start[images, links] + scenes.margin[images, None] * scenes.direction[images, links]
    head = tail + task.paddle_length * scenes.direction[images, links]
    border = (task.padding + scenes.margin[images])[:, None]
    for point in (tail, head):
        assert (point >= border).all() and (point <= task.image_size - border).all()


def test_links_keep_their_distance(drawn):
    """From all but their neighbours, up to the half diagonal of a cell of the ground and the spacing of tests on it."""
    task, scenes = drawn
    before = layout(task.snake_lengths).before
    for image in range(len(scenes.label)):
        margin, links = scenes.margin[image], np.flatnonzero(scenes.placed[image])
        along = np.linspace(0, task.paddle_length + 2 * margin, 25)[:, None]
        points = scenes.start[image, links, None] + along * scenes.direction[image, links, None]  # (links, 25, 2)
        slack = math.sqrt(0.5) / max(1, 2 // min(task.paddle_margins))
        least = math.sqrt((2 * margin - slack) ** 2 - 0.5**2)
        for i, one in enumerate(links):
            others = [j for j, two in enumerate(links) if two > one and before[two] != one]
            if others:
                gap = np.sqrt(((points[i][None, :, None] - points[others][:, None]) ** 2).sum(-1)).min()
                assert gap > least, (image, one)


def test_labels_and_marked_snakes_are_fair_coins():
    """Within 5 deviations of a binomial."""
    task, n = dataclasses.replace(TINY, contour_length=2, distractor_paddles=0), 3000
    scenes = grow_scenes(task, "train", range(n))
    tail = scenes.start[:, 0] + scenes.margin[:, None] * scenes.direction[:, 0]
    first = (tail == scenes.markers[:, 0]).all(1)
    for coin in (scenes.label == 1, first, first == (scenes.label == 1)):
        assert abs(coin.mean() - 0.5) < 5 * 0.5 / math.sqrt(n)


def test_an_image_depends_on_seed_split_and_index_only(monkeypatch):
    whole, scenes = TINY.rows("test", range(0, 9), {}), grow_scenes(TINY, "test", range(9))
    np.testing.assert_array_equal(np.array(whole["pixels"].to_pylist()).reshape(9, 32, 32), render(TINY, scenes))
    assert whole["label"].to_pylist() == scenes.label.tolist()
    assert whole["pixels"].type.list_size == 1024
    assert TINY.rows("test", range(5, 7), {}).equals(whole.slice(5, 2))
    monkeypatch.setattr("essm_train.tasks.pathfinder._BATCH", 2)
    assert TINY.rows("test", range(0, 9), {}).equals(whole)
    for other in (TINY.rows("train", range(9), {}), dataclasses.replace(TINY, seed=1).rows("test", range(9), {})):
        assert other["pixels"] != whole["pixels"]


def test_the_data_of_version_1_stay_what_they_are():
    """Raise Pathfinder.VERSION with these lines. The numbers are exact on every machine."""
    tasks = [Pathfinder(difficulty=level) for level in ("baseline", "intermediate", "hard")] + [Pathfinder(**PATHX)]
    sums = [int(render(task, grow_scenes(task, "train", range(3))).astype(int).sum()) for task in tasks]
    assert sums == [46084, 50325, 56668, 347503]


def test_parameters_that_cannot_work_are_refused():
    for changes, message in (
        ({"difficulty": "easy"}, "difficulty must be one of baseline, intermediate, hard, got 'easy'"),
        ({"paddle_margins": ()}, "paddle_margins must be integers of at least 1"),
        ({"image_size": 28}, r"image_size must be at least 4 seed_distance \+ paddle_length = 30, got 28"),
        ({"continuity": math.nan}, "continuity must be"),
    ):
        with pytest.raises(ValueError, match=message):
            Pathfinder(**changes)


def test_snakes_without_room_are_given_up(monkeypatch):
    monkeypatch.setattr("essm_train.tasks.pathfinder._MAX_ROUNDS", 300)
    with pytest.raises(ValueError, match="image 3 of test has no room for two snakes of 90 paddles at image_size 32"):
        grow_scenes(Pathfinder(contour_length=90), "test", range(3, 5))
