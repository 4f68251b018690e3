"""Reads the files of groups: each once for all students that come to memory together."""

from __future__ import annotations

import dataclasses
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from jpets.engine.interface import Serves
from jpets.engine.students.group import Found, Group
from jpets.engine.tasks.entries import FilePart
from jpets.types import Task

AT_ONCE = 16
"""Groups with students that were read and wait to be taken: each holds a part of a file. It is as many as an engine's
readers have to read at most, so that few are read again."""


class GroupFiles:
    """What one student's reading finds of the others, or why it fails, is kept for those that are waited for, until
    they take it, or nobody waits for them any more. ``engine`` has the students. Thread-safe.
    """

    def __init__(self, engine: Serves) -> None:
        self._engine = engine
        self._left: OrderedDict[Group, dict[int, Found]] = OrderedDict()
        """Students that were read and not taken, the group that was read first in front."""
        self._changes = threading.Lock()
        """Held for moments, never while a file is read."""

    def loader(self, group: Group, at: int) -> Callable[[], Task]:
        """What reads one student."""
        return StudentFile(self, group, at)

    def want(self, group: Group, count: int) -> None:
        """A query waits for the first ``count`` students; a group may have fewer."""
        with self._changes:
            group.wanted = max(group.wanted, min(count, len(group.ids)))
            self._try_again(group)

    def forget(self, group: Group) -> None:
        """No query waits for the group's students."""
        with self._changes:
            group.wanted = 0
            self._tidy(group)

    def warm(self, group: Group) -> None:
        """All students are to come to the device, each until it has ``settled``."""
        with self._changes:
            group.warming.update(range(len(group.ids)))
            self._try_again(group)

    def settled(self, group: Group, at: int) -> None:
        """A student of ``warm`` is there, or does not come."""
        with self._changes:
            group.warming.discard(at)
            self._tidy(group)

    def drop(self, group: Group) -> None:
        """Nobody waits for a group that leaves."""
        with self._changes:
            group.wanted = 0
            group.warming.clear()
            self._tidy(group)

    def load(self, group: Group, at: int) -> Task:
        """One student. All that ask while the file is read get what that reading finds.

        Raises what ``Group.read`` does.
        """
        with self._changes:
            if (left := self._take(group, at)) is not None:
                return _given(left)
            reading, begins = group.reading, group.reading is None
            if reading is None:
                reading = group.reading = Future()
        if begins:
            self._read(group, at, reading)
        found = reading.result()[at]
        with self._changes:
            self._take(group, at)  # the reading left it for this student, which has it now
        return _given(found)

    def _read(self, group: Group, at: int, reading: Future[Sequence[Found]]) -> None:
        """Reads the file, and leaves what it finds for the other students that are waited for and not in memory."""
        found, absent = _read_all(group), list[int]()
        try:
            absent = self._absent(group)
        finally:  # others wait for it, whatever happens
            with self._changes:
                group.reading = None
                self._leave(group, {other: found[other] for other in absent if other != at})
            reading.set_result(found)

    def _absent(self, group: Group) -> list[int]:
        """The students that are waited for and not in memory."""
        tenant, awaited = group.entry.tenant, [(at, id) for at, id in enumerate(group.ids) if group.awaits(at)]
        return [at for at, id in awaited if self._engine.tier(id, tenant=tenant) == "repository"]

    def _take(self, group: Group, at: int) -> Found | None:
        """The lock is held, as for all that follow."""
        taken = self._left.get(group, {}).pop(at, None)
        self._tidy(group)
        return taken

    def _leave(self, group: Group, students: dict[int, Found]) -> None:
        self._left.pop(group, None)
        self._left[group] = students
        self._tidy(group)  # nobody may wait by now
        if len(self._left) > AT_ONCE:
            self._left.popitem(last=False)

    def _tidy(self, group: Group) -> None:
        """Drops what nobody waits for."""
        awaited = {at: found for at, found in self._left.get(group, {}).items() if group.awaits(at)}
        if awaited:
            self._left[group] = awaited
        else:
            self._left.pop(group, None)

    def _try_again(self, group: Group) -> None:
        """A failure is told to those who asked before it."""
        if any(isinstance(found, BaseException) for found in self._left.get(group, {}).values()):
            del self._left[group]


@dataclasses.dataclass(frozen=True)
class StudentFile(FilePart):
    """Reads one student of a group by ``files``."""

    files: GroupFiles
    group: Group
    at: int

    def __call__(self) -> Task:
        return self.files.load(self.group, self.at)

    @property
    def seconds(self) -> float:
        return self.group.seconds

    def settled(self) -> None:
        self.files.settled(self.group, self.at)


def in_memory(task: Task) -> Callable[[], Task]:
    """What reads a task that is there already."""
    return lambda: task


def _read_all(group: Group) -> Sequence[Found]:
    """Every student; where the file cannot be read, why."""
    try:
        return group.read()
    except BaseException as error:  # noqa: BLE001 (it is told to all that wait)
        return [error] * len(group.ids)


def _given(found: Found) -> Task:
    if isinstance(found, BaseException):
        raise found
    return found
