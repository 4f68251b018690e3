"""A tenant that offers ten times its share must not raise another's latency: the queue and the policy, on a clock."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Hashable, Sequence

import numpy as np
import pytest

from jpets.config import EngineSettings
from jpets.engine.batch.bucket import bucket_menu
from jpets.engine.batch.rows import Row
from jpets.engine.queue.pending import Pending
from jpets.engine.queue.pending_queue import PendingQueue
from jpets.scheduling.costs.shape import Shape
from jpets.scheduling.order.fairness import fair_batch, fill
from jpets.scheduling.policies import ready
from jpets.scheduling.policies.contention import Contention, own_batch, short_batch

ROWS, WINDOW, IN_FLIGHT, STRETCH = 32, 256, 2, EngineSettings.flood_stretch
Seconds = Callable[[int], float]


def gpu(tokens: int) -> float:
    """A device with costs mostly per batch, hardly per token: batches cost the same with any queries in them."""
    return 0.02 + 5e-6 * tokens


def cpu(tokens: int) -> float:
    """A device with costs mostly per token (MiniLM on two cores)."""
    return 0.003 + 8e-5 * tokens


@dataclasses.dataclass
class Device:
    """Serves arrivals in simulated time as the host loop does: plans when fewer than two batches are in flight."""

    cost: Seconds
    fair: bool = True
    warm: float = 0.0
    """Seconds with arrivals that do not count."""
    seconds: float = 0.0
    tokens: Counter[str] = dataclasses.field(default_factory=Counter)
    """Tokens served, by tenant."""

    def __post_init__(self) -> None:
        menu = bucket_menu(128, 1024, ROWS)
        self._shapes = [Shape(b.tokens, b.groups, self.cost(b.tokens), b.rectangular) for b in menu]
        self._contention = Contention(STRETCH)
        self._contention.rate = max(shape.tokens / shape.seconds for shape in self._shapes)

    def serve(self, arrivals: Sequence[Pending], until: float) -> dict[str, list[float]]:
        """Seconds from arrival to answer of each tenant's queries; those never served count until the end."""
        queue = PendingQueue(len(arrivals), lambda pending: None)
        took: dict[str, list[float]] = {pending.tenant: [] for pending in arrivals}
        ends, now, coming = [0.0] * IN_FLIGHT, 0.0, 0
        while True:
            now = max(now, ends[-1 if self._contention.lasts(ends[-IN_FLIGHT]) else -IN_FLIGHT])
            if not len(queue) and coming < len(arrivals):
                now = max(now, arrivals[coming].arrived)
            here = coming
            while coming < len(arrivals) and arrivals[coming].arrived <= now:
                coming += 1
            queue.put(arrivals[here:coming])
            if now > until or not len(queue):
                break
            batch, cost = self._plan(queue.most_urgent(WINDOW), now)
            ends.append(max(now, ends[-1]) + cost)
            for pending in queue.serve(batch, self._contention.keeping if self.fair else ()):
                if pending.arrived >= self.warm:
                    took[pending.tenant].append(ends[-1] - pending.arrived)
                self.tokens[pending.tenant] += pending.tokens
            self.seconds += cost
        for pending in queue.close():
            took[pending.tenant].append(max(0.0, until - pending.arrived))
        return took

    @property
    def rate(self) -> float:
        """Tokens per busy second."""
        return self.tokens.total() / self.seconds

    def _plan(self, window: list[Pending], now: float) -> tuple[list[Pending], float]:
        lengths, parties = [pending.tokens for pending in window], [pending.party for pending in window]
        modest = self._contention.modest(parties, ROWS, now) if self.fair else []
        if modest:
            others = [q for q in range(len(window)) if q not in modest]
            chosen = own_batch(modest, others, lengths, self._shapes, ROWS)
            self._contention.ran(self._cost(chosen, lengths))
        elif self._contention.lasts(now):
            chosen = short_batch(range(len(window)), lengths, self._shapes, ROWS, self._contention.longest)
        else:
            chosen = next(batch for batch in ready.cheapest_split(lengths, self._shapes, ROWS) if 0 in batch)
            if self.fair:
                chosen = fair_batch(chosen, parties, lengths, self._shapes, ROWS)
        tokens: Counter[Hashable] = Counter()
        for q in chosen:
            tokens[parties[q]] += lengths[q]
        self._contention.spend(tokens, now)
        return [window[q] for q in chosen], self._cost(chosen, lengths)

    def _cost(self, chosen: Sequence[int], lengths: Sequence[int]) -> float:
        return min(s.seconds for s in self._shapes if len(fill(chosen, lengths, s, ROWS)) == len(chosen))


def poisson(tenant: str, rate: float, until: float, seed: int) -> list[Pending]:
    rng = np.random.default_rng(seed)
    times = np.cumsum(rng.exponential(1 / rate, round(rate * until)))
    lengths = np.clip(rng.normal(32, 8, len(times)), 4, 64).astype(int)
    rows = [Row.of_tokens(ids, ids, {}, 0) for ids in (np.zeros(length, np.int32) for length in lengths)]
    return [Pending(None, None, row, None, 0, tenant, arrived=float(t)) for t, row in zip(times, rows, strict=True)]


def merged(*streams: Sequence[Pending]) -> list[Pending]:
    return sorted((pending for stream in streams for pending in stream), key=lambda pending: pending.arrived)


UNTIL = 8.0
"""Seconds simulated."""


def p99(took: list[float]) -> float:
    return float(np.percentile(took, 99))


CAPACITY: dict[Seconds, float] = {gpu: 1120.0, cpu: 376.0}
"""About how many queries a second these devices serve when the queue is long."""


@pytest.mark.parametrize(("cost", "warm", "kept"), [(gpu, 0.0, 0.97), (cpu, 1.0, 0.48)])
@pytest.mark.parametrize(("load", "seed"), [(0.2, 1), (0.5, 3), (0.8, 5)])
def test_ten_times_its_share_costs_nobody_else_their_latency(
    cost: Seconds, warm: float, kept: float, load: float, seed: int
) -> None:
    """The light tenant uses ``load`` of its share, which is half of the device. ``kept``: part of the tokens a second.

    With costs per token, the batches that the flood runs when the light tenant comes are much longer than later ones:
    their effect lasts for a second.
    """
    share = CAPACITY[cost] / 2
    light, heavy = poisson("light", load * share, UNTIL, seed), poisson("heavy", 10 * share, UNTIL, seed + 1)
    alone = p99(Device(cost, warm=warm).serve(light, UNTIL)["light"])
    beside, policy_only = Device(cost, warm=warm), Device(cost, fair=False, warm=warm)
    assert p99(beside.serve(merged(light, heavy), UNTIL)["light"]) <= 1.5 * alone
    assert p99(policy_only.serve(merged(light, heavy), UNTIL)["light"]) > 3 * alone
    assert beside.rate >= kept * policy_only.rate


@pytest.mark.parametrize("cost", [gpu, cpu])
def test_two_tenants_with_too_much_each_get_half(cost: Seconds) -> None:
    much = CAPACITY[cost]
    left, right = poisson("left", 2 * much, UNTIL, 1), poisson("right", 4 * much, UNTIL, 2)
    device = Device(cost)
    device.serve(merged(left, right), UNTIL)
    assert device.rate / 32 == pytest.approx(much, rel=0.05)
    assert device.tokens["left"] == pytest.approx(device.tokens["right"], rel=0.02)
