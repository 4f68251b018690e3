"""One round of balancing: the weight of calls and of waiting queries, and gaps that chance explains."""

from __future__ import annotations

import numpy as np
import pytest

from jpets.scheduling.balancing.balance import Move
from jpets.scheduling.balancing.rebalance import BACKLOG, rebalance

NOTHING = np.zeros(2)


def test_calls_weigh_what_they_take() -> None:
    """Equally many calls, but those of one task take nine times as long."""
    placement, calls = [["slow", "a"], ["b", "c"]], dict.fromkeys(["slow", "a", "b", "c"], 1000.0)
    even = rebalance(placement, calls, {}, NOTHING, 1.0)
    assert (even.phi, even.balanced.moves) == (1.0, ())
    weights = {"slow": 9.0, "a": 1.0, "b": 1.0, "c": 1.0}
    found = rebalance(placement, calls, weights, NOTHING, 1.0)
    assert found.phi == pytest.approx(2 / 10)
    assert found.balanced.moves[0] == Move("slow", 0, 1, copy=True)


def test_a_task_of_unknown_weight_counts_as_the_others_do() -> None:
    placement = [["a", "new"], ["b", "c"]]
    calls = dict.fromkeys(["a", "new", "b", "c"], 1000.0)
    assert rebalance(placement, calls, {"a": 0.5, "b": 0.5, "c": 0.5}, NOTHING, 1.0).phi == 1.0


@pytest.mark.parametrize(("calls", "phi"), [((30.0, 20.0), 1.0), ((3000.0, 2000.0), 2 / 3)])
def test_few_calls_prove_nothing(calls: tuple[float, float], phi: float) -> None:
    found = rebalance([["a"], ["b"]], dict(zip("ab", calls, strict=True)), {}, NOTHING, 1.0)
    assert found.phi == pytest.approx(phi)


def test_what_waits_counts_as_calls_over_some_seconds() -> None:
    placement, calls = [["a", "b"], ["c", "d"]], dict.fromkeys("abcd", 1000.0)
    found = rebalance(placement, calls, {}, np.array([2000.0, 0.0]), BACKLOG)
    assert found.phi == pytest.approx(2000 / 4000)
    assert [move.source for move in found.balanced.moves] == [0]


def test_calls_of_a_task_that_is_nowhere() -> None:
    with pytest.raises(ValueError, match="must stand on a device"):
        rebalance([["a"], []], {"a": 1.0, "lost": 1.0}, {}, NOTHING, 1.0)
