# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""essm_train/tasks/pathfinder.py: what the labels say is true of the drawn paths, checked on a fine grid."""

import dataclasses
import itertools
import math

import networkx
import numpy as np
import pytest

from essm_train.tasks.pathfinder import Pathfinder, PathX, Scene, grow, render

ZOOM = 8  # cells per pixel of the raster below
SETS = {"hard": (Pathfinder(), 30), "pathx": (PathX(), 8)}
TINY = Pathfinder(contour_length=3, distractor_paddles=4)  # quick to grow


@pytest.fixture(scope="module", params=SETS)
def drawn(request) -> tuple[Pathfinder, list[Scene]]:
    task, count = SETS[request.param]
    return task, [grow(task, "train", i) for i in range(count)]


def paths(task: Pathfinder, scene: Scene, gaps: bool) -> list[set[tuple[int, int]]]:
    """Paddles as thin lines on a fine grid, without gaps whole links: the cells of each connected part."""
    first, last = (
        (scene.margin, scene.margin + task.paddle_length) if gaps else (0, task.paddle_length + 2 * scene.margin)
    )
    along = np.linspace(first, last, 4 * ZOOM * task.paddle_length)[:, None]
    links = np.concatenate(scene.snakes)
    cells = {
        tuple(cell) for link in links for cell in np.floor((link[:2] + along * link[2:]) * ZOOM).astype(int).tolist()
    }
    graph = networkx.Graph()
    for y, x in cells:
        near = itertools.product((y - 1, y, y + 1), (x - 1, x, x + 1))
        graph.add_edges_from(((y, x), cell) for cell in near if cell in cells)
    return list(networkx.connected_components(graph))


def path_at(found: list[set[tuple[int, int]]], point: np.ndarray) -> int:
    """That of a cell next to a point, which may lie on the edge between two."""
    y, x = np.floor(point * ZOOM).astype(int).tolist()
    near = set(itertools.product((y - 1, y, y + 1), (x - 1, x, x + 1)))
    return next(i for i, path in enumerate(found) if path & near)


def test_closing_the_gaps_joins_the_markers_exactly_if_the_label_says_so(drawn):
    task, scenes = drawn
    for image, scene in enumerate(scenes):
        joined = paths(task, scene, gaps=False)
        one, two = (path_at(joined, marker) for marker in scene.markers)
        assert (one == two) == scene.label, image
        assert len(paths(task, scene, gaps=True)) == sum(map(len, scene.snakes))  # with the gaps nothing is joined


def test_markers_are_ends_of_the_two_long_snakes(drawn):
    task, scenes = drawn
    for scene in scenes:
        long = scene.snakes[:2]
        assert [len(snake) for snake in long] == [task.num_paddles] * 2
        tails = [snake[0, :2] + scene.margin * snake[0, 2:] for snake in long]
        heads = [snake[-1, :2] + (scene.margin + task.paddle_length) * snake[-1, 2:] for snake in long]
        begins = [s for s in (0, 1) if np.allclose(scene.markers[0], tails[s])]
        ends = [s for s in (0, 1) if np.allclose(scene.markers[1], heads[s])]
        assert (begins == ends) == bool(scene.label) and len(begins) == len(ends) == 1
        assert math.dist(*tails) == pytest.approx(task.seed_distance, abs=2e-3)  # directions are rounded to 2^-14
        inner = 2 * task.seed_distance
        assert (tails[0] >= inner).all() and (tails[0] <= task.image_size - inner).all()


