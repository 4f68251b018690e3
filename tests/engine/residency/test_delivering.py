"""Tasks that cannot be written to the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import pytest
from paged_engine import TEXT, assert_no_slot_lost, check_answers

from jpets.engine.device.replica import Replica
from jpets.engine.engine import Engine
from jpets.errors import EngineFailure, Saturated
from jpets.types import Query


def no_room() -> jax.errors.JaxRuntimeError:
    return jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 1 bytes.")


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


@pytest.mark.parametrize(("times", "failed"), [(1, 0), (2, 1)])
def test_a_copy_without_device_memory(
    paged: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, times: int, failed: int
) -> None:
    """The write is tried again without merged copies; then only the task's queries are told to try again. Other tasks
    that are written between the same two batches come all the same."""
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
