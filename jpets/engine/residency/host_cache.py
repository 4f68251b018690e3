"""Loaded tasks in host memory, between ``Entry.load`` and the device."""

from __future__ import annotations

import threading
from collections import OrderedDict

from jpets.engine.residency.loading import LoadedTask
from jpets.engine.tasks.entries import Entry


class HostCache:
    """At most ``budget`` bytes of tasks; the least recently used leave first. Thread-safe."""

    def __init__(self, budget: float) -> None:
        self._lock = threading.Lock()
        self.budget = budget
        self.nbytes = 0
        self._kept: OrderedDict[Entry, tuple[int, LoadedTask]] = OrderedDict()
        """Entry -> (turn, task)."""

    def __len__(self) -> int:
        return len(self._kept)

    def __contains__(self, entry: Entry) -> bool:
        return entry in self._kept

    def get(self, entry: Entry, turn: int) -> LoadedTask | None:
        """The loaded form of that version of the task."""
        with self._lock:
            kept, loaded = self._kept.get(entry, (turn, None))
            if loaded is None or kept != turn:
                return None
            self._kept.move_to_end(entry)
            return loaded

    def keep(self, entry: Entry, turn: int, loaded: LoadedTask) -> None:
        """Replaces the task's former version. A task larger than the budget is not kept."""
        with self._lock:
            self._drop(entry)
            if loaded.nbytes > self.budget:
                return
            self._kept[entry] = turn, loaded
            self.nbytes += loaded.nbytes
            while self.nbytes > self.budget:
                self._drop(next(iter(self._kept)))

    def drop(self, entry: Entry) -> None:
        """Forgets a task in any version."""
        with self._lock:
            self._drop(entry)

    def _drop(self, entry: Entry) -> None:
        if entry in self._kept:
            self.nbytes -= self._kept.pop(entry)[1].nbytes
