"""How many students answer: fewer while queries wait, more again after a quiet while (Student Parallelism sections
B.4.1 to B.4.3)."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping

from jpets.config import SizingRule
from jpets.engine.report import StudentsReport

USUAL_LENGTH = 32.0
"""Tokens of a text while none was answered."""
HABIT = 0.05
"""Weight of the latest text in that."""
LOOK_SECONDS = 10.0
"""Seconds between looks at what the device computes at a time."""


class GroupSize:
    """The number of students of all groups of an engine, by how many of their queries have no answer yet. Thread-safe.

    A *group* is one execution of all present students of a few texts (``together``); as many run side by side as the
    devices have room for, and the other queries wait in a *buffer* of such elements. It is full when it would take as
    long as what runs: the paper's threshold, one element for each group, where room for students makes whole groups.
    ``clock`` gives seconds.
    """

    def __init__(self, rule: SizingRule, devices: int, clock: Callable[[], float]) -> None:
        self.rule, self._devices, self._clock = rule, devices, clock
        self._lock = threading.Lock()
        self._together = rule.together or 1
        self._largest = 1
        self._dropped = 0
        self._outstanding = 0
        self._since = math.inf
        """When the present window began: the buffer is not full since then. Infinite while it is, or all answer."""
        self._asked_for = 0.0
        """Seconds of the window times the groups that ran or waited, up to ``_at``."""
        self._at = 0.0
        self.drops = 0
        """How often a student was dropped."""
        self.additions = 0
        """How often one was added again."""

    def resize(self, largest: int) -> None:
        """The largest group has so many students from now on; where some were dropped, as many answer as before."""
        with self._lock:
            self._grow()
            size = self._size
            self._largest = max(1, largest)
            self._dropped = max(0, self._largest - size) if self._dropped else 0
            self._note()

    def profiled(self, together: int) -> None:
        """A group computes so many texts at a time from now on, unless the rule has a number of its own."""
        with self._lock:
            self._grow()
            self._together = self.rule.together or max(1, together)
            self._note()

    def asked(self, count: int = 1) -> None:
        """So many queries of groups come together; ``of`` then says how many students answer them. One student is
        dropped where they fill the buffer. A query that joins an element which waits already makes none longer, and
        what comes together while nothing runs is no load: there is nobody whom fewer students would help."""
        with self._lock:
            self._grow()
            before, idle = self._elements, not self._outstanding
            self._outstanding += count
            fills = self._elements > before and self._full and not idle
            if fills and self._dropped < self._largest - 1 and not self.rule.fixed:
                self._dropped += 1
                self.drops += 1
                self._since = math.inf
            self._note()

    def answered(self, count: int = 1) -> None:
        """So many queries have their answers."""
        with self._lock:
            self._grow()
            self._outstanding -= count
            self._note()

    def of(self, students: int) -> int:
        """How many students answer now, of a group that has so many."""
        return max(1, min(students, self.answering))

    @property
    def answering(self) -> int:
        """Students of the largest group that answer now."""
        with self._lock:
            self._grow()
            return self._size

    @property
    def side_by_side(self) -> int:
        """Groups of the present size that run at the same time on all devices."""
        with self._lock:
            self._grow()
            return self._groups

    @property
    def together(self) -> int:
        """Texts that a group computes at a time."""
        with self._lock:
            return self._together

    @property
    def largest(self) -> int:
        """Students of the largest group."""
        with self._lock:
            return self._largest

    @property
    def dropped(self) -> int:
        """By how many the largest group is smaller now."""
        with self._lock:
            self._grow()
            return self._dropped

    def report(self, groups: int, answers: Mapping[int, int], kept: Mapping[int, float]) -> StudentsReport:
        """The state now, of so many ``groups``, with what they gave and ``kept`` by their numbers of students."""
        largest = self.largest
        return StudentsReport(
            self.rule,
            self.together,
            self.side_by_side,
            groups,
            largest,
            self.of(largest),
            self.drops,
            self.additions,
            answers,
            kept,
        )

    @property
    def _size(self) -> int:
        return self._largest - self._dropped

    @property
    def _groups(self) -> int:
        """Groups of the present size that run side by side."""
        return max(1, self._room // self._size)

    @property
    def _room(self) -> int:
        """Students that run side by side."""
        return self.rule.groups * self._devices * self._largest

    @property
    def _elements(self) -> int:
        return -(-self._outstanding // self._together)

    @property
    def _full(self) -> bool:
        """Whether as many students wait in the buffer as run. Groups are no measure: two students leave as many of them
        as three where three have room."""
        return self._elements * self._size >= 2 * self._room

    def _note(self) -> None:
        """A window begins when the buffer is no longer full."""
        if self._full or not self._dropped:
            self._since = math.inf
        elif self._since == math.inf:
            self._begin(self._clock())

    def _begin(self, now: float) -> None:
        self._since, self._at, self._asked_for = now, now, 0.0

    def _grow(self) -> None:
        """Adds a student at the end of each window in whose mean more students were in idle groups than groups were
        occupied or waited for. The paper looks once, when the buffer has been empty for as long: a query that happens
        to be computed just then, or two that come together now and then, would keep the size as it is."""
        now, window = self._clock(), self.rule.window
        while now - self._since >= window:
            alike, end = self._at == self._since, self._since + window
            mean = (self._asked_for + self._elements * (end - self._at)) / window
            self._begin(end)
            if (self._groups - mean) * self._size > mean:
                self._dropped -= 1
                self.additions += 1
                self._note()
            elif alike:  # so will be all windows until now
                self._begin(end + (now - end) // window * window)
        if self._since < math.inf:
            self._asked_for += self._elements * (now - self._at)
            self._at = now


class Together:
    """How many texts a group should compute at a time (section B.4.1), learned anew now and then: costs of the device
    get better while it serves. ``beside`` is that of the engine."""

    def __init__(self, size: GroupSize, beside: Callable[[int, int], int], clock: Callable[[], float]) -> None:
        self._size, self._beside, self._clock = size, beside, clock
        self._looked_at = -math.inf
        self._length = USUAL_LENGTH
        """Tokens of a text, in the mean of late."""

    def answered(self, tokens: int) -> None:
        """A text of so many tokens has its answer. One thread at a time."""
        self._length += HABIT * (tokens - self._length)

    def look(self) -> None:
        """Sets the size's number, if that was not done of late."""
        now = self._clock()
        if now >= self._looked_at + LOOK_SECONDS:
            self._looked_at = now
            self._size.profiled(self._beside(self._size.largest, math.ceil(self._length)))
