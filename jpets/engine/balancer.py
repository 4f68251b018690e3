"""Moves tasks by itself where devices have unequal work (multi-GPU PetS section 2.3.2)."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Sequence

import numpy as np

from jpets.engine.engine import Engine
from jpets.engine.homes import Homes, Name
from jpets.engine.mover import Mover
from jpets.scheduling.balance import balance, gap, improved
from jpets.scheduling.queue import Floats
from jpets.scheduling.rounds import FORGOTTEN, AdaptiveInterval

log = logging.getLogger(__name__)

TICK = 0.02
"""Seconds between looks at the queues."""
HALF_LIFE = 5.0
"""Seconds after which a call counts half."""
CHANCE = 2.0
"""Standard deviations of a device's calls, taken for Poisson's, within which loads pass for equal."""
PER_COPY = 0.25
"""A task keeps a copy while each has more calls than this part of a device's fair share."""


class Balancer:
    """One thread that watches queues and calls, and has ``mover`` do what ``improved`` says, at ``interval``.

    Without an interval it only tidies up after moves that others ask for.
    """

    def __init__(
        self, members: Sequence[Engine], homes: Homes, mover: Mover, interval: AdaptiveInterval | None
    ) -> None:
        self._members = members
        self._homes = homes
        self._mover = mover
        self._rule = interval
        self.interval = interval.start if interval else math.inf
        """Seconds until the next round."""
        self.phi = 1.0
        """Balance of the devices' loads at the last round: the least over the most; 1 where chance explains it."""
        self.rounds = 0
        self._calls: dict[Name, float] = {}
        self._waited: Floats = np.zeros(len(members))
        self._looks = 0
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._work, name="jpets-balance", daemon=True)

    @property
    def watches(self) -> bool:
        """Whether calls are to be counted for it."""
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
                self._waited += [len(member.pending) for member in self._members]
                self._looks += 1
                seconds = time.monotonic() - last
                if seconds >= self.interval:
                    last += seconds
                    self.round(seconds)
            except Exception:  # a round that goes wrong must not be the last
                log.exception("devices could not be balanced")

    def round(self, seconds: float) -> None:
        """Looks at what was called in the last ``seconds``, weighs older calls less, and moves tasks."""
        self._fade(seconds)
        homes = {name: home.devices for name in self._calls if (home := self._homes.get(name)) is not None}
        calls = {name: self._calls[name] for name in homes}
        placement = [[name for name, own in homes.items() if device in own] for device in range(len(self._members))]
        standing = self._waited / max(1, self._looks)
        self._waited, self._looks = np.zeros(len(self._members)), 0
        slack = CHANCE * math.sqrt(sum(calls.values()) / len(self._members))
        loads = standing + [sum(calls[name] / len(homes[name]) for name in own) for own in placement]
        self.phi = 1.0 if gap(loads) <= slack else balance(loads)
        self.rounds += 1
        for move in improved(placement, calls, standing=standing.tolist(), slack=slack).moves:
            if self._end.is_set():
                return
            self._mover.move(move.task, move.source, move.target, copy=move.copy)
        self._withdraw(calls)
        if self._rule is not None:
            self.interval = self._rule.following(self.interval, self.phi)

    def _fade(self, seconds: float) -> None:
        keep = 0.5 ** (seconds / HALF_LIFE)
        faded = {name: calls * keep for name, calls in self._calls.items() if calls * keep >= FORGOTTEN}
        for name, calls in self._homes.take_calls().items():
            faded[name] = faded.get(name, 0.0) + calls
        self._calls = faded

    def _withdraw(self, calls: dict[Name, float]) -> None:
        """Tasks that cooled down lose a copy."""
        fair = sum(calls.values()) / len(self._members)
        for name, count in calls.items():
            home = self._homes.get(name)
            if home is not None and len(home.devices) > 1 and count / len(home.devices) < PER_COPY * fair:
                self._mover.withdraw(name, home.devices[-1])
