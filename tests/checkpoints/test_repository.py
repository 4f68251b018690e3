from __future__ import annotations

import dataclasses
import errno
import os
import sqlite3
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import sqlalchemy as sa

from checkpoints.blobs import OWNER, LocalBlobs, digest_of
from checkpoints.catalog import Catalog
from checkpoints.repository import Repository
from checkpoints.task_file import read_task
from checkpoints.versions import TaskRows
from jpets.errors import Conflict, InvalidTask, NotFound, OutOfSpace, Saturated
from jpets.types import Task, TaskName

MakeTask = Callable[..., Task]


def blob_names(tmp_path: Path) -> set[str]:
    return {path.name for path in (tmp_path / "repository" / "blobs").iterdir() if path.name != OWNER}


def test_put_and_get(repository: Repository, files: list[bytes], make_task: MakeTask, tmp_path: Path) -> None:
    stored = repository.put("sample", files[0])
    assert (stored.tenant, stored.id, stored.version, stored.served) == ("default", "sample", 1, True)
    assert (stored.digest, stored.bytes) == (digest_of(files[0]), len(files[0]))
    assert stored.created.endswith("+00:00")
    assert stored.metadata["labels"] == ["no", "maybe", "yes"]
    assert stored.metadata["deltas"][0]["method"] == "lora"
    assert repository.get("sample") == stored
    assert repository.read(stored) == files[0]
    task = repository.task(stored)
    np.testing.assert_array_equal(task.head.tensors["kernel"], make_task("lora").head.tensors["kernel"])
    path = tmp_path / "upload.safetensors"
    path.write_bytes(files[1])
    assert repository.put("sample", path).digest == digest_of(files[1])


def test_every_upload_is_a_version(repository: Repository, files: list[bytes], tmp_path: Path) -> None:
    assert [repository.put("sample", files[0]).version for _ in range(3)] == [1, 2, 3]
    assert [stored.served for stored in repository.versions("sample")] == [False, False, True]
    assert blob_names(tmp_path) == {f"{digest_of(files[0])}.safetensors"}


@pytest.mark.parametrize("id", ["", "../x", "a/b", "a\0b", "x" * 300, "Upper", ".hidden", "a\n"])
def test_bad_ids(repository: Repository, files: list[bytes], tmp_path: Path, id: str) -> None:
    with pytest.raises(InvalidTask, match="task id must be 1 to 128"):
        repository.put(id, files[0])
    with pytest.raises(InvalidTask, match="tenant must be"):
        repository.put("fine", files[0], tenant=id)
    with pytest.raises(NotFound):
        repository.get(id)
    assert blob_names(tmp_path) == set()
    assert repository.list() == ([], None)


def test_invalid_file_changes_nothing(repository: Repository, files: list[bytes], tmp_path: Path) -> None:
    repository.put("sample", files[0])
    with pytest.raises(InvalidTask):
        repository.put("sample", files[1][:-1])

    def refuse(data: bytes | memoryview, id: str) -> Task:
        raise InvalidTask("wrong backbone")

    with pytest.raises(InvalidTask, match="wrong backbone"):
        repository.put("sample", files[1], validator=refuse)
    assert [stored.version for stored in repository.versions("sample")] == [1]
    assert blob_names(tmp_path) == {f"{digest_of(files[0])}.safetensors"}


def test_unknown(repository: Repository, files: list[bytes]) -> None:
    for call in (repository.get, repository.versions, repository.delete, repository.rollback):
        with pytest.raises(NotFound, match=r"'other' is not in the repository|no earlier version"):
            call("other")
    stored = repository.put("sample", files[0], tenant="one")
    for version in (2, 0, "stable", "latest"):
        with pytest.raises(NotFound):
            repository.get("sample", version=version)
    with pytest.raises(NotFound):
        repository.get("sample", "one", 2)
    with pytest.raises(NotFound, match="no earlier version"):
        repository.rollback("sample", tenant="one")
    repository.delete("sample", "one")
    repository.collect()
    with pytest.raises(NotFound, match="is not stored"):
        repository.read(stored)


def test_tenants_do_not_see_each_other(repository: Repository, files: list[bytes]) -> None:
    repository.put("sample", files[0], tenant="one")
    repository.put("sample", files[1], tenant="two")
    assert repository.get("sample", "one").digest != repository.get("sample", "two").digest
    repository.delete("sample", "one")
    assert repository.list("one") == ([], None)
    assert len(repository.list("two")[0]) == 1


