"""Costs over the static shapes that can run now: a server's menu, with what was measured of its programs."""

from __future__ import annotations

import dataclasses
import functools
import heapq
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import numpy as np

from jpets.scheduling.costs.batch_costs import BatchCosts, Limits
from jpets.scheduling.costs.deltas import RUNS, DeltaTables, task_tokens
from jpets.scheduling.costs.shape import Shape, ShapeTable, reach, span_costs
from jpets.scheduling.queue import BARE, Batch, Batches, Bools, Floats, Groups, Ints, Queue

MIXED = BARE - 1
"""The sort of queries of several kinds, heavy ones among them."""
MAIN = 2
"""Shapes that most batches of a plan have."""
STEP = 2.0
"""Factor between the costs of shapes that ``pack`` uses beside each other for queries of one sort."""

HOST_SECONDS = 1e-3
"""Seconds of the host for each batch, whatever its rows: without them, a rest would be cut into single queries for the
last hundredth of the device's time."""
FEWER = 0.02
"""Share of a full batch's time by which each batch more makes a plan worse than its device's seconds say: predictions
are no more exact than that, and fewer batches leave the host more time."""
LEAST_SECONDS = 1e-9
"""A shape whose cost is not known yet takes as much."""
PLANNING_SECONDS = 1e-3, 4e-5
"""Seconds that further policies take to plan, about: in any case, and for each query."""
PACKING_SECONDS = 8e-4, 1e-5
"""The same of ``packed``."""
PLANNING_SHARE = 0.01
"""Share of a plan's time that they may take: the device waits for the plan."""
MOST_COMPARED = 512
"""Most queries for which plans are compared."""


@dataclasses.dataclass(frozen=True, eq=False)
class ReadyShapes:
    """``light`` shapes take any rows without heavy deltas, ``heavy`` ones any rows, ``own[k]`` rows that all have the
    heavy deltas of kind k; ``heavy`` is empty where no row has heavy deltas."""

    light: Sequence[Shape]
    heavy: Sequence[Shape] = ()
    own: Mapping[int, Sequence[Shape]] = dataclasses.field(default_factory=dict)

    @property
    def any(self) -> Sequence[Shape]:
        return self.heavy or self.light


