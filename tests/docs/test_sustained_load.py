"""The load over HTTP that a system keeps, of curves that were measured."""

from __future__ import annotations

from typing import Any

import pytest
from results.sustained import sustained


def curve(*points: tuple[float, float], loads: bool = True) -> list[dict[str, Any]]:
    """Of (rate, p99)."""
    return [{"rate": rate, "p99": p99} | ({"load": rate / 100} if loads else {}) for rate, p99 in points]


def test_a_rate_is_between_the_last_that_kept_the_target_and_the_next() -> None:
    assert sustained(curve((50, 0.05), (100, 0.15), (150, 0.02)), 0.1) == pytest.approx((75, 0.75))
    assert sustained(curve((50, 0.05), (100, 0.1)), 0.1) == (100, 1)
    assert sustained(curve((50, 0.2)), 0.1) == pytest.approx((25, 0.25))


def test_a_failed_request_is_infinitely_late() -> None:
    assert sustained(curve((50, 0.05), (100, float("inf"))), 0.1) == (50, 0.5)


def test_fixed_rates_have_no_load() -> None:
    found = sustained(curve((50, 0.05), (100, 0.15), loads=False), 0.1)
    assert found.load is None and found.rate == pytest.approx(75)
