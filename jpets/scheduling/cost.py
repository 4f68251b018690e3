"""What a batch costs: the cheapest shape that holds it, for every span of length-sorted queries at once."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int_]


@dataclasses.dataclass(frozen=True)
class Shape:
    """A static shape that can run now and its profiled cost (alpha, PetS section 4.1) in seconds.

    ``padded`` shapes hold N rows of up to L tokens each whatever their sum; packed ones also bound the sum of lengths.
    """

    tokens: int
    groups: tuple[tuple[int, int], ...]
    seconds: float
    padded: bool = False


def span_costs(lengths: Ints, shapes: Sequence[Shape], most: int) -> Floats:
    """Costs [n, most] of batching sorted queries: entry (i, k) is the batch of queries i - k .. i, infinite if none holds it.

    ``lengths`` ascend. A span fits a shape when, for each group, the queries longer than all smaller groups' lengths
    are no more than the rows of that group and the larger ones.
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
        room = 0
        bounds = [0, *(length for _, length in shape.groups)]
        for at in range(len(shape.groups) - 1, -1, -1):
            room += shape.groups[at][0]
            first_longer = np.searchsorted(lengths, bounds[at], side="right")
            fits &= ends + 1 - np.maximum(starts, first_longer) <= room
        costs[fits] = shape.seconds
    return costs
