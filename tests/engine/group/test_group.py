"""Several devices share the tasks, which move between them while they are served."""

from __future__ import annotations

import dataclasses
import threading
from collections import Counter
from typing import Any

import jax
import numpy as np
import pytest
from grouped import DEVICES, SETTINGS, TASKS, TEXT, Make, _dense, check, expected, query
from support import light_or_mask_task, logits_of, shallow, wait_until

from jpets.engine.group.group import EngineGroup
from jpets.engine.loop import host_loop
from jpets.errors import EngineFailure, NotFound, OutOfSpace, Saturated, TooLarge
from jpets.types import Embedding, Query, Task, TaskName


def test_a_group_reports_each_device(group: EngineGroup) -> None:
    report, rows = group.report(), list[int]()
    group.observe(lambda batch: rows.append(batch.rows))
    results = group.infer([query(number) for number in range(12)])
    assert all(result.error is None for result in results)
    wait_until(lambda: sum(rows) >= 12 and group.report().idle)
    after = group.report()
    assert len(report.devices) == DEVICES and after.balance is not None and after.balance.phi > 0
    batches = [new.batches - old.batches for new, old in zip(after.devices, report.devices, strict=True)]
    assert sum(batches) == len(rows) and sum(rows) == 12
    assert report.known == len(TASKS)
    group.limit([float(number) for number in range(DEVICES)])
    assert [device.limit - device.memory.total for device in group.report().devices] == list(range(DEVICES))
    group.limit([float("inf")] * DEVICES)


def test_every_task_answers_from_its_own_device(group: EngineGroup) -> None:
    before = [member.stats.batches for member in group._members]
    numbers = [int(n) for n in np.random.default_rng(0).permutation(len(TASKS))]
    check(group.infer([query(n) for n in numbers]), numbers)
    assert group.homes.counts() == (6, 6, 6, 6)
    assert all(member.stats.batches > old for member, old in zip(group._members, before, strict=True))
    for number, member in enumerate(group._members):
        replica = member.replica
        assert replica.device == jax.local_devices()[number]
        arrays = jax.tree.leaves(replica.params) + [a for b in replica.banks.values() for a in b.arrays.values()]
        assert {device for array in arrays for device in array.devices()} == {replica.device}


def test_the_plain_backbone_is_asked_on_every_device(group: EngineGroup) -> None:
    before = [member.stats.real_tokens for member in group._members]
    results = group.infer([Query(None, TEXT)] * 40)
    assert all(result.error is None for result in results)
    assert all(member.stats.real_tokens > old for member, old in zip(group._members, before, strict=True))
    first, *others = [result.embedding for result in results if isinstance(result, Embedding)]
    assert len(others) == len(results) - 1
    for other in others:
        np.testing.assert_allclose(other, first, atol=1e-5)


def test_bits_are_the_same_before_and_after_a_move(group: EngineGroup) -> None:
    for number in range(3):
        name = TaskName.of(f"task-{number}")
        (before,) = group.infer([query(number)])
        seen = {logits_of(before).tobytes()}
        for _ in range(DEVICES):
            (source,) = group.devices_of(name[1])
            target = (source + 1) % DEVICES
            assert group.mover.move(name, source, target)
            assert group.devices_of(name[1]) == (target,)
            (after,) = group.infer([query(number)])
            seen.add(logits_of(after).tobytes())
            assert group.mover.wait(10)
            assert group._members[source].tasks.entry(*name) is None
            entry = group._members[target].tasks.entry(*name)
            assert entry is not None and entry.resident is not None
        assert len(seen) == 1
    assert group.mover.counts["bytes"] > 0


