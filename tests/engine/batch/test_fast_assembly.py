"""The layout and the buffers of a batch, against those that are made token by token."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from slow_assembly import SlowLayout, kind, slow_batch, slow_view

from jpets.deltas.protocol import ClassKey, Lead
from jpets.engine.batch.arguments import BatchArguments
from jpets.engine.batch.assembly import assemble, fill
from jpets.engine.batch.bucket import HEAVY_RUNS, Bucket, make_variant, widest
from jpets.engine.batch.layout import Layout
from jpets.engine.batch.row_table import RowTable
from jpets.engine.batch.rows import Row, TokenInput

CLASSES = [
    ClassKey("lora", (("query", 8),), (0,)),
    ClassKey("lora", (("query", 8),), (0,), ordinal=1),
    ClassKey("adapter", (("after_ffn_out", 16),), (0,), (("activation", "relu"), ("input", "output"))),
    ClassKey("ia3", (("key", 0),), (0,)),
    ClassKey("mask", (("query", 0),), (0,)),
    ClassKey("diff", (("query", 64),), (0,)),
    ClassKey("mask", (("value", 0),), (0,), ordinal=1),
    ClassKey("bitfit"),
    ClassKey("prefix", (("attention", 4),), (0,)),
]
HEADS = [
    ClassKey("head", (("dense", 0),), (), (("reads", "pooled"),)),
    ClassKey("head", (("dense", 1),), (), (("reads", "pooled"),)),
    ClassKey("head", (("dense", 0),), (), (("reads", "tokens"),)),
]
BUCKETS = [
    Bucket(64, ((8, 8),)),
    Bucket(200, ((10, 8), (6, 32), (2, 150))),
    Bucket(48, ((12, 16),)),
    Bucket(300, ((30, 40), (4, 100))),
    Bucket(400, ((10, 40),)),
    Bucket(1, ((1, 1),)),
]
INPUTS = {
    "ids": TokenInput(fill=7),
    "vectors": TokenInput(np.float32, (2,)),
    "marks": TokenInput(np.int32, (3,), fill=-1),
    "weights": TokenInput(np.float32, fill=0.5),
}


@st.composite
def batches(draw: st.DrawFn) -> tuple[Bucket, list[Row]]:
    """Rows of some tasks, a few of each, and of no task."""
    bucket = draw(st.sampled_from(BUCKETS))
    used = st.tuples(st.lists(st.sampled_from(CLASSES), unique=True, max_size=4), st.sampled_from([None, *HEADS]))
    tasks = draw(st.lists(used, min_size=1, max_size=6))
    slots = [{key: draw(st.integers(1, 3)) for key in (*own, head) if key is not None} for own, head in tasks]
    rows: list[Row] = []
    for number in range(draw(st.integers(1, bucket.rows))):
        length = draw(st.integers(1, bucket.longest))
        if not bucket.holds(np.array([*(row.length for row in rows), length])):
            continue
        rng, task = np.random.default_rng(number), draw(st.sampled_from(slots))
        inputs = {name: rng.integers(0, 99, (length, *own.shape)).astype(own.dtype) for name, own in INPUTS.items()}
        lead = Lead(draw(st.integers(0, length - 1)), draw(st.integers(0, 3)))
        places = draw(st.none() | st.just(rng.integers(0, 9, length).astype(np.int32)))
        # Half of the rows share the mapping with others of their task, as those of a resident task do.
        own = task if draw(st.booleans()) else dict(reversed(list(task.items())))
        row = Row(inputs, own, number % 3, length)
        rows.append(dataclasses.replace(row, lead=lead, places=places) if draw(st.booleans()) else row)
    return bucket, rows


@settings(deadline=None, max_examples=150)
@given(batches())
def test_a_layout_is_that_of_single_rows(made: tuple[Bucket, list[Row]]) -> None:
    bucket, rows = made
    table = RowTable(rows)
    for where in (bucket, Bucket(4096, ((64, 40), (64, 256)))):
        found, expected = Layout(table, where), SlowLayout(rows, where)
        for name in ("queries", "lengths", "leads", "starts"):
            assert getattr(found, name).tolist() == getattr(expected, name)
            assert getattr(found, name).dtype == np.int32
        assert found.needs == expected.needs and list(found.needs) == sorted(found.needs)
        assert found.run_work == expected.run_work
        for key in (*CLASSES, *HEADS):
            places, slots = found.members(key)
            assert dict(zip(places.tolist(), slots.tolist(), strict=True)) == expected.slots.get(key, {})
            if kind(key) == "heavy":
                for run in map(where.run, HEAVY_RUNS):
                    spans = [part.tolist() for part in found.spans(key, run)]
                    assert list(zip(*spans, strict=True)) == expected.spans(key, run)


@settings(deadline=None, max_examples=150)
@given(batches(), st.booleans(), st.sampled_from(HEAVY_RUNS))
def test_every_array_is_as_it_is_made_token_by_token(made: tuple[Bucket, list[Row]], tight: bool, run: int) -> None:
    bucket, rows = made
    layout = SlowLayout(rows, bucket)
    variant = make_variant(layout.needs, run) if tight else widest([*CLASSES, *HEADS], heavy=True)
    found = assemble(rows, bucket, variant, INPUTS)
    assert {str(buffer.dtype) for buffer in found.buffers} == {"int32", "float32"} and len(found.buffers) == 2
    expected, order = slow_batch(layout, rows, INPUTS)
    assert found.order.tolist() == order
    batch: Any = found.batch
    leaves = {**batch.inputs, "positions": batch.positions, **batch.rows._asdict()}
    np.testing.assert_array_equal(np.concatenate([group.lengths for group in batch.groups]), expected["lengths"])
    if bucket.rectangular:
        assert batch.cells is batch.row_of_token is batch.groups[0].tokens is None
    else:
        leaves |= {"cells": batch.cells, "row_of_token": batch.row_of_token}
        for group, tokens in zip(batch.groups, expected["tokens"], strict=True):
            np.testing.assert_array_equal(group.tokens, tokens)
    for name, leaf in leaves.items():
        np.testing.assert_array_equal(leaf, expected[name], err_msg=name)
    for leaf in jax.tree.leaves((found.batch, found.views)):
        assert any(np.shares_memory(leaf, buffer) for buffer in found.buffers)

    row_at, head = [order[q] for q in layout.queries], -1
    cells: dict[int, tuple[int, list[tuple[int, int]]]] = {}
    for key, view in zip(variant.classes(), found.views, strict=True):
        own = slow_view(layout, key, variant, row_at)
        where: Any = getattr(view, "runs", view)
        head += kind(key) == "head"
        if kind(key) == "head":
            cells |= {layout.queries[at]: (head, places) for at, places in own["heads"].items()}
        for name in own.keys() - {"heads"}:
            np.testing.assert_array_equal(getattr(where, name), own[name], err_msg=f"{key} {name}")
    assert len(found.heads) == len(rows)
    for query in range(len(rows)):
        place = found.heads[query]
        assert (place is not None) == (query in cells)
        if place is not None:
            width = max(bucket.longest, bucket.segment)
            numbered = np.arange(999 * width).reshape(999, width)
            number, expected_cells = cells[query]
            assert place.head == number
            assert numbered[place.cells].tolist() == [row * width + column for row, column in expected_cells]


@pytest.mark.parametrize("bucket", BUCKETS[:2], ids=str)
def test_a_program_cuts_out_what_the_host_wrote(bucket: Bucket) -> None:
    rng, slots = np.random.default_rng(0), {key: at for at, key in enumerate([*CLASSES, HEADS[2]], 1)}
    inputs = {name: rng.integers(0, 99, (5, *own.shape)).astype(own.dtype) for name, own in INPUTS.items()}
    variant = widest([*CLASSES, *HEADS], heavy=True)
    found = assemble([Row(inputs, own, 2, 5) for own in (slots, {})], bucket, variant, INPUTS)
    inside: Any = jax.jit(BatchArguments(bucket, variant, INPUTS).unpacked)(found.buffers)
    jax.tree.map(np.testing.assert_array_equal, (inside.batch, inside.views), (found.batch, found.views))


def test_a_batch_keeps_its_numbers_when_the_next_one_is_made() -> None:
    """Programs may read a batch where the host wrote it, and as late as when the next batches are made."""
    ids, bucket = np.arange(6, dtype=np.int32), Bucket(16, ((2, 8),))
    arguments = BatchArguments(bucket, widest(CLASSES, heavy=True), {"ids": TokenInput()})
    made = []
    for number in range(3):
        rows = [Row({"ids": ids + number}, {CLASSES[0]: number + 1}, 0, 6)]
        made.append(fill(Layout(rows, bucket), rows, arguments))
    assert [int(own.batch.ids[0]) for own in made] == [0, 1, 2]
    assert not any(np.shares_memory(a, b) for a, b in itertools.combinations([own.buffers[0] for own in made], 2))
