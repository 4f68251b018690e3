"""Queries between submit and answer, and the bounded queue where they wait."""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable, Container, Hashable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial

from sortedcontainers import SortedDict, SortedList

from jpets.engine.assembly import Row
from jpets.engine.tasks import Resident
from jpets.errors import SHUTTING_DOWN, Saturated
from jpets.scheduling.order import due, interleave, starting_time
from jpets.types import Result


@dataclass(eq=False)
class Pending:
    """One query on its way. Times are ``time.monotonic`` seconds."""

    task: str | None
    resident: Resident | None
    row: Row
    deadline: float | None
    priority: int
    tenant: str
    future: Future[Result] = field(default_factory=Future)
    arrived: float = field(default_factory=time.monotonic)
    number: int = field(default_factory=itertools.count().__next__)
    """Unique in the process, and rising: whoever came first has the lower one."""
    ended: bool = False
    """Answered, or known to have no client any more."""
    keep: Callable[[Result], None] | None = None
    """Hears of what was computed before the caller, who may write into it, does."""

    @property
    def tokens(self) -> int:
        return self.row.length

    @property
    def party(self) -> tuple[int, str]:
        """Whom it counts for when batches are shared out fairly."""
        return self.priority, self.tenant


class Backlog:
    """Waiting queries of one priority, by tenant, and the tenants' virtual times (tokens).

    A tenant that has nothing waiting is forgotten once the least backlogged time has caught up with its own, as it
    would start there anyway. So what is kept is bounded by what waits and by what was served a little ahead of it.
    """

    def __init__(self) -> None:
        self._queues: dict[str, SortedList] = {}
        """tenant -> (due, number, pending), most urgent first."""
        self._places: dict[str, tuple[float, int]] = {}
        """tenant -> (virtual time, a number that rises with every tenant that becomes backlogged)."""
        self._backlogged: SortedList = SortedList()
        """(virtual time, number, tenant) of those with queries waiting."""
        self._idle: SortedList = SortedList()
        """The same of those without, as far as they are not forgotten."""
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._backlogged)

    def add(self, pending: Pending) -> None:
        tenant = pending.tenant
        if tenant not in self._queues:
            known = self._places.get(tenant)
            if known is not None:
                self._idle.remove((*known, tenant))
            least = self._backlogged[0][0] if self._backlogged else None
            self._places[tenant] = starting_time(known[0] if known else None, least), next(self._numbers)
            self._backlogged.add((*self._places[tenant], tenant))
            self._queues[tenant] = SortedList()
        self._queues[tenant].add(self._entry(pending))

    def remove(self, pending: Pending) -> None:
        tenant = pending.tenant
        self._queues[tenant].remove(self._entry(pending))
        if not self._queues[tenant]:
            del self._queues[tenant]
            self._backlogged.remove((*self._places[tenant], tenant))
            self._idle.add((*self._places[tenant], tenant))
            self._forget()

    def charge(self, tenant: str, tokens: int, *, level: bool = False) -> None:
        """Counts tokens that a backlogged tenant is being served; ``level``: not past the others that wait."""
        time, number = self._places[tenant]
        self._backlogged.remove((time, number, tenant))
        charged = time + tokens
        if level and self._backlogged:
            charged = min(charged, max(time, self._backlogged[0][0]))
        self._places[tenant] = charged, number
        self._backlogged.add((*self._places[tenant], tenant))
        self._forget()

    def counts(self) -> dict[str, int]:
        """How many queries of each tenant are waiting."""
        return {tenant: len(own) for tenant, own in self._queues.items()}

    def least_urgent(self, tenant: str, count: int) -> list[Pending]:
        return [entry[2] for entry in self._queues[tenant][-count:]] if count else []

    def ordered(self) -> Iterator[Pending]:
        """Most urgent first; read before anything changes."""
        queues = ((time, (entry[2] for entry in self._queues[tenant])) for time, _, tenant in self._backlogged)
        return interleave(queues, lambda pending: pending.tokens)

    def _forget(self) -> None:
        while self._idle and not (self._backlogged and self._idle[0][0] > self._backlogged[0][0]):
            del self._places[self._idle.pop(0)[2]]

    @staticmethod
    def _entry(pending: Pending) -> tuple[float, int, Pending]:
        return due(pending.arrived, pending.deadline), pending.number, pending


