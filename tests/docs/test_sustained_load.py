"""The load over HTTP that a system keeps, of curves that were measured."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from benches.service.serving import Loaded, pooled
from results.sustained import sustained


def curve(*points: tuple[float, float], loads: bool = True) -> list[dict[str, Any]]:
    """Of (rate, p99)."""
    return [{"rate": rate, "p99": p99} | ({"load": rate / 100} if loads else {}) for rate, p99 in points]


def test_a_rate_is_between_the_last_that_kept_the_target_and_the_next() -> None:
    assert sustained(curve((50, 0.05), (100, 0.15), (150, 0.02)), 0.1) == pytest.approx((75, 0.75))
    assert sustained(curve((50, 0.05), (100, 0.1)), 0.1) == (100, 1)
    assert sustained(curve((50, 0.2)), 0.1) == pytest.approx((25, 0.25))


@pytest.mark.parametrize("late", [float("inf"), float("nan")])
def test_a_failed_request_is_infinitely_late(late: float) -> None:
    assert sustained(curve((50, 0.05), (100, late), (150, 0.01)), 0.1) == (50, 0.5)


def test_percentiles_of_failed_requests_are_infinite() -> None:
    """Between two infinite latencies there is no number to interpolate."""
    failed = Loaded(10.0, 10.0, np.array([0.01] * 95 + [np.inf] * 5))
    assert (failed.quantile(50), failed.quantile(99), failed.responses) == (0.01, float("inf"), 9.5)
    assert pooled([failed, Loaded(10.0, 10.0, np.full(1000, 0.02))]).figures()["p99"] == 0.02


def test_fixed_rates_have_no_load() -> None:
    found = sustained(curve((50, 0.05), (100, 0.15), loads=False), 0.1)
    assert found.load is None and found.rate == pytest.approx(75)
