"""Which tasks are on the device, and in which slot of which bank."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from jpets.deltas import class_method
from jpets.deltas.bank import tightest
from jpets.deltas.protocol import NO_LEAD, ClassKey, Contribution, Lead
from jpets.errors import NotFound, OutOfSpace, UnknownClass
from jpets.types import Pooling, Task

DEFAULT_TENANT = "default"


@dataclass(eq=False)
class Resident:
    """A task on the device. It keeps its slots until its last query is answered, also after its removal."""

    tenant: str
    task: Task
    slots: Mapping[ClassKey, int]
    pooling: Pooling
    """Which vector the head on the device reads; not always the task's own (``fold_pooler``)."""
    longest: int
    """Most tokens of a text, what the deltas set before it taken off."""
    lead: Lead = NO_LEAD
    version: int | None = None
    queries: int = 0
    removed: bool = False
    loading: object = field(default_factory=object, repr=False)
    """Unlike that of any other loading; a task's id, and its version, can come again."""

    @functools.cached_property
    def light_slots(self) -> Mapping[ClassKey, int]:
        """What is left of its slots when its heavy deltas are part of the weights."""
        return {key: slot for key, slot in self.slots.items() if class_method(key.method).kind != "heavy"}


@dataclass
class SlotPool:
    """Free slots of one bank; 0 is never given out."""

    free: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, slots: int) -> SlotPool:
        return cls(list(range(slots - 1, 0, -1)))


class TaskTable:
    """Thread-safe. Slots are reserved before a task's numbers are written and shown only afterwards (``publish``)."""

    def __init__(self, slots: Mapping[ClassKey, int]) -> None:
        self._lock = threading.Lock()
        self._pools = {key: SlotPool.of(count) for key, count in slots.items()}
        self._tasks: dict[tuple[str, str], Resident] = {}

    @property
    def classes(self) -> Sequence[ClassKey]:
        return tuple(self._pools)

    def fit(self, parts: Sequence[Contribution]) -> list[ClassKey]:
        """The class that takes each contribution. Raises ``UnknownClass`` naming the ones that have none."""
        fitting = [tightest(part.key, self.classes) for part in parts]
        missing = [str(part.key) for part, key in zip(parts, fitting, strict=True) if key is None]
        if missing:
            known = sorted(str(key) for key in self.classes)
            raise UnknownClass(
                f"no class of this server holds {missing}; it was started with {known}. "
                "Start it with a task of that shape, or store the delta in one of these"
            )
        return [key for key in fitting if key is not None]

    def reserve(self, keys: Iterable[ClassKey]) -> dict[ClassKey, int]:
        """One free slot in each class, all or none. Raises ``OutOfSpace``."""
        wanted = list(keys)
        with self._lock:
            full = [str(key) for key in wanted if not self._pools[key].free]
            if full:
                raise OutOfSpace(f"no free slot on the device in {full}; remove a task or start with more slots")
            return {key: self._pools[key].free.pop() for key in wanted}

    def release(self, slots: Mapping[ClassKey, int]) -> None:
        with self._lock:
            self._release(slots)

    def publish(self, resident: Resident) -> None:
        """From now on queries see this task; an older version of it drains."""
        place = (resident.tenant, resident.task.id)
        with self._lock:
            old = self._tasks.get(place)
            self._tasks[place] = resident
            if old is not None:
                self._retire(old)

    def remove(self, tenant: str, task: str) -> None:
        """Raises ``NotFound``."""
        with self._lock:
            resident = self._tasks.pop((tenant, task), None)
            if resident is None:
                raise NotFound(f"unknown task {task!r}")
            self._retire(resident)

    def acquire(self, tenant: str, task: str) -> Resident:
        """The resident behind a new query, which must be given back by ``done``. Raises ``NotFound``."""
        with self._lock:
            resident = self._tasks.get((tenant, task))
            if resident is None:
                raise NotFound(f"unknown task {task!r}")
            resident.queries += 1
            return resident

    def done(self, resident: Resident) -> None:
        with self._lock:
            resident.queries -= 1
            if resident.removed and resident.queries == 0:
                self._release(resident.slots)

    def get(self, tenant: str, task: str) -> Resident | None:
        with self._lock:
            return self._tasks.get((tenant, task))

    def all(self) -> list[Resident]:
        with self._lock:
            return list(self._tasks.values())

    def occupancy(self) -> dict[ClassKey, tuple[int, int]]:
        """(slots in use, slots) of each class."""
        with self._lock:
            taken: dict[ClassKey, int] = dict.fromkeys(self._pools, 0)
            for resident in self._tasks.values():
                for key in resident.slots:
                    taken[key] += 1
            return {key: (taken[key], taken[key] + len(pool.free)) for key, pool in self._pools.items()}

    def _retire(self, resident: Resident) -> None:
        resident.removed = True
        if resident.queries == 0:
            self._release(resident.slots)

    def _release(self, slots: Mapping[ClassKey, int]) -> None:
        for key, slot in slots.items():
            self._pools[key].free.append(slot)
