"""Policies over the shapes that can run now: against brute force, and against what the shapes hold."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from shape_rule import holds

from jpets.scheduling.costs import ready_lookup
from jpets.scheduling.costs.deltas import DeltaTables
from jpets.scheduling.costs.measured_profile import CostProfile, Grid, PackedPoint
from jpets.scheduling.costs.ready_lookup import FEWER, HOST_SECONDS, STEP, ReadyCosts, ReadyShapes
from jpets.scheduling.costs.shape import Shape, ShapeTable, reach, span_costs
from jpets.scheduling.policies.auto import POLICIES, auto
from jpets.scheduling.queue import BARE, Batch, Batches, Queue

LIGHT = (
    Shape(16, ((1, 16),), 1.0, padded=True),
    Shape(64, ((4, 16),), 2.5, padded=True),
    Shape(64, ((6, 16), (1, 64)), 3.0),
    Shape(128, ((8, 16), (4, 32), (1, 128)), 5.0),
)
HEAVY = tuple(Shape(s.tokens, s.groups, 1.5 * s.seconds, s.padded, run=32) for s in LIGHT)
LONG_RUNS = tuple(Shape(s.tokens, s.groups, 0.9 * s.seconds, s.padded, run=128) for s in LIGHT[2:])
LORA, MASK, DIFF = 0, 1, 2
KINDS = (("lora",), ("mask",), ("diff",))
ROWS = np.array([1, 128])


def grid(base: float, token: float) -> Grid:
    return Grid(ROWS, ROWS, base + token * ROWS[:, None] * ROWS[None].astype(float))


PROFILE = CostProfile(
    grid(1.0, 0.01),
    (PackedPoint(64, ((4, 16),), 2.5),),
    {"lora": grid(0.0, 1e-3), "mask": grid(0.4, 0.004), "diff": grid(0.1, 0.002)},
    frozenset({"mask", "diff"}),
)
TABLES = DeltaTables(PROFILE, KINDS, rows=13, longest=128, tokens=128)
COSTS = ReadyCosts(ReadyShapes(LIGHT, HEAVY, {MASK: LONG_RUNS}), TABLES, 13)


@st.composite
def queues(draw: st.DrawFn, most: int = 10) -> Queue:
    tasks = draw(st.lists(st.integers(-1, 5), min_size=1, max_size=most))
    lengths = draw(st.lists(st.integers(1, 128), min_size=len(tasks), max_size=len(tasks)))
    return Queue.of(lengths, tasks, [BARE if task == BARE else task % len(KINDS) for task in tasks])


def seconds(queue: Queue, batch: Sequence[int]) -> float:
    """The cheapest shape that may run a batch, and its heavy deltas."""
    kinds = {int(queue.kinds[q]) for q in batch}
    shapes = [*(LIGHT if kinds <= {BARE, LORA} else HEAVY), *(LONG_RUNS if kinds == {MASK} else ())]
    lengths = [int(queue.lengths[q]) for q in batch]

    def added(shape: Shape) -> float:
        total = 0.0
        for task in {int(queue.tasks[q]) for q in batch}:
            own = [q for q in batch if queue.tasks[q] == task]
            tokens, kind = sum(int(queue.lengths[q]) for q in own), int(queue.kinds[own[0]])
            if kind in (MASK, DIFF):
                work = {run: -(-tokens // run) * (50 + run) for run in (32, 64, 128)}
                total += float(TABLES.packed[kind, tokens]) * work[shape.run] / min(work.values())
        return total

    return min((s.seconds + added(s) for s in shapes if holds(lengths, s)), default=float("inf"))


def whole_time(queue: Queue, plan: Sequence[Sequence[int]]) -> float:
    """With what each batch counts besides: hardly more than its part of the host, or of a full one's time."""
    rate = min(shape.seconds / shape.tokens for shape in LIGHT)
    full = min(max(shape.seconds for shape in LIGHT), int(queue.lengths.sum()) * rate)
    return sum(seconds(queue, batch) + max(HOST_SECONDS, FEWER * full) for batch in plan)


def check_plan(queue: Queue, plan: Batches) -> None:
    assert sorted(q for batch in plan for q in batch.queries.tolist()) == list(range(len(queue)))
    for batch in plan:
        shape = Shape(batch.tokens, batch.groups, 0.0, batch.padded)
        assert holds(queue.lengths[batch.queries].tolist(), shape)
        assert len(batch.queries) <= COSTS.limits.rows


@given(st.lists(st.integers(1, 130), min_size=1, max_size=20), st.integers(1, 15), st.sampled_from(LIGHT))
def test_reach_is_the_longest_span(lengths: list[int], most: int, shape: Shape) -> None:
    for first, end in enumerate(reach(np.array(lengths), shape, most).tolist()):
        assert end - first <= most
        assert end == first or holds(lengths[first:end], shape)
        if end < len(lengths) and end - first < most:
            assert not holds(lengths[first : end + 1], shape)


