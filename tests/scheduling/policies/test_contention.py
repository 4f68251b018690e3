"""Which parties are served out of turn beside a flood, and what that may cost."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jpets.scheduling.costs.shape import Shape
from jpets.scheduling.order.fairness import fill
from jpets.scheduling.policies.contention import BURST, Contention, flood_count, own_batch, short_batch

MOST = 4
SHAPES = [Shape(n * 32, ((n, 32),), 0.001 + 0.001 * n, padded=True) for n in (1, 2, 4)]


def contention(stretch: float = 2.0, rate: float = 1000.0) -> Contention:
    made = Contention(stretch)
    made.rate = rate
    return made


def _seconds(batch: list[int]) -> float:
    return next(shape.seconds for shape in SHAPES if shape.groups[0][0] >= len(batch))


def test_without_a_flood_nobody_is_served_out_of_turn() -> None:
    own = contention()
    assert own.modest(["a", "b", "a", "b", "c"], MOST, 0.0) == []
    assert own.modest(["a"] * 9, MOST, 0.0) == []
    assert not own.lasts(0.0)


def test_a_flood_of_lower_priority_is_one_too() -> None:
    own = contention()
    assert own.modest(["a"], MOST, 0.0, below=MOST) == []
    assert own.modest(["a", "b"], MOST, 1.0, below=MOST + 1) == [0, 1]
    assert own.lasts(1.0)
    assert own.modest(["a"] * 9, MOST, 9.0, below=MOST + 1) == [], "a flood itself is no reason to wait for it"


def test_who_has_little_waiting_goes_before_a_flood() -> None:
    own = contention()
    assert own.modest(["a", "a", "b", "a", "c", "a", "a"], MOST, 5.0) == [2, 4]
    assert own.lasts(5.0 + BURST / 2)
    assert not own.lasts(5.0 + BURST)


def test_a_stretch_of_nothing_switches_it_off() -> None:
    own = contention(stretch=0.0)
    assert own.modest([*"aaaaaaa", "b"], MOST, 0.0) == []
    assert not own.lasts(0.0)


def test_who_was_served_its_part_waits_its_turn_until_it_has_some_again() -> None:
    own, window = contention(rate=1000.0), [*"aaaaaaa", "b"]
    own.spend({"a": 1, "b": 1}, 0.0)  # two parties: 500 tokens a second each, and as many at once
    own.spend({"b": 600}, 0.0)
    assert own.modest(window, MOST, 0.0) == []
    assert own.modest(window, MOST, 0.5) == [7]


def test_out_of_turn_nobody_gets_more_than_its_part() -> None:
    """One party always has a few queries waiting, beside a flood that takes whatever is left."""
    own, window, now = contention(rate=1000.0), [*"aaaaaaa", "b"], 0.0
    tokens = {"a": 0, "b": 0}
    while now < 60:
        party = "b" if own.modest(window, MOST, now) else "a"
        own.spend({party: 100}, now)
        tokens[party] += 100
        now += 0.1
    assert tokens["b"] == pytest.approx(0.5 * sum(tokens.values()), rel=0.05)


def test_parties_that_come_and_go_leave_nothing_behind() -> None:
    own = contention()
    for number in range(1000):
        own.spend({number: 10}, number * 0.1)
    assert len(own._levels) <= 2 * BURST / 0.1 + 1


def test_the_batches_of_a_flood_follow_what_the_others_take() -> None:
    own = contention(stretch=2.0)
    for _ in range(50):
        own.ran(0.01)
    assert own.longest == pytest.approx(0.02)


@given(st.lists(st.integers(1, 32), min_size=1, max_size=9), st.data())
def test_a_batch_of_ones_own_is_what_it_would_be_alone_or_hardly_longer(
    lengths: list[int], data: st.DataObject
) -> None:
    own = sorted(data.draw(st.sets(st.integers(0, len(lengths) - 1), min_size=1)))
    others = [q for q in range(len(lengths)) if q not in own]
    alone = own_batch(own, [], lengths, SHAPES, MOST)
    batch = own_batch(own, others, lengths, SHAPES, MOST)
    assert own[0] in alone and set(alone) <= set(own)
    assert batch[: len(alone)] == alone and set(batch[len(alone) :]) <= set(others)
    assert _seconds(batch) <= 1.25 * _seconds(alone)


def test_who_keeps_to_its_part_does_not_wait_for_all_of_its_own() -> None:
    """Five queries in one batch would take as long as two batches after each other, the first of which ends sooner."""
    shapes = [Shape(n * 32, ((n, 32),), seconds, padded=True) for n, seconds in ((2, 1.0), (3, 1.5), (8, 4.0))]
    assert len(own_batch(range(5), [], [32] * 5, shapes, 8)) < 5


@given(st.lists(st.integers(1, 32), min_size=1, max_size=9), st.floats(0, 0.01))
def test_a_short_batch_is_short_and_holds_the_first(lengths: list[int], longest: float) -> None:
    batch = short_batch(range(len(lengths)), lengths, SHAPES, MOST, longest)
    cost = min(shape.seconds for shape in SHAPES if len(fill(batch, lengths, shape, MOST)) == len(batch))
    assert batch[0] == 0
    assert cost <= max(longest, SHAPES[0].seconds)
    rate = len(batch) / cost
    allowed = [s for s in SHAPES if s.seconds <= max(longest, SHAPES[0].seconds)]
    assert rate >= np.max([len(fill(range(len(lengths)), lengths, s, MOST)) / s.seconds for s in allowed]) - 1e-9


def test_several_may_flood_together() -> None:
    own = contention()
    together = [*"aaaa", *"bbbb", "c", *"bbb"]
    assert own.modest(together, 2 * MOST, 0.0) == [8]
    assert own.lasts(0.0) and own.keeping == {"c"}
    alike = [*"aaaa", *"bbbb", *"cc"]
    assert own.modest(alike, 2 * MOST, 9.0) == [], "as many wait for everybody"
    assert not own.lasts(9.0)


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ([], None),
        ([128], None),
        ([129], 129),
        ([500, 128, 1], 129),
        ([100, 100, 1], 100),
        ([100, 100, 90, 1], 90),
        ([100, 100, 90, 30, 1], 30),
        ([100, 100, 90, 30, 10], None),
        ([64, 64, 1], None),
        ([64, 64, 1, 1], None),
        ([5] * 40 + [1], None),
        ([16] * 9 + [4, 4], 16),
        ([50, 30, 20, 15, 12, 10, 9, 8, 7], None),
    ],
)
def test_which_counts_are_a_flood(counts: list[int], expected: int | None) -> None:
    assert flood_count(counts, 128) == expected
