"""The programs that are ready, and those that take any mixture of queries, with classes that came after the start
too."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence

from jpets.deltas import class_method
from jpets.deltas.protocol import ClassKey
from jpets.engine.batch.bucket import FULL, HEAVY_RUNS, Bucket
from jpets.engine.device.replica import Generation, Replica
from jpets.engine.programs.program import Program
from jpets.engine.queue.pending import Pending
from jpets.scheduling.costs.shape import Shape

Takers = Mapping[Bucket, Sequence[Program]]
"""Programs for any mixture of some classes, by bucket."""


class ReadyPrograms:
    """Reads the replica's tables of programs and of generations of classes, and derives lists from them.

    Rows of *usual* classes share batches: those of the latest generation with all core programs ready. Rows of
    other classes, the *rare* ones, run apart from them, in programs for any mixture of all classes.
    """

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self._programs: Sequence[Program] = ()
        self._generations: Sequence[Generation] = ()
        self._usual: frozenset[ClassKey] = frozenset()
        self._takers: dict[bool, Takers] = {}
        """The programs that take any mixture of usual classes, with or without heavy ones."""
        self._all_takers: Takers = {}
        """The programs that take any mixture of all classes."""
        self._rate = 0.0

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

    def together(self, waiting: Sequence[Pending]) -> tuple[Sequence[Pending], bool]:
        """The queries that may share a batch with the most urgent one, and whether their classes are rare."""
        self._read()
        if len(self._usual) == len(self._replica.family.slots):
            return waiting, False
        rare = [not self._usual.issuperset(pending.row.slots) for pending in waiting]
        return [p for p, own in zip(waiting, rare, strict=True) if own == rare[0]], rare[0]

    def _read(self) -> None:
        """Derives the lists anew if the replica's tables have changed."""
        if self._programs is self._replica.programs and self._generations is self._replica.generations:
            return
        self._programs, self._generations = self._replica.programs, self._replica.generations
        ready = [g for g in self._generations if all(map(self._replica.has_program, g.core))]
        self._usual = ready[-1].classes
        self._takers = {heavy: self._covering(self._usual, heavy=heavy) for heavy in (False, True)}
        self._all_takers = self._covering(self._replica.classes, heavy=True)
        rates = (b.tokens / p.seconds for b, own in self._takers[False].items() for p in own if p.seconds)
        self._rate = max(rates, default=0.0)

    def _covering(self, classes: Iterable[ClassKey], *, heavy: bool) -> Takers:
        usual = [p for p in self._programs if p.key.variant.run == HEAVY_RUNS[0]]  # long runs are not for any mixture
        needs = {key: FULL for key in classes if heavy or class_method(key.method).kind != "heavy"}
        takers = sorted((p for p in usual if p.key.variant.covers(needs)), key=_bucket)
        return {bucket: list(own) for bucket, own in itertools.groupby(takers, key=_bucket)}


def _bucket(program: Program) -> Bucket:
    return program.key.bucket