def test_two_hundred_moves_while_queries_come(group: EngineGroup) -> None:
    """No query fails, none is answered wrongly, and every old place becomes free."""
    over, wrong, answered = threading.Event(), list[Any](), Counter[str]()

    def ask(seed: int) -> None:
        rng = np.random.default_rng(seed)
        while not over.is_set():
            numbers = [int(n) for n in rng.integers(0, 12, 4)]
            for number, result in zip(numbers, group.infer([query(n) for n in numbers]), strict=True):
                close = result.error is None and np.allclose(logits_of(result), expected(number), atol=1e-4)
                answered["right" if close else "wrong"] += 1
                wrong.extend([] if close else [result])

    moved = group.mover.counts["moved"]
    threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    rng = np.random.default_rng(1)
    while group.mover.counts["moved"] < moved + 200:
        name = TaskName.of(f"task-{rng.integers(0, 12)}")
        (source,) = group.devices_of(name[1])
        group.mover.move(name, source, int((source + rng.integers(1, DEVICES)) % DEVICES))
    over.set()
    for thread in threads:
        thread.join()
    assert not wrong and answered["right"] >= 100
    assert group.mover.wait(10)
    assert sum(group.homes.counts()) == len(TASKS)
    assert [len(member.tasks) for member in group._members] == list(group.homes.counts())


