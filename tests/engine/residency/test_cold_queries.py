"""Queries for tasks that are not on the device, while tasks change, fail or leave."""

from __future__ import annotations

import dataclasses
import functools
import math
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import wait
from typing import Any
from unittest import mock

import numpy as np
import pytest
from paged_engine import TASKS, TEXT, assert_no_slot_lost, engine_answer, every_slot_in_use
from support import light_or_mask_task, logits_of, tiny

from jpets.engine.engine import Engine
from jpets.engine.residency import fetching
from jpets.errors import DeadlineExceeded, EngineFailure, InputTooLong, InvalidInput, InvalidTask, NotFound, Saturated
from jpets.types import Query, Task


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


def test_a_task_that_cannot_be_read_is_not_read_for_every_query(
    paged: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetching, "REST", math.inf)
    monkeypatch.setattr(fetching, "MOST_REST", 60.0)
    engine, reads = paged(), list[float]()

    def broken() -> Task:
        reads.append(time.monotonic())
        raise OSError("input/output error")

    engine.register_task("broken", broken)
    for _ in range(5):
        assert isinstance(engine.infer([Query("broken", TEXT)])[0].error, EngineFailure)
    assert len(reads) == 1
    engine.register_task("broken", broken)
    assert isinstance(engine.infer([Query("broken", TEXT)])[0].error, EngineFailure)
    assert len(reads) == 2, "another version may be whole"
    monkeypatch.setattr(fetching, "time", mock.Mock(monotonic=lambda: time.monotonic() + 60.0))
    assert isinstance(engine.infer([Query("broken", TEXT)])[0].error, EngineFailure)
    assert len(reads) == 3


def test_many_that_cannot_be_served_hide_no_other(paged: Callable[..., Engine]) -> None:
    engine = paged()

    def gone() -> Task:
        raise NotFound("the file is gone")

    engine.register_task("gone", gone)
    futures = engine.submit([Query("gone", TEXT)] * 300 + [Query("task-3", TEXT)] * 5)
    kinds = Counter(type(future.result(30).error) for future in futures)
    assert kinds == {NotFound: 300, type(None): 5}


def test_what_is_wrong_with_a_query_to_an_absent_task(paged: Callable[..., Engine]) -> None:
    engine = paged()
    long = " ".join(["word"] * 200)
    queries = [Query("task-9", long), Query("task-9", TEXT)]
    queries += [Query("task-9", input_ids=5), Query("task-9", text=5)]  # type: ignore[arg-type]
    kinds = [type(result.error) for result in engine.infer(queries)]
    assert kinds == [InputTooLong, type(None), InvalidInput, InvalidInput]
    assert engine.infer([Query("task-9", long, truncate=True)])[0].error is None


def test_programs_are_not_made_for_absent_tasks(paged: Callable[..., Engine]) -> None:
    with pytest.raises(InvalidInput, match="not on the device"):
        paged().specialise([Query("task-9", TEXT)])


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
    np.testing.assert_allclose(logits_of(late), expected, atol=1e-4)
    np.testing.assert_allclose(logits_of(early.result(30)), expected, atol=1e-4)
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
    np.testing.assert_allclose(logits_of(future.result(30)), engine_answer(engine, light_or_mask_task(2)), atol=1e-4)
    assert engine.residency.counts["failed"] == 0
    assert_no_slot_lost(engine)


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


def test_a_deadline_may_be_endless_and_must_be_a_number(paged: Callable[..., Engine]) -> None:
    engine = paged()
    for deadline in (math.inf, 1e12):
        (future,) = engine.submit([Query("task-8", TEXT)], deadline=deadline)
        assert future.result(30).error is None
        engine.unload("task-8")
    with pytest.raises(InvalidInput, match="NaN"):
        engine.submit([Query("task-8", TEXT)], deadline=math.nan)


def test_a_cold_query_is_answered_late_while_nothing_else_happens(paged: Callable[..., Engine]) -> None:
    """Waiting queries take every slot; a query without a slot is answered at its deadline, not when a slot is free."""
    engine = paged()
    hold, busy = every_slot_in_use(engine)
    (late,) = engine.submit([Query("task-20", TEXT)], deadline=0.1)
    assert isinstance(late.result(10).error, DeadlineExceeded)
    hold.set()
    assert all(future.result(30).error is None for future in busy)


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


def test_many_threads_and_changing_tasks(paged: Callable[..., Engine]) -> None:
    """Every answer is from a version that was served while its query waited."""
    engine = paged()
    versions = [engine_answer(engine, light_or_mask_task(n)) for n in (61, 62)]
    wrong: list[Any] = []
    over = threading.Event()

    def change() -> None:
        turn = 0
        while not over.is_set():
            turn += 1
            number = 61 + turn % 2
            engine.register_task("changing", functools.partial(light_or_mask_task, number, "changing"))
            time.sleep(0.005)

    def ask(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(15):
            names = ["changing", *(f"task-{n}" for n in rng.integers(0, 30, 4))]
            changing, *others = engine.infer([Query(name, TEXT) for name in names])
            if changing.error or not any(np.allclose(logits_of(changing), each, atol=1e-4) for each in versions):
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
