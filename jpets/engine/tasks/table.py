"""Which tasks an engine knows by name, on the device or not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from jpets.deltas.protocol import ClassKey
from jpets.engine.tasks.entries import Entry, Resident
from jpets.engine.tasks.fitting import Fitting
from jpets.engine.tasks.slots import Slots
from jpets.errors import NotFound
from jpets.types import Task, TaskName

FORGOTTEN = 1024
"""Most removed tasks with uses still counted, about: a moved task is removed from its old device."""


class TaskTable:
    """Thread-safe. Slots are reserved (``Slots``) before a task's numbers are written, and shown only afterwards
    (``publish``, ``bring``). ``fitting`` knows the classes for which ``slots`` has slots."""

    def __init__(self, slots: Mapping[ClassKey, int], *, reserved: Mapping[str, int] | None = None) -> None:
        self.slots = Slots(slots, reserved)
        self.fitting = Fitting(slots)
        self._lock = self.slots.lock
        self._entries: dict[tuple[str, str], Entry] = {}
        self._asked: Counter[tuple[str, str]] = Counter()
        """Queries for each task since ``uses`` was called last."""
        self.hits = 0
        """Queries that found their task on the device."""
        self.misses = 0

    @property
    def classes(self) -> Sequence[ClassKey]:
        return self.fitting.classes

    @property
    def evictions(self) -> int:
        return self.slots.evictions

    def all(self) -> list[Resident]:
        """The tasks on the device."""
        return self.slots.all()

    def occupancy(self) -> dict[ClassKey, tuple[int, int]]:
        """(slots in use, slots) of each class."""
        return self.slots.occupancy()

    def open(self, slots: Mapping[ClassKey, int]) -> None:
        """From now on these classes are there too."""
        self.slots.open(slots)
        self.fitting.add(slots)

    def register(
        self,
        tenant: str,
        task: str,
        load: Callable[[], Task],
        version: int | None = None,
        *,
        pinned: bool = False,
        keys: tuple[ClassKey, ...] | None = None,
    ) -> Entry:
        """From now on queries may ask for this task, which is then brought; an older version drains.

        ``keys`` are the classes that it probably needs.
        """
        with self._lock:
            entry = self._enter(tenant, task, load, version)
            entry.pinned, entry.keys = pinned, keys
        self.slots.on_idle()
        return entry

    def publish(
        self,
        resident: Resident,
        load: Callable[[], Task] | None = None,
        cost: float = 0.0,
        *,
        pinned: bool = False,
    ) -> None:
        """From now on queries get this task; an older version of it drains.

        Without ``load`` it stays for good; with it, bringing it again takes about ``cost`` seconds.
        """
        task = resident.task
        with self._lock:
            entry = self._enter(resident.tenant, task.id, load or (lambda: task), resident.version)
            if load is not None:
                resident.entry, entry.keys, entry.cost = entry, tuple(resident.slots), cost
                entry.pinned = pinned
            self.slots.settle(entry, resident)
        self.slots.on_idle()

    def bring(self, resident: Resident, turn: int) -> bool:
        """``publish`` for a task loaded for its entry's ``turn``. Returns False, and frees its slots, if the task was
        removed or replaced meanwhile."""
        entry = resident.entry
        assert entry is not None
        with self._lock:
            current = self._entries.get((entry.tenant, entry.task)) is entry and entry.turn == turn
            if not current or entry.resident is not None:
                self.slots.pools.give_back(resident.slots)
                return False
            self.slots.settle(entry, resident)
            return True

    def remove(self, tenant: str, task: str) -> Entry:
        """Removes a task, and returns its entry. Raises ``NotFound``."""
        with self._lock:
            entry = self._entries.pop((tenant, task), None)
            if entry is None:
                raise NotFound(f"unknown task {task!r}")
            self.slots.retire(entry)
            if len(self._asked) > FORGOTTEN + 2 * len(self._entries):  # ``uses`` is not called
                self._asked = Counter({name: count for name, count in self._asked.items() if name in self._entries})
        self.slots.on_idle()
        return entry

    def unload(self, tenant: str, task: str) -> None:
        """The task leaves the device, unless it never does; its next query brings it again. Raises ``NotFound``."""
        with self._lock:
            entry = self._entries.get((tenant, task))
            if entry is None:
                raise NotFound(f"unknown task {task!r}")
            if entry.resident is not None and entry.resident.pageable:
                self.slots.retire(entry)
        self.slots.on_idle()

    def acquire(self, tenant: str, task: str, queries: int = 1) -> Resident | Entry:
        """The resident for this many new queries, each to be given back by ``done``, or the entry of a task that is not
        on the device. Raises ``NotFound``."""
        with self._lock:
            entry = self._entries.get((tenant, task))
            if entry is None:
                raise NotFound(f"unknown task {task!r}")
            self._asked[tenant, task] += queries
            if entry.resident is None:
                self.misses += queries
                return entry
            self.hits += queries
            return self.slots.hold(entry.resident, queries)

    def hold(self, entry: Entry, queries: int) -> Resident | None:
        """The resident of a task that may have come, for this many queries, each to be given back by ``done``."""
        with self._lock:
            return None if entry.resident is None else self.slots.hold(entry.resident, queries)

    def done(self, resident: Resident, queries: int = 1) -> None:
        self.slots.done(resident, queries)

    def known(self, entry: Entry) -> bool:
        """Whether the entry has not been removed."""
        with self._lock:
            return self._entries.get((entry.tenant, entry.task)) is entry

    def get(self, tenant: str, task: str) -> Resident | None:
        """The task if it is on the device."""
        with self._lock:
            entry = self._entries.get((tenant, task))
            return entry.resident if entry else None

    def entry(self, tenant: str, task: str) -> Entry | None:
        """What is known of a task, on the device or not."""
        return self._entries.get((tenant, task))

    def uses(self) -> dict[TaskName, int]:
        """Queries for each task since the last call."""
        with self._lock:
            asked, self._asked = self._asked, Counter()
        return {TaskName(*name): count for name, count in asked.items()}

    def __len__(self) -> int:
        """Tasks that are known, on the device or not."""
        return len(self._entries)

    def _enter(self, tenant: str, task: str, load: Callable[[], Task], version: int | None) -> Entry:
        """The entry of a new task, or of a new version."""
        entry = self._entries.setdefault((tenant, task), Entry(tenant, task, load))
        self.slots.retire(entry)  # with its old state: the old version may have been pinned
        entry.load, entry.version, entry.turn, entry.keys = load, version, entry.turn + 1, None
        entry.loading, entry.pinned = object(), False
        return entry
