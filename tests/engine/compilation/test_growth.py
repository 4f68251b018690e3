"""Classes that are added while others are served."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from unittest import mock

import jax
import numpy as np
import pytest
from support import ENGINE_BUCKETS, ENGINE_SETTINGS, logits_of, method_tasks, shallow, wait_until

from jpets.deltas.protocol import ClassKey
from jpets.engine.compilation.growth import Growth
from jpets.engine.engine import Engine
from jpets.engine.group.group import EngineGroup
from jpets.engine.workloads.registry import network_of
from jpets.errors import EngineFailure, OutOfSpace, Preparing, Saturated, UnknownClass
from jpets.types import Query, Result, Task

TASKS = {task.id: task for task in method_tasks(shallow())}
OLD, NEW, HEAVY = TASKS["bitfit"], TASKS["lora"], TASKS["mask"]
TEXTS = ["a text", "another text that is longer", "a third"]
BUCKETS = ENGINE_BUCKETS[1:]


def classes(*tasks: Task) -> list[ClassKey]:
    return [key for task in tasks for key in network_of(shallow()).classes(task, dict(shallow().params))]


def queries(*tasks: Task) -> list[Query]:
    return [Query(task.id, text) for text in TEXTS for task in tasks]


def numbers(result: Result) -> np.ndarray:
    assert result.error is None, result.error
    return logits_of(result)


@pytest.fixture
def grown(program_cache: Path) -> Iterator[Engine]:
    with Engine(shallow(), [OLD], ENGINE_SETTINGS, cache_dir=program_cache, buckets=BUCKETS).start() as own:
        with pytest.raises(UnknownClass):
            own.check_task(NEW)
        own.prepare(classes(NEW)).result(60)
        own.add_task(NEW)
        yield own


def test_a_class_that_comes_later_answers_as_one_of_the_start(grown: Engine, engine: Engine) -> None:
    asked = queries(OLD, NEW)
    for mine, wanted in zip(grown.infer(asked), engine.infer(asked), strict=True):
        np.testing.assert_allclose(numbers(mine), numbers(wanted), atol=1e-4)
    assert grown.prepare(classes(NEW, OLD)).done(), "nothing is made twice"


def test_heavy_classes_and_more_of_them_come_too(grown: Engine, engine: Engine) -> None:
    grown.prepare(classes(HEAVY)).result(60)
    grown.add_task(HEAVY)
    asked = queries(HEAVY, NEW, OLD)
    for mine, wanted in zip(grown.infer(asked), engine.infer(asked), strict=True):
        np.testing.assert_allclose(numbers(mine), numbers(wanted), atol=1e-4)


def test_queries_that_come_too_early_hear_so(program_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go, opened = threading.Event(), Growth._open

    def slow(growth: Growth, keys: list[ClassKey]) -> None:
        go.wait(60)
        opened(growth, keys)

    monkeypatch.setattr(Growth, "_open", slow)
    with Engine(shallow(), [OLD], ENGINE_SETTINGS, cache_dir=program_cache, buckets=BUCKETS).start() as own:
        done = own.prepare(classes(NEW))
        own.register_task(NEW.id, lambda: NEW)
        (early,) = own.infer([Query(NEW.id, TEXTS[0])])
        assert isinstance(early.error, Saturated)
        assert own.infer(queries(OLD))[0].error is None
        go.set()
        done.result(60)
        assert own.infer([Query(NEW.id, TEXTS[0])])[0].error is None


def test_without_room_nothing_comes_and_the_refusal_says_what_helps(grown: Engine) -> None:
    before = grown.family
    grown.memory.limit = grown.memory.use(grown.replica.programs).total
    done = grown.prepare(classes(HEAVY))
    with pytest.raises(OutOfSpace, match="--device-memory-gb"):
        done.result(60)
    assert grown.family == before
    with pytest.raises(UnknownClass):
        grown.check_task(HEAVY)


def test_without_mappings_for_its_programs_no_bank_is_made(grown: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    before = grown.family
    monkeypatch.setattr("jpets.engine.programs.mappings.mappings_left", lambda: 0)
    for _ in range(2):
        with pytest.raises(OutOfSpace, match="memory mappings"):
            grown.prepare(classes(HEAVY)).result(60)
    assert grown.family == before and grown.replica.bank_bytes() == grown.memory.banks


def test_banks_that_came_after_their_try_was_given_up_are_counted_once(
    grown: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the device made no progress for a while."""
    stage = grown.growth._stage

    def given_up(action: Callable[[], None]) -> None:
        stage(action)
        stage(action)  # of a second try, which found no banks yet
        raise Saturated("the device makes no progress")

    with monkeypatch.context() as slow:
        slow.setattr(grown.growth, "_stage", given_up)
        assert isinstance(grown.prepare(classes(HEAVY)).exception(60), Saturated)
    grown.prepare(classes(HEAVY)).result(60)
    names = [key for key, _ in grown.family.slots]
    assert len(set(names)) == len(names) and grown.memory.banks == grown.replica.bank_bytes()
    grown.add_task(HEAVY)
    assert numbers(*grown.infer([Query(HEAVY.id, TEXTS[0])])).size and grown.report()


