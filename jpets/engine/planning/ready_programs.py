"""The programs that are ready, and those that take any mixture of queries, with classes that came after the start
too."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Mapping, Sequence, Set

from jpets.deltas import class_method
from jpets.deltas.protocol import ClassKey
from jpets.engine.batch.bucket import FULL, HEAVY_RUNS, Bucket, Variant, replaces_weights
from jpets.engine.costs.pace import Pace
from jpets.engine.device.replica import Generation, Replica
from jpets.engine.programs.program import Program
from jpets.engine.queue.pending import Pending
from jpets.engine.tasks.sorts import Sort
from jpets.scheduling.costs.ready_lookup import ReadyShapes
from jpets.scheduling.costs.shape import Shape

Takers = Mapping[Bucket, Sequence[Program]]
"""Programs for any mixture of some classes, by bucket."""
KEPT_SECONDS = 1.0
"""Seconds for which shapes keep their costs: programs follow their batches slowly."""
MOST_KEPT = 256


class ReadyPrograms:
    """Reads the replica's tables of programs and of generations of classes, and derives lists from them.

    Rows of *usual* classes share batches: those of the latest generation with all core programs ready. Rows of
    other classes, the *rare* ones, run apart from them, in programs for any mixture of all classes.
    """

    def __init__(self, replica: Replica, pace: Pace) -> None:
        self._replica = replica
        self._pace = pace
        self._programs: Sequence[Program] = ()
        self._generations: Sequence[Generation] = ()
        self._opened: frozenset[ClassKey] = frozenset()
        self._usual: frozenset[ClassKey] = frozenset()
        self._takers: dict[bool, Takers] = {}
        """The programs that take any mixture of usual classes, with or without heavy ones."""
        self._all_takers: Takers = {}
        """The programs that take any mixture of all classes."""
        self._rate = 0.0
        self._shapes: dict[frozenset[Sort], ReadyShapes] = {}
        self._look_at = 0.0
        """When costs are looked at again."""

    @property
    def rate(self) -> float:
        """Tokens a second of the fastest program without heavy classes."""
        self._read()
        return self._rate

    def takers(self, *, heavy: bool, rare: bool = False) -> Takers:
        """Programs for rows of any usual classes, heavy ones included if asked, or of all classes."""
        self._read()
        return self._all_takers if rare else self._takers[heavy]

    def shapes(self, *, heavy: bool, rare: bool = False) -> list[Shape]:
        """The shapes of ``takers``, with their costs."""
        return [
            Shape(bucket.tokens, bucket.groups, min(program.seconds for program in own), bucket.rectangular)
            for bucket, own in self.takers(heavy=heavy, rare=rare).items()
        ]

    def shapes_for(self, sorts: frozenset[Sort]) -> ReadyShapes:
        """The shapes that batches of tasks of these sorts may have, with their costs. The kinds of ``ReadyShapes`` are
        the places of the sorts' kinds in ``kinds_of(sorts)``."""
        self._read()
        if len(self._shapes) >= MOST_KEPT:
            self._shapes.clear()
        if (found := self._shapes.get(sorts)) is None:
            programs = [(p.key.bucket, p.key.variant, p.seconds) for p in self._programs]
            found = self._shapes[sorts] = shapes_for(sorts, programs)
        return found

    def shapes_of(self, sorts: frozenset[Sort]) -> Sequence[Shape]:
        """The shapes that one batch of tasks of all these sorts may have."""
        found = self.shapes_for(sorts)
        alike = len(kinds_of(sorts)) == 1
        return [*found.any, *(shape for own in found.own.values() for shape in own)] if alike else found.any

    def together(self, waiting: Sequence[Pending]) -> tuple[Sequence[Pending], bool]:
        """The queries that may share a batch with the most urgent one, and whether their classes are rare. Only the
        owner calls this, for every batch; now and then it looks at the costs of programs."""
        self._read()
        if (now := time.monotonic()) >= self._look_at:
            self._look_at = now + KEPT_SECONDS
            self._pace.look()
            self._shapes.clear()
            self._measure()
        if self._usual.issuperset(self._opened):
            return waiting, False
        rare = [not self._usual.issuperset(pending.row.slots) for pending in waiting]
        return [p for p, own in zip(waiting, rare, strict=True) if own == rare[0]], rare[0]

    def _read(self) -> None:
        """Derives the lists anew if the replica's tables have changed."""
        there = self._replica
        unchanged = self._generations is there.generations and self._opened is there.opened
        if unchanged and self._programs is there.for_mixtures:
            return
        self._programs, self._generations, self._opened = there.for_mixtures, there.generations, there.opened
        ready = [g for g in self._generations if all(map(self._replica.has_program, g.core))]
        self._usual = ready[-1].classes
        self._takers = {heavy: self._covering(self._usual, heavy=heavy) for heavy in (False, True)}
        self._all_takers = self._covering(self._opened, heavy=True)
        self._shapes.clear()
        self._measure()

    def _measure(self) -> None:
        rates = (b.tokens / p.seconds for b, own in self._takers[False].items() for p in own if p.seconds)
        self._rate = max(rates, default=0.0)

    def _covering(self, classes: Iterable[ClassKey], *, heavy: bool) -> Takers:
        usual = [p for p in self._programs if p.key.variant.run == HEAVY_RUNS[0]]  # long runs are not for any mixture
        needs = {key: FULL for key in classes if heavy or class_method(key.method).kind != "heavy"}
        takers = sorted((p for p in usual if p.key.variant.covers(needs)), key=_bucket)
        return {bucket: list(own) for bucket, own in itertools.groupby(takers, key=_bucket)}


