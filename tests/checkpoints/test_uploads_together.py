"""Uploads of several threads share a commit and a sync of the folder; what each was told holds all the same."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import stat
import threading
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import sqlalchemy as sa
from support import wait_until

from checkpoints.blobs import digest_of
from checkpoints.catalog import BACKBONES, VERSIONS, WRITE
from checkpoints.repository import Repository
from checkpoints.task_file import read_task
from checkpoints.versions import StoredTask
from jpets.errors import Conflict, OutOfSpace, Saturated
from jpets.files import sync_folder

Uploads = Sequence[Future[StoredTask]]


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(12) as made:
        yield made


@contextlib.contextmanager
def listening(repository: Repository, event: str, call: Any) -> Iterator[None]:
    engine = repository._catalog._engine
    sa.event.listen(engine, event, call)
    try:
        yield
    finally:
        sa.event.remove(engine, event, call)


@contextlib.contextmanager
def waiting(pool: ThreadPoolExecutor, repository: Repository, files: list[bytes], **last: Any) -> Iterator[Uploads]:
    """Six uploads, of which the first has its transaction before it, and the others one that they share. They begin
    with the end of the body. ``last`` are arguments of the last one."""
    catalog = repository._catalog
    with catalog._writer:
        calls = [pool.submit(repository.put, "task-0", files[0])]
        wait_until(lambda: catalog._shared._turn.locked() and not catalog._shared._waiting)
        calls += [pool.submit(repository.put, f"task-{n}", files[n], **(last if n == 5 else {})) for n in range(1, 6)]
        wait_until(lambda: len(catalog._shared._waiting) == 5)
        yield calls


def test_uploads_at_a_time_share_a_sync_and_a_commit(
    repository: Repository, files: list[bytes], pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[str] = []

    def sync(folder: Path) -> None:
        sync_folder(folder)
        steps.append("sync")

    monkeypatch.setattr("checkpoints.blobs.sync_folder", sync)
    with contextlib.ExitStack() as stack:
        with waiting(pool, repository, files) as calls:
            stack.enter_context(listening(repository, "commit", lambda connection: steps.append("commit")))
        found = [call.result(30) for call in calls]
    assert [(stored.id, stored.version, stored.digest) for stored in found] == [
        (f"task-{number}", 1, digest_of(files[number])) for number in range(6)
    ]
    assert [repository.read(stored) for stored in found] == files
    assert steps == ["sync", "commit"] * 2


def test_a_refused_upload_takes_back_its_own_only(
    repository: Repository, files: list[bytes], pool: ThreadPoolExecutor
) -> None:
    with waiting(pool, repository, files, if_match=3) as calls:
        pass
    with pytest.raises(Conflict, match="task 'task-5' is at version 0, expected 3"):
        calls[5].result(30)
    stored = [call.result(30) for call in calls[:5]]
    assert repository.list()[0] == stored
    assert set(repository._blobs.list()) == {each.digest for each in stored}


def test_a_commit_that_fails_is_an_error_of_all_that_share_it(
    repository: Repository, files: list[bytes], pool: ThreadPoolExecutor
) -> None:
    def fail(connection: sa.Connection) -> None:
        raise Saturated("the database is away")

    with contextlib.ExitStack() as stack:
        with waiting(pool, repository, files, if_match=3) as calls:
            stack.enter_context(listening(repository, "commit", fail))
        for call in calls:
            with pytest.raises(Saturated):
                call.result(30)
    assert repository.list() == ([], None)
    assert not set(repository._blobs.list())
    assert repository.put("task-0", files[0]).version == 1


def test_a_sync_that_fails_is_an_error_of_all_that_share_it(
    repository: Repository, files: list[bytes], pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    with waiting(pool, repository, files) as calls:
        monkeypatch.setattr("checkpoints.blobs.sync_folder", mock.Mock(side_effect=OSError(errno.EIO, "a broken disk")))
    for call in calls:
        with pytest.raises(Saturated, match="the folder of blobs cannot be written now: a broken disk"):
            call.result(30)
    assert repository.list() == ([], None) and not set(repository._blobs.list())


class Disk:
    """What a power cut leaves: a file whose bytes were synced, under a name whose folder was synced after it got it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._written: set[int] = set()
        self._named: set[str] = set()
        self.safe: set[str] = set()
        """Names of files that are left."""
        self.lost: list[set[str]] = []
        """By commit of a writer, files of versions that a power cut takes then."""
        sync, replace, unlink, lock = os.fsync, os.replace, os.unlink, threading.Lock()

        def fsync(descriptor: int) -> None:
            found = os.fstat(descriptor)
            with lock:
                named = set(self._named)
            sync(descriptor)
            with lock:
                if stat.S_ISDIR(found.st_mode):
                    self.safe |= named & self._named
                else:
                    self._written.add(found.st_ino)

        def rename(source: Path, target: Path) -> None:
            with lock:
                number = os.stat(source).st_ino
                replace(source, target)
                if number in self._written:
                    self._written.discard(number)
                    self._named.add(Path(target).stem)

        def remove(path: Path) -> None:
            with lock:
                self._named.discard(Path(path).stem)
                self.safe.discard(Path(path).stem)
                unlink(path)

        monkeypatch.setattr(os, "fsync", fsync)
        monkeypatch.setattr(os, "replace", rename)
        monkeypatch.setattr(os, "unlink", remove)

    def look(self, connection: sa.Connection) -> None:
        if WRITE in connection.get_execution_options():  # readers may see what was there before
            self.lost.append(set(connection.execute(sa.select(VERSIONS.c.digest)).scalars()) - self.safe)


