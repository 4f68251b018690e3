"""How many students answer: fewer while queries wait, more again after a quiet while (Student Parallelism sections
B.4.1 to B.4.3)."""

from __future__ import annotations

import threading
from collections.abc import Callable

from jpets.config import SizingRule


class GroupSize:
    """The number of students of all groups of an engine, by how many of their queries have no answer yet. Thread-safe.

    A *group* is one execution of all present students of a few texts (``together``); as many run side by side as the
    devices have room for, and the other queries wait in a *buffer* of such elements. ``clock`` gives seconds.
    """

    def __init__(self, rule: SizingRule, devices: int, clock: Callable[[], float]) -> None:
        self.rule, self._devices, self._clock = rule, devices, clock
        self._lock = threading.Lock()
        self._together = rule.together or 1
        self._largest = 1
        self._dropped = 0
        self._outstanding = 0
        self._quiet_since = clock()
        self.drops = 0
        """How often a student was dropped."""
        self.additions = 0
        """How often one was added again."""

    def resize(self, largest: int) -> None:
        """The largest group has so many students from now on; where some were dropped, as many answer as before."""
        with self._lock:
            self._grow()
            size = self._size
            self._largest = max(1, largest)
            self._dropped = max(0, self._largest - size) if self._dropped else 0
            self._note()

    def profiled(self, together: int) -> None:
        """A group computes so many texts at a time from now on, unless the rule has a number of its own."""
        with self._lock:
            self._grow()
            self._together = self.rule.together or max(1, together)
            self._note()

    def asked(self) -> None:
        """A query of a group comes; ``of`` then says how many students answer it. One student is dropped where as many
        elements wait as there are groups."""
        with self._lock:
            self._grow()
            self._outstanding += 1
            if self._dropped < self._largest - 1 and self._waiting >= self._groups and not self.rule.fixed:
                self._dropped += 1
                self.drops += 1
            self._note()

    def answered(self) -> None:
        """A query has its answer."""
        with self._lock:
            self._grow()
            self._outstanding -= 1
            self._note()

    def of(self, students: int) -> int:
        """How many students answer now, of a group that has so many."""
        with self._lock:
            self._grow()
            return max(1, min(students, self._size))

    @property
    def together(self) -> int:
        """Texts that a group computes at a time."""
        with self._lock:
            return self._together

    @property
    def largest(self) -> int:
        """Students of the largest group."""
        with self._lock:
            return self._largest

    @property
    def dropped(self) -> int:
        """By how many the largest group is smaller now."""
        with self._lock:
            self._grow()
            return self._dropped

    @property
    def _size(self) -> int:
        return self._largest - self._dropped

    @property
    def _groups(self) -> int:
        """Groups of the present size that run side by side."""
        return max(1, self.rule.groups * self._devices * self._largest // self._size)

    @property
    def _elements(self) -> int:
        return -(-self._outstanding // self._together)

    @property
    def _waiting(self) -> int:
        """Elements in the buffer."""
        return max(0, self._elements - self._groups)

    def _note(self) -> None:
        """The present state is quiet if nothing waits and more students are in idle groups than groups are occupied."""
        occupied = min(self._groups, self._elements)
        if self._waiting or (self._groups - occupied) * self._size <= occupied:
            self._quiet_since = float("inf")
        elif self._quiet_since == float("inf"):
            self._quiet_since = self._clock()

    def _grow(self) -> None:
        """Adds a student for each whole window that has been quiet."""
        now = self._clock()
        while self._dropped and now - self._quiet_since >= self.rule.window:
            self._dropped -= 1
            self.additions += 1
            self._quiet_since += self.rule.window
            self._note()