def test_if_match(repository: Repository, files: list[bytes], tmp_path: Path) -> None:
    assert repository.put("sample", files[0], if_match=0).version == 1
    with pytest.raises(Conflict, match="is at version 1, expected 0"):
        repository.put("sample", files[1], if_match=0)
    assert blob_names(tmp_path) == {f"{digest_of(files[0])}.safetensors"}
    assert repository.put("sample", files[1], if_match=1, activate=False).version == 2
    with pytest.raises(Conflict, match="is at version 2, expected 1"):
        repository.put("sample", files[2], if_match=1)
    repository.rollback("sample", to=1)
    assert repository.put("sample", files[2], if_match=1).version == 3
    with pytest.raises(Conflict):
        repository.delete("sample", if_match=1)
    repository.delete("sample", if_match=3)


def test_activation(repository: Repository, files: list[bytes]) -> None:
    first = repository.put("sample", files[0], activate=False)
    assert not first.served
    assert repository.get("sample") == first == repository.list()[0][0]
    assert repository.aliases("sample") == {}
    assert repository.rollback("sample", 1).served
    repository.put("sample", files[1], activate=False)
    repository.put("sample", files[2], activate=False)
    assert repository.get("sample").version == repository.get("sample", version="latest").version == 1
    assert repository.list()[0][0].version == 1
    assert repository.rollback("sample", 3).served
    assert repository.get("sample", version="latest").version == 3


def test_rollback(repository: Repository, files: list[bytes]) -> None:
    for data in files[:4]:
        repository.put("sample", data)
    back = repository.rollback("sample")
    assert (back.version, back.served, back.digest) == (3, True, digest_of(files[2]))
    assert repository.rollback("sample", to=1).served
    assert repository.get("sample", version="latest").version == 1
    assert repository.rollback("sample", to=3).served, "a withdrawn version can be served again"
    assert repository.put("sample", files[4]).version == 5
    assert repository.get("sample").version == 5


def test_aliases(repository: Repository, files: list[bytes]) -> None:
    for data in files[:3]:
        repository.put("sample", data)
    repository.alias("sample", "stable", 2)
    assert repository.get("sample", version="stable").digest == digest_of(files[1])
    repository.alias("sample", "stable", 1)
    assert repository.aliases("sample") == {"stable": 1, "latest": 3}
    assert repository.rollback("sample", to="stable").version == 1
    for name in ("latest", "", "7", "a/b", "A"):
        with pytest.raises(InvalidTask, match="alias must be"):
            repository.alias("sample", name, 1)
    with pytest.raises(NotFound):
        repository.alias("sample", "stable", 9)


def test_retention(tmp_path: Path, files: list[bytes]) -> None:
    repository = Repository(tmp_path / "repository", keep_versions=2)
    repository.put("sample", files[0])
    repository.alias("sample", "stable", 1)
    repository.put("sample", files[1])
    for data in files[2:]:
        repository.put("sample", data, activate=False)
    assert [stored.version for stored in repository.versions("sample")] == [1, 2, 5, 6]
    assert repository.collect() == 2
    assert blob_names(tmp_path) == {f"{digest_of(files[at])}.safetensors" for at in (0, 1, 4, 5)}
    repository.close()
    with pytest.raises(ValueError, match="at least 1"):
        Repository(tmp_path / "repository", keep_versions=0)


def test_the_version_that_was_served_stays_until_the_next_one_serves(tmp_path: Path, files: list[bytes]) -> None:
    """It may be older than the last ones, which were rolled back, and serves on if the new one cannot be loaded."""
    repository = Repository(tmp_path / "repository", keep_versions=2)
    for data in files[:2]:
        repository.put("sample", data)
    repository.rollback("sample", 1)
    repository.put("sample", files[2])
    assert [stored.version for stored in repository.versions("sample")] == [1, 2, 3]
    repository.discard("sample", 3)
    assert repository.get("sample").version == 1
    repository.put("sample", files[2])
    assert repository.before_served("sample") == 1
    repository.close()


def test_a_damaged_file_is_refused_and_mended_by_an_upload(
    repository: Repository, files: list[bytes], tmp_path: Path
) -> None:
    stored = repository.put("sample", files[0])
    (path,) = tmp_path.rglob(f"{stored.digest}.safetensors")
    content = bytearray(files[0])
    content[-5] ^= 1
    path.write_bytes(content)
    with pytest.raises(InvalidTask, match="was damaged where it is stored"):
        repository.read(stored)
    again = repository.put("sample", files[0])
    assert repository.read(again) == files[0]


