"""The programs that batches miss, and what that cost them."""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Iterable
from operator import itemgetter

from jpets.engine.programs.program import ProgramKey

MOST_WANTED = 1024
FOREMOST = 8
"""Programs that batches are told of as missed most: each costs a prediction where a batch misses one."""
LARGER = 1.5
"""Times as many tokens up to which another program would do for a batch."""
RATE_SECONDS = 10.0
"""Seconds after which a loss counts for a third of what it was, in the rate of losses."""


class Wanted:
    """Not thread-safe."""

    def __init__(self) -> None:
        self._lost, self._at = 0.0, time.monotonic()
        """What batches lost until then, where each earlier loss counts for less: see ``rate``."""
        self._missed: dict[ProgramKey, float] = {}
        """Seconds that batches lost because a program was not there."""
        self._most: ProgramKey | None = None
        self.total = 0.0
        """Seconds that batches lost for want of all these programs together."""
        self._not_before: dict[ProgramKey, float] = {}
        """When a program may be asked for again: never while it is being brought or loaded, later if it had to leave
        or could not be had."""

    def miss(self, key: ProgramKey, seconds: float) -> None:
        """Notes that batches would have been ``seconds`` faster in a program. Each batch may: it takes no search. One
        that cannot be had for now is no reason to hurry."""
        if self.barred(key):
            return
        self._lost, self._at = self.rate * RATE_SECONDS + seconds, time.monotonic()
        if not self.open(key):
            return
        if len(self._missed) > MOST_WANTED:
            self._missed = dict(heapq.nlargest(MOST_WANTED // 2, self._missed.items(), key=itemgetter(1)))
            self._count_again()
        self._missed[key] = self._missed.get(key, 0.0) + seconds
        self.total += seconds
        if self._most is None or self._missed[key] > self._missed[self._most]:
            self._most = key

    def most(self, least: float) -> ProgramKey | None:
        """The program that is missed most, if batches lost at least so many seconds."""
        return self._most if self._most is not None and self._missed[self._most] >= least else None

    def foremost(self) -> list[ProgramKey]:
        """``FOREMOST`` programs that are missed most, the most missed first."""
        return [key for key, _ in heapq.nlargest(FOREMOST, self._missed.items(), key=itemgetter(1))]

    def barred(self, key: ProgramKey) -> bool:
        """Whether a program was put off, and may not be asked for yet."""
        return time.monotonic() < self._not_before.get(key, 0.0) < math.inf

    def open(self, key: ProgramKey) -> bool:
        """Whether a program may be brought now: it is not on its way, and was not put off."""
        return time.monotonic() >= self._not_before.get(key, 0.0)

    @property
    def rate(self) -> float:
        """Seconds that batches lose in a second for want of programs, lately."""
        return self._lost * math.exp((self._at - time.monotonic()) / RATE_SECONDS) / RATE_SECONDS

    def count(self, least: float) -> int:
        """The programs without which batches lost at least so many seconds."""
        return sum(seconds >= least for seconds in self._missed.values())

    def bring(self, key: ProgramKey) -> float:
        """The program is being brought; what batches have lost without it, in seconds, is forgotten, and returned."""
        lost = self._missed.get(key, 0.0)
        self._drop(key)
        self._not_before[key] = math.inf
        return lost

    def give_back(self, key: ProgramKey, seconds: float) -> None:
        """The program was given up for another one; as if batches had lost ``seconds`` without it, it comes again."""
        self._not_before.pop(key, None)
        if seconds:
            self._missed[key] = self._missed.get(key, 0.0) + seconds
            self._count_again()

    def brought(self, key: ProgramKey) -> None:
        """A program came: what batches lost without others that it has room for, they might not have lost with it."""
        self._missed = {own: lost for own, lost in self._missed.items() if not _might_take(key, own)}
        self._count_again()

    def put_off(self, keys: Iterable[ProgramKey], seconds: float) -> None:
        """The programs may be asked for again after so many seconds."""
        for key in keys:
            self._drop(key)
            self._not_before[key] = time.monotonic() + seconds

    def _drop(self, key: ProgramKey) -> None:
        if self._missed.pop(key, None) is not None:
            self._count_again()

    def _count_again(self) -> None:
        self._most = max(self._missed, key=self._missed.__getitem__, default=None)
        self.total = sum(self._missed.values())


def _might_take(key: ProgramKey, other: ProgramKey) -> bool:
    """Whether batches that miss the ``other`` program could run in the one of ``key``, which is as large and has all
    their classes."""
    own_bucket, their_bucket = key.bucket, other.bucket
    larger = their_bucket.tokens <= own_bucket.tokens <= LARGER * their_bucket.tokens
    if key.trunk != other.trunk or not larger or own_bucket.longest < their_bucket.longest:
        return False
    own, theirs = key.variant, other.variant
    return own.replaced == theirs.replaced and own.has_room({each: theirs.level(each) for each in theirs.classes()})
