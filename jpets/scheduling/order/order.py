"""Which waiting query is more urgent: within one tenant by due time, between tenants by the tokens they were served.

Start-time fair queueing (Goyal, Vin and Cheng 1996) over tokens, as in the virtual token counter (Sheng et al. 2024):
a tenant has a virtual time that grows by the tokens it is served, and the tenant with the least goes first.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")

PATIENCE = 60.0
"""A query without a deadline is due so many seconds after it came: queries that are due later do not pass it."""


def due(arrived: float, deadline: float | None) -> float:
    """When a query should have been answered, on the clock of ``arrived``.

    It orders one tenant's queries, and only those: a short deadline does not pass another tenant's queries, so no
    tenant takes a larger share by asking for shorter deadlines.
    """
    return arrived + PATIENCE if deadline is None else deadline


def starting_time(own: float | None, least: float | None) -> float:
    """The virtual time (tokens) with which a tenant that was idle becomes backlogged.

    ``own`` is its time when it was last backlogged, if still known; ``least`` the least among those that are backlogged
    now. A tenant saves nothing up while it is idle, and a moment's idleness cancels no debt.
    """
    return max(own or 0.0, least or 0.0)


def interleave(backlogs: Iterable[tuple[float, Iterable[T]]], tokens: Callable[[T], int]) -> Iterator[T]:
    """The order in which fair queueing would serve these queries if nothing else came.

    ``backlogs`` hold (virtual time, queries most urgent first) of each tenant, in rising virtual time; they are read
    only as far as the result is. Of equal times the earlier backlog goes first.
    """
    numbered = enumerate(backlogs)
    following = next(numbered, None)
    racing: list[tuple[float, int, Iterator[T]]] = []
    while racing or following is not None:
        if following is not None and (not racing or following[1][0] < racing[0][0]):
            place, (time, queries) = following
            heapq.heappush(racing, (time, place, iter(queries)))
            following = next(numbered, None)
            continue
        time, place, rest = racing[0]
        for query in itertools.islice(rest, 1):
            yield query
            heapq.heapreplace(racing, (time + tokens(query), place, rest))
            break
        else:
            heapq.heappop(racing)
