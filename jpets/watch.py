"""How long to wait between two looks for what others change."""

from __future__ import annotations

import threading


class Watch:
    """Waits by time, or until somebody tells of a change. One thread waits; any may call the rest."""

    def __init__(self) -> None:
        self._woken = threading.Event()
        self.told = False
        """Whether each change wakes it: then a look without one only finds what was missed."""

    def wait(self, seconds: float) -> bool:
        """Waits for ``wake``, ``seconds`` at most; whether it was called since the last wait."""
        woken = self._woken.wait(seconds)
        self._woken.clear()
        return woken

    def wake(self) -> None:
        """Ends the wait, or else the next one."""
        self._woken.set()
