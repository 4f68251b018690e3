"""From queries to the arrays of one macro-batch: order, packing, attention groups, class windows. Pure numpy.

Rows are ordered by the set of light classes they use (Gray-code order, so that each class's rows are mostly
neighbours), and packed one after the other in that order. Attention groups pick their rows by length, independently.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from jpets.deltas import class_method
from jpets.deltas.protocol import NO_LEAD, ClassKey, Lead
from jpets.deltas.view import ClassView, HeadView, HeavyView, RowView, SegmentView, SlotView
from jpets.engine.batch.bucket import (
    FULL,
    HEAVY_RUNS,
    LEVELS,
    SETUP_TOKENS,
    Bucket,
    Variant,
    capacity,
    replaces_weights,
    windowed,
)
from jpets.model.batch import PackedBatch, Rows
from jpets.passage import Passage
from pallas_kernels.packed_attention import AttentionGroup
from pallas_kernels.windows import Runs

Ints = npt.NDArray[np.int32]


@dataclasses.dataclass(frozen=True)
class TokenInput:
    """What each token of a batch brings under one name: an array of this shape, ``fill`` where there is no token."""

    dtype: npt.DTypeLike = np.int32
    shape: tuple[int, ...] = ()
    fill: float = 0


@dataclasses.dataclass(frozen=True)
class Row:
    """One query as the device sees it: its tokens, its task's slot in each class, how it is pooled.

    ``inputs`` holds an array [length, ...] for each ``TokenInput`` of the network. The first ``lead.tokens`` are the
    places of virtual tokens; positions begin at ``lead.first_position``. ``passage``, of a question, and ``of_text``
    [text_tokens] (as in ``Tokens``), where tokens get labels, are for the answer: they count tokens from the text's
    first.
    """

    inputs: Mapping[str, npt.NDArray[Any]]
    slots: Mapping[ClassKey, int]
    pooling: int
    length: int
    lead: Lead = NO_LEAD
    passage: Passage | None = None
    of_text: npt.NDArray[np.int8] | None = None
    places: Ints | None = None
    """Positions [length] where they are not counted from ``lead.first_position``."""
    normalize: bool = True
    """Whether the embedding of a row without a task gets length 1."""

    @classmethod
    def of_tokens(cls, ids: Ints, types: Ints, slots: Mapping[ClassKey, int], pooling: int, **more: Any) -> Self:
        """A row of an encoder: ``ids`` and ``types`` [length]."""
        return cls({"ids": ids, "types": types}, slots, pooling, len(ids), **more)

    @property
    def ids(self) -> Ints:
        """Of an encoder's row."""
        ids: Ints = self.inputs["ids"]
        return ids

    @property
    def positions(self) -> Ints:
        return self.lead.first_position + np.arange(self.length, dtype=np.int32) if self.places is None else self.places

    @property
    def text_tokens(self) -> int:
        return self.length - self.lead.tokens

    @functools.cached_property
    def heavy(self) -> bool:
        """Whether its task changes weights in a way that takes a pass over its own; asked anew for every plan."""
        return any(class_method(key.method).kind == "heavy" for key in self.slots)


def led(row: Row, lead: Lead, inputs: Mapping[str, TokenInput]) -> Row:
    """``row`` with the places of its task's virtual tokens before the text's."""
    places = {name: np.full((lead.tokens, *own.shape), own.fill, own.dtype) for name, own in inputs.items()}
    whole = {name: np.concatenate([places[name], given]) for name, given in row.inputs.items()}
    return dataclasses.replace(row, inputs=whole, length=lead.tokens + row.length, lead=lead)


@dataclasses.dataclass(frozen=True)
class HeadPlace:
    """Where a row's logits stand: array ``head`` of the outputs, and either one cell or one per token of its text."""

    head: int
    cells: tuple[Ints, Ints]


@dataclasses.dataclass(frozen=True)
class Assembled:
    """A batch ready to run. ``order[i]`` is where query i stands among the output rows."""

    batch: PackedBatch
    views: tuple[ClassView, ...]
    order: Ints
    heads: tuple[HeadPlace | None, ...]


@dataclasses.dataclass(frozen=True)
class _Layout:
    """Rows in packing order: query numbers, lengths, of these virtual tokens, and first tokens."""

    bucket: Bucket
    queries: Ints
    lengths: Ints
    leads: Ints
    starts: Ints


def _gray_rank(members: Sequence[bool]) -> int:
    code = 0
    for member in members:
        code = code << 1 | member
    rank = code
    while code := code >> 1:
        rank ^= code
    return rank


