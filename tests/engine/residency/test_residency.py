"""More tasks than slots: they come when queries ask for them, and leave for others."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from typing import Any

import jax
import numpy as np
import pytest
from support import ENGINE_BUCKETS, ENGINE_SETTINGS, dense_answer, light_or_mask_task, paused, shallow, tiny, wait_until

from jpets.engine.device.replica import Replica
from jpets.engine.engine import Engine
from jpets.errors import (
    DeadlineExceeded,
    EngineFailure,
    InputTooLong,
    InvalidInput,
    InvalidTask,
    NotFound,
    OutOfSpace,
    Saturated,
)
from jpets.types import Query, Result, Task

TEXT = "a library of functions for sparse matrices"
SLOTS = 7
"""Of each class, beside the one that stands for no task: ``ENGINE_SETTINGS`` rounded up to a power of two."""
SETTINGS = dataclasses.replace(ENGINE_SETTINGS, slots=SLOTS, host_memory_gb=1.0)


TASKS = [light_or_mask_task(number) for number in range(30)]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return tmp_path_factory.mktemp("paged")


@pytest.fixture
def paged(cache: Any) -> Iterator[Callable[..., Engine]]:
    """Engines that know all tasks and have room for a few; ``loads`` counts how often each was read."""
    made: list[Engine] = []

    def make(**changes: Any) -> Engine:
        settings = dataclasses.replace(SETTINGS, **changes)
        own = Engine(shallow(), [], settings, reserve=TASKS[:3], cache_dir=cache, buckets=ENGINE_BUCKETS).start()
        made.append(own)
        own.loads = Counter()  # type: ignore[attr-defined]
        for task in TASKS:
            own.register_task(task.id, loader(own, task))
        return own

    yield make
    for own in made:
        own.close()


def loader(engine: Engine, task: Task) -> Callable[[], Task]:
    def load() -> Task:
        engine.loads[task.id] += 1  # type: ignore[attr-defined]
        return task

    return load


def check_answers(engine: Engine, numbers: list[int], **more: Any) -> None:
    results = engine.infer([Query(f"task-{n}", f"{TEXT} {n}") for n in numbers], **more)
    for number, result in zip(numbers, results, strict=True):
        assert result.error is None, result.error
        task = TASKS[number]
        ids = engine.text.encode(Query(task.id, f"{TEXT} {number}"), task.preprocessing).ids
        np.testing.assert_allclose(result.logits, dense_answer(shallow(), task, ids)["logits"][0], atol=1e-4)  # type: ignore[attr-defined]


def test_every_task_answers_though_few_fit(paged: Callable[..., Engine]) -> None:
    engine = paged()
    rng = np.random.default_rng(0)
    check_answers(engine, [int(n) for n in rng.permutation(30)])
    check_answers(engine, [int(n) for n in rng.integers(0, 30, 60)])
    assert len(engine.tasks) == 30 and len(engine.tasks.all()) <= SLOTS
    assert engine.tasks.evictions >= 30 - SLOTS
    assert set(engine.loads.values()) == {1}, "host memory holds them all"  # type: ignore[attr-defined]
    assert engine.residency.counts["load"] == 30 and engine.residency.counts["host"] > 0
    assert_no_slot_lost(engine)


def test_who_was_used_last_stays(paged: Callable[..., Engine]) -> None:
    engine = paged()
    for number in range(SLOTS):
        check_answers(engine, [number])
    for entry in engine.tasks._entries.values():
        entry.cost = 0.0
    for number in (*range(SLOTS), 0):
        check_answers(engine, [number])
    check_answers(engine, [20])
    names = {resident.task.id for resident in engine.tasks.all()}
    assert {"task-0", "task-20"} <= names and "task-1" not in names


def test_without_host_memory_tasks_are_read_again(paged: Callable[..., Engine]) -> None:
    engine = paged(host_memory_gb=0.0)
    for _ in range(2):
        check_answers(engine, list(range(15)))
    assert len(engine.residency.host) == 0
    assert sum(engine.loads.values()) > 15  # type: ignore[attr-defined]


def test_host_memory_is_bounded(paged: Callable[..., Engine]) -> None:
    one = 60_000
    engine = paged(host_memory_gb=4 * one / 1e9)
    check_answers(engine, list(range(30)))
    assert 0 < engine.residency.host_bytes <= 4 * one


def test_what_is_on_its_way_is_bounded_too(paged: Callable[..., Engine]) -> None:
    """While the owner thread cannot write, no more is read than the setting allows; one task may always come."""
    engine = paged(host_memory_gb=0.0)
    with paused(engine):
        futures = engine.submit([Query(f"task-{n}", TEXT) for n in range(SLOTS)])
        wait_until(lambda: engine.residency.coming > 0, 30)
        time.sleep(0.1)
        assert engine.residency.coming == 1
        assert 0 < engine.residency.host_bytes < 100_000
    assert all(future.result(30).error is None for future in futures)
    assert engine.residency.host_bytes == 0


def test_a_removed_task_leaves_host_memory(paged: Callable[..., Engine]) -> None:
    engine = paged()
    check_answers(engine, [3, 4])
    before = engine.residency.host.nbytes
    engine.remove_task("task-3")
    assert len(engine.residency.host) == 1 and 0 < engine.residency.host.nbytes < before


def test_a_task_that_cannot_be_read_costs_no_other(paged: Callable[..., Engine]) -> None:
    engine = paged()

    def gone() -> Task:
        raise NotFound("the file is gone")

    def broken() -> Task:
        raise OSError("input/output error")

    foreign = dataclasses.replace(TASKS[0], backbone=tiny("tiny-distilbert").ref())
    engine.register_task("gone", gone)
    engine.register_task("broken", broken)
    engine.register_task("foreign", lambda: foreign)
    names = ["gone", "task-3", "broken", "task-4", "foreign"]
    results = engine.infer([Query(name, TEXT) for name in names])
    kinds = [type(result.error) for result in results]
    assert kinds == [NotFound, type(None), EngineFailure, type(None), InvalidTask]
    assert engine.residency.counts["failed"] == 3
    engine.register_task("gone", lambda: light_or_mask_task(5, "gone"))
    assert engine.infer([Query("gone", TEXT)])[0].error is None


def test_many_that_cannot_be_served_hide_no_other(paged: Callable[..., Engine]) -> None:
    engine = paged()

    def gone() -> Task:
        raise NotFound("the file is gone")

    engine.register_task("gone", gone)
    futures = engine.submit([Query("gone", TEXT)] * 300 + [Query("task-3", TEXT)] * 5)
    kinds = Counter(type(future.result(30).error) for future in futures)
    assert kinds == {NotFound: 300, type(None): 5}


def test_who_always_has_queries_makes_room(paged: Callable[..., Engine]) -> None:
    """As many tasks as there are slots never run out of queries; another one is answered all the same."""
    engine = paged()
    over = threading.Event()

    def ask(name: str) -> None:
        waiting = [engine.submit([Query(name, TEXT)])[0] for _ in range(4)]
        while not over.is_set():
            assert waiting.pop(0).result(30).error is None
            waiting += engine.submit([Query(name, TEXT)])

    threads = [threading.Thread(target=ask, args=(f"task-{n}",)) for n in range(SLOTS)]
    for thread in threads:
        thread.start()
    check_answers(engine, [20, 21, 22])
    over.set()
    for thread in threads:
        thread.join()
    assert_no_slot_lost(engine)


def test_no_slot_will_ever_be_free(paged: Callable[..., Engine]) -> None:
    engine = paged()
    for number in range(SLOTS):
        engine.add_task(light_or_mask_task(3 * number, f"stays-{number}"))
    (refused,) = engine.infer([Query("task-0", TEXT)])
    assert isinstance(refused.error, OutOfSpace)
    engine.remove_task("stays-0")
    check_answers(engine, [0])
    with pytest.raises(ValueError, match="reserve fewer"):
        paged(reserved_tasks={"much": SLOTS})


def test_a_check_makes_nobody_leave(paged: Callable[..., Engine]) -> None:
    engine = paged()
    check_answers(engine, list(range(SLOTS)))
    before = set(engine.tasks.all())
    engine.check_task(light_or_mask_task(70))
    assert set(engine.tasks.all()) == before


def test_programs_are_not_made_for_absent_tasks(paged: Callable[..., Engine]) -> None:
    with pytest.raises(InvalidInput, match="not on the device"):
        paged().specialise([Query("task-9", TEXT)])


def test_what_is_wrong_with_a_query_to_an_absent_task(paged: Callable[..., Engine]) -> None:
    engine = paged()
    long = " ".join(["word"] * 200)
    queries = [Query("task-9", long), Query("task-9", TEXT)]
    queries += [Query("task-9", input_ids=5), Query("task-9", text=5)]  # type: ignore[arg-type]
    kinds = [type(result.error) for result in engine.infer(queries)]
    assert kinds == [InputTooLong, type(None), InvalidInput, InvalidInput]
    assert engine.infer([Query("task-9", long, truncate=True)])[0].error is None


def test_a_pinned_task_stays(paged: Callable[..., Engine]) -> None:
    engine = paged()
    engine.register_task("pinned", loader(engine, light_or_mask_task(50, "pinned")), pinned=True)
    assert engine.infer([Query("pinned", TEXT)])[0].error is None
    for _ in range(3):
        check_answers(engine, list(range(30)))
    assert engine.tasks.get("default", "pinned") is not None
    assert engine.loads["pinned"] == 1  # type: ignore[attr-defined]


def test_tasks_of_a_tenant_with_a_reservation_stay(paged: Callable[..., Engine]) -> None:
    engine = paged(reserved_tasks={"small": 2})
    for name in ("a", "b", "c"):
        engine.register_task(name, loader(engine, light_or_mask_task(0, name)), tenant="small")
        assert engine.infer([Query(name, TEXT)], tenant="small")[0].error is None
    check_answers(engine, list(range(30)))
    own = [resident.task.id for resident in engine.tasks.all() if resident.tenant == "small"]
    assert len(own) == 2


def test_slots_in_use_are_waited_for(paged: Callable[..., Engine]) -> None:
    """More tasks in one submission than there are slots: the later ones wait for the first to be answered."""
    engine = paged()
    futures = engine.submit([Query(f"task-{n}", TEXT) for n in range(30) for _ in range(3)])
    assert all(future.result(60).error is None for future in futures)


def test_a_new_version_while_the_old_one_comes(paged: Callable[..., Engine]) -> None:
    engine = paged()
    entered, go_on = threading.Event(), threading.Event()

    def slow() -> Task:
        entered.set()
        go_on.wait(30)
        return light_or_mask_task(1, "changing")

    engine.register_task("changing", slow)
    (early,) = engine.submit([Query("changing", TEXT)])
    assert entered.wait(30)
    engine.register_task("changing", lambda: light_or_mask_task(2, "changing"), version=2)
    go_on.set()
    (late,) = engine.infer([Query("changing", TEXT)])
    expected = engine_answer(engine, light_or_mask_task(2))
    np.testing.assert_allclose(late.logits, expected, atol=1e-4)  # type: ignore[attr-defined]
    np.testing.assert_allclose(early.result(30).logits, expected, atol=1e-4)
    resident = engine.tasks.get("default", "changing")
    assert resident is not None and resident.version == 2
    assert_no_slot_lost(engine)


def test_a_new_version_answers_who_waited_for_one_that_cannot_be_read(paged: Callable[..., Engine]) -> None:
    engine = paged()
    entered, go_on = threading.Event(), threading.Event()

    def damaged() -> Task:
        entered.set()
        go_on.wait(30)
        raise OSError("input/output error")

    engine.register_task("mended", damaged)
    (future,) = engine.submit([Query("mended", TEXT)])
    assert entered.wait(30)
    engine.register_task("mended", lambda: light_or_mask_task(2, "mended"), version=2)
    go_on.set()
    np.testing.assert_allclose(future.result(30).logits, engine_answer(engine, light_or_mask_task(2)), atol=1e-4)
    assert engine.residency.counts["failed"] == 0
    assert_no_slot_lost(engine)


def engine_answer(engine: Engine, task: Task) -> np.ndarray:
    ids = engine.text.encode(Query(task.id, TEXT), task.preprocessing).ids
    return np.asarray(dense_answer(shallow(), task, ids)["logits"][0])


def assert_no_slot_lost(engine: Engine) -> None:
    wait_until(lambda: not engine.residency.coming, 30)

    def all_accounted_for() -> bool:
        held = Counter(key for resident in engine.tasks.all() for key in resident.slots)
        return engine.tasks.occupancy() == {key: (held[key], SLOTS) for key in engine.tasks.classes}

    wait_until(all_accounted_for, 30)


def test_a_removed_task_is_gone_for_who_waits(paged: Callable[..., Engine]) -> None:
    engine = paged()
    entered, go_on = threading.Event(), threading.Event()

    def slow() -> Task:
        entered.set()
        go_on.wait(30)
        return light_or_mask_task(1, "leaving")

    engine.register_task("leaving", slow)
    (future,) = engine.submit([Query("leaving", TEXT)])
    assert entered.wait(30)
    engine.remove_task("leaving")
    go_on.set()
    assert isinstance(future.result(30).error, NotFound)
    assert isinstance(engine.infer([Query("leaving", TEXT)])[0].error, NotFound)
    assert_no_slot_lost(engine)


def test_cold_queries_have_deadlines_and_can_be_cancelled(paged: Callable[..., Engine]) -> None:
    engine = paged()
    entered, go_on = threading.Event(), threading.Event()

    def stuck() -> Task:
        entered.set()
        go_on.wait(30)
        return light_or_mask_task(1, "stuck")

    engine.register_task("stuck", stuck)
    (hasty,) = engine.submit([Query("task-8", TEXT)], deadline=-1.0)
    assert isinstance(hasty.result(30).error, DeadlineExceeded)
    late, gone, kept = (engine.submit([Query("stuck", TEXT)], deadline=d)[0] for d in (0.05, None, None))
    assert entered.wait(30)
    assert gone.cancel()
    time.sleep(0.06)
    go_on.set()
    assert kept.result(30).error is None
    assert isinstance(late.result(30).error, DeadlineExceeded)
    assert_no_slot_lost(engine)


def every_slot_in_use(engine: Engine) -> tuple[threading.Event, list[Future[Result]]]:
    """Queries of as many tasks as there are slots, whose batches run once the event is set."""
    hold = threading.Event()
    engine.hooks.append(lambda pendings: hold.wait(30) and None)
    busy = engine.submit([Query(f"task-{n}", TEXT) for n in range(SLOTS)])
    wait_until(lambda: len(engine.tasks.all()) == SLOTS, 30)
    return hold, busy


def test_a_cold_query_is_answered_late_while_nothing_else_happens(paged: Callable[..., Engine]) -> None:
    """Every slot is taken by queries that wait; whoever finds none hears at its deadline, not when one is free."""
    engine = paged()
    hold, busy = every_slot_in_use(engine)
    (late,) = engine.submit([Query("task-20", TEXT)], deadline=0.1)
    assert isinstance(late.result(10).error, DeadlineExceeded)
    hold.set()
    assert all(future.result(30).error is None for future in busy)


def test_a_copy_that_fails_half_way(paged: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    engine = paged()
    write, failing = Replica.write, {"task-5"}

    def breaks(replica: Replica, contents: Any) -> None:
        write(replica, dict(list(contents.items())[:1]))
        if failing:
            failing.clear()
            raise MemoryError("RESOURCE_EXHAUSTED: out of memory")
        write(replica, contents)

    monkeypatch.setattr(Replica, "write", breaks)
    (result,) = engine.infer([Query("task-5", TEXT)])
    assert isinstance(result.error, EngineFailure)
    check_answers(engine, [5, 6, 7])
    assert engine.residency.counts["failed"] == 1
    assert_no_slot_lost(engine)


def no_room() -> jax.errors.JaxRuntimeError:
    return jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 1 bytes.")


@pytest.mark.parametrize(("times", "failed"), [(1, 0), (2, 1)])
def test_a_copy_without_device_memory(
    paged: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, times: int, failed: int
) -> None:
    """It is tried again without merged copies; then its queries alone are told to try again. Tasks that are written
    between the same two batches come all the same."""
    engine = paged()
    write, left, cleared = Replica.write, [times], []

    def breaks(replica: Replica, contents: Any) -> None:
        if left[0]:
            left[0] -= 1
            raise no_room()
        write(replica, contents)

    monkeypatch.setattr(Replica, "write", breaks)
    monkeypatch.setattr(engine.merged, "clear", lambda: cleared.append(True))
    results = engine.infer([Query(f"task-{n}", TEXT) for n in range(5)])
    errors = [result.error for result in results if result.error is not None]
    assert len(errors) == failed and all(isinstance(error, Saturated) for error in errors)
    assert engine.stats.out_of_memory == times and cleared == [True]
    assert engine.residency.counts["failed"] == failed
    check_answers(engine, list(range(5)))
    assert_no_slot_lost(engine)


def test_a_starving_task_makes_no_more_leave_than_it_needs(paged: Callable[..., Engine]) -> None:
    engine = paged()
    hold, busy = every_slot_in_use(engine)
    (starving,) = engine.submit([Query("task-20", TEXT)])
    wait_until(lambda: engine.tasks.evictions == 1, 30)
    for _ in range(20):
        engine.residency.wake()  # as every cold query does
        time.sleep(0.005)
    assert engine.tasks.evictions == 1
    hold.set()
    assert all(future.result(30).error is None for future in (*busy, starving))
    assert_no_slot_lost(engine)


def test_closing_answers_cold_queries(paged: Callable[..., Engine]) -> None:
    engine = paged()
    go_on = threading.Event()

    def stuck() -> Task:
        go_on.wait(30)
        return light_or_mask_task(1, "stuck")

    engine.register_task("stuck", stuck)
    futures = engine.submit([Query("stuck", TEXT), Query("task-3", TEXT)])
    threading.Timer(0.2, go_on.set).start()
    engine.close()
    assert not wait(futures, timeout=30).not_done
    assert isinstance(futures[0].result().error, Saturated)


def test_without_prefetch_tasks_come_when_nothing_else_is_left(paged: Callable[..., Engine]) -> None:
    engine = paged(prefetch=False)
    check_answers(engine, list(range(30)))


def test_tasks_added_by_value_never_leave(paged: Callable[..., Engine]) -> None:
    engine = paged()
    engine.add_task(light_or_mask_task(40, "stays"))
    check_answers(engine, list(range(30)))
    assert engine.infer([Query("stays", TEXT)])[0].error is None
    assert engine.tasks.get("default", "stays") is not None


def test_many_threads_and_changing_tasks(paged: Callable[..., Engine]) -> None:
    """Every answer is of some version that was there while its query waited."""
    engine = paged()
    versions = [engine_answer(engine, light_or_mask_task(n)) for n in (61, 62)]
    wrong: list[Any] = []
    over = threading.Event()

    def change() -> None:
        turn = 0
        while not over.is_set():
            turn += 1
            number = 61 + turn % 2
            engine.register_task("changing", lambda n=number: light_or_mask_task(n, "changing"))  # type: ignore[misc]
            time.sleep(0.005)

    def ask(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(15):
            names = ["changing", *(f"task-{n}" for n in rng.integers(0, 30, 4))]
            changing, *others = engine.infer([Query(name, TEXT) for name in names])
            if changing.error or not any(np.allclose(changing.logits, each, atol=1e-4) for each in versions):  # type: ignore[attr-defined]
                wrong.append(changing)
            wrong.extend(other for other in others if other.error)

    engine.register_task("changing", lambda: light_or_mask_task(61, "changing"))
    changer = threading.Thread(target=change)
    threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(4)]
    for thread in (changer, *threads):
        thread.start()
    for thread in threads:
        thread.join()
    over.set()
    changer.join()
    assert not wrong
    assert_no_slot_lost(engine)
