"""The ways of balancing that are compared."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import numpy as np

from jpets.scheduling.balancing.balance import balance, greedy
from jpets.scheduling.balancing.rebalance import Decision, rebalance
from jpets.scheduling.balancing.room import Room
from jpets.scheduling.balancing.rounds import AdaptiveInterval, Window
from jpets.scheduling.simulate.cluster import Cluster

Placement = Sequence[Sequence[int]]
Balancer = Callable[[Cluster, Placement, Window[int], float], Decision[int]]
"""The last argument is how many bytes a round may move."""


@dataclasses.dataclass(frozen=True)
class System:
    """How a cluster balances: by which moves, None for none, and at which interval.

    Calls count for half after ``half_life`` seconds; where that is None, until the next round only. With
    ``anywhere`` every device holds every task and queries take turns. Rounds move at most ``rate`` bytes for each
    second (``Allowance``).
    """

    balancer: Balancer | None = None
    interval: AdaptiveInterval = dataclasses.field(default_factory=AdaptiveInterval)
    anywhere: bool = False
    half_life: float | None = None
    rate: float = math.inf

    def keep(self, interval: float) -> float:
        """The share of the window that is left after a round, ``interval`` seconds before the next."""
        return 0.0 if self.half_life is None else 0.5 ** (interval / self.half_life)


def by_greedy(cluster: Cluster, placement: Placement, window: Window[int], budget: float = math.inf) -> Decision[int]:
    """Algorithm 3 over the tasks that were called: the paper's queues have no others, and a task without calls would
    stop it. It knows no ``budget``.

    phi is that of the mean queue lengths, as the paper has it.
    """
    calls, waiting = window.calls(), window.queue_lengths()
    called = [[task for task in held if task in calls] for held in placement]
    found = greedy(called, calls, dict(enumerate(cluster.sizes.tolist())))
    idle = [[task for task in held if task not in calls] for held in placement]
    held = tuple((*own, *rest) for own, rest in zip(found.placement, idle, strict=True))
    return Decision(balance(waiting), dataclasses.replace(found, placement=held))


def by_greedy_as_printed(
    cluster: Cluster, placement: Placement, window: Window[int], budget: float = math.inf
) -> Decision[int]:
    """Algorithm 3 over all tasks, also those without calls."""
    found = greedy(placement, window.calls(), dict(enumerate(cluster.sizes.tolist())))
    return Decision(balance(window.queue_lengths()), found)


def by_improved(cluster: Cluster, placement: Placement, window: Window[int], budget: float = math.inf) -> Decision[int]:
    """What a server does, within the devices' memory and the bytes of a round; but copies are never withdrawn, and
    queries take turns on them, where a server asks the device with fewer that wait."""
    sizes = cluster.sizes
    free = [cluster.memory - float(sizes[np.asarray(held, np.int_)].sum()) for held in placement]
    return rebalance(
        placement,
        window.calls(),
        dict(enumerate(cluster.weights.tolist())),
        window.queue_lengths(),
        window.seconds,
        Room(dict(enumerate(sizes.tolist())), free, budget),
    )


TEN_SECONDS = AdaptiveInterval(least=10.0, most=10.0, start=10.0)
SYSTEMS = {
    "none": System(),
    "fixed": System(by_greedy, TEN_SECONDS),
    "printed": System(by_greedy_as_printed, TEN_SECONDS),
    "adaptive": System(by_greedy),
    "ours": System(by_improved, half_life=1.0, rate=3e8),
    "anywhere": System(anywhere=True),
}
"""No migration; Algorithm 3 every 10 s, also as printed; at the adaptive interval; ours; every task everywhere."""
