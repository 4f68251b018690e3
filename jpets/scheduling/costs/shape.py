"""Static shapes that can run now: which spans of ordered queries they hold, and what those cost."""

from __future__ import annotations

import bisect
import dataclasses
import functools
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from jpets.scheduling.queue import Floats, Groups, Ints


@dataclasses.dataclass(frozen=True)
class Shape:
    """A static shape that can run now and its profiled cost (alpha, PetS section 4.1) in seconds.

    ``padded`` shapes hold N rows of up to L tokens each whatever their sum; packed ones also bound the sum of lengths.
    ``run`` is how many tokens one step over a heavy delta covers; 0 where the shape takes no heavy rows.
    """

    tokens: int
    groups: Groups
    seconds: float
    padded: bool = False
    run: int = 0

    @functools.cached_property
    def rows(self) -> int:
        return sum(rows for rows, _ in self.groups)

    @functools.cached_property
    def longest(self) -> int:
        return self.groups[-1][1]

    def groups_hold(self, lengths: Sequence[int]) -> bool:
        """Whether the groups have room for these ascending lengths, each in the shortest group that is long enough."""
        first = 0
        for rows, limit in self.groups:
            past = bisect.bisect_right(lengths, limit)
            if past - first > rows:
                return False
            first = past
        return first == len(lengths)


class ShapeTable:
    """Some shapes, the cheapest first."""

    def __init__(self, shapes: Iterable[Shape]) -> None:
        self.shapes = sorted(shapes, key=lambda shape: shape.seconds)
        self._room = np.array([np.inf if shape.padded else shape.tokens for shape in self.shapes])
        self._rows = np.array([shape.rows for shape in self.shapes])
        self._longest = np.array([shape.longest for shape in self.shapes])
        most = max((len(shape.groups) for shape in self.shapes), default=1)
        self.least = self.shapes[0].seconds if self.shapes else np.inf
        """Seconds of the cheapest one."""
        self.rate = min((shape.seconds / shape.tokens for shape in self.shapes), default=np.inf)
        """Seconds that a token takes at least."""
        groups = [[*shape.groups, *[(0, shape.longest)] * (most - len(shape.groups))] for shape in self.shapes]
        self._group_rows, self._limits = np.moveaxis(np.array(groups, np.int_).reshape(-1, most, 2), -1, 0)

    def holding(self, lengths: Sequence[int]) -> Iterator[Shape]:
        """Those that hold these ascending lengths, the cheapest first."""
        room = (self._room >= sum(lengths)) & (self._rows >= len(lengths)) & (self._longest >= lengths[-1])
        return (shape for at in np.flatnonzero(room) if (shape := self.shapes[at]).groups_hold(lengths))

    def capacities(self, lengths: Ints) -> Floats:
        """How many queries with lengths like these ascending ones [n] each shape holds, at most n: until its tokens or
        the rows of a group are taken. 0 where the longest does not fit."""
        n = len(lengths)
        upto = np.searchsorted(lengths, self._limits, side="right")
        members = np.diff(upto, axis=1, prepend=0)
        share = self._group_rows / np.maximum(members, 1) * n
        held = np.where(members > 0, share, np.inf).min(axis=1)
        held = np.minimum(held, np.minimum(self._rows, self._room * n / lengths.sum()))
        return np.where(self._longest >= lengths[-1], np.clip(held, 1, n), 0.0)


def reach(lengths: Ints, shape: Shape, most: int) -> Ints:
    """For each of n queries in a given order the end [n] of the longest span that begins there and fits ``shape``, with
    at most ``most`` rows; its own place where not even the query alone fits."""
    n = len(lengths)
    ends = np.minimum(np.arange(n) + min(shape.rows, most), n)
    if not shape.padded:
        sums = np.concatenate([[0], np.cumsum(lengths)])
        if sums[-1] > shape.tokens:
            ends = np.minimum(ends, np.searchsorted(sums, sums[:-1] + shape.tokens, side="right") - 1)
    if len(shape.groups) == 1 and (not n or lengths.max() <= shape.longest):
        return ends
    group_of = np.searchsorted([limit for _, limit in shape.groups], lengths)
    for group, rows in enumerate([*(rows for rows, _ in shape.groups), 0]):
        taken = np.concatenate([[0], np.cumsum(group_of == group)])
        if taken[-1] > rows:
            ends = np.minimum(ends, np.searchsorted(taken, taken[:-1] + rows, side="right") - 1)
    return ends


def span_costs(parts: Sequence[Ints], shapes: Sequence[Shape], most: int) -> Floats:
    """Costs [n, m] of neighbours of n ordered parts as one batch: entry (i, k) is parts i - k .. i; infinite where no
    shape fits.

    A part holds the lengths of one query or of several (a mini-batch); a batch has at most ``most`` queries, so m is at
    most n and ``most``. A batch fits a shape when each group has a row for every query that is too long for the group
    before it and not for this one.
    """
    n, sizes = len(parts), np.array([len(part) for part in parts])
    lengths = np.concatenate(parts)
    ends = np.arange(n)[:, None]
    starts = ends - np.arange(min(n, most))[None, :]
    valid = starts >= 0
    starts = np.maximum(starts, 0)

    def in_spans(each: Ints) -> Ints:
        """Sums over the parts of each span of a number that each query has."""
        sums = np.concatenate([[0], np.add.reduceat(each, np.cumsum(sizes) - sizes).cumsum()])
        return sums[ends + 1] - sums[starts]

    rows = in_spans(np.ones(len(lengths), np.int_))
    tokens = in_spans(lengths)
    valid &= rows <= most
    limits = sorted({limit for shape in shapes for _, limit in shape.groups})
    upto = {0: np.zeros_like(rows)} | {limit: in_spans((lengths <= limit).astype(np.int_)) for limit in limits}
    costs = np.full(tokens.shape, np.inf)
    for shape in sorted(shapes, key=lambda shape: -shape.seconds):
        fits = valid & (upto[shape.longest] == rows)
        if not shape.padded:
            fits &= tokens <= shape.tokens
        before = 0
        for count, limit in shape.groups:
            fits &= upto[limit] - upto[before] <= count
            before = limit
        costs[fits] = shape.seconds  # the cheapest comes last
    return costs
