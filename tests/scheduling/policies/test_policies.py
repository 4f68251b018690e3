"""The policies over a cost profile: against brute force, and against the shapes that have to hold their batches."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jpets.engine.batch.bucket import Bucket
from jpets.scheduling.costs.measured_profile import CostProfile, Grid, PackedPoint
from jpets.scheduling.costs.policy_lookup import Costs, Limits
from jpets.scheduling.policies.auto import POLICIES, auto
from jpets.scheduling.policies.offline import (
    TURBO_ROWS,
    alpha,
    beta,
    coordinated,
    fixed,
    length_buffer,
    mini_batches,
    turbo,
)
from jpets.scheduling.policies.packed import TOKEN_STEP, packed
from jpets.scheduling.queue import BARE, Batch, Batches, Queue

ROWS, LENGTHS = np.array([1, 2, 4, 8, 16, 32, 64, 128]), np.array([8, 16, 32, 64, 128, 256, 512])
KINDS = (("lora",), ("mask",))


def grid(base: float, row: float, token: float, cell: float = 0.0) -> Grid:
    n, length = ROWS[:, None].astype(float), LENGTHS[None].astype(float)
    return Grid(ROWS, LENGTHS, base + row * n + token * n * length + cell * n * length**2)


def profile(*, delta: float = 1.0) -> CostProfile:
    points = [PackedPoint(t, ((t // 16, 64),), 2e-3 + 1.05e-5 * t + 4e-9 * (t // 16) * 64**2) for t in (64, 512, 4096)]
    kinds = {"lora": grid(0.0, 0.0, 4e-7 * delta), "mask": grid(2e-3 * delta, 0.0, 2e-6 * delta)}
    return CostProfile(grid(2e-3, 0.0, 1e-5, 4e-9), tuple(points), kinds, frozenset({"mask"}), 0.2)


COSTS = Costs(profile(), Limits(rows=128, tokens=4096, longest=512), KINDS)
SMALL = Costs(profile(), Limits(rows=4, tokens=256, longest=64), KINDS, length_step=1)


@st.composite
def queues(draw: st.DrawFn, most: int = 10, longest: int = 64) -> Queue:
    tasks = draw(st.lists(st.integers(-1, 3), min_size=1, max_size=most))
    lengths = draw(st.lists(st.integers(1, longest), min_size=len(tasks), max_size=len(tasks)))
    kinds = [BARE if task == BARE else task % len(KINDS) for task in tasks]
    return Queue.of(lengths, tasks, kinds)


def splits(items: Sequence[int]) -> Iterator[list[tuple[int, ...]]]:
    """Every split of a sequence into contiguous parts."""
    for cuts in itertools.product([False, True], repeat=len(items) - 1):
        edges = [0, *(i + 1 for i, cut in enumerate(cuts) if cut), len(items)]
        yield [tuple(items[a:b]) for a, b in itertools.pairwise(edges)]


def shared_cost(queue: Queue, costs: Costs, parts: Sequence[Sequence[int]]) -> float:
    """Equation 3's first sum, padded; infinite where a part has no shape."""
    total = 0.0
    for part in parts:
        if len(part) > costs.limits.rows:
            return float("inf")
        total += costs.alpha[len(part), max(queue.lengths[q] for q in part)]
    return total


def delta_cost(queue: Queue, costs: Costs, parts: Sequence[Sequence[int]]) -> float:
    total = 0.0
    for part in parts:
        longest = max(queue.lengths[q] for q in part)
        if len(part) > costs.limits.rows or not np.isfinite(costs.alpha[len(part), longest]):
            return float("inf")
        total += costs.beta[queue.kinds[part[0]], len(part), longest]
    return total


def by_length(queue: Queue, queries: Sequence[int]) -> list[int]:
    return sorted(queries, key=lambda q: (queue.lengths[q], q))


def parts_of(plan: Batches) -> list[list[int]]:
    return [batch.queries.tolist() for batch in plan]


