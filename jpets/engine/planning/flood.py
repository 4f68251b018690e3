"""What runs next while tenants flood the device and others use less than their part of it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Hashable, Sequence, Set

from jpets.engine.planning.predictions import Predictions
from jpets.engine.planning.ready_programs import ReadyPrograms
from jpets.engine.queue.pending import Pending
from jpets.engine.queue.pending_queue import WINDOW
from jpets.scheduling.policies.contention import Contention, own_batch, short_batch


class FloodGuard:
    """``stretch`` is the setting ``flood_stretch``; batches have at most ``most_rows``."""

    def __init__(self, ready: ReadyPrograms, predictions: Predictions, stretch: float, most_rows: int) -> None:
        self._ready = ready
        self._predictions = predictions
        self._most_rows = most_rows
        self._contention = Contention(stretch)

    @property
    def lasts(self) -> bool:
        """Whether batches are kept short now, for tenants that use less than their part of the device."""
        return self._contention.lasts(time.monotonic())

    @property
    def keeping(self) -> Set[Hashable]:
        """The parties that keep to their part during the flood."""
        return self._contention.keeping

    def batch(self, waiting: Sequence[Pending], *, rare: bool) -> list[Pending] | None:
        """The next batch while a flood lasts; None while there is none, or no ready shape for it."""
        now, most = time.monotonic(), self._most_rows
        self._contention.rate = self._ready.rate
        parties = [pending.party for pending in waiting if pending.priority == waiting[0].priority]
        below = Counter(pending.party for pending in waiting[len(parties) :])
        many = min(most, WINDOW // 2)  # no party has more in what is looked at than there is of it
        modest = self._contention.modest(parties, many, now, max(below.values(), default=0))
        if not self._contention.lasts(now):
            return None
        lengths, heavy = [p.row.length for p in waiting], [p.row.heavy for p in waiting]
        first = set(modest or [0])
        loops = any(heavy[q] for q in first)
        # Deltas that cost a pass over their own weights join where a batch has them anyway, or in the flood's own.
        tasks = {waiting[q].resident for q in first if heavy[q]}
        joins = [not own or (waiting[q].resident in tasks if modest else loops) for q, own in enumerate(heavy)]
        others = [q for q in range(len(waiting)) if q not in first and joins[q]]
        shapes = self._ready.shapes(heavy=loops, rare=rare)
        if max((shape.longest for shape in shapes), default=0) < max(lengths[q] for q in first):
            return None  # classes are just coming, and their programs do not take such texts yet
        if modest:
            return [waiting[q] for q in own_batch(modest, others, lengths, shapes, most)]
        longest = self._contention.longest
        chosen = short_batch([0, *others], lengths, shapes, most, longest)
        while loops and len(chosen) > 1 and self._predictions.added([waiting[q].row for q in chosen]) > longest:
            chosen = chosen[: len(chosen) // 2]
        return [waiting[q] for q in chosen]

    def serving(self, pendings: Sequence[Pending], seconds: float) -> None:
        """Is told which queries will be computed, and in how many ``seconds``, as predicted."""
        tokens: Counter[Hashable] = Counter()
        for pending in pendings:
            tokens[pending.party] += pending.tokens
        if not self.keeping.isdisjoint(tokens):
            self._contention.ran(seconds)
        self._contention.spend(tokens, time.monotonic())
