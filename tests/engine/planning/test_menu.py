"""Shapes that are learnt from the lengths that come."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest

from jpets.engine.batch.bucket import Bucket, bucket_menu
from jpets.engine.planning.menu import LEAST_SEEN, SPREAD, Menu, expected_rows, learn_buckets
from jpets.scheduling.costs.exact_packing import GROUP_PRICE, length_ladder, rows_up

FIXED = bucket_menu(512, 1024, 128)


def cost(bucket: Bucket) -> float:
    return bucket.tokens + 0.01 * sum(n * length**2 for n, length in bucket.groups)


def menu(most_tokens: int = 1024) -> Menu:
    return Menu(FIXED, cost, 128, most_tokens)


def gaussian(count: int, mean: float = 32, std: float = 8) -> np.ndarray:
    return np.clip(np.rint(np.random.default_rng(0).normal(mean, std, count)), 3, 512).astype(np.int_)


def filled(bucket: Bucket, lengths: np.ndarray) -> int:
    """How many of these queries, in their order, a bucket holds."""
    return next((n for n in range(1, len(lengths) + 1) if not bucket.holds(lengths[:n])), len(lengths) + 1) - 1


def test_learnt_groups_have_the_fewest_positions_for_the_rows_to_be_expected() -> None:
    """Beside all choices of limits, one by one."""
    lengths = np.clip(np.rint(np.random.default_rng(1).lognormal(np.log(24), 0.8, 400)), 3, 500).astype(np.int_)
    ladder = length_ladder(int(lengths.max())).tolist()
    for bucket in learn_buckets(lengths, 128, 1024):
        expected = min(128, bucket.tokens / lengths.mean())

        def positions(limits: Sequence[int], expected: float = expected) -> float:
            shares = np.diff([0.0, *((lengths <= limit).mean() for limit in limits)])
            rows = rows_up(np.ceil(shares * expected + SPREAD * np.sqrt(shares * expected)).astype(np.int_))
            cells = float((rows * np.array(limits, float) ** 2).sum())
            return cells * (1 + GROUP_PRICE * (int((rows > 0).sum()) - 1))

        choices = [sorted({*own, ladder[-1]}) for few in (0, 1, 2) for own in itertools.combinations(ladder[:-1], few)]
        assert positions([limit for _, limit in bucket.groups]) == pytest.approx(min(map(positions, choices)))


@pytest.mark.parametrize(("mean", "std"), [(32, 8), (12, 3), (200, 80)])
def test_learnt_shapes_are_filled_by_such_queries(mean: float, std: float) -> None:
    seen = gaussian(1000, mean, std)
    for bucket in learn_buckets(seen, 128, 1024):
        counts = [filled(bucket, np.random.default_rng(seed).permutation(seen)[:200]) for seed in range(20)]
        tokens = np.median(counts) * mean
        assert tokens >= (0.75 if bucket.tokens > 4 * mean else 0.3) * min(bucket.tokens, 128 * mean)
        assert expected_rows(bucket, seen) == pytest.approx(np.median(counts), rel=0.35)


def test_a_menu_learns_once_enough_has_come_and_stays_with_it() -> None:
    own = menu()
    own.saw(gaussian(LEAST_SEEN - 1))
    assert own.buckets == tuple(sorted(FIXED, key=cost))
    own.saw(gaussian(10))
    learnt = [bucket for bucket in own.buckets if bucket not in FIXED]
    assert learnt and max(bucket.tokens for bucket in learnt) == 1024
    for _ in range(10):
        own.saw(gaussian(500))
    assert [bucket for bucket in own.buckets if bucket not in FIXED] == learnt, "the same traffic, the same shapes"
    for _ in range(10):
        own.saw(gaussian(2000, mean=300, std=50))
    assert [bucket for bucket in own.buckets if bucket not in FIXED] != learnt


def test_a_menu_that_was_given_learns_nothing() -> None:
    own = menu(most_tokens=0)
    own.saw(gaussian(5000))
    assert set(own.buckets) == set(FIXED)


def test_learnt_shapes_of_the_last_start() -> None:
    own = menu()
    own.learn([FIXED[0], Bucket(1000, ((40, 40),))])
    assert [bucket for bucket in own.buckets if bucket not in FIXED] == [Bucket(1000, ((40, 40),))]


def test_learnt_mixtures_come_before_the_ladders() -> None:
    own = menu()
    assert list(own.buckets) == sorted(FIXED, key=cost)
    learnt = Bucket(200, ((8, 40),))
    own.learn([learnt])
    large = [bucket for bucket in FIXED if not bucket.rectangular and cost(bucket) >= cost(learnt)]
    small = [bucket for bucket in FIXED if not bucket.rectangular and bucket not in large]
    assert large and set(own.buckets[-len(large) :]) == set(large)
    first = own.buckets[: -len(large)]
    assert learnt in first and small and set(small) < set(first) and list(first) == sorted(first, key=cost)


def test_texts_that_fit_no_learnt_shape_change_none() -> None:
    """The largest batch is cut to whole groups of 64 tokens, which may be fewer than the longest text has."""
    own = menu(most_tokens=300)
    own.saw(gaussian(2000))
    learnt = own.main
    assert learnt
    own.saw(np.full(2000, 300))
    assert own.main == learnt
