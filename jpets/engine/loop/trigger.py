"""When a batch starts: at once, or a little later with more queries (TurboTransformers section 5)."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

from jpets.config import EngineSettings
from jpets.engine.device.staging import Staging
from jpets.engine.planning.planner import Planner
from jpets.engine.queue.pending import Pending
from jpets.engine.queue.pending_queue import PendingQueue
from jpets.scheduling.order.trigger import lazy_wait


class Trigger:
    """By the engine's settings: ``hungry`` never waits, ``lazy`` waits while that is predicted to pay."""

    def __init__(self, planner: Planner, pending: PendingQueue, staging: Staging, settings: EngineSettings) -> None:
        self._planner = planner
        self._pending = pending
        self._staging = staging
        self._settings = settings
        self.until = 0.0
        """When the latest sleep ends at the latest (``time.monotonic``)."""
        self._released = -1
        """The number of the last query that waited when a batch started: those before do not wait again."""

    @property
    def hungry(self) -> bool:
        return self._settings.trigger == "hungry"

    def wait(self, waiting: Sequence[Pending], arrivals: int) -> bool:
        """Sleeps if more queries should join these first; True if the caller has to look again. Queries that came
        since there were so many ``arrivals`` end the sleep, and so does staged work."""
        if self.hungry or any(pending.number <= self._released for pending in waiting):
            return False
        try:
            predicted = self._planner.predicted(waiting)
        except Exception:  # noqa: BLE001 (queries that cannot be planned are told when their batch is planned)
            return False
        settings, now, deadline = self._settings, time.monotonic(), self._pending.earliest_deadline()
        seconds = lazy_wait(
            oldest_waited=now - min(p.arrived for p in waiting),
            waiting=max(len(waiting), self._pending.ready),
            predicted=predicted,
            timeout=settings.lazy_wait,
            size=settings.lazy_size,
            latency_target=settings.latency_target,
            left=math.inf if deadline is None else deadline - now,
        )
        if seconds <= 0:
            if self._pending.arrivals != arrivals:  # what came while it was predicted joins them
                return True
            self._released = max(pending.number for pending in waiting)
            return False
        self.until = now + seconds
        with self._pending.changed:  # of what came while it was predicted nobody will be told
            if self._pending.arrivals == arrivals and not (self._staging.waiting or self._pending.closed):
                self._pending.changed.wait(seconds)
        self.until = time.monotonic()
        return True
