"""The ways of balancing that are compared."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

from jpets.scheduling.balance import Balanced, Room, greedy, improved
from jpets.scheduling.rounds import AdaptiveInterval, Window
from jpets.scheduling.simulate.cluster import Cluster

Placement = Sequence[Sequence[int]]
NOISE = 2.0
"""Standard deviations of a device's load (calls are Poisson) that a gap must exceed before ``ours`` moves anything."""
BACKLOG = 4.0
"""Seconds over which ``ours`` would have a backlog worked off."""
Balancer = Callable[[Cluster, Placement, Window[int]], Balanced[int]]


@dataclasses.dataclass(frozen=True)
class System:
    """How a cluster balances: by which moves, None for none, and at which interval.

    What happened counts for half after ``half_life`` seconds; where that is None, from one round to the next. With
    ``anywhere`` every device holds every task and queries take turns.
    """

    balancer: Balancer | None = None
    interval: AdaptiveInterval = dataclasses.field(default_factory=AdaptiveInterval)
    anywhere: bool = False
    half_life: float | None = None

    def keep(self, interval: float) -> float:
        """The share of the window that is left after a round, ``interval`` seconds before the next."""
        return 0.0 if self.half_life is None else 0.5 ** (interval / self.half_life)


def by_greedy(cluster: Cluster, placement: Placement, window: Window[int]) -> Balanced[int]:
    """Algorithm 3 over the tasks that were called: the paper's queues know no others, and one of them would stop it."""
    calls = window.calls()
    called = [[task for task in held if task in calls] for held in placement]
    found = greedy(called, calls, dict(enumerate(cluster.sizes.tolist())))
    idle = [[task for task in held if task not in calls] for held in placement]
    held = tuple((*own, *rest) for own, rest in zip(found.placement, idle, strict=True))
    return dataclasses.replace(found, placement=held)


def by_greedy_as_printed(cluster: Cluster, placement: Placement, window: Window[int]) -> Balanced[int]:
    """Algorithm 3 over all tasks, also those that nobody called."""
    return greedy(placement, window.calls(), dict(enumerate(cluster.sizes.tolist())))


def by_improved(cluster: Cluster, placement: Placement, window: Window[int]) -> Balanced[int]:
    """The better moves, within the devices' memory. A call counts as the seconds that it is predicted to take, and
    what waits on a device as calls spread over ``BACKLOG`` seconds. Gaps that chance explains are left alone."""
    calls, weights = window.calls(), cluster.weights
    weighed = {task: count * float(weights[task]) for task, count in calls.items()}
    variance = sum(count * float(weights[task]) ** 2 for task, count in calls.items()) / len(placement)
    each = sum(weighed.values()) / max(sum(calls.values()), 1e-9)
    return improved(
        placement,
        weighed,
        Room(
            dict(enumerate(cluster.sizes.tolist())),
            [cluster.memory - float(cluster.sizes[list(held)].sum()) for held in placement],
        ),
        standing=(window.queue_lengths() * each * window.seconds / BACKLOG).tolist(),
        slack=NOISE * math.sqrt(variance),
    )


TEN_SECONDS = AdaptiveInterval(least=10.0, most=10.0, start=10.0)
SYSTEMS = {
    "none": System(),
    "fixed": System(by_greedy, TEN_SECONDS),
    "printed": System(by_greedy_as_printed, TEN_SECONDS),
    "adaptive": System(by_greedy),
    "ours": System(by_improved, half_life=1.0),
    "anywhere": System(anywhere=True),
}
"""No migration; Algorithm 3 every 10 s, also as printed; at the adaptive interval; ours; every task everywhere."""
