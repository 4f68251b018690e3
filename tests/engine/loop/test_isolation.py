"""An error of one query, even an unforeseen one, costs no other its answer."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import jax
import pytest
from support import paused

from jpets.engine.batch.layout import Layout
from jpets.engine.batch.rows import Row
from jpets.engine.engine import Engine
from jpets.engine.loop import host_loop
from jpets.engine.planning.plan import Plan
from jpets.engine.planning.planner import Planner
from jpets.engine.queue import pending_queue
from jpets.engine.queue.pending import Pending
from jpets.engine.workloads.workload import RowFailures
from jpets.errors import EngineFailure, InvalidInput
from jpets.types import Query

GOOD, BAD = Query(None, "some text"), Query(None, "some text that is a good deal longer than it")


def refuses(rows: Sequence[Row]) -> None:
    if any(row.length > 6 for row in rows):
        raise ZeroDivisionError("nobody foresaw this")


def in_planning(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = Planner.next_batch

    def planned(planner: Planner, waiting: Sequence[Pending], *, busy: bool = False) -> Plan:
        refuses([p.row for p in waiting])
        return plan(planner, waiting, busy=busy)

    monkeypatch.setattr(Planner, "next_batch", planned)


def in_assembly(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    fill = engine.replica.fill

    def filled(layout: Layout, rows: Sequence[Row], program: Any, below: Layout | None) -> Any:
        refuses(rows)
        return fill(layout, rows, program, below)

    monkeypatch.setattr(engine.replica, "fill", filled)


@pytest.mark.parametrize("fault", [in_planning, in_assembly])
@pytest.mark.parametrize("bad", [[0], [40], [7, 31, 63]], ids=str)
def test_only_the_queries_that_cause_it_fail(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, fault: Callable[..., None], bad: Sequence[int]
) -> None:
    with paused(engine):
        futures = engine.submit([BAD if at in bad else GOOD for at in range(64)])
        fault(engine, monkeypatch)
    errors = [future.result(30).error for future in futures]
    assert [at for at, error in enumerate(errors) if error is not None] == list(bad)
    assert all(isinstance(errors[at], EngineFailure) for at in bad)
    assert engine.live


def test_rows_that_cannot_be_gathered_fail_and_the_others_run_without_them(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where another one fails then."""
    again = mock.Mock()
    monkeypatch.setattr(host_loop.HostLoop, "_run_again", again)

    def gathered(rows: Sequence[Row]) -> Sequence[Row]:
        bad = [at for at, row in enumerate(rows) if row.length > 6]
        if bad:
            raise RowFailures({bad[0]: EngineFailure(f"row {bad[0]} of {len(rows)}")})
        return rows

    bad = [0, 5, 11]
    with paused(engine):
        futures = engine.submit([BAD if at in bad else GOOD for at in range(12)])
        monkeypatch.setattr(engine.workload, "gathered", gathered)
    errors = [future.result(30).error for future in futures]
    assert [at for at, error in enumerate(errors) if error is not None] == bad
    assert all("row " in str(errors[at]) for at in bad)
    assert not again.called, "that has the device to itself"
    assert engine.infer([GOOD])[0].error is None


def test_queries_that_cannot_be_planned_together_run_apart(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = Planner.next_batch

    def planned(planner: Planner, waiting: Sequence[Pending], *, busy: bool = False) -> Plan:
        if len(waiting) > 1:
            raise ZeroDivisionError
        return plan(planner, waiting, busy=busy)

    monkeypatch.setattr(Planner, "next_batch", planned)
    assert all(result.error is None for result in engine.infer([GOOD] * 9))


def test_what_only_watches_a_batch_costs_nobody_an_answer(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = mock.Mock(side_effect=ZeroDivisionError)
    engine.hooks.append(broken)
    monkeypatch.setattr(Planner, "serving", broken)
    try:
        results = engine.infer([GOOD, BAD] * 5)
    finally:
        engine.hooks.remove(broken)
    assert all(result.error is None for result in results)
    assert broken.called


def test_a_text_that_is_none_has_an_error_of_its_own(engine: Engine) -> None:
    odd: list[Any] = [5, b"bytes", ["not", "a pair", "of texts"]]
    results = engine.infer([GOOD, *(Query(None, text) for text in odd), GOOD])
    assert [isinstance(result.error, InvalidInput) for result in results] == [False, True, True, True, False]


def test_the_first_query_after_idle_minutes_finds_a_live_engine(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    later = SimpleNamespace(monotonic=lambda: time.monotonic() + 3600)
    with paused(engine):
        monkeypatch.setattr(host_loop, "time", later)
        monkeypatch.setattr(pending_queue, "time", later)
        future = engine.submit([GOOD])[0]
        seen = [engine.live for _ in range(3)]
    assert future.result(30).error is None
    assert all(seen)


def test_an_engine_that_gets_nothing_done_is_not_live(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.chain([0.0], itertools.repeat(engine.settings.stall_seconds + 3600))
    with paused(engine):
        engine.submit([GOOD])
        monkeypatch.setattr(host_loop, "time", mock.Mock(monotonic=lambda: time.monotonic() + next(clock)))
        assert engine.live
        assert not engine.live
    assert engine.infer([GOOD])[0].error is None


def test_a_device_that_fails_every_batch_is_lost(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is answered with an error at once, which a balancer would take for a fast server."""

    def lost(*_: Any) -> Any:
        raise jax.errors.JaxRuntimeError("INTERNAL: the device is gone")

    with monkeypatch.context() as failing:
        failing.setattr(engine.replica, "dispatch", lost)
        for number in range(host_loop.LOST):
            assert engine.live, number
            assert isinstance(engine.infer([GOOD])[0].error, EngineFailure)
        assert not engine.live
        failing.undo()
        engine.submit([GOOD])[0].result(30)
    assert engine.live, "it may come back"