def _bucket(program: Program) -> Bucket:
    return program.key.bucket


def kinds_of(sorts: Iterable[Sort]) -> list[tuple[str, ...]]:
    """The kinds of tasks of these sorts, each once."""
    return sorted({sort.kind for sort in sorts})


def shapes_for(sorts: Set[Sort], programs: Iterable[tuple[Bucket, Variant, float]]) -> ReadyShapes:
    """The shapes of programs (bucket, variant, seconds) for rows of these sorts: a program is one for them if it has
    all their classes. A program with little room for a light class may not take a batch that uses it much."""
    light = frozenset[ClassKey]().union(*(sort.classes for sort in sorts if not sort.heavy))
    every = frozenset[ClassKey]().union(*(sort.classes for sort in sorts))
    kinds = kinds_of(sorts)
    own = {
        kind: [sort for sort in sorts if sort.kind == kinds[kind]]
        for kind in range(len(kinds))
        if any(sort.heavy for sort in sorts if sort.kind == kinds[kind])
    }
    any_light: dict[tuple[Bucket, int], Shape] = {}
    looped: dict[tuple[Bucket, int], Shape] = {}
    """Shapes with loops over heavy classes: of some buckets, and for light rows of classes that came lately, there may
    be no others."""
    any_heavy: dict[tuple[Bucket, int], Shape] = {}
    of_kind: dict[int, dict[tuple[Bucket, int], Shape]] = {kind: {} for kind in own}
    for bucket, variant, seconds in programs:
        has = frozenset(variant.classes())
        loops = variant.has("heavy")
        shape = Shape(
            bucket.tokens, bucket.groups, seconds, bucket.rectangular, bucket.run(variant.run) if loops else 0
        )
        if has >= light and not variant.replaced:
            _keep(looped if loops else any_light, bucket, shape)
        if own and has >= every and loops and not variant.replaced:
            _keep(any_heavy, bucket, shape)
        for kind, members in own.items():
            needed = frozenset[ClassKey]().union(*(sort.classes for sort in members))
            shared = frozenset.intersection(*(sort.classes for sort in members))
            if has >= needed and (not variant.replaced or _replaces(variant, shared)):
                _keep(of_kind[kind], bucket, shape)
    own_buckets = {bucket for bucket, _ in any_light}
    spare = (shape for (bucket, _), shape in looped.items() if bucket not in own_buckets)
    return ReadyShapes(
        [*any_light.values(), *spare],
        list(any_heavy.values()),
        {kind: list(each.values()) for kind, each in of_kind.items()},
    )


def _keep(shapes: dict[tuple[Bucket, int], Shape], bucket: Bucket, shape: Shape) -> None:
    name = bucket, shape.run
    if name not in shapes or shape.seconds < shapes[name].seconds:
        shapes[name] = shape


def _replaces(variant: Variant, shared: frozenset[ClassKey]) -> bool:
    """Whether rows that all have these classes may run where the backbone's own products are left out."""
    return all(key in shared for key in variant.classes() if replaces_weights(key))
