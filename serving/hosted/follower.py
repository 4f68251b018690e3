"""Follows what others change in the repository: another server, or ``jpets task add --repository`` beside this one."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from jpets.errors import JpetsError

log = logging.getLogger(__name__)

PERIOD = 0.25
"""Seconds between two looks."""
PATIENCE = 2.0
"""Seconds that an end waits for a look which a locked catalogue delays."""


class Follower:
    """Calls ``refresh`` every ``PERIOD`` in a thread of its own. An error of it is logged once, and it is called
    again."""

    def __init__(self, refresh: Callable[[], None], period: float = PERIOD) -> None:
        self._refresh = refresh
        self._period = period
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._work, name="jpets-follow", daemon=True)
        self._seen: float | None = None

    @property
    def age(self) -> float | None:
        """Seconds since the last look that succeeded; None before the first."""
        return None if self._seen is None else time.monotonic() - self._seen

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._end.set()
        if self._thread.is_alive():
            self._thread.join(PATIENCE)

    def _work(self) -> None:
        failing = False
        while not self._end.wait(self._period):
            began = time.monotonic()
            try:
                self._refresh()
            except Exception as error:  # noqa: BLE001 (a locked catalogue must not end the thread for good)
                if not failing and not self._end.is_set():
                    why = error.code if isinstance(error, JpetsError) else type(error).__name__
                    log.warning("changes of the repository are not seen; trying again", extra={"why": why})
                failing = True
            else:
                if failing:
                    log.info("changes of the repository are seen again")
                failing, self._seen = False, began
