"""The bounded queue where queries wait."""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable, Container, Hashable, Sequence
from concurrent.futures import Future
from functools import partial

from sortedcontainers import SortedList

from jpets.engine.batch.rows import Row
from jpets.engine.queue.backlog import Backlogs
from jpets.engine.queue.cold import ColdBacklogs
from jpets.engine.queue.making_room import dispensable
from jpets.engine.queue.pending import Pending
from jpets.engine.tasks.entries import Entry, Resident
from jpets.errors import SHUTTING_DOWN, Saturated, TooLarge
from jpets.types import Result

WINDOW = 1024
"""Waiting queries that are considered together, most urgent first."""


class PendingQueue:
    """Bounded; a submission is refused as a whole. A full queue pushes out queries of the tenant that fills it.

    Higher priority first; within a priority, tenants share by tokens served; within a tenant, the earliest due first.
    Cold queries wait in an order of their own until ``warm``; in it their tenants share the work of bringing tasks.
    ``left`` is called, on the thread that cancelled, with each query that was cancelled while it waited: the query has
    left the queue already, and the callee has to answer it. Every operation on one query takes logarithmic time.
    """

    def __init__(self, limit: int, left: Callable[[Pending], None]) -> None:
        self._limit = limit
        self._left = left
        self._waiting: dict[int, Pending] = {}
        self._ready, self._cold = Backlogs(), ColdBacklogs()
        self._deadlines: SortedList = SortedList()
        """(deadline, number) of queries with a deadline."""
        self.changed = threading.Condition()
        self.closed = False
        self.arrivals = 0
        """Rises whenever more queries could run."""
        self.ready_since = time.monotonic()
        """When the first of the queries that could run came (``time.monotonic``); before that none could."""

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def ready(self) -> int:
        """Waiting queries that could run now."""
        return len(self._ready)

    @property
    def cold(self) -> int:
        return len(self._cold)

    def put(self, items: Sequence[Pending]) -> list[Pending]:
        """Adds a tenant's queries. Raises ``Saturated`` when full or closed, ``TooLarge`` for more than may ever wait.

        A full queue makes room for a tenant with few waiting queries: it pushes out the least urgent queries of tenants
        with more, of no higher priority. These are returned for the caller to answer.
        """
        with self.changed:
            if self.closed:
                raise Saturated(SHUTTING_DOWN)
            if len(items) > self._limit:
                raise TooLarge(
                    f"{len(items)} queries came together and at most {self._limit} may wait (--max-queue); send fewer "
                    "at a time"
                )
            excess = len(self._waiting) + len(items) - self._limit
            pushed = self._make_room(items[0].party, len(items), excess) if excess > 0 else []
            for pending in items:
                pending.queued = True  # first: where this is interrupted, nobody may release its task
                if pending.cold:
                    self._cold.add(pending)
                else:
                    self._become_ready(pending)
                self._waiting[pending.number] = pending
            self._deadlines.update((p.deadline, p.number) for p in items if p.deadline is not None)
            self.arrivals += 1
            self.changed.notify_all()
        for pending in items:  # by number: a future that held its query would be a cycle
            pending.future.add_done_callback(partial(self._done, pending.number))
        return pushed

    def most_urgent(self, count: int) -> list[Pending]:
        """Up to ``count`` waiting queries that could run now, most urgent first; they stay in the queue."""
        with self.changed:
            return list(itertools.islice(self._ready.ordered(), count))

    def absent(self, count: int) -> dict[Entry, float]:
        """Up to ``count`` tasks that cold queries wait for, the most urgent first, each with the time since which its
        most urgent query has waited."""
        with self.changed:
            return self._cold.absent(count)

    def waiting_for(self, entry: Entry) -> list[Pending]:
        """The cold queries of a task."""
        with self.changed:
            return self._cold.waiting_for(entry)

    def warm(self, rows: Sequence[tuple[Pending, Row]], resident: Resident) -> list[Pending]:
        """These cold queries of a task that has come can run now, with rows of their own; returns those that still
        waited."""
        with self.changed:
            moved = [(pending, row) for pending, row in rows if pending.number in self._waiting]
            for pending, row in moved:
                self._cold.charge(pending.party, pending.tokens)
                self._cold.remove(pending)
                pending.row, pending.resident, pending.absent, pending.query = row, resident, None, None
                self._become_ready(pending)
            self.arrivals += 1
            self.changed.notify_all()
            return [pending for pending, _ in moved]

    def put_back(self, items: Sequence[Pending]) -> list[Pending]:
        """Queries that were served and need another step wait again, with the turn that they had; the limit does not
        apply to them. Returns those that cannot wait: the queue is closed, or their clients have left."""
        with self.changed:
            refused = []
            for pending in items:
                if self.closed or pending.future.cancelled():
                    refused.append(pending)
                    continue
                self._waiting[pending.number] = pending
                self._become_ready(pending)
                if pending.deadline is not None:
                    self._deadlines.add((pending.deadline, pending.number))
            self.arrivals += 1
            self.changed.notify_all()
            return refused

    def earliest_deadline(self) -> float | None:
        with self.changed:
            return self._deadlines[0][0] if self._deadlines else None

    def expire(self, now: float) -> list[Pending]:
        """Takes out every query with a deadline up to ``now``, for the caller to answer."""
        with self.changed:
            numbers = [number for _, number in self._deadlines.irange(maximum=(now, float("inf")))]
            return self._remove([self._waiting[number] for number in numbers])

    def serve(self, items: Sequence[Pending], keeping: Container[Hashable] = ()) -> list[Pending]:
        """``remove`` for queries that are going to be computed: their tenants pay for the tokens.

        The parties of ``keeping`` use less than their part of the device, and do not fall behind others because of
        this.
        """
        with self.changed:
            found = [pending for pending in items if pending.number in self._waiting]
            tokens: Counter[tuple[int, str]] = Counter()
            for pending in found:
                tokens[pending.party] += pending.tokens
            for (priority, tenant), count in tokens.items():
                self._ready.charge((priority, tenant), count, level=(priority, tenant) in keeping)
            return self._remove(found)

    def remove(self, items: Sequence[Pending]) -> list[Pending]:
        """Takes these out; returns those that were still in the queue. A query is answered by the caller that took it
        out."""
        with self.changed:
            return self._remove([pending for pending in items if pending.number in self._waiting])

    def drain(self) -> list[Pending]:
        """Takes out all that waits now, for the caller to answer."""
        with self.changed:
            return self._remove(list(self._waiting.values()))

    def close(self) -> list[Pending]:
        """Refuses queries from now on; returns those still waiting."""
        with self.changed:
            self.closed = True
            left = list(self._waiting.values())
            for kept in (self._waiting, self._ready, self._cold, self._deadlines):
                kept.clear()
            self.changed.notify_all()
            return left

    def _make_room(self, party: tuple[int, str], coming: int, excess: int) -> list[Pending]:
        """Takes ``excess`` queries of other parties out. Raises ``Saturated``."""
        chosen = dispensable(self._ready, self._cold, party, coming, excess)
        if chosen is None:
            raise Saturated(f"the queue is full: its limit is {self._limit} queries; try again in a second")
        return self._remove(chosen)

    def _remove(self, items: list[Pending]) -> list[Pending]:
        for pending in items:
            del self._waiting[pending.number]
            if pending.deadline is not None:
                self._deadlines.remove((pending.deadline, pending.number))
            (self._cold if pending.cold else self._ready).remove(pending)
        return items

    def _become_ready(self, pending: Pending) -> None:
        if not self._ready:
            self.ready_since = time.monotonic()
        self._ready.add(pending)

    def _done(self, number: int, future: Future[Result]) -> None:
        if not future.cancelled():
            return
        with self.changed:
            pending = self._waiting.get(number)
            if pending is None:
                return
            self._remove([pending])
        self._left(pending)
