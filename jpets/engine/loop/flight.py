"""Room for the batches that are on the device and not fetched yet."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

LOOK_AGAIN = 0.001
"""Seconds between looks for new queries while a batch runs."""
Plan = TypeVar("Plan")


class FlightRoom:
    """For ``most`` batches."""

    def __init__(self, most: int) -> None:
        self._others = most - 1
        self._room = threading.Semaphore(most)

    def take(self) -> None:
        """Waits for room for one batch, and takes it."""
        self._room.acquire()

    def free(self) -> None:
        self._room.release()

    def drain(self) -> None:
        """Waits, with room for one batch held, until no batch is in flight."""
        held = [self._room.acquire() for _ in range(self._others)]
        for _ in held:
            self._room.release()

    def drain_planning(self, plan_ahead: Callable[[], Plan | None], arrivals: Callable[[], int]) -> Plan | None:
        """``drain``, and meanwhile the plan of the next batch, which is made anew when ``arrivals`` has risen.

        None if no plan takes all queries into account.
        """
        plan, known, held = None, -1, 0
        while held < self._others:
            if known != arrivals():
                known = arrivals()
                plan = plan_ahead()
            held += self._room.acquire(timeout=LOOK_AGAIN)
        for _ in range(held):
            self._room.release()
        return plan if known == arrivals() else None
