"""A round of balancing moves what targets have slots for, and as many bytes as it may."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from collections import Counter
from collections.abc import Iterator

import jax
import pytest
from support import ENGINE_BUCKETS, ENGINE_SETTINGS, light_or_mask_task, shallow, wait_until

from jpets.engine.engine import Engine
from jpets.engine.group.group import EngineGroup
from jpets.engine.residency.loading import OVERHEAD
from jpets.types import TaskName

TASKS = [light_or_mask_task(number) for number in range(12)]


@pytest.fixture(scope="module")
def group(program_cache: pathlib.Path) -> Iterator[EngineGroup]:
    """Two devices with six tasks each, which may move a byte in a microsecond."""
    settings = dataclasses.replace(ENGINE_SETTINGS, slots=15, host_memory_gb=1.0, move_mb_per_second=1.0)
    devices, buckets = jax.local_devices()[:2], ENGINE_BUCKETS[1:]
    with EngineGroup(shallow(), devices, settings, reserve=TASKS[:3], cache_dir=program_cache, buckets=buckets) as own:
        for task in TASKS:
            own.register_task(task.id, functools.partial(lambda task: task, task))
        own.start()
        own.warm([task.id for task in TASKS])
        wait_until(lambda: not own.warming)
        yield own


def test_a_round_plans_within_the_slots_of_targets_and_its_bytes(group: EngineGroup) -> None:
    first, second = group._members
    here = [n for n in range(12) if group.devices_of(f"task-{n}") == (0,)]
    masks, others = [n for n in here if n % 3 == 2], [n for n in here if n % 3 != 2]
    (mask,) = (key for key in first.slots_of(f"task-{masks[0]}") if key.method == "mask")

    def moved(numbers: list[int], seconds: float) -> list[int]:
        """Those of these tasks that move when they alone were called."""
        group.homes.called(Counter({TaskName.of(f"task-{n}"): 1000 for n in numbers}))
        group.balancer.round(seconds)
        assert group.mover.counts["failed"] == 0 and group.mover.wait(10)
        return [n for n in numbers if group.devices_of(f"task-{n}") == (1,)]

    taken = []
    while second.tasks.slots.room()[mask]:
        taken.append(second.tasks.slots.reserve([mask]))
    assert len(masks) == 2 and not moved(masks, 1000.0)
    second.tasks.slots.release(taken.pop())
    assert len(moved(masks, 1000.0)) == 1
    least = min(sum(first.slots_of(f"task-{n}").values()) for n in others)
    group.balancer.allowance.spend(group.balancer.allowance.left)
    assert not moved(others, 0.6e-6 * least), "no round has bytes for a task"
    copied, budget = group.mover.counts["bytes"], group.balancer.allowance.left + 0.6 * least
    assert len(moved(others, 0.6e-6 * least)) == 1, "what two rounds had together"
    assert group.mover.counts["bytes"] - copied <= budget + OVERHEAD
    assert len(moved(others, 1000.0)) == 2


def test_a_copy_beside_one_on_a_lost_device_stays(group: EngineGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else queries would go to that device alone. Once both work, one of them is withdrawn."""
    first, _ = group._members
    cool, hot = [n for n in range(12) if group.devices_of(f"task-{n}") == (0,)][:2]
    group.mover.move(TaskName.of(f"task-{cool}"), 0, 1, copy=True)
    assert group.mover.wait(10) and group.devices_of(f"task-{cool}") == (0, 1)

    def rounds() -> None:
        group.homes.called(Counter({TaskName.of(f"task-{cool}"): 1, TaskName.of(f"task-{hot}"): 1000}))
        group.balancer.round(1e-6)
        assert group.mover.wait(10)

    with monkeypatch.context() as patch:
        patch.setattr(Engine, "live", property(lambda own: own is not first))
        rounds()
        assert group.devices_of(f"task-{cool}") == (0, 1)
    rounds()
    assert len(group.devices_of(f"task-{cool}")) == 1
