"""Brings tasks into host memory, with slots of their own on the device."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from jpets.deltas.protocol import ClassKey
from jpets.engine.residency.host_cache import HostCache
from jpets.engine.residency.loading import LoadedTask, TaskLoader
from jpets.engine.tasks.entries import Entry, Resident
from jpets.engine.tasks.table import TaskTable
from jpets.errors import NotFound

log = logging.getLogger(__name__)

BYTES_PER_SECOND = 1e9
"""Assumed speed of tasks from host memory to the device, for the cost of bringing one."""


@dataclass(frozen=True)
class Coming:
    """A task on its way to the device, as of that turn of its entry."""

    entry: Entry
    resident: Resident
    turn: int
    loaded: LoadedTask


class Fetcher:
    """Reads tasks, lowers them and keeps them in ``host``. ``refuse`` tells a task's queries why it cannot be loaded.

    It counts tasks found in ``host`` and tasks that had to be loaded.
    """

    def __init__(
        self,
        loader: TaskLoader,
        tasks: TaskTable,
        host: HostCache,
        refuse: Callable[[Entry, BaseException, int], None],
        counts: Counter[str],
    ) -> None:
        self.host = host
        self._loader = loader
        self._tasks = tasks
        self._refuse = refuse
        self._counts = counts

    def place(self, entry: Entry, *, evict: bool = True) -> Coming | None:
        """The task with slots of its own; None if it cannot be read; its queries have been told why.

        Raises ``OutOfSpace`` where there are no slots now.
        """
        turn, slots = entry.turn, dict[ClassKey, int]()
        if entry.keys:  # before it is read, which may be in vain
            slots = self._tasks.slots.reserve(entry.keys, entry.tenant, evict=evict)
        loaded = self._fetch(entry, turn)
        if loaded is None or loaded.contents.keys() != slots.keys():
            self._tasks.slots.release(slots)
            if loaded is None:
                return None
            entry.keys = tuple(loaded.contents)
            slots = self._tasks.slots.reserve(entry.keys, entry.tenant, evict=evict)
        return Coming(entry, loaded.resident(entry.tenant, slots, entry.version, entry), turn, loaded)

    def _fetch(self, entry: Entry, turn: int) -> LoadedTask | None:
        """The task in host memory; None if it cannot be loaded; its queries have been told."""
        loaded = self.host.get(entry, turn)
        if loaded is not None:
            self._counts["host"] += 1
            entry.cost = loaded.nbytes / BYTES_PER_SECOND
            return loaded
        began = time.monotonic()
        try:
            loaded = self._loader.load(self._loader.lower(entry.load()), self._tasks).outlined()
        except Exception as error:  # a damaged file, a lost blob: only this task cannot be served
            if not isinstance(error, NotFound):
                log.exception("a task could not be loaded", extra={"task": entry.task})
            if entry.turn == turn:
                entry.keys = None  # a task that may not come must not make another one leave
            self._refuse(entry, error, turn)
            return None
        self._counts["load"] += 1
        entry.cost = time.monotonic() - began + loaded.nbytes / BYTES_PER_SECOND
        self.host.keep(entry, turn, loaded)
        if not self._tasks.known(entry):  # it was removed meanwhile
            self.host.drop(entry)
        return loaded