def test_delete_and_collect(repository: Repository, files: list[bytes], tmp_path: Path) -> None:
    repository.put("sample", files[0])
    repository.put("other", files[0])
    repository.put("other", files[1])
    repository.alias("sample", "stable", 1)
    repository.delete("sample")
    assert len(blob_names(tmp_path)) == 2, "the other task has the same file"
    with mock.patch.object(LocalBlobs, "delete", side_effect=Saturated("no storage")):
        repository.delete("other")  # it is deleted, whatever becomes of its files
    assert repository.list() == ([], None) and len(blob_names(tmp_path)) == 2
    (tmp_path / "repository" / "blobs" / ".tmp-dead").touch()
    assert repository.collect() == 2
    assert repository.collect(stale_seconds=-1) == 1
    assert blob_names(tmp_path) == set()
    assert repository.put("sample", files[0]).version == 2, "a version number is never used twice"
    assert repository.aliases("sample") == {"latest": 2}


def test_list_is_paged(repository: Repository, files: list[bytes]) -> None:
    ids = [f"task-{number:02}" for number in range(7)]
    for id in reversed(ids):
        repository.put(id, files[0])
    found, after = [], None
    while True:
        page, after = repository.list(limit=3, after=after)
        assert len(page) <= 3
        found += page
        if after is None:
            break
    assert [stored.id for stored in found] == ids
    assert all(stored.served for stored in found)
    with pytest.raises(ValueError, match="at least 1"):
        repository.list(limit=0)


@pytest.mark.parametrize("repository", ["sqlite"], indirect=True)
def test_reopened(repository: Repository, files: list[bytes], tmp_path: Path) -> None:
    stored = repository.put("sample", files[0])
    again = Repository(tmp_path / "repository")
    assert again.get("sample") == stored
    with sqlite3.connect(tmp_path / "repository" / "catalog.sqlite") as connection:
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    connection.close()
    again.close()


# --- full disks ---


