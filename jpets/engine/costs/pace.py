"""How fast the machine is: beside what programs were expected to take, and beside what it was before."""

from __future__ import annotations

import math
import statistics
import threading
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
FADING = 0.001
"""Part of an unused program's time beyond what it takes at best that fades with each batch of others. A try costs about
a batch, so few of all are tries."""
FADING_AT_FIRST = 0.02
"""The same of a program without a batch; divided by one and its batches."""
FADING_SECONDS = 10.0
"""Seconds in which as much fades as with a batch."""
IDLE_SECONDS = 600.0
"""Seconds without a batch after which all is tried again that was slow."""


class Pace:
    """``ready`` gives the programs that batches run in."""

    def __init__(self, ready: Callable[[], Sequence[Program]] = lambda: ()) -> None:
        self._ready = ready
        self._now, self._until = 1.0, 0.0
        self._looked = time.monotonic()
        self.lock = threading.Lock()
        """Held while times of programs change: batches end in another thread than that of ``look``."""

    @property
    def now(self) -> float:
        """How many times as long programs take now as they were expected to when they came: the median of the latest
        that have run often, 1 where there are none. Other work on the machine makes all of them slower; by figures of a
        quiet one, each that was never tried would look faster than those that run."""
        if (at := time.monotonic()) >= self._until:
            known = [p for p in self._ready() if p.followed >= SETTLED and p.expected > 0]
            self._now = _of_latest(known, lambda program: program.expected)
            self._until = at + LOOK_SECONDS
        return self._now

    @property
    def busy(self) -> float:
        """How many times as long as at best the latest programs take: their median, 1 where there are none."""
        settled = [program for program in self._ready() if 0 < program.best < math.inf]
        return _of_latest(settled, lambda program: program.best)

    def look(self) -> None:
        """Programs that did not run since the last look become as much slower or faster as those that did; and the
        times of those that are not used fade to what they take at best. A batch that ran while something else took the
        cores may have made a program look slower than another, and what is not used would never be found to be faster;
        what looks faster than it is is tried, and found out.
        """
        programs, now = self._ready(), time.monotonic()
        with self.lock:
            elapsed, self._looked = now - self._looked, now
            told = _told(programs)
            moved, busy = 1.0, 1.0
            if told and elapsed < UNUSED_SECONDS:  # else what ran before says nothing of now
                moved, busy = statistics.median(told), self.busy
            batches = sum(p.followed - p.seen[0] for p in programs if p.seen is not None)
            steps = batches + elapsed / FADING_SECONDS if elapsed < IDLE_SECONDS else math.inf
            for program in programs:
                if program.seen is not None:
                    program.seconds *= _untold(program, moved)
                if program.last_used < now - UNUSED_SECONDS:
                    self._fade(program, busy, steps)
                program.seen = program.followed, program.seconds

    def _fade(self, program: Program, busy: float, steps: float) -> None:
        settled = program.best < math.inf
        best = program.best * busy if settled else program.expected * self.now
        if 0 < best < program.seconds or settled:
            kept = 1 - max(FADING, FADING_AT_FIRST / (1 + program.followed))
            program.seconds = best + kept**steps * (program.seconds - best)


def _untold(program: Program, moved: float) -> float:
    """The part of ``moved`` that a program's own batches since the last look have not told."""
    assert program.seen is not None
    followed, seconds = program.seen
    rest = moved * seconds / program.seconds if program.seconds > 0 else moved
    least, most = sorted((1.0, moved))
    return float(min(most, max(least, rest)) ** ((1 - HABIT) ** (program.followed - followed)))


def _told(programs: Iterable[Program]) -> list[float]:
    """How many times as long as at the last look programs take: of each batch since then."""
    told: list[float] = []
    for program in programs:
        if program.seen is not None and program.best < math.inf:  # else its own estimate may be what was wrong
            followed, seconds = program.seen
            told += [program.seconds / seconds] * (program.followed - followed) if seconds > 0 else []
    return told


def _of_latest(programs: Sequence[Program], usual: Callable[[Program], float]) -> float:
    """How many times as long as ``usual`` those take that ran last: their median, bounded; 1 where there are none."""
    latest = max((program.last_used for program in programs), default=0.0) - TOGETHER_SECONDS
    ratios = [program.seconds / usual(program) for program in programs if program.last_used >= latest]
    return min(MOST, max(1 / MOST, statistics.median(ratios))) if ratios else 1.0
