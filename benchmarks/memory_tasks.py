# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""The field's probes of memory: recall, lookup, copying, induction and delay, made of random numbers and nothing else.

    task = choose_task(TASKS, "mqar:pairs=8,length=64")
    inputs, targets = task.sample(32, np.random.default_rng(0))

Tasks of tokens give inputs (n, L) int64 in [0, vocabulary) and targets (n, L) int64: the token that the output AT that
position shall be, not the next one, or IGNORED where nothing is asked. Delays of noise give float32 (n, L) of variance
1, and targets that are NaN where nothing is asked. Samples are a pure function of the parameters and of the generator.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

IGNORED = -100  # as torch's cross-entropy has it
Samples = tuple[np.ndarray, np.ndarray]


def _check(task: Any, possible: bool) -> None:
    """Raises ValueError for parameters that cannot be met."""
    if not possible or min(vars(task).values()) <= 0:
        raise ValueError(f"no sample can meet {task}")


def _distinct(rng: np.random.Generator, weights: np.ndarray, count: int, size: int) -> np.ndarray:
    """(count, size) distinct indices of `weights` a row, drawn one after the other in proportion to them.

    The largest of log(weight) + Gumbel noise, in descending order, are such a draw.
    """
    keys = np.log(weights) + rng.gumbel(size=(count, len(weights)))
    return np.argsort(-keys, axis=1)[:, :size]


