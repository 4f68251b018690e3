"""Tables in one range of addresses: where they are mapped, and that their place is free when nothing refers to them."""

from __future__ import annotations

import math
import pathlib
import threading
from collections.abc import Sequence

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from jpets.engine.workloads.encoder_network import FEW_WORDS
from jpets.errors import OutOfSpace
from jpets.plot.arena import PAGE, SPARE_ROWS, Arena
from jpets.plot.ngrams import Window, keys_of
from jpets.plot.table import Table, TableInfo, TableWriter

INFO = TableInfo("a" * 64, Window.of(3), 16)
STEP = math.lcm(PAGE, INFO.row_bytes) // INFO.row_bytes
"""Rows between places where tables may begin."""
ENTRIES = (0, 1, STEP - 1, STEP, 2 * STEP + 9)
ROOM = 8 * STEP


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> Sequence[pathlib.Path]:
    """Tables of so many entries, whose vectors hold the number of their table, from 1 on."""
    folder = tmp_path_factory.mktemp("tables")
    found = []
    for number, count in enumerate(ENTRIES, 1):
        grams = np.zeros((count, 3), np.int64)
        grams[:, 1] = 1 + np.arange(count)
        writer = TableWriter(folder, INFO, keys_of(grams))
        writer.append(np.full((count, 3, INFO.width), number, np.float32))
        found.append(writer.finish())
    return found


def new_arena(room: int = ROOM) -> Arena:
    return Arena(INFO, room * INFO.row_bytes)


class Held:
    """A table, and where it is."""

    def __init__(self, arena: Arena, path: pathlib.Path, number: int) -> None:
        self.table = Table(path, INFO)
        first = arena.map(self.table)
        self.own, self.number = arena.values[first : first + self.table.entries], number

    @property
    def whole(self) -> bool:
        return bool((self.own == self.number).all())

    @property
    def rows(self) -> int:
        return -(-self.table.entries // STEP) * STEP


@hypothesis.given(st.lists(st.tuples(st.booleans(), st.integers(0, 9)), max_size=30))
def test_tables_never_meet_and_leave_all_that_they_had(
    paths: Sequence[pathlib.Path], steps: list[tuple[bool, int]]
) -> None:
    arena, held = new_arena(), list[Held]()
    for opens, at in steps:
        number = at % len(paths)
        if not opens:
            del held[at : at + 1]
        else:
            try:
                held.append(Held(arena, paths[number], number + 1))
            except OutOfSpace as error:
                assert "remove domains" in error.message
        assert all(own.whole for own in held)
        assert arena.free == ROOM - sum(own.rows for own in held)
    held.clear()
    assert arena.free == ROOM and not arena.values.astype(np.float32).any()
    Held(arena, paths[4], 5)


def test_what_reads_without_a_look_up_reads_no_file(paths: Sequence[pathlib.Path]) -> None:
    """First runs of programs, and tokens that have no row."""
    arena = new_arena()
    held = Held(arena, paths[4], 5)
    assert SPARE_ROWS >= FEW_WORDS
    assert held.whole and not arena.values[:SPARE_ROWS].astype(np.float32).any()


def test_a_table_that_is_let_go_of_while_the_range_is_changed_is_freed_then(paths: Sequence[pathlib.Path]) -> None:
    """A collection of garbage may do that, in the same thread."""
    arena = new_arena()
    first, second = Held(arena, paths[4], 5), Held(arena, paths[3], 4)
    kept = arena.free
    with arena._lock:
        del first
        assert arena.free == kept
    third = Held(arena, paths[1], 2)
    assert arena.free == ROOM - second.rows - third.rows and second.whole and third.whole


def test_what_many_threads_map_and_let_go_of_is_never_another_table(paths: Sequence[pathlib.Path]) -> None:
    arena, wrong = new_arena(64 * STEP), list[tuple[int, int]]()

    def work(number: int) -> None:
        for turn in range(60):
            at = (number + turn) % len(paths)
            if not Held(arena, paths[at], at + 1).whole:
                wrong.append((number, turn))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and arena.free == 64 * STEP
