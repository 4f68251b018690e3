"""The bounded queue: order, shares, deadlines, cancellation; a long queue costs no more than a short one."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jpets.engine.batch.rows import Row
from jpets.engine.queue.pending import Pending
from jpets.engine.queue.pending_queue import PendingQueue
from jpets.engine.tasks.entries import Entry
from jpets.errors import Saturated, TooLarge
from jpets.scheduling.order.order import due


def query(
    tenant: str = "", tokens: int = 10, *, deadline: float | None = None, priority: int = 0, arrived: float = 0.0
) -> Pending:
    ids = np.zeros(tokens, np.int32)
    return Pending(None, None, Row.of_tokens(ids, ids, {}, 0), deadline, priority, tenant, arrived=arrived)


def ignore(pending: Pending) -> None:
    del pending


@pytest.fixture
def queue() -> PendingQueue:
    return PendingQueue(1_000_000, ignore)


def drain(queue: PendingQueue, count: int) -> list[Pending]:
    """Serves the most urgent query again and again."""
    return [queue.serve(queue.most_urgent(1))[0] for _ in range(count)]


def test_an_empty_queue(queue: PendingQueue) -> None:
    queue.put([])
    assert queue.most_urgent(5) == queue.expire(math.inf) == queue.serve([]) == queue.close() == []
    assert queue.earliest_deadline() is None


def test_priority_then_deadline_then_arrival(queue: PendingQueue) -> None:
    items = [
        query(arrived=1.0),
        query(arrived=0.0),
        query(arrived=2.0, deadline=50.0),
        query(arrived=2.0, deadline=40.0),
        query(arrived=9.0, priority=1),
    ]
    queue.put(items)
    assert queue.most_urgent(10) == [items[i] for i in (4, 3, 2, 1, 0)]
    assert queue.most_urgent(2) == [items[4], items[3]]
    assert queue.earliest_deadline() == 40.0


@given(
    st.lists(
        st.tuples(st.sampled_from("ab"), st.integers(0, 2), st.none() | st.integers(0, 90), st.integers(0, 30)),
        max_size=30,
    ),
    st.sets(st.integers(0, 29)),
    st.integers(0, 90),
)
def test_against_a_plain_list(drawn: list[tuple[str, int, int | None, int]], removed: set[int], now: int) -> None:
    """Which queries expire and which remain, in which order, whatever was cancelled or taken before."""
    queue = PendingQueue(1000, ignore)
    items = [query(t, 5, priority=p, deadline=d, arrived=float(a)) for t, p, d, a in drawn]
    queue.put(items)
    gone = [pending for i, pending in enumerate(items) if i in removed]
    for pending in gone[::2]:
        pending.future.cancel()
    assert queue.remove(gone) == gone[1::2]
    left = [pending for i, pending in enumerate(items) if i not in removed]
    late = [pending for pending in left if pending.deadline is not None and pending.deadline <= now]
    assert sorted(p.number for p in queue.expire(now)) == sorted(p.number for p in late)
    left = [pending for pending in left if pending not in late]
    assert len(queue) == len(left)
    got = queue.most_urgent(1000)
    for party in {pending.party for pending in left}:
        expected = sorted((p for p in left if p.party == party), key=lambda p: (due(p.arrived, p.deadline), p.number))
        assert [p for p in got if p.party == party] == expected
    assert [-p.priority for p in got] == sorted(-p.priority for p in left)
    assert sorted(p.number for p in queue.close()) == sorted(p.number for p in left)


def test_tenants_share_by_tokens(queue: PendingQueue) -> None:
    queue.put([query("long", 30) for _ in range(100)] + [query("short", 10) for _ in range(100)])
    served = Counter(pending.tenant for pending in drain(queue, 80))
    assert served == {"long": 20, "short": 60}


def test_who_keeps_to_its_part_does_not_fall_behind_a_flood(queue: PendingQueue) -> None:
    queue.put([query("flood", 30) for _ in range(100)] + [query("modest", 30) for _ in range(60)])
    own = [pending for pending in queue.most_urgent(160) if pending.tenant == "modest"]
    queue.serve(own[:50], {(0, "modest")})
    assert Counter(p.tenant for p in queue.most_urgent(8)) == {"flood": 4, "modest": 4}


def test_a_tenant_that_comes_late_starts_level(queue: PendingQueue) -> None:
    queue.put([query("early") for _ in range(100)])
    drain(queue, 50)
    queue.put([query("late") for _ in range(50)])
    assert Counter(pending.tenant for pending in drain(queue, 20)) == {"early": 10, "late": 10}


def test_going_idle_for_a_moment_forgives_nothing(queue: PendingQueue) -> None:
    queue.put([query("greedy", 100), query("modest", 10)])
    queue.put([query("modest", 10) for _ in range(9)])
    queue.serve([p for p in queue.most_urgent(10) if p.tenant == "greedy"])
    queue.put([query("greedy", 100)])
    assert [pending.tenant for pending in drain(queue, 11)] == ["modest"] * 10 + ["greedy"]


def test_short_deadlines_take_no_other_tenants_share(queue: PendingQueue) -> None:
    queue.put([query("hasty", deadline=1.0) for _ in range(50)] + [query("patient") for _ in range(50)])
    assert Counter(pending.tenant for pending in drain(queue, 20)) == {"hasty": 10, "patient": 10}


def test_newcomers_do_not_starve_whoever_waits(queue: PendingQueue) -> None:
    queue.put([query("first")])
    queue.put([query("newcomer 0")])
    for number in range(1, 20):
        queue.put([query(f"newcomer {number}")])
        if any(pending.tenant == "first" for pending in drain(queue, 1)):
            return
    pytest.fail("the first tenant was never served")


def test_tenants_that_went_away_are_forgotten(queue: PendingQueue) -> None:
    queue.put([query("steady") for _ in range(2000)])
    for number in range(1000):
        queue.put([query(f"visitor {number}")])
        drain(queue, 2)
    backlog = queue._ready._by_priority[0]
    assert len(backlog._places) <= 3
    drain(queue, len(queue))
    assert not queue._ready._by_priority


def test_more_than_may_ever_wait_are_not_told_to_try_again() -> None:
    queue = PendingQueue(2, lambda pending: None)
    with pytest.raises(TooLarge, match="3 queries came together and at most 2 may wait"):
        queue.put([query() for _ in range(3)])
    assert len(queue) == 0
    queue.put([query(), query()])


def test_a_cancelled_query_makes_room_at_once() -> None:
    left: list[Pending] = []
    queue = PendingQueue(2, left.append)
    items = [query(deadline=5.0), query()]
    queue.put(items)
    with pytest.raises(Saturated, match="limit is 2"):
        queue.put([query()])
    items[0].future.cancel()
    items[0].future.cancel()
    assert left == [items[0]]
    assert queue.earliest_deadline() is None
    queue.put([query()])
    assert len(queue) == 2


def test_who_took_a_query_out_answers_it() -> None:
    left: list[Pending] = []
    queue = PendingQueue(10, left.append)
    items = [query() for _ in range(3)]
    queue.put(items)
    assert queue.serve(items[:1]) == items[:1]
    assert queue.remove(items[:2]) == items[1:2]
    for pending in items:
        pending.future.cancel()
    assert left == items[2:]
    queue.put([query()])
    assert len(queue.close()) == 1
    assert len(queue) == 0
    with pytest.raises(Saturated, match="shutting down"):
        queue.put([query()])


def test_a_window_of_a_long_queue_reads_little_of_it(queue: PendingQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    queue.put([query(f"tenant {i % 1000}", arrived=float(i), deadline=1e6 + i) for i in range(100_000)])
    read = itertools.count()
    tokens = property(lambda pending: (next(read), pending.row.length)[1])
    monkeypatch.setattr(Pending, "tokens", tokens)
    window = queue.most_urgent(256)
    assert next(read) <= 256
    assert len({pending.tenant for pending in window}) == 256
    assert queue.expire(1e6 - 1) == []
    assert len(queue.serve(window[:32])) == 32
    assert len(queue.expire(1e6 + 50_000)) > 49_000
    assert len(queue) < 50_000


def test_a_full_queue_makes_room_for_who_has_little_waiting() -> None:
    queue = PendingQueue(10, ignore)
    flood, other = [query("flood") for _ in range(8)], [query("other") for _ in range(2)]
    queue.put(flood)
    queue.put(other)
    with pytest.raises(Saturated):
        queue.put([query("flood")])
    with pytest.raises(Saturated):
        queue.put([query("new") for _ in range(6)])  # the newcomer would have more than the flood
    assert len(queue) == 10
    light = [query("light") for _ in range(3)]
    assert set(queue.put(light)) == set(flood[-3:])
    assert len(queue) == 10
    assert set(queue.most_urgent(10)) == {*flood[:5], *other, *light}


def test_nobody_makes_room_for_a_lower_priority() -> None:
    queue = PendingQueue(4, ignore)
    urgent = [query("flood", priority=1) for _ in range(4)]
    queue.put(urgent)
    with pytest.raises(Saturated):
        queue.put([query("light", priority=0)])
    assert queue.put([query("light", priority=2)]) == [urgent[-1]]


@pytest.mark.parametrize("names", ["ab", "ba"])
def test_of_equal_parties_the_lower_priority_makes_room(names: str) -> None:
    queue = PendingQueue(8, ignore)
    lower, higher = ([query(name, priority=priority) for _ in range(4)] for priority, name in enumerate(names))
    queue.put(higher)
    queue.put(lower)
    assert queue.put([query("light", priority=1)]) == [lower[-1]]
    assert queue.put([query("other", priority=1)]) == [higher[-1]], "which has more by now"
    assert queue.put([query("third", priority=2)]) == [lower[-2]]


def test_a_full_queue_of_ready_and_cold_queries_makes_room() -> None:
    queue = PendingQueue(10, lambda pending: None)
    cold = query("few")
    cold.absent = Entry("few", "absent", lambda: pytest.fail("nobody asked"))
    queue.put([query("many") for _ in range(9)])
    queue.put([cold])
    assert (queue.ready, queue.cold) == (9, 1)
    assert [pending.tenant for pending in queue.put([query("new")])] == ["many"]
    assert list(queue.absent(5)) == [cold.absent] and queue.waiting_for(cold.absent) == [cold]
    cold.future.cancel()
    assert (queue.ready, queue.cold, len(queue)) == (9, 0, 9)
