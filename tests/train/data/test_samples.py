# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""essm_train/data/samples.py: every sample of an epoch once, in an order that no interruption changes."""

import functools
from collections import Counter

import pytest
from datasets import Dataset, IterableDataset

from essm_train.data.samples import MapSamples, StreamSamples, even_shares, prefetched, share_of


def pair(item: dict, rest: int | None) -> tuple[list, int | None]:
    """Two items make a sample; the last one of an odd number waits, and is forgotten at the end of an epoch."""
    return ([], item["x"]) if rest is None else ([(rest, item["x"])], None)


def numbers(count: int = 50, buffer_size: int = 8, seed: int = 0, expand=lambda item, rest: ([item["x"]], rest)):
    rows = Dataset.from_dict({"x": list(range(count))})
    return StreamSamples(rows.to_iterable_dataset, expand, buffer_size, seed)


SOURCES = {
    "map": lambda seed=0: MapSamples(range(50), seed),
    "stream": lambda seed=0: numbers(101, seed=seed, expand=pair),
}


@pytest.mark.parametrize("kind", SOURCES)
def test_an_epoch_holds_every_sample_once_and_the_next_has_another_order(kind):
    source = SOURCES[kind]()
    first, second = (source.load(source.draw(50)) for _ in range(2))
    expected = [(i, i + 1) for i in range(0, 100, 2)] if kind == "stream" else list(range(50))
    assert sorted(first) == sorted(second) == expected
    assert first != second and expected not in (first, second)
    other = SOURCES[kind](seed=1)
    assert other.load(other.draw(50)) != first


@pytest.mark.parametrize("kind", SOURCES)
def test_every_place_can_be_resumed(kind):
    """In the middle of the buffer's life, when the stream has ended and the buffer empties, and between epochs."""
    source = SOURCES[kind]()
    expected = source.load(source.draw(120))
    source = SOURCES[kind]()
    for place in range(110):
        state = source.state_dict()
        source.draw(1)  # must not change the state
        resumed = SOURCES[kind]()
        resumed.draw(3)  # nor must what came before
        resumed.load_state_dict(state)
        assert resumed.load(resumed.draw(10)) == expected[place : place + 10], place


def test_a_stream_is_resumed_again_before_it_reads_on():
    """A row of many samples lasts for a while, and a stream that has not gone on yet says that it is at its start."""
    expected = numbers(6, expand=many).draw(120)
    drawn, state = [], numbers(6, expand=many).state_dict()
    for _ in range(24):
        source = numbers(6, expand=many)
        source.load_state_dict(state)
        drawn += source.draw(5)
        state = source.state_dict()
    assert drawn == expected


def many(item: dict, rest: int | None) -> tuple[list, int]:
    """Twenty samples of a row, the first of which tells the row before."""
    return [(item["x"], rest), *((item["x"], i) for i in range(1, 20))], item["x"]


def test_a_stream_is_shuffled_within_its_buffer():
    assert numbers(buffer_size=1).draw(50) == list(range(50))
    drawn = numbers(buffer_size=8).draw(50)
    assert all(number < place + 8 for place, number in enumerate(drawn))
    places = Counter(numbers(5, buffer_size=5, seed=seed).draw(1)[0] for seed in range(300))
    assert all(30 < places[number] < 95 for number in range(5))  # 60 expected: five standard deviations are 35


def test_a_stream_without_samples_is_an_error():
    with pytest.raises(ValueError, match="the training stream holds no sample: it is empty, or shorter than one block"):
        numbers(1, expand=pair).draw(1)


def test_a_row_that_breaks_the_stream_is_an_error_and_what_came_before_is_drawn():
    def rows():
        yield from ({"x": 0}, {"x": 1})
        raise ValueError("no text") from OSError("row 2 is broken")

    def opened():
        return IterableDataset.from_generator(rows)

    source = StreamSamples(opened, lambda item, rest: ([item["x"]], rest), 1, 0)
    assert source.draw(2) == [0, 1]
    with pytest.raises(ValueError, match="cannot read the training stream: row 2 is broken"):
        source.draw(1)


def test_shares_of_a_draw_are_disjoint_and_complete():
    drawn = list(range(24))
    shares = [share_of(drawn, rank, 3, micro_step, 4) for micro_step in range(2) for rank in range(3)]
    assert [i for share in shares for i in share] == drawn
    assert share_of(drawn, 0, 1, 1, 12) == drawn[12:]  # one process with the same global batch
    for count in (1, 5, 6):  # of an evaluation equally long too
        shares = [even_shares(count, rank, 3) for rank in range(3)]
        assert len({len(share) for share in shares}) == 1
        assert sorted(i for share in shares for i in share if i is not None) == list(range(count))


def test_what_is_read_ahead_comes_in_order_and_a_failure_where_it_belongs():
    for count, unread in ((9, 3), (2, 2)):  # the third is read ahead, but not beyond the last
        places = iter(range(4))
        coming = prefetched(functools.partial(next, places), count)
        assert [next(coming) for _ in range(2)] == [0, 1]
        coming.close()
        assert next(places) == unread

    divisors = iter([4, 0, 2])
    coming = prefetched(lambda: 8 // next(divisors), 3)
    assert next(coming) == 2
    with pytest.raises(ZeroDivisionError):
        next(coming)
