"""Batching over the shapes that can run now, against brute force."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from shape_rule import holds

from jpets.scheduling.costs.shape import Shape
from jpets.scheduling.order.trigger import MARGIN, lazy_wait
from jpets.scheduling.policies.dynamic import split_by_cost
from jpets.scheduling.policies.ready import PUT_OFF, cheapest_split, well_filled

SHAPES = [
    Shape(16, ((1, 16),), 1.0, padded=True),
    Shape(64, ((4, 16),), 2.5, padded=True),
    Shape(64, ((6, 16), (1, 64)), 3.0),
    Shape(128, ((8, 16), (4, 32), (1, 128)), 5.0),
]


def cheapest(lengths: tuple[int, ...]) -> float:
    return min((shape.seconds for shape in SHAPES if holds(lengths, shape)), default=float("inf"))


lists = st.lists(st.integers(1, 128), min_size=1, max_size=9)


def best_split(lengths: list[int], most: int) -> float:
    """The least cost over all 2^(n-1) splits of the sorted queries into neighbours."""
    ordered, n = sorted(lengths), len(lengths)
    best = float("inf")
    for cuts in itertools.product([False, True], repeat=n - 1):
        edges = [0, *(i + 1 for i, cut in enumerate(cuts) if cut), n]
        parts = [tuple(ordered[a:b]) for a, b in itertools.pairwise(edges)]
        if all(len(part) <= most for part in parts):
            best = min(best, sum(map(cheapest, parts)))
    return best


@given(lists, st.integers(1, 9))
def test_cheapest_split_is_the_best_split(lengths: list[int], most: int) -> None:
    batches = cheapest_split(lengths, SHAPES, most)
    assert sorted(q for batch in batches for q in batch) == list(range(len(lengths)))
    assert all(len(batch) <= most for batch in batches)
    cost = sum(cheapest(tuple(lengths[q] for q in batch)) for batch in batches)
    assert cost == pytest.approx(best_split(lengths, most))


def test_the_papers_five_requests() -> None:
    """TurboTransformers section 5: with 20 + N L per batch, {17, 18}, {52, 63}, {77} costs 299."""
    lengths = np.array([17, 18, 52, 63, 77])
    costs = np.full((5, 5), np.inf)
    for i in range(5):
        for k in range(i + 1):
            costs[i, k] = 20 + (k + 1) * lengths[i]
    spans = split_by_cost(costs)
    assert spans == [(0, 2), (2, 4), (4, 5)]
    assert sum(costs[end - 1, end - 1 - first] for first, end in spans) == 299


def test_a_query_that_no_shape_holds_is_an_error() -> None:
    with pytest.raises(ValueError, match="longer than every shape"):
        cheapest_split([500], SHAPES, 8)


@settings(deadline=None)
@given(
    st.floats(0, 0.2),
    st.integers(1, 40),
    st.floats(0, 0.2),
    st.floats(0, 0.05),
    st.integers(1, 32),
    st.floats(0.01, 1),
    st.floats(-1, 1) | st.just(float("inf")),
)
def test_lazy_waits_no_longer_than_it_may(
    waited: float, waiting: int, predicted: float, timeout: float, size: int, target: float, left: float
) -> None:
    wait = lazy_wait(
        oldest_waited=waited,
        waiting=waiting,
        predicted=predicted,
        timeout=timeout,
        size=size,
        latency_target=target,
        left=left,
    )
    assert wait >= 0
    if waiting >= size or waited >= timeout or waited + predicted > target / 2 or left <= predicted:
        assert wait == 0
    else:
        assert waited + wait <= timeout + 1e-9
        assert waited + wait + predicted <= target / 2 + 1e-9
        assert wait == 0 or wait + predicted < left


def test_lazy_waits_as_long_as_it_may() -> None:
    def wait(left: float) -> float:
        return lazy_wait(
            oldest_waited=0.0, waiting=1, predicted=0.1, timeout=2.0, size=8, latency_target=10.0, left=left
        )

    assert wait(left=float("inf")) == wait(left=60.0) == 2.0
    assert wait(left=1.0) == pytest.approx(1.0 - 0.1 - MARGIN)


@given(lists)
def test_what_is_put_off_saves_more_than_it_will_cost(lengths: list[int]) -> None:
    batch = next((list(range(n)) for n in range(len(lengths), 0, -1) if cheapest(tuple(lengths[:n])) < 99), [])
    if not batch:
        return
    kept = well_filled(batch, lengths, SHAPES, len(lengths))
    assert kept[0] == 0
    assert kept == sorted(set(kept))
    rate = min(shape.seconds / shape.tokens for shape in SHAPES)
    put_off = sum(lengths[q] for q in set(batch) - set(kept))
    saved = cheapest(tuple(lengths[: len(batch)])) - cheapest(tuple(lengths[q] for q in kept))
    assert saved > PUT_OFF * rate * put_off or kept == batch


def test_one_query_too_many_does_not_double_a_batch() -> None:
    shapes = [Shape(64, ((4, 16),), 2.5, padded=True), Shape(128, ((8, 16),), 5.0, padded=True)]
    assert well_filled([0, 1, 2, 3, 4], [10] * 5, shapes, 8) == [0, 1, 2, 3]
    assert well_filled(range(8), [10] * 8, shapes, 8) == list(range(8))
    assert well_filled([0, 1, 2, 3], [10] * 4, shapes, 8) == [0, 1, 2, 3]