def _heavy_slots(row: Row) -> tuple[tuple[ClassKey, int], ...]:
    """Rows that are equal in this stand together, so that a heavy delta is applied to all of them at once."""
    return tuple((key, slot) for key, slot in sorted(row.slots.items()) if class_method(key.method).kind == "heavy")


def _lay_out(rows: Sequence[Row], bucket: Bucket) -> _Layout:
    used = {key for row in rows for key in row.slots if windowed(key)}
    counts = {key: sum(key in row.slots for row in rows) for key in used}
    keys = sorted(used, key=lambda key: (-counts[key], key))
    ranks = [_gray_rank([key in row.slots for key in keys]) for row in rows]
    heavy = [_heavy_slots(row) for row in rows]
    queries = np.array(sorted(range(len(rows)), key=lambda q: (ranks[q], heavy[q], q)), np.int32)
    lengths = np.array([rows[q].length for q in queries], np.int32)
    leads = np.array([rows[q].lead.tokens for q in queries], np.int32)
    if bucket.rectangular:
        starts = np.arange(len(rows), dtype=np.int32) * bucket.longest
    else:
        starts = (np.cumsum(lengths) - lengths).astype(np.int32)
    return _Layout(bucket, queries, lengths, leads, starts)


def _class_members(layout: _Layout, rows: Sequence[Row], key: ClassKey) -> Ints:
    """Places in packing order of the rows that use a class."""
    return np.array([at for at, q in enumerate(layout.queries) if key in rows[q].slots], np.int32)


