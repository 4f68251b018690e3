"""Brings tasks into host memory, with slots of their own on the device."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from jpets.deltas.protocol import ClassKey
from jpets.engine.residency.delivering import Coming, Delivery
from jpets.engine.residency.host_cache import HostCache
from jpets.engine.residency.loading import LoadedTask, TaskLoader
from jpets.engine.tasks.entries import Entry, LoadFailure
from jpets.engine.tasks.table import TaskTable
from jpets.errors import EngineFailure, JpetsError, NotFound, OutOfSpace
from jpets.readers import Readers

log = logging.getLogger(__name__)

BYTES_PER_SECOND = 1e9
"""Assumed speed of tasks from host memory to the device, for the cost of bringing one."""
REST, MOST_REST = 10.0, 1.0
"""For so many times what reading took, and at most so many seconds, a task that could not be read is not read again:
clients ask again at once, and readers have other work."""


@dataclass(frozen=True)
class Reading:
    """A task that a thread has read, or tried to, as of that turn of its entry."""

    entry: Entry
    turn: int
    slots: Mapping[ClassKey, int]
    evict: bool
    loaded: LoadedTask | Exception
    seconds: float


class Fetcher:
    """Reads tasks, lowers them and keeps them in ``host``. A task that is being read is on its way, as ``size`` tells
    its bytes by its classes, if these are known.

    It counts tasks found in ``host`` and tasks that had to be loaded. One thread calls it, that of ``Residency``;
    others read. ``on_read`` is called by them.
    """

    def __init__(
        self,
        loader: TaskLoader,
        tasks: TaskTable,
        host: HostCache,
        delivery: Delivery,
        size: Callable[[Sequence[ClassKey] | None], int],
    ) -> None:
        self.host = host
        self.readers = Readers()
        self.read: deque[Reading] = deque()
        """What has been read and not yet looked at."""
        self.on_read: Callable[[], None] = lambda: None
        self._loader = loader
        self._tasks = tasks
        self._delivery = delivery
        self._size = size

    def may_place(self, entry: Entry) -> bool:
        """Whether the task is in host memory, or soon would be."""
        return entry in self.host or not self.readers.full

    def place(self, entry: Entry, *, evict: bool = True) -> Coming | None:
        """The task with slots of its own; None if it has to be read: ``placed`` has it then. Where it could not be read
        just now, its queries are told that again.

        Raises ``OutOfSpace`` where there are no slots now.
        """
        turn, slots = entry.turn, dict[ClassKey, int]()
        if (failure := entry.failure) is not None and failure.turn == turn and time.monotonic() < failure.until:
            self._delivery.refuse(entry, failure.error, turn)
            return None
        if entry.keys:  # before it is read, which may be in vain
            slots = self._tasks.slots.reserve(entry.keys, entry.tenant, evict=evict)
        loaded = self.host.get(entry, turn)
        if loaded is None:
            self._delivery.begin(entry, self._size(entry.keys))
            self.readers.submit(partial(self._read, entry, turn, slots, evict))
            return None
        self._delivery.counts["host"] += 1
        entry.cost = loaded.nbytes / BYTES_PER_SECOND
        return self._with_slots(entry, turn, slots, loaded, evict)

    def placed(self) -> Iterator[tuple[Entry, Coming | None]]:
        """The tasks that have been read since, with slots of their own; None for one that cannot be read, whose queries
        have been told why, and for one that found no slots."""
        while self.read:
            done = self.read.popleft()
            entry, loaded = done.entry, done.loaded
            self._delivery.coming.pop(entry, None)
            if isinstance(loaded, Exception):
                self._failed(done, loaded)
                yield entry, None
                continue
            self._delivery.counts["load"] += 1
            if not (known := self._tasks.known(entry)):  # it was removed meanwhile
                self.host.drop(entry)
            if not known or entry.turn != done.turn:  # nobody waits for it, and no other task has to leave
                self._tasks.slots.release(done.slots)
                yield entry, None
                continue
            entry.cost = done.seconds + loaded.nbytes / BYTES_PER_SECOND
            try:
                yield entry, self._with_slots(entry, done.turn, done.slots, loaded, done.evict)
            except OutOfSpace:  # its classes were not known; the next look knows them
                yield entry, None

    def _with_slots(
        self, entry: Entry, turn: int, slots: Mapping[ClassKey, int], loaded: LoadedTask, evict: bool
    ) -> Coming:
        entry.failure = None
        if loaded.contents.keys() != slots.keys():
            self._tasks.slots.release(slots)
            entry.keys = tuple(loaded.contents)
            slots = self._tasks.slots.reserve(entry.keys, entry.tenant, evict=evict)
        return Coming(entry, loaded.resident(entry.tenant, slots, entry.version, entry), turn, loaded)

    def _failed(self, done: Reading, error: Exception) -> None:
        entry = done.entry
        if not isinstance(error, NotFound):
            log.error("a task could not be loaded", exc_info=error, extra={"task": entry.task})
        if entry.turn == done.turn:
            entry.keys = None  # a task that may not come must not make another one leave
            until = time.monotonic() + min(MOST_REST, REST * done.seconds)
            bare = error if isinstance(error, JpetsError) else EngineFailure(f"task {entry.task!r} could not be loaded")
            bare.__cause__ = bare.__context__ = bare.__traceback__ = None  # they hold what was read
            entry.failure = LoadFailure(bare, done.turn, until)
        self._tasks.slots.release(done.slots)
        self._delivery.refuse(entry, error, done.turn)

    def _read(self, entry: Entry, turn: int, slots: Mapping[ClassKey, int], evict: bool) -> None:
        """A reader's."""
        began = time.monotonic()
        loaded: LoadedTask | Exception
        try:
            loaded = self._loader.load(self._loader.lower(entry.load()), self._tasks).outlined()
            self.host.keep(entry, turn, loaded)
        except Exception as error:  # noqa: BLE001 (a damaged file, a lost blob: only this task cannot be served)
            loaded = error
        seconds = max(time.monotonic() - began, entry.read_seconds)
        self.read.append(Reading(entry, turn, slots, evict, loaded, seconds))
        self.on_read()
