"""Reads the files of groups: each once for all students that come to memory together."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from functools import partial

from jpets.engine.interface import Serves
from jpets.engine.students.group import Group
from jpets.types import Task

AT_ONCE = 16
"""Groups with students that were read and wait to be taken: each holds a part of a file. It is as many as an engine's
readers have to read at most, so that few are read again."""


class GroupFiles:
    """What one student's reading finds of the others is kept for those that are wanted too, until they take it, or
    nobody waits for the group any more. ``engine`` has the students. Thread-safe.
    """

    def __init__(self, engine: Serves) -> None:
        self._engine = engine
        self._left: OrderedDict[Group, dict[int, Task]] = OrderedDict()
        """Students that were read and not taken, the group that was read first in front."""
        self._changes = threading.Lock()
        """Held for moments, never while a file is read."""

    def loader(self, group: Group, at: int) -> Callable[[], Task]:
        """What reads one student."""
        return partial(self._load, group, at)

    def want(self, group: Group, count: int) -> None:
        """The first ``count`` students are to be in memory; a group may have fewer."""
        with self._changes:
            group.wanted = max(group.wanted, min(count, len(group.ids)))

    def forget(self, group: Group) -> None:
        """Nobody waits for the group's students."""
        with self._changes:
            group.wanted = 0
            self._left.pop(group, None)

    def _load(self, group: Group, at: int) -> Task:
        with group.reading:
            if (taken := self._take(group, at)) is not None:
                return taken
            students = group.read()  # where this fails, each other student tries for itself
            self._leave(group, {other: students[other] for other in self._absent(group) if other != at})
            return students[at]

    def _absent(self, group: Group) -> list[int]:
        """The wanted students that are not in memory."""
        tenant, wanted = group.entry.tenant, group.ids[: group.wanted]
        return [at for at, id in enumerate(wanted) if self._engine.tier(id, tenant=tenant) == "repository"]

    def _take(self, group: Group, at: int) -> Task | None:
        with self._changes:
            left = self._left.get(group, {})
            taken = left.pop(at, None)
            if not left:
                self._left.pop(group, None)
        return taken

    def _leave(self, group: Group, students: dict[int, Task]) -> None:
        with self._changes:
            wanted = {at: task for at, task in students.items() if at < group.wanted}  # nobody may wait by now
            self._left.pop(group, None)
            if wanted:
                self._left[group] = wanted
            if len(self._left) > AT_ONCE:
                self._left.popitem(last=False)


def in_memory(task: Task) -> Callable[[], Task]:
    """What reads a task that is there already."""
    return lambda: task
