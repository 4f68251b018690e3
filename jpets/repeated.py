"""What is done again and again beside requests and batches, such as following what another server changes in the
repository."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from jpets.errors import JpetsError
from jpets.watch import Watch

log = logging.getLogger(__name__)

PERIOD = 0.25
"""Seconds from one call to the next."""
CHECK_SECONDS = 1.0
"""Between calls where changes are told: a connection that is lost silently tells of none."""
BREATH = 0.05
"""Seconds of rest behind a call that was told of a change, at least: many changes in a row share calls."""
PATIENCE = 2.0
"""Seconds that an end waits for a call which a locked catalogue delays."""


class Repeated:
    """Calls ``call`` every ``period`` seconds in a thread of its own. An error of it is logged once, with ``what`` it
    is for, and it is called again.

    With a ``watch`` it is also called when that is woken, and seldom otherwise while that is told of all changes. A
    call that returns True has left something to do: the next one comes after ``period`` all the same.
    """

    def __init__(
        self, call: Callable[[], object], what: str, period: float = PERIOD, watch: Watch | None = None
    ) -> None:
        self._call = call
        self._what = what
        self._period = period
        self._watch = watch or Watch()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._work, name="jpets-repeated", daemon=True)
        self._done: float | None = None

    @property
    def age(self) -> float | None:
        """Seconds since the last call that succeeded began; None before the first."""
        return None if self._done is None else time.monotonic() - self._done

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._end.set()
        self._watch.wake()
        if self._thread.is_alive():
            self._thread.join(PATIENCE)

    def _work(self) -> None:
        failing, left = False, True
        while True:
            rare = self._watch.told and not left
            woken = self._watch.wait(max(self._period, CHECK_SECONDS) if rare else self._period)
            if self._end.is_set():
                return
            began = time.monotonic()
            try:
                left = self._call() is True
            except Exception as error:  # noqa: BLE001 (a locked catalogue must not end the thread for good)
                if not failing and not self._end.is_set():
                    why = error.code if isinstance(error, JpetsError) else type(error).__name__
                    log.warning(f"{self._what} fails; trying again", extra={"why": why})
                failing = left = True
            else:
                if failing:
                    log.info(f"{self._what} works again")
                failing, self._done = False, began
            if woken:  # as long as the call took: a machine with too much to do is not to do it without a pause
                self._end.wait(min(self._period, max(BREATH, time.monotonic() - began)))
