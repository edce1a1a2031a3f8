# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Mazes: what is generated, what a walker sees and does, and an objective that true values fulfil."""

import networkx
import numpy as np
import pytest
import torch

from benchmarks import mazes
from benchmarks.mazes import CELL, DOOR, MOVES, SIDE, VIEW, WALL, ValueConsistency, Walk, costs_and_values


def graph(maze):
    """Directed, a weight of 2 into a door."""
    found = networkx.DiGraph()
    for r, c in np.argwhere(maze != WALL):
        for dr, dc in MOVES:
            if maze[r + dr, c + dc] != WALL:
                found.add_edge((r, c), (r + dr, c + dc), weight=2 if maze[r + dr, c + dc] == DOOR else 1)
    return found


def test_mazes_are_connected_walled_and_of_all_kinds():
    rng, kinds, loops = np.random.default_rng(0), set(), 0
    for _ in range(20):
        maze = mazes.make_maze(rng, 11)
        assert not maze[[0, -1]].any() and not maze[:, [0, -1]].any()
        assert networkx.is_strongly_connected(graph(maze)) and (maze[1::2, 1::2] != WALL).all()
        kinds |= {*maze.ravel().tolist()}
        loops += len(graph(maze).edges) // 2 - len(graph(maze).nodes) + 1
        for r, c in np.argwhere(maze == DOOR):
            assert sum(maze[r + dr, c + dc] != WALL for dr, dc in MOVES) == 2
    assert kinds == {WALL, CELL, DOOR} and loops > 20
    with pytest.raises(ValueError, match="odd and at least 5, got 10"):
        mazes.make_maze(rng, 10)


def test_the_expert_takes_as_many_steps_as_the_shortest_way_of_a_graph():
    rng, opened = np.random.default_rng(2), 0
    for _ in range(20):
        walk = mazes.new_walk(rng, 11)
        expected = networkx.single_source_dijkstra_path_length(graph(walk.maze).reverse(), walk.goal)
        assert all(walk.to_goal[at] == steps for at, steps in expected.items())
        assert (walk.to_goal[walk.maze == WALL] == mazes.FAR).all() and walk.optimal == expected[walk.at] >= 11
        doors = int((walk.maze == DOOR).sum())
        while not walk.arrived:
            walk.step(walk.expert())
        assert walk.steps == walk.optimal and not walk.late
        opened += doors - int((walk.maze == DOOR).sum())
    assert opened > 0


def corridor():
    """A straight corridor of seven cells with a door in the fourth, walker at its left end, goal at its right."""
    maze = np.zeros((9, 9), dtype=np.int8)
    maze[3, 1:8] = CELL
    maze[3, 4] = DOOR
    return Walk(maze, (3, 1), (3, 7))


def test_a_walker_sees_opens_and_stays_before_walls():
    walk = corridor()
    assert walk.optimal == 7 and not walk.difficult()
    seen = walk.observe()
    assert seen["view"][SIDE].tolist() == [WALL, WALL, CELL, CELL, CELL] and seen["goal"].tolist() == [0, 6]
    assert seen["features"].shape == (mazes.FEATURES,) and seen["features"][-1] == 1
    for action, at, moved in ((0, (3, 1), [0, 0]), (1, (3, 2), [0, 1]), (1, (3, 3), [0, 1])):
        walk.step(action)
        assert walk.at == at and walk.observe()["moved"].tolist() == moved
    assert walk.steps == 3 and walk.difficult() and walk.observe()["view"][SIDE, SIDE + 1] == DOOR
    walk.step(1)
    assert walk.at == (3, 3) and walk.observe()["view"][SIDE, SIDE + 1] == CELL  # it is open now
    assert walk.observe()["moved"].tolist() == [0, 0]
    walk.step(1)
    assert walk.at == (3, 4)
    for walk.steps, late in ((33, False), (34, True)):
        assert walk.late == late
    costs = costs_and_values(torch.arange(25.0)[None], mazes.stack([seen])["view"])
    assert costs.tolist() == [[mazes.FAR, 13 + 1, mazes.FAR, mazes.FAR]]


def true_values(walk):
    """The distances in view, 0 in walls."""
    padded = np.pad(np.where(walk.maze == WALL, 0.0, walk.to_goal), SIDE)
    r, c = walk.at
    return torch.tensor(padded[r : r + VIEW, c : c + VIEW].ravel(), dtype=torch.float64)


def test_true_values_are_consistent_along_a_way_and_others_are_not():
    rng = np.random.default_rng(3)
    for _ in range(5):
        walk, objective = mazes.new_walk(rng, 11), ValueConsistency(11, temperature=1e-3)
        walk.maze[walk.maze == DOOR] = CELL
        walk = Walk(walk.maze, walk.at, walk.goal)
        history = objective.initial_history(mazes.stack([walk.observe()]))
        shifted = 0.0
        while not walk.arrived:
            seen, y = mazes.stack([walk.observe()]), true_values(walk)[None]
            assert float(objective(y, seen, history)) < 1e-4
            assert float(objective(y * 0.0, seen, history)) > 0.1
            shifted += float(objective(y + 1.0, seen, history))
            history = objective.commit(history, y, seen)
            walk.step(walk.expert())
        assert shifted > 0.5  # agreeing with each other is not enough: with the past, and the goal


def test_what_was_said_is_remembered_where_it_was_said():
    walk, objective = corridor(), ValueConsistency(9)
    seen = mazes.stack([walk.observe()])
    history = objective.commit(objective.initial_history(seen), torch.full((1, 25), 5.0), seen)
    assert int(history["known"].sum()) == 9 and int((history["memory"] == 5).sum()) == 9
    for _ in range(2):
        walk.step(1)
        seen = mazes.stack([walk.observe()])
        history = objective.commit(history, torch.full((1, 25), 7.0), seen)
    walk.step(1)  # opens the door
    seen = mazes.stack([walk.observe()])
    y, free = torch.full((1, 25), 20.0), int((seen["view"] != WALL).sum())
    with_past, without = (float(objective(y, seen, h)) for h in (history, objective.initial_history(seen)))
    assert (with_past - without) * free == pytest.approx((20 - 7) ** 2)  # two cells to the left, as said last
    assert int(history["known"].sum()) == 15
