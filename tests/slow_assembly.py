"""A layout and an assembly that go from row to row and from token to token, to compare the fast ones with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jpets.deltas import class_method
from jpets.deltas.protocol import ClassKey
from jpets.engine.batch.bucket import FULL, HEAVY_RUNS, LEVELS, SETUP_TOKENS, Bucket, Variant, capacity, windowed
from jpets.engine.batch.rows import Row, TokenInput


class SlowLayout:
    """As ``Layout``; ``slots`` holds, by class, the slot of each row that uses it, by its place in packing order."""

    def __init__(self, rows: Sequence[Row], bucket: Bucket) -> None:
        used = {key for row in rows for key in row.slots if windowed(key)}
        counts = {key: sum(key in row.slots for row in rows) for key in used}
        keys = sorted(used, key=lambda key: (-counts[key], key))
        ranks = [_gray_rank([key in row.slots for key in keys]) for row in rows]
        heavy = [[pair for pair in sorted(row.slots.items()) if kind(pair[0]) == "heavy"] for row in rows]
        self.bucket = bucket
        self.queries = sorted(range(len(rows)), key=lambda q: (ranks[q], heavy[q], q))
        self.lengths = [rows[q].length for q in self.queries]
        self.leads = [rows[q].lead.tokens for q in self.queries]
        self.starts = [sum(self.lengths[:at]) for at in range(len(rows))]
        if bucket.rectangular:
            self.starts = [at * bucket.longest for at in range(len(rows))]
        self.slots: dict[ClassKey, dict[int, int]] = {key: {} for row in rows for key in row.slots}
        for at, q in enumerate(self.queries):
            for key, slot in rows[q].slots.items():
                self.slots[key][at] = slot

    @property
    def needs(self) -> Mapping[ClassKey, int]:
        return {key: self._level(key) for key in self.slots}

    def _level(self, key: ClassKey) -> int:
        if not windowed(key):
            return FULL
        members = list(self.slots[key])
        first, last, size = members[0], members[-1], self.bucket.segment
        units, span = last - first + 1, 0
        if not self.bucket.rectangular:
            units = sum(-(-self.lengths[at] // size) for at in members)
            span = self.starts[last] + self.lengths[last] - self.starts[first]
        rooms = {level: capacity(self.bucket, level) for level in LEVELS}
        return next(v for v, room in rooms.items() if units <= room and (v == FULL or span <= room * size))

    @property
    def run_work(self) -> Mapping[int, int]:
        heavy = [key for key in self.slots if kind(key) == "heavy"]
        sizes = {most: self.bucket.run(most) for most in HEAVY_RUNS}
        steps = {
            most: sum(-(-(end - first) // size) for key in heavy for _, first, end in self.spans(key, size))
            for most, size in sizes.items()
        }
        return {most: steps[most] * (SETUP_TOKENS + size) for most, size in sizes.items()}

    def spans(self, key: ClassKey, run: int) -> list[tuple[int, int, int]]:
        joinable = not self.bucket.rectangular or run >= self.bucket.longest
        spans: list[tuple[int, int, int]] = []
        before = -1
        for at, slot in self.slots.get(key, {}).items():
            first, end = self.starts[at], self.starts[at] + self.lengths[at]
            if joinable and spans and at == before + 1 and spans[-1][0] == slot:
                spans[-1] = (slot, spans[-1][1], end)
            else:
                spans.append((slot, first, end))
            before = at
        return spans


def slow_batch(layout: SlowLayout, rows: Sequence[Row], inputs: Mapping[str, TokenInput]) -> tuple[Any, list[int]]:
    """(the leaves of a batch, by name, and each query's row)."""
    bucket, t = layout.bucket, layout.bucket.tokens
    found: dict[str, Any] = {name: np.full((t, *own.shape), own.fill, own.dtype) for name, own in inputs.items()}
    found["positions"] = np.zeros(t, int)
    row_at = _rows_of_groups(layout)
    found["first_token"], found["pooling"] = np.full(bucket.rows, t), np.zeros(bucket.rows, int)
    found["cells"], found["row_of_token"] = np.zeros(t, int), np.zeros(t, int)
    found["lengths"] = np.zeros(bucket.rows, int)
    found["tokens"] = [np.zeros(shape, int) for shape in bucket.groups]
    for at, q in enumerate(layout.queries):
        start, length, number = layout.starts[at], layout.lengths[at], row_at[at]
        found["first_token"][number], found["pooling"][number], found["lengths"][number] = (
            start,
            rows[q].pooling,
            length,
        )
        group, row, first_cell = _place(bucket, number)
        found["tokens"][group][row] = start
        for within in range(length):
            token = start + within
            for name in inputs:
                found[name][token] = rows[q].inputs[name][within]
            found["positions"][token] = rows[q].positions[within]
            found["tokens"][group][row, within] = token
            found["cells"][token], found["row_of_token"][token] = first_cell + within, number
    order = [row_at[layout.queries.index(q)] for q in range(len(rows))]
    return found, order


def _rows_of_groups(layout: SlowLayout) -> list[int]:
    """Each packed row's number in row order: the next one of the first group that is long enough."""
    if layout.bucket.rectangular:
        return list(range(len(layout.lengths)))
    free, base = [], 0
    for n, _ in layout.bucket.groups:
        free.append(iter(range(base, base + n)))
        base += n
    fitting = [
        next(g for g, (_, longest) in enumerate(layout.bucket.groups) if length <= longest) for length in layout.lengths
    ]
    return [next(free[group]) for group in fitting]


def _place(bucket: Bucket, number: int) -> tuple[int, int, int]:
    """(group, row in it, first cell) of a row."""
    cells = 0
    for group, (n, longest) in enumerate(bucket.groups):
        if number < n:
            return group, number, cells + number * longest
        number, cells = number - n, cells + n * longest
    raise AssertionError(number)


def slow_view(layout: SlowLayout, key: ClassKey, variant: Variant, row_at: Sequence[int]) -> dict[str, Any]:
    """The leaves of a class's view by name, and ``heads``: (row of the head's array, column) of each of its logits, by
    place in packing order."""
    bucket, own = layout.bucket, layout.slots.get(key, {})
    if windowed(key):
        room = capacity(bucket, variant.level(key))
        return (_slow_rows if bucket.rectangular else _slow_segments)(layout, own, room)
    if kind(key) == "heavy":
        return _slow_runs(layout, key, variant.run)
    slots, rows = np.zeros(bucket.rows, int), np.full(bucket.rows, bucket.rows)
    if kind(key) == "row":
        for at, slot in own.items():
            slots[row_at[at]] = slot
        return {"slots": slots, "heads": {}}
    for j, (at, slot) in enumerate(own.items()):
        rows[j], slots[j] = row_at[at], slot
    return {"rows": rows, "slots": slots, "heads": {at: [(j, 0)] for j, at in enumerate(own)}}


def _slow_rows(layout: SlowLayout, own: Mapping[int, int], room: int) -> dict[str, Any]:
    first = min(min(own), layout.bucket.rows - room) if own else 0
    slots, heads = np.zeros(room, int), dict[int, Any]()
    for at, slot in own.items():
        slots[at - first] = slot
        heads[at] = [(at - first, cell) for cell in range(layout.leads[at], layout.lengths[at])]
    return {"first": first, "slots": slots, "heads": heads}


def _slow_segments(layout: SlowLayout, own: Mapping[int, int], room: int) -> dict[str, Any]:
    t, size = layout.bucket.tokens, layout.bucket.segment
    width = min(t, room * size)
    first = min(layout.starts[min(own)], t - width) if own else 0
    tokens, slots, cells = np.full((room, size), t), np.zeros(room, int), np.full(width, room * size)
    segment, heads = 0, dict[int, list[tuple[int, int]]]()
    for at, slot in own.items():
        for within in range(layout.lengths[at]):
            row, column = segment + within // size, within % size
            tokens[row, column] = layout.starts[at] + within
            slots[row] = slot
            cells[layout.starts[at] + within - first] = row * size + column
            if within >= layout.leads[at]:
                heads.setdefault(at, []).append((row, column))
        segment += -(-layout.lengths[at] // size)
    return {"tokens": tokens, "slots": slots, "first": first, "cells": cells, "heads": heads}


def _slow_runs(layout: SlowLayout, key: ClassKey, run: int) -> dict[str, Any]:
    bucket, size, most = layout.bucket, layout.bucket.run(run), layout.bucket.most_runs(run)
    slots, starts, offsets, lengths = (np.zeros(most, int) for _ in range(4))
    k = 0
    for slot, first, end in layout.spans(key, size):
        for begin in range(first, end, size):
            starts[k] = min(begin, bucket.tokens - size)
            slots[k], offsets[k], lengths[k] = slot, begin - starts[k], min(size, end - begin)
            k += 1
    return {"used": k, "slots": slots, "starts": starts, "offsets": offsets, "lengths": lengths, "heads": {}}


def kind(key: ClassKey) -> str:
    return class_method(key.method).kind


def _gray_rank(members: Sequence[bool]) -> int:
    code = 0
    for member in members:
        code = code << 1 | member
    rank = code
    while code := code >> 1:
        rank ^= code
    return rank
