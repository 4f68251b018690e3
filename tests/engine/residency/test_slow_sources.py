"""A source that is slow for one task keeps neither other tasks nor the engine waiting."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from paged_engine import TASKS, TEXT, assert_no_slot_lost, check_answers, engine_answer, loader
from support import light_or_mask_task, logits_of, wait_until

from jpets.engine.engine import Engine
from jpets.errors import DeadlineExceeded, InvalidTask, NotFound
from jpets.readers import READERS
from jpets.types import Query, Task


class Slow:
    """Loads that last until they are let go."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.begun: list[str] = []

    def of(self, engine: Engine, task: Task) -> Callable[[], Task]:
        load = loader(engine, task)

        def wait() -> Task:
            self.begun.append(task.id)
            self.go.wait(60)
            return load()

        return wait


@pytest.fixture
def slow() -> Iterator[Slow]:
    made = Slow()
    yield made
    made.go.set()


def register(engine: Engine, slow: Slow, name: str, number: int = 0) -> None:
    engine.register_task(name, slow.of(engine, light_or_mask_task(number, name)))


@pytest.mark.parametrize("hanging", [1, READERS - 1])
def test_other_tasks_come_meanwhile(paged: Callable[..., Engine], slow: Slow, hanging: int) -> None:
    engine = paged()
    for n in range(hanging):
        register(engine, slow, f"slow-{n}", n)
    waiting = engine.submit([Query(f"slow-{n}", TEXT) for n in range(hanging)])
    wait_until(lambda: len(slow.begun) == hanging)
    check_answers(engine, list(range(30)))
    assert not any(future.done() for future in waiting)
    slow.go.set()
    assert all(future.result(30).error is None for future in waiting)
    assert_no_slot_lost(engine)


def test_a_deadline_is_kept_while_the_task_is_read(paged: Callable[..., Engine], slow: Slow) -> None:
    engine = paged()
    register(engine, slow, "slow")
    (late,) = engine.submit([Query("slow", TEXT)], deadline=0.2)
    assert isinstance(late.result(30).error, DeadlineExceeded)
    slow.go.set()
    assert engine.infer([Query("slow", TEXT)])[0].error is None
    assert engine.loads["slow"] == 1  # type: ignore[attr-defined]
    assert_no_slot_lost(engine)


def test_a_task_that_is_removed_while_it_is_read(paged: Callable[..., Engine], slow: Slow) -> None:
    engine = paged()
    register(engine, slow, "slow")
    (gone,) = engine.submit([Query("slow", TEXT)])
    wait_until(lambda: bool(slow.begun))
    engine.remove_task("slow")
    slow.go.set()
    assert isinstance(gone.result(30).error, NotFound)
    assert_no_slot_lost(engine)
    assert not engine.residency.host_bytes


def test_a_version_that_comes_while_the_last_one_is_read(paged: Callable[..., Engine], slow: Slow) -> None:
    engine = paged()
    register(engine, slow, "task-3", 7)
    (first,) = engine.submit([Query("task-3", TEXT)])
    wait_until(lambda: bool(slow.begun))
    engine.register_task("task-3", loader(engine, TASKS[3]), version=2)
    (second,) = engine.submit([Query("task-3", TEXT)])
    slow.go.set()
    expected = engine_answer(engine, TASKS[3])
    for told in (first, second):
        np.testing.assert_allclose(logits_of(told.result(30)), expected, atol=1e-4)
    check_answers(engine, [3])
    assert_no_slot_lost(engine)


def test_a_read_that_fails_late(paged: Callable[..., Engine], slow: Slow) -> None:
    engine = paged()

    def broken() -> Task:
        slow.begun.append("broken")
        slow.go.wait(60)
        raise InvalidTask("task 'broken' has no head")

    engine.register_task("broken", broken)
    (told,) = engine.submit([Query("broken", TEXT)])
    wait_until(lambda: bool(slow.begun))
    check_answers(engine, [1, 2])
    slow.go.set()
    error = told.result(30).error
    assert isinstance(error, InvalidTask) and "no head" in error.message
    assert engine.residency.counts["failed"] == 1
    assert_no_slot_lost(engine)


