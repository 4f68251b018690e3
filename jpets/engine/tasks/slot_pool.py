"""The slots of banks: which are free, and which could become free."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from sortedcontainers import SortedList

from jpets.deltas.protocol import ClassKey
from jpets.engine.tasks.entries import Resident


@dataclass
class SlotPool:
    """Free slots of one bank; 0 is never given out."""

    free: list[int] = field(default_factory=list)
    idle: SortedList = field(default_factory=SortedList)
    """(rank, resident) of tasks that could leave."""
    fixed: int = 0
    """Slots of tasks that never leave."""
    leaving: int = 0
    """Slots of removed tasks with queries that are not answered yet."""
    total: int = 0

    @classmethod
    def of(cls, slots: int) -> SlotPool:
        return cls(list(range(slots - 1, 0, -1)), total=slots - 1)


class SlotPools(Mapping[ClassKey, SlotPool]):
    """The pools of all banks. A task has a slot in each of its classes' banks, so it is counted in several pools."""

    def __init__(self, slots: Mapping[ClassKey, int]) -> None:
        self._pools = {key: SlotPool.of(count) for key, count in slots.items()}

    def __getitem__(self, key: ClassKey) -> SlotPool:
        return self._pools[key]

    def __iter__(self) -> Iterator[ClassKey]:
        return iter(self._pools)

    def __len__(self) -> int:
        return len(self._pools)

    def open(self, slots: Mapping[ClassKey, int]) -> None:
        """From now on these banks are there too."""
        self._pools = {**self._pools, **{key: SlotPool.of(count) for key, count in slots.items()}}

    def take(self, keys: Iterable[ClassKey]) -> dict[ClassKey, int]:
        """A slot of each of these banks, which must have a free one."""
        return {key: self._pools[key].free.pop() for key in keys}

    def give_back(self, slots: Mapping[ClassKey, int]) -> None:
        for key, slot in slots.items():
            self._pools[key].free.append(slot)

    def rest(self, resident: Resident) -> None:
        """The task could leave, after all tasks of lower rank."""
        for key in resident.slots:
            self._pools[key].idle.add((resident.rank, resident))

    def rouse(self, resident: Resident) -> None:
        """The task cannot leave now."""
        for key in resident.slots:
            self._pools[key].idle.discard((resident.rank, resident))

    def count_fixed(self, resident: Resident, by: int) -> None:
        for key in resident.slots:
            self._pools[key].fixed += by

    def count_leaving(self, resident: Resident, by: int) -> None:
        for key in resident.slots:
            self._pools[key].leaving += by
