"""The count of a repository's changes, by which other processes hear of them."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

import checkpoints.catalog
from checkpoints.repository import Repository
from jpets.errors import Saturated
from jpets.types import TaskName

A, B = TaskName.of("a"), TaskName.of("b")

OLD = Path(__file__).parents[1] / "fixtures" / "catalog-0.1.0.sql"
"""The catalogue of a release that counted no changes: ``kept`` went back to version 1 of 2, ``gone`` was deleted."""


@pytest.mark.parametrize(
    "change",
    [
        lambda repository, file: repository.put("a", file),
        lambda repository, file: repository.put("a", file, activate=False),
        lambda repository, file: repository.rollback("a"),
        lambda repository, file: repository.discard("a", 2),
        lambda repository, file: repository.delete("a"),
    ],
    ids=["put", "put aside", "rollback", "discard", "delete"],
)
def test_every_change_counts(repository: Repository, files: list[bytes], change: Callable[..., object]) -> None:
    for name in ("a", "b"):
        repository.put(name, files[0])
    repository.put("a", files[1])
    repository.put("a", files[2], activate=False)
    seen, changed = repository.changes(0)
    assert changed == [B, A], "each once, in the order of their last changes"
    change(repository, files[3])
    now, changed = repository.changes(seen)
    assert now > seen and changed == [A]
    assert repository.changes(now) == (now, [])


def test_what_serves_nothing_else_does_not_count(repository: Repository, files: list[bytes]) -> None:
    stored = repository.put("a", files[0])
    before = repository.changes(0)
    repository.add_uses({A: 2})
    repository.age_uses(0.5)
    repository.keep_layouts("maker", {stored.digest: "[]"})
    repository.alias("a", "stable", 1)
    repository.keep_backbone("domain")
    repository.discard("a", 9)
    repository.collect()
    assert repository.changes(0) == before


def test_one_task_of_the_index(repository: Repository, files: list[bytes]) -> None:
    for name in ("a", "b"):
        repository.put(name, files[0])
    repository.put("a", files[1], activate=False)
    repository.add_uses({A: 2})
    (every,) = [task for task in repository.index("maker") if task.id == "a"]
    assert repository.indexed(A, "maker") == every and every.version == 1
    repository.delete("a")
    assert repository.indexed(A, "maker") is None


def test_a_discarded_version_leaves_the_others_as_they_are(repository: Repository, files: list[bytes]) -> None:
    for data in files[:3]:
        repository.put("a", data)
    repository.alias("a", "stable", 2)
    repository.discard("a", 2)
    assert [(stored.version, stored.served) for stored in repository.versions("a")] == [(1, False), (3, True)]
    assert repository.aliases("a") == {"latest": 3}
    repository.discard("a", 3)
    assert repository.get("a").version == 1
    assert repository.put("a", files[3]).version == 4, "a number is never used twice"


@pytest.fixture
def old_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "repository"
    (folder / "blobs").mkdir(parents=True)
    connection = sqlite3.connect(folder / "catalog.sqlite")
    connection.execute("PRAGMA journal_mode=WAL")
    connection.executescript(OLD.read_text())
    connection.close()
    return folder


def test_a_catalogue_that_counts_no_changes_is_opened_and_goes_on(old_folder: Path, files: list[bytes]) -> None:
    first, second = Repository(old_folder), Repository(old_folder)
    assert [(task.id, task.version) for task in first.index("maker")] == [("kept", 1), ("other", 1)]
    assert [(stored.version, stored.state) for stored in first.versions("kept")] == [(1, "active"), (2, "withdrawn")]
    assert first.aliases("kept") == {"stable": 1, "latest": 1}
    assert first.changes(0) == (0, [])
    assert second.put("kept", files[0]).version == 3
    seen, changed = first.changes(0)
    assert changed == [TaskName.of("kept")]
    second.delete("other")
    assert second.put("gone", files[0]).version == 2
    assert [name.id for name in first.changes(seen)[1]] == ["other", "gone"]
    for repository in (first, second):
        repository.close()


def test_changes_by_releases_that_count_none_are_counted(old_folder: Path) -> None:
    repository = Repository(old_folder)
    connection = sqlite3.connect(old_folder / "catalog.sqlite", isolation_level=None)
    for statement, changed in (
        ("INSERT INTO versions SELECT tenant, id, 3, digest, bytes, created, metadata, state FROM versions", "kept"),
        ("UPDATE versions SET state = 'active' WHERE id = 'kept'", "kept"),
        ("DELETE FROM versions WHERE id = 'other'", "other"),
    ):
        seen, _ = repository.changes(0)
        connection.execute(statement + " WHERE id = 'kept' AND version = 1" * statement.startswith("INSERT"))
        assert repository.changes(seen)[1] == [TaskName.of(changed)]
    connection.close()
    repository.close()


def test_a_locked_catalogue_is_read_and_opened(
    tmp_path: Path, files: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoints.catalog, "BUSY_SECONDS", 0)
    repository = Repository(tmp_path)
    repository.put("a", files[0])
    other = sqlite3.connect(tmp_path / "catalog.sqlite", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    assert repository.changes(0)[1] == [A]
    again = Repository(tmp_path)
    assert again.get("a").version == 1
    with pytest.raises(Saturated):
        again.put("a", files[1])
    other.execute("COMMIT")
    assert again.put("a", files[1]).version == 2
    for each in (other, again, repository):
        each.close()


def test_a_catalogue_that_nobody_may_read_is_busy(
    tmp_path: Path, files: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoints.catalog, "BUSY_SECONDS", 0)
    Repository(tmp_path).close()
    other = sqlite3.connect(tmp_path / "catalog.sqlite", isolation_level=None)
    other.execute("PRAGMA locking_mode=EXCLUSIVE")
    other.execute("BEGIN EXCLUSIVE")
    with pytest.raises(Saturated):
        Repository(tmp_path)
    other.close()
    repository = Repository(tmp_path)
    assert repository.changes(0) == (0, [])
    repository.close()


def test_old_versions_stay_until_the_new_one_is_known_to_serve(tmp_path: Path, files: list[bytes]) -> None:
    repository = Repository(tmp_path / "repository", keep_versions=2)
    for data in files[:2]:
        repository.put("sample", data)
    repository.put("sample", files[2], retain=False)
    assert [stored.version for stored in repository.versions("sample")] == [1, 2, 3]
    repository.retain("sample", "default", 3)
    assert [stored.version for stored in repository.versions("sample")] == [2, 3]
    repository.close()


def test_a_rollback_that_is_taken_back_leaves_what_others_did(repository: Repository, files: list[bytes]) -> None:
    for data in files[:3]:
        repository.put("sample", data)
    back, changed = repository.rolled_back("sample", 1, "default")
    assert back.version == 1 and [change.version for change in changed] == [2, 3]
    repository.put("sample", files[3])
    repository.discard("sample", 2)
    repository.undo("sample", 1, changed, "default")
    assert [(each.version, each.state) for each in repository.versions("sample")] == [
        (1, "active"), (3, "active"), (4, "active"),
    ]  # fmt: skip
    back, changed = repository.rolled_back("sample", 1, "default")
    repository.rollback("sample", 3)
    repository.undo("sample", 1, changed, "default")
    assert repository.get("sample").version == 3, "as the other wanted"
