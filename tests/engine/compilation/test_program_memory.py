"""Which programs stay when host memory for them is short."""

from __future__ import annotations

import math
import time
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from jpets.deltas.protocol import ClassKey
from jpets.engine.batch.bucket import Bucket, Variant
from jpets.engine.compilation import program_memory
from jpets.engine.compilation.program_memory import COUNTED_SECONDS, IDLE_SECONDS, KEPT_MAPPINGS, ProgramMemory
from jpets.engine.device.memory import DeviceMemory
from jpets.engine.device.replica import Generation
from jpets.engine.programs.program import HOST_BYTES_PER_STORED_BYTE, Program, ProgramKey

MB = 2**20
CORE, FIRST, SECOND, THIRD = (ProgramKey(Bucket(tokens, ((1, tokens),)), Variant()) for tokens in (8, 16, 32, 64))


class Compiled:
    """A program with runs that take a megabyte of the device for each stored byte."""

    def __init__(self, size: int) -> None:
        self._found = SimpleNamespace(argument_size_in_bytes=0, temp_size_in_bytes=size * MB, output_size_in_bytes=0)

    def memory_analysis(self) -> object:
        return self._found


class Shelf:
    """The parts of a replica that the program memory reads."""

    def __init__(self) -> None:
        self.kept: dict[ProgramKey, Program] = {}
        self.generations: tuple[Generation, ...] = (Generation(frozenset(), ()),)

    @property
    def programs(self) -> list[Program]:
        return list(self.kept.values())

    def has_program(self, key: ProgramKey) -> bool:
        return key in self.kept

    def drop_program(self, key: ProgramKey) -> None:
        del self.kept[key]


def program(key: ProgramKey, size: int, idle: float = 0.0) -> Program:
    compiled: Any = Compiled(size)
    return Program(key, compiled, stored_bytes=size, mappings=100 * size, last_used=time.monotonic() - idle)


@pytest.fixture
def shelf() -> Shelf:
    return Shelf()


@pytest.fixture
def memory(shelf: Shelf) -> ProgramMemory:
    """Room for ten stored bytes; a core program of four, and two later ones of three that have been idle for long."""
    replica: Any = shelf
    own = ProgramMemory(replica, 10 * HOST_BYTES_PER_STORED_BYTE["cpu"], DeviceMemory(0, {}, math.inf, 2))
    shelf.kept[CORE] = program(CORE, 4, idle=9 * IDLE_SECONDS)
    for key, idle in ((FIRST, 3), (SECOND, 2)):
        shelf.kept[key] = program(key, 3, idle=idle * IDLE_SECONDS)
        own.added(shelf.kept[key])
    return own


def test_the_longest_idle_leaves_for_a_wanted_one(memory: ProgramMemory, shelf: Shelf) -> None:
    assert memory.used == 10 * HOST_BYTES_PER_STORED_BYTE["cpu"]
    assert not memory.has_room(THIRD, evict=False) and memory.has_room(THIRD, evict=True)
    assert memory.make_room(program(THIRD, 3), evict=True) == [FIRST]
    assert set(shelf.kept) == {CORE, SECOND} and memory.evicted == 1


def test_as_many_leave_as_needed(memory: ProgramMemory, shelf: Shelf) -> None:
    assert memory.make_room(program(THIRD, 5), evict=True) == [FIRST, SECOND]
    assert set(shelf.kept) == {CORE} and memory.has_room(THIRD, evict=False)


def test_the_core_stays_and_nothing_leaves_in_vain(memory: ProgramMemory, shelf: Shelf) -> None:
    assert memory.make_room(program(THIRD, 7), evict=True) is None
    assert set(shelf.kept) == {CORE, FIRST, SECOND} and memory.evicted == 0


def test_nothing_leaves_for_what_nobody_wanted(memory: ProgramMemory, shelf: Shelf) -> None:
    assert memory.make_room(program(THIRD, 1), evict=False) is None
    shelf.drop_program(SECOND)
    assert memory.make_room(program(THIRD, 3), evict=False) == []


def test_what_is_in_use_stays(memory: ProgramMemory, shelf: Shelf) -> None:
    shelf.kept[FIRST].last_used = time.monotonic()
    assert memory.make_room(program(THIRD, 3), evict=True) == [SECOND]
    assert memory.make_room(program(SECOND, 3), evict=True) == []


def test_used_programs_leave_for_the_core_of_new_classes(memory: ProgramMemory, shelf: Shelf) -> None:
    shelf.generations = (*shelf.generations, Generation(frozenset(), (SECOND, THIRD)))
    for own in shelf.kept.values():
        own.last_used = time.monotonic()
    assert memory.missing_core() == [THIRD]
    assert memory.make_room(program(THIRD, 3), evict=True) == [FIRST], "the rest of the core stays"


def test_used_programs_leave_for_a_core_that_fits_whole(memory: ProgramMemory, shelf: Shelf) -> None:
    """Of ten stored bytes six may go."""
    fourth = ProgramKey(Bucket(128, ((1, 128),)), Variant())
    shelf.generations = (*shelf.generations, Generation(frozenset(), (THIRD, fourth)))
    for own in shelf.kept.values():
        own.last_used = time.monotonic()
    assert memory.make_room(program(THIRD, 4), evict=True) is None, "the other one would find no room"
    assert memory.make_room(program(THIRD, 3), evict=True) == [FIRST]


