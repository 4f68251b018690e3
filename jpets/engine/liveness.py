"""Whether the threads of an engine run, and waiting for work that they have to do."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future

from jpets.errors import EngineFailure, Saturated

PATIENCE = 1.0
"""Seconds between looks at whether the threads still run."""


class Liveness:
    """An engine is live while all of its ``parts`` are, and ``runs`` while they may get on again. They are added as
    they are made."""

    def __init__(self) -> None:
        self.parts: list[Callable[[], bool]] = []
        self.running: list[Callable[[], bool]] = []

    @property
    def live(self) -> bool:
        return all(lives() for lives in self.parts)

    @property
    def runs(self) -> bool:
        return all(runs() for runs in self.running)

    def wait(self, done: Future[None]) -> None:
        """Waits for work of the threads. Raises the work's error, ``EngineFailure`` if the threads do not run, and
        ``Saturated`` while they make no progress: the work may still be done later."""
        while True:
            try:
                return done.result(timeout=PATIENCE)
            except TimeoutError:
                if done.done():  # the work's own error, or it has just ended
                    return done.result()
                if not self.runs:
                    raise EngineFailure("the engine is not running; start it, or start a new one") from None
                if not self.live:
                    raise Saturated("the device has made no progress for a while; try again later") from None
