"""The devices of a simulation, their tasks, and what serving and migrating take."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence

import numpy as np

from jpets.scheduling.balancing.balance import Move
from jpets.scheduling.costs.policy_lookup import Costs
from jpets.scheduling.policies.packed import packed
from jpets.scheduling.queue import Floats, Ints, Queue
from jpets.scheduling.simulate.traffic import draw_traffic


@dataclasses.dataclass(frozen=True)
class Link:
    """What migrating costs. A round lasts as long as the device that sends and receives most needs: its bytes over
    ``bandwidth`` (bytes a second), and ``write`` seconds for each of its moves. The first round with moves takes
    ``setup`` seconds more.

    The old places serve until the round is over; then each target spends ``write`` on every task that it received.
    """

    setup: float = 0.05
    bandwidth: float = 25e9
    write: float = 5e-4

    def seconds(self, moves: Sequence[Move[int]], sizes: Floats, devices: int, first: bool) -> float:
        each = np.zeros(devices)
        for move in moves:
            each[[move.source, move.target]] += sizes[move.task] / self.bandwidth + self.write
        return float(each.max()) + (self.setup if first else 0.0)


@dataclasses.dataclass(frozen=True)
class Cluster:
    """Devices and tasks: the ``kinds`` [tasks] of delta among those of ``costs``, their ``sizes`` [tasks] in bytes, and
    the ``memory`` of a device in bytes."""

    devices: int
    kinds: Ints
    sizes: Floats
    costs: Costs
    memory: float = math.inf
    window: int = 128
    link: Link = dataclasses.field(default_factory=Link)

    def __post_init__(self) -> None:
        if self.devices < 1 or self.window < 1:
            raise ValueError(f"expected at least one device and one query, got {self.devices} and {self.window}")
        if len(self.kinds) != len(self.sizes):
            raise ValueError(
                f"kinds and sizes must have one entry for each task, got {len(self.kinds)}, {len(self.sizes)}"
            )

    @functools.cached_property
    def weights(self) -> Floats:
        """Predicted seconds of one query of each task [tasks], in a batch with other queries of its kind."""
        weights = np.zeros(len(self.kinds))
        present = np.unique(self.kinds)
        for kind in present:
            own = np.flatnonzero(self.kinds == kind)
            here = own[: max(1, len(own) // self.devices)]
            traffic = draw_traffic(len(here), max(1, self.window // len(present)), 1.0, seed=0)
            weights[own] = sum(each for each, _ in self.batches(traffic.lengths, here[traffic.tasks])) / len(traffic)
        return weights

    def deal(self, seed: int) -> list[list[int]]:
        """The tasks, equally many of each kind to each device, at random: only calls make devices unequal, as in the
        paper. Algorithm 3 counts calls: it would not see that a device has more of the tasks that take longest."""
        dealt = np.random.default_rng(seed).permutation(len(self.kinds))
        dealt = dealt[np.argsort(self.kinds[dealt], kind="stable")]
        return [sorted(dealt[device :: self.devices].tolist()) for device in range(self.devices)]

    def rate(self, seed: int, windows: int = 32) -> float:
        """Queries a second that all devices serve together, with equally hot tasks and full windows."""
        rng = np.random.default_rng(seed)
        seconds = 0.0
        for _ in range(windows):
            own = rng.choice(len(self.kinds), -(-len(self.kinds) // self.devices), replace=False)
            traffic = draw_traffic(len(own), self.window, 1.0, seed=int(rng.integers(2**31)))
            tasks = own[traffic.tasks]
            seconds += sum(each for each, _ in self.batches(traffic.lengths, tasks))
        return self.devices * windows * self.window / seconds

    def batches(self, lengths: Ints, tasks: Ints) -> list[tuple[float, Ints]]:
        """Predicted seconds and queries of each batch in which these queries run."""
        queue = Queue(lengths, tasks, self.kinds[tasks])
        return [(self.costs.total(queue, [batch]), batch.queries) for batch in packed(queue, self.costs)]
