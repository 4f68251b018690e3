"""Work for the thread that owns a device, done between two batches."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future

from jpets.errors import SHUTTING_DOWN, Saturated

log = logging.getLogger(__name__)


class Staging:
    """Any thread may stage; the owner applies."""

    def __init__(self) -> None:
        self._staged: deque[tuple[Callable[[], object], Future[None]]] = deque()
        self._lock = threading.Lock()
        self._stopped = False
        self.wake: Callable[[], None] = lambda: None
        """Called when something is staged, so that an idle owner thread looks."""

    def stage(self, action: Callable[[], object]) -> Future[None]:
        """The next batch after the future is done sees the effect of ``action``.

        Raises ``Saturated`` once the owner thread has stopped.
        """
        done: Future[None] = Future()
        with self._lock:
            if self._stopped:
                raise Saturated(SHUTTING_DOWN)
            self._staged.append((action, done))
        self.wake()
        return done

    @property
    def waiting(self) -> bool:
        return bool(self._staged)

    def apply(self) -> None:
        """Owner thread only."""
        while self._staged:
            action, done = self._staged.popleft()
            try:
                action()
            except Exception as error:  # the loop must go on; the caller that staged it is told
                log.exception("staged work failed")
                done.set_exception(error)
            else:
                done.set_result(None)

    def stop(self) -> None:
        """Does what is staged, and refuses more. Owner thread only, at its end."""
        with self._lock:
            self._stopped = True
        self.apply()
