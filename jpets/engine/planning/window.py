"""A window of waiting queries as the policies see it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from jpets.engine.planning.ready_programs import kinds_of
from jpets.engine.queue.pending import Pending
from jpets.engine.tasks.sorts import Sort
from jpets.scheduling.costs.deltas import DeltaTables
from jpets.scheduling.costs.measured_profile import CostProfile
from jpets.scheduling.costs.ready_lookup import ReadyCosts, ReadyShapes
from jpets.scheduling.queue import BARE, Queue

MOST_KEPT = 64
MOST_BYTES = 128 << 20
"""Of all tables that are kept: with hundreds of rows in a batch, those of a window of many kinds take megabytes."""


class Window(NamedTuple):
    """Queries, in their order, and their sorts. The kinds of ``queue`` are places in ``kinds_of(sorts)``."""

    queue: Queue
    sorts: frozenset[Sort]


def read_window(waiting: Iterable[Pending]) -> Window:
    sorts: dict[Sort, int] = {}
    tasks: dict[object, int] = {None: BARE}
    rows = [
        (p.row.length, tasks.setdefault(p.resident, len(tasks)), sorts.setdefault(p.sort, len(sorts))) for p in waiting
    ]
    lengths, numbers, of_sort = np.array(rows, np.int_).T
    place = {kind: at for at, kind in enumerate(kinds_of(sorts))}
    kinds = np.array([place[sort.kind] for sort in sorts])
    return Window(Queue(lengths, numbers, kinds[of_sort]), frozenset(sorts))


class Pricing:
    """Makes the costs of windows from shapes and the present ``profile``; at most ``most_rows`` run together. Windows
    of the same sorts and shapes share costs, and the tables that the first of them made."""

    def __init__(self, profile: Callable[[], CostProfile], most_rows: int) -> None:
        self._profile = profile
        self._most_rows = most_rows
        self._known: CostProfile | None = None
        self._tables: dict[tuple[Sequence[str], int, int], DeltaTables] = {}
        self._costs: dict[tuple[frozenset[Sort], ReadyShapes], ReadyCosts] = {}

    def costs(self, sorts: frozenset[Sort], shapes: ReadyShapes) -> ReadyCosts:
        """Those that were made before, if there are."""
        profile = self._profile()
        if (sorts, shapes) not in self._costs or profile is not self._known:
            made = self.made(sorts, shapes)
            if len(self._costs) >= MOST_KEPT:
                self._costs.clear()
            self._costs[sorts, shapes] = made
        return self._costs[sorts, shapes]

    def made(self, sorts: frozenset[Sort], shapes: ReadyShapes) -> ReadyCosts:
        """Costs that are not kept."""
        profile = self._profile()
        full = len(self._tables) >= MOST_KEPT or sum(own.held_bytes for own in self._tables.values()) > MOST_BYTES
        if profile is not self._known or full:
            self._known = profile
            self._tables.clear()
            self._costs.clear()
        every = [*shapes.light, *shapes.heavy, *itertools.chain(*shapes.own.values())]
        kinds = kinds_of(sorts)
        longest, tokens = max(shape.longest for shape in every), max(shape.tokens for shape in every)
        name = tuple(map(str, kinds)), longest, tokens
        if name not in self._tables:
            self._tables[name] = DeltaTables(profile, kinds, rows=self._most_rows, longest=longest, tokens=tokens)
        return ReadyCosts(shapes, self._tables[name], self._most_rows)
