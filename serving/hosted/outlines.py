"""Finds the outline of a task that queries ask for: all of it but its numbers."""

from __future__ import annotations

import threading

from cachetools import LRUCache

from jpets.engine.tasks.entries import Entry
from jpets.errors import NotFound
from jpets.types import Task, TaskName
from serving.hosted.following import Following
from serving.hosted.served import ServedTasks

REMEMBERED = 8192
"""How many outlines of tasks that are not on the device are remembered."""


class Outlines:
    """Methods block; thread-safe."""

    def __init__(self, tasks: ServedTasks, following: Following) -> None:
        self._tasks = tasks
        self._following = following
        self._outlines: LRUCache[object, Task] = LRUCache(REMEMBERED)
        self._lock = threading.Lock()

    def find(self, name: TaskName) -> Task | None:
        """The outline of the task that queries for ``name`` get, or None where that is the backbone's name.

        Raises ``NotFound``.
        """
        tasks = self._tasks
        engine = tasks.engine
        while True:
            entry = tasks.entry(name)
            if entry is None and name.id == tasks.backbone.name:
                return None
            if entry is None:
                raise NotFound(f"unknown task {name.id[:128]!r}; GET /v1/tasks lists what there is")
            version = entry.version
            try:
                return self._remembered(entry) or self.read(entry)
            except NotFound:  # deleted or replaced elsewhere
                with tasks.locks.hold(name):
                    self._following.bring_up(engine, name)
                if tasks.version(name) == version:
                    raise

    def at_hand(self, name: TaskName) -> bool:
        """Whether ``find`` has to read nothing."""
        entry = self._tasks.entry(name)
        return entry is None or self._remembered(entry) is not None

    def read(self, entry: Entry) -> Task:
        """The outline of a task from the repository; it is remembered."""
        loading, version, name = entry.loading, entry.version, TaskName(entry.tenant, entry.task)
        stored = self._tasks.repository.get(name.id, name.tenant, version)
        outline = self._tasks.repository.outline(stored) or self._tasks.read(stored, name).outlined()
        with self._lock:
            self._outlines[loading] = outline
        return outline

    def _remembered(self, entry: Entry) -> Task | None:
        if (resident := entry.resident) is not None:
            return resident.task
        with self._lock:
            return self._outlines.get(entry.loading)