def test_warm_tasks_do_not_wait_for_a_slow_one(paged: Callable[..., Engine], slow: Slow) -> None:
    engine = paged()
    register(engine, slow, "slow")
    engine.warm(["slow", "task-0", "task-1"])
    wait_until(lambda: engine.warming == 1)
    assert engine.tier("task-0") == engine.tier("task-1") == "device"
    slow.go.set()
    wait_until(lambda: engine.warming == 0 and engine.tier("slow") == "device")
    assert_no_slot_lost(engine)


def test_an_engine_closes_while_a_task_is_read(paged: Callable[..., Engine], slow: Slow) -> None:
    engine = paged()
    register(engine, slow, "slow")
    (told,) = engine.submit([Query("slow", TEXT)])
    wait_until(lambda: bool(slow.begun))
    began = time.monotonic()
    engine.close()
    assert time.monotonic() < began + 10, "closing waits for no source"
    assert told.result(0).error is not None


def test_no_more_slots_are_held_than_can_be_read(paged: Callable[..., Engine], slow: Slow) -> None:
    """Cold queries behind many slow ones are of tasks that must wait; those in host memory must not."""
    engine = paged()
    check_answers(engine, [29])
    for n in range(40):
        register(engine, slow, f"slow-{n}", n)
    waiting = engine.submit([Query(f"slow-{n}", TEXT) for n in range(40)])
    wait_until(lambda: len(slow.begun) == READERS)
    check_answers(engine, [29])
    slow.go.set()
    assert all(future.result(60).error is None for future in waiting)
    check_answers(engine, [29])
    assert_no_slot_lost(engine)


def test_queries_come_before_tasks_that_nobody_asked_for(paged: Callable[..., Engine], slow: Slow) -> None:
    """Warming takes no place that a query's task could have next."""
    engine = paged()
    for n in range(40):
        register(engine, slow, f"warm-{n}", n)
    engine.warm([f"warm-{n}" for n in range(40)])
    wait_until(lambda: len(slow.begun) >= 2)
    check_answers(engine, [5])
    assert not any(engine.tier(f"warm-{n}") == "device" for n in range(40))


def test_a_version_that_is_uploaded_answers_those_who_wait_for_one_that_hangs(
    paged: Callable[..., Engine], slow: Slow
) -> None:
    engine = paged()
    register(engine, slow, "task-3", 7)
    (waiting,) = engine.submit([Query("task-3", TEXT)])
    wait_until(lambda: bool(slow.begun))
    engine.add_task(TASKS[3], version=2, load=loader(engine, TASKS[3]))
    np.testing.assert_allclose(logits_of(waiting.result(30)), engine_answer(engine, TASKS[3]), atol=1e-4)
    slow.go.set()
    assert_no_slot_lost(engine)
    check_answers(engine, [3])


def test_a_task_of_known_classes_gives_its_slots_back(paged: Callable[..., Engine], slow: Slow) -> None:
    """However its reading ends: its slots were kept for it meanwhile."""
    engine = paged()
    check_answers(engine, [0])
    keys = engine.tasks.entry("default", "task-0").keys  # type: ignore[union-attr]
    assert keys
    for name in ("comes", "fails", "leaves"):
        load = slow.of(engine, light_or_mask_task(0, name))

        def broken(load: Callable[[], Task] = load, name: str = name) -> Task:
            task = load()
            if name == "fails":
                raise InvalidTask("it is damaged")
            return task

        engine.register_task(name, broken, classes=keys)
    waiting = engine.submit([Query(name, TEXT) for name in ("comes", "fails", "leaves")])
    wait_until(lambda: len(slow.begun) == 3)
    engine.remove_task("leaves")
    assert isinstance(waiting[2].result(30).error, NotFound), "told at once"
    slow.go.set()
    assert waiting[0].result(30).error is None and isinstance(waiting[1].result(30).error, InvalidTask)
    assert_no_slot_lost(engine)
