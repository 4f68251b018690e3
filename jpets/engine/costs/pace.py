"""How fast the machine is beside what programs were expected to take."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

from jpets.engine.programs.program import Program

SETTLED = 20
"""Batches after which a program's time is known, whatever it was estimated at."""
MOST = 4.0
"""Times as slow or as fast as expected that programs are taken to be at most."""
LOOK_SECONDS = 0.2
"""Seconds between looks at that."""
TOGETHER_SECONDS = 2.0
"""Seconds before the latest batch in which a program ran whose time says how fast the machine is."""


class Pace:
    """``ready`` gives the programs that batches run in."""

    def __init__(self, ready: Callable[[], Sequence[Program]] = lambda: ()) -> None:
        self._ready = ready
        self._now, self._until = 1.0, 0.0

    @property
    def now(self) -> float:
        """How many times as long programs take now as they were expected to when they came: the median of the latest
        that have run often, 1 where there are none. Other work on the machine makes all of them slower; by figures of a
        quiet one, each that was never tried would look faster than those that run."""
        if (at := time.monotonic()) >= self._until:
            known = [p for p in self._ready() if p.followed >= SETTLED and p.expected > 0]
            latest = max((p.last_used for p in known), default=0.0) - TOGETHER_SECONDS
            ratios = [p.seconds / p.expected for p in known if p.last_used >= latest]
            self._now = min(MOST, max(1 / MOST, statistics.median(ratios))) if ratios else 1.0
            self._until = at + LOOK_SECONDS
        return self._now
