"""Devices with more work than others give tasks away by themselves, within the room that there is."""

from __future__ import annotations

import dataclasses
from collections import Counter

import numpy as np
import pytest
from grouped import DEVICES, SETTINGS, TASKS, Make, check, query
from support import wait_until

from jpets.engine.group import balancer
from jpets.engine.residency.loading import OVERHEAD
from jpets.scheduling.balancing.rounds import AdaptiveInterval
from jpets.types import TaskName


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
        """The fewest queries that a device gets, over the most. Few at a time, as waiting queries count as load too."""
        devices = Counter(own.devices_of(f"task-{n}")[0] for n in calls)
        for first in range(0, len(calls), 27):
            some = calls[first : first + 27]
            check(own.infer([query(n) for n in some]), some)
        seen.append(own.balancer.phi)
        return min(devices[number] for number in range(DEVICES)) / max(devices.values())

    assert ask() < 0.3
    wait_until(lambda: ask() > 0.8 and own.balancer.phi > 0.9, 60)
    assert min(seen) < 0.9 and own.balancer.rounds > 1
    assert own.mover.counts["moved"] >= 4 and own.mover.counts["failed"] == 0


def test_a_round_plans_within_the_slots_of_targets_and_its_bytes(make: Make) -> None:
    own = make(devices=2, settings=dataclasses.replace(SETTINGS, move_mb_per_second=1.0))
    first, second = own._members
    here = [n for n in range(12) if own.devices_of(f"task-{n}") == (0,)]
    masks, others = [n for n in here if n % 3 == 2], [n for n in here if n % 3 != 2]
    (mask,) = (key for key in first.slots_of(f"task-{masks[0]}") if key.method == "mask")

    def moved(numbers: list[int], seconds: float) -> list[int]:
        """Those of these tasks that move when they alone were called."""
        own.homes.called(Counter({TaskName.of(f"task-{n}"): 1000 for n in numbers}))
        own.balancer.round(seconds)
        assert own.mover.counts["failed"] == 0 and own.mover.wait(10)
        return [n for n in numbers if own.devices_of(f"task-{n}") == (1,)]

    taken = []
    while second.tasks.slots.room()[mask]:
        taken.append(second.tasks.slots.reserve([mask]))
    assert len(masks) == 2 and not moved(masks, 1000.0)
    second.tasks.slots.release(taken.pop())
    assert len(moved(masks, 1000.0)) == 1
    least = min(sum(first.slots_of(f"task-{n}").values()) for n in others)
    own.balancer.allowance.spend(own.balancer.allowance.left)
    assert not moved(others, 0.6e-6 * least), "no round has bytes for a task"
    copied, budget = own.mover.counts["bytes"], own.balancer.allowance.left + 0.6 * least
    assert len(moved(others, 0.6e-6 * least)) == 1, "what two rounds had together"
    assert own.mover.counts["bytes"] - copied <= budget + OVERHEAD
    assert len(moved(others, 1000.0)) == 2


def test_a_task_too_hot_for_one_device_is_copied_and_gathered_again(make: Make) -> None:
    own = make(devices=2, interval=AdaptiveInterval(least=0.05, most=0.2, start=0.05))

    def devices_after(numbers: list[int]) -> int:
        check(own.infer([query(n) for n in numbers]), numbers)
        return len(own.devices_of("task-0"))

    wait_until(lambda: devices_after([0] * 50) == 2, 30)
    wait_until(lambda: devices_after(list(range(1, 12))) == 1, 60)
    assert own.mover.wait(10)
