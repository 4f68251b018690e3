"""Moves tasks by itself where devices have unequal work (multi-GPU PetS section 2.3.2)."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Collection, Mapping, Sequence

import numpy as np

from jpets.engine.engine import Engine
from jpets.engine.group.apart import apart
from jpets.engine.group.homes import Homes
from jpets.engine.group.mover import Mover
from jpets.errors import Saturated
from jpets.scheduling.balancing.rebalance import rebalance, work
from jpets.scheduling.balancing.room import Room
from jpets.scheduling.balancing.rounds import AdaptiveInterval, Allowance, Window
from jpets.scheduling.queue import Floats
from jpets.types import TaskName

log = logging.getLogger(__name__)

TICK = 0.02
"""Seconds between looks at the queues."""
HALF_LIFE = 5.0
"""Seconds after which a call counts half."""
LOST_SECONDS = 1.0
"""Seconds that a device does not work until others get its tasks: one that only paused keeps them."""
LOST = "the device of this query's task does not work; send it again: others take over its tasks"
PER_COPY = 0.25
"""A task keeps a copy while each of its copies has more work than this part of a device's fair share."""


class Balancer:
    """One thread that watches queues and calls, and tells ``mover`` every ``interval`` to make the moves of
    ``rebalance``, for which devices have room and the round has bytes. Other moves wait for a later round.

    Without an interval it only tidies up after moves that are made by hand, and gives the tasks of lost devices to
    others.
    """

    def __init__(
        self,
        members: Sequence[Engine],
        homes: Homes,
        mover: Mover,
        interval: AdaptiveInterval | None,
        rate: float = 0.0,
    ) -> None:
        """``rate``: bytes that moves may take for each second; 0 for any number."""
        self._members = members
        self._homes = homes
        self._mover = mover
        self._rule = interval
        self.interval = interval.start if interval else math.inf
        """Seconds until the next round."""
        self.phi = 1.0
        """Balance of the devices' loads at the last round: the least over the most; 1 if chance explains the
        difference."""
        self.rounds = 0
        self.allowance = Allowance(rate or math.inf, (interval or AdaptiveInterval()).most)
        """Bytes that the next round may move."""
        self._window = Window[TaskName](len(members))
        self._waited: Floats = np.zeros(len(members))
        self._looks = 0
        self._lost: dict[int, float] = {}
        """Since when devices do not work."""
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._work, name="jpets-balance", daemon=True)

    @property
    def watches(self) -> bool:
        """Whether it needs calls to be counted."""
        return self._rule is not None

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._end.set()
        if self._thread.is_alive():
            self._thread.join()

    @property
    def live(self) -> bool:
        return self._thread.is_alive()

    def _work(self) -> None:
        last = time.monotonic()
        while not self._end.wait(TICK):
            try:
                self._mover.tidy()
                self._rescue(time.monotonic())
                self._waited += [len(member.pending) for member in self._members]
                self._looks += 1
                seconds = time.monotonic() - last
                if seconds >= self.interval:
                    last += seconds
                    self.round(seconds)
            except Exception:  # a round that fails must not be the last
                log.exception("devices could not be balanced")

    def _rescue(self, now: float) -> None:
        """Tasks of devices that do not work go to others, and what waits there is told so: no thread of a device that
        hangs would answer it."""
        down = [device for device, member in enumerate(self._members) if not member.live]
        self._lost = {device: self._lost.get(device, now) for device in down}
        lost = [device for device, since in self._lost.items() if now - since >= LOST_SECONDS]
        counts = self._homes.counts()
        if any(counts[device] for device in lost):
            self._mover.rescue(lost)
        for device in lost if len(lost) < len(self._members) else ():
            self._members[device].refuse_waiting(Saturated(LOST))

    def round(self, seconds: float) -> None:
        """Takes the calls of the last ``seconds``, weighs older ones less, and moves tasks between devices that
        work."""
        self._window.reset(0.5 ** (seconds / HALF_LIFE))
        for name, count in self._homes.take_calls().items():
            self._window.add(0, name, count)  # it does not matter which device it was on
        for device, waited in enumerate(self._waited / max(1, self._looks)):
            self._window.observe(device, float(waited), seconds)
        self._waited, self._looks = np.zeros(len(self._members)), 0
        called = self._window.calls()
        live = [device for device, member in enumerate(self._members) if member.live] or range(len(self._members))
        homes = {name: home.devices for name in called if (home := self._homes.get(name)) is not None}
        homes = {name: own for name, own in homes.items() if not set(own).isdisjoint(live)}  # others wait for rescue
        calls = {name: called[name] for name in homes}
        placement = [[name for name, own in homes.items() if device in own] for device in live]
        weights = {name: weight for name in calls if (weight := self._weight(name, homes[name])) is not None}
        self.allowance.grow(seconds)
        room, queues = self._room(homes, live), self._window.queue_lengths()[list(live)]
        decision = rebalance(placement, calls, weights, queues, self._window.seconds, room)
        self.allowance.spend(decision.balanced.moved)
        self.phi = decision.phi
        self.rounds += 1
        for move in decision.balanced.moves:
            if self._end.is_set():
                return
            self._mover.move(move.task, live[move.source], live[move.target], copy=move.copy)
        self._withdraw(work(calls, weights), live)
        if self._rule is not None:
            self.interval = self._rule.following(self.interval, self.phi)

    def _room(self, homes: Mapping[TaskName, Sequence[int]], live: Sequence[int]) -> Room[TaskName]:
        """Slots of these devices that are free or can become so, places for students of each group, and bytes. A task
        that is not on its device takes no bytes: its new home loads it when a query comes."""
        takes = {
            name: self._members[devices[0]].slots_of(name.id, tenant=name.tenant) for name, devices in homes.items()
        }
        sizes = {name: float(sum(slots.values())) for name, slots in takes.items()}
        places = [self._members[device].tasks.slots.room() for device in live]
        groups, left = apart(homes, live)
        return Room(sizes, budget=self.allowance.left, takes=takes, places=places, groups=groups, left=left)

    def _weight(self, name: TaskName, devices: Sequence[int]) -> float | None:
        tenant, id = name
        return self._members[devices[0]].query_weight(id, tenant=tenant)

    def _withdraw(self, done: Mapping[TaskName, float], live: Collection[int]) -> None:
        """Takes a copy from tasks that have cooled down, by their recent work. Those with one on a device that is not
        ``live`` wait for the rescue, which takes that one."""
        fair = sum(done.values()) / len(self._members)
        for name, own in done.items():
            home = self._homes.get(name)
            if home is None or len(home.devices) < 2 or not set(live).issuperset(home.devices):
                continue
            if own / len(home.devices) < PER_COPY * fair:
                self._mover.withdraw(name, home.devices[-1])
