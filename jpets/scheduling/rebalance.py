"""One round of balancing: what calls and queues of late say about the balance, and the moves that mend it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Mapping
from itertools import chain
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from jpets.scheduling.balance import Balanced, Placement, Room, balance, gap, improved
from jpets.scheduling.queue import Floats

T = TypeVar("T", bound=Hashable)
NOISE = 2.0
"""Standard deviations of a device's load (calls are Poisson) that a gap must exceed before anything moves."""
BACKLOG = 4.0
"""Seconds over which a backlog would be worked off."""


class Round(NamedTuple, Generic[T]):
    """``phi`` is the least loaded device's load over the most loaded one's; 1 where chance explains the difference."""

    phi: float
    found: Balanced[T]


def rebalance(
    placement: Placement[T],
    calls: Mapping[T, float],
    weights: Mapping[T, float],
    waiting: Floats,
    seconds: float,
    room: Room[T] | None = None,
) -> Round[T]:
    """The better moves (``improved``) for what was seen in ``seconds``: calls of each task, ``waiting`` [devices]
    queries on average.

    A call counts as the seconds in ``weights`` that it is predicted to take, one of an unknown task as the mean of the
    others; what waits on a device as calls spread over ``BACKLOG`` seconds. Gaps that chance explains are left alone.
    Raises ``ValueError`` for calls of a task that is nowhere.
    """
    typical = float(np.mean([weights[task] for task in calls if task in weights] or [1.0]))
    weighed = {task: count * weights.get(task, typical) for task, count in calls.items()}
    variance = sum(count * weights.get(task, typical) ** 2 for task, count in calls.items()) / len(placement)
    slack = NOISE * math.sqrt(variance)
    each = sum(weighed.values()) / max(sum(calls.values()), 1e-9)
    standing = np.asarray(waiting, float) * each * seconds / BACKLOG
    places = Counter(chain.from_iterable(placement))
    loads = standing + [math.fsum(weighed.get(task, 0.0) / places[task] for task in own) for own in placement]
    found = improved(placement, weighed, room, standing=standing.tolist(), slack=slack)
    return Round(1.0 if gap(loads) <= slack else balance(loads), found)