class ReadyCosts(BatchCosts):
    """Costs of batches of at most ``most`` queries in ``shapes``.

    A shape's seconds contain the work of its light classes, whether rows use them or not. Heavy deltas cost more, by
    each task's tokens.

    It has more than 20 methods, as it answers all that policies ask of costs.
    """

    mixtures = True

    def __init__(self, shapes: ReadyShapes, deltas: DeltaTables, most: int) -> None:
        self._shapes = shapes
        self.deltas = deltas
        every = [*shapes.light, *shapes.heavy]
        self.limits = Limits(
            min(most, max(shape.rows for shape in shapes.any)),
            max(shape.tokens for shape in every),
            max(shape.longest for shape in shapes.any),
        )
        self._tables: dict[int, ShapeTable] = {}

    @functools.cached_property
    def alone(self) -> Bools:
        n, length = np.arange(self.limits.rows + 1)[:, None], np.arange(self.limits.longest + 1)[None, :]
        fits = np.zeros((n.size, length.size), bool)
        for shape in self._shapes.any:
            rows, limits = np.array(shape.groups).T
            room = np.minimum.accumulate(rows)[np.minimum(np.searchsorted(limits, length), len(rows) - 1)]
            fits |= (n <= room) & (length <= shape.longest) & (shape.padded | (n * length <= shape.tokens))
        return fits

    def prefix(self, lengths: Ints) -> int:
        return int(max(reach(lengths, shape, self.limits.rows)[0] for shape in self._shapes.any))

    def spans(self, queue: Queue, parts: Sequence[Ints], most: int) -> Floats:
        heavy = bool(self.deltas.heavy[queue.kinds].any())
        shapes = self._shapes.heavy if heavy else self._shapes.light
        return span_costs([queue.lengths[part] for part in parts], shapes, min(most, self.limits.rows))

    def batch(self, queue: Queue, queries: Ints) -> Batch:
        found = self._cheapest(queue, queries)
        if found is None:
            longest = queue.lengths[queries].max()
            raise ValueError(f"{len(queries)} queries of up to {longest} tokens fit no shape")
        return found

    def _cheapest(self, queue: Queue, queries: Ints) -> Batch | None:
        lengths = np.sort(queue.lengths[queries]).tolist()
        added = self._added(queue, queries)
        best, least = None, np.inf
        for shape in self._table(self.sort_of(queue, queries)).holding(lengths):
            if shape.seconds >= least:
                break
            if (seconds := shape.seconds + added(shape.run)) < least:
                best, least = shape, seconds
        return None if best is None else Batch(queries, best.tokens, best.groups, least)

    def whole(self, queue: Queue) -> Batch | None:
        if len(queue) > self.limits.rows:
            return None
        every = np.arange(len(queue))
        if (one := self._cheapest(queue, every)) is None:
            return None
        base, each = PACKING_SECONDS
        saved = one.seconds - self._least(queue, every) - self.fee(queue)  # another plan has a batch more
        return one if saved <= base + each * len(queue) else None

    def _least(self, queue: Queue, queries: Ints) -> float:
        """Predicted seconds that no plan of several batches of these queries undercuts."""
        heavy = queries[self.deltas.heavy[queue.kinds[queries]]]
        sorts = {self.sort_of(queue, queries), *queue.kinds[heavy].tolist()}
        tables = [self._table(sort) for sort in (sorts if len(heavy) == len(queries) else {*sorts, BARE})]
        rate = min(table.rate for table in tables)
        shared = max(2 * min(table.least for table in tables), float(queue.lengths[queries].sum()) * rate)
        if not len(heavy):
            return shared
        kinds, tokens = task_tokens(queue, heavy)
        return shared + float(self.deltas.heavy_least[kinds, tokens].sum())

    def total(self, queue: Queue, plan: Batches) -> float:
        return self.device_seconds(queue, plan) + self.fee(queue) * len(plan)

    def fee(self, queue: Queue) -> float:
        """What a batch counts besides its seconds, in a plan of these queries."""
        full, rate = self._full
        return max(HOST_SECONDS, FEWER * min(full, int(queue.lengths.sum()) * rate))

    @functools.cached_property
    def _full(self) -> tuple[float, float]:
        """Seconds of the largest shape, and of a token at least."""
        light = self._table(BARE if self._shapes.light else MIXED)
        return max((shape.seconds for shape in light.shapes), default=0.0), light.rate

    def device_seconds(self, queue: Queue, plan: Batches) -> float:
        """``total`` without what its batches count besides."""
        return sum(batch.seconds if batch.seconds == batch.seconds else self.seconds(queue, batch) for batch in plan)

    def seconds(self, queue: Queue, batch: Batch) -> float:
        """Predicted time of one batch."""
        own = [s for s in self.shapes_for(queue, batch.queries) if (s.tokens, s.groups) == (batch.tokens, batch.groups)]
        added = self._added(queue, batch.queries)
        return min(shape.seconds + added(shape.run) for shape in own)

    def shapes_for(self, queue: Queue, queries: Ints) -> Sequence[Shape]:
        """The shapes that take the deltas of these queries, the cheapest first."""
        return self._table(self.sort_of(queue, queries)).shapes

    def further_policies(self, queue: Queue, seconds: float) -> Literal["all", "quick", "none"]:
        base, each = PLANNING_SECONDS
        quick = len(queue) <= MOST_COMPARED and base + each * len(queue) <= PLANNING_SHARE * seconds
        return "quick" if quick else "none"

    def sort_of(self, queue: Queue, queries: Ints) -> int:
        """What shapes these queries need: ``BARE`` for light ones, the kind where all have one heavy kind, or
        ``MIXED``."""
        kinds = queue.kinds[queries]
        if not self.deltas.heavy[kinds].any():
            return BARE
        return int(kinds[0]) if (kinds == kinds[0]).all() else MIXED

    def _table(self, sort: int) -> ShapeTable:
        """The shapes for queries of one sort."""
        if sort not in self._tables:
            light, heavy, own = self._shapes.light, self._shapes.heavy, self._shapes.own
            self._tables[sort] = ShapeTable(light if sort == BARE else [*heavy, *own.get(sort, ())])
        return self._tables[sort]

    def _added(self, queue: Queue, queries: Ints) -> Callable[[int], float]:
        """What the heavy deltas of these queries add, by the run of a shape."""
        heavy = queries[self.deltas.heavy[queue.kinds[queries]]]
        if not len(heavy):
            return lambda run: 0.0
        kinds, tokens = task_tokens(queue, heavy)

        def added(run: int) -> float:
            return float(self.deltas.heavy_by_run(run)[kinds, tokens].sum())

        return functools.cache(added)

    def pack(self, queue: Queue, order: Ints, aparts: Sequence[Ints]) -> list[Batches]:
        lengths = queue.lengths[order]
        reached: dict[tuple[int, Groups], list[int]] = {}

        def ends(shape: Shape) -> list[int]:
            name = shape.tokens, shape.groups
            if name not in reached:
                reached[name] = reach(lengths, shape, self.limits.rows).tolist()
            return reached[name]

        fee = self.fee(queue)
        again = [fee + more for more in self._paid_again(queue, order)]
        plans: list[Batches] = []
        made: dict[tuple[int, int], Batches] = {}
        for apart in aparts:
            borders = [0, *(np.flatnonzero(np.diff(apart)) + 1).tolist(), len(order)]
            plan: Batches = []
            for part in itertools.pairwise(borders):
                if part not in made:
                    made[part] = self._pack(queue, order, *part, ends, again)
                plan += made[part]
            plans.append(plan)
        return plans

    def _pack(
        self, queue: Queue, order: Ints, first: int, last: int, ends: Callable[[Shape], list[int]], again: list[float]
    ) -> Batches:
        """The cheapest way from place ``first`` of ``order`` to ``last`` where every batch is the longest span that its
        shape holds from where the one before it ended. ``again`` [n] is paid besides where a batch begins. Until the
        rest fits the shape that costs least for what it holds, only the ``MAIN`` best shapes are tried."""
        steps = [(shape.seconds, ends(shape)) for shape in self._useful(queue, order[first:last])]
        best_of, main = steps[0][1], steps[:MAIN]
        best = {first: 0.0}
        back: dict[int, int] = {}
        waiting = [first]
        while (at := heapq.heappop(waiting)) < last:
            so_far = best[at] + again[at]
            for seconds, end_of in steps if best_of[at] >= last else main:
                end = min(end_of[at], last)
                if end not in best:
                    heapq.heappush(waiting, end)
                elif so_far + seconds >= best[end]:
                    continue
                best[end], back[end] = so_far + seconds, at
        spans = []
        while at > first:
            spans.append(order[back[at] : at])
            at = back[at]
        return [self.batch(queue, span) for span in reversed(spans)]

    def _useful(self, queue: Queue, order: Ints) -> Sequence[Shape]:
        """Shapes for these queries that hold the longest one: first the ``MAIN`` ones that cost least for what they
        hold, then others of rising cost and size, in steps of ``STEP``."""
        table, lengths = self._table(self.sort_of(queue, order)), np.sort(queue.lengths[order])
        capacities = table.capacities(lengths)
        if not capacities.any():
            raise ValueError(f"a query of {lengths[-1]} tokens is longer than every shape holds")
        rates = [
            capacity / max(shape.seconds, LEAST_SECONDS)
            for capacity, shape in zip(capacities, table.shapes, strict=True)
        ]
        best = sorted(range(len(rates)), key=lambda at: -rates[at])[:MAIN]
        kept, most, seconds = [table.shapes[at] for at in best if capacities[at]], 0.0, 0.0
        for shape, capacity in zip(table.shapes, capacities.tolist(), strict=True):
            if capacity > most and (shape.seconds >= seconds or capacity >= STEP * most):
                kept.append(shape)
                most, seconds = capacity, STEP * shape.seconds
        return kept

    def _paid_again(self, queue: Queue, order: Ints) -> list[float]:
        """What heavy deltas cost more [n] where a batch begins between the queries of one task, in ``order``."""
        tasks, kinds, lengths = queue.tasks[order], queue.kinds[order], queue.lengths[order]
        if not self.deltas.heavy[kinds].any():
            return [0.0] * len(order)
        table = self.deltas.heavy_by_run(min(RUNS))
        most = table.shape[1] - 1
        sums = np.concatenate([[0], np.cumsum(lengths)])
        first = np.diff(tasks, prepend=tasks[0] - 1) != 0
        run = np.cumsum(first) - 1
        begins = np.flatnonzero(first)
        begin, end = begins[run], np.append(begins[1:], len(order))[run]
        before = np.minimum(sums[:-1] - sums[begin], most)
        after = np.minimum(sums[end] - sums[:-1], most - before)
        more: list[float] = (table[kinds, before] + table[kinds, after] - table[kinds, before + after]).tolist()
        return more
