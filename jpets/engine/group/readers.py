"""Lets a change wait until no reader uses the old state any more."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator


class Readers:
    """Readers never wait. Thread-safe."""

    def __init__(self) -> None:
        self._settling = threading.Lock()
        """There are two turns: the next begins only when the one before has no readers left."""
        self._changed = threading.Condition()
        self._inside = [0, 0]
        """Readers that came in an even turn, and in an odd one."""
        self._turn = 0

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        with self._changed:
            turn = self._turn
            self._inside[turn] += 1
        try:
            yield
        finally:
            with self._changed:
                self._inside[turn] -= 1
                if not self._inside[turn]:
                    self._changed.notify_all()

    def settle(self) -> None:
        """Waits for the readers that are inside when it is called; later readers see the new state."""
        with self._settling, self._changed:
            old, self._turn = self._turn, 1 - self._turn
            self._changed.wait_for(lambda: not self._inside[old])
