"""Tasks that are to be on the device before a query asks for them."""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterable

from jpets.deltas.protocol import ClassKey
from jpets.engine.tasks.entries import Entry
from jpets.engine.tasks.table import TaskTable


class Warming:
    """The tasks still to come, in order. They take only free slots."""

    def __init__(self, tasks: TaskTable) -> None:
        self._tasks = tasks
        self._wanted: deque[Entry] = deque()
        self._on_their_way: set[Entry] = set()
        self._full: set[ClassKey] = set()
        """Classes without a free slot for them."""

    def __len__(self) -> int:
        """How many tasks are not there yet."""
        return len(self._wanted) + len(self._on_their_way)

    @property
    def wanted(self) -> bool:
        """Whether some have not been taken yet."""
        return bool(self._wanted)

    def add(self, entries: Iterable[Entry]) -> None:
        self._full.clear()
        self._wanted.extend(entries)

    def take(self) -> Entry:
        """The next task, on its way until it has ``settled``."""
        entry = self._wanted[0]
        self._on_their_way.add(entry)  # before it leaves the others: their number must always include it
        self._wanted.popleft()
        return entry

    def settled(self, entry: Entry) -> None:
        """The task is there, or does not come."""
        if entry in self._on_their_way:
            entry.settled()
            self._on_their_way.discard(entry)

    def may_come(self, entry: Entry, coming: Container[Entry]) -> bool:
        """Whether the task is absent, not among ``coming``, and none of its classes was found full."""
        absent = entry.resident is None and entry not in coming and self._tasks.known(entry)
        return absent and self._full.isdisjoint(entry.keys or ())

    def found_full(self, keys: Iterable[ClassKey]) -> None:
        """There was no free slot in some of these classes."""
        self._full.update(keys)