@given(st.lists(st.lists(st.integers(1, 128), min_size=1, max_size=4), min_size=1, max_size=6), st.integers(1, 13))
def test_span_costs_of_mini_batches(parts: list[list[int]], most: int) -> None:
    costs = span_costs([np.array(part) for part in parts], LIGHT, most)
    for i, k in itertools.product(range(costs.shape[0]), range(costs.shape[1])):
        joined = [length for part in parts[max(0, i - k) : i + 1] for length in part]
        fitting = [s.seconds for s in LIGHT if holds(joined, s)] if k <= i and len(joined) <= most else []
        assert costs[i, k] == min(fitting, default=float("inf"))


@given(queues(), st.sampled_from([*POLICIES, "auto"]))
def test_every_policy_plans_over_ready_shapes(queue: Queue, name: str) -> None:
    plan = auto(queue, COSTS).plan if name == "auto" else POLICIES[name](queue, COSTS)
    check_plan(queue, plan)
    assert COSTS.total(queue, plan) == pytest.approx(whole_time(queue, [b.queries.tolist() for b in plan]))


def test_what_fits_alone_is_told() -> None:
    assert COSTS.alone[1, 8] and not COSTS.alone[1:, -1].all()


@given(queues(most=6))
def test_alone_says_what_always_fits(queue: Queue) -> None:
    longest = int(queue.lengths.max())
    if len(queue) <= COSTS.limits.rows and COSTS.alone[len(queue), longest]:
        assert any(holds(queue.lengths.tolist(), shape) for shape in HEAVY)


@given(st.lists(st.integers(1, 128), min_size=1, max_size=20))
def test_capacities_are_those_of_the_lengths(lengths: list[int]) -> None:
    ordered = np.array(sorted(lengths))
    table = ShapeTable(LIGHT)
    for shape, capacity in zip(table.shapes, table.capacities(ordered), strict=True):
        assert (capacity == 0) == (shape.longest < ordered[-1])
        if holds(lengths, shape):
            assert capacity == pytest.approx(len(lengths))
        elif capacity:
            assert capacity < len(lengths) + 1e-9 or not shape.padded


@given(queues(most=7))
def test_packed_is_near_the_plans_of_single_queries_and_of_one_batch(queue: Queue) -> None:
    """Only some shapes are tried, in steps of ``STEP``."""
    plan = POLICIES["packed"](queue, COSTS)
    alone = whole_time(queue, [[q] for q in range(len(queue))])
    together = whole_time(queue, [range(len(queue))])
    assert COSTS.total(queue, plan) <= STEP * min(alone, together) + 1e-9


@given(queues(most=5), st.floats(0.0, 8.0))
def test_one_batch_is_kept_where_no_plan_saves_what_planning_takes(queue: Queue, planning: float) -> None:
    with mock.patch.object(ready_lookup, "PACKING_SECONDS", (planning, 0.0)):
        whole = COSTS.whole(queue)
    if whole is not None:
        check_plan(queue, [whole])
        best = min(whole_time(queue, plan) for plan in partitions(range(len(queue))))
        assert COSTS.total(queue, [whole]) <= best + planning + 1e-9


def test_one_full_batch_is_kept() -> None:
    queue = Queue.of([16] * 4)
    with mock.patch.object(ready_lookup, "PACKING_SECONDS", (0.01, 0.0)):
        assert COSTS.whole(queue) is not None
        assert COSTS.whole(Queue.of([16] * 5)) is None


def partitions(queries: Sequence[int]) -> Iterator[list[list[int]]]:
    """Every way to divide queries among batches."""
    if not queries:
        yield []
        return
    first, *rest = queries
    for plan in partitions(rest):
        yield [[first], *plan]
        for at in range(len(plan)):
            yield [*plan[:at], [first, *plan[at]], *plan[at + 1 :]]


def test_light_rows_stay_out_of_heavy_batches() -> None:
    queue = Queue.of([16] * 8, [0, 1, 3, 4, 0, 1, 3, 4], [LORA, MASK, LORA, MASK] * 2)
    plan = auto(queue, COSTS).plan
    assert all(len({int(queue.kinds[q]) for q in batch.queries}) == 1 for batch in plan)


def test_one_heavy_task_gets_long_runs() -> None:
    queue = Queue.of([16] * 6, [1] * 6, [MASK] * 6)
    (batch,) = auto(queue, COSTS).plan
    own = min(COSTS.shapes_for(queue, batch.queries), key=lambda s: s.seconds if s.tokens == batch.tokens else 99.0)
    assert own.run == 128


def test_what_no_shape_holds() -> None:
    for name in (*POLICIES, "auto"):
        with pytest.raises(ValueError, match="longer than every shape"):
            auto(Queue.of([129]), COSTS) if name == "auto" else POLICIES[name](Queue.of([129]), COSTS)
    assert auto(Queue.of([]), COSTS).plan == []


def test_a_batch_knows_its_time() -> None:
    queue = Queue.of([16, 16], [BARE, 1], [BARE, MASK])
    assert COSTS.seconds(queue, Batch(np.arange(2), 64, ((4, 16),))) == pytest.approx(3.75 + TABLES.packed[MASK, 16])
