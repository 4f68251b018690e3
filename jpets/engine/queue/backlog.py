"""Waiting queries in the order in which they are served: by priority, fairly among tenants, the earliest due first."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator

from sortedcontainers import SortedDict, SortedList

from jpets.engine.queue.pending import Pending
from jpets.scheduling.order.order import due, interleave, starting_time


class Backlog:
    """Waiting queries of one priority, by tenant, and the tenants' virtual times (tokens).

    A tenant without waiting queries is forgotten once the least time of the waiting ones has caught up with its own, as
    it would start there anyway. So the memory is bounded by the waiting queries and by tenants that are a little ahead.
    """

    def __init__(self) -> None:
        self._queues: dict[str, SortedList] = {}
        """tenant -> (due, number, pending), most urgent first."""
        self._places: dict[str, tuple[float, int]] = {}
        """tenant -> (virtual time, a number that rises with every tenant that becomes backlogged)."""
        self._backlogged: SortedList = SortedList()
        """(virtual time, number, tenant) of tenants with queries waiting."""
        self._idle: SortedList = SortedList()
        """The same of tenants without waiting queries, until they are forgotten."""
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
        """Counts tokens that are served to a backlogged tenant; ``level``: its time does not pass the others that
        wait."""
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
        return [entry[2] for entry in self._queues.get(tenant, [])[-count:]] if count else []

    def ordered(self) -> Iterator[Pending]:
        """The queries, most urgent first; to be read before anything changes."""
        queues = ((time, (entry[2] for entry in self._queues[tenant])) for time, _, tenant in self._backlogged)
        return interleave(queues, lambda pending: pending.tokens)

    def _forget(self) -> None:
        while self._idle and not (self._backlogged and self._idle[0][0] > self._backlogged[0][0]):
            del self._places[self._idle.pop(0)[2]]

    @staticmethod
    def _entry(pending: Pending) -> tuple[float, int, Pending]:
        return due(pending.arrived, pending.deadline), pending.number, pending


class Backlogs:
    """The backlogs of all priorities that have queries waiting."""

    def __init__(self) -> None:
        self._by_priority: SortedDict = SortedDict()
        """-priority -> Backlog."""
        self._size = 0

    def __len__(self) -> int:
        """Waiting queries."""
        return self._size

    def add(self, pending: Pending) -> None:
        if -pending.priority not in self._by_priority:
            self._by_priority[-pending.priority] = Backlog()
        self._by_priority[-pending.priority].add(pending)
        self._size += 1

    def remove(self, pending: Pending) -> None:
        backlog = self._by_priority[-pending.priority]
        backlog.remove(pending)
        self._size -= 1
        if not backlog:
            del self._by_priority[-pending.priority]

    def charge(self, party: tuple[int, str], tokens: int, *, level: bool = False) -> None:
        """See ``Backlog.charge``; ``party`` is a priority and a tenant."""
        self._by_priority[-party[0]].charge(party[1], tokens, level=level)

    def ordered(self) -> Iterator[Pending]:
        """The queries, most urgent first; to be read before anything changes."""
        return itertools.chain.from_iterable(backlog.ordered() for backlog in self._by_priority.values())

    def counts(self, most: int) -> Counter[tuple[int, str]]:
        """How many queries of each party wait, up to priority ``most``."""
        return Counter(
            {
                (-key, tenant): count
                for key, backlog in self._by_priority.items()
                if key >= -most
                for tenant, count in backlog.counts().items()
            }
        )

    def least_urgent(self, party: tuple[int, str], count: int) -> list[Pending]:
        backlog = self._by_priority.get(-party[0])
        return backlog.least_urgent(party[1], count) if backlog else []

    def clear(self) -> None:
        self._by_priority.clear()
        self._size = 0
