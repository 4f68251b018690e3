"""Queries that arrive over time for tasks that are called more or less often."""

from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np

from jpets.scheduling.queue import Floats, Ints


@dataclasses.dataclass(frozen=True)
class Traffic:
    """n queries: when each arrives (ascending seconds), its task and its length in tokens."""

    arrived: Floats
    tasks: Ints
    lengths: Ints

    def __len__(self) -> int:
        return len(self.arrived)


def draw_traffic(
    tasks: int,
    queries: int,
    rate: float,
    *,
    seed: int,
    redraw: float = math.inf,
    mean_weight: float = 2.0,
    length: float = 32.0,
    std: float = 8.0,
) -> Traffic:
    """Poisson arrivals, ``rate`` a second. How often each task is called is in proportion to a weight that is Poisson
    too, of ``mean_weight``, and drawn anew every ``redraw`` seconds (lambda of section 3.4.2).

    The paper says only that queries are distributed over tasks "by a Poisson distribution". Lengths are normal.
    """
    rng = np.random.default_rng(seed)
    arrived = rng.exponential(1 / rate, queries).cumsum()
    period = np.floor(arrived / redraw).astype(np.int_)
    drawn = np.empty(queries, np.int_)
    for first, end in _runs(period):
        weights = rng.poisson(mean_weight, tasks).astype(float)
        chances = weights / weights.sum() if weights.any() else np.full(tasks, 1 / tasks)
        drawn[first:end] = rng.choice(tasks, end - first, p=chances)
    return Traffic(arrived, drawn, np.maximum(3, np.rint(rng.normal(length, std, queries))).astype(np.int_))


def _runs(values: Ints) -> list[tuple[int, int]]:
    """First and end of each run of equal values."""
    edges = [0, *(np.flatnonzero(np.diff(values)) + 1).tolist(), len(values)]
    return [(first, end) for first, end in itertools.pairwise(edges) if end > first]