@pytest.mark.parametrize("cold", [False, True])
def test_used_classes_share_batches_with_all_others(program_cache: Path, *, cold: bool) -> None:
    settings = dataclasses.replace(ENGINE_SETTINGS, background_compile=True, max_length=16, max_batch_tokens=64)
    with Engine(shallow(), [OLD], settings, cache_dir=program_cache).start() as own:
        own.prepare(classes(NEW, TASKS["ia3"])).result(120)
        assert len(own.replica.generations) == 1, "they are not used yet"
        if cold:  # its classes are not known before it is read
            own.register_task(NEW.id, lambda: NEW)
            assert numbers(*own.infer([Query(NEW.id, TEXTS[0])])).size
        else:
            own.add_task(NEW)
        assert len(own.replica.generations) == 2
        core = own.replica.generations[-1].core
        wait_until(lambda: all(map(own.replica.has_program, core)))
        assert all(numbers(result).size for result in own.infer(queries(OLD, NEW)))
        assert own._planner.ready.together([]) == ([], False)


def test_classes_whose_programs_failed_keep_no_others_apart(
    program_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = dataclasses.replace(ENGINE_SETTINGS, background_compile=True, max_length=16, max_batch_tokens=64)
    with Engine(shallow(), [OLD], settings, cache_dir=program_cache).start() as own:
        with monkeypatch.context() as broken:
            broken.setattr(own.growth, "_bring", mock.Mock(side_effect=EngineFailure("no")))
            assert isinstance(own.prepare(classes(HEAVY)).exception(60), EngineFailure)
        failed = set(classes(HEAVY)) - own.replica.opened
        assert failed and own._planner.ready.takers(heavy=True, rare=True)
        own.prepare(classes(NEW)).result(120)
        own.add_task(NEW)
        assert not failed & own.replica.generations[-1].classes
        own.prepare(classes(HEAVY)).result(120)
        assert failed <= own.replica.opened


def test_a_close_ends_what_is_being_made(program_cache: Path) -> None:
    settings = dataclasses.replace(ENGINE_SETTINGS, background_compile=True)
    own = Engine(shallow(), [OLD], settings, cache_dir=program_cache, buckets=BUCKETS).start()
    never: Future[None] = Future()
    own.compiler.need = lambda key: own.compiler._needed.setdefault(key, never)  # type: ignore[method-assign]
    done = own.prepare(classes(NEW))
    wait_until(lambda: bool(own.compiler._needed))
    own.close()
    assert isinstance(done.exception(60), Saturated)


def test_every_device_of_a_group_takes_them(program_cache: Path) -> None:
    with EngineGroup(
        shallow(), jax.local_devices()[:2], ENGINE_SETTINGS, reserve=[OLD], cache_dir=program_cache, buckets=BUCKETS
    ).start() as own:
        own.prepare(classes(NEW)).result(120)
        for number in range(4):
            own.add_task(dataclasses.replace(NEW, id=f"new-{number}"))
        results = own.infer([Query(f"new-{number}", TEXTS[0]) for number in range(4)])
        assert len({numbers(result).tobytes() for result in results}) == 1


def test_what_many_ask_for_is_tried_once_for_all(program_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands of tasks may wait for a class that cannot be had now; who asks again makes it be tried again."""
    go, opened, tries = threading.Event(), Growth._open, list[int]()

    def failing(growth: Growth, keys: list[ClassKey]) -> None:
        go.wait(60)
        tries.append(len(tries))
        if len(tries) == 1:
            raise EngineFailure("a program could not be compiled")
        opened(growth, keys)

    monkeypatch.setattr(Growth, "_open", failing)
    with Engine(shallow(), [OLD], ENGINE_SETTINGS, cache_dir=program_cache, buckets=BUCKETS).start() as own:
        asked = [own.prepare(classes(NEW)) for _ in range(20)]
        go.set()
        assert {str(one.exception(60)) for one in asked} == {"a program could not be compiled"} and len(tries) == 1
        with pytest.raises(Preparing):
            own.check_task(NEW)
        own.prepare(classes(NEW)).result(60)
        own.add_task(NEW)
        numbers(own.infer(queries(NEW))[0])
    assert len(tries) == 2
