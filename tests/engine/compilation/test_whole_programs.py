"""Programs that are used much are compiled anew, each as one function, while they serve."""

from __future__ import annotations

import dataclasses
import pathlib
import threading
import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest
from support import ENGINE_SETTINGS, logits_of, make_head, make_task, random_delta, shallow, wait_until

from jpets.engine.batch.bucket import Bucket, Variant
from jpets.engine.compilation.background import UNUSED_SECONDS
from jpets.engine.compilation.process import CompilingProcess
from jpets.engine.engine import Engine
from jpets.engine.programs.program import Family, Program, ProgramKey, whole_family
from jpets.types import Query

SETTINGS = dataclasses.replace(ENGINE_SETTINGS, background_compile=True, max_length=16, max_batch_tokens=32)
TASK = make_task(
    shallow(),
    "lora",
    [random_delta("lora", shallow().config)],
    make_head(np.random.default_rng(0), shallow().config.hidden_size, 3),
)
"""Its programs are chains."""
TEXTS = ("some text", "a", "the library of functions")


@pytest.fixture
def own(tmp_path: pathlib.Path) -> Iterator[Engine]:
    with Engine(shallow(), [TASK], SETTINGS, cache_dir=tmp_path).start() as engine:
        wait_until(lambda: not engine.compiler.waiting, seconds=120)
        yield engine


def logits(engine: Engine) -> np.ndarray:
    return np.stack([logits_of(engine.infer([Query(TASK.id, text)])[0]) for text in TEXTS])


def used(engine: Engine) -> Program:
    """The program that took most time."""
    return max(engine.replica.programs, key=lambda program: program.computed)


def test_the_program_that_took_most_time_becomes_one_function(own: Engine, tmp_path: pathlib.Path) -> None:
    before = logits(own)
    program, others = used(own), [each for each in own.replica.programs if not each.computed]
    assert program.chained and program.computed > 0
    chained_bytes, memory = program.stored_bytes, program.memory
    own.compiler.compile_seconds = program.computed / 1000
    own.compiler.offer([])
    wait_until(lambda: not program.chained, seconds=60)
    assert used(own) is program, "the same program, with other code"
    assert program.stored_bytes != chained_bytes and program.memory is not memory
    np.testing.assert_allclose(logits(own), before, atol=1e-5)
    assert all(each.chained for each in others), "those without batches gain nothing"
    own.compiler.compile_seconds = 1e6
    own.close()

    with Engine(shallow(), [TASK], SETTINGS, cache_dir=tmp_path).start() as again:
        kept = {each.key: each for each in again.replica.programs}
        assert not kept[program.key].chained, "the next start has it so"
        np.testing.assert_allclose(logits(again), before, atol=1e-5)


def test_a_program_for_known_traffic_is_one_function_from_the_start(own: Engine) -> None:
    queries = [Query(TASK.id, text) for text in TEXTS[:2]]
    before = logits(own)
    key = own.specialise(queries)
    (program,) = [each for each in own.replica.programs if each.key == key]
    assert not program.chained
    np.testing.assert_allclose([logits_of(each) for each in own.infer(queries)], before[:2], atol=1e-5)


def test_a_program_is_not_compiled_anew_before_that_pays(own: Engine) -> None:
    logits(own)
    own.compiler.compile_seconds = 1e6
    own.compiler.offer([])
    with own.compiler._changed:
        assert own.compiler._next() is None
    assert all(each.chained for each in own.replica.programs)


def test_a_program_that_was_used_little_is_compiled_anew_once_nothing_comes(own: Engine) -> None:
    before, program, compiler = logits(own), used(own), own.compiler
    with compiler._changed:  # the compiling thread waits for it
        compiler.compile_seconds = program.computed  # a tenth of it was not lost yet
        assert compiler._whole.worn(compiler.compile_seconds, unused=True) == program.key
        compiler.idle_seconds = lambda: UNUSED_SECONDS / 2
        assert compiler._next() is None, "queries come"
        compiler.idle_seconds = lambda: UNUSED_SECONDS
        found = compiler._next()
        assert found is not None and found.whole and found.spare and found.key == program.key
    assert compiler.waiting
    wait_until(lambda: not compiler.waiting, seconds=120)
    assert all(not each.chained for each in own.replica.programs if each.computed)
    np.testing.assert_allclose(logits(own), before, atol=1e-5)


def test_it_is_given_up_for_a_program_that_batches_miss(own: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    logits(own)
    compiler, program, begun = own.compiler, used(own), threading.Event()
    compile = CompilingProcess.compile

    def slow(self: CompilingProcess, family: Family, key: ProgramKey, **how: Any) -> float | None:
        if not family.chained:
            begun.set()
            assert how["unless"].wait(60)
        return compile(self, family, key, **how)

    monkeypatch.setattr(CompilingProcess, "compile", slow)
    compiler.idle_seconds = lambda: UNUSED_SECONDS
    compiler.compile_seconds = program.computed
    compiler.offer([])
    assert begun.wait(60)
    compiler.idle_seconds = lambda: 0.0
    missed = ProgramKey(Bucket(12, ((1, 12),)), Variant())
    compiler.want(missed, 1e6)
    wait_until(lambda: own.replica.has_program(missed), seconds=60)
    assert program.chained and not compiler._whole.refused, "it is tried again later"


def test_no_program_is_compiled_anew_while_batches_lose_by_others(own: Engine) -> None:
    logits(own)
    key = used(own).key
    with own.compiler._changed:  # the compiling thread waits for it
        own.compiler.compile_seconds = used(own).computed / 1000
        own.compiler._wanted._lost, own.compiler._wanted._at = 0.5, time.monotonic()
        assert own.compiler._next() is None
        own.compiler._wanted._lost = 0.05
        found = own.compiler._next()
        assert found is not None and found.whole and found.key == key
        own.compiler.compile_seconds = 1e6


@pytest.mark.parametrize("fails", ["process", "run"])
def test_what_cannot_be_made_one_function_stays_as_it_was(
    own: Engine, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    before = logits(own)
    program = used(own)
    if fails == "process":
        monkeypatch.setattr(CompilingProcess, "compile", lambda *_, **__: None)
    else:

        def broken(program: Program) -> None:
            raise jax.errors.JaxRuntimeError("no")

        monkeypatch.setattr(own.compiler._whole, "_exchange", broken)
    own.compiler.compile_seconds = program.computed / 1000
    own.compiler.offer([])
    wait_until(lambda: program.key in own.compiler._whole.refused, seconds=60)
    assert program.chained
    assert own.compiler._store.load(whole_family(own.replica.family), program.key) is None
    np.testing.assert_array_equal(logits(own), before)
