"""Tables of several domains in one range of addresses: what is opened, refused and switched."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import time

import numpy as np
import pytest
from domain_tables import GAMES, IDS, ROOT, WIDTH, WINDOW, WORDS, alone, grams, make_folder, written
from support import wait_until

from jpets.errors import Conflict, EngineFailure, InvalidInput, InvalidTable, NotFound, OutOfSpace
from jpets.files import STALE_SECONDS
from jpets.plot import domains
from jpets.plot.arena import Arena
from jpets.plot.domains import DomainTables
from jpets.plot.forms import SUFFIX, write_forms
from jpets.plot.holds import HOLDS, hold
from jpets.plot.ngrams import Window, keys_of
from jpets.plot.table import BLOCK_BYTES, HEADER_BYTES, Table, TableInfo
from jpets.plot.tree import FORMS, TABLES, TREE, Branch, Tree, table_path


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    return make_folder(tmp_path)


def test_tables_whose_normal_forms_are_gone_are_refused(folder: pathlib.Path) -> None:
    forms = np.array([0, *(1 + np.arange(WORDS) // 2 * 2)])
    digest = write_forms(folder / FORMS, forms)
    Tree.change(folder, lambda tree: dataclasses.replace(tree, forms=digest))
    own = DomainTables(folder, WORDS)
    np.testing.assert_array_equal(own.opened(None).rows(np.array([4, 6])), own.opened(None).rows(np.array([5, 7])))
    (folder / FORMS / f"{digest}{SUFFIX}").unlink()
    with pytest.raises(InvalidTable, match="normal forms of these tables are missing"):
        DomainTables(folder, WORDS)


def damage(path: pathlib.Path, at: int, count: int = 1) -> None:
    content = bytearray(path.read_bytes())
    for place in range(at, at + count):
        content[place] ^= 255
    path.chmod(0o644)
    path.unlink()
    path.write_bytes(content)


def with_domain(folder: pathlib.Path, name: str, branch: Branch) -> None:
    Tree.change(folder, lambda tree: dataclasses.replace(tree, domains={**tree.domains, name: branch}))


def test_rows_hold_the_vectors_of_the_tables(folder: pathlib.Path) -> None:
    own = DomainTables(folder, WORDS)
    tree = own.tree
    root, games = (Table(table_path(folder, each), tree.info(each)) for each in (tree.root, tree.domains["games"]))
    rows = own.opened("games").rows(IDS)
    np.testing.assert_array_equal(own.values[rows], games.values[games.find(keys_of(grams()))])
    rows = own.opened(None).rows(IDS)
    np.testing.assert_array_equal(own.values[rows], root.values[root.find(keys_of(alone()[IDS]))])
    root_report, games_report = own.report()
    assert games_report.levels == {"domain": 4, "root": 0, "2-gram": 0, "1-gram": 0}
    assert root_report.levels == {"domain": 0, "root": 0, "2-gram": 1, "1-gram": 3}, "the last one has none after it"
    assert (root_report.name, root_report.entries, games_report.full_name) == ("", WORDS, "games@bbbbbbbbbbbb")


def test_a_domain_goes_by_its_name_or_its_full_name(folder: pathlib.Path) -> None:
    own = DomainTables(folder, WORDS)
    assert own.full_name("games") == own.full_name("games@bbbbbbbbbbbb") == "games@bbbbbbbbbbbb"
    np.testing.assert_array_equal(own.opened("games").rows(IDS), own.opened("games@bbbbbbbbbbbb").rows(IDS))
    for domain, said in (
        ("cooking", "there are \\['games'\\]"),
        ("games@cccc", "train"),
        ("games@bb", "train"),
        ("games@", "train"),
    ):
        with pytest.raises(NotFound, match=said):
            own.opened(domain).rows(IDS)


def test_a_new_table_is_taken_without_opening_the_others_again(folder: pathlib.Path) -> None:
    own = DomainTables(folder, WORDS)
    opened, values = own.opened("games"), own.values
    before = opened.rows(IDS)
    kept = values[before].copy()
    more = written(folder, GAMES, np.concatenate([grams(), alone()]), 3)
    with_domain(folder, "games", Branch(more, GAMES))
    own.reload()
    after = own.opened("games").rows(IDS)
    assert own.values is values and (after != before).all()
    np.testing.assert_array_equal(values[before], kept)  # rows that were looked up before stay what they were
    assert (values[after] != kept).any()


def test_what_a_tree_does_not_name_goes_when_nobody_can_be_about_to_name_it(folder: pathlib.Path) -> None:
    """A table that was just built is not named yet."""
    built, old = written(folder, ROOT, grams(), 5), Tree.read(folder).domains["games"].table
    Tree.change(folder, lambda tree: tree.without("games"))
    left = {path.stem for path in (folder / TABLES).iterdir()}
    assert {built, old} <= left
    long_ago = time.time() - 2 * STALE_SECONDS
    os.utime(folder / TABLES / f"{old}.plot", (long_ago, long_ago))
    Tree.change(folder, lambda tree: tree)
    assert {path.stem for path in (folder / TABLES).iterdir()} == left - {old}


def test_what_somebody_waits_to_name_stays(folder: pathlib.Path) -> None:
    branch = Branch(written(folder, ROOT, grams(), 5), "c" * 64)
    (folder / "layers" / f"{branch.layers}.safetensors").touch()
    files, waits = [folder / name for name in branch.files], folder / "waits"
    waits.touch()
    for path in files:
        os.utime(path, (0, 0))
    hold(folder, branch.files, waits)
    Tree.change(folder, lambda tree: tree)
    assert all(path.exists() for path in files)
    waits.unlink()
    Tree.change(folder, lambda tree: tree)
    assert not any(path.exists() for path in files) and not [*(folder / HOLDS).iterdir()]


def test_a_root_that_changed_needs_another_start(folder: pathlib.Path) -> None:
    own = DomainTables(folder, WORDS)
    before = own.opened(None).rows(IDS)
    other = written(folder, GAMES, alone(), 4)
    Tree.change(folder, lambda tree: dataclasses.replace(tree, root=Branch(other, GAMES), domains={}))
    with pytest.raises(InvalidTable, match="load the backbone again"):
        own.reload()
    np.testing.assert_array_equal(own.opened(None).rows(IDS), before)


@pytest.mark.parametrize("how", ["truncated", "keys", "header", "gone", "other layers", "other width"])
def test_a_domain_with_a_wrong_table_is_refused_and_the_others_answer(folder: pathlib.Path, how: str) -> None:
    tree = Tree.read(folder)
    path = table_path(folder, tree.domains["games"])
    if how == "truncated":
        content = path.read_bytes()
        path.unlink()
        path.write_bytes(content[:-100])
    elif how == "gone":
        path.unlink()
    elif how.startswith("other"):
        layers, width = (ROOT, WIDTH) if how == "other layers" else (GAMES, WIDTH * 2)
        with_domain(folder, "games", Branch(written(folder, layers, grams(), 2, width), GAMES))
    else:
        damage(path, 10 if how == "header" else path.stat().st_size - 60)
    own = DomainTables(folder, WORDS)
    assert len(own.opened(None).rows(IDS)) == len(IDS)
    with pytest.raises(EngineFailure, match="'games' is damaged or missing"):
        own.opened("games").rows(IDS)
    assert own.report()[1].problem and own.report()[1].entries == 0


@pytest.mark.parametrize("how", ["truncated", "gone"])
def test_a_domain_stays_what_it_was_when_its_new_table_is_wrong(folder: pathlib.Path, how: str) -> None:
    own = DomainTables(folder, WORDS)
    before = own.opened("games").rows(IDS)
    newer = written(folder, GAMES, np.concatenate([grams(), alone()]), 3)
    with_domain(folder, "games", Branch(newer, GAMES))
    path = folder / TABLES / f"{newer}.plot"
    content = path.read_bytes()
    path.unlink()
    if how == "truncated":
        path.write_bytes(content[:-1])
    own.reload()
    np.testing.assert_array_equal(own.opened("games").rows(IDS), before)


def test_a_damaged_vector_is_never_given(tmp_path: pathlib.Path) -> None:
    """Also not where its neighbours in the file are sound."""
    (tmp_path / TABLES).mkdir()
    (tmp_path / "layers").mkdir()
    words, width = 3000, 64
    root = written(tmp_path, ROOT, alone(words), 1, width)
    Tree(WINDOW, width, 1, Branch(root, ROOT)).write(tmp_path)
    path = tmp_path / TABLES / f"{root}.plot"
    row_bytes = 3 * width * 2
    bad = BLOCK_BYTES // row_bytes + 5
    damage(path, HEADER_BYTES + bad * row_bytes)
    own = DomainTables(tmp_path, words)
    assert own.opened(None).rows(np.array([1], np.int32)) == [own.opened(None).root.first + 1]
    with pytest.raises(EngineFailure, match="block 1 of the table is damaged"):
        own.opened(None).rows(np.array([1, bad], np.int32))
    (root_report,) = own.report()
    assert root_report.problem == "a part of the table is damaged; build it again"
    damage(path, HEADER_BYTES + bad * row_bytes)  # what was written again is whole
    own.reload()
    first, second = own.opened(None).rows(np.array([1, bad], np.int32)).tolist()
    assert second - first == bad - 1
    assert own.report()[0].problem is None


def test_a_file_that_is_deleted_while_it_is_open_is_read_on(folder: pathlib.Path) -> None:
    own = DomainTables(folder, WORDS)
    before = own.values[own.opened("games").rows(IDS)].copy()
    for path in (folder / TABLES).iterdir():
        path.unlink()
    np.testing.assert_array_equal(own.values[own.opened("games").rows(IDS)], before)


@pytest.mark.parametrize(
    "content",
    [b"{", b"[]", b'{"format": 1}', b'{"format": 2}', b"\xff"],
    ids=["half", "list", "empty", "later", "bytes"],
)
def test_a_damaged_tree_is_refused(folder: pathlib.Path, content: bytes) -> None:
    (folder / TREE).write_bytes(content)
    with pytest.raises(InvalidTable, match=r"tree\.json"):
        DomainTables(folder, WORDS)


def test_a_folder_without_a_tree_is_refused(tmp_path: pathlib.Path) -> None:
    with pytest.raises(NotFound, match="build them"):
        DomainTables(tmp_path, WORDS)


def test_a_tree_that_another_process_wrote_is_taken(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(domains, "LOOK_SECONDS", 0.0)
    own = DomainTables(folder, WORDS)
    own.opened("games").rows(IDS)
    with_domain(folder, "science", Branch(written(folder, ROOT, grams(), 3), ROOT))

    def found() -> bool:
        own.opened(None).rows(IDS)
        return [each.name for each in own.report()] == ["", "games", "science"]

    wait_until(found)
    own.remove("science")
    with pytest.raises(NotFound):
        own.opened("science").rows(IDS)
    with pytest.raises(NotFound):
        own.remove("science")


def test_a_tree_that_is_written_while_it_is_opened_is_taken(
    folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(domains, "LOOK_SECONDS", 0.0)
    late = Branch(written(folder, ROOT, grams(), 3), ROOT)

    def opened(*given: object) -> Arena:
        with_domain(folder, "late", late)
        return Arena(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(domains, "Arena", opened)
    own = DomainTables(folder, WORDS)

    def found() -> bool:
        own.opened(None).rows(IDS)
        return own.report()[-1].name == "late"

    wait_until(found)


@pytest.mark.parametrize("error", [OSError(24, "too many open files"), InvalidTable("half")], ids=["files", "half"])
def test_a_switch_that_failed_is_tried_again(
    folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    for name in ("LOOK_SECONDS", "AGAIN_SECONDS"):
        monkeypatch.setattr(domains, name, 0.0)
    own, read, failures = DomainTables(folder, WORDS), Tree.read, [error, error]

    def unlucky(folder: pathlib.Path) -> Tree:
        if failures:
            raise failures.pop()
        return read(folder)

    with_domain(folder, "science", Branch(written(folder, ROOT, grams(), 3), ROOT))
    monkeypatch.setattr(Tree, "read", unlucky)

    def found() -> bool:
        own.opened(None).rows(IDS)
        return own.report()[-1].name == "science"

    wait_until(found)


def test_a_table_that_comes_back_is_taken(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOOK_SECONDS", "AGAIN_SECONDS"):
        monkeypatch.setattr(domains, name, 0.0)
    tree = Tree.read(folder)
    path = table_path(folder, tree.domains["games"])
    path.rename(folder / "aside")
    own = DomainTables(folder, WORDS)
    with pytest.raises(EngineFailure, match="damaged or missing"):
        own.opened("games").rows(IDS)
    (folder / "aside").rename(path)

    def found() -> bool:
        own.opened(None).rows(IDS)
        return own.report()[-1].problem is None

    wait_until(found)
    own.opened("games").rows(IDS)


def test_tasks_that_came_meanwhile_keep_the_layers_that_they_learnt_from(folder: pathlib.Path) -> None:
    own = DomainTables(folder, WORDS)
    same, other = (Branch(written(folder, layers, grams(), 3), layers) for layers in (GAMES, "c" * 64))
    before, free = own.tree.domains["games"], own._arena.free
    with pytest.raises(Conflict, match="choose another name"):
        own.add("games", dataclasses.asdict(other), same_layers=True)
    assert own._arena.free == free, "what is refused leaves nothing"
    assert own.tree.domains["games"] == Tree.read(folder).domains["games"] == before
    own.add("games", dataclasses.asdict(same), same_layers=True)
    own.add("new", dataclasses.asdict(other), same_layers=True)
    assert own.tree.domains == {"games": same, "new": other}


def test_a_folder_that_is_only_read_is_told_without_its_path(
    folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = DomainTables(folder, WORDS)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    for change in (own.check_writable, lambda: own.remove("games")):
        with pytest.raises(InvalidInput, match="may not write to") as told:
            change()
        assert str(folder) not in str(told.value)
    assert "games" in Tree.read(folder).domains


def test_damaged_files_are_no_fault_of_who_deletes_a_domain(folder: pathlib.Path) -> None:
    own = DomainTables(folder, WORDS)
    document = (folder / "tree.json").read_bytes()
    (folder / "tree.json").write_bytes(document[:-20])
    with pytest.raises(EngineFailure, match="damaged"):
        own.remove("games")
    (folder / "tree.json").write_bytes(document.replace(b'"count": ', b'"count": 1'))
    with pytest.raises(Conflict, match="load the backbone again"):
        own.remove("games")
    assert "games" in Tree.read(folder).domains


def test_an_unknown_domain_is_answered_in_few_words(folder: pathlib.Path) -> None:
    tree = Tree.read(folder)
    for n in range(200):
        tree = tree.having(f"domain-{n}", tree.root)
    with pytest.raises(NotFound) as told:
        tree.branch("x" * 10_000)
    assert len(str(told.value)) < 500 and "more" in str(told.value)


def test_a_domain_that_others_made_is_listed_without_a_text(folder: pathlib.Path) -> None:
    own = DomainTables(folder, WORDS)
    branch = own.tree.domains["games"]
    Tree.change(folder, lambda tree: tree.having("new", branch))
    own._looks_at = 0.0
    wait_until(lambda: "new" in [report.name for report in own.report()])


def test_a_range_has_no_more_rows_than_programs_can_number() -> None:
    assert Arena(TableInfo(ROOT, Window.of(2), 32)).rows == 2**31 - 1


def test_a_tree_is_written_as_it_is_read(folder: pathlib.Path) -> None:
    tree = Tree.read(folder)
    tree.write(folder)
    assert Tree.read(folder) == tree and json.loads((folder / TREE).read_text())["format"] == 1


def test_a_range_that_is_full_says_so(folder: pathlib.Path) -> None:
    info = TableInfo(ROOT, WINDOW, WIDTH)
    table = Table(table_path(folder, Tree.read(folder).root), info)
    arena = Arena(info, size=3 * 4096 * 3)
    firsts = []
    with pytest.raises(OutOfSpace, match="remove domains"):
        while True:
            firsts.append(arena.map(table))
    assert len(firsts) > 1 and len(set(firsts)) == len(firsts)
    for first in firsts:
        np.testing.assert_array_equal(arena.values[first : first + table.entries], table.values)
