"""What a batch costs: the cheapest shape that holds it, for every span of length-sorted queries at once."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from jpets.scheduling.queue import Floats, Groups, Ints

CELLS = 1 << 14
"""Spans times shapes that are computed together: few NumPy calls for few queries, arrays that fit a cache for many."""


@dataclasses.dataclass(frozen=True)
class Shape:
    """A static shape that can run now and its profiled cost (alpha, PetS section 4.1) in seconds.

    ``padded`` shapes hold N rows of up to L tokens each whatever their sum; packed ones also bound the sum of lengths.
    """

    tokens: int
    groups: Groups
    seconds: float
    padded: bool = False


def span_costs(lengths: Ints, shapes: Sequence[Shape], most: int) -> Floats:
    """Costs [n, min(n, most)] of batching sorted queries: entry (i, k) is queries i - k .. i; infinite where no shape
    fits.

    ``lengths`` ascend. A span fits a shape when each group has a row for every query that is too long for the group
    before it and not for this one.
    """
    n = len(lengths)
    ends = np.arange(n)[:, None]
    starts = ends - np.arange(min(n, most))[None, :]
    valid = starts >= 0
    starts = np.maximum(starts, 0)
    sums = np.concatenate([[0], np.cumsum(lengths)])
    tokens = sums[ends + 1] - sums[starts]
    seconds, room, rows, limits = (table[..., None, None] for table in _tables(shapes))
    pasts = np.searchsorted(lengths, limits, side="right")
    firsts = np.concatenate([np.zeros_like(pasts[:, :1]), pasts[:, :-1]], axis=1)
    costs = np.full(tokens.shape, np.inf)
    step = max(1, CELLS // max(1, costs.size))
    for part in (slice(first, first + step) for first in range(0, len(shapes), step)):
        fits = valid & (tokens <= room[part]) & (ends < pasts[part, -1])
        for group in range(limits.shape[1]):
            members = np.minimum(ends + 1, pasts[part, group]) - np.maximum(starts, firsts[part, group])
            fits &= members <= rows[part, group]
        np.minimum(costs, np.where(fits, seconds[part], np.inf).min(axis=0), out=costs)
    return costs


def _tables(shapes: Sequence[Shape]) -> tuple[Floats, Floats, Ints, Ints]:
    """Of S shapes the seconds [S], room for tokens [S] (infinite where padded), and rows and limits of their groups
    [S, most groups]: shapes with fewer end in groups without rows."""
    most = max(len(shape.groups) for shape in shapes)
    groups = [[*shape.groups, *[(0, shape.groups[-1][1])] * (most - len(shape.groups))] for shape in shapes]
    rows, limits = np.moveaxis(np.array(groups), -1, 0)
    room = [np.inf if shape.padded else shape.tokens for shape in shapes]
    return np.array([shape.seconds for shape in shapes]), np.array(room), rows, limits
