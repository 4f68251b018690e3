"""More tasks than slots: they come when queries ask for them, and leave for others."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import numpy as np
import pytest
from paged_engine import SLOTS, TEXT, assert_no_slot_lost, check_answers, every_slot_in_use, loader
from support import light_or_mask_task, paused, wait_until

from jpets.engine.engine import Engine
from jpets.errors import NotFound, OutOfSpace
from jpets.types import Query


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
    """While the owner thread cannot write, no more tasks are read than the setting allows; one task may always come."""
    engine = paged(host_memory_gb=0.0)
    with paused(engine):
        futures = engine.submit([Query(f"task-{n}", TEXT) for n in range(SLOTS)])
        wait_until(lambda: engine.residency.coming > 0)
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


def test_who_always_has_queries_makes_room(paged: Callable[..., Engine]) -> None:
    """As many tasks as there are slots never run out of queries; another task is answered all the same."""
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


def test_no_slot_will_be_free_beside_what_another_tenant_has_reserved(paged: Callable[..., Engine]) -> None:
    engine = paged(reserved_tasks={"small": 2})
    for number in range(SLOTS - 2):
        engine.add_task(light_or_mask_task(3 * number, f"stays-{number}"))
    for name in ("a", "b"):
        engine.register_task(name, loader(engine, light_or_mask_task(0, name)), tenant="small")
        assert engine.infer([Query(name, TEXT)], tenant="small")[0].error is None
    (refused,) = engine.infer([Query("task-0", TEXT)])
    assert isinstance(refused.error, OutOfSpace)
    engine.register_task("c", loader(engine, light_or_mask_task(0, "c")), tenant="small")
    assert engine.infer([Query("c", TEXT)], tenant="small")[0].error is None


def test_slots_in_use_are_waited_for(paged: Callable[..., Engine]) -> None:
    """More tasks in one submission than there are slots: the later ones wait for the first to be answered."""
    engine = paged()
    futures = engine.submit([Query(f"task-{n}", TEXT) for n in range(30) for _ in range(3)])
    assert all(future.result(60).error is None for future in futures)


def test_a_starving_task_makes_no_more_leave_than_it_needs(paged: Callable[..., Engine]) -> None:
    engine = paged()
    hold, busy = every_slot_in_use(engine)
    (starving,) = engine.submit([Query("task-20", TEXT)])
    wait_until(lambda: engine.tasks.evictions == 1)
    for _ in range(20):
        engine.residency.wake()  # as every cold query does
        time.sleep(0.005)
    assert engine.tasks.evictions == 1
    hold.set()
    assert all(future.result(30).error is None for future in (*busy, starving))
    assert_no_slot_lost(engine)


@pytest.mark.parametrize("prefetch", [True, False])
def test_without_prefetch_tasks_come_when_nothing_else_is_left(paged: Callable[..., Engine], *, prefetch: bool) -> None:
    engine = paged(prefetch=prefetch)
    check_answers(engine, list(range(20)))
    reached, hold = threading.Event(), threading.Event()

    def wait(pendings: object) -> None:
        reached.set()
        hold.wait(30)

    engine.hooks.append(wait)
    running = engine.submit([Query("task-19", TEXT)])
    assert reached.wait(30)
    ready = engine.submit([Query("task-19", TEXT)])
    cold = engine.submit([Query("task-25", TEXT)])
    if prefetch:
        wait_until(lambda: engine.loads["task-25"] == 1)  # type: ignore[attr-defined]
    else:
        time.sleep(0.3)
        assert not engine.loads["task-25"]  # type: ignore[attr-defined]
    hold.set()
    assert all(future.result(30).error is None for future in (*running, *ready, *cold))


def test_tasks_added_by_value_never_leave(paged: Callable[..., Engine]) -> None:
    engine = paged()
    engine.add_task(light_or_mask_task(40, "stays"))
    check_answers(engine, list(range(30)))
    assert engine.infer([Query("stays", TEXT)])[0].error is None
    assert engine.tasks.get("default", "stays") is not None


def test_a_task_is_made_to_leave_and_comes_again(paged: Callable[..., Engine]) -> None:
    engine = paged()
    engine.add_task(light_or_mask_task(40, "stays"))
    engine.register_task("pinned", loader(engine, light_or_mask_task(50, "pinned")), pinned=True)
    running = engine.submit([Query(name, TEXT) for name in ("task-0", "pinned")] * 20)
    for name in ("task-0", "pinned", "stays"):
        engine.unload(name)
    assert all(future.result().error is None for future in running), "queries that it has are answered"
    assert engine.infer([Query("pinned", TEXT)])[0].error is None
    assert (engine.tier("pinned"), engine.tier("stays")) == ("device", "device")
    engine.unload("task-0")
    assert engine.tier("task-0") == "host"
    check_answers(engine, [0])
    assert engine.tier("task-0") == "device" and engine.loads["task-0"] == 1  # type: ignore[attr-defined]
    with pytest.raises(NotFound):
        engine.unload("no-such")