def _units(layout: _Layout, members: Ints) -> tuple[int, int]:
    """(segments or rows a class takes, tokens its window spans)."""
    bucket = layout.bucket
    first, last = members[0], members[-1]
    if bucket.rectangular:
        return int(last - first + 1), 0
    segments = int((-(-layout.lengths[members] // bucket.segment)).sum())
    return segments, int(layout.starts[last] + layout.lengths[last] - layout.starts[first])


def class_needs(rows: Sequence[Row], bucket: Bucket) -> dict[ClassKey, int]:
    """The level of room each class needs when these rows run in ``bucket``."""
    layout = _lay_out(rows, bucket)
    needs: dict[ClassKey, int] = {}
    for key in sorted({key for row in rows for key in row.slots}):
        needs[key] = FULL
        if windowed(key):
            units, span = _units(layout, _class_members(layout, rows, key))
            needs[key] = next(
                level
                for level in LEVELS
                if units <= (room := capacity(bucket, level)) and (level == FULL or span <= room * bucket.segment)
            )
    return needs


def run_work(rows: Sequence[Row], bucket: Bucket) -> dict[int, int]:
    """Tokens that the steps over these rows' heavy classes cover, their set-up counted in tokens, by length of run."""
    layout = _lay_out(rows, bucket)
    classes = {key for row in rows for key in row.slots if class_method(key.method).kind == "heavy"}
    slots_of = [
        {int(at): rows[layout.queries[at]].slots[key] for at in _class_members(layout, rows, key)} for key in classes
    ]

    def work(size: int) -> int:
        spans = (span for slot_of in slots_of for span in _spans(layout, slot_of, size))
        return sum(-(-(end - first) // size) for _, first, end in spans) * (SETUP_TOKENS + size)

    return {most: work(bucket.run(most)) for most in HEAVY_RUNS}


def best_run(work: Mapping[int, int]) -> int:
    """The length of heavy runs that takes least ``run_work``."""
    return min(work, key=work.__getitem__)


def all_replaced(rows: Sequence[Row]) -> bool:
    """Whether one class that replaces weights serves every row."""
    common = set.intersection(*(set(row.slots) for row in rows))
    return any(replaces_weights(key) for key in common)


def assemble(rows: Sequence[Row], bucket: Bucket, variant: Variant, inputs: Mapping[str, TokenInput]) -> Assembled:
    """Arrays for ``rows`` in ``bucket``, with a view for every class of ``variant``, in its order.

    The bucket must hold the rows and the variant cover their needs; both are asserted.
    """
    assert bucket.holds(np.array([row.length for row in rows])), (bucket, [row.length for row in rows])
    assert not variant.replaced or all_replaced(rows), "rows without weights of their own need the shared products"
    layout = _lay_out(rows, bucket)
    t = bucket.tokens
    given = {name: np.full((t, *own.shape), own.fill, own.dtype) for name, own in inputs.items()}
    positions = np.zeros(t, np.int32)
    for at, q in enumerate(layout.queries):
        span = slice(layout.starts[at], layout.starts[at] + layout.lengths[at])
        for name, array in given.items():
            array[span] = rows[q].inputs[name]
        positions[span] = rows[q].positions
    groups, cells, row_of_token, row_at = _attention(layout)
    order = np.empty(len(rows), np.int32)
    order[layout.queries] = row_at
    first_token = np.full(bucket.rows, t, np.int32)
    pooling = np.zeros(bucket.rows, np.int32)
    first_token[row_at] = layout.starts
    pooling[order] = [row.pooling for row in rows]
    batch = PackedBatch(given, positions, groups, cells, row_of_token, Rows(first_token, pooling))  # type: ignore[arg-type]
    views: list[ClassView] = []
    heads: list[HeadPlace | None] = [None] * len(rows)
    head = -1
    for key in variant.classes():
        members = _class_members(layout, rows, key)
        head += key.method == "head"
        views.append(_view(layout, rows, key, members, variant, row_at, heads, head))
    return Assembled(batch, tuple(views), order, tuple(heads))


def _attention(layout: _Layout) -> tuple[tuple[AttentionGroup, ...], Ints | None, Ints | None, Ints]:
    """Groups, cells and row_of_token as ``PackedBatch`` has them, and each packed row's number in row order."""
    bucket, t = layout.bucket, layout.bucket.tokens
    if bucket.rectangular:
        lengths = np.zeros(bucket.rows, np.int32)
        lengths[: len(layout.lengths)] = layout.lengths
        return (AttentionGroup(None, lengths),), None, None, np.arange(len(layout.lengths), dtype=np.int32)  # type: ignore[arg-type]
    row_of_token, cells = np.zeros(t, np.int32), np.zeros(t, np.int32)
    row_at = np.empty(len(layout.lengths), np.int32)
    group_of = bucket.group_of(layout.lengths)
    groups: list[AttentionGroup] = []
    row_base = cell_base = 0
    for number, (n, longest) in enumerate(bucket.groups):
        tokens = np.zeros((n, longest), np.int32)
        lengths = np.zeros(n, np.int32)
        for j, at in enumerate(np.flatnonzero(group_of == number)):
            start, length = layout.starts[at], layout.lengths[at]
            span = np.arange(start, start + length, dtype=np.int32)
            tokens[j], lengths[j], row_at[at] = start, length, row_base + j
            tokens[j, :length] = span
            cells[span], row_of_token[span] = cell_base + j * longest + np.arange(length), row_base + j
        groups.append(AttentionGroup(tokens, lengths))  # type: ignore[arg-type]
        row_base, cell_base = row_base + n, cell_base + n * longest
    return tuple(groups), cells, row_of_token, row_at


def _view(
    layout: _Layout,
    rows: Sequence[Row],
    key: ClassKey,
    members: Ints,
    variant: Variant,
    row_at: Ints,
    heads: list[HeadPlace | None],
    head: int,
) -> ClassView:
    bucket, kind = layout.bucket, class_method(key.method).kind
    slot_of = {int(at): rows[layout.queries[at]].slots[key] for at in members}
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
    layout: _Layout,
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
    layout: _Layout,
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


def _heavy_view(layout: _Layout, slot_of: Mapping[int, int], run: int) -> HeavyView:
    bucket, size, most = layout.bucket, layout.bucket.run(run), layout.bucket.most_runs(run)
    slots, starts, offsets, lengths = (np.zeros(most, np.int32) for _ in range(4))
    k = 0
    for slot, first, end in _spans(layout, slot_of, size):
        for begin in range(first, end, size):
            starts[k] = min(begin, bucket.tokens - size)
            slots[k], offsets[k], lengths[k] = slot, begin - starts[k], min(size, end - begin)
            k += 1
    return HeavyView(Runs(np.int32(k), slots, starts, offsets, lengths), size)  # type: ignore[arg-type]


def _spans(layout: _Layout, slot_of: Mapping[int, int], run: int) -> list[tuple[int, int, int]]:
    """(slot, first token, past the last token) of neighbouring rows with one slot (PetS's mini-batches).

    In a rectangular bucket the padding between them is taken along, where a run is not shorter than a row.
    """
    joinable = not layout.bucket.rectangular or run >= layout.bucket.longest
    spans: list[tuple[int, int, int]] = []
    before = -1
    for at, slot in slot_of.items():
        first, end = int(layout.starts[at]), int(layout.starts[at] + layout.lengths[at])
        if joinable and spans and at == before + 1 and spans[-1][0] == slot:
            spans[-1] = (slot, spans[-1][1], end)
        else:
            spans.append((slot, first, end))
        before = at
    return spans
