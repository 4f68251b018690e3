"""Blobs in what fsspec reaches: one copy of each on this machine."""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from checkpoints.blobs import LocalBlobs, digest_of
from checkpoints.remote_blobs import COPY_SECONDS, RemoteBlobs, open_blobs
from checkpoints.repository import Repository
from jpets.errors import InvalidInput, InvalidTask, NotFound, OutOfSpace, Saturated


@pytest.fixture
def url() -> Iterator[str]:
    root = f"/{uuid.uuid4().hex}/tasks"
    yield f"memory:/{root}"
    with contextlib.suppress(FileNotFoundError):
        fsspec.filesystem("memory").rm(root, recursive=True)


@pytest.fixture
def blobs(url: str, tmp_path: Path) -> RemoteBlobs:
    return remote(url, tmp_path / "cache")


def remote(url: str, cache: Path) -> RemoteBlobs:
    opened = open_blobs(url, cache)
    assert isinstance(opened, RemoteBlobs)
    return opened


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_put_read_delete(blobs: RemoteBlobs, tmp_path: Path) -> None:
    digest = blobs.put(memoryview(b"one"))
    assert digest == blobs.put(b"one") == digest_of(b"one")
    assert blobs.read(digest) == b"one" and blobs.exists(digest)
    assert list(blobs.list()) == [digest]
    blobs.delete(digest)
    blobs.delete(digest)
    assert not blobs.exists(digest) and list(blobs.list()) == names(tmp_path / "cache") == []
    with pytest.raises(NotFound, match="is not stored"):
        blobs.read(digest)
    for call in (blobs.read, blobs.exists, blobs.delete):
        with pytest.raises(NotFound, match="64 hexadecimal digits"):
            call("../" + "a" * 61)


