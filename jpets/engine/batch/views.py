"""Where the rows of each class stand in a batch, and where their heads' outputs will stand. Pure numpy."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np

from jpets.deltas import class_method
from jpets.deltas.protocol import ClassKey
from jpets.deltas.view import ClassView, HeadView, HeavyView, RowView, SegmentView, SlotView
from jpets.engine.batch.bucket import Variant, capacity, windowed
from jpets.engine.batch.layout import Layout
from jpets.engine.batch.rows import Ints
from pallas_kernels.windows import Runs


@dataclasses.dataclass(frozen=True)
class HeadPlace:
    """Where a row's logits stand: array ``head`` of the outputs, and one cell, or one per token of its text."""

    head: int
    cells: tuple[Ints, Ints]


def class_view(
    layout: Layout,
    key: ClassKey,
    variant: Variant,
    row_at: Ints,
    heads: list[HeadPlace | None],
    head: int,
) -> ClassView:
    """The view of one class. ``heads``, by query, is filled with the places of the rows of head class number ``head``;
    ``row_at`` gives each packed row's number in row order."""
    bucket, kind = layout.bucket, class_method(key.method).kind
    slot_of = layout.slots(key)
    members = np.array(list(slot_of), np.int32)
    if windowed(key):
        make = _row_view if bucket.rectangular else _segment_view
        return make(
            layout, members, slot_of, capacity(bucket, variant.level(key)), heads if kind == "head" else None, head
        )
    if kind == "heavy":
        return _heavy_view(layout, slot_of, variant.run)
    if kind == "row":
        slots = np.zeros(bucket.rows, np.int32)
        slots[row_at[members]] = list(slot_of.values())
        return SlotView(slots)  # type: ignore[arg-type]
    at_rows, slots = np.full(bucket.rows, bucket.rows, np.int32), np.zeros(bucket.rows, np.int32)
    for j, at in enumerate(members):
        at_rows[j], slots[j] = row_at[at], slot_of[int(at)]
        heads[layout.queries[at]] = HeadPlace(head, (np.array([j], np.int32), np.zeros(1, np.int32)))
    return HeadView(at_rows, slots)  # type: ignore[arg-type]


def _row_view(
    layout: Layout,
    members: Ints,
    slot_of: Mapping[int, int],
    room: int,
    heads: list[HeadPlace | None] | None,
    head: int,
) -> RowView:
    first = min(int(members[0]), layout.bucket.rows - room) if len(members) else 0
    slots = np.zeros(room, np.int32)
    for at in members:
        slots[at - first] = slot_of[int(at)]
        if heads is not None:
            cells = np.arange(layout.leads[at], layout.lengths[at], dtype=np.int32)
            heads[layout.queries[at]] = HeadPlace(head, (np.full(len(cells), at - first, np.int32), cells))
    return RowView(np.int32(first), slots, layout.bucket.longest)  # type: ignore[arg-type]


def _segment_view(
    layout: Layout,
    members: Ints,
    slot_of: Mapping[int, int],
    room: int,
    heads: list[HeadPlace | None] | None,
    head: int,
) -> SegmentView:
    t, size = layout.bucket.tokens, layout.bucket.segment
    width = min(t, room * size)
    first = min(int(layout.starts[members[0]]), t - width) if len(members) else 0
    tokens, slots = np.full((room, size), t, np.int32), np.zeros(room, np.int32)
    cells = np.full(width, room * size, np.int32)
    segment = 0
    for at in members:
        start, length = int(layout.starts[at]), int(layout.lengths[at])
        flat = segment * size + np.arange(length, dtype=np.int32)
        tokens.reshape(-1)[flat] = np.arange(start, start + length)
        cells[start - first : start - first + length] = flat
        taken = -(-length // size)
        slots[segment : segment + taken] = slot_of[int(at)]
        if heads is not None:
            cell = flat[layout.leads[at] :]
            heads[layout.queries[at]] = HeadPlace(head, (cell // size, cell % size))
        segment += taken
    return SegmentView(tokens, slots, np.int32(first), cells)  # type: ignore[arg-type]


def _heavy_view(layout: Layout, slot_of: Mapping[int, int], run: int) -> HeavyView:
    bucket, size, most = layout.bucket, layout.bucket.run(run), layout.bucket.most_runs(run)
    slots, starts, offsets, lengths = (np.zeros(most, np.int32) for _ in range(4))
    k = 0
    for slot, first, end in layout.spans(slot_of, size):
        for begin in range(first, end, size):
            starts[k] = min(begin, bucket.tokens - size)
            slots[k], offsets[k], lengths[k] = slot, begin - starts[k], min(size, end - begin)
            k += 1
    return HeavyView(Runs(np.int32(k), slots, starts, offsets, lengths), size)  # type: ignore[arg-type]