@pytest.mark.parametrize("call", ["write", "fsync"])
@pytest.mark.parametrize("after", [0, 1])
def test_full_disk_changes_nothing(
    repository: Repository, files: list[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, after: int
) -> None:
    repository.put("sample", files[0])
    real, calls = getattr(os, call), []

    def full(*arguments: object) -> object:
        calls.append(call)
        if len(calls) > after:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(*(argument[:100] if isinstance(argument, memoryview) else argument for argument in arguments))

    with monkeypatch.context() as patch:
        patch.setattr(os, call, full)
        with pytest.raises(OutOfSpace):
            repository.put("sample", files[1])
    assert blob_names(tmp_path) == {f"{digest_of(files[0])}.safetensors"}
    assert repository.get("sample").version == 1
    assert repository.put("sample", files[1]).version == 2


@pytest.mark.parametrize(
    ("code", "error"),
    [(sqlite3.SQLITE_FULL, OutOfSpace), (sqlite3.SQLITE_BUSY, Saturated), (1, sa.exc.OperationalError)],
)
@pytest.mark.parametrize("repository", ["sqlite"], indirect=True)
def test_catalogue_that_cannot_write(
    repository: Repository,
    files: list[bytes],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    code: int,
    error: type[Exception],
) -> None:
    repository.put("sample", files[0])

    def fail(self: TaskRows, row: object) -> int:
        original = sqlite3.OperationalError("failed")
        original.sqlite_errorcode = code
        raise sa.exc.OperationalError("INSERT", {}, original)

    with monkeypatch.context() as patch:
        patch.setattr(TaskRows, "add", fail)
        with pytest.raises(error):
            repository.put("sample", files[1])
    assert blob_names(tmp_path) == {f"{digest_of(files[0])}.safetensors"}
    assert [stored.version for stored in repository.versions("sample")] == [1]


def test_catalogue_on_a_full_disk(tmp_path: Path) -> None:
    catalog = Catalog(tmp_path / "catalog.sqlite")
    with pytest.raises(OutOfSpace), catalog.write() as connection:
        connection.exec_driver_sql("PRAGMA max_page_count=1")
        connection.exec_driver_sql("CREATE TABLE large (value TEXT)")
        connection.exec_driver_sql("INSERT INTO large VALUES (hex(zeroblob(100000)))")
    catalog.close()


def test_stored_task_is_frozen(repository: Repository, files: list[bytes]) -> None:
    stored = repository.put("sample", files[0])
    with pytest.raises(dataclasses.FrozenInstanceError):
        stored.version = 2  # type: ignore[misc]
    assert read_task(repository.read(stored), id="sample").id == "sample"


def test_index_lists_served_versions_the_most_used_first(repository: Repository, files: list[bytes]) -> None:
    for name in ("a", "b", "c"):
        repository.put(name, files[0])
    repository.put("b", files[1])
    repository.put("c", files[1], activate=False)
    b, c = TaskName.of("b"), TaskName.of("c")
    repository.add_uses({b: 2, c: 1})
    repository.add_uses({c: 4.5})
    found = repository.index("maker")
    assert [(task.id, task.version, task.queries) for task in found] == [("c", 1, 5.5), ("b", 2, 2.0), ("a", 1, 0.0)]
    assert all(task.layout is None for task in found)
    repository.age_uses(0.001)
    assert [task.queries for task in repository.index("maker")] == [0.0, 0.0, 0.0]
    repository.rollback("b")
    repository.add_uses({c: 9.0})
    repository.delete("c")
    assert [(task.id, task.version) for task in repository.index("maker")] == [("a", 1), ("b", 1)]
    repository.put("c", files[0])
    assert {task.id: task.queries for task in repository.index("maker")} == {"a": 0.0, "b": 0.0, "c": 0.0}


def test_the_index_and_the_uses_are_of_every_tenant(repository: Repository, files: list[bytes]) -> None:
    for tenant in ("default", "one"):
        repository.put("a", files[0], tenant=tenant)
    mine, theirs = TaskName.of("a"), TaskName("one", "a")
    repository.add_uses({theirs: 3})
    assert [(task.name, task.queries) for task in repository.index("maker")] == [(theirs, 3.0), (mine, 0.0)]
    found = repository.indexed(theirs, "maker")
    assert found is not None and found.name == theirs
    assert repository.changes(0)[1] == [mine, theirs]
    assert repository.tenants() == ["default", "one"]


def test_a_list_has_those_of_another_tenant_beside_the_own(repository: Repository, files: list[bytes]) -> None:
    for id in ("a", "b", "d"):
        repository.put(id, files[0])
    for id in ("b", "c"):
        repository.put(id, files[1], tenant="one")
    repository.put("z", files[1], tenant="two")
    expected = [("default", "a"), ("one", "b"), ("one", "c"), ("default", "d")]
    assert [stored.name for stored in repository.list("one", beside="default")[0]] == expected
    found, after = [], None
    while True:
        page, after = repository.list("one", limit=1, after=after, beside="default")
        found += [stored.name for stored in page]
        if after is None:
            break
    assert found == expected


def test_layouts_belong_to_a_file_and_a_reader(repository: Repository, files: list[bytes]) -> None:
    repository.put("a", files[0])
    repository.put("b", files[0])
    repository.put("c", files[1])
    repository.keep_layouts("maker", {digest_of(files[0]): "old"})
    repository.keep_layouts("maker", {digest_of(files[0]): "new"})
    repository.keep_layouts("maker", {})
    assert [task.layout for task in repository.index("maker")] == ["new", "new", None]
    assert [task.layout for task in repository.index("another")] == [None] * 3
    repository.delete("a")
    repository.collect()
    assert [task.layout for task in repository.index("maker")] == ["new", None]
    repository.delete("b")
    repository.collect()
    repository.put("d", files[0])
    assert [task.layout for task in repository.index("maker")] == [None, None]


def test_outline_is_the_task_without_numbers(repository: Repository, files: list[bytes]) -> None:
    stored = repository.put("a", files[0])
    expected, found = repository.task(stored).outlined(), repository.outline(stored)
    assert found is not None
    assert (found.id, found.labels, found.preprocessing) == (expected.id, expected.labels, expected.preprocessing)
    assert (found.head.type, found.head.outputs) == (expected.head.type, expected.head.outputs)
    for outline in (found, expected):
        whole = repository.task(stored).deltas
        assert [(own.method, own.settings, own.tensors) for own in outline.deltas] == [
            (own.method, own.settings, {}) for own in whole
        ]
