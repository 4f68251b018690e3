"""Which tasks are on the device, in which slots, and which of them leave for others."""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from jpets.deltas.protocol import ClassKey
from jpets.engine.tasks.entries import Entry, Resident
from jpets.engine.tasks.slot_pool import SlotPool, SlotPools
from jpets.errors import InvalidInput, OutOfSpace
from jpets.types import DEFAULT_TENANT


class Slots:
    """Thread-safe. ``lock`` also guards the table of tasks; methods that say so must be called with it held.

    A registered task without queries may leave the device for another one. GreedyDual (Young 1994; Cao and Irani 1997)
    chooses it: a use sets a task's rank to the rank of the last task that left, plus the cost of bringing the task
    again. With equal costs, this is least recently used. Up to ``reserved`` tasks of a tenant never leave for
    another tenant's. ``on_idle`` is called, without the lock, when a slot may have become free.

    It has more than 20 methods, as whatever counts slots changes under one lock.
    """

    def __init__(self, slots: Mapping[ClassKey, int], reserved: Mapping[str, int] | None = None) -> None:
        self.lock = threading.Lock()
        self.pools = SlotPools(slots)
        self._present: set[Resident] = set()
        self._reserved = dict(reserved or {})
        least = min((pool.total for pool in self.pools.values()), default=0)
        kept = sum(self._reserved.values())
        if kept and kept >= least:
            raise InvalidInput(
                f"{kept} tasks are reserved for tenants and the smallest class has {least} slots; reserve fewer or "
                "start with more slots"
            )
        self._counts: Counter[str] = Counter()
        """Tasks of each tenant on the device."""
        self._clock = 0.0
        self._uses = itertools.count()
        self.on_idle: Callable[[], None] = lambda: None
        self.evictions = 0

    def open(self, slots: Mapping[ClassKey, int]) -> None:
        """From now on these classes are there too."""
        with self.lock:
            self.pools.open(slots)

    def reserve(
        self, keys: Iterable[ClassKey], tenant: str = DEFAULT_TENANT, *, evict: bool = True
    ) -> dict[ClassKey, int]:
        """One free slot in each class, all or none; tasks without queries leave for it if necessary, and if ``evict``.

        Raises ``OutOfSpace``.
        """
        wanted = list(keys)
        with self.lock:
            victims = self._victims(wanted, tenant)
            if victims and not evict:
                raise OutOfSpace("no free slot on the device")
            for victim in victims:
                self._evict(victim)
            return self.pools.take(wanted)

    def check(self, keys: Iterable[ClassKey], tenant: str = DEFAULT_TENANT) -> None:
        """Raises what ``reserve`` would raise now; changes nothing."""
        with self.lock:
            self._victims(list(keys), tenant)

    def lacking(self, keys: Iterable[ClassKey], tenant: str, *, evict: bool = True) -> set[ClassKey]:
        """Those of the classes in which ``reserve`` finds no slot now."""
        with self.lock:
            full = [key for key in keys if not self.pools[key].free]
            return {key for key in full if not evict or self._victim(key, tenant, self._counts) is None}

    def hopeless(self, keys: Iterable[ClassKey], tenant: str | None = None) -> bool:
        """Whether one of these classes has only tasks that never leave, or, for a ``tenant``, that do not leave for one
        of its own: others have reserved them."""
        with self.lock:
            return any(self._held(key, tenant) for key in keys)

    def _held(self, key: ClassKey, tenant: str | None) -> bool:
        pool = self.pools[key]
        if pool.fixed >= pool.total:
            return True
        if tenant is None or not self._reserved or pool.free or pool.leaving:
            return False
        own = [resident for resident in self._present if key in resident.slots]
        if len(own) < pool.total:  # some are on their way
            return False
        return not any(each.pageable and self._may_leave(each, tenant, self._counts) for each in own)

    def drain(self, keys: Iterable[ClassKey], tenant: str, waiting: Mapping[ClassKey, int]) -> None:
        """In a class full of tasks with queries, the task with the fewest gets no new ones, and leaves when these are
        answered. ``waiting``: for how many slots of each class there are takers; no more tasks leave than that.
        """
        with self.lock:
            for key in keys:
                pool = self.pools[key]
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
        """Frees slots that ``reserve`` gave and that no task came for."""
        with self.lock:
            self.pools.give_back(slots)
        self.on_idle()

    def all(self) -> list[Resident]:
        """The tasks on the device."""
        with self.lock:
            return list(self._present)

    def occupancy(self) -> dict[ClassKey, tuple[int, int]]:
        """(slots in use, slots) of each class."""
        with self.lock:
            return {key: (pool.total - len(pool.free), pool.total) for key, pool in self.pools.items()}

    def room(self) -> dict[ClassKey, int]:
        """How many tasks of each class could come now: as there are free slots, and slots of tasks without queries that
        may leave for any other tenant's."""
        with self.lock:
            return {
                key: len(pool.free) + _yielding(pool, self._counts, self._reserved) for key, pool in self.pools.items()
            }

    def settle(self, entry: Entry, resident: Resident) -> None:
        """The lock is held. The task is on the device from now on, in reserved slots."""
        entry.resident, resident.loading = resident, entry.loading
        self._present.add(resident)
        self._counts[resident.tenant] += 1
        self.pools.count_fixed(resident, not resident.pageable)
        self._rest(resident)

    def retire(self, entry: Entry) -> None:
        """The lock is held. The task, if it is on the device, gets no more queries; its slots become free with the last
        answer."""
        resident, entry.resident = entry.resident, None
        if resident is None:
            return
        self._present.discard(resident)
        self._counts[resident.tenant] -= 1
        if not self._counts[resident.tenant]:
            del self._counts[resident.tenant]
        self.pools.count_fixed(resident, -(not resident.pageable))
        resident.removed = True
        if resident.queries == 0:
            self._rouse(resident)
            self.pools.give_back(resident.slots)
        else:
            self.pools.count_leaving(resident, +1)

    def hold(self, resident: Resident, queries: int) -> Resident:
        """The lock is held. Adds this many queries; each is to be given back by ``done``."""
        if resident.queries == 0:
            self._rouse(resident)
        resident.queries += queries
        return resident

    def done(self, resident: Resident, queries: int = 1) -> None:
        """This many of its queries have been answered."""
        with self.lock:
            resident.queries -= queries
            idle = resident.queries == 0
            if idle and resident.removed:
                self.pools.count_leaving(resident, -1)
                self.pools.give_back(resident.slots)
            elif idle:
                self._rest(resident)
        if idle:
            self.on_idle()

    def _rest(self, resident: Resident) -> None:
        """The task has no queries now, and may leave."""
        if resident.pageable:
            assert resident.entry is not None
            resident.rank = self._clock + resident.entry.cost, next(self._uses)
            self.pools.rest(resident)

    def _rouse(self, resident: Resident) -> None:
        if resident.pageable:
            self.pools.rouse(resident)

    def _victims(self, keys: Sequence[ClassKey], tenant: str) -> list[Resident]:
        """Tasks that have to leave so that each of these classes has a free slot. Raises ``OutOfSpace``."""
        chosen: list[Resident] = []
        counts = self._counts.copy() if self._reserved else self._counts
        for key in keys:
            if self.pools[key].free or any(key in resident.slots for resident in chosen):
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
        """The task that leaves a full class for one of ``tenant``."""
        idle = (resident for _, resident in self.pools[key].idle)
        return next((resident for resident in idle if self._may_leave(resident, tenant, counts)), None)

    def _may_leave(self, resident: Resident, tenant: str, counts: Counter[str]) -> bool:
        return resident.tenant == tenant or counts[resident.tenant] > self._reserved.get(resident.tenant, 0)

    def _evict(self, resident: Resident) -> None:
        assert resident.entry is not None and resident.pageable
        self._clock = max(self._clock, resident.rank[0])
        self.retire(resident.entry)
        self.evictions += 1


def _yielding(pool: SlotPool, counts: Mapping[str, int], reserved: Mapping[str, int]) -> int:
    """How many of its tasks could leave now, where tenants have ``counts`` tasks on the device."""
    if not reserved:
        return len(pool.idle)
    idle = Counter(resident.tenant for _, resident in pool.idle)
    return sum(min(count, max(0, counts[tenant] - reserved.get(tenant, 0))) for tenant, count in idle.items())
