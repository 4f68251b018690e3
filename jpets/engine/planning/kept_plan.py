"""A plan of a window that outlives its first batch: its other batches run next, while little else has come."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from jpets.engine.queue.pending import Pending

NEW_SHARE = 0.125
"""Share of a batch's queries that may have come since the plan, for it to be kept: more could fill batches better."""


class KeptPlan:
    def __init__(self) -> None:
        self._batch_of: dict[int, int] = {}
        """Number of a query -> its batch."""

    def keep(self, waiting: Sequence[Pending], batches: Sequence[Sequence[int]]) -> None:
        """``batches`` hold places in ``waiting``."""
        self._batch_of = {waiting[q].number: at for at, batch in enumerate(batches) for q in batch}

    def forget(self) -> None:
        self._batch_of = {}

    def put_off(self, pendings: Iterable[Pending]) -> None:
        """These queries left their batch, to join others that come."""
        for pending in pendings:
            self._batch_of.pop(pending.number, None)

    def batch(self, waiting: Sequence[Pending]) -> list[int] | None:
        """The places of the queries that share a batch with the first; None where a new plan is due."""
        first = self._batch_of.get(waiting[0].number)
        if first is None:
            return None
        found = [self._batch_of.get(pending.number) for pending in waiting]
        own = [q for q, batch in enumerate(found) if batch == first]
        return own if found.count(None) <= NEW_SHARE * len(own) else None
