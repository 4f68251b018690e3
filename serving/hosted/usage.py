"""Which tasks are asked how often, kept across restarts: a server brings the most used ones first."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Mapping

from jpets.types import TaskName
from serving.hosted.repository import TaskRepository

log = logging.getLogger(__name__)

PERIOD = 30.0
"""Seconds between two writes; a crash forgets what was asked since the last."""
AGEING = 0.5
"""Weight of earlier counts after a start."""


class UsageLog:
    """Writes ``counts()``, queries by task since the last call, to ``repository`` every ``PERIOD``, and at the end."""

    def __init__(self, repository: TaskRepository, counts: Callable[[], Mapping[TaskName, int]]) -> None:
        self._repository = repository
        self._counts = counts
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._work, name="jpets-usage", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._end.set()
        if self._thread.is_alive():
            self._thread.join()

    def _work(self) -> None:
        ended, counts = False, Counter[TaskName]()
        while not ended:
            ended = self._end.wait(PERIOD)
            try:
                counts.update(self._counts())
                if counts:
                    self._repository.add_uses(counts)
                counts.clear()
            except Exception:  # a full disk must not end the count for good
                log.exception("the tasks' use could not be stored")
