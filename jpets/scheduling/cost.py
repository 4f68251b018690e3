"""What a batch costs: the cheapest shape that holds it, for every span of length-sorted queries at once."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from jpets.scheduling.queue import Floats, Groups, Ints


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
    """Costs [n, most] of batching sorted queries: entry (i, k) is queries i - k .. i; infinite: no shape.

    ``lengths`` ascend. A span fits a shape when each group has a row for every query that is too long for the group
    before it and not for this one.
    """
    n = len(lengths)
    ends = np.arange(n)[:, None]
    starts = ends - np.arange(most)[None, :]
    valid = starts >= 0
    starts = np.maximum(starts, 0)
    sums = np.concatenate([[0], np.cumsum(lengths)])
    tokens = sums[ends + 1] - sums[starts]
    longest = np.broadcast_to(lengths[ends], tokens.shape)
    costs = np.full((n, most), np.inf)
    for shape in sorted(shapes, key=lambda shape: -shape.seconds):
        fits = valid & (longest <= shape.groups[-1][1])
        if not shape.padded:
            fits &= tokens <= shape.tokens
        first = 0
        for rows, limit in shape.groups:
            past = int(np.searchsorted(lengths, limit, side="right"))
            fits &= np.minimum(ends + 1, past) - np.maximum(starts, first) <= rows
            first = past
        costs[fits] = shape.seconds
    return costs
