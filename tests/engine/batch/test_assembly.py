"""Assembly: every token of every query is where the device looks for it, in any bucket and variant."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jpets.deltas.protocol import ClassKey
from jpets.deltas.view import HeavyView, RowView, SegmentView
from jpets.engine.batch.assembly import assemble
from jpets.engine.batch.bucket import (
    FULL,
    Bucket,
    Variant,
    bucket_menu,
    core_programs,
    make_variant,
    parse_bucket,
    widest,
)
from jpets.engine.batch.layout import Layout
from jpets.engine.batch.rows import Row, TokenInput
from jpets.engine.workloads.encoder_network import INPUTS

LORA = ClassKey("lora", (("query", 8),), (0,))
ADAPTER = ClassKey("adapter", (("after_ffn_out", 16),), (0,), (("activation", "relu"), ("input", "output")))
MASK = ClassKey("mask", (("query", 0),), (0,))
CLASSES = [LORA, ADAPTER, MASK]
BUCKETS = [Bucket(64, ((8, 8),)), Bucket(200, ((10, 8), (6, 32), (2, 150))), Bucket(48, ((12, 16),))]


@st.composite
def batches(draw: st.DrawFn) -> tuple[Bucket, list[Row]]:
    bucket = draw(st.sampled_from(BUCKETS))
    rows: list[Row] = []
    lengths: list[int] = []
    for number in range(draw(st.integers(1, bucket.rows))):
        length = draw(st.integers(1, bucket.longest))
        if not bucket.holds(np.array([*lengths, length])):
            continue
        lengths.append(length)
        uses = draw(st.sets(st.sampled_from(CLASSES)))
        ids = np.arange(1000 * (number + 1), 1000 * (number + 1) + length, dtype=np.int32)
        rows.append(Row.of_tokens(ids, np.zeros(length, np.int32), dict.fromkeys(uses, number + 1), number % 3))
    return bucket, rows


def tokens_seen(view: object, ids: np.ndarray, bucket: Bucket) -> dict[int, list[int]]:
    """slot -> token ids, in order, that a class's code sees with that slot."""
    seen: dict[int, list[int]] = {}
    if isinstance(view, RowView):
        for at, slot in enumerate(np.asarray(view.slots)):
            first = (int(view.first) + at) * bucket.longest
            seen.setdefault(int(slot), []).extend(ids[first : first + bucket.longest].tolist())
    elif isinstance(view, SegmentView):
        padded = np.append(ids, -1)
        for cells, slot in zip(np.asarray(view.tokens), np.asarray(view.slots), strict=True):
            seen.setdefault(int(slot), []).extend(t for t in padded[cells].tolist() if t >= 0)
    elif isinstance(view, HeavyView):
        runs = view.runs
        for k in range(int(runs.used)):
            assert 0 <= int(runs.starts[k]) <= len(ids) - view.size
            start = int(runs.starts[k] + runs.offsets[k])
            assert int(runs.offsets[k] + runs.lengths[k]) <= view.size
            seen.setdefault(int(runs.slots[k]), []).extend(ids[start : start + int(runs.lengths[k])].tolist())
    return seen


@settings(deadline=None, max_examples=200)
@given(batches(), st.booleans())
def test_every_class_meets_exactly_its_rows(made: tuple[Bucket, list[Row]], tight: bool) -> None:
    bucket, rows = made
    variant = make_variant(Layout(rows, bucket).needs) if tight else widest(CLASSES, heavy=True)
    assembled = assemble(rows, bucket, variant, INPUTS)
    ids = np.asarray(assembled.batch.ids)
    for key, view in zip(variant.classes(), assembled.views, strict=True):
        seen = tokens_seen(view, ids, bucket)
        for row in rows:
            if key in row.slots:
                found = [token for token in seen[row.slots[key]] if token != 0]
                assert found == row.ids.tolist()
        assert set(seen) - {0} == {row.slots[key] for row in rows if key in row.slots}
        if isinstance(view, SegmentView):
            cells, tokens = np.asarray(view.cells), np.asarray(view.tokens).reshape(-1)
            inside = np.flatnonzero(cells < tokens.size)
            assert (tokens[cells[inside]] == inside + int(view.first)).all()