def test_a_blob_is_fetched_once(blobs: RemoteBlobs, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    digest = blobs.put(b"one")
    other = remote(url, tmp_path / "other")
    fetched: list[str] = []
    fetch = MemoryFileSystem.cat_file

    def noted(*of: Any, **how: Any) -> Any:
        fetched.append(of[1])
        return fetch(*of, **how)

    monkeypatch.setattr(MemoryFileSystem, "cat_file", noted)
    assert other.read(digest) == other.read(digest) == blobs.read(digest) == b"one"
    assert len(fetched) == 1
    assert names(tmp_path / "other") == [f"{digest}.safetensors"]
    blobs.delete(digest)
    assert not other.exists(digest), "only what is stored for all is there"


def test_what_was_damaged_is_not_kept(blobs: RemoteBlobs, url: str, tmp_path: Path) -> None:
    digest = blobs.put(b"whole")
    with fsspec.open(f"{url}/{digest}.safetensors", "wb") as file:
        file.write(b"wh")
    other = remote(url, tmp_path / "other")
    with pytest.raises(InvalidTask, match="damaged"):
        other.read(digest)
    assert names(tmp_path / "other") == []
    other.put(b"whole")
    assert remote(url, tmp_path / "third").read(digest) == b"whole"


def test_copies_that_nobody_reads_go(blobs: RemoteBlobs, tmp_path: Path) -> None:
    digests = [blobs.put(data) for data in (b"old", b"read", b"new")]
    for digest in digests[:2]:
        os.utime(tmp_path / "cache" / f"{digest}.safetensors", (time.time() - COPY_SECONDS - 60,) * 2)
    blobs.read(digests[1])
    assert blobs.sweep(0) == 0
    assert names(tmp_path / "cache") == sorted(f"{digest}.safetensors" for digest in digests[1:])
    assert blobs.read(digests[0]) == b"old"


def test_copies_need_no_room(blobs: RemoteBlobs, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = remote(url, tmp_path / "other")

    def full(*_: object) -> None:
        raise OutOfSpace("full")

    monkeypatch.setattr(LocalBlobs, "put", full)
    digest = blobs.put(b"one")
    assert other.read(digest) == other.read(digest) == b"one"


@pytest.mark.parametrize("error", [PermissionError, TimeoutError])
def test_a_storage_that_cannot_be_reached(
    blobs: RemoteBlobs, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error("https://me:secret@host/path")

    digest = digest_of(b"one")
    for name in ("cat_file", "pipe_file", "info", "rm_file", "ls"):
        monkeypatch.setattr(MemoryFileSystem, name, fail)
    for call in (
        lambda: blobs.read(digest),
        lambda: blobs.put(b"one"),
        lambda: blobs.exists(digest),
        lambda: blobs.delete(digest),
        lambda: list(blobs.list()),
        lambda: blobs.sweep(0),
    ):
        with pytest.raises(Saturated, match="cannot be reached") as caught:
            call()
        assert "secret" not in str(caught.value)


def test_where_files_can_be_moved_they_are_written_aside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    system = DirFileSystem(path=str(tmp_path), fs=fsspec.filesystem("file"))
    blobs = RemoteBlobs(system, "tasks", tmp_path / "cache")
    move, moved = DirFileSystem.mv, list[tuple[str, str]]()

    def record(self: Any, source: str, target: str, **how: Any) -> None:
        moved.append((source, target))
        move(self, source, target, **how)

    monkeypatch.setattr(DirFileSystem, "mv", record)
    digest = blobs.put(b"one")
    ((source, target),) = moved
    assert source.startswith("tasks/.tmp-") and target == f"tasks/{digest}.safetensors"
    assert names(tmp_path / "tasks") == [f"{digest}.safetensors"]

    def fail(*_: object, **__: object) -> None:
        raise OSError("no")

    monkeypatch.setattr(DirFileSystem, "mv", fail)
    with pytest.raises(Saturated):
        blobs.put(b"two")
    assert names(tmp_path / "tasks") == [f"{digest}.safetensors"]
    for name, age in ((".tmp-old", 100), (".tmp-new", 0)):
        path = tmp_path / "tasks" / name
        path.touch()
        os.utime(path, (path.stat().st_mtime - age,) * 2)
    assert blobs.sweep(50) == 1
    assert names(tmp_path / "tasks") == [".tmp-new", f"{digest}.safetensors"]


@pytest.mark.parametrize("kind", ["file://", "local://", ""])
def test_a_local_folder_needs_no_copies(kind: str, tmp_path: Path) -> None:
    blobs = open_blobs(f"{kind}{tmp_path}/blobs", tmp_path / "cache")
    assert isinstance(blobs, LocalBlobs)
    assert blobs.path(blobs.put(b"one")).parent == tmp_path / "blobs"
    assert not (tmp_path / "cache").exists()


def test_urls_that_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"there are no task files by that URL.*nosuch") as caught:
        open_blobs("nosuch://me:secret@host/x", tmp_path)
    assert "secret" not in str(caught.value)


def test_a_repository_of_several_machines(url: str, tmp_path: Path, files: list[bytes]) -> None:
    first, second = (
        Repository.open(tmp_path / name, catalogue=f"sqlite:///{tmp_path}/catalog.sqlite", blobs=url) for name in "ab"
    )
    stored = first.put("a", files[0])
    assert second.read(second.get("a")) == files[0] and second.task(stored).id == "a"
    assert names(tmp_path / "a") == names(tmp_path / "b") == ["cache"]
    second.put("a", files[1])
    first.delete("a")
    assert first.collect() == second.collect() == 0
    assert not list(second._blobs.list())
    assert first.put("a", files[0]).version == 3
    assert second.read(second.get("a")) == files[0]
    for repository in (first, second):
        repository.close()


def test_blobs_of_another_catalogue_are_refused(url: str, tmp_path: Path, files: list[bytes]) -> None:
    """Its collection would remove them all as unknown."""
    first = Repository.open(tmp_path / "a", catalogue=f"sqlite:///{tmp_path}/a.sqlite", blobs=url)
    stored = first.put("a", files[0])
    for number in range(2):
        with pytest.raises(InvalidInput, match="belongs to another catalogue"):
            Repository.open(tmp_path / f"b{number}", catalogue=f"sqlite:///{tmp_path}/b{number}.sqlite", blobs=url)
    again = Repository.open(tmp_path / "c", catalogue=f"sqlite:///{tmp_path}/a.sqlite", blobs=url)
    assert again.collect() == 0 and again.read(stored) == files[0]
    for repository in (first, again):
        repository.close()


def test_blobs_of_a_folder_belong_to_its_own_catalogue(tmp_path: Path, files: list[bytes]) -> None:
    with contextlib.closing(Repository(tmp_path / "first")) as first:
        stored = first.put("a", files[0])
        for name in ("empty", "used"):
            with contextlib.closing(Repository(tmp_path / name)) as other:
                if name == "used":
                    other.put("b", files[1])
            with pytest.raises(InvalidInput, match=r"files that the catalogue does not know \(1\)"):
                Repository.open(tmp_path / name, blobs=f"file://{tmp_path}/first/blobs")
        assert first.read(stored) == files[0]


def test_a_folder_with_the_blobs_of_another_catalogue_is_refused(tmp_path: Path, files: list[bytes]) -> None:
    """As by a command that was not told of the catalogue: it would remove all files as unknown."""
    catalogue = f"sqlite:///{tmp_path}/elsewhere.sqlite"
    with contextlib.closing(Repository.open(tmp_path / "own", catalogue=catalogue)) as shared:
        stored = shared.put("a", files[0])
        with pytest.raises(InvalidInput, match="belongs to another catalogue"):
            Repository.open(tmp_path / "own")
        assert shared.collect() == 0 and shared.read(stored) == files[0]


def test_a_folder_whose_catalogue_is_lost_is_refused(tmp_path: Path, files: list[bytes]) -> None:
    """A new one would know no file: the first upload or restore would have all of them removed."""
    folder = tmp_path / "own"
    with contextlib.closing(Repository.open(folder)) as own:
        stored = own.put("a", files[0])
    catalogue = folder / "catalog.sqlite"
    catalogue.rename(tmp_path / "aside")
    for _ in range(2):
        with pytest.raises(InvalidInput, match=r"has task files \(1\) and no catalog.sqlite"):
            Repository.open(folder)
        assert not catalogue.exists()
    (tmp_path / "aside").rename(catalogue)
    with contextlib.closing(Repository.open(folder)) as own:
        assert own.collect() == 0 and own.read(stored) == files[0]


def test_blobs_that_came_to_belong_to_another_catalogue_are_not_removed(tmp_path: Path, files: list[bytes]) -> None:
    with contextlib.closing(Repository.open(tmp_path / "plain")) as plain:
        catalogue, blobs = f"sqlite:///{tmp_path}/b.sqlite", f"file://{tmp_path}/plain/blobs"
        with contextlib.closing(Repository.open(tmp_path / "b", catalogue=catalogue, blobs=blobs)) as other:
            stored = other.put("a", files[0])
            plain.put("b", files[1])
            plain.delete("b")
            with pytest.raises(InvalidInput, match="belongs to another catalogue"):
                plain.collect()
            assert other.read(stored) == files[0]


def test_two_catalogues_that_come_at_once_do_not_share_blobs(url: str, tmp_path: Path) -> None:
    for kind, where in (("local", f"file://{tmp_path}/blobs"), ("remote", url)):
        first, second = (open_blobs(where, tmp_path / f"{kind}-{name}") for name in "ab")
        first.own("1" * 32)
        second.own("2" * 32)
        assert first.owner() == second.owner() == "1" * 32


@pytest.mark.parametrize("error", [RuntimeError("EndpointConnectionError"), TimeoutError(), PermissionError()])
def test_errors_of_clouds_are_told_as_a_storage_that_cannot_be_reached(
    error: Exception, blobs: RemoteBlobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their clients have errors that are not of the operating system."""
    digest = blobs.put(b"one")

    def fail(*of: Any, **how: Any) -> Any:
        raise error

    for name in ("info", "pipe_file", "ls", "rm_file"):
        monkeypatch.setattr(MemoryFileSystem, name, fail)
    for call in (lambda: blobs.put(b"two"), lambda: blobs.exists(digest), lambda: list(blobs.list())):
        with pytest.raises(Saturated, match="cannot be reached"):
            call()


def test_copies_alone_are_removed_from_the_cache(url: str, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    blobs = remote(url, cache)
    digest = blobs.put(b"one")
    (cache / "notes.txt").write_text("mine")
    (cache / "folder").mkdir()
    for path in [*cache.iterdir(), cache / "folder"]:
        os.utime(path, (time.time() - COPY_SECONDS - 60,) * 2)
    remote(url, cache)
    assert names(cache) == ["folder", "notes.txt"] and blobs.read(digest) == b"one"
