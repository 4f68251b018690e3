"""Where the rows of a batch stand in a bucket: order and packing, and the room that each class needs. Pure numpy.

Rows are ordered by the set of light classes they use (Gray-code order, so that each class's rows are mostly
neighbours), and packed one after the other in that order.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import numpy as np

from jpets.deltas import class_method
from jpets.deltas.protocol import ClassKey
from jpets.engine.batch.bucket import (
    FULL,
    HEAVY_RUNS,
    LEVELS,
    SETUP_TOKENS,
    Bucket,
    capacity,
    replaces_weights,
    windowed,
)
from jpets.engine.batch.rows import Ints, Row


class Layout:
    """``rows`` in the packing order of ``bucket``: ``queries`` are their numbers, ``lengths`` their tokens, ``leads``
    how many of these are virtual, ``starts`` their first tokens, all [N] in that order. It never changes."""

    def __init__(self, rows: Sequence[Row], bucket: Bucket) -> None:
        used = {key for row in rows for key in row.slots if windowed(key)}
        counts = {key: sum(key in row.slots for row in rows) for key in used}
        keys = sorted(used, key=lambda key: (-counts[key], key))
        ranks = [_gray_rank([key in row.slots for key in keys]) for row in rows]
        heavy = [_heavy_slots(row) for row in rows]
        self.rows = rows
        self.bucket = bucket
        self.queries = np.array(sorted(range(len(rows)), key=lambda q: (ranks[q], heavy[q], q)), np.int32)
        self.lengths = np.array([rows[q].length for q in self.queries], np.int32)
        self.leads = np.array([rows[q].lead.tokens for q in self.queries], np.int32)
        if bucket.rectangular:
            self.starts = np.arange(len(rows), dtype=np.int32) * bucket.longest
        else:
            self.starts = (np.cumsum(self.lengths) - self.lengths).astype(np.int32)

    @functools.cached_property
    def _slots(self) -> Mapping[ClassKey, Mapping[int, int]]:
        found: dict[ClassKey, dict[int, int]] = {}
        for at, q in enumerate(self.queries):
            for key, slot in self.rows[q].slots.items():
                found.setdefault(key, {})[at] = slot
        return found

    def slots(self, key: ClassKey) -> Mapping[int, int]:
        """The slot of each row that uses a class, by its place in packing order."""
        return self._slots.get(key, {})

    @functools.cached_property
    def needs(self) -> Mapping[ClassKey, int]:
        """The level of room that each class needs."""
        return {key: self._level(key) for key in sorted(self._slots)}

    def _level(self, key: ClassKey) -> int:
        if not windowed(key):
            return FULL
        units, span = self._units(np.array(list(self.slots(key)), np.int32))
        return next(
            level
            for level in LEVELS
            if units <= (room := capacity(self.bucket, level)) and (level == FULL or span <= room * self.bucket.segment)
        )

    def _units(self, members: Ints) -> tuple[int, int]:
        """(segments or rows that a class takes, tokens that its window spans)."""
        first, last = members[0], members[-1]
        if self.bucket.rectangular:
            return int(last - first + 1), 0
        segments = int((-(-self.lengths[members] // self.bucket.segment)).sum())
        return segments, int(self.starts[last] + self.lengths[last] - self.starts[first])

    @functools.cached_property
    def run_work(self) -> Mapping[int, int]:
        """By length of run: the tokens that steps over the rows' heavy classes cover, with their set-up counted as
        tokens."""
        slots_of = [slots for key, slots in self._slots.items() if class_method(key.method).kind == "heavy"]

        def work(size: int) -> int:
            spans = (span for slot_of in slots_of for span in self.spans(slot_of, size))
            return sum(-(-(end - first) // size) for _, first, end in spans) * (SETUP_TOKENS + size)

        return {most: work(self.bucket.run(most)) for most in HEAVY_RUNS}

    def spans(self, slot_of: Mapping[int, int], run: int) -> list[tuple[int, int, int]]:
        """(slot, first token, past the last token) of neighbouring rows with one slot (PetS's mini-batches).

        In a rectangular bucket a span includes the padding between rows if a run is not shorter than a row.
        """
        joinable = not self.bucket.rectangular or run >= self.bucket.longest
        spans: list[tuple[int, int, int]] = []
        before = -1
        for at, slot in slot_of.items():
            first, end = int(self.starts[at]), int(self.starts[at] + self.lengths[at])
            if joinable and spans and at == before + 1 and spans[-1][0] == slot:
                spans[-1] = (slot, spans[-1][1], end)
            else:
                spans.append((slot, first, end))
            before = at
        return spans


def best_run(work: Mapping[int, int]) -> int:
    """The length of heavy runs with the least ``run_work``."""
    return min(work, key=work.__getitem__)


def all_replaced(rows: Sequence[Row]) -> bool:
    """Whether one class that replaces weights serves every row."""
    common = set.intersection(*(set(row.slots) for row in rows))
    return any(replaces_weights(key) for key in common)


def _gray_rank(members: Sequence[bool]) -> int:
    code = 0
    for member in members:
        code = code << 1 | member
    rank = code
    while code := code >> 1:
        rank ^= code
    return rank


def _heavy_slots(row: Row) -> tuple[tuple[ClassKey, int], ...]:
    """Rows with equal keys stand together, so that a heavy delta is applied to all of them at once."""
    return tuple((key, slot) for key, slot in sorted(row.slots.items()) if class_method(key.method).kind == "heavy")
