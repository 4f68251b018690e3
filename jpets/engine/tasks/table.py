"""Which tasks an engine knows, which of them are on the device, and in which slot of which bank."""

from __future__ import annotations

import functools
import itertools
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from jpets.deltas.bank import tightest
from jpets.deltas.protocol import ClassKey
from jpets.engine.tasks.entries import DEFAULT_TENANT, Entry, Resident
from jpets.engine.tasks.slot_pool import SlotPool
from jpets.errors import NotFound, OutOfSpace, Preparing, UnknownClass
from jpets.types import Task

FORGOTTEN = 1024
"""Removed tasks whose use is still counted, about: a moved one is removed from its old device."""
MOST_SHAPES = 4096
"""Of tasks, whose classes are remembered."""


class TaskTable:
    """Thread-safe. Slots are reserved before a task's numbers are written and shown only afterwards (``publish``).

    A registered task without queries may leave the device for another one. Who leaves is chosen by GreedyDual (Young
    1994; Cao and Irani 1997): a use raises a task's rank to the rank of the last that left plus what it costs to bring
    it again, so it is least recently used where all cost the same. So many tasks of a tenant as are ``reserved`` never
    leave for another tenant's. ``on_idle`` hears, outside of the lock, when a slot may have become free.
    """

    def __init__(
        self,
        slots: Mapping[ClassKey, int],
        *,
        reserved: Mapping[str, int] | None = None,
    ) -> None:
        self._lock = threading.Lock()
        self._tightest = functools.lru_cache(maxsize=MOST_SHAPES)(lambda key: tightest(key, self.classes))
        self._pools = {key: SlotPool.of(count) for key, count in slots.items()}
        self._coming: frozenset[ClassKey] = frozenset()
        """Classes that are being made ready."""
        self._entries: dict[tuple[str, str], Entry] = {}
        self._present: set[Resident] = set()
        self._reserved = dict(reserved or {})
        least = min((pool.total for pool in self._pools.values()), default=0)
        kept = sum(self._reserved.values())
        if kept and kept >= least:
            raise ValueError(
                f"{kept} tasks are reserved for tenants and the smallest class has {least} slots; reserve fewer or "
                "start with more slots"
            )
        self._counts: Counter[str] = Counter()
        """Tasks of each tenant on the device."""
        self._clock = 0.0
        self._uses = itertools.count()
        self._asked: Counter[tuple[str, str]] = Counter()
        """Queries for each task since ``uses`` was called last."""
        self.on_idle: Callable[[], None] = lambda: None
        self.evictions = 0
        self.hits = 0
        """Queries whose task was on the device when they came."""
        self.misses = 0

    @property
    def classes(self) -> Sequence[ClassKey]:
        return tuple(self._pools)

    def fit(self, wanted: Sequence[ClassKey]) -> list[ClassKey]:
        """The class that takes each of these. Raises ``UnknownClass`` naming the ones that have none, ``Preparing``
        where these are coming."""
        fitting = [self._tightest(key) for key in wanted]
        absent = [own for own, key in zip(wanted, fitting, strict=True) if key is None]
        if absent and all(tightest(own, tuple(self._coming)) for own in absent):
            raise Preparing("tasks of this shape can be served soon, their programs are being compiled; try again then")
        if absent:
            missing, known = list(map(str, absent)), sorted(str(key) for key in self.classes)
            raise UnknownClass(
                f"no class of this server holds {missing}; it was started with {known}. "
                "Start it with --reserve auto, which makes room for any shape, or store the delta in one of these"
            )
        return [key for key in fitting if key is not None]

    def expect(self, keys: Iterable[ClassKey]) -> None:
        """These classes are being made ready."""
        with self._lock:
            self._coming |= set(keys)

    def open(self, slots: Mapping[ClassKey, int]) -> None:
        """From now on there are these classes too."""
        with self._lock:
            self._pools = {**self._pools, **{key: SlotPool.of(count) for key, count in slots.items()}}
            self._tightest.cache_clear()

    def expect_no_more(self, keys: Iterable[ClassKey]) -> None:
        """These classes have come, or do not come after all."""
        with self._lock:
            self._coming -= set(keys)

    def reserve(
        self, keys: Iterable[ClassKey], tenant: str = DEFAULT_TENANT, *, evict: bool = True
    ) -> dict[ClassKey, int]:
        """One free slot in each class, all or none; tasks without queries leave for it if need be and ``evict``.

        Raises ``OutOfSpace``.
        """
        wanted = list(keys)
        with self._lock:
            victims = self._victims(wanted, tenant)
            if victims and not evict:
                raise OutOfSpace("no free slot on the device")
            for victim in victims:
                self._evict(victim)
            return {key: self._pools[key].free.pop() for key in wanted}

    def check(self, keys: Iterable[ClassKey], tenant: str = DEFAULT_TENANT) -> None:
        """Raises what ``reserve`` would raise now; changes nothing."""
        with self._lock:
            self._victims(list(keys), tenant)

    def hopeless(self, keys: Iterable[ClassKey]) -> bool:
        """Whether some class has only tasks that never leave."""
        with self._lock:
            return any(self._pools[key].fixed >= self._pools[key].total for key in keys)

    def drain(self, keys: Iterable[ClassKey], tenant: str, waiting: Mapping[ClassKey, int]) -> None:
        """Where a class is full of tasks with queries, the one with the fewest gets no new ones: it leaves when these
        are answered. ``waiting`` is for how many slots of each class there are takers: no more tasks leave than that.
        """
        with self._lock:
            for key in keys:
                pool = self._pools[key]
                on_their_way = len(pool.free) + pool.leaving
                if on_their_way >= waiting[key] or self._victim(key, tenant, self._counts) is not None:
                    continue
                own = [
                    r
                    for r in self._present
                    if key in r.slots and r.pageable and self._may_leave(r, tenant, self._counts)
                ]
                if own:
                    self._evict(min(own, key=lambda resident: resident.queries))

    def release(self, slots: Mapping[ClassKey, int]) -> None:
        with self._lock:
            self._release(slots)
        self.on_idle()

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
        """From now on queries may ask for this task, which is brought when they do; an older version drains.

        ``keys`` are the classes that it is believed to need.
        """
        with self._lock:
            entry = self._enter(tenant, task, load, version)
            entry.pinned, entry.keys = pinned, keys
        self.on_idle()
        return entry

    def publish(
        self,
        resident: Resident,
        load: Callable[[], Task] | None = None,
        cost: float = 0.0,
        *,
        pinned: bool = False,
    ) -> None:
        """From now on queries see this task; an older version of it drains.

        Without ``load`` it stays for good; with it, to bring it again takes ``cost`` seconds, about.
        """
        task = resident.task
        with self._lock:
            entry = self._enter(resident.tenant, task.id, load or (lambda: task), resident.version)
            if load is not None:
                resident.entry, entry.keys, entry.cost = entry, tuple(resident.slots), cost
                entry.pinned = pinned
            self._settle(entry, resident)
        self.on_idle()

    def bring(self, resident: Resident, turn: int) -> bool:
        """``publish`` for what was loaded for its entry's ``turn``. False, and its slots are free again, where the task
        was removed or replaced meanwhile."""
        entry = resident.entry
        assert entry is not None
        with self._lock:
            current = self._entries.get((entry.tenant, entry.task)) is entry and entry.turn == turn
            if not current or entry.resident is not None:
                self._release(resident.slots)
                return False
            self._settle(entry, resident)
            return True

    def remove(self, tenant: str, task: str) -> Entry:
        """What was known of it. Raises ``NotFound``."""
        with self._lock:
            entry = self._entries.pop((tenant, task), None)
            if entry is None:
                raise NotFound(f"unknown task {task!r}")
            self._retire(entry)
            if len(self._asked) > FORGOTTEN + 2 * len(self._entries):  # nobody asks how often they were used
                self._asked = Counter({name: count for name, count in self._asked.items() if name in self._entries})
        self.on_idle()
        return entry

    def acquire(self, tenant: str, task: str) -> Resident | Entry:
        """The resident behind a new query, which must be given back by ``done``, or the entry of a task that is not on
        the device. Raises ``NotFound``."""
        with self._lock:
            entry = self._entries.get((tenant, task))
            if entry is None:
                raise NotFound(f"unknown task {task!r}")
            self._asked[tenant, task] += 1
            if entry.resident is None:
                self.misses += 1
                return entry
            self.hits += 1
            return self._hold(entry.resident, 1)

    def hold(self, entry: Entry, queries: int) -> Resident | None:
        """The resident of a task that may have come, for so many queries, each to be given back by ``done``."""
        with self._lock:
            return None if entry.resident is None else self._hold(entry.resident, queries)

    def known(self, entry: Entry) -> bool:
        """Whether it has not been removed."""
        with self._lock:
            return self._entries.get((entry.tenant, entry.task)) is entry

    def done(self, resident: Resident, queries: int = 1) -> None:
        with self._lock:
            resident.queries -= queries
            idle = resident.queries == 0
            if idle and resident.removed:
                self._leave(resident, -1)
                self._release(resident.slots)
            elif idle:
                self._rest(resident)
        if idle:
            self.on_idle()

    def get(self, tenant: str, task: str) -> Resident | None:
        """The task if it is on the device."""
        with self._lock:
            entry = self._entries.get((tenant, task))
            return entry.resident if entry else None

    def entry(self, tenant: str, task: str) -> Entry | None:
        """What is known of a task, on the device or not."""
        return self._entries.get((tenant, task))

    def uses(self, tenant: str = DEFAULT_TENANT) -> dict[str, int]:
        """Queries for each task of ``tenant`` since the last call."""
        with self._lock:
            names = [name for name in self._asked if name[0] == tenant]
            return {name[1]: self._asked.pop(name) for name in names}

    def all(self) -> list[Resident]:
        """The tasks on the device."""
        with self._lock:
            return list(self._present)

    def __len__(self) -> int:
        """Tasks that are known, on the device or not."""
        return len(self._entries)

    def occupancy(self) -> dict[ClassKey, tuple[int, int]]:
        """(slots in use, slots) of each class."""
        with self._lock:
            return {key: (pool.total - len(pool.free), pool.total) for key, pool in self._pools.items()}

    def _enter(self, tenant: str, task: str, load: Callable[[], Task], version: int | None) -> Entry:
        """The entry of a task, new or of its new version."""
        entry = self._entries.setdefault((tenant, task), Entry(tenant, task, load))
        self._retire(entry)  # as what it was: the old version may have been pinned
        entry.load, entry.version, entry.turn, entry.keys = load, version, entry.turn + 1, None
        entry.loading, entry.pinned = object(), False
        return entry

    def _settle(self, entry: Entry, resident: Resident) -> None:
        entry.resident, resident.loading = resident, entry.loading
        self._present.add(resident)
        self._counts[resident.tenant] += 1
        for key in resident.slots:
            self._pools[key].fixed += not resident.pageable
        self._rest(resident)

    def _hold(self, resident: Resident, queries: int) -> Resident:
        if resident.queries == 0:
            self._rouse(resident)
        resident.queries += queries
        return resident

    def _rest(self, resident: Resident) -> None:
        """It has no queries now, and may leave."""
        if resident.pageable:
            assert resident.entry is not None
            resident.rank = self._clock + resident.entry.cost, next(self._uses)
            for key in resident.slots:
                self._pools[key].idle.add((resident.rank, resident))

    def _rouse(self, resident: Resident) -> None:
        if resident.pageable:
            for key in resident.slots:
                self._pools[key].idle.discard((resident.rank, resident))

    def _victims(self, keys: Sequence[ClassKey], tenant: str) -> list[Resident]:
        """Who leaves so that each of these classes has a free slot. Raises ``OutOfSpace``."""
        chosen: list[Resident] = []
        counts = self._counts.copy() if self._reserved else self._counts
        for key in keys:
            if self._pools[key].free or any(key in resident.slots for resident in chosen):
                continue
            victim = self._victim(key, tenant, counts)
            if victim is None:
                raise OutOfSpace(
                    f"no free slot on the device in [{str(key)!r}]; remove a task or start with more slots"
                )
            chosen.append(victim)
            if self._reserved:
                counts[victim.tenant] -= 1
        return chosen

    def _victim(self, key: ClassKey, tenant: str, counts: Counter[str]) -> Resident | None:
        """Who leaves a full class for a task of ``tenant``."""
        idle = (resident for _, resident in self._pools[key].idle)
        return next((resident for resident in idle if self._may_leave(resident, tenant, counts)), None)

    def _may_leave(self, resident: Resident, tenant: str, counts: Counter[str]) -> bool:
        return resident.tenant == tenant or counts[resident.tenant] > self._reserved.get(resident.tenant, 0)

    def _evict(self, resident: Resident) -> None:
        assert resident.entry is not None and resident.pageable
        self._clock = max(self._clock, resident.rank[0])
        self._retire(resident.entry)
        self.evictions += 1

    def _retire(self, entry: Entry) -> None:
        resident, entry.resident = entry.resident, None
        if resident is None:
            return
        self._present.discard(resident)
        self._counts[resident.tenant] -= 1
        if not self._counts[resident.tenant]:
            del self._counts[resident.tenant]
        for key in resident.slots:
            self._pools[key].fixed -= not resident.pageable
        resident.removed = True
        if resident.queries == 0:
            self._rouse(resident)
            self._release(resident.slots)
        else:
            self._leave(resident, +1)

    def _leave(self, resident: Resident, by: int) -> None:
        for key in resident.slots:
            self._pools[key].leaving += by

    def _release(self, slots: Mapping[ClassKey, int]) -> None:
        for key, slot in slots.items():
            self._pools[key].free.append(slot)
