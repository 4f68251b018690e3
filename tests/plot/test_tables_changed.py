"""Tables that others change while they are open."""

from __future__ import annotations

import dataclasses
import os
import pathlib

import numpy as np
import pytest
from domain_tables import GAMES, IDS, WORDS, grams, make_folder, written
from support import wait_until

from jpets.errors import EngineFailure, NotFound, OutOfSpace
from jpets.plot import domains
from jpets.plot.domains import DomainTables
from jpets.plot.table import HEADER_BYTES
from jpets.plot.tree import Branch, Tree, table_path


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    return make_folder(tmp_path)


def test_a_table_that_is_cut_off_while_it_is_open_is_not_read(
    folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading past its end would end the process."""
    own = DomainTables(folder, WORDS)
    own.opened("games").rows(IDS)
    path = table_path(folder, own.tree.domains["games"])
    path.chmod(0o644)
    os.truncate(path, HEADER_BYTES)
    monkeypatch.setattr(domains, "LOOK_SECONDS", 0.0)
    own._looks_at = 0.0

    def problem() -> str | None:
        own.opened(None).rows(IDS)
        return own.report()[-1].problem

    wait_until(lambda: problem() is not None)
    assert "the table must have" in str(problem())
    with pytest.raises(EngineFailure):
        own.opened("games").rows(IDS)


def test_a_table_that_is_written_over_in_place_is_not_read(folder: pathlib.Path) -> None:
    """Its vectors were compared with their digests when they were read first."""
    own = DomainTables(folder, WORDS)
    own.opened("games").rows(IDS)
    path = table_path(folder, own.tree.domains["games"])
    path.chmod(0o644)
    with path.open("r+b") as file:
        file.seek(HEADER_BYTES)
        file.write(b"other")
    assert path.stat().st_size == own.report()[-1].bytes
    own._looks_at = 0.0

    def refused() -> bool:
        try:
            own.opened("games").rows(IDS)
        except EngineFailure as error:
            return "block 0 of the table is damaged" in error.message
        return False

    wait_until(refused)
    own.opened(None).rows(IDS)


@pytest.mark.parametrize("cut", [HEADER_BYTES, None])
def test_the_first_text_after_a_quiet_night_is_not_sent_to_a_table_that_was_written_to(
    folder: pathlib.Path, cut: int | None
) -> None:
    """However long nobody looked, and also where the next look is not due yet."""
    own = DomainTables(folder, WORDS)
    own.opened("games").rows(IDS)
    path = table_path(folder, own.tree.domains["games"])
    path.chmod(0o644)
    if cut is not None:
        os.truncate(path, cut)
    else:
        with path.open("r+b") as file:
            file.seek(HEADER_BYTES)
            file.write(b"other")
    own._looks_at = float("inf")
    with pytest.raises(EngineFailure):
        own.opened("games").rows(IDS)
    own.opened(None).rows(IDS)


def test_a_table_that_cannot_be_mapped_again_is_not_read_and_not_tried_all_the_time(
    folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = DomainTables(folder, WORDS)
    own.opened(None).rows(IDS)
    os.utime(table_path(folder, own.tree.root))
    monkeypatch.setattr(own._arena, "_free", [])
    tried: list[object] = []
    reload = own._reload

    def counted() -> None:
        tried.append(None)
        reload()

    monkeypatch.setattr(own, "_reload", counted)
    for _ in range(3):
        with pytest.raises(EngineFailure, match="written to while it was open"):
            own.opened(None).rows(IDS)
    assert len(tried) == 1


def test_a_table_that_is_only_touched_is_read_on(folder: pathlib.Path) -> None:
    own = DomainTables(folder, WORDS)
    before = own.values[own.opened("games").rows(IDS)]
    table = own.opened("games").lookup.domain
    os.utime(table_path(folder, own.tree.domains["games"]))
    own._looks_at = 0.0
    own.opened(None).rows(IDS)
    wait_until(lambda: own._view.opened["games"].lookup.domain is not table)
    assert own.report()[-1].problem is None
    np.testing.assert_array_equal(own.values[own.opened("games").rows(IDS)], before)


def test_a_domain_that_others_made_is_known_before_a_text_is_looked_up(folder: pathlib.Path) -> None:
    own = DomainTables(folder, WORDS)
    branch = own.tree.domains["games"]
    Tree.change(folder, lambda tree: tree.having("new", branch))
    assert own.full_name("new") == branch.full_name("new")
    Tree.change(folder, lambda tree: tree.without("new"))
    with pytest.raises(NotFound, match="there is no domain 'new'"):
        own.full_name("new")


def test_a_domain_whose_table_cannot_be_mapped_is_not_in_the_tree(
    folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = DomainTables(folder, WORDS)
    made = Branch(written(folder, GAMES, grams(), 3), GAMES)
    monkeypatch.setattr(own._arena, "_free", [])
    with pytest.raises(OutOfSpace, match="remove domains"):
        own.add("more", dataclasses.asdict(made))
    assert "more" not in Tree.read(folder).domains


def test_a_root_that_is_cut_off_while_it_is_open_is_not_read_until_it_is_whole_again(
    folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = DomainTables(folder, WORDS)
    before = own.values[own.opened(None).rows(IDS)]
    path = table_path(folder, own.tree.root)
    whole = path.read_bytes()
    path.chmod(0o644)
    os.truncate(path, HEADER_BYTES)
    monkeypatch.setattr(domains, "LOOK_SECONDS", 0.0)
    monkeypatch.setattr(domains, "AGAIN_SECONDS", 0.1)
    own._looks_at = 0.0

    def refused() -> bool:
        try:
            own.opened(None).rows(np.array([], np.int32))  # reads nothing, and looks
        except EngineFailure as error:
            return "the root is damaged" in error.message
        return False

    wait_until(refused)
    with pytest.raises(EngineFailure, match="the root is damaged"):
        own.opened("games").rows(IDS)
    root, *_ = own.report()
    assert root.problem is not None and root.entries == 0
    (other := path.with_suffix(".whole")).write_bytes(whole)
    os.replace(other, path)
    wait_until(lambda: not refused())
    np.testing.assert_array_equal(own.values[own.opened(None).rows(IDS)], before)
