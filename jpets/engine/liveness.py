"""Whether the threads of an engine run, and waiting for work that they have to do."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future

from jpets.errors import EngineFailure

PATIENCE = 1.0
"""Seconds between looks at whether the threads still run."""


class Liveness:
    """An engine is live while all of its ``parts`` are. They are added as they are made."""

    def __init__(self) -> None:
        self.parts: list[Callable[[], bool]] = []

    @property
    def live(self) -> bool:
        return all(lives() for lives in self.parts)

    def wait(self, done: Future[None]) -> None:
        """Waits for work of the threads. Raises the work's error, and ``EngineFailure`` if the threads do not run."""
        while True:
            try:
                return done.result(timeout=PATIENCE)
            except TimeoutError:
                if done.done():  # the work's own error, or it has just ended
                    return done.result()
                if not self.live:
                    raise EngineFailure("the engine is not running; start it, or start a new one") from None
