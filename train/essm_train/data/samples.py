# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""In which order samples are read, and how a run finds its place again.

Every process draws the same samples and loads its share: `collate(source.load(source.draw(n)[mine]))`. So the order
depends neither on the number of processes nor on an interruption, and every sample of an epoch is drawn exactly once
before the next epoch begins. `source.state_dict()` is the place reached, which later draws do not change. (A DataLoader
shuffles per process and finds its place again by reading what it has read.)
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeAlias

import numpy as np

from essm_train.data.documents import items_of

Expand: TypeAlias = Callable[[dict[str, Any], Any], tuple[list[Any], Any]]
HELD_OUT_FRACTION = 0.1  # of data that comes without a validation part
_BEGIN = {"epoch": 0, "drawn": 0, "ended": False, "buffer": [], "rest": None, "stream": None}


@functools.lru_cache(4)
def _order(seed: int, epoch: int, count: int) -> np.ndarray:
    return np.random.default_rng([seed, epoch]).permutation(count)


class MapSamples:
    """Anything with len() and integer indexing: one shuffled pass over all of it after the other.

    The order is a pure function of (seed, position), so that the place in the data is one integer.
    """

    def __init__(self, samples: Any, seed: int):
        self.samples, self.seed, self.num_samples, self.position = samples, seed, len(samples), 0

    def draw(self, count: int) -> list[int]:
        self.position += count
        places = (divmod(position, self.num_samples) for position in range(self.position - count, self.position))
        return [int(_order(self.seed, epoch, self.num_samples)[place]) for epoch, place in places]

    def load(self, handles: Sequence[int]) -> list[Any]:
        return [self.samples[index] for index in handles]

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


class StreamSamples:
    """Samples of a `datasets.IterableDataset`, shuffled in a buffer that is part of the state, and emptied each epoch.

    (Accelerate's and `datasets`' own shuffle buffers are refilled on resume, which loses samples.)

    Args:
        open_stream: makes the stream anew, for every epoch: an IterableDataset that resumed once begins every later
            pass at that place.
        expand: (item, rest) to samples and the rest for the next item, such as text that fills no block; the rest is
            None where an epoch begins.
        buffer_size: samples to choose among; 1 keeps the stream's order.
    Raises:
        ValueError: (draw) a whole pass over the stream gave no sample, or it cannot be read.
    """

    num_samples = None

    def __init__(self, open_stream: Callable[[], Any], expand: Expand, buffer_size: int, seed: int):
        self.open_stream, self.expand, self.buffer_size, self.seed = open_stream, expand, buffer_size, seed
        self.load_state_dict(_BEGIN)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch, self.drawn, self._ended = state["epoch"], state["drawn"], state["ended"]
        self.buffer, self._rest = list(state["buffer"]), state["rest"]
        self._stream, self._place, self._read = self.open_stream(), state["stream"], False
        if self._place is not None:
            self._stream.load_state_dict(self._place)
        self._items = items_of(self._stream, "the training stream")

    def _fill(self) -> None:
        while not self._ended and len(self.buffer) < self.buffer_size:
            item = next(self._items, None)
            if item is None:
                self._ended = True
            else:
                self._read = True
                samples, self._rest = self.expand(item, self._rest)
                self.buffer += samples

    def draw(self, count: int) -> list[Any]:
        samples: list[Any] = []
        while len(samples) < count:
            self._fill()
            if self.buffer:
                chosen = int(np.random.default_rng([self.seed, self.epoch, self.drawn]).integers(len(self.buffer)))
                self.buffer[chosen], self.buffer[-1] = self.buffer[-1], self.buffer[chosen]
                samples.append(self.buffer.pop())
                self.drawn += 1
            elif self.drawn:
                self.load_state_dict(_BEGIN | {"epoch": self.epoch + 1})
            else:
                raise ValueError("the training stream holds no sample: it is empty, or shorter than one block")
        return samples

    def load(self, handles: Sequence[Any]) -> list[Any]:
        return list(handles)

    def state_dict(self) -> dict[str, Any]:
        # Before it has read on, a resumed stream says that it is at its start.
        stream = self._stream.state_dict() if self._read else self._place
        place = {"epoch": self.epoch, "drawn": self.drawn, "ended": self._ended, "stream": stream}
        return place | {"buffer": list(self.buffer), "rest": self._rest}


def hold_out(count: int, source: str, unit: str = "rows") -> tuple[np.ndarray, np.ndarray]:
    """Rows to train on, and a random tenth to select by, both ascending, whatever the seed of a run.

    Raises ValueError if there is one row only.
    """
    order = np.random.default_rng([0, 1]).permutation(count)
    held_out = max(1, round(HELD_OUT_FRACTION * count))
    if held_out == count:
        raise ValueError(f"{source} must hold at least 2 {unit}, so that one can be held out, got {count}")
    return np.sort(order[held_out:]), np.sort(order[:held_out])


def at_most(wanted: int | None, rows: np.ndarray) -> np.ndarray:
    """That many of the rows, at random, ascending, whatever the seed of a run; all of them for None."""
    return np.sort(rows[np.random.default_rng([0, 2]).permutation(len(rows))[:wanted]])


SampleSource = MapSamples | StreamSamples


def share_of(drawn: Sequence[Any], rank: int, ranks: int, micro_step: int, batch_size: int) -> Sequence[Any]:
    """The part of a draw that one process reads in one micro-step: the draw is laid out (micro_step, rank, batch)."""
    first = (micro_step * ranks + rank) * batch_size
    return drawn[first : first + batch_size]


def even_shares(count: int, rank: int, ranks: int) -> list[int | None]:
    """Indices below `count` that a process evaluates; None fills up, so that all processes get equally many."""
    rounds = -(-count // ranks)
    return [i if i < count else None for i in range(rank, rounds * ranks, ranks)]


def prefetched(fetch: Callable[[], Any], count: int) -> Generator[Any]:
    """What `count` calls of `fetch` give, each made in one thread while the last is used. Closing it waits for that."""
    with ThreadPoolExecutor(1) as pool:
        coming = pool.submit(fetch)
        for left in reversed(range(count)):
            result = coming.result()
            if left:
                coming = pool.submit(fetch)
            yield result
