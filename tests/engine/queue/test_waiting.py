"""Queries that wait: which is served next, clients that leave, deadlines that pass."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from concurrent.futures import CancelledError, Future, wait

import numpy as np
import pytest
from support import ENGINE_BUCKETS, ENGINE_SETTINGS, embedding_of, paused, shallow, wait_until

from jpets.engine.batch.rows import Row
from jpets.engine.engine import Engine
from jpets.engine.planning import flood as flooding
from jpets.engine.planning.plan import Plan
from jpets.engine.planning.planner import Planner
from jpets.engine.queue.pending import Pending
from jpets.engine.queue.pending_queue import WINDOW
from jpets.errors import DeadlineExceeded, EngineFailure, InvalidInput, Saturated
from jpets.scheduling.policies import ready
from jpets.types import Query, Result

TEXT = "a library of functions for sparse matrices"
LABELLED = ["adapter", "bitfit", "mask", "diff", "several"]


def test_a_past_deadline_is_never_computed(engine: Engine) -> None:
    before = engine.stats.real_tokens
    (result,) = engine.infer([Query("mask", TEXT)], deadline=-1.0)
    assert isinstance(result.error, DeadlineExceeded)
    assert engine.stats.real_tokens == before


def test_a_cancelled_query_is_dropped(engine: Engine) -> None:
    with paused(engine):
        first, second = engine.submit([Query("mask", TEXT), Query("mask", TEXT)])
        assert first.cancel()
    assert second.result(30).error is None
    with pytest.raises(CancelledError):
        first.result()


def test_what_was_queued_before_an_interrupt_keeps_its_task(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Given back twice, its slot could become another task's while it waits."""

    def interrupted() -> None:
        raise KeyboardInterrupt

    def held() -> list[int]:
        return [resident.queries for resident in engine.tasks.all() if resident.queries]

    with paused(engine):
        with monkeypatch.context() as patch:
            patch.setattr(engine.pending.changed, "notify_all", interrupted)
            with pytest.raises(KeyboardInterrupt):
                engine.submit([Query("mask", TEXT)])
        assert len(engine.pending) == 1 and held() == [1]
        for wrong in ("high", None, 1.5):
            with pytest.raises(InvalidInput, match="expected a whole number"):
                engine.submit([Query("mask", TEXT)], priority=wrong)  # type: ignore[arg-type]
        assert len(engine.pending) == 1 and held() == [1]
    wait_until(lambda: not held() and not len(engine.pending))
    assert engine.infer([Query("mask", TEXT)])[0].error is None
    assert all(resident.queries == 0 for resident in engine.tasks.all())


def test_what_was_cancelled_is_never_computed(engine: Engine) -> None:
    """90 of 100 leave while a batch runs: their places are free at once, and only the other ten are computed."""
    computed: list[object] = []
    cancelled = engine.stats.answers["cancelled"]
    with paused(engine):
        futures = engine.submit([Query(name, TEXT) for name in LABELLED] * 20, deadline=60.0)
        gone = [future for i, future in enumerate(futures) if i % 10]
        assert all(future.cancel() for future in gone)
        assert len(engine.pending) == 10
        assert engine.stats.answers["cancelled"] == cancelled + 90
        assert wait(gone, timeout=30).done == set(gone)
        engine.hooks.append(computed.extend)
    assert all(future.result(30).error is None for future in futures[::10])
    engine.hooks.remove(computed.extend)
    assert len(computed) == 10


def test_deadlines_pass_behind_the_window_too(engine: Engine) -> None:
    answered: list[bool] = []
    with paused(engine):
        others = engine.submit([Query(None, TEXT)] * (WINDOW + 50), priority=1)
        late = engine.submit([Query(None, TEXT)] * 20, deadline=-1.0)

        def look(pendings: Sequence[Pending]) -> None:
            answered.append(all(future.done() for future in late) and all(p.priority for p in pendings))

        engine.hooks.append(look)
    assert all(future.result(30).error is None for future in others)
    engine.hooks.remove(look)
    assert all(answered)
    assert all(isinstance(future.result(30).error, DeadlineExceeded) for future in late)


