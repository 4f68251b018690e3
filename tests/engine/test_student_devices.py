"""Groups of students on several devices, one of which is lost, and groups that are asked while programs still come."""

from __future__ import annotations

import dataclasses
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from groups import FIXED, TEXTS, asked, assert_answers, group_task
from support import ENGINE_BUCKETS, ENGINE_SETTINGS, logits_of, shallow, wait_until

from jpets.engine.compilation.process import CompilingProcess
from jpets.engine.engine import Engine
from jpets.engine.group import balancer
from jpets.engine.group.apart import apart
from jpets.engine.group.group import EngineGroup
from jpets.engine.loop import host_loop
from jpets.engine.students.serving import StudentServing
from jpets.errors import EngineFailure
from jpets.types import Result, Task, TaskName

DEVICES = 4


@pytest.fixture
def devices(program_cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[EngineGroup]:
    monkeypatch.setattr(balancer, "LOST_SECONDS", 0.1)
    with EngineGroup(
        shallow(), jax.local_devices()[:DEVICES], ENGINE_SETTINGS,
        reserve=group_task().parts, cache_dir=program_cache, buckets=ENGINE_BUCKETS[:1],
    ) as own:  # fmt: skip
        yield own.start()


def lose(devices: EngineGroup, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on no batch runs on this device."""

    def fail(*_: object) -> object:
        raise jax.errors.JaxRuntimeError("INTERNAL: the device is gone")

    monkeypatch.setattr(devices._members[number].replica, "dispatch", fail)


def test_a_lost_device_leaves_the_students_before_its_own(
    devices: EngineGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until others have its students: without the first one there is no answer, and never another sum."""
    task, reads = group_task(), list[int]()

    def load() -> Task:
        reads.append(1)
        return task

    serving = StudentServing(devices, FIXED, devices=DEVICES)
    serving.add_task(task, load=load)
    assert_answers(asked(serving, "group"), task, 3)
    for times, (lost, left) in enumerate(((1, 1), (0, 0)), start=1):
        lose(devices, lost, monkeypatch)
        for _ in range(host_loop.LOST):
            found = asked(serving, "group", TEXTS[:1])
            if left:
                assert_answers(found, task, left)
            else:
                assert isinstance(found[0].error, EngineFailure) and "#" not in found[0].error.message
        wait_until(lambda lost=lost: lost not in serving.devices_of("group"))  # type: ignore[misc]
        assert_answers(asked(serving, "group"), task, 3)
        assert len(reads) == times
    balance = serving.report().balance
    assert balance is not None and balance.moves["rescued"] == 2


def test_balancing_keeps_students_on_different_devices(devices: EngineGroup) -> None:
    """Those that answer: one that nobody asks for is in nobody's way."""
    serving = StudentServing(devices, FIXED, devices=DEVICES)
    serving.add_task(group_task())
    asked(serving, "group")
    ids = serving._ids("group", "default")
    names = [TaskName.of(id) for id in ids]
    assert sorted(device for id in ids for device in devices.devices_of(id)) == [0, 1, 2]
    for _ in range(20):
        devices.homes.called(Counter({names[0]: 9000, names[1]: 1000, names[2]: 1000}))
        devices.balancer.round(1000.0)
        assert devices.mover.wait(10)
        stand = [device for id in ids for device in devices.devices_of(id)]  # a student that is hot has copies
        assert len(set(stand)) == len(stand)
    assert_answers(asked(serving, "group"), group_task(), 3)


def test_a_device_takes_its_share_of_the_students_that_are_asked() -> None:
    one, two, three = (TaskName.of(f"a.group#7.{at}") for at in (1, 2, 3))
    foreign = TaskName("acme", one.id)
    standing = {one: (0, 3), two: (1,), three: (2,), foreign: (0,), TaskName.of("task"): (0,)}
    groups, left = apart(standing, range(5))
    assert groups[one] == groups[three] != groups[foreign] and TaskName.of("task") not in groups
    assert [own[groups[one]] for own in left] == [0, 0, 0, 0, 1]
    assert [own[groups[foreign]] for own in left] == [0, 1, 1, 1, 1]
    (own, (few, more)) = apart({one: (0,), two: (1,), three: (0,)}, [0, 1])
    assert (few[own[one]], more[own[one]]) == (0, 1), "two of three, and one"
    (own, every) = apart({one: (0,)}, [0, 1])
    assert [each[own[one]] for each in every] == [0, 1], "alone it may go anywhere"


def test_first_students_of_groups_begin_on_different_devices(devices: EngineGroup) -> None:
    """Also where groups have as many students as there are devices: the first ones answer most."""
    serving = StudentServing(devices, FIXED, devices=DEVICES)
    for at in range(DEVICES):
        serving.add_task(group_task(f"group-{at}", students=DEVICES))
    firsts = {devices.devices_of(serving._ids(f"group-{at}", "default")[0]) for at in range(DEVICES)}
    assert firsts == {(device,) for device in range(DEVICES)}


def test_a_lost_students_place_is_taken_where_its_group_has_none(
    devices: EngineGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    serving = StudentServing(devices, FIXED, devices=DEVICES)
    serving.add_task(group_task())
    ids = serving._ids("group", "default")
    assert [devices.devices_of(id) for id in ids] == [(0,), (1,), (2,)]
    for at in range(3):  # the free device has most tasks
        devices.add_task(dataclasses.replace(group_task(seed=50 + at).parts[0], id=f"other-{at}"), place=3)
    devices.mover.rescue([1])
    assert [devices.devices_of(id) for id in ids] == [(0,), (3,), (2,)]


def test_a_burst_while_programs_still_come_is_answered_by_whole_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiling, go_on = threading.Event(), threading.Event()
    compile = CompilingProcess.compile

    def slow(process: CompilingProcess, *what: Any, **how: Any) -> float | None:
        compiling.set()
        assert go_on.wait(60)
        return compile(process, *what, **how)

    monkeypatch.setattr(CompilingProcess, "compile", slow)
    settings = dataclasses.replace(ENGINE_SETTINGS, background_compile=True, max_length=16, max_batch_tokens=64)
    task = group_task()
    with (
        StudentServing.of_tasks(shallow(), [task], settings, cache_dir=tmp_path).start() as serving,
        ThreadPoolExecutor(8) as clients,
    ):
        engine = serving.engine
        assert isinstance(engine, Engine)
        assert compiling.wait(60)
        before = len(engine.replica.programs)

        def burst() -> list[list[Result]]:
            return list(clients.map(lambda _: asked(serving, "group"), range(24)))

        early = burst()
        assert len(engine.replica.programs) == before, "they come after it"
        go_on.set()
        late = burst()
        wait_until(lambda: len(engine.replica.programs) > before)
        first, *others = [*early, *late, *burst()]
    assert_answers(first, task, 3)
    for found in others:
        assert [own.students for own in found] == [3] * len(TEXTS)
        for own, same in zip(found, first, strict=True):
            np.testing.assert_allclose(logits_of(own), logits_of(same), atol=2e-4)
