"""When rounds of balancing take place, and what they look at (multi-GPU PetS section 2.3.2)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Hashable
from typing import Generic, TypeVar

import numpy as np

from jpets.scheduling.queue import Floats

T = TypeVar("T", bound=Hashable)
FORGOTTEN = 0.01
"""Calls of a task below which a window that fades drops it."""


@dataclasses.dataclass(frozen=True)
class AdaptiveInterval:
    """Seconds between two rounds of balancing, by how balanced the system is (multi-GPU PetS section 2.3.2).

    Below ``threshold`` (theta) the interval is halved, down to ``least``; else it grows by ``step``, up to ``most``.
    (The paper prints the second rule with a maximum where it must be a minimum, and phi for both quantities.) The
    defaults are those of its section 3.4.2, which does not give ``start``.
    """

    least: float = 0.2
    most: float = 20.0
    threshold: float = 0.9
    step: float = 0.5
    start: float = 10.0

    def __post_init__(self) -> None:
        if not 0 < self.least <= self.start <= self.most < math.inf:
            raise ValueError(f"expected 0 < least <= start <= most, got {self.least}, {self.start} and {self.most} s")
        if not 0 <= self.threshold <= 1 or self.step < 0:
            raise ValueError(f"expected a threshold from 0 to 1 and a step of 0 s or more, got {self}")

    def following(self, interval: float, phi: float) -> float:
        """The interval after one of ``interval`` seconds that ended with the balance ``phi``."""
        if phi < self.threshold:
            return max(self.least, interval / 2)
        return min(interval + self.step, self.most)


class Allowance:
    """The bytes that rounds may move: ``rate`` for each second since the last one, and what earlier rounds left of
    theirs, up to those of ``most`` seconds. So a round takes as small a part of its interval as the link needs for it,
    whatever the interval, and a task larger than one round's bytes moves after several.
    """

    def __init__(self, rate: float, most: float) -> None:
        if not rate > 0 or not most > 0:
            raise ValueError(f"expected a rate and a time above 0, got {rate} bytes a second and {most} s")
        self.rate = rate
        self.most = most
        self.left = 0.0

    def grow(self, seconds: float) -> None:
        self.left = min(self.left + self.rate * seconds, self.rate * self.most)

    def spend(self, moved: float) -> None:
        self.left -= moved


class Window(Generic[T]):
    """What happened on each device of late: calls of its tasks, and how many queries waited.

    Not locked: one thread writes and reads it.
    """

    def __init__(self, devices: int) -> None:
        if devices < 1:
            raise ValueError(f"a window is kept for one device or more, got {devices}")
        self._calls: list[dict[T, float]] = [{} for _ in range(devices)]
        self._waited = np.zeros(devices)
        self._seconds = np.zeros(devices)

    def add(self, device: int, task: T, calls: int = 1) -> None:
        own = self._calls[device]
        own[task] = own.get(task, 0) + calls

    def observe(self, device: int, waiting: float, seconds: float) -> None:
        """``waiting`` queries, on average, stood in the device's queue for ``seconds``."""
        self._waited[device] += waiting * seconds
        self._seconds[device] += seconds

    def calls(self) -> dict[T, float]:
        """Calls of each task that was called, on all devices together."""
        every: dict[T, float] = {}
        for device in self._calls:
            for task, calls in device.items():
                every[task] = every.get(task, 0) + calls
        return every

    def loads(self) -> Floats:
        """Calls [devices]."""
        return np.array([sum(each.values()) for each in self._calls], float)

    @property
    def seconds(self) -> float:
        """Observed time; time that was forgotten in part counts in part."""
        return float(self._seconds.max())

    def queue_lengths(self) -> Floats:
        """Mean number of waiting queries [devices]: L of the paper. 0 where nothing was observed."""
        return np.divide(self._waited, self._seconds, out=np.zeros(len(self._calls)), where=self._seconds > 0)

    def reset(self, keep: float = 0.0) -> None:
        """Forgets everything but the share ``keep`` of it."""
        for device in self._calls:
            left = {task: calls * keep for task, calls in device.items() if calls * keep >= FORGOTTEN}
            device.clear()
            device.update(left)
        self._waited *= keep
        self._seconds *= keep