@dataclass(frozen=True)
class AssociativeRecall:
    """MQAR of Zoology (Arora et al. 2023, arXiv 2312.04927): keys with values, then every key once, in any order.

        k1 v1 k2 v2 .. | .. k2 ? .. k1 ? ..       the output at a key of the second part is its value

    Keys are from the lower half of the vocabulary, without 0, values from the upper half, both without repetition. In
    the room after the pairs every second position can hold a key; number i from there (0, 1, ..) with a weight of
    (i + 1)^(power - 1). All other positions there hold random tokens of the whole vocabulary.
    """

    length: int = 32
    pairs: int = 4
    vocabulary: int = 32
    power: float = 0.01

    def __post_init__(self) -> None:
        _check(self, self.length % 2 == 0 and 4 * self.pairs <= self.length and self.pairs < self.vocabulary // 2)

    def sample(self, count: int, rng: np.random.Generator) -> Samples:
        half, first = self.vocabulary // 2, 2 * self.pairs
        keys = 1 + _distinct(rng, np.ones(half - 1), count, self.pairs)
        values = half + _distinct(rng, np.ones(self.vocabulary - half), count, self.pairs)
        slots = np.arange(1, (self.length - first) // 2 + 1)
        places = first + 2 * _distinct(rng, slots ** (self.power - 1.0), count, self.pairs)
        inputs = rng.integers(self.vocabulary, size=(count, self.length))
        inputs[:, 0:first:2], inputs[:, 1:first:2] = keys, values
        targets = np.full_like(inputs, IGNORED)
        np.put_along_axis(inputs, places, keys, 1)
        np.put_along_axis(targets, places, values, 1)
        return inputs, targets


@dataclass(frozen=True)
class SelectiveCopying:
    """Selective copying (Gu and Dao 2023, arXiv 2312.00752): tokens at random places among noise, then in their order.

        . . b . a . . c . | > > >         the outputs at the markers are b a c

    Token 0 is noise and 1 the marker; data are uniform over the others, with repetition. The length holds the markers.
    """

    length: int = 32
    tokens: int = 4
    vocabulary: int = 16

    def __post_init__(self) -> None:
        _check(self, 2 * self.tokens <= self.length and self.vocabulary > 2)

    def sample(self, count: int, rng: np.random.Generator) -> Samples:
        context = self.length - self.tokens
        data = rng.integers(2, self.vocabulary, size=(count, self.tokens))
        places = np.sort(_distinct(rng, np.ones(context), count, self.tokens), axis=1)
        inputs = np.zeros((count, self.length), np.int64)
        np.put_along_axis(inputs, places, data, 1)
        inputs[:, context:] = 1
        targets = np.full_like(inputs, IGNORED)
        targets[:, context:] = data
        return inputs, targets


@dataclass(frozen=True)
class InductionHeads:
    """Induction heads (Olsson et al. 2022, as in Gu and Dao 2023): what followed the special token the first time?

        c a * b d a c b * -> b         one question, at the last position

    Token 0 is special: it stands once at a random place, before a token of its own, and at the end. All others are
    uniform over the rest of the vocabulary.
    """

    length: int = 32
    vocabulary: int = 16

    def __post_init__(self) -> None:
        _check(self, self.length > 2 and self.vocabulary > 1)

    def sample(self, count: int, rng: np.random.Generator) -> Samples:
        inputs = rng.integers(1, self.vocabulary, size=(count, self.length))
        places = rng.integers(self.length - 2, size=count)
        rows = np.arange(count)
        inputs[rows, places] = inputs[:, -1] = 0
        targets = np.full_like(inputs, IGNORED)
        targets[:, -1] = inputs[rows, places + 1]
        return inputs, targets


@dataclass(frozen=True)
class PhoneBook:
    """Looking a number up in a phone book, as in Jelassi et al. 2024 (arXiv 2402.01032), over letters and digits.

        n n d d d | m m d d d | .. | m m d d -> d d d      at the last letter the first digit, at a digit the next one

    Names are distinct strings of the lower half of the vocabulary, numbers strings of the upper half; the one asked for
    stands anywhere in the book. The answer is given as a language model gives it, digit by digit.
    """

    entries: int = 4
    name: int = 2
    digits: int = 3
    vocabulary: int = 16

    def __post_init__(self) -> None:
        _check(self, self.entries <= (self.vocabulary // 2) ** self.name <= 2**16)

    @property
    def length(self) -> int:
        return (self.entries + 1) * (self.name + self.digits) - 1

    def sample(self, count: int, rng: np.random.Generator) -> Samples:
        letters = self.vocabulary // 2
        chosen = _distinct(rng, np.ones(letters**self.name), count, self.entries)
        names = chosen[..., None] // letters ** np.arange(self.name) % letters
        numbers = rng.integers(letters, self.vocabulary, size=(count, self.entries, self.digits))
        book = np.concatenate([names, numbers], 2)
        asked = book[np.arange(count), rng.integers(self.entries, size=count)]
        whole = np.concatenate([book.reshape(count, -1), asked], 1)
        targets = np.full((count, self.length), IGNORED)
        targets[:, -self.digits :] = asked[:, self.name :]
        return whole[:, :-1], targets


@dataclass(frozen=True)
class NoiseDelay:
    """The delay of Gaussian noise of variance 1: white, or without frequencies above `band` cycles a step.

    Band-limited noise is a window of a period of at least 4 lengths and 8 / band steps, so that nothing comes back:

        x(t) = sum_j a_j cos(2 pi j t / n) + b_j sin(2 pi j t / n),   0 < j <= band n,   a, b ~ N(0, 1 / number of j)
    """

    length: int = 64
    tau: int = 16
    band: float = 0.5

    def __post_init__(self) -> None:
        _check(self, self.tau < self.length and 1e-5 <= self.band <= 0.5)

    def noise(self, count: int, rng: np.random.Generator) -> np.ndarray:
        """(count, length) float64."""
        if self.band == 0.5:
            return rng.standard_normal((count, self.length))
        period = 2 ** math.ceil(math.log2(max(4 * self.length, 8 / self.band)))
        number = math.floor(self.band * period)
        a, b = rng.standard_normal((2, count, number)) / math.sqrt(number)
        spectrum = np.zeros((count, period // 2 + 1), complex)
        spectrum[:, 1 : number + 1] = (a - 1j * b) * (period / 2)
        return np.fft.irfft(spectrum, period)[:, : self.length]

    def sample(self, count: int, rng: np.random.Generator) -> Samples:
        inputs = self.noise(count, rng).astype(np.float32)
        targets = np.full_like(inputs, np.nan)
        targets[:, self.tau :] = inputs[:, : -self.tau]
        return inputs, targets


Task = AssociativeRecall | PhoneBook | SelectiveCopying | InductionHeads | NoiseDelay
TASKS: dict[str, Task] = {
    "mqar": AssociativeRecall(),
    "phone-book": PhoneBook(),
    "selective-copying": SelectiveCopying(),
    "induction": InductionHeads(),
    "delay-white": NoiseDelay(),
    "delay-band": NoiseDelay(band=0.05),
}