@settings(deadline=None, max_examples=200)
@given(batches())
def test_attention_sees_each_query_alone_and_whole(made: tuple[Bucket, list[Row]]) -> None:
    bucket, rows = made
    assembled = assemble(rows, bucket, Variant(), INPUTS | {"ids": TokenInput(fill=7)})
    batch = assembled.batch
    ids, first = np.asarray(batch.ids), np.asarray(batch.rows.first_token)
    lengths = np.concatenate([np.asarray(group.lengths) for group in batch.groups])
    padded = np.append(ids, -1)
    views = [
        padded[np.asarray(g.tokens)] if g.tokens is not None else ids.reshape(bucket.rows, -1) for g in batch.groups
    ]
    flat = [row for view in views for row in view]
    for query, row in enumerate(rows):
        at = int(assembled.order[query])
        assert lengths[at] == row.length
        assert flat[at][: row.length].tolist() == row.ids.tolist()
        assert ids[first[at] : first[at] + row.length].tolist() == row.ids.tolist()
        assert np.asarray(batch.positions)[first[at] : first[at] + row.length].tolist() == list(range(row.length))
        assert int(np.asarray(batch.rows.pooling)[at]) == row.pooling
        if batch.cells is not None:
            cells = np.concatenate([view.reshape(-1) for view in views])
            span = np.asarray(batch.cells)[first[at] : first[at] + row.length]
            assert cells[span].tolist() == row.ids.tolist()
            assert (np.asarray(batch.row_of_token)[first[at] : first[at] + row.length] == at).all()


@settings(deadline=None)
@given(st.integers(1, 600), st.integers(0, 2000), st.integers(1, 64), st.floats(0, 1))
@example(129, 801, 5, 1.0)  # the bucket with the most tokens has no room for the longest row
def test_the_core_takes_any_single_query(max_length: int, more: int, rows: int, part: float) -> None:
    menu = bucket_menu(max_length, max_length + more, rows)
    light, heavy = widest(CLASSES, heavy=False), widest(CLASSES, heavy=True)
    core = core_programs(menu, light, heavy)
    assert len(core) <= 8
    assert {bucket for bucket, _ in core} <= set(menu)
    length = np.array([1 + round(part * (max_length - 1))])
    for variant in (light, heavy):
        assert any(bucket.holds(length) for bucket, own in core if own == variant)


@pytest.mark.parametrize(
    ("text", "bucket"),
    [
        ("8x32", Bucket(256, ((8, 32),))),
        ("1024:32x32+8x128", Bucket(1024, ((32, 32), (8, 128)))),
        (str(Bucket(96, ((5, 22), (2, 24)))), Bucket(96, ((5, 22), (2, 24)))),
    ],
)
def test_buckets_are_read_as_they_are_written(text: str, bucket: Bucket) -> None:
    assert parse_bucket(text) == bucket


@pytest.mark.parametrize("text", ["", "8", "8x", "0x8", "0:1x8", "8x32+8x16", "1x8+1x16+1x32+1x64", "-1x8", "1 x 8"])
def test_what_is_no_bucket(text: str) -> None:
    with pytest.raises(ValueError, match="bucket"):
        parse_bucket(text)


@pytest.mark.parametrize("bucket", [Bucket(96, ((6, 16), (2, 64))), Bucket(96, ((6, 16),))], ids=str)
def test_rows_of_one_heavy_task_are_one_mini_batch(bucket: Bucket) -> None:
    """PetS applies a delta once to all of a task's rows in a batch; other tasks' rows have runs of their own."""
    token = np.full(7, 9, np.int32)
    rows = [Row.of_tokens(token, np.zeros_like(token), {MASK: slot} if slot else {}, 0) for slot in (1, 2, 1, 0, 2, 1)]
    (view,) = assemble(rows, bucket, make_variant({MASK: FULL}, run=64), INPUTS).views
    assert isinstance(view, HeavyView)
    used = int(view.runs.used)
    assert view.runs.slots[:used].tolist() == [1, 2]
    room = 16 if bucket.rectangular else 7
    assert view.runs.lengths[:used].tolist() == [2 * room + 7, room + 7]
