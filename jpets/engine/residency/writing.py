"""Puts tasks into slots of the device's banks."""

from __future__ import annotations

from collections.abc import Callable

from jpets.engine.device.memory import is_out_of_memory
from jpets.engine.device.replica import Replica, SlotContents
from jpets.engine.results.stats import Stats
from jpets.errors import Saturated


class SlotWriter:
    """Writes for one replica. ``make_room`` frees device memory that the engine can do without."""

    def __init__(self, replica: Replica, stats: Stats, make_room: Callable[[], None]) -> None:
        self._replica = replica
        self._stats = stats
        self._make_room = make_room

    def write(self, contents: SlotContents) -> None:
        """Owner thread only. If the device has no room, tries once more after ``make_room``.

        Raises ``Saturated`` if there is still no room.
        """
        for last in (False, True):
            try:
                self._replica.write(contents)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                self._stats.had_no_memory()
                if last:
                    raise Saturated("the device has no memory to take the task in now; try again") from error
                self._make_room()
            else:
                return
