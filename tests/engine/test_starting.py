"""A start that fails leaves nothing: no threads, no device memory, no compiling process."""

from __future__ import annotations

import dataclasses
import gc
import pathlib
import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax
import pytest
from support import ENGINE_BUCKETS, ENGINE_SETTINGS, method_tasks, shallow, wait_until

from jpets.engine import engine as engine_module
from jpets.engine.compilation.background import BackgroundCompiler
from jpets.engine.compilation.readiness import Programs
from jpets.engine.engine import Engine
from jpets.engine.planning.merged import MergedCopies
from jpets.engine.residency.residency import Residency
from jpets.types import Query


class Broken(Exception):
    """An unforeseen error."""


def breaks(*_: object, **__: object) -> None:
    raise Broken


FAULTS: dict[str, tuple[Any, str, Callable[..., None]]] = {
    "compiling": (Programs, "prepare", breaks),
    "a thread": (Residency, "start", breaks),
    "a task": (Engine, "add_task", breaks),
    "copies": (MergedCopies, "start", breaks),
    "the compiler": (BackgroundCompiler, "start", breaks),
}


def threads() -> Sequence[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("jpets")]


@pytest.mark.parametrize("fault", list(FAULTS))
def test_nothing_is_left_of_a_start_that_fails(
    program_cache: pathlib.Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    gc.collect()
    before, held = threads(), jax.live_arrays()
    known = {id(array) for array in held}
    some, settings = method_tasks(shallow())[:1], dataclasses.replace(ENGINE_SETTINGS, background_compile=True)
    engine = Engine(shallow(), some, settings, cache_dir=program_cache, buckets=ENGINE_BUCKETS[1:])
    with monkeypatch.context() as broken:
        broken.setattr(*FAULTS[fault])
        with pytest.raises(Broken):
            engine.start()
    wait_until(lambda: set(threads()) <= set(before))  # readers end by themselves: a source may hang
    engine.close()  # a second time, as `with` would
    del engine
    gc.collect()
    assert not [array.shape for array in jax.live_arrays() if id(array) not in known]


@pytest.mark.usefixtures("learning_costs")
def test_a_killed_process_has_told_the_next_start_what_it_learnt(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the number of its slots."""
    monkeypatch.setattr(engine_module, "KEEP_SECONDS", 0.01)
    tasks, asked = method_tasks(shallow())[:1], [Query(None, input_ids=[5, 6, 7])] * 3

    def start(slots: int) -> Engine:
        settings = dataclasses.replace(ENGINE_SETTINGS, slots=slots)
        return Engine(shallow(), tasks, settings, cache_dir=tmp_path, buckets=ENGINE_BUCKETS[1:])

    with start(4).start() as running:
        key = running.specialise(asked)
        assert key is not None
        own = next(program for program in running.replica.programs if program.key == key)
        own.seconds = 1e-9  # as on a machine where it pays
        running.infer(asked)
        wait_until(lambda: own.followed == 1)
        wait_until(lambda: start(4).costs.get(key) == own.seconds)
        other = start(9)
        assert other.family != running.family
        wait_until(lambda: other._remembered.read(other.replica.classes) == [key])


def test_each_part_is_closed_whatever_another_one_raises(
    program_cache: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = threads()
    engine = Engine(shallow(), [], ENGINE_SETTINGS, cache_dir=program_cache, buckets=ENGINE_BUCKETS[1:]).start()
    monkeypatch.setattr(engine.compiler, "close", breaks)
    monkeypatch.setattr(engine.merged, "close", breaks)
    with pytest.raises(Broken):
        engine.close()
    wait_until(lambda: set(threads()) <= set(before))  # readers end by themselves: a source may hang
