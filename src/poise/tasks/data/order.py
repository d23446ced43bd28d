"""The order of training problems from one or more data sets. The seed and the place determine each problem.

A *place* is a problem's index in this order. A *walk* is the sequence of problems from one data set.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import count, islice
from random import Random
from typing import overload

from poise.tasks.base import Problem
from poise.tasks.data.rows import DataError

ENDLESS = 2**53  # the length of an epoch that has no end
PERIOD = 1000  # problems in a period of a mixture with a streamed set; each period has the shares of the weights


class Table:
    """Problems in memory. ``source`` names the data set in messages.

    ``name`` is part of the seed, so that several tables are shuffled differently.
    """

    def __init__(self, source: str, name: str, problems: list[Problem]) -> None:
        self.source, self.name, self.problems = source, name, problems
        self._order = lru_cache(4)(self._shuffled)

    def at(self, seed: int, place: int) -> Problem:
        """Return the problem at ``place``. The walk goes through the table epoch after epoch."""
        number, within = divmod(place, len(self.problems))
        return self.problems[self._order(seed, number)[within]]

    def _shuffled(self, seed: int, number: int) -> list[int]:
        order = list(range(len(self.problems)))
        Random(f"epoch {seed} {number} {self.name}").shuffle(order)
        return order

    def leave_out(self, unfit: Callable[[Problem], bool]) -> list[Problem]:
        """Remove the problems that do not fit, and return the removed problems."""
        out = [problem for problem in self.problems if unfit(problem)]
        gone = {id(problem) for problem in out}
        self.problems[:] = [problem for problem in self.problems if id(problem) not in gone]
        self._order.cache_clear()
        return out


class Stream:
    """Problems of a data set that is read during training: rows in file order, shuffled in blocks of ``buffer`` rows.

    Each call of ``rows`` starts at the first row; it yields a problem, or None, per row. Only one block is in memory:
    going back to an earlier place means reading from the first row.
    """

    def __init__(self, source: str, name: str, rows: Callable[[], Iterator[Problem | None]], buffer: int) -> None:
        self.source, self.name, self.rows, self.buffer = source, name, rows, buffer
        self.unfit: list[Callable[[Problem], bool]] = []
        self._seed, self._start = 0, 0
        self._block: list[Problem] = []
        self._blocks = self._read(0)

    def at(self, seed: int, place: int) -> Problem:
        """Return the problem at ``place``. The walk reads the data set pass after pass, block by block."""
        if seed != self._seed or place < self._start:
            self._rewind(seed)
        while place >= self._start + len(self._block):
            self._start += len(self._block)
            self._block = next(self._blocks)
        return self._block[place - self._start]

    def leave_out(self, unfit: Callable[[Problem], bool]) -> list[Problem]:
        """Start over, and skip problems that do not fit. Return [], because they are only found while reading."""
        self.unfit.append(unfit)
        self._rewind(self._seed)
        return []

    def _rewind(self, seed: int) -> None:
        self._seed, self._start, self._block, self._blocks = seed, 0, [], self._read(seed)

    def _read(self, seed: int) -> Iterator[list[Problem]]:
        for passed in count():
            found = 0
            rows = self.rows()
            for number in count():
                block = list(islice(rows, self.buffer))
                if not block:
                    break
                problems = [each for each in block if each is not None and not any(out(each) for out in self.unfit)]
                Random(f"block {seed} {passed} {number} {self.name}").shuffle(problems)
                found += len(problems)
                yield problems
            if not found:
                raise DataError(f"data {self.source}: none of its rows can be trained on")


class Mixture:
    """A mixture of data sets. In every period, each data set has a whole number of problems in proportion to its
    weight."""

    def __init__(self, parts: Sequence[Table | Stream], weights: Sequence[float]) -> None:
        self.parts, self.weights = parts, weights
        self.epoch = lru_cache(4)(self._epoch)
        self._places = lru_cache(4)(self._laid_out)

    def changed(self) -> None:
        """Clear the cached epochs. Call this after removing problems from a data set."""
        self.epoch.cache_clear()

    def _epoch(self, seed: int, number: int) -> Sequence[Problem]:
        """Return an epoch, as long as all data sets together. With a streamed data set, the epoch has no end."""
        tables = [part for part in self.parts if isinstance(part, Table)]
        if len(tables) < len(self.parts):
            return Endless(lambda place: self._at(seed, place))
        size = sum(len(table.problems) for table in tables)
        return [self.parts[part].at(seed, place) for part, place in self._places(seed, number, size)]

    def _at(self, seed: int, place: int) -> Problem:
        number, within = divmod(place, PERIOD)
        part, within = self._places(seed, number, PERIOD)[within]
        return self.parts[part].at(seed, within)

    def _laid_out(self, seed: int, number: int, size: int) -> list[tuple[int, int]]:
        """Return, for each problem of a period, the index of its data set and the place in that data set's walk."""
        counts = shares(self.weights, size)
        for part, share in zip(self.parts, counts, strict=True) if size else ():
            if isinstance(part, Table) and not part.problems:
                raise DataError(f"data {part.source}: no problem is left for training")
            if not share:
                too_small = f"its weight is too small to get one of {size:,} problems"
                raise DataError(f"data {part.source}: {too_small}: raise the weight")
        order = [part for part, share in enumerate(counts) for _ in range(share)]
        if len(counts) > 1:
            Random(f"mixture {seed} {number}").shuffle(order)
        walks = [count(number * share) for share in counts]
        return [(part, next(walks[part])) for part in order]


def shares(weights: Sequence[float], size: int) -> list[int]:
    """Split ``size`` into whole numbers in proportion to the weights, by the largest-remainder method."""
    exact = [size * weight / sum(weights) for weight in weights]
    found = [int(share) for share in exact]
    by_remainder = sorted(range(len(exact)), key=lambda part: found[part] - exact[part])
    for part in by_remainder[: size - sum(found)]:
        found[part] += 1
    return found


class Endless(Sequence[Problem]):
    """An endless sequence of problems, built on access."""

    def __init__(self, at: Callable[[int], Problem]) -> None:
        self._at = at

    def __len__(self) -> int:
        return ENDLESS

    @overload
    def __getitem__(self, place: int) -> Problem: ...
    @overload
    def __getitem__(self, place: slice) -> list[Problem]: ...
    def __getitem__(self, place: int | slice) -> Problem | list[Problem]:
        if isinstance(place, slice):
            return [self._at(each) for each in range(ENDLESS)[place]]
        return self._at(place)