def test_an_older_core_stays_until_the_newer_one_is_there(memory: ProgramMemory, shelf: Shelf) -> None:
    older, newer = Generation(frozenset(), (FIRST,)), Generation(frozenset(), (SECOND, THIRD))
    shelf.generations = (*shelf.generations, older, newer)
    assert memory.make_room(program(THIRD, 3), evict=True) is None
    shelf.kept[THIRD] = program(THIRD, 0)
    other = ProgramKey(Bucket(128, ((1, 128),)), Variant())
    assert memory.make_room(program(other, 3), evict=True) == [FIRST]


def test_programs_that_others_replace_may_leave(memory: ProgramMemory, shelf: Shelf) -> None:
    assert memory.make_room(program(THIRD, 7), evict=True) is None
    memory.free([CORE])
    assert memory.make_room(program(THIRD, 4), evict=True) == [CORE]
    memory.keep([FIRST, SECOND])
    assert memory.make_room(program(THIRD, 5), evict=True) is None


@pytest.mark.parametrize(
    ("short", "leaving"), [(0, []), (1, [FIRST]), (300, [FIRST]), (301, [FIRST, SECOND]), (601, None)]
)
def test_programs_leave_for_memory_mappings(
    short: int, leaving: list[ProgramKey] | None, shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The two idle programs have 300 mappings each."""
    monkeypatch.setattr(program_memory, "mappings_left", lambda: KEPT_MAPPINGS - short)
    replica: Any = shelf
    own = ProgramMemory(replica, 1000 * HOST_BYTES_PER_STORED_BYTE["cpu"], DeviceMemory(0, {}, math.inf, 2))
    for key, idle in ((CORE, 9), (FIRST, 3), (SECOND, 2)):
        shelf.kept[key] = program(key, 3, idle=idle * IDLE_SECONDS)
        if key != CORE:
            own.added(shelf.kept[key])
    assert own.make_room(program(THIRD, 3), evict=False) == (None if short else [])
    assert own.make_room(program(THIRD, 3), evict=True) == leaving
    assert set(shelf.kept) == {CORE, FIRST, SECOND} - set(leaving or [])


def test_a_program_is_taken_to_need_what_a_similar_one_does(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many classes: 6 stored bytes and 600 mappings; none: 2 and 200. Of 10 stored bytes 2 are left."""
    replica: Any = shelf
    some = tuple((ClassKey("lora", (("query", rank),), (0,)), 8) for rank in (1, 2, 4))
    banks = {key: 0 for key, _ in some}
    left = mock.Mock(return_value=KEPT_MAPPINGS + 300)
    monkeypatch.setattr(program_memory, "mappings_left", left)
    own = ProgramMemory(replica, 10 * HOST_BYTES_PER_STORED_BYTE["cpu"], DeviceMemory(0, banks, math.inf, 2))
    assert own.has_room(THIRD, evict=False), "nothing is known of any program's size"
    many = ProgramKey(CORE.bucket, Variant(some))
    shelf.kept = {many: program(many, 6), FIRST: program(FIRST, 2)}
    fewer = ProgramKey(THIRD.bucket, Variant(some[:2]))
    assert own.has_room(THIRD, evict=False) and not own.has_room(fewer, evict=False)
    left.return_value = KEPT_MAPPINGS + 100  # with the program that came
    assert own.make_room(program(THIRD, 1), evict=False) == []
    own.added(program(THIRD, 1))
    assert not own.has_room(SECOND, evict=False), "it would take 200 mappings"


def test_mappings_that_others_free_are_room(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another backbone that went, say."""
    replica: Any = shelf
    clock, left = mock.Mock(return_value=time.monotonic()), mock.Mock(return_value=KEPT_MAPPINGS - 5000)
    monkeypatch.setattr(program_memory, "time", mock.Mock(monotonic=clock))
    monkeypatch.setattr(program_memory, "mappings_left", left)
    own = ProgramMemory(replica, 100 * HOST_BYTES_PER_STORED_BYTE["cpu"], DeviceMemory(0, {}, math.inf, 2))
    shelf.kept[CORE] = program(CORE, 4)
    assert not own.has_room(THIRD, evict=True)
    left.return_value = KEPT_MAPPINGS + 5000
    assert not own.has_room(THIRD, evict=True) and left.call_count == 1, "batches ask often"
    clock.return_value += COUNTED_SECONDS
    assert own.has_room(THIRD, evict=False)


def test_runs_must_fit_on_the_device_two_at_a_time(shelf: Shelf, memory: ProgramMemory) -> None:
    """The backbone takes 1 MB; two batches in a program of 4 MB need chunks of 4.8 MB each."""
    replica: Any = shelf
    for limit, fits in ((10.7, True), (10.5, False)):
        device = DeviceMemory(MB, {}, limit * MB, 2)
        own = ProgramMemory(replica, 1000 * HOST_BYTES_PER_STORED_BYTE["cpu"], device)
        assert (own.make_room(program(THIRD, 3), evict=False) == []) == fits
    use = DeviceMemory(MB, {}, math.inf, 2).use(shelf.programs)
    assert use.backbone == MB and use.working == pytest.approx(9.6 * MB, abs=2)


def test_an_idle_program_leaves_for_one_that_the_device_has_no_room_for(shelf: Shelf) -> None:
    replica: Any = shelf
    device = DeviceMemory(MB, {}, 14 * MB, 2)
    own = ProgramMemory(replica, 1000 * HOST_BYTES_PER_STORED_BYTE["cpu"], device)
    shelf.kept[FIRST] = program(FIRST, 6, idle=2 * IDLE_SECONDS)
    own.added(shelf.kept[FIRST])
    assert own.make_room(program(THIRD, 5), evict=False) is None
    assert own.make_room(program(THIRD, 5), evict=True) == [FIRST]
    assert own.make_room(program(THIRD, 12), evict=True) is None