class PendingQueue:
    """Bounded; a submission is refused as a whole, and when the queue is full whoever fills it makes room for others.

    Higher priority first; of one priority, tenants share by tokens served; of one tenant, the earliest due first.
    ``left`` is called, on the thread that cancelled, with each query whose future was cancelled while it waited: it is
    out already, and the callee is the one to answer it. Every operation on one query takes logarithmic time.
    """

    def __init__(self, limit: int, left: Callable[[Pending], None]) -> None:
        self._limit = limit
        self._left = left
        self._waiting: dict[int, Pending] = {}
        self._backlogs: SortedDict = SortedDict()
        """-priority -> Backlog."""
        self._deadlines: SortedList = SortedList()
        """(deadline, number) of those that have one."""
        self.changed = threading.Condition()
        self.closed = False

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, items: Sequence[Pending]) -> list[Pending]:
        """Adds a tenant's queries. Raises ``Saturated`` when full or closed.

        A full queue makes room for a tenant that has little waiting: by the least urgent queries of those that have
        more, of no higher priority. They are out then and returned, for the caller to answer.
        """
        with self.changed:
            if self.closed:
                raise Saturated(SHUTTING_DOWN)
            excess = len(self._waiting) + len(items) - self._limit
            pushed = self._remove(self._dispensable(items[0].party, len(items), excess)) if excess > 0 else []
            for pending in items:
                self._waiting[pending.number] = pending
                if -pending.priority not in self._backlogs:
                    self._backlogs[-pending.priority] = Backlog()
                self._backlogs[-pending.priority].add(pending)
            self._deadlines.update((p.deadline, p.number) for p in items if p.deadline is not None)
            self.changed.notify_all()
        for pending in items:  # a number, not the query: a future that held its query would be a cycle
            pending.future.add_done_callback(partial(self._done, pending.number))
        return pushed

    def most_urgent(self, count: int) -> list[Pending]:
        """Up to ``count`` waiting queries, most urgent first; they stay in the queue."""
        with self.changed:
            every = itertools.chain.from_iterable(backlog.ordered() for backlog in self._backlogs.values())
            return list(itertools.islice(every, count))

    def earliest_deadline(self) -> float | None:
        with self.changed:
            return self._deadlines[0][0] if self._deadlines else None

    def expire(self, now: float) -> list[Pending]:
        """Takes out every query whose deadline is not after ``now``, for the caller to answer."""
        with self.changed:
            numbers = [number for _, number in self._deadlines.irange(maximum=(now, float("inf")))]
            return self._remove([self._waiting[number] for number in numbers])

    def serve(self, items: Sequence[Pending], keeping: Container[Hashable] = ()) -> list[Pending]:
        """``remove`` for queries that are going to be computed: their tenants pay for the tokens.

        The parties of ``keeping``, who use less than their part of the device, do not fall behind others for it.
        """
        with self.changed:
            found = [pending for pending in items if pending.number in self._waiting]
            tokens: Counter[tuple[int, str]] = Counter()
            for pending in found:
                tokens[pending.party] += pending.tokens
            for (priority, tenant), count in tokens.items():
                self._backlogs[-priority].charge(tenant, count, level=(priority, tenant) in keeping)
            return self._remove(found)

    def remove(self, items: Sequence[Pending]) -> list[Pending]:
        """Takes these out; returns those that were still in. Whoever took a query out is the one to answer it."""
        with self.changed:
            return self._remove([pending for pending in items if pending.number in self._waiting])

    def close(self) -> list[Pending]:
        """Refuses from now on; returns what is still waiting."""
        with self.changed:
            self.closed = True
            left = list(self._waiting.values())
            for kept in (self._waiting, self._backlogs, self._deadlines):
                kept.clear()
            self.changed.notify_all()
            return left

    def _dispensable(self, party: tuple[int, str], coming: int, excess: int) -> list[Pending]:
        """``excess`` queries of whoever has most waiting, each of them still with as many as the party that comes."""
        counts = [
            (-count, -key, tenant)
            for key, backlog in self._backlogs.items()
            if key >= -party[0]
            for tenant, count in backlog.counts().items()
        ]
        own = coming + next((-count for count, *other in counts if tuple(other) == party), 0)
        heapq.heapify(counts)
        taken: Counter[tuple[int, str]] = Counter()
        for _ in range(excess):
            if not counts or -counts[0][0] <= own:
                raise Saturated(
                    f"{len(self._waiting)} queries are waiting and the limit is {self._limit}; try again in a second"
                )
            count, priority, tenant = counts[0]
            taken[priority, tenant] += 1
            heapq.heapreplace(counts, (count + 1, priority, tenant))
        return [
            pending
            for (priority, tenant), count in taken.items()
            for pending in self._backlogs[-priority].least_urgent(tenant, count)
        ]

    def _remove(self, items: list[Pending]) -> list[Pending]:
        for pending in items:
            del self._waiting[pending.number]
            if pending.deadline is not None:
                self._deadlines.remove((pending.deadline, pending.number))
            backlog = self._backlogs[-pending.priority]
            backlog.remove(pending)
            if not backlog:
                del self._backlogs[-pending.priority]
        return items

    def _done(self, number: int, future: Future[Result]) -> None:
        if not future.cancelled():
            return
        with self.changed:
            pending = self._waiting.get(number)
            if pending is None:
                return
            self._remove([pending])
        self._left(pending)
