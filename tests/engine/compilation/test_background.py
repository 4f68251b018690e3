"""Programs that are compiled by the child process while queries are served."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import jax
import pytest
from support import ENGINE_SETTINGS, shallow, wait_until

from jpets.config import BackboneConfig
from jpets.engine.batch.bucket import Bucket, Variant
from jpets.engine.compilation import background, wanted
from jpets.engine.compilation.background import (
    COMPILE_SECONDS,
    HURRY_RATE,
    LOOK_SECONDS,
    RETRY_SECONDS,
    BackgroundCompiler,
)
from jpets.engine.compilation.process import HURRIED, IDLE
from jpets.engine.compilation.program_memory import IDLE_SECONDS
from jpets.engine.compilation.wanted import Wanted
from jpets.engine.compilation.whole import IDLE_SHARE
from jpets.engine.costs.cost_table import CostTable
from jpets.engine.device.replica import Generation
from jpets.engine.engine import Engine
from jpets.engine.programs import store
from jpets.engine.programs.mesh import first_device
from jpets.engine.programs.program import Family, ProgramKey, whole_family
from jpets.engine.programs.store import ProgramStore
from jpets.engine.workloads.encoder_network import EncoderNetwork
from jpets.errors import EngineFailure, OutOfSpace, Saturated
from jpets.files import TEMPORARY, written_by
from jpets.types import Query

FAMILY = Family(EncoderNetwork(BackboneConfig("bert", 50, 16, 1, 2, 32, 64)), "float32", ())


def test_the_rest_of_the_menu_arrives_while_queries_are_answered(tmp_path: pathlib.Path) -> None:
    settings = dataclasses.replace(ENGINE_SETTINGS, background_compile=True, max_length=32, max_batch_tokens=64)
    with Engine(shallow(), [], settings, cache_dir=tmp_path).start() as own:
        expected = len(own.menu.buckets)
        assert len(own.core) < expected
        end = time.monotonic() + 120
        while len(own.replica.programs) < expected and time.monotonic() < end:
            (result,) = own.infer([Query(None, "some text")])
            assert result.error is None
            time.sleep(0.05)  # leaves a core to the compilations
        programs = own.replica.programs
        assert {program.key.bucket for program in programs} == set(own.menu.buckets)
        own.compiler.want(programs[0].key, own.compiler.compile_seconds)  # there already: nothing is compiled twice
        wait_until(lambda: not own.compiler.waiting)
        assert (own.compiler.compiled, own.compiler.failed) == (expected - len(own.core), 0)
        assert own.compiler.compile_seconds not in (COMPILE_SECONDS, 0), "measured by now"
        assert own.stats.request_path_compiles == 0


def test_without_room_only_what_is_needed_stays(tmp_path: pathlib.Path) -> None:
    settings = dataclasses.replace(
        ENGINE_SETTINGS, background_compile=True, max_length=16, max_batch_tokens=64, program_memory_mb=1
    )
    with Engine(shallow(), [], settings, cache_dir=tmp_path).start() as own:
        missing = next(ProgramKey(b, Variant()) for b in own.menu.buckets if ProgramKey(b, Variant()) not in own.core)
        own.compiler.want(missing, own.compiler.compile_seconds)
        wait_until(lambda: not own.compiler.waiting)
        assert {program.key for program in own.replica.programs} == set(own.core)
        assert (own.compiler.compiled, own.compiler.failed, own.compiler.waiting) == (0, 0, 0)
        (result,) = own.infer([Query(None, "some text")])
        assert result.error is None


def test_nothing_is_compiled_in_vain(compiler: BackgroundCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    """What batches lose most is compiled once a program that came later was idle for long, and not before."""
    compiled = mock.Mock(wraps=compiler.process.compile)
    monkeypatch.setattr(compiler.process, "compile", compiled)
    monkeypatch.setattr(background, "IDLE_SECONDS", 0.0)  # it may be asked for again at once
    monkeypatch.setattr(compiler.memory, "_budget", compiler.memory.used + 2**21)  # less than a program
    replica = compiler._replica
    before = {program.key for program in replica.programs}
    added = before & compiler.memory._added
    for program in replica.programs:
        program.last_used = time.monotonic()
    for _ in range(3):
        compiler.want(unlisted(6), compiler.compile_seconds)
        wait_until(lambda: not compiler.waiting)
    assert compiled.call_count == 0 and before == {program.key for program in replica.programs}
    for program in replica.programs:
        program.last_used -= 2 * IDLE_SECONDS
    compiler.want(unlisted(6), compiler.compile_seconds)
    wait_until(lambda: replica.has_program(unlisted(6)))
    assert compiled.call_count == 1 and before - {program.key for program in replica.programs} <= added


def test_an_idle_child_ends_and_another_one_follows(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "PROCESS_IDLE_SECONDS", 0.2)
    settings = dataclasses.replace(ENGINE_SETTINGS, background_compile=True, max_length=16, max_batch_tokens=64)
    with Engine(shallow(), [], settings, cache_dir=tmp_path).start() as own:
        compiler = own.compiler
        wait_until(lambda: compiler.compiled > 0 and not compiler.waiting)
        wait_until(lambda: not compiler.process.runs)
        before, unlisted = compiler.compiled, ProgramKey(Bucket(12, ((1, 12),)), Variant())
        for _ in range(2):  # only after batches without it have lost a part of what compiling it costs
            assert not compiler.waiting
            compiler.want(unlisted, compiler.compile_seconds * IDLE_SHARE / 2)
        wait_until(lambda: compiler.compiled == before + 1)
        assert own.replica.has_program(unlisted)


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BackgroundCompiler]:
    """The compiler of an engine that compiles only on request."""
    settings = dataclasses.replace(ENGINE_SETTINGS, background_compile=True, max_length=16, max_batch_tokens=64)
    with Engine(shallow(), [], settings, cache_dir=tmp_path_factory.mktemp("programs")).start() as own:
        wait_until(lambda: own.compiler.compiled > 0 and not own.compiler.waiting)
        yield own.compiler


def unlisted(tokens: int) -> ProgramKey:
    return ProgramKey(Bucket(tokens, ((1, tokens),)), Variant())


def test_a_compiling_process_that_is_killed_costs_no_program(
    compiler: BackgroundCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    running, killed = compiler.process._running, list[int]()

    def mortal(niceness: int) -> subprocess.Popen[str]:
        child = running(niceness)
        if not killed:
            killed.append(child.pid)
            (compiler.process._folder / f"{written_by(child.pid)}half").write_bytes(b"half a program")
            child.kill()
        return child

    monkeypatch.setattr(compiler.process, "_running", mortal)
    before, failed = compiler.compiled, compiler.failed
    compiler.want(unlisted(12), compiler.compile_seconds)
    wait_until(lambda: compiler.compiled == before + 1)
    assert compiler.failed == failed
    assert not list(compiler.process._folder.glob(f"{TEMPORARY}*")), "what the process was writing is swept"


@pytest.mark.parametrize("fault", ["dies", "raises"])
def test_a_program_that_could_not_be_had_may_be_asked_for_again(
    compiler: BackgroundCompiler, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    def failing(key: ProgramKey, niceness: int, unless: object = None) -> None:
        if fault == "raises":
            raise OSError("no more processes")

    before, failed, key = compiler.compiled, compiler.failed, unlisted(13 if fault == "dies" else 14)
    with monkeypatch.context() as patched:
        patched.setattr(compiler, "_load", failing)
        compiler.want(key, compiler.compile_seconds)
        wait_until(lambda: compiler.failed == failed + 1)
        compiler.want(key, compiler.compile_seconds)
        assert not compiler.waiting, "not at once"
    monkeypatch.setattr(wanted, "time", mock.Mock(monotonic=lambda: time.monotonic() + 2 * RETRY_SECONDS))
    compiler.want(key, compiler.compile_seconds)
    wait_until(lambda: compiler.compiled == before + 1)


def test_the_core_of_new_classes_comes_by_itself_after_a_failure(
    compiler: BackgroundCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, replica, failed = unlisted(19), compiler._replica, compiler.failed
    generations = (*replica.generations, Generation(replica.classes, (key,)))
    monkeypatch.setattr(replica, "generations", generations)
    with monkeypatch.context() as broken:
        broken.setattr(compiler, "_load", lambda key, niceness: None)
        compiler.offer(())
        wait_until(lambda: compiler.failed == failed + 1)
    assert not replica.has_program(key) and compiler.barred(key)
    monkeypatch.setattr(wanted, "time", mock.Mock(monotonic=lambda: time.monotonic() + 2 * RETRY_SECONDS))
    wait_until(lambda: replica.has_program(key))


def test_a_needed_program_that_does_not_run_is_compiled_again(
    compiler: BackgroundCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = unlisted(15)
    with monkeypatch.context() as broken:
        broken.setattr(compiler, "_add", mock.Mock(side_effect=ValueError))
        assert isinstance(compiler.need(key).exception(60), EngineFailure)
    assert compiler._store.load(compiler._replica.family, key) is None, "what is stored is not tried again"
    compiler.need(key).result(60)
    assert compiler._replica.has_program(key)


@pytest.mark.parametrize(
    "error", [Saturated("busy"), OutOfSpace("full"), jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED")]
)
def test_a_program_that_found_no_room_stays_stored(
    error: Exception, compiler: BackgroundCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = unlisted(61)
    forget = mock.Mock(wraps=compiler._store.forget)
    with monkeypatch.context() as broken:
        broken.setattr(compiler, "_add", mock.Mock(side_effect=error))
        broken.setattr(compiler._store, "forget", forget)
        assert isinstance(compiler.need(key).exception(60), Saturated | OutOfSpace)
        forget.assert_not_called()
        broken.setattr(compiler, "_add", mock.Mock(side_effect=jax.errors.JaxRuntimeError("INVALID_ARGUMENT")))
        assert isinstance(compiler.need(key).exception(60), EngineFailure)
    own = compiler._replica.family
    assert [call.args for call in forget.call_args_list] == [(own, key), (whole_family(own), key)]


def test_nothing_is_needed_of_a_closed_compiler(program_cache: pathlib.Path) -> None:
    settings = dataclasses.replace(ENGINE_SETTINGS, background_compile=True)
    own = Engine(shallow(), [], settings, cache_dir=program_cache, buckets=[Bucket(16, ((1, 16),))]).start()
    own.close()
    for _ in range(2):
        assert isinstance(own.compiler.need(unlisted(16)).exception(1), Saturated)


def test_the_process_compiles_as_the_engine_would(tmp_path: pathlib.Path) -> None:
    """JAX's settings of this process are part of a program's name."""
    name = ProgramStore(tmp_path, first_device()).family_name(FAMILY)
    with jax.default_matmul_precision("highest"):
        assert ProgramStore(tmp_path, first_device()).family_name(FAMILY) != name
        assert store.settings_as_variables()["JAX_DEFAULT_MATMUL_PRECISION"] == "highest"
    assert ProgramStore(tmp_path, first_device()).family_name(FAMILY) == name


def test_halves_of_files_go_at_the_next_start(tmp_path: pathlib.Path) -> None:
    (tmp_path / "costs").mkdir()
    old, new = tmp_path / f"{TEMPORARY}old", tmp_path / f"{TEMPORARY}new"
    kept = tmp_path / "costs" / f"{TEMPORARY}costs"
    for path in (old, new, kept):
        path.write_bytes(b"half")
    for path in (old, kept):
        os.utime(path, (0, 0))
    ProgramStore(tmp_path, first_device())
    CostTable(tmp_path / "costs" / "a.json", FAMILY)
    assert not old.exists()
    assert not kept.exists()
    assert new.exists(), "another process may be writing it"


def test_programs_without_which_batches_lose_much_come_first_and_soon(
    compiler: BackgroundCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost, brought, compile = [0.0], list[tuple[int, int]](), compiler.process.compile
    monkeypatch.setattr(Wanted, "rate", property(lambda self: lost[0]))
    hurried = mock.Mock()
    monkeypatch.setattr(compiler.process, "hurry", hurried)

    def watched(family: Family, key: ProgramKey, *, niceness: int, unless: object) -> float | None:
        del unless
        brought.append((key.bucket.tokens, niceness))
        if len(brought) == 1:
            hurried.assert_not_called()
            lost[0] = 2 * HURRY_RATE
            compiler.want(unlisted(11), compiler.compile_seconds)
            hurried.assert_called_once()
        return compile(family, key, niceness=niceness)

    monkeypatch.setattr(compiler.process, "compile", watched)
    compiler.offer([unlisted(10), unlisted(9)])
    wait_until(lambda: compiler._replica.has_program(unlisted(11)))
    time.sleep(2 * LOOK_SECONDS)
    assert brought == [(10, IDLE), (11, HURRIED)], "nothing else while batches lose so much"
    lost[0] = 0.0
    wait_until(lambda: len(brought) == 3 and not compiler.waiting)
    assert brought[2] == (9, IDLE)


def gives_up_first(
    compiler: BackgroundCompiler, monkeypatch: pytest.MonkeyPatch
) -> tuple[threading.Event, list[tuple[int, int]]]:
    """The first compilation lasts until it is given up, in a process that may not take back its own low priority. An
    event when it has begun, and the tokens and the niceness of every one."""
    begun, compile, brought = threading.Event(), compiler.process.compile, list[tuple[int, int]]()

    def slow(family: Family, key: ProgramKey, *, niceness: int = IDLE, unless: threading.Event | None) -> float | None:
        brought.append((key.bucket.tokens, niceness))
        if len(brought) == 1:
            assert unless is not None
            begun.set()
            assert unless.wait(10)
            return None
        return compile(family, key, niceness=niceness, unless=unless)

    monkeypatch.setattr(compiler.process, "hurry", lambda: False)
    monkeypatch.setattr(compiler.process, "compile", slow)
    return begun, brought


@pytest.mark.parametrize("missed", [False, True])
def test_what_nobody_waits_for_gives_way_to_what_somebody_waits_for(
    compiler: BackgroundCompiler, monkeypatch: pytest.MonkeyPatch, *, missed: bool
) -> None:
    """Where a process may not take back its own low priority."""
    rate = [0.0]
    monkeypatch.setattr(Wanted, "rate", property(lambda self: rate[0]))
    first, second = (unlisted(33 + 2 * missed), unlisted(34 + 2 * missed))
    begun, brought = gives_up_first(compiler, monkeypatch)
    failed = compiler.failed
    compiler.want(first, compiler.compile_seconds) if missed else compiler.offer([first])
    assert begun.wait(10)
    if missed:  # then nothing of the menu is compiled
        rate[0] = 2 * HURRY_RATE
    compiler.need(second).result(60)
    wait_until(lambda: compiler._replica.has_program(first))
    tokens = [key.bucket.tokens for key in (first, second, first)]
    niceness = (IDLE, HURRIED, HURRIED if missed else IDLE)
    assert brought == list(zip(tokens, niceness, strict=True)) and compiler.failed == failed


def test_failures_without_end_wait_an_hour(compiler: BackgroundCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    key = unlisted(40)
    monkeypatch.setitem(compiler._failures, key, 5000)
    compiler._failed(key)
    assert compiler.barred(key)
    compiler._wanted.put_off([key], 0.0)


def test_losses_that_many_programs_share_count_together(
    compiler: BackgroundCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler._wanted.put_off([*compiler._wanted._missed], 0.0)  # of other tests
    monkeypatch.setattr(Wanted, "rate", property(lambda self: 2 * HURRY_RATE))
    parts = {21: 0.35, 23: 0.4, 22: 0.05}
    for tokens, share in parts.items():
        compiler.want(unlisted(tokens), share * compiler.compile_seconds)
    time.sleep(2 * LOOK_SECONDS)
    assert not any(compiler._replica.has_program(unlisted(tokens)) for tokens in parts)
    assert compiler.missed() == [unlisted(23), unlisted(21), unlisted(22)]
    compiler.want(unlisted(22), 0.21 * compiler.compile_seconds)  # what compiling takes, together
    wait_until(lambda: compiler._replica.has_program(unlisted(23)) and not compiler._busy)
    assert compiler.missed() == [], "what was lost without it says little about others that would do with it"


def test_programs_that_only_measure_wait_for_those_that_batches_miss(
    compiler: BackgroundCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile, order = compiler.process.compile, list[int]()

    def watched(family: Family, key: ProgramKey, *, niceness: int = IDLE, unless: object = None) -> float | None:
        del unless
        order.append(key.bucket.tokens)
        return compile(family, key, niceness=niceness)

    monkeypatch.setattr(compiler.process, "compile", watched)
    compiler.want(unlisted(7), compiler.compile_seconds)
    assert compiler.compile_other(compiler._replica.family, unlisted(6)) is not None
    assert order == [7, 6]


@pytest.mark.parametrize("missed", [False, True])
def test_programs_that_only_measure_give_way(
    compiler: BackgroundCompiler, monkeypatch: pytest.MonkeyPatch, *, missed: bool
) -> None:
    """Also where a process may not take back its own low priority: they are compiled once the others are there."""
    rate = [0.0]
    monkeypatch.setattr(Wanted, "rate", property(lambda self: rate[0]))
    measured, other = unlisted(44 + 2 * missed), unlisted(45 + 2 * missed)
    begun, brought = gives_up_first(compiler, monkeypatch)
    with ThreadPoolExecutor(1) as beside:
        found = beside.submit(compiler.compile_other, compiler._replica.family, measured)
        assert begun.wait(10)
        if missed:
            rate[0] = 2 * HURRY_RATE
            compiler.want(other, compiler.compile_seconds)
            wait_until(lambda: compiler._replica.has_program(other))
            rate[0] = 0.0
        else:
            compiler.need(other).result(60)
        assert found.result(60) is not None
    assert [tokens for tokens, _ in brought] == [key.bucket.tokens for key in (measured, other, measured)]


def test_programs_that_only_measure_do_not_wait_for_ever(
    compiler: BackgroundCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "MOST_WAIT", 0.3)
    monkeypatch.setattr(BackgroundCompiler, "_hurried", True)
    assert compiler.compile_other(compiler._replica.family, unlisted(5)) is not None
    monkeypatch.setattr(compiler, "_closed", True)
    with pytest.raises(Saturated):
        compiler.compile_other(compiler._replica.family, unlisted(5))