def test_no_version_is_committed_before_its_file_is_safe(
    repository: Repository, files: list[bytes], pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whenever the power is cut: also for a file that another upload is just storing, and beside deletions."""
    disk, task = Disk(monkeypatch), read_task(files[0], id="task")

    def put(number: int) -> StoredTask:
        if number % 9 == 0:
            repository.collect()
        content = files[0] + str(number // 2).encode()  # which the validator does not look at; each comes twice
        return repository.put(f"task-{number % 10}", content, validator=lambda data, id: task)

    with listening(repository, "commit", disk.look):
        assert len(list(pool.map(put, range(96)))) == 96
    assert len(disk.lost) > 1 and not any(disk.lost)


def test_a_copy_is_committed_when_its_files_are_safe(
    repository: Repository, files: list[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, data in enumerate(files):
        repository.put(f"task-{number}", data)
    disk = Disk(monkeypatch)
    with (
        contextlib.closing(Repository(tmp_path / "copy")) as copied,
        listening(copied, "commit", disk.look),
    ):
        repository.copy_to(copied)
    assert len(disk.safe) == len(files) and not any(disk.lost)


def test_what_was_done_before_an_error_is_taken_back(repository: Repository) -> None:
    """The transaction is committed all the same, for the others."""

    def fail(connection: sa.Connection) -> None:
        connection.execute(sa.insert(BACKBONES).values(name="half done"))
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        repository._catalog.shared_write(fail)
    assert repository.backbones() == []


def test_a_process_without_files_left_is_told_to_come_again(
    repository: Repository, files: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is no fault of the upload, which may share the sync with others."""
    few = mock.Mock(side_effect=OSError(errno.EMFILE, "Too many open files"))
    with monkeypatch.context() as patched:
        patched.setattr("checkpoints.blobs.sync_folder", few)
        with pytest.raises(Saturated, match="Too many open files; try again"):
            repository.put("task", files[0])
    assert repository.put("task", files[0]).version == 1


def test_a_catalogue_that_may_not_grow_says_so(files: list[bytes], tmp_path: Path) -> None:
    """SQLite takes a whole transaction back where a statement finds no room, and its savepoints are gone then."""

    def limit(connection: sa.Connection) -> None:
        connection.exec_driver_sql("PRAGMA max_page_count=60")

    stored = 0
    with contextlib.closing(Repository(tmp_path / "own")) as repository:
        with listening(repository, "begin", limit), pytest.raises(OutOfSpace):
            for number in range(3000):
                repository.put(f"{number:0120d}", files[0])
                stored += 1
        assert 0 < stored < 3000
        assert len(repository.list(limit=3000)[0]) == stored


def test_bytes_of_a_refused_upload_are_free_at_once(repository: Repository, files: list[bytes]) -> None:
    def refused() -> weakref.ref[np.ndarray]:
        content = np.frombuffer(bytearray(files[0]), np.uint8)
        with contextlib.suppress(Conflict):
            repository.put("task", content.data, if_match=5)
        return weakref.ref(content)

    gc.disable()
    try:
        assert refused()() is None
    finally:
        gc.enable()


def test_a_database_that_leaves_while_one_is_taken_back_tells_nobody_of_that_one(
    repository: Repository, files: list[bytes], pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = sa.exc.OperationalError("ROLLBACK", {}, OSError("the server closed the connection"))
    with waiting(pool, repository, files, if_match=3) as calls:
        monkeypatch.setattr(sa.NestedTransaction, "rollback", mock.Mock(side_effect=gone))
    errors = [call.exception(30) for call in calls]
    assert errors[0] is None and not any(isinstance(error, Conflict) for error in errors)
    assert all(errors[1:]) and len(repository.list()[0]) == 1
