"""The slots of one bank: which are free, and whose could become so."""

from __future__ import annotations

from dataclasses import dataclass, field

from sortedcontainers import SortedList


@dataclass
class SlotPool:
    """Free slots of one bank; 0 is never given out."""

    free: list[int] = field(default_factory=list)
    idle: SortedList = field(default_factory=SortedList)
    """(rank, resident) of those that could leave."""
    fixed: int = 0
    """Slots of tasks that never leave."""
    leaving: int = 0
    """Slots of removed tasks whose last queries are not answered yet."""
    total: int = 0

    @classmethod
    def of(cls, slots: int) -> SlotPool:
        return cls(list(range(slots - 1, 0, -1)), total=slots - 1)
