"""A trace of requests over a day: it rises and falls as Twitter's does, and bursts stand out of it."""

from __future__ import annotations

import dataclasses

import numpy as np
from jaxtyping import Float


@dataclasses.dataclass(frozen=True)
class Burst:
    """From ``start`` on, ``seconds`` long, at so many times the mean rate of the day without bursts."""

    start: float
    seconds: float
    times: float


@dataclasses.dataclass(frozen=True)
class Day:
    """A day that takes ``seconds``: its rate follows a sine between ``least`` of the mean and what makes the mean
    ``rate`` (queries a second), and ``bursts`` stand out of it."""

    seconds: float
    rate: float
    least: float = 0.5
    bursts: tuple[Burst, ...] = ()

    def rate_at(self, times: Float[np.ndarray, " n"]) -> Float[np.ndarray, " n"]:
        """Queries a second at some times."""
        swing = (1 - self.least) * np.sin(2 * np.pi * (times / self.seconds - 0.25))
        rate = self.rate * (1 + swing)
        for burst in self.bursts:
            inside = (times >= burst.start) & (times < burst.start + burst.seconds)
            rate = np.where(inside, self.rate * burst.times, rate)
        return rate

    def arrivals(self, seed: int) -> Float[np.ndarray, " n"]:
        """When queries come, in seconds: a Poisson process of this rate, by thinning (Lewis and Shedler 1979)."""
        rng = np.random.default_rng(seed)
        highest = 2 * self.rate * max([1.0, *(burst.times for burst in self.bursts)])
        count = rng.poisson(highest * self.seconds)
        times = np.sort(rng.uniform(0, self.seconds, count))
        return times[rng.uniform(0, highest, count) < self.rate_at(times)]

    def in_burst(self, times: Float[np.ndarray, " n"]) -> np.ndarray:
        """Which times are in a burst."""
        found = np.zeros(len(times), bool)
        for burst in self.bursts:
            found |= (times >= burst.start) & (times < burst.start + burst.seconds)
        return found
