"""Where the rows of each class stand in a batch, and where their heads' outputs will stand. Pure numpy.

The arrays of a view are parts of a batch's buffer: ``blank_view`` says what they hold where there are no rows, and
``fill_view`` writes the rows' places into them.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from jpets.deltas import class_method
from jpets.deltas.protocol import ClassKey
from jpets.deltas.view import ClassView, HeadView, HeavyView, RowView, SegmentView, SlotView
from jpets.engine.batch.bucket import Bucket, Variant, capacity, windowed
from jpets.engine.batch.layout import Layout
from jpets.engine.batch.rows import Ints
from pallas_kernels.windows import Runs


@dataclasses.dataclass(frozen=True)
class HeadPlace:
    """Where a row's logits stand: array ``head`` of the outputs, and one cell, or one per token of its text."""

    head: int
    cells: tuple[int | Ints, slice | Ints]


class HeadPlaces:
    """The places of each query's logits, None for a query without a head. Heads are counted in the variant's order."""

    def __init__(self, queries: int) -> None:
        self._head = np.full(queries, -1, np.int32)
        self._first, self._cells = np.zeros((2, queries), np.int32)
        self._widths: list[int] = []
        """By head: cells of a row of its array."""

    def add_head(self, queries: Ints, firsts: Ints, cells: Ints | int, width: int) -> None:
        """Some queries have this many cells from ``firsts`` on in the next head's array, rows of ``width`` cells."""
        self._head[queries] = len(self._widths)
        self._first[queries], self._cells[queries] = firsts, cells
        self._widths.append(width)

    def __len__(self) -> int:
        return len(self._head)

    def __getitem__(self, query: int) -> HeadPlace | None:
        head = int(self._head[query])
        if head < 0:
            return None
        width, count = self._widths[head], int(self._cells[query])
        row, column = divmod(int(self._first[query]), width)
        if column + count <= width:
            return HeadPlace(head, (row, slice(column, column + count)))
        cells = np.arange(self._first[query], self._first[query] + count, dtype=np.int32)
        return HeadPlace(head, (cells // width, cells % width))


def blank_view(bucket: Bucket, key: ClassKey, variant: Variant) -> ClassView:
    """The view of a class that no row uses."""
    kind = class_method(key.method).kind
    if windowed(key):
        room = capacity(bucket, variant.level(key))
        if bucket.rectangular:
            return RowView(blanks(), blanks(room), bucket.longest)
        cells = room * bucket.segment
        tokens = blanks(room, bucket.segment, of=bucket.tokens)
        return SegmentView(tokens, blanks(room), blanks(), blanks(min(bucket.tokens, cells), of=cells))
    if kind == "heavy":
        most = bucket.run_room(variant.run, variant.level(key))
        return HeavyView(Runs(blanks(), *(blanks(most) for _ in range(4))), bucket.run(variant.run))
    if kind == "row":
        return SlotView(blanks(bucket.rows))
    return HeadView(blanks(bucket.rows, of=bucket.rows), blanks(bucket.rows))


def blanks(*shape: int, of: int = 0) -> Any:
    """An array of the host, int32; it takes the place of a device's."""
    return np.full(shape, of, np.int32)


def fill_view(view: Any, layout: Layout, key: ClassKey, row_at: Ints, heads: HeadPlaces) -> None:
    """Writes the rows of a class into its blank view, and their heads' places if it is a class of heads. ``row_at``
    gives each packed row's number in row order."""
    places, slots = layout.members(key)
    head, firsts, width = class_method(key.method).kind == "head", places, 1
    if not len(places):
        pass
    elif isinstance(view, HeavyView):
        _fill_runs(view.runs, layout, key, view.size)
    elif isinstance(view, SlotView):
        view.slots[row_at[places]] = slots
    elif isinstance(view, HeadView):
        count = len(places)
        view.rows[:count], view.slots[:count] = row_at[places], slots
        firsts = np.arange(count, dtype=np.int32)
    elif isinstance(view, RowView):
        firsts, width = _fill_rows(view, layout, places, slots), layout.bucket.longest
    else:
        firsts, width = _fill_segments(view, layout, places, slots), layout.bucket.segment
    if head and windowed(key):
        leads = layout.leads[places]
        heads.add_head(layout.queries[places], firsts + leads, layout.lengths[places] - leads, width)
    elif head:
        heads.add_head(layout.queries[places], firsts, 1, 1)


def _fill_rows(view: Any, layout: Layout, places: Ints, slots: Ints) -> Ints:
    """Writes a window of whole rows; returns each row's first cell."""
    first = min(int(places[0]), layout.bucket.rows - len(view.slots))
    view.first[...] = first
    view.slots[places - first] = slots
    return (places - first) * np.int32(layout.bucket.longest)


def _fill_segments(view: Any, layout: Layout, places: Ints, slots: Ints) -> Ints:
    """Writes a window of segments; returns each row's first cell."""
    size = np.int32(layout.bucket.segment)
    starts, lengths = layout.starts[places], layout.lengths[places]
    taken = -(-lengths // size)
    firsts = (taken.cumsum(dtype=np.int32) - taken) * size
    before = lengths.cumsum(dtype=np.int32) - lengths
    count = np.arange(before[-1] + lengths[-1], dtype=np.int32)
    tokens, cells = count + (starts - before).repeat(lengths), count + (firsts - before).repeat(lengths)
    first = min(int(starts[0]), layout.bucket.tokens - len(view.cells))
    view.first[...] = first
    view.tokens.reshape(-1)[cells] = tokens
    view.cells[tokens - np.int32(first)] = cells
    own = slots.repeat(taken)
    view.slots[: len(own)] = own
    return firsts


def _fill_runs(runs: Any, layout: Layout, key: ClassKey, size: int) -> None:
    """Cuts the spans of a heavy class into runs."""
    spans = layout.spans(key, size)
    cut = -(-(spans.ends - spans.firsts) // np.int32(size))
    before = cut.cumsum(dtype=np.int32) - cut
    used = int(cut.sum())
    begins = (spans.firsts - before * np.int32(size)).repeat(cut) + np.arange(used, dtype=np.int32) * np.int32(size)
    starts = np.minimum(begins, np.int32(layout.bucket.tokens - size))
    runs.used[...] = used
    runs.slots[:used] = spans.slots.repeat(cut)
    runs.starts[:used], runs.offsets[:used] = starts, begins - starts
    runs.lengths[:used] = np.minimum(spans.ends.repeat(cut) - begins, size)
