"""Any mixture of methods in one batch: each row's answer is right, and independent of the other rows."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np
import pytest
from support import Bench, dense_answer, method_tasks, row_answer, shallow

from jpets.deltas import METHODS
from jpets.deltas.operators import usual_operators
from jpets.engine.batch.bucket import Bucket, Variant, make_variant, widest
from jpets.engine.batch.layout import Layout, all_replaced
from jpets.engine.batch.rows import Row
from jpets.engine.planning.needs import Needs
from jpets.engine.programs.delta_order import ORDERED, Execution
from jpets.types import Task

RECTANGLE = Bucket(16 * 16, ((16, 16),))
PACKED = Bucket(256, ((14, 16), (6, 32), (2, 128)))


WITHOUT_LOOPS = Execution(operators=usual_operators("gpu"))
"""As programs for a GPU are."""


@functools.cache
def bench(name: str, dtype: str = "float32", execution: Execution = ORDERED) -> Bench:
    """One for all tests: its programs take long to compile."""
    return Bench(shallow(name), method_tasks(shallow(name)), dtype, execution)


def lengths_for(bucket: Bucket, rng: np.random.Generator) -> list[int]:
    if bucket.rectangular:
        return [int(n) for n in rng.integers(3, 17, 14)]
    return [*(int(n) for n in rng.integers(3, 17, 8)), 30, 25, 70, 20]


def draw_ids(rng: np.random.Generator, length: int) -> np.ndarray:
    return rng.integers(5, 800, length)


@pytest.mark.parametrize(
    ("name", "bucket", "tight"),
    [
        ("tiny-bert", RECTANGLE, False),
        ("tiny-bert", RECTANGLE, True),
        ("tiny-bert", PACKED, True),
        ("tiny-distilbert", PACKED, False),
    ],
    ids=str,
)
def test_every_row_agrees_with_dense_computation(name: str, bucket: Bucket, tight: bool) -> None:
    own, rng = bench(name), np.random.default_rng(3)
    tasks = [*own.tasks, None]
    lengths = lengths_for(bucket, rng)
    chosen = [tasks[i % len(tasks)] for i in range(len(lengths))]
    rows = [own.row(task, draw_ids(rng, n)) for task, n in zip(chosen, lengths, strict=True)]
    variant = make_variant(Layout(rows, bucket).needs, run=128) if tight else widest(list(own.banks), heavy=True)
    compare_with_dense(own, chosen, rows, bucket, variant)


def test_no_more_runs_are_computed_than_a_batch_needs() -> None:
    own, rng = bench("tiny-bert", execution=WITHOUT_LOOPS), np.random.default_rng(3)
    chosen = ["mask", "diff", None, "mask", "onebit", None, "masked-lora", None, "diff"]
    rows = [own.row(task, draw_ids(rng, n)) for task, n in zip(chosen, lengths_for(PACKED, rng), strict=False)]
    needs = Needs(rows)
    variant, full = (needs.variant(PACKED, static_runs=static) for static in (True, False))
    rooms = {key.method: PACKED.run_room(variant.run, variant.level(key)) for key, _ in variant.runs}
    assert (rooms, PACKED.most_runs(variant.run)) == ({"mask": 4, "diff": 4, "onebit": 4}, 28)
    assert not full.runs and full.covers(Layout(rows, PACKED).needs)
    assert not variant.covers(Layout(rows, PACKED).needs)
    compare_with_dense(own, chosen, rows, PACKED, variant)


@pytest.mark.parametrize("bucket", [RECTANGLE, PACKED], ids=str)
def test_masked_rows_alone_need_no_shared_product(bucket: Bucket) -> None:
    own, rng = bench("tiny-bert"), np.random.default_rng(6)
    rows = [own.row("mask", draw_ids(rng, n)) for n in lengths_for(bucket, rng)]
    variant = make_variant(Layout(rows, bucket).needs, replaced=True)
    compare_with_dense(own, ["mask"] * len(rows), rows, bucket, variant)
    assert all_replaced(rows) and not variant.covers({})
    with pytest.raises(AssertionError, match="shared products"):
        own.run([*rows[:3], own.row(None, rows[0].ids)], bucket, variant)


def compare_with_dense(
    own: Bench, chosen: Sequence[str | None], rows: Sequence[Row], bucket: Bucket, variant: Variant
) -> None:
    assembled, outputs = own.run(rows, bucket, variant)
    for query, (name_of, row) in enumerate(zip(chosen, rows, strict=True)):
        task = own.tasks[name_of] if name_of else None
        expected = dense_answer(own.backbone, task, row.ids[row.lead.tokens :])
        found = row_answer(assembled, outputs, query, task.head.outputs if task else 0)
        assert bool(found["finite"])
        assert ("logits" in found) == ("logits" in expected) == (task is not None)
        for what in expected.keys() & found.keys():
            if what == "pooled" and task is not None:
                continue  # with a head, the pooled vector is not an answer
            np.testing.assert_allclose(found[what].reshape(-1), expected[what].reshape(-1), atol=1e-4)


@pytest.mark.parametrize(
    ("bucket", "dtype", "execution"),
    [
        *((bucket, dtype, ORDERED) for bucket in (RECTANGLE, PACKED) for dtype in ("float32", "bfloat16")),
        (RECTANGLE, "float32", WITHOUT_LOOPS),
        (PACKED, "bfloat16", WITHOUT_LOOPS),
    ],
    ids=str,
)
def test_a_row_keeps_its_bits_among_other_companions_and_at_other_places(
    bucket: Bucket, dtype: str, execution: Execution
) -> None:
    """Of every method: five tasks at a time, each beside others of all kinds."""
    own, rng = bench("tiny-bert", dtype, execution), np.random.default_rng(4)
    variant = widest(list(own.banks), heavy=True)
    tasks = [*own.tasks, None]
    for first in range(0, len(tasks), 5):
        probed = tasks[first : first + 5]
        probes = [own.row(task, draw_ids(rng, 4 + i)) for i, task in enumerate(probed)]
        seen: list[list[dict[str, np.ndarray]]] = []
        for trial in range(4):
            companions = [
                own.row(tasks[int(rng.integers(len(tasks)))], draw_ids(rng, int(rng.integers(3, 12)))) for _ in range(6)
            ]
            rows = [*probes, *companions[: 6 - trial]]
            places = rng.permutation(len(rows))
            assembled, outputs = own.run([rows[at] for at in places], bucket, variant)
            answers = []
            for probe, task in enumerate(probed):
                labels = own.tasks[task].head.outputs if task else 0
                answers.append(row_answer(assembled, outputs, int(np.flatnonzero(places == probe)[0]), labels))
            seen.append(answers)
        for other in seen[1:]:
            for task, mine, theirs in zip(probed, seen[0], other, strict=True):
                for what in mine:
                    assert mine[what].tobytes() == theirs[what].tobytes(), (task, what)


@pytest.mark.parametrize("bucket", [RECTANGLE, PACKED], ids=str)
def test_16_bit_forms_for_a_gpu_answer_as_those_for_a_cpu(bucket: Bucket) -> None:
    rng = np.random.default_rng(8)
    lengths, seen = lengths_for(bucket, rng), []
    ids = [draw_ids(rng, n) for n in lengths]
    for execution in (ORDERED, WITHOUT_LOOPS):
        own = bench("tiny-bert", "bfloat16", execution)
        tasks = [*own.tasks, None]
        rows = [own.row(tasks[i % len(tasks)], each) for i, each in enumerate(ids)]
        assembled, outputs = own.run(rows, bucket, make_variant(Layout(rows, bucket).needs))
        seen.append([row_answer(assembled, outputs, query, 8)["pooled"] for query in range(len(rows))])
    expected, found = (np.stack([np.asarray(each, np.float32).ravel() for each in own]) for own in seen)
    errors = np.sqrt(np.square(found - expected).mean(1) / np.square(expected).mean(1))
    assert 0 < errors.max() < 3e-2


@pytest.mark.parametrize(
    ("bucket", "execution"), [(RECTANGLE, ORDERED), (PACKED, ORDERED), (RECTANGLE, WITHOUT_LOOPS)], ids=repr
)
def test_a_task_of_nan_changes_no_bit_of_the_others(bucket: Bucket, execution: Execution) -> None:
    """For each method in turn, its task's numbers become NaN in the bank, where no validation sees them."""
    own, rng = bench("tiny-bert", execution=execution), np.random.default_rng(5)
    variant = widest(list(own.banks), heavy=True)
    names = [*own.tasks, None]
    rows = [own.row(task, draw_ids(rng, int(rng.integers(3, 15)))) for task in names]
    assembled, outputs = own.run(rows, bucket, variant)
    healthy = [row_answer(assembled, outputs, query, 8) for query in range(len(rows))]
    for sick, task in enumerate(list(own.tasks.values())[: len(METHODS)]):
        own.write(poisoned(task))
        assembled, outputs = own.run(rows, bucket, variant)
        own.write(task)
        answers = [row_answer(assembled, outputs, query, 8) for query in range(len(rows))]
        for query in range(len(rows)):
            same = all(healthy[query][what].tobytes() == answers[query][what].tobytes() for what in healthy[query])
            assert same == (query != sick), (task.id, query)
        labels = task.head.outputs
        assert not (answers[sick]["finite"] and np.isfinite(answers[sick]["logits"][:, :labels]).all())


def poisoned(task: Task) -> Task:
    """NaN in every float of the deltas; a mask has none, so its head takes them."""
    floats = [array for delta in task.deltas for array in delta.tensors.values() if array.dtype == np.float32]
    if not floats:
        head = dataclasses.replace(
            task.head, tensors={n: np.full_like(a, np.nan) for n, a in task.head.tensors.items()}
        )
        return dataclasses.replace(task, head=head)
    deltas = tuple(
        dataclasses.replace(
            delta,
            tensors={n: np.full_like(a, np.nan) if a.dtype == np.float32 else a for n, a in delta.tensors.items()},
        )
        for delta in task.deltas
    )
    return dataclasses.replace(task, deltas=deltas)
