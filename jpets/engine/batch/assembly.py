"""From queries to the arrays of one macro-batch. Pure numpy. Attention groups pick their rows by length, in any packing
order."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jpets.deltas.view import ClassView
from jpets.engine.batch.arguments import BatchArguments, Buffers
from jpets.engine.batch.bucket import Bucket, Variant
from jpets.engine.batch.layout import Layout
from jpets.engine.batch.rows import Ints, Row, TokenInput
from jpets.engine.batch.views import HeadPlaces, fill_view
from jpets.model.batch import PackedBatch


@dataclasses.dataclass(frozen=True)
class Assembled:
    """A batch ready to run: ``buffers`` are a program's arguments, ``batch`` and ``views`` are parts of them.
    ``order[i]`` is where query i stands among the output rows, ``heads[i]`` where its logits do."""

    buffers: Buffers
    batch: PackedBatch
    views: tuple[ClassView, ...]
    order: Ints
    heads: HeadPlaces


def assemble(rows: Sequence[Row], bucket: Bucket, variant: Variant, inputs: Mapping[str, TokenInput]) -> Assembled:
    """Arrays for ``rows`` in ``bucket``, with a view for every class of ``variant``, in its order."""
    return fill(Layout(rows, bucket), rows, BatchArguments(bucket, variant, inputs))


def fill(layout: Layout, rows: Sequence[Row], arguments: BatchArguments, below: Layout | None = None) -> Assembled:
    """``assemble`` for rows that were laid out before, and arguments that were made for the program. ``rows`` are the
    layout's, with the inputs that were looked up since. Above a trunk, they are all of the text that is laid out
    ``below``.

    The bucket must hold the rows and the variant cover their needs; both are asserted.
    """
    bucket, variant = arguments.bucket, arguments.variant
    assert bucket.holds(layout.lengths), (bucket, layout.lengths)
    assert not variant.replaced or layout.table.replaced, "rows without weights of their own need the shared products"
    buffers, (batch, views, trunk) = arguments.blank()
    packed = [rows[q] for q in layout.queries.tolist()]
    if trunk is None or below is None:
        _fill_tokens(batch, layout, packed)
    else:
        _fill_tokens(trunk, below, below.rows)
        _fill_attention(trunk, below)
        ids: Any = batch.ids
        ids[layout.tokens] = layout.within
    row_at = _fill_attention(batch, layout)
    order = np.empty(len(rows), np.int32)
    order[layout.queries] = row_at
    place: Any = batch.rows
    place.first_token[row_at] = layout.starts
    place.pooling[row_at] = [row.pooling for row in packed]
    heads = HeadPlaces(len(rows))
    for key, view in zip(variant.classes(), views, strict=True):
        fill_view(view, layout, key, row_at, heads)
    return Assembled(buffers, batch, views, order, heads)


def _fill_tokens(batch: Any, layout: Layout, packed: Sequence[Row]) -> None:
    """Inputs and positions; ``packed`` are the rows in packing order."""
    at = layout.tokens
    for name, array in batch.inputs.items():
        array[at] = np.concatenate([row.inputs[name] for row in packed])
    firsts = layout.table.first_positions
    counted = layout.within
    batch.positions[at] = counted + firsts.repeat(layout.lengths) if firsts.any() else counted
    for start, row in zip(layout.starts.tolist(), packed, strict=True):
        if row.places is not None:
            batch.positions[start : start + row.length] = row.places


def _fill_attention(batch: Any, layout: Layout) -> Ints:
    """Groups, cells and row_of_token as ``PackedBatch`` has them; returns each packed row's number in row order."""
    bucket, lengths = layout.bucket, layout.lengths
    if bucket.rectangular:
        batch.groups[0].lengths[: len(lengths)] = lengths
        return np.arange(len(lengths), dtype=np.int32)
    row_at, cell_at = np.empty((2, len(lengths)), np.int32)
    group_of = bucket.group_of(lengths)
    row_base = cell_base = 0
    for number, ((n, longest), group) in enumerate(zip(bucket.groups, batch.groups, strict=True)):
        at = (group_of == number).nonzero()[0]
        count, own, starts = np.arange(longest, dtype=np.int32), lengths[at, None], layout.starts[at, None]
        group.tokens[: len(at)] = np.where(count < own, starts + count, starts)
        group.lengths[: len(at)] = lengths[at]
        row_at[at] = np.arange(row_base, row_base + len(at))
        cell_at[at] = np.arange(cell_base, cell_base + len(at) * longest, longest)
        row_base, cell_base = row_base + n, cell_base + n * longest
    batch.cells[layout.tokens] = layout.within + cell_at.repeat(lengths)
    batch.row_of_token[layout.tokens] = row_at.repeat(lengths)
    return row_at
