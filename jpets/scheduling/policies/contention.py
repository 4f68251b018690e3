"""Some parties flood a device while others use less than their part of it: which batch is next, and how long it may be.

A batch that runs is never interrupted, so beside a flood all parties wait for long batches. During a flood, parties
that keep to their part of the device's tokens go first, in batches of their own, and the flood's batches take only a
few times as long as theirs. A party's part is a token bucket: an equal share of the device's rate, with room for
``BURST`` seconds of it.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence

from jpets.scheduling.costs.shape import Shape
from jpets.scheduling.order.fairness import fill
from jpets.scheduling.policies.ready import cheapest_split

BURST = 1.0
"""Seconds of its rate that a party may use at once; and seconds that a flood is taken to last after a query of a party
that keeps to its part."""
SIMILAR = 1.25
"""Times the cheapest batch's time that a batch may take where it has room for others' queries."""
APART = 4
"""Times as many queries as any of the others have waiting, several parties flood a device together: as many wait for
all on a device that is merely busy."""
MUCH = 8
"""A party that floods a device with others has at least this part of a batch waiting: an eighth."""
HABIT = 0.1
"""Weight of the latest batch in the typical time of a batch of parties that keep to their part."""


class Contention:
    """Which parties keep to their part, and how long their batches take. Times are seconds of one clock.

    ``rate``: tokens that the device serves a second. ``stretch``: a flood's batch takes at most so many times as long
    as theirs; 0: nothing is done about floods.
    """

    def __init__(self, stretch: float) -> None:
        self.rate = 0.0
        self._stretch = stretch
        self._typical = 0.0
        self._until = -math.inf
        self.keeping: set[Hashable] = set()
        """Parties of the latest window that keep to their part while another one does not."""
        self._levels: dict[Hashable, tuple[float, float]] = {}
        """party -> (tokens left of its part, at which time), in order of these times."""

    def lasts(self, now: float) -> bool:
        return now < self._until

    def modest(self, parties: Sequence[Hashable], most: int, now: float, below: int = 0) -> list[int]:
        """A window's queries of parties that keep to their part and do not flood the device, where others do: those
        have more queries waiting than a batch has rows (``most``), alone or together. ``below``: the queries of the
        party of lower priority that has most of them."""
        counts = Counter(parties)
        least = flood_count(sorted(counts.values(), reverse=True), most)
        if not (self._stretch and (below > most or (len(counts) > 1 and least is not None))):
            self.keeping = set()
            return []
        for party in counts:
            self._levels.setdefault(party, (math.inf, now))  # it has its part, though it may not have been served
        if least is None:  # their priority goes before the flood, whatever they use
            self.keeping = set(counts)
        else:
            self.keeping = {p for p, count in counts.items() if count < least and self._level(p, now) > 0}
        if self.keeping:
            self._until = now + BURST
        return [q for q, party in enumerate(parties) if party in self.keeping]

    def spend(self, tokens: Mapping[Hashable, int], now: float) -> None:
        """Counts tokens that parties are being served."""
        while self._levels and next(iter(self._levels.values()))[1] < now - 2 * BURST:
            del self._levels[next(iter(self._levels))]  # its bucket is full again
        for party, count in tokens.items():
            left = max(self._level(party, now) - count, -self._part * BURST)
            self._levels.pop(party, None)
            self._levels[party] = left, now

    def ran(self, seconds: float) -> None:
        """Learns how long a batch of parties that keep to their part took."""
        self._typical += (HABIT if self._typical else 1.0) * (seconds - self._typical)

    @property
    def longest(self) -> float:
        """Seconds that a batch of the flood may take."""
        return self._stretch * self._typical

    @property
    def _part(self) -> float:
        """Tokens a second for each party that was active lately."""
        return self.rate / max(1, len(self._levels))

    def _level(self, party: Hashable, now: float) -> float:
        full = self._part * BURST
        left, then = self._levels.get(party, (full, now))
        return min(full, left + self._part * (now - then))


def flood_count(counts: Sequence[int], most: int) -> int | None:
    """The queries waiting from which on a party floods a device; None while none does. ``counts`` are those of each
    party, descending.

    One party with more than ``most`` does, and so do several that have more together, each at least an eighth of it and
    ``APART`` times as many as any other party.
    """
    if not counts or counts[0] > most:
        return most + 1 if counts else None
    total = 0
    for count, following in itertools.pairwise(counts):
        total += count
        if total > most and count >= max(APART * following, most / MUCH):
            return count
    return None


def own_batch(
    own: Sequence[int], others: Iterable[int], lengths: Sequence[int], shapes: Sequence[Shape], most: int
) -> list[int]:
    """The batch that the first of ``own`` has when ``own`` run by themselves, with ``others`` where that takes hardly
    longer.

    It may hold fewer of ``own`` than would fit: where time grows with tokens, all would wait for one long batch.
    """
    batches = cheapest_split([lengths[q] for q in own], shapes, most)
    mine = [own[at] for at in next(batch for batch in batches if 0 in batch)]
    holding = [shape for shape in shapes if len(fill(mine, lengths, shape, most)) == len(mine)]
    limit = SIMILAR * min(shape.seconds for shape in holding)
    candidates = [*mine, *others]
    filled = [(s.seconds, fill(candidates, lengths, s, most)) for s in holding if s.seconds <= limit]
    return max(filled, key=lambda each: len(each[1]) / each[0])[1]


def short_batch(
    candidates: Sequence[int], lengths: Sequence[int], shapes: Sequence[Shape], most: int, longest: float
) -> list[int]:
    """The batch with the first candidate that serves most queries a second, of those of at most ``longest`` seconds.

    Where the first candidate alone takes longer, the batch that costs least.
    """
    holding = [shape for shape in shapes if fill(candidates[:1], lengths, shape, most)]
    limit = max(longest, min(shape.seconds for shape in holding))
    batches = [(shape, fill(candidates, lengths, shape, most)) for shape in holding if shape.seconds <= limit]
    return max(batches, key=lambda each: len(each[1]) / each[0].seconds)[1]
