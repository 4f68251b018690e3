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
from support import ENGINE_BUCKETS, ENGINE_SETTINGS, method_tasks, shallow

from jpets.engine.compilation.background import BackgroundCompiler
from jpets.engine.compilation.readiness import Programs
from jpets.engine.engine import Engine
from jpets.engine.planning.merged import MergedCopies
from jpets.engine.residency.residency import Residency


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
    before, memory = threads(), sum(array.nbytes for array in jax.live_arrays())
    some, settings = method_tasks(shallow())[:1], dataclasses.replace(ENGINE_SETTINGS, background_compile=True)
    engine = Engine(shallow(), some, settings, cache_dir=program_cache, buckets=ENGINE_BUCKETS[1:])
    with monkeypatch.context() as broken:
        broken.setattr(*FAULTS[fault])
        with pytest.raises(Broken):
            engine.start()
    assert threads() == before
    engine.close()  # a second time, as `with` would
    del engine
    gc.collect()
    assert sum(array.nbytes for array in jax.live_arrays()) == memory


def test_each_part_is_closed_whatever_another_one_raises(
    program_cache: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = threads()
    engine = Engine(shallow(), [], ENGINE_SETTINGS, cache_dir=program_cache, buckets=ENGINE_BUCKETS[1:]).start()
    monkeypatch.setattr(engine.compiler, "close", breaks)
    monkeypatch.setattr(engine.merged, "close", breaks)
    with pytest.raises(Broken):
        engine.close()
    assert threads() == before
