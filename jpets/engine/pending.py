"""Queries between submit and answer, and the bounded queue where they wait."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from jpets.engine.assembly import Row
from jpets.engine.tasks import Resident
from jpets.errors import Saturated
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

    @property
    def urgency(self) -> tuple[int, float]:
        """Higher priority first, then whoever waits longest."""
        return -self.priority, self.arrived


class PendingQueue:
    """Bounded; refuses whole submissions rather than parts of them."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._items: list[Pending] = []
        self.changed = threading.Condition()
        self.closed = False

    def __len__(self) -> int:
        return len(self._items)

    def put(self, items: Sequence[Pending]) -> None:
        """Raises ``Saturated`` when full or closed."""
        with self.changed:
            if self.closed:
                raise Saturated("the server is shutting down; send the request to another one")
            if len(self._items) + len(items) > self._limit:
                raise Saturated(
                    f"{len(self._items)} queries are waiting and the limit is {self._limit}; try again in a second"
                )
            self._items.extend(items)
            self.changed.notify_all()

    def most_urgent(self, count: int) -> list[Pending]:
        """Up to ``count`` waiting queries, most urgent first; they stay in the queue."""
        with self.changed:
            return sorted(self._items, key=lambda pending: pending.urgency)[:count]

    def remove(self, items: Sequence[Pending]) -> list[Pending]:
        """Takes these out; returns those that were still in. Whoever took a query out is the one to answer it."""
        wanted = set(map(id, items))
        with self.changed:
            found = {id(pending) for pending in self._items if id(pending) in wanted}
            self._items = [pending for pending in self._items if id(pending) not in found]
        return [pending for pending in items if id(pending) in found]

    def close(self) -> list[Pending]:
        """Refuses from now on; returns what is still waiting."""
        with self.changed:
            self.closed = True
            left, self._items = self._items, []
            self.changed.notify_all()
            return left