def test_links_continue_turn_little_and_stay_inside(drawn):
    task, scenes = drawn
    largest = 0.0
    for scene in scenes:
        for snake in scene.snakes:
            starts, units = snake[:, :2], snake[:, 2:]
            ends = starts + (task.paddle_length + 2 * scene.margin) * units
            np.testing.assert_array_equal(starts[1:], ends[:-1])  # so that gaps are 2 margin long
            angles = np.unwrap(np.arctan2(*units.T))
            largest = max(largest, np.abs(np.diff(angles)).max(initial=0.0))
            tail = starts + scene.margin * units
            for point in (tail, tail + task.paddle_length * units):
                border = task.padding + scene.margin
                assert (point >= border).all() and (point <= task.image_size - border).all()
    assert 0.5 < largest * task.continuity / (math.pi / 2) <= 1 + 2 * math.pi / 1024  # one step of the circle


def test_links_keep_their_distance(drawn):
    """From all but their neighbours, up to the half diagonal of a cell of the grid and the spacing of tests on it."""
    task, scenes = drawn
    for image, scene in enumerate(scenes):
        links = [(s, k, link) for s, snake in enumerate(scene.snakes) for k, link in enumerate(snake)]
        along = np.linspace(0, task.paddle_length + 2 * scene.margin, 25)[:, None]
        slack = math.sqrt(0.5) / max(1, 2 // min(task.paddle_margins))
        least = math.sqrt((2 * scene.margin - slack) ** 2 - 0.5**2)
        for (s, k, one), (t, m, two) in itertools.combinations(links, 2):
            if s != t or m != k + 1:
                points, others = (link[:2] + along * link[2:] for link in (one, two))
                assert np.sqrt(((points[:, None] - others) ** 2).sum(-1)).min() > least, (image, s, k)


def test_labels_and_marked_snakes_are_fair_coins():
    """Within 5 deviations of a binomial."""
    task, n = dataclasses.replace(TINY, contour_length=2, distractor_paddles=0), 1000
    scenes = [grow(task, "train", i) for i in range(n)]
    label = np.array([scene.label == 1 for scene in scenes])
    first = np.array([(s.snakes[0][0, :2] + s.margin * s.snakes[0][0, 2:] == s.markers[0]).all() for s in scenes])
    for coin in (label, first, first == label):
        assert abs(coin.mean() - 0.5) < 5 * 0.5 / math.sqrt(n)


def test_an_image_depends_on_seed_split_and_index_only():
    rows, scenes = TINY.rows("test", range(9)), [grow(TINY, "test", i) for i in range(9)]
    pixels = np.array(rows["pixels"].to_pylist()).reshape(9, 32, 32)
    np.testing.assert_array_equal(pixels, [render(TINY, scene) for scene in scenes])
    assert rows["label"].to_pylist() == [scene.label for scene in scenes] and rows["pixels"].type.list_size == 1024
    assert TINY.rows("test", range(5, 7)).equals(rows.slice(5, 2))
    for other in (TINY.rows("train", range(9)), dataclasses.replace(TINY, seed=1).rows("test", range(9))):
        assert other["pixels"] != rows["pixels"]
    # Raise Pathfinder.VERSION with these lines. The numbers are exact on every machine.
    tasks = [Pathfinder(difficulty=level) for level in ("baseline", "intermediate", "hard")] + [PathX()]
    sums = [sum(int(render(task, grow(task, "train", i)).astype(int).sum()) for i in range(3)) for task in tasks]
    assert sums == [46084, 50325, 56668, 347503]


def test_parameters_that_cannot_work_are_refused(monkeypatch):
    for changes, message in (
        ({"difficulty": "easy"}, "difficulty must be one of baseline, intermediate, hard, got 'easy'"),
        ({"paddle_margins": []}, "paddle_margins must name at least one"),
        ({"image_size": 28}, r"image_size must be at least 4 seed_distance \+ paddle_length = 30, got 28"),
        ({"continuity": math.nan}, "continuity must be"),
    ):
        with pytest.raises(ValueError, match=message):
            Pathfinder(**changes)
    monkeypatch.setattr("essm_train.tasks.pathfinder._MAX_ROUNDS", 300)
    with pytest.raises(ValueError, match="no room for two snakes of 90 paddles at image_size 32"):
        grow(Pathfinder(contour_length=90), "test", 3)
