"""Where the rows of a batch stand in a bucket, and the room that each class needs. Pure numpy."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from jpets.deltas.protocol import ClassKey
from jpets.engine.batch.bucket import FULL, HEAVY_RUNS, LEVELS, SETUP_TOKENS, Bucket
from jpets.engine.batch.row_table import RowTable
from jpets.engine.batch.rows import Ints, Row


class Spans(NamedTuple):
    """Neighbouring rows with one slot (PetS's mini-batches): their slots, first tokens, and the tokens past their last
    ones, all [spans]."""

    slots: Ints
    firsts: Ints
    ends: Ints


class Layout:
    """``rows`` in a bucket, one after the other in the order of their table: ``queries``, ``lengths`` and ``leads`` are
    the table's, ``starts`` [N] the rows' first tokens in its order. It never changes.

    Rows that are laid out in several buckets are made a table once.
    """

    def __init__(self, rows: Sequence[Row] | RowTable, bucket: Bucket) -> None:
        self.table = rows if isinstance(rows, RowTable) else RowTable(rows)
        self.rows = self.table.rows
        self.bucket = bucket
        self.queries, self.lengths, self.leads = self.table.queries, self.table.lengths, self.table.leads
        if bucket.rectangular:
            self.starts = np.arange(len(self.rows), dtype=np.int32) * np.int32(bucket.longest)
        else:
            self.starts = self.lengths.cumsum(dtype=np.int32) - self.lengths

    @functools.cached_property
    def within(self) -> Ints:
        """For each token of each row, in packing order, how many of its row come before it [tokens]."""
        ends = self.lengths.cumsum(dtype=np.int32)
        return np.arange(ends[-1], dtype=np.int32) - (ends - self.lengths).repeat(self.lengths)

    @functools.cached_property
    def tokens(self) -> slice | Ints:
        """Where these tokens stand in the bucket: one after the other, unless there is padding between rows."""
        first, last = int(self.starts[0]), int(self.starts[-1] + self.lengths[-1])
        if last - first == len(self.within):
            return slice(first, last)
        return self.within + self.starts.repeat(self.lengths)

    def members(self, key: ClassKey) -> tuple[Ints, Ints]:
        """The places, in packing order, of the rows that use a class, and their slots."""
        return self.table.members(key)

    @functools.cached_property
    def needs(self) -> Mapping[ClassKey, int]:
        """The level of room that each class needs."""
        columns = self.table.columns
        levels = np.full(len(columns.keys), FULL)
        if len(columns.windowed):
            levels[columns.windowed] = self._levels()
        return dict(zip(columns.keys, levels.tolist(), strict=True))

    def _levels(self) -> Ints:
        """The levels of the windowed classes."""
        used, bucket = self.table.used[:, self.table.columns.windowed], self.bucket
        first, last = used.argmax(0), len(used) - 1 - used[::-1].argmax(0)
        rooms = bucket.rooms[:, None]
        if bucket.rectangular:
            held = last - first + 1 <= rooms
        else:
            segments = -(-self.lengths // bucket.segment) @ used
            span = self.starts[last] + self.lengths[last] - self.starts[first]
            held = (segments <= rooms) & (span <= rooms * bucket.segment)
            held[-1] = segments <= rooms[-1]
        assert held[-1].all(), f"rows of {self.lengths.tolist()} tokens are too many for {bucket}"
        return np.array(LEVELS, np.int32)[held.argmax(0)]

    @functools.cached_property
    def run_work(self) -> Mapping[int, int]:
        """By length of run: the tokens that steps over the rows' heavy classes cover, with their set-up counted as
        tokens."""
        sizes = {most: self.bucket.run(most) for most in HEAVY_RUNS}
        return {most: self._steps(size) * (SETUP_TOKENS + size) for most, size in sizes.items()}

    def _steps(self, size: int) -> int:
        """Steps of this many tokens over all heavy classes."""
        spans = self._joined if self._joinable(size) else self._single
        return int((-(-(spans.ends - spans.firsts) // size)).sum())

    def spans(self, key: ClassKey, run: int) -> Spans:
        """The spans of a heavy class. In a rectangular bucket one includes the padding between rows if a run is not
        shorter than a row; in shorter runs, each row is a span."""
        column = self.table.columns.at.get(key)
        if column is None:
            return Spans(*np.empty((3, 0), np.int32))
        return self._spans(self.table.slots[:, [column]], joined=self._joinable(run))

    def run_levels(self, most: int) -> Mapping[ClassKey, int]:
        """The level of room that each heavy class needs in runs of about ``most`` tokens."""
        bucket, columns = self.bucket, self.table.columns
        size = bucket.run(most)

        def level(key: ClassKey) -> int:
            spans = self.spans(key, size)
            runs = int((-(-(spans.ends - spans.firsts) // size)).sum())
            return next(level for level in LEVELS if runs <= bucket.run_room(most, level))

        return {columns.keys[at]: level(columns.keys[at]) for at in columns.heavy}

    def _joinable(self, run: int) -> bool:
        return not self.bucket.rectangular or run >= self.bucket.longest

    @functools.cached_property
    def _joined(self) -> Spans:
        return self._spans(self.table.slots[:, self.table.columns.heavy], joined=True)

    @functools.cached_property
    def _single(self) -> Spans:
        return self._spans(self.table.slots[:, self.table.columns.heavy], joined=False)

    def _spans(self, slots: Ints, *, joined: bool) -> Spans:
        """The spans of classes of which ``slots`` [N, classes] are the columns, one class after the other."""
        begins = ends = slots > 0
        if joined:
            same = slots[1:] == slots[:-1]
            begins, ends = begins.copy(), ends.copy()
            begins[1:] &= ~same
            ends[:-1] &= ~same
        of, first = begins.T.nonzero()
        last = ends.T.nonzero()[1]
        return Spans(slots[first, of], self.starts[first], self.starts[last] + self.lengths[last])


def best_run(work: Mapping[int, int]) -> int:
    """The length of heavy runs with the least ``run_work``."""
    return min(work, key=work.__getitem__)


def all_replaced(rows: Sequence[Row]) -> bool:
    """Whether one class that replaces weights serves every row."""
    return RowTable(rows).replaced
