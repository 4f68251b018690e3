"""How fast the machine is: beside what programs were expected to take, and beside what it was before."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Sequence

from jpets.engine.programs.program import Program

HABIT = 0.1
"""Weight of the latest batch in the cost of its program."""
SETTLED = 20
"""Batches after which a program's time is known, whatever it was estimated at."""
MOST = 4.0
"""Times as slow or as fast as expected that programs are taken to be at most."""
LOOK_SECONDS = 0.2
"""Seconds between looks at that."""
TOGETHER_SECONDS = 2.0
"""Seconds before the latest batch in which a program ran whose time says how fast the machine is."""
UNUSED_SECONDS = 10.0
"""Seconds without a batch after which a program's time begins to fade."""
FADING = 0.05
"""Part of a program's time above what it takes at best that fades in a second, more where few batches told it."""


class Pace:
    """``ready`` gives the programs that batches run in."""

    def __init__(self, ready: Callable[[], Sequence[Program]] = lambda: ()) -> None:
        self._ready = ready
        self._now, self._until = 1.0, 0.0
        self._looked = time.monotonic()
        self.drift = 1.0
        """Times as long as at first that the same programs take now."""

    @property
    def now(self) -> float:
        """How many times as long programs take now as they were expected to when they came: the median of the latest
        that have run often, 1 where there are none. Other work on the machine makes all of them slower; by figures of a
        quiet one, each that was never tried would look faster than those that run."""
        if (at := time.monotonic()) >= self._until:
            known = [p for p in self._ready() if p.followed >= SETTLED and p.expected > 0]
            latest = max((p.last_used for p in known), default=0.0) - TOGETHER_SECONDS
            ratios = [p.seconds / p.expected for p in known if p.last_used >= latest]
            self._now = _bounded(statistics.median(ratios)) if ratios else 1.0
            self._until = at + LOOK_SECONDS
        return self._now

    def look(self) -> None:
        """Programs that did not run since the last look become as much slower or faster as those that did; and the
        times of those that are not used fade to what they take at best. A batch that ran while something else took the
        cores may have made a program look slower than another, and what is not used would never be found to be faster.

        Only the owner calls this.
        """
        programs, now = self._ready(), time.monotonic()
        before, self.drift = self.drift, _bounded(self.drift * _moved(programs))
        for program in programs:
            if (seen := program.seen) is not None:
                own = (1 - HABIT) ** (program.followed - seen[0])  # its own batches have told the rest
                program.seconds *= (self.drift / before) ** own
            if program.last_used < now - UNUSED_SECONDS:
                self._fade(program, now - self._looked)
            program.seen = program.followed, program.seconds
        self._looked = now

    def _fade(self, program: Program, elapsed: float) -> None:
        best = program.expected * self.now if program.best == math.inf else program.best * self.drift
        if 0 < best < program.seconds:
            kept = 1 - max(FADING, 1 / (1 + program.followed))
            program.seconds = best + kept**elapsed * (program.seconds - best)


def _moved(programs: Iterable[Program]) -> float:
    """How many times as long as at the last look the same programs take: what the median batch since then says."""
    told: list[float] = []
    for program in programs:
        if program.seen is not None and program.best < math.inf:  # else its own estimate may be what was wrong
            followed, seconds = program.seen
            told += [program.seconds / seconds] * (program.followed - followed) if seconds > 0 else []
    return statistics.median(told) if told else 1.0


def _bounded(times: float) -> float:
    return min(MOST, max(1 / MOST, times))
