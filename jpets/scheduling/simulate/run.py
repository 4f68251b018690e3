"""A run of the simulation: queries go to the devices of their tasks, and tasks move between them.

Devices do not see each other, so between two changes of the placement each is followed by itself.
"""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import numpy as np

from jpets.scheduling.balancing.balance import Balanced
from jpets.scheduling.balancing.rounds import Allowance, Window
from jpets.scheduling.queue import Floats, Ints
from jpets.scheduling.simulate.cluster import Cluster
from jpets.scheduling.simulate.systems import Placement, System
from jpets.scheduling.simulate.traffic import Traffic


class Round(NamedTuple):
    """One round of balancing: when, the balance phi and the interval (seconds) after it, the number of moves and of
    copies among them, their bytes, and how long they took."""

    at: float
    phi: float
    interval: float
    moves: int
    copies: int
    bytes: float
    seconds: float


@dataclasses.dataclass(frozen=True)
class Outcome:
    """When each query was ``answered`` [n] (seconds) and which device it was ``served_by`` [n]; the seconds that each
    device was ``busy`` [devices]; the rounds."""

    traffic: Traffic
    answered: Floats
    served_by: Ints
    busy: Floats
    rounds: tuple[Round, ...]

    @property
    def seconds(self) -> float:
        """Until the last query was answered."""
        return float(self.answered.max())

    @property
    def throughput(self) -> float:
        """Queries a second."""
        return len(self.traffic) / self.seconds

    @property
    def utilisation(self) -> Floats:
        """Share of the time that each device computed."""
        return self.busy / self.seconds

    @property
    def latencies(self) -> Floats:
        return self.answered - self.traffic.arrived


def simulate(cluster: Cluster, traffic: Traffic, placement: Placement, system: System) -> Outcome:
    """Serves all of ``traffic``, from ``placement`` on. Rounds take place while queries arrive."""
    if len(placement) != cluster.devices:
        raise ValueError(f"expected the tasks of {cluster.devices} devices, got {len(placement)}")
    everywhere = [range(len(cluster.kinds))] * cluster.devices
    run = _Run(cluster, traffic, everywhere if system.anywhere else placement)
    rounds = run.balance(system) if system.balancer is not None else []
    run.until(math.inf)
    busy = np.array([device.busy for device in run.devices])
    return Outcome(traffic, run.answered, run.served_by, busy, tuple(rounds))


class _Device:
    """One device: the queries that it accepted, in order of arrival, and how far it is."""

    def __init__(self) -> None:
        self.accepted: Ints = np.zeros(0, np.int_)
        self.arrived: Floats = np.zeros(0)
        self.taken = 0
        self.free_at = 0.0
        self.busy = 0.0
        self.waited = 0.0
        """Seconds that its queries waited before they were taken, all together."""

    def accept(self, queries: Ints, arrived: Floats) -> None:
        self.accepted = np.append(self.accepted[self.taken :], queries)
        self.arrived = np.append(self.arrived[self.taken :], arrived)
        self.taken = 0

    def run(self, until: float, cluster: Cluster, traffic: Traffic, answered: Floats) -> None:
        """Starts every plan that starts before ``until``."""
        while self.taken < len(self.accepted):
            start = max(self.free_at, float(self.arrived[self.taken]))
            if start >= until:
                return
            here = int(np.searchsorted(self.arrived, start, side="right"))
            part = slice(self.taken, min(here, self.taken + cluster.window))
            queries, self.taken = self.accepted[part], part.stop
            self.waited += float((start - self.arrived[part]).sum())
            self.free_at = start
            for seconds, members in cluster.batches(traffic.lengths[queries], traffic.tasks[queries]):
                self.free_at += seconds
                answered[queries[members]] = self.free_at
            self.busy += self.free_at - start

    def waited_by(self, now: float) -> float:
        """Seconds that queries have waited until ``now``, those that still wait included."""
        return self.waited + float(np.maximum(0.0, now - self.arrived[self.taken :]).sum())

    def pause(self, now: float, seconds: float) -> None:
        self.free_at = max(self.free_at, now) + seconds


