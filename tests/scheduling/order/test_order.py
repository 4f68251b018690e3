"""Fair queueing between tenants, and the policy's batch with room made for parties that it passes over."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jpets.scheduling.costs.shape import Shape
from jpets.scheduling.order.fairness import fair_batch, fill
from jpets.scheduling.order.order import PATIENCE, due, interleave, starting_time
from jpets.scheduling.policies.ready import cheapest_split

SHAPES = [
    Shape(64, ((4, 16),), 1.0, padded=True),
    Shape(256, ((4, 64),), 2.0, padded=True),
    Shape(160, ((8, 16), (2, 64)), 2.5),
    Shape(512, ((4, 128),), 4.0, padded=True),
]
backlogs = st.lists(st.tuples(st.integers(0, 50), st.lists(st.integers(1, 40), max_size=6)), max_size=5)


def test_a_query_without_a_deadline_is_due_when_patience_ends() -> None:
    assert due(10.0, 12.5) == 12.5
    assert due(10.0, None) == 10.0 + PATIENCE
    later = 10.0 + PATIENCE + 1  # an endless stream of short deadlines passes it no longer
    assert due(10.0, None) < due(later, later + 0.01)


def test_idling_neither_saves_up_nor_forgives() -> None:
    assert starting_time(None, None) == 0
    assert starting_time(None, 70.0) == 70
    assert starting_time(20.0, 70.0) == 70
    assert starting_time(90.0, 70.0) == 90
    assert starting_time(90.0, None) == 90


@given(backlogs)
def test_interleaving_serves_the_least_served_first(drawn: list[tuple[int, list[int]]]) -> None:
    ordered = [(float(time), lengths) for time, lengths in sorted(drawn, key=lambda pair: pair[0])]
    named = [(time, [(who, n) for n in lengths]) for who, (time, lengths) in enumerate(ordered)]
    got = list(interleave(named, lambda query: query[1]))
    times, left, expected = [time for time, _ in ordered], [list(lengths) for _, lengths in ordered], []
    while any(left):
        who = min((w for w in range(len(left)) if left[w]), key=lambda w: times[w])
        expected.append((who, left[who][0]))
        times[who] += left[who].pop(0)
    assert got == expected


@pytest.mark.parametrize("step", [0.0, 1.0])
def test_interleaving_reads_no_further_than_it_must(step: float) -> None:
    read: list[int] = []

    def tenants() -> Iterator[tuple[float, list[int]]]:
        for number in range(1000):
            read.append(number)
            yield number * step, [number] * 100

    assert list(itertools.islice(interleave(tenants(), lambda _: 10), 3)) == [0, 1, 2]
    assert len(read) <= 5


@pytest.mark.parametrize(
    ("chosen", "batch"),
    [
        ([0, 2, 3, 5], [0, 1, 2, 3]),  # one too many of the heavy tenant, least urgent, makes room
        ([0, 1, 2, 3], [0, 1, 2, 3]),
    ],
)
def test_a_passed_over_tenant_takes_a_place(chosen: list[int], batch: list[int]) -> None:
    parties = ["heavy", "light", "heavy", "heavy", "heavy", "heavy"]
    lengths = [16, 5, 16, 16, 5, 16]
    assert sorted(fair_batch(chosen, parties, lengths, SHAPES, 4)) == batch


def test_a_free_place_displaces_nobody() -> None:
    parties = ["heavy", "light", "heavy"]
    assert sorted(fair_batch([0, 2], parties, [16, 5, 16], SHAPES, 4)) == [0, 1, 2]


def test_what_does_not_fit_the_batch_waits_for_its_own() -> None:
    parties = ["heavy", "light", "heavy", "light"]
    assert sorted(fair_batch([0, 2], parties, [16, 60, 16, 16], SHAPES, 4)) == [0, 2]


queries = st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 128)), min_size=1, max_size=24)


@given(queries, st.integers(1, 8))
def test_fair_batches_keep_the_policys_cost(drawn: list[tuple[str, int]], most: int) -> None:
    parties, lengths = [party for party, _ in drawn], [length for _, length in drawn]
    chosen = next(batch for batch in cheapest_split(lengths, SHAPES, most) if 0 in batch)
    batch = fair_batch(chosen, parties, lengths, SHAPES, most)

    def cost(indices: list[int]) -> float:
        return min(s.seconds for s in SHAPES if len(fill(indices, lengths, s, most)) == len(indices))

    assert 0 in batch
    assert len(set(batch)) == len(batch) <= most
    assert cost(batch) <= cost(chosen)
    owed, before, after = (Counter(parties[q] for q in part) for part in (range(len(chosen)), chosen, batch))
    assert all(after[party] >= min(owed[party], before[party]) for party in owed)


@given(queries, st.integers(1, 8))
def test_one_tenants_batch_is_the_policys_own(drawn: list[tuple[str, int]], most: int) -> None:
    lengths = [length for _, length in drawn]
    chosen = next(batch for batch in cheapest_split(lengths, SHAPES, most) if 0 in batch)
    assert fair_batch(chosen, ["only"] * len(lengths), lengths, SHAPES, most) == chosen