def test_a_copy_that_fails_leaves_everything_as_it_was(group: EngineGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    name = TaskName.of("task-4")
    check(group.infer([query(4)]), [4])
    (source,) = group.devices_of("task-4")
    target = (source + 1) % DEVICES
    occupied = group._members[target].tasks.occupancy()

    def breaks(contents: object) -> None:
        raise MemoryError("RESOURCE_EXHAUSTED: out of memory")

    def full(*_: object, **__: object) -> None:
        raise OutOfSpace("no free slot")

    for owner, attribute, what in (
        (group._members[target].replica, "write", breaks),
        (group._members[source].replica, "read", breaks),
        (group._members[target].tasks.slots, "reserve", full),
    ):
        failed = group.mover.counts["failed"]
        with monkeypatch.context() as patch:
            patch.setattr(owner, attribute, what)
            assert not group.mover.move(name, source, target)
        assert group.mover.counts["failed"] == failed + 1
        assert group.devices_of("task-4") == (source,)
        assert group._members[target].tasks.occupancy() == occupied
        check(group.infer([query(4)]), [4])
    assert group.mover.move(name, source, target)
    check(group.infer([query(4)]), [4])


def test_a_pinned_task_moves_though_its_file_is_gone(group: EngineGroup) -> None:
    """The task goes from device to device, stays pinned, and is read once."""
    reads: list[int] = []

    def load() -> Task:
        if reads:
            raise NotFound("the file is gone")
        reads.append(1)
        return light_or_mask_task(5, "pinned")

    group.register_task("pinned", load, pinned=True)
    group.infer([query(5, "pinned")])
    (source,) = group.devices_of("pinned")
    target = (source + 1) % DEVICES
    assert group.mover.move(TaskName.of("pinned"), source, target) and group.mover.wait(10)
    (result,) = group.infer([query(5, "pinned")])
    np.testing.assert_allclose(logits_of(result), expected(5), atol=1e-4)
    resident = group._members[target].tasks.get("default", "pinned")
    assert resident is not None and not resident.pageable
    group.remove_task("pinned")


def test_a_task_that_is_not_on_its_device_moves_without_being_read(group: EngineGroup) -> None:
    (source,) = group.devices_of("task-20")
    reads: list[int] = []

    def load() -> Task:
        reads.append(1)
        return light_or_mask_task(20, "late")

    group.register_task("late", load)
    (source,) = group.devices_of("late")
    assert group.mover.move(TaskName.of("late"), source, (source + 1) % DEVICES)
    assert not reads and group.mover.wait(10)
    (result,) = group.infer([query(20, "late")])
    np.testing.assert_allclose(logits_of(result), expected(20), atol=1e-4)
    assert len(reads) == 1
    group.unload("late")
    assert group.tier("late") != "device"
    np.testing.assert_allclose(logits_of(group.infer([query(20, "late")])[0]), expected(20), atol=1e-4)
    with pytest.raises(NotFound):
        group.unload("no-such")
    group.remove_task("late")
    assert isinstance(group.infer([query(20, "late")])[0].error, NotFound)


def test_what_is_no_move(group: EngineGroup) -> None:
    (source,) = group.devices_of("task-5")
    other = (source + 1) % DEVICES
    with pytest.raises(ValueError, match="another device"):
        group.mover.move(TaskName.of("task-5"), source, source)
    assert not group.mover.move(TaskName.of("unheard-of"), 0, 1)
    assert not group.mover.move(TaskName.of("task-5"), other, source), "it is not there"
    assert group.devices_of("task-5") == (source,)


def test_copies_share_the_queries_and_new_versions_replace_them_all(group: EngineGroup) -> None:
    group.add_task(light_or_mask_task(1, "hot"))
    (source,) = group.devices_of("hot")
    other = (source + 1) % DEVICES
    assert group.mover.move(TaskName.of("hot"), source, other, copy=True)
    assert group.devices_of("hot") == (source, other)
    before = [group._members[device].stats.real_tokens for device in (source, other)]
    results = group.infer([query(1, "hot")] * 40)
    for result in results:
        np.testing.assert_allclose(logits_of(result), expected(1), atol=1e-4)
    assert all(group._members[d].stats.real_tokens > old for d, old in zip((source, other), before, strict=True))
    group.add_task(light_or_mask_task(2, "hot"), version=2)
    assert len(group.devices_of("hot")) == 1
    for result in group.infer([query(2, "hot")] * 20):
        np.testing.assert_allclose(logits_of(result), expected(2), atol=1e-4)
    assert group.mover.wait(10)
    group.mover.move(TaskName.of("hot"), group.devices_of("hot")[0], (group.devices_of("hot")[0] + 1) % 4, copy=True)
    first, second = group.devices_of("hot")
    group.mover.withdraw(TaskName.of("hot"), second)
    group.mover.withdraw(TaskName.of("hot"), first)
    assert group.devices_of("hot") == (first,), "the last home stays"
    group.remove_task("hot")
    assert isinstance(group.infer([query(1, "hot")])[0].error, NotFound)
    assert not any(member.tasks.entry("default", "hot") for member in group._members)


def test_versions_change_while_tasks_move(group: EngineGroup) -> None:
    """Every answer is from a version that was served while its query waited."""
    over, wrong = threading.Event(), list[Any]()
    versions = [_dense(light_or_mask_task(n), f"{TEXT} 0") for n in (6, 7)]

    def change() -> None:
        turn = 0
        while not over.is_set():
            turn += 1
            group.add_task(light_or_mask_task(6 + turn % 2, "changing"), version=turn)

    def move() -> None:
        while not over.is_set():
            home = group.devices_of("changing")[0]
            group.mover.move(TaskName.of("changing"), home, (home + 1) % DEVICES)

    group.add_task(light_or_mask_task(6, "changing"))
    threads = [threading.Thread(target=work) for work in (change, move)]
    for thread in threads:
        thread.start()
    for _ in range(100):
        (result,) = group.infer([query(0, "changing")])
        if result.error or not any(np.allclose(logits_of(result), each, atol=1e-4) for each in versions):
            wrong.append(result)
    over.set()
    for thread in threads:
        thread.join()
    assert not wrong
    assert group.mover.wait(10)
    group.remove_task("changing")
    assert not any(member.tasks.entry("default", "changing") for member in group._members)


def test_closing_answers_everything(make: Make) -> None:
    own = make(devices=2)
    futures = own.submit([query(n % 12) for n in range(200)])
    own.close()
    kinds = {type(future.result(30).error) for future in futures}
    assert kinds <= {type(None), Saturated}
    assert not own.ready and not own.live
    with pytest.raises(Saturated):
        own.submit([query(0)])


def test_a_full_queue_refuses_a_submission_as_a_whole(make: Make) -> None:
    own = make(devices=2, settings=dataclasses.replace(SETTINGS, max_queue=20))
    hold = threading.Event()

    def wait(pendings: object) -> None:
        hold.wait(30)

    for member in own._members:
        member.hooks.append(wait)
    with pytest.raises(TooLarge):
        own.submit([query(0)] * 5 + [query(1)] * 50)
    assert not any(len(member.pending) for member in own._members)
    own.submit([query(1)] * 20)
    with pytest.raises(Saturated):
        own.submit([query(0)] * 5 + [query(1)] * 20)
    hold.set()
    wait_until(lambda: not any(len(member.pending) for member in own._members))
    check(own.infer([query(0), query(1)]), [0, 1])


def test_one_task_may_fill_the_queue(make: Make) -> None:
    own = make(devices=2, settings=dataclasses.replace(SETTINGS, max_queue=100))
    check(own.infer([query(0)] * 100), [0] * 100)


def test_a_removed_task_never_answers(group: EngineGroup) -> None:
    """The task is removed right after a move, before its old place is freed."""
    for turn in range(20):
        group.add_task(light_or_mask_task(3, "brief"))
        (source,) = group.devices_of("brief")
        assert group.mover.move(TaskName.of("brief"), source, (source + 1) % DEVICES)
        if turn % 2:
            assert group.mover.move(TaskName.of("brief"), (source + 1) % DEVICES, source)
        group.remove_task("brief")
        assert not any(member.tasks.entry("default", "brief") for member in group._members)
        assert isinstance(group.infer([query(3, "brief")])[0].error, NotFound)
    assert group.tier("brief") is None and group.entry("brief") is None


def test_a_group_has_each_device_once() -> None:
    (first, *_) = jax.local_devices()
    for devices in ([], [first, first]):
        with pytest.raises(ValueError, match="each once"):
            EngineGroup(shallow(), devices)


def test_tasks_of_a_lost_device_are_served_by_others(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    own = make(devices=3)
    lost = own.devices_of(TASKS[0].id)[0]
    theirs = [n for n in range(12) if own.devices_of(TASKS[n].id) == (lost,)]

    def fail(*_: object) -> object:
        raise jax.errors.JaxRuntimeError("INTERNAL: the device is gone")

    monkeypatch.setattr(own._members[lost].replica, "dispatch", fail)
    for _ in range(host_loop.LOST):
        assert isinstance(own.infer([query(0)])[0].error, EngineFailure)
    assert not own.live
    own.infer([query(n) for n in range(12)])
    own.add_task(light_or_mask_task(3, "late"), place=lost)
    assert lost not in own.devices_of("late"), "new tasks go to devices that work"
    wait_until(lambda: not own.homes.at(lost))
    for n in theirs:
        assert lost not in own.devices_of(TASKS[n].id)
    check(own.infer([query(n) for n in range(12)] + [query(3, "late")]), [*range(12), 3])
    target = TaskName.of(TASKS[0].id)
    assert not own.mover.move(target, own.devices_of(TASKS[0].id)[0], lost)
    balance = own.report().balance
    assert balance is not None and balance.moves["rescued"] >= len(theirs)
    assert not own.live, "only a new process may get the device back"
    before = dict(own.mover.counts)
    own.homes.called(Counter({TaskName.of(TASKS[n].id): 5 for n in range(12)}))
    own.balancer.round(1.0)
    assert not own.homes.at(lost) and own.mover.counts["failed"] == before.get("failed", 0)


def test_what_waits_for_a_device_that_hangs_is_answered(make: Make) -> None:
    own = make(devices=2)
    lost = own.devices_of(TASKS[0].id)[0]
    member, hang = own._members[lost], threading.Event()
    member.replica.staging.stage(lambda: hang.wait(60))
    try:
        wait_until(lambda: member._loop._applied_since > 0)
        futures = own.submit([query(0), query(0)])
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(member._liveness, "parts", [lambda: False])  # as once ``stall_seconds`` have passed
            results = [future.result(60) for future in futures]
            assert [type(result.error) for result in results] == [Saturated, Saturated]
            check(own.infer([query(0)]), [0])
    finally:
        hang.set()


def test_a_hanging_device_is_not_live_while_nothing_waits(make: Make) -> None:
    own = make(devices=2)
    member, hang = own._members[0], threading.Event()
    member._loop._settings = dataclasses.replace(SETTINGS, stall_seconds=0.2)
    member.replica.staging.stage(lambda: hang.wait(60))
    try:
        wait_until(lambda: not member.live)
    finally:
        hang.set()
    wait_until(lambda: member.live)


def test_where_all_devices_are_lost_tasks_stay(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    own = make(devices=2)
    before = [own.devices_of(task.id) for task in TASKS]
    for member in own._members:
        monkeypatch.setattr(member._liveness, "parts", [lambda: False])
    own.mover.rescue([0, 1])
    assert [own.devices_of(task.id) for task in TASKS] == before
