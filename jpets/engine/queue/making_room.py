"""The queries that a full queue pushes out for a tenant with few waiting ones."""

from __future__ import annotations

import heapq
from collections import Counter

from jpets.engine.queue.backlog import Backlogs
from jpets.engine.queue.pending import Pending


def dispensable(
    ready: Backlogs, cold: Backlogs, party: tuple[int, str], coming: int, excess: int
) -> list[Pending] | None:
    """Finds ``excess`` queries to push out, of the tenants with the longest queues, the least urgent first, while those
    queues are longer than ``party``'s would be with the ``coming`` ones. Between equal queues, the one of lower
    priority gives. None if there are too few."""
    waiting = ready.counts(party[0]) + cold.counts(party[0])
    counts = [(-count, priority, tenant) for (priority, tenant), count in waiting.items()]
    own = coming + waiting[party]
    heapq.heapify(counts)
    taken: Counter[tuple[int, str]] = Counter()
    for _ in range(excess):
        if not counts or -counts[0][0] <= own:
            return None
        count, priority, tenant = counts[0]
        taken[priority, tenant] += 1
        heapq.heapreplace(counts, (count + 1, priority, tenant))
    return [pending for other, count in taken.items() for pending in _least_urgent(ready, cold, other, count)]


def _least_urgent(ready: Backlogs, cold: Backlogs, party: tuple[int, str], count: int) -> list[Pending]:
    """The least urgent queries of a party; cold ones first: they would wait longest."""
    chosen = cold.least_urgent(party, count)
    return chosen + ready.least_urgent(party, count - len(chosen))
