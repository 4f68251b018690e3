"""Content-addressed storage of task files: a blob's name is the sha256 of its bytes."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Protocol

from jpets.errors import InvalidTask, NotFound, Saturated
from jpets.files import SHORTAGES, TEMPORARY, space_errors, sweep, sync_folder, write_atomic, write_first

DIGEST = re.compile(r"[0-9a-f]{64}")
SUFFIX = ".safetensors"
NOT_ITS_OWN = (errno.ENOENT, errno.EAGAIN, *SHORTAGES)
"""Errors of a file that is not there, and of what the process lacks."""
OWNER = "owner"
"""The file with the identity of the catalogue."""


def digest_of(data: bytes | memoryview) -> str:
    return hashlib.sha256(data).hexdigest()


class Blobs(Protocol):
    """The repository's interface to a storage of blobs. What ``put`` stored before a ``sync`` survives a crash."""

    def put(self, data: bytes | memoryview, digest: str | None = None) -> str:
        """Stores ``data`` and returns its digest, which the caller may know already; storing it again is harmless.
        Raises ``OutOfSpace``."""
        ...

    def sync(self) -> None:
        """Has every blob that is there now survive a crash, whoever stored it. Raises ``OutOfSpace``, ``Saturated``."""
        ...

    def read(self, digest: str) -> bytes:
        """Raises ``NotFound``, ``InvalidTask`` if the stored bytes do not match the digest, and ``Saturated`` where the
        storage fails."""
        ...

    def open(self, digest: str) -> BinaryIO:
        """The stored bytes as a file, checked as ``read`` does, at its beginning. It stays whole when the blob is
        deleted meanwhile."""
        ...

    def exists(self, digest: str) -> bool: ...

    def damaged(self, digest: str) -> bool:
        """Whether a stored blob is not the one of its name; ``put`` mends it. False where to tell would take fetching
        it: remote storages look after what they keep."""
        ...

    def delete(self, digest: str) -> None:
        """Deleting an unknown blob is harmless."""
        ...

    def list(self) -> Iterator[str]:
        """Every stored digest."""
        ...

    def sweep(self, age: float) -> int:
        """Removes files that interrupted writers left more than ``age`` seconds ago; returns how many."""
        ...

    def owner(self) -> str | None:
        """The identity of the catalogue that the blobs belong to; None if they belong to none."""
        ...

    def own(self, identity: str) -> None:
        """Does nothing where there is an owner: two may come at once."""
        ...


def _holds(path: Path, data: bytes | memoryview) -> bool:
    try:
        return path.stat().st_size == len(data) and path.read_bytes() == data
    except OSError:
        return False


@contextlib.contextmanager
def _stored(what: str, done: str) -> Iterator[None]:
    """Raises ``Saturated`` where the file or its disk fails: it may be mended."""
    try:
        yield
    except OSError as error:
        if error.errno in NOT_ITS_OWN:
            raise
        problem = f"{what} cannot be {done} now: {error.strerror}; mend its file or disk"
        raise Saturated(problem) from error


@contextlib.contextmanager
def _reading(digest: str) -> Iterator[None]:
    """Raises ``NotFound`` where there is no file, and what ``_stored`` does."""
    try:
        with _stored(f"blob {digest[:12]}", "read"):
            yield
    except FileNotFoundError as error:
        raise NotFound(f"blob {digest[:12]} is not stored; its task was deleted") from error


def _check(digest: str, found: str) -> None:
    """Raises ``InvalidTask`` for bytes with another digest than their blob's."""
    if found != digest:
        raise InvalidTask(f"blob {digest[:12]} was damaged where it is stored; upload the task again")


class LocalBlobs:
    """Blobs as files ``<sha256>.safetensors`` in one folder, written temp, fsync, rename; ``sync`` is the folder's."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def path(self, digest: str) -> Path:
        """The path of a blob, stored or not. Raises ``NotFound`` for anything that is not a digest."""
        if not DIGEST.fullmatch(digest):
            raise NotFound("a blob's name must be 64 hexadecimal digits")
        return self._folder / f"{digest}{SUFFIX}"

    def put(self, data: bytes | memoryview, digest: str | None = None) -> str:
        digest = digest or digest_of(data)
        path = self.path(digest)
        with _stored(f"blob {digest[:12]}", "written"):
            if not _holds(path, data):
                write_atomic(path, data, sync=False)
        return digest

    def sync(self) -> None:
        try:
            with _stored("the folder of blobs", "written"), space_errors():
                sync_folder(self._folder)
        except OSError as error:  # of the process, as too many open files: no upload's own
            raise Saturated(f"the folder of blobs cannot be written now: {error.strerror}; try again") from error

    def read(self, digest: str) -> bytes:
        with _reading(digest):
            found = self.path(digest).read_bytes()
        _check(digest, digest_of(found))
        return found

    def open(self, digest: str) -> BinaryIO:
        with contextlib.ExitStack() as unless_right:
            with _reading(digest):
                file = unless_right.enter_context(self.path(digest).open("rb"))
                found = hashlib.file_digest(file, "sha256").hexdigest()
                file.seek(0)
            _check(digest, found)
            unless_right.pop_all()
        return file

    def exists(self, digest: str) -> bool:
        return self.path(digest).is_file()

    def damaged(self, digest: str) -> bool:
        try:
            self.read(digest)
        except (InvalidTask, NotFound) as error:
            return isinstance(error, InvalidTask)
        return False

    def delete(self, digest: str) -> None:
        with _stored(f"blob {digest[:12]}", "removed"):
            self.path(digest).unlink(missing_ok=True)

    def list(self) -> Iterator[str]:
        names = (path.name.removesuffix(SUFFIX) for path in self._folder.glob(f"*{SUFFIX}"))
        return (name for name in names if DIGEST.fullmatch(name))

    def sweep(self, age: float) -> int:
        return sweep(self._folder, TEMPORARY, age)

    def owner(self) -> str | None:
        try:
            return (self._folder / OWNER).read_text(encoding="ascii")
        except FileNotFoundError:
            return None

    def own(self, identity: str) -> None:
        with contextlib.suppress(FileExistsError):
            write_first(self._folder / OWNER, identity.encode())
