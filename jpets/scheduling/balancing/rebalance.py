"""One round of balancing: what calls and queues of late say about the balance, and the moves that mend it."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from jpets.scheduling.balancing.balance import Balanced, Placement, balance, device_loads, gap, improved
from jpets.scheduling.balancing.room import Room
from jpets.scheduling.queue import Floats

T = TypeVar("T", bound=Hashable)
NOISE = 2.0
"""Standard deviations of a device's load (calls are Poisson) that a gap must exceed before anything moves."""
BACKLOG = 4.0
"""Seconds over which a backlog would be worked off."""


class Decision(NamedTuple, Generic[T]):
    """``phi`` is the least loaded device's load over the most loaded one's; 1 where chance explains the difference.

    ``balanced`` has the moves that mend it.
    """

    phi: float
    balanced: Balanced[T]


def work(calls: Mapping[T, float], weights: Mapping[T, float]) -> dict[T, float]:
    """The work of each task's calls: a call counts as its task's weight, or as the others' mean where that is unknown.

    Weights compare queries of different tasks, in seconds or any other unit.
    """
    typical = float(np.mean([weights[task] for task in calls if task in weights] or [1.0]))
    return {task: count * weights.get(task, typical) for task, count in calls.items()}


def rebalance(
    placement: Placement[T],
    calls: Mapping[T, float],
    weights: Mapping[T, float],
    waiting: Floats,
    seconds: float,
    room: Room[T] | None = None,
) -> Decision[T]:
    """The better moves (``improved``) for what was seen in ``seconds``: calls of each task, ``waiting`` [devices]
    queries on average.

    Calls count as their predicted ``work``, queries that wait on a device as calls spread over ``BACKLOG`` seconds.
    Gaps that chance explains are left alone. Raises ``ValueError`` for calls of a task that no device holds.
    """
    weighed = work(calls, weights)
    variance = sum(weighed[task] ** 2 / count for task, count in calls.items() if count > 0) / len(placement)
    slack = NOISE * math.sqrt(variance)
    each = sum(weighed.values()) / max(sum(calls.values()), 1e-9)
    standing = (np.asarray(waiting, float) * each * seconds / BACKLOG).tolist()
    loads = device_loads(placement, weighed, standing)
    balanced = improved(placement, weighed, room, standing=standing, slack=slack)
    return Decision(1.0 if gap(loads) <= slack else balance(loads), balanced)
