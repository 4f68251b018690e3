"""How fast the machine is beside what programs were expected to take."""

from __future__ import annotations

import math
from collections.abc import Iterator
from unittest import mock

import pytest

from jpets.engine.batch.bucket import Bucket, Variant
from jpets.engine.costs import pace
from jpets.engine.costs.pace import LOOK_SECONDS, MOST, SETTLED, Pace
from jpets.engine.planning.predictions import Predictions
from jpets.engine.programs.program import Program, ProgramKey

KEY = ProgramKey(Bucket(64, ((2, 32),)), Variant())


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[mock.Mock]:
    made = mock.Mock(monotonic=mock.Mock(return_value=100.0))
    monkeypatch.setattr(pace, "time", made)
    yield made


def program(expected: float, seconds: float, followed: int = SETTLED) -> Program:
    return Program(KEY, mock.Mock(), seconds, expected, followed)


def test_what_never_ran_is_as_slow_as_what_runs(clock: mock.Mock) -> None:
    """Else, on a machine with other work, each program that is missing would look faster than those that are there."""
    ready = [program(0.01, 0.015), program(0.02, 0.03), program(0.04, 0.02), program(0.01, 0.09, followed=1)]
    costs = mock.Mock(estimate=mock.Mock(return_value=0.01), pace=Pace(lambda: ready))
    own = Predictions(costs, mock.Mock())
    assert own.estimate(KEY) == pytest.approx(0.015), "the median, without what hardly ran"
    ready[0].seconds = ready[1].seconds = 0.02
    assert own.estimate(KEY) == pytest.approx(0.015), "not looked at again yet"
    clock.monotonic.return_value += LOOK_SECONDS
    assert own.estimate(KEY) == pytest.approx(0.01)


def test_the_pace_is_bounded_and_one_at_first(clock: mock.Mock) -> None:
    assert Pace().now == Pace(lambda: [program(0.0, 0.5)]).now == 1.0
    assert Pace(lambda: [program(0.01, 5.0)]).now == MOST
    assert Pace(lambda: [program(5.0, 0.01)]).now == 1 / MOST


def test_a_program_with_faster_code_is_expected_to_take_less() -> None:
    own, whole = program(0.01, 0.03), program(0.02, 0.02)
    own.best = 0.02
    own.exchange(whole)
    assert own.expected == pytest.approx(0.009)
    assert own.best == math.inf, "what the former code took at best says nothing of it"
