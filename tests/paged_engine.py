"""An engine with more tasks than slots, and queries for it."""

from __future__ import annotations

import dataclasses
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import numpy as np
from support import ENGINE_SETTINGS, dense_answer, light_or_mask_task, logits_of, shallow, wait_until

from jpets.engine.engine import Engine
from jpets.types import Query, Result, Task

TEXT = "a library of functions for sparse matrices"
SLOTS = 7
"""Slots of each class, besides the one that stands for no task: ``ENGINE_SETTINGS`` rounded up to a power of two."""
SETTINGS = dataclasses.replace(ENGINE_SETTINGS, slots=SLOTS, host_memory_gb=1.0)
TASKS = [light_or_mask_task(number) for number in range(30)]


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
        np.testing.assert_allclose(logits_of(result), dense_answer(shallow(), task, ids)["logits"][0], atol=1e-4)


def engine_answer(engine: Engine, task: Task) -> np.ndarray:
    ids = engine.text.encode(Query(task.id, TEXT), task.preprocessing).ids
    return np.asarray(dense_answer(shallow(), task, ids)["logits"][0])


def assert_no_slot_lost(engine: Engine) -> None:
    wait_until(lambda: not engine.residency.coming)

    def all_accounted_for() -> bool:
        held = Counter(key for resident in engine.tasks.all() for key in resident.slots)
        return engine.tasks.occupancy() == {key: (held[key], SLOTS) for key in engine.tasks.classes}

    wait_until(all_accounted_for)


def every_slot_in_use(engine: Engine) -> tuple[threading.Event, list[Future[Result]]]:
    """Queries of as many tasks as there are slots; their batches run once the event is set."""
    hold = threading.Event()

    def wait(pendings: object) -> None:
        hold.wait(30)

    queries = [Query(f"task-{n}", TEXT) for n in range(SLOTS)]
    engine.infer(queries)  # a batch of those that come first would keep the others from being written
    engine.hooks.append(wait)
    busy = engine.submit(queries)
    assert len(engine.tasks.all()) == SLOTS
    return hold, busy
