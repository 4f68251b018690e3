"""From queries to the arrays of one macro-batch. Pure numpy. Attention groups pick their rows by length, in any packing
order."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from jpets.deltas.view import ClassView
from jpets.engine.batch.bucket import Bucket, Variant
from jpets.engine.batch.layout import Layout, all_replaced
from jpets.engine.batch.rows import Ints, Row, TokenInput
from jpets.engine.batch.views import HeadPlace, class_view
from jpets.model.batch import PackedBatch, Rows
from pallas_kernels.packed_attention import AttentionGroup


@dataclasses.dataclass(frozen=True)
class Assembled:
    """A batch ready to run. ``order[i]`` is where query i stands among the output rows."""

    batch: PackedBatch
    views: tuple[ClassView, ...]
    order: Ints
    heads: tuple[HeadPlace | None, ...]


def assemble(rows: Sequence[Row], bucket: Bucket, variant: Variant, inputs: Mapping[str, TokenInput]) -> Assembled:
    """Arrays for ``rows`` in ``bucket``, with a view for every class of ``variant``, in its order."""
    return fill(Layout(rows, bucket), rows, variant, inputs)


def fill(layout: Layout, rows: Sequence[Row], variant: Variant, inputs: Mapping[str, TokenInput]) -> Assembled:
    """``assemble`` for rows that were laid out before. ``rows`` are the layout's, with the inputs that were looked up
    since.

    The bucket must hold the rows and the variant cover their needs; both are asserted.
    """
    bucket, t = layout.bucket, layout.bucket.tokens
    assert bucket.holds(layout.lengths), (bucket, layout.lengths)
    assert not variant.replaced or all_replaced(rows), "rows without weights of their own need the shared products"
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
        head += key.method == "head"
        views.append(class_view(layout, key, variant, row_at, heads, head))
    return Assembled(batch, tuple(views), order, tuple(heads))


def _attention(layout: Layout) -> tuple[tuple[AttentionGroup, ...], Ints | None, Ints | None, Ints]:
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