class _Run:
    """The state between two events."""

    def __init__(self, cluster: Cluster, traffic: Traffic, placement: Placement) -> None:
        self.cluster, self.traffic, self.placement = cluster, traffic, placement
        self.devices = [_Device() for _ in range(cluster.devices)]
        self.window = Window[int](cluster.devices)
        self.answered = np.full(len(traffic), np.nan)
        self.served_by = np.full(len(traffic), -1)
        self.routed = 0
        self.looked = 0.0
        self.waited = np.zeros(cluster.devices)
        self._route()

    def _route(self) -> None:
        """``places`` [tasks, most replicas] and ``replicas`` [tasks]: queries of a task take turns on its devices."""
        device = np.repeat(np.arange(len(self.placement)), [len(held) for held in self.placement])
        task = np.concatenate([np.asarray(held, np.int_) for held in self.placement])
        order = np.argsort(task, kind="stable")
        self.replicas = np.bincount(task, minlength=len(self.cluster.kinds))
        if self.replicas.min() < 1:
            raise ValueError(f"every task must stand on a device; task {int(self.replicas.argmin())} does not")
        firsts = np.cumsum(self.replicas) - self.replicas
        self.places = np.zeros((len(self.replicas), int(self.replicas.max())), np.int_)
        self.places[task[order], np.arange(len(task)) - firsts[task[order]]] = device[order]

    def until(self, now: float) -> None:
        """Accepts the queries that arrive before ``now``, and starts the plans that start before it."""
        end = int(np.searchsorted(self.traffic.arrived, now))
        queries = np.arange(self.routed, end)
        tasks = self.traffic.tasks[queries]
        devices = self.places[tasks, queries % self.replicas[tasks]]
        self.served_by[queries], self.routed = devices, end
        pairs, counts = np.unique(devices * len(self.replicas) + tasks, return_counts=True)
        for pair, count in zip(pairs.tolist(), counts.tolist(), strict=True):
            device, task = divmod(pair, len(self.replicas))
            self.window.add(device, task, count)
        for number, each in enumerate(self.devices):
            own = queries[devices == number]
            each.accept(own, self.traffic.arrived[own])
            each.run(now, self.cluster, self.traffic, self.answered)

    def look(self, now: float) -> None:
        """Puts the queue lengths since the last look into the window."""
        waited = np.array([device.waited_by(now) for device in self.devices])
        seconds = now - self.looked
        for number, own in enumerate((waited - self.waited) / seconds):
            self.window.observe(number, float(own), seconds)
        self.waited, self.looked = waited, now

    def migrate(self, found: Balanced[int], now: float) -> None:
        """Queries that arrive from ``now`` on go to the new places; targets write the tasks that they received."""
        for move in found.moves:
            self.devices[move.target].pause(now, self.cluster.link.write)
        self.placement = found.placement
        self._route()

    def balance(self, system: System) -> list[Round]:
        """Rounds of balancing for as long as queries arrive."""
        assert system.balancer is not None
        cluster, rounds = self.cluster, list[Round]()
        interval = now = system.interval.start
        last, allowance = 0.0, Allowance(system.rate, system.interval.most)
        while now < self.traffic.arrived[-1]:
            self.until(now)
            self.look(now)
            allowance.grow(now - last)
            last = now
            phi, found = system.balancer(cluster, self.placement, self.window, allowance.left)
            allowance.spend(found.moved if found.moves else 0.0)
            interval, seconds = system.interval.following(interval, phi), 0.0
            if found.moves:
                first = all(each.moves == 0 for each in rounds)
                seconds = cluster.link.seconds(found.moves, cluster.sizes, cluster.devices, first)
            self.window.reset(system.keep(max(interval, seconds)))
            if found.moves:
                self.until(now + seconds)
                self.migrate(found, now + seconds)
            copies = sum(move.copy for move in found.moves)
            rounds.append(Round(now, phi, interval, len(found.moves), copies, found.moved, seconds))
            now += max(interval, seconds)
        return rounds
