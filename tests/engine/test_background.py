"""Programs that are compiled by the child process while queries are served."""

from __future__ import annotations

import dataclasses
import pathlib
import time

import pytest
from support import ENGINE_SETTINGS, shallow, wait_until

from jpets.engine import background
from jpets.engine.background import COMPILE_SECONDS
from jpets.engine.bucket import Bucket, Variant
from jpets.engine.engine import Engine
from jpets.engine.program import ProgramKey
from jpets.types import Query


def test_the_rest_of_the_menu_arrives_while_queries_are_answered(tmp_path: pathlib.Path) -> None:
    settings = dataclasses.replace(ENGINE_SETTINGS, background_compile=True, max_length=32, max_batch_tokens=64)
    with Engine(shallow(), [], settings, cache_dir=tmp_path).start() as own:
        expected = len(own.menu)
        assert len(own.core) < expected
        end = time.monotonic() + 120
        while own.compiler.waiting and time.monotonic() < end:
            (result,) = own.infer([Query(None, "some text")])
            assert result.error is None
            time.sleep(0.05)  # a core for the compilations
        programs = own.replica.programs
        assert {program.key.bucket for program in programs} == set(own.menu)
        own.compiler.want(programs[0].key, own.compiler.compile_seconds)  # there already: nothing is compiled twice
        wait_until(lambda: not own.compiler.waiting)
        assert (own.compiler.compiled, own.compiler.failed) == (expected - len(own.core), 0)
        assert own.compiler.compile_seconds not in (COMPILE_SECONDS, 0), "measured by now"
        assert own.stats.request_path_compiles == 0


def test_without_room_only_what_is_needed_stays(tmp_path: pathlib.Path) -> None:
    settings = dataclasses.replace(
        ENGINE_SETTINGS, background_compile=True, max_length=16, max_batch_tokens=64, program_memory_mb=0
    )
    with Engine(shallow(), [], settings, cache_dir=tmp_path).start() as own:
        missing = next(ProgramKey(b, Variant()) for b in own.menu if ProgramKey(b, Variant()) not in own.core)
        own.compiler.want(missing, own.compiler.compile_seconds)
        wait_until(lambda: not own.compiler.waiting)
        assert {program.key for program in own.replica.programs} == set(own.core)
        assert (own.compiler.compiled, own.compiler.failed, own.compiler.waiting) == (0, 0, 0)
        (result,) = own.infer([Query(None, "some text")])
        assert result.error is None


def test_an_idle_child_ends_and_another_one_follows(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "CHILD_IDLE_SECONDS", 0.2)
    settings = dataclasses.replace(ENGINE_SETTINGS, background_compile=True, max_length=16, max_batch_tokens=64)
    with Engine(shallow(), [], settings, cache_dir=tmp_path).start() as own:
        compiler = own.compiler
        wait_until(lambda: compiler.compiled > 0 and not compiler.waiting)
        wait_until(lambda: not compiler.child_runs)
        before, unlisted = compiler.compiled, ProgramKey(Bucket(12, ((1, 12),)), Variant())
        for _ in range(2):  # not before batches lost by its absence what compiling it takes
            assert not compiler.waiting
            compiler.want(unlisted, compiler.compile_seconds / 2)
        wait_until(lambda: compiler.compiled == before + 1)
        assert own.replica.has_program(unlisted)
