"""Devices with more work than others give tasks away by themselves, within the room that there is."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from grouped import DEVICES, TASKS, Make, check, query
from support import wait_until

from jpets.engine.group import balancer
from jpets.scheduling.balancing.rounds import AdaptiveInterval


def test_skewed_load_moves_tasks_by_itself(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """One device's tasks are called three times as often as another's; after a while devices have equal work."""
    monkeypatch.setattr(balancer, "HALF_LIFE", 60.0)  # few calls prove little, and a slow machine makes few
    own = make(interval=AdaptiveInterval(least=0.1, most=1.0, start=0.3))
    calls: list[int] = []
    for device in range(DEVICES):
        tasks = [n for n in range(len(TASKS)) if own.devices_of(f"task-{n}") == (device,)]
        for n, count in zip(tasks, (3, 6, 9, 12, 18, 24) if device == 0 else range(1, 7), strict=True):
            calls += [n] * count
    calls = [int(n) for n in np.random.default_rng(0).permutation(calls)]
    seen: list[float] = []

    def ask() -> float:
        """The least work that a device gets, over the most. Few at a time, as waiting queries count as load too."""
        devices = Counter[int]()
        for n in calls:
            (place,) = own.devices_of(f"task-{n}")
            devices[place] += round(1000 * (own._members[place].query_weight(f"task-{n}") or 1.0))
        for first in range(0, len(calls), 27):
            some = calls[first : first + 27]
            check(own.infer([query(n) for n in some]), some)
            seen.append(own.balancer.phi)  # on a slow machine several rounds fit into all calls
        return min(devices[number] for number in range(DEVICES)) / max(devices.values())

    assert ask() < 0.3
    wait_until(lambda: ask() > 0.8 and own.balancer.phi > 0.9)
    assert min(seen) < 0.9 and own.balancer.rounds > 1
    assert own.mover.counts["moved"] >= 4 and own.mover.counts["failed"] == 0


def test_a_task_too_hot_for_one_device_is_copied_and_gathered_again(make: Make) -> None:
    own = make(devices=2, interval=AdaptiveInterval(least=0.05, most=0.2, start=0.05))

    def devices_after(numbers: list[int]) -> int:
        check(own.infer([query(n) for n in numbers]), numbers)
        return len(own.devices_of("task-0"))

    wait_until(lambda: devices_after([0] * 50) == 2)
    wait_until(lambda: devices_after(list(range(1, 12))) == 1)
    assert own.mover.wait(10)
