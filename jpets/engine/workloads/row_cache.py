"""Rows of a backbone's tables in a device's memory: those that batches read last. Most rows of a batch are there, and
only the others travel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
from jaxtyping import Int, Shaped

PIECES = (64, 256, 1024, 4096)
"""Rows that are written at a time: a program is compiled for each number."""
LEAVE = 1 / 8
"""Part of the places that is freed when there is no free one: the search for them takes as long for one as for many."""
NONE = np.zeros(0, np.int64)


class WriteRows(Protocol):
    """Puts ``rows`` at ``places`` of what programs read, those beyond its end nowhere. With ``anew`` that is empty
    before: a device that failed may have left anything there."""

    def __call__(self, places: Int[np.ndarray, " k"], rows: Shaped[np.ndarray, "k p e"], *, anew: bool) -> None: ...


class RowCache:
    """``capacity`` rows of ``source`` [r, p, e], in host memory, at places of the device that ``write`` fills. Where
    more are needed, those leave that no batch has read for longest.

    ``moved`` counts how often rows of ``source`` came to mean others. A batch must not read more than ``capacity``
    different rows. For the thread that owns the device, but for ``forget``.
    """

    def __init__(
        self, source: Shaped[np.ndarray, "r p e"], moved: Callable[[], int], capacity: int, write: WriteRows
    ) -> None:
        self._source, self._moved, self._write = source, moved, write
        self._place_of = np.zeros(len(source), np.int32)
        """Of each row, counted from 1; 0 for those that are not there. Pages of it that are not written take no
        memory."""
        self._row_at = np.full(capacity, -1, np.int64)
        """-1: the place is free."""
        self._read = np.zeros(capacity, np.int64)
        """The number of the last batch that read a place."""
        self._batch = 0
        self._as_of = moved()
        self._failed = False
        """Nobody knows what the device has."""
        self.hits = self.misses = 0
        """Different rows of a batch that were there, and that were not."""
        for size in PIECES:
            self._put(NONE, NONE, size, anew=size == PIECES[0])

    def forget(self) -> None:
        """The device failed: nothing that was written is there any more. Any thread."""
        self._failed = True

    def places(self, rows: Int[np.ndarray, " t"]) -> Int[np.ndarray, " t"]:
        """Where the device has the rows of a batch's tokens, once the batch runs; those below 0 stay as they are."""
        self._batch += 1
        if self._failed:
            self._failed = False  # first: another batch may fail meanwhile
            self._clear()
            self._put(NONE, NONE, PIECES[0], anew=True)
        elif self._as_of != self._moved():
            self._clear()
        found, some = rows.copy(), rows >= 0
        wanted, which = np.unique(rows[some], return_inverse=True)
        places = self._place_of[wanted] - 1
        there = places >= 0
        self._read[places[there]] = self._batch
        self.hits += int(there.sum())
        if not there.all():
            places[~there] = self._bring(wanted[~there])
        found[some] = places[which]
        return found

    def _clear(self) -> None:
        self._as_of = self._moved()
        self._place_of[self._row_at[self._row_at >= 0]] = 0
        self._row_at[:] = -1

    def _bring(self, rows: Int[np.ndarray, " k"]) -> Int[np.ndarray, " k"]:
        """The places of rows that were not there."""
        self.misses += len(rows)
        places = self._room(len(rows))
        for first in range(0, len(rows), PIECES[-1]):
            some = slice(first, first + PIECES[-1])
            count = len(rows[some])
            self._put(places[some], rows[some], next(size for size in PIECES if size >= count))
        self._row_at[places], self._place_of[rows], self._read[places] = rows, places + 1, self._batch
        return places

    def _room(self, count: int) -> Int[np.ndarray, " k"]:
        """So many free places."""
        free = np.flatnonzero(self._row_at < 0)
        if len(free) < count:
            idle = np.flatnonzero((self._row_at >= 0) & (self._read < self._batch))
            leaving = min(len(idle), max(count - len(free), int(len(self._row_at) * LEAVE)))
            longest = idle[np.argpartition(self._read[idle], leaving - 1)[:leaving]]
            self._place_of[self._row_at[longest]] = 0
            self._row_at[longest] = -1
            free = np.concatenate([free, longest])
        return free[:count]

    def _put(
        self, places: Int[np.ndarray, " k"], rows: Int[np.ndarray, " k"], size: int, *, anew: bool = False
    ) -> None:
        """Writes these rows, filled up to ``size`` with some that go nowhere."""
        values = np.empty((size, *self._source.shape[1:]), self._source.dtype)
        np.take(self._source, rows, 0, values[: len(rows)], mode="clip")  # which writes there, as "raise" does not
        beyond = len(self._row_at) + np.arange(size - len(rows))
        try:
            self._write(np.concatenate([places, beyond]).astype(np.int32), values, anew=anew)
        except BaseException:
            self._failed = True
            raise