def test_a_client_that_leaves_while_its_batch_is_planned(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = Planner.next_batch
    with paused(engine):
        futures = engine.submit([Query("mask", TEXT)] * 4)

        def leave(planner: Planner, waiting: Sequence[Pending], *, busy: bool = False) -> Plan:
            planned = plan(planner, waiting, busy=busy)
            futures[1].cancel()
            return planned

        monkeypatch.setattr(Planner, "next_batch", leave)
    assert [futures[i].result(30).error for i in (0, 2, 3)] == [None] * 3
    assert futures[1].cancelled()


def test_a_full_queue_refuses_whole_submissions(engine: Engine) -> None:
    many = [Query("mask", TEXT)] * 3000
    with paused(engine):
        accepted = engine.submit(many)
        with pytest.raises(Saturated, match="try again"):
            engine.submit(many)
        for future in accepted[1:]:
            future.cancel()
        assert len(engine.pending) == 1
    assert accepted[0].result(30).error is None


def test_the_policys_batch_makes_room_for_another_tenant(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def pending(tenant: str, length: int) -> Pending:
        ids = np.full(length, 7, np.int32)
        return Pending(None, None, Row.of_tokens(ids, np.zeros_like(ids), {}, 0), None, 0, tenant)

    waiting = [pending("roomy", 12), pending("narrow", 5), *(pending("roomy", 12) for _ in range(20))]
    # Whether this counts as a flood depends on the measured times of the engine's programs.
    monkeypatch.setattr(flooding.FloodGuard, "batch", lambda *_, **__: None)
    monkeypatch.setattr(
        ready, "cheapest_split", lambda lengths, shapes, most: [[0, *range(2, 15)], [1, *range(15, 22)]]
    )
    assert {p.number for p in engine._planner.next_batch(waiting).pendings} == {p.number for p in waiting[:14]}


def test_beside_a_flood_plans_are_made_ahead_and_never_old(engine: Engine) -> None:
    """A query that comes while a batch runs is in the next plan, and every query gets its own answer."""
    texts = [f"{TEXT} {number}" for number in range(5)]
    expected = [embedding_of(engine.infer([Query(None, text)])[0]) for text in texts]
    flood = engine.submit([Query(None, texts[i % 5]) for i in range(600)], tenant="flood")
    for number in range(40):
        (result,) = engine.infer([Query(None, texts[number % 5])], tenant="light")
        np.testing.assert_allclose(embedding_of(result), expected[number % 5], atol=1e-4)
        if number == 3:
            assert engine._loop._planner.contended()
            assert not all(future.done() for future in flood), "served out of turn"
            flood[-1].cancel()
    for number, future in enumerate(flood[:-1]):
        np.testing.assert_allclose(embedding_of(future.result(60)), expected[number % 5], atol=1e-4)


def test_a_plan_that_cannot_be_made_costs_its_queries_only(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: object) -> list[int]:
        raise RuntimeError("no plan")

    with monkeypatch.context() as patched:
        patched.setattr(flooding, "own_batch", broken)
        patched.setattr(flooding, "short_batch", broken)
        flood = engine.submit([Query(None, TEXT)] * 600, tenant="flood")
        light = engine.infer([Query(None, TEXT)], tenant="light")
        wait(flood, 60)
    assert isinstance(light[0].error, EngineFailure)
    assert engine.live
    (result,) = engine.infer([Query(None, TEXT)])
    assert result.error is None


def test_fixed_batches_and_the_lazy_trigger(tmp_path: object) -> None:
    settings = dataclasses.replace(
        ENGINE_SETTINGS, policy="fixed", fixed_batch=3, trigger="lazy", lazy_wait=0.6, lazy_size=6, latency_target=100.0
    )
    with Engine(shallow(), [], settings, cache_dir=tmp_path, buckets=ENGINE_BUCKETS) as own:  # type: ignore[arg-type]
        own.start()
        results = own.infer([Query(None, TEXT)] * 6)
        assert all(result.error is None for result in results)
        assert own.stats.batches == 2
        (alone,) = own.infer([Query(None, TEXT)])  # fewer than lazy_size: starts when lazy_wait is over
        assert alone.timing is not None and alone.timing.queued >= 0.6
        first = own.submit([Query(None, TEXT)])
        second = own.submit([Query(None, TEXT)])
        assert not wait(first, timeout=0.05).done
        both = [future.result(60) for future in (*first, *second)]
        assert [result.error for result in both] == [None, None] and own.stats.batches == 4, "they ran together"


def test_what_a_lazy_server_starts_with_does_not_wait_again(tmp_path: object) -> None:
    """The scheduler starts once there are enough: that some batches take is no reason for the others to wait. And to
    wait is no sign of a device that hangs."""
    settings = dataclasses.replace(
        ENGINE_SETTINGS, policy="fixed", fixed_batch=3, trigger="lazy", lazy_wait=300.0, lazy_size=6,
        latency_target=1000.0, stall_seconds=0.1,
    )  # fmt: skip
    with Engine(shallow(), [], settings, cache_dir=tmp_path, buckets=ENGINE_BUCKETS) as own:  # type: ignore[arg-type]
        own.start()
        assert not wait(own.submit([Query(None, TEXT)] * 6), 60).not_done
        (alone,) = own.submit([Query(None, TEXT)])
        wait_until(lambda: own._loop._trigger.until > time.monotonic())
        assert not wait([alone], timeout=0.5).done and own.live
        alone.cancel()


def test_a_lazy_server_does_not_wait_past_a_deadline(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = dataclasses.replace(
        ENGINE_SETTINGS, trigger="lazy", lazy_wait=300.0, lazy_size=1000, latency_target=1000.0
    )
    monkeypatch.setattr(Planner, "predicted", lambda planner, waiting: 29.5)
    with Engine(shallow(), [], settings, cache_dir=tmp_path, buckets=ENGINE_BUCKETS) as own:  # type: ignore[arg-type]
        own.start()
        (patient,) = own.submit([Query(None, TEXT)])
        assert not wait([patient], timeout=0.3).done
        (hasty,) = own.submit([Query(None, TEXT)], deadline=30.0)
        assert hasty.result(60).error is None


def test_what_comes_while_a_lazy_server_predicts_ends_its_wait(
    tmp_path: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = dataclasses.replace(ENGINE_SETTINGS, trigger="lazy", lazy_wait=300.0, lazy_size=2, latency_target=1000.0)
    more: list[Future[Result]] = []

    def predicted(planner: Planner, waiting: Sequence[Pending]) -> float:
        if not more:
            more.extend(own.submit([Query(None, TEXT)]))
        return 0.01

    monkeypatch.setattr(Planner, "predicted", predicted)
    with Engine(shallow(), [], settings, cache_dir=tmp_path, buckets=ENGINE_BUCKETS) as own:  # type: ignore[arg-type]
        own.start()
        first = own.submit([Query(None, TEXT)])
        assert first[0].result(60).error is None
        more[0].cancel()