def check_plan(queue: Queue, costs: Costs, plan: Batches) -> None:
    """Every query once, in a shape that holds it and is within the limits."""
    assert sorted(q for part in parts_of(plan) for q in part) == list(range(len(queue)))
    for batch in plan:
        bucket = Bucket(batch.tokens, batch.groups)
        assert bucket.holds(queue.lengths[batch.queries])
        assert len(batch.queries) <= costs.limits.rows
        assert batch.tokens <= max(costs.limits.tokens, -(-costs.limits.longest // 64) * 64) or len(batch.queries) == 1


@given(queues(), st.integers(1, 5))
def test_alpha_is_the_best_split(queue: Queue, most: int) -> None:
    plan = alpha(queue, SMALL, most)
    check_plan(queue, SMALL, plan)
    best = min(
        shared_cost(queue, SMALL, parts) if max(map(len, parts)) <= most else float("inf")
        for parts in splits(by_length(queue, range(len(queue))))
    )
    assert shared_cost(queue, SMALL, parts_of(plan)) == pytest.approx(best)


@given(queues())
def test_mini_batches_are_the_best_split_of_each_task(queue: Queue) -> None:
    minis = [each.tolist() for each in mini_batches(queue, SMALL)]
    assert sorted(q for each in minis for q in each) == list(range(len(queue)))
    for task in set(queue.tasks.tolist()):
        own = [each for each in minis if queue.tasks[each[0]] == task]
        members = [q for q in range(len(queue)) if queue.tasks[q] == task]
        assert sorted(q for each in own for q in each) == members
        best = min(delta_cost(queue, SMALL, parts) for parts in splits(by_length(queue, members)))
        assert delta_cost(queue, SMALL, own) == pytest.approx(best)


@given(queues())
def test_coordinated_is_the_best_split_of_the_mini_batches(queue: Queue) -> None:
    minis = sorted((each.tolist() for each in mini_batches(queue, SMALL)), key=lambda m: max(queue.lengths[m]))
    plan = coordinated(queue, SMALL)
    check_plan(queue, SMALL, plan)
    joined = [[[q for i in part for q in minis[i]] for part in parts] for parts in splits(range(len(minis)))]
    best = min(shared_cost(queue, SMALL, parts) for parts in joined)
    assert shared_cost(queue, SMALL, parts_of(plan)) == pytest.approx(best)
    whole = {tuple(sorted(part)) for part in parts_of(plan)}
    assert all(any(set(mini) <= set(part) for part in whole) for mini in minis)


@given(queues())
def test_beta_runs_its_mini_batches_alone(queue: Queue) -> None:
    plan = beta(queue, SMALL)
    check_plan(queue, SMALL, plan)
    assert sorted(map(sorted, parts_of(plan))) == sorted(sorted(each.tolist()) for each in mini_batches(queue, SMALL))


def test_one_query_a_task_makes_coordinated_alpha_and_beta_single() -> None:
    queue = Queue.of([9, 30, 12, 31, 60, 8], [0, 1, 2, 3, 4, 5], [0, 1, 0, 1, 0, 1])
    assert sorted(map(sorted, parts_of(coordinated(queue, SMALL)))) == sorted(
        map(sorted, parts_of(alpha(queue, SMALL)))
    )
    assert all(len(batch.queries) == 1 for batch in beta(queue, SMALL))


def test_without_delta_costs_a_task_is_one_mini_batch() -> None:
    """A strict comparison keeps the first of equal splits, the largest last mini-batch (Algorithm 1, line 11)."""
    free = Costs(profile(delta=0.0), Limits(rows=8, tokens=512, longest=64), KINDS)
    queue = Queue.of([9, 30, 12, 5], [0, 0, 0, 1], [0, 0, 0, 1])
    assert sorted(map(len, mini_batches(queue, free))) == [1, 3]


@given(queues(most=40), st.integers(1, 9))
def test_fixed_and_length_buffer_keep_the_order(queue: Queue, size: int) -> None:
    plan = fixed(queue, COSTS, size)
    check_plan(queue, COSTS, plan)
    assert [q for part in parts_of(plan) for q in part] == list(range(len(queue)))
    assert all(len(part) == size for part in parts_of(plan)[:-1])
    buffered = length_buffer(queue, COSTS, size)
    check_plan(queue, COSTS, buffered)
    for part in parts_of(buffered):
        assert part == sorted(part) and len(part) <= size
        assert len({-(-int(queue.lengths[q]) // 8) for q in part}) == 1
    assert [part[0] for part in parts_of(buffered)] == sorted(part[0] for part in parts_of(buffered))


@given(queues(most=60))
def test_turbo_is_alpha_with_twenty_rows(queue: Queue) -> None:
    plan = turbo(queue, COSTS)
    check_plan(queue, COSTS, plan)
    assert all(len(part) <= TURBO_ROWS for part in parts_of(plan))
    assert parts_of(plan) == parts_of(alpha(queue, COSTS, TURBO_ROWS))


@given(queues(most=60, longest=500))
def test_packed_batches_are_full(queue: Queue) -> None:
    plan = packed(queue, COSTS)
    check_plan(queue, COSTS, plan)
    for batch in plan:
        assert len(batch.groups) <= 3
        assert batch.tokens - queue.lengths[batch.queries].sum() < TOKEN_STEP


@pytest.mark.parametrize("std", [1, 8])
def test_packed_pads_less_than_six_percent_of_a_full_queue(std: int) -> None:
    queue = gaussian(1024, std)
    plan = packed(queue, COSTS)
    computed = sum(batch.tokens for batch in plan)
    assert computed <= 1.06 * queue.lengths.sum()


def test_packed_applies_heavy_deltas_task_by_task() -> None:
    """Where a mask's cost is mostly that of a task's presence, its queries must not be strewn over the batches."""
    queue = gaussian(1024, 8)
    plan = packed(queue, COSTS)
    places = [(task, b) for b, part in enumerate(parts_of(plan)) for task in {int(queue.tasks[q]) for q in part}]
    heavy = [pair for pair in places if pair[0] % len(KINDS) == KINDS.index(("mask",))]
    tasks = {task for task, _ in heavy}
    assert len(heavy) <= len(tasks) + len(plan)


def gaussian(count: int, std: float, tasks: int = 32) -> Queue:
    rng = np.random.default_rng(3)
    task = rng.integers(0, tasks, count)
    return Queue.of(np.clip(np.rint(rng.normal(32, std, count)), 1, 512).astype(int), task, task % len(KINDS))


@given(queues(most=60, longest=500))
def test_auto_predicts_no_worse_than_any_policy(queue: Queue) -> None:
    chosen = auto(queue, COSTS)
    check_plan(queue, COSTS, chosen.plan)
    least = min(COSTS.total(queue, policy(queue, COSTS)) for policy in POLICIES.values())
    assert COSTS.total(queue, chosen.plan) <= least * (1 + 1e-9)


def test_predicted_seconds_are_equation_three() -> None:
    queue = Queue.of([10, 20, 30, 12], [0, 0, 1, BARE], [0, 0, 1, BARE])
    plan = fixed(queue, COSTS, 4)
    (batch,) = plan
    shared = 2e-3 + 1e-5 * 4 * 32 + 4e-9 * 4 * 32**2
    deltas = COSTS.beta[0, 2, 20] + COSTS.beta[1, 1, 30]
    assert batch.groups == ((4, 32),)
    assert COSTS.total(queue, plan) == pytest.approx(shared * 1.2 + deltas, rel=1e-6)


def test_packed_rows_of_a_task_are_not_padded_to_its_longest() -> None:
    queue = Queue.of([3, 60, 30, 12], [0, 0, 1, BARE], [0, 0, 1, BARE])
    plan = [Batch(np.arange(4), 128, ((3, 32), (1, 64)))]
    deltas = COSTS.beta[0, 1, 63] + COSTS.beta[1, 1, 30]
    assert COSTS.total(queue, plan) == pytest.approx(COSTS.shared(plan)[0] * 1.2 + deltas, rel=1e-6)


@pytest.mark.parametrize("name", [*POLICIES, "auto"])
def test_nothing_waiting_and_too_long(name: str) -> None:
    def run(queue: Queue) -> Batches:
        return auto(queue, COSTS).plan if name == "auto" else POLICIES[name](queue, COSTS)

    assert run(Queue.of([])) == []
    with pytest.raises(ValueError, match="longer than every shape"):
        run(Queue.of([513]))


def test_limits_below_the_longest_query() -> None:
    with pytest.raises(ValueError, match="at least one query of 512"):
        Limits(rows=8, tokens=256, longest=512)


def test_a_hundred_thousand_queries() -> None:
    """Bounded by memory and time that grow with the queue, not with its square."""
    queue = gaussian(100_000, 8)
    check_plan(queue, COSTS, packed(queue, COSTS))
    check_plan(queue, COSTS, alpha(queue, COSTS, 16))


def test_a_batch_of_one_kind_may_save_shared_products() -> None:
    saving = dataclasses.replace(profile(), replaced={"mask": 0.5})
    costs = Costs(saving, Limits(rows=128, tokens=4096, longest=512), KINDS)
    mask, lora = KINDS.index(("mask",)), KINDS.index(("lora",))
    alone, mixed = Queue.of([30, 30], [1, 3], [mask, mask]), Queue.of([30, 30], [1, 0], [mask, lora])
    shared = float(COSTS.alpha[2, 30])
    assert COSTS.total(alone, fixed(alone, COSTS, 2)) - costs.total(alone, fixed(alone, costs, 2)) == pytest.approx(
        0.5 * shared
    )
    assert costs.total(mixed, fixed(mixed, costs, 2)) == COSTS.total(mixed, fixed(mixed, COSTS, 2))
