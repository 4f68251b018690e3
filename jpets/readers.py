"""Threads that read tasks: one task after another while each is quick, several side by side where one is slow."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

READERS = 8
"""Most tasks that are read at once."""
BACKLOG = 8
"""Most tasks that wait for a reader: what waits holds slots that others could use."""
QUICK = 0.005
"""Seconds after which a reading no longer keeps the next one waiting. Quick ones take Python's lock, so side by side
they would only keep the owner thread from it; slow ones wait for a disk or a network."""


class Readers:
    """The threads are daemons: a source that hangs keeps no process alive."""

    def __init__(self) -> None:
        self._wanted: deque[Callable[[], None]] = deque()
        self._changed = threading.Condition()
        self._next = threading.Lock()
        """Held by the thread that reads next; the others sleep (leader and followers: Schmidt et al. 2000)."""
        self._latest: Callable[[], None] | None = None
        """The latest reading, while it lasts, and when it began."""
        self._began = 0.0
        self._closed = False
        self.on_none_waiting: Callable[[], None] = lambda: None
        """Called by a thread that takes the last task which waited."""
        self._threads = [
            threading.Thread(target=self._work, name=f"jpets-read-{number}", daemon=True) for number in range(READERS)
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """No reading begins any more. Waits for none."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    @property
    def waiting(self) -> bool:
        """Whether a task waits for a reader."""
        return bool(self._wanted)

    @property
    def full(self) -> bool:
        """Whether one more task would wait too long."""
        return len(self._wanted) >= BACKLOG

    @property
    def busy(self) -> bool:
        """Whether more tasks are not needed yet."""
        return len(self._wanted) > BACKLOG // 2

    def submit(self, read: Callable[[], None]) -> None:
        """``read`` is called by a thread, in the order of submission. It must not raise."""
        with self._changed:
            self._wanted.append(read)
            self._changed.notify_all()

    def _work(self) -> None:
        while (read := self._take()) is not None:
            if not self._wanted:
                self.on_none_waiting()
            try:
                read()
            finally:
                with self._changed:
                    if self._latest is read:
                        self._latest = None
                    self._changed.notify_all()

    def _take(self) -> Callable[[], None] | None:
        """The next reading, once it may begin; None when closed."""
        with self._next, self._changed:
            while not self._closed:
                if self._wanted and (patience := self._patience()) <= 0:
                    self._latest, self._began = self._wanted.popleft(), time.monotonic()
                    return self._latest
                self._changed.wait(patience if self._wanted else None)
            return None

    def _patience(self) -> float:
        """Seconds until the next reading may begin beside those that go on."""
        return self._began + QUICK - time.monotonic() if self._latest is not None else 0.0
