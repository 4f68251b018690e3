"""Tables that are replaced or removed while rows of theirs are in use: what is kept, and for how long."""

from __future__ import annotations

import dataclasses
import math
import os
import pathlib
import threading
import time

import numpy as np
import pytest
from domain_tables import GAMES, IDS, WORDS, alone, grams, make_folder, open_places, written

from jpets.errors import NotFound
from jpets.plot.arena import PAGE
from jpets.plot.domains import DomainTables
from jpets.plot.ngrams import keys_of
from jpets.plot.tree import Branch, Tree, table_path


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    return make_folder(tmp_path)


def replace(own: DomainTables, seed: int) -> None:
    """The domain's table by one of other vectors."""
    made = Branch(written(own.folder, GAMES, np.concatenate([grams(), alone()]), seed), GAMES)
    own.add("games", dataclasses.asdict(made))


def test_a_replaced_table_is_kept_for_those_who_use_it_and_no_longer(folder: pathlib.Path) -> None:
    own = DomainTables(folder, WORDS)
    replace(own, 3)
    usual, opened = own._arena.free, own.opened("games")
    rows = opened.rows(IDS)
    kept = own.values[rows].copy()
    old = table_path(folder, own.tree.domains["games"])
    replace(own, 4)
    newer = own.opened("games")
    assert newer.name != opened.name and (own.values[newer.rows(IDS)] != kept).any()
    assert own._arena.free < usual
    old.unlink()
    np.testing.assert_array_equal(own.values[rows], kept)
    np.testing.assert_array_equal(own.values[opened.rows(IDS)], kept)  # looks up what it had not before, too
    assert open_places(old) in (None, 4)
    del opened
    assert own._arena.free == usual and not open_places(old)
    np.testing.assert_array_equal(own.values[own.opened("games").rows(IDS)], own.values[newer.rows(IDS)])


def test_a_removed_domain_is_kept_for_those_who_use_it_and_no_longer(folder: pathlib.Path) -> None:
    own = DomainTables(folder, WORDS)
    path = table_path(folder, own.tree.domains["games"])
    opened = own.opened("games")
    rows, root = opened.rows(IDS), own.opened(None).rows(IDS)
    kept, of_root = own.values[rows].copy(), own.values[root].copy()
    free = own._arena.free
    own.remove("games")
    np.testing.assert_array_equal(own.values[rows], kept)
    with pytest.raises(NotFound):
        own.opened("games")
    del opened
    assert own._arena.free > free and not open_places(path)
    np.testing.assert_array_equal(own.values[root], of_root)


def test_a_domain_may_be_replaced_any_number_of_times(folder: pathlib.Path) -> None:
    """In a range that has room for few tables."""
    row_bytes = Tree.read(folder).info(Tree.read(folder).root).row_bytes
    own = DomainTables(folder, WORDS, 5 * math.lcm(PAGE, row_bytes))
    for seed in range(3, 30):
        replace(own, seed)
        newest = own.opened("games")
        expected = own.values[newest.rows(IDS)].astype(np.float32)
        assert np.isfinite(expected).all() and expected.any()


def test_a_table_that_was_written_to_is_let_go_of_when_it_is_opened_again(folder: pathlib.Path) -> None:
    own = DomainTables(folder, WORDS)
    free = own._arena.free
    os.utime(table_path(folder, own.tree.domains["games"]))
    own.opened("games").rows(IDS)
    assert own._arena.free == free


def test_what_is_looked_up_while_tables_come_and_go_is_what_they_hold(folder: pathlib.Path) -> None:
    """Their places are taken by others at once."""
    own, done = DomainTables(folder, WORDS), threading.Event()
    usual, wrong = own._arena.free, list[str]()

    def look_up() -> None:
        while not done.is_set():
            opened = own.opened("games")
            rows, table = opened.rows(IDS), opened.lookup.domain
            time.sleep(0.001)
            assert table is not None
            if (own.values[rows] != table.values[table.find(keys_of(grams()))]).any():
                wrong.append(table.name)

    threads = [threading.Thread(target=look_up) for _ in range(4)]
    for thread in threads:
        thread.start()
    for seed in range(3, 40):
        replace(own, seed)
    done.set()
    for thread in threads:
        thread.join()
    assert not wrong and own._arena.free == usual
