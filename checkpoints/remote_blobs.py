"""Blobs in any storage that fsspec reaches, with copies of them in a local folder."""

from __future__ import annotations

import contextlib
import io
import os
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, TypeVar

import fsspec
from fsspec.implementations.local import LocalFileSystem

from checkpoints.blobs import DIGEST, OWNER, SUFFIX, Blobs, LocalBlobs, digest_of
from jpets.errors import InvalidInput, InvalidTask, JpetsError, NotFound, Saturated
from jpets.files import TEMPORARY, space_errors

T = TypeVar("T")
COPY_SECONDS = 30 * 24 * 3600.0
"""Seconds after which a copy that was not read is removed."""


def open_blobs(url: str, cache: Path) -> Blobs:
    """The blobs at a URL; blobs in a local folder need no copies in ``cache``. Raises ``InvalidInput`` without the URL
    in its message: it may hold a password."""
    try:
        system, root = fsspec.url_to_fs(url, use_listings_cache=False)  # other machines write there too
    except (ImportError, ValueError) as error:
        raise InvalidInput(f"there are no task files by that URL: {error}") from error
    if isinstance(system, LocalFileSystem):
        return LocalBlobs(Path(root))
    return RemoteBlobs(system, root, cache)


class RemoteBlobs:
    """Blobs as files ``<sha256>.safetensors`` below one path. Each is fetched once and kept in the folder ``cache``.

    Raises ``Saturated`` if the storage cannot be reached: it may be back soon.
    """

    def __init__(self, system: fsspec.AbstractFileSystem, root: str, cache: Path) -> None:
        self._system = system
        self._root = root.rstrip("/")
        self._cache = LocalBlobs(cache)
        self._renames = type(system).mv is not fsspec.AbstractFileSystem.mv
        """Whether a move is more than a copy. If it is not, as in object stores, a file appears only when it is
        complete."""
        with _reached():
            system.makedirs(self._root, exist_ok=True)
        self._sweep_copies()

    def put(self, data: bytes | memoryview, digest: str | None = None) -> str:
        digest = digest or digest_of(data)
        path = self._path(digest)
        with _reached():
            if self._size(path) != len(data):
                self._write(path, bytes(data))
        self._keep(data, digest)
        return digest

    def sync(self) -> None:
        """A storage has what it took."""

    def read(self, digest: str) -> bytes:
        """Raises ``NotFound``, and ``InvalidTask`` if the stored bytes do not match the digest."""
        if (kept := self._copy(self._cache.read, digest)) is not None:
            return kept
        try:
            with _reached():
                found = self._system.cat_file(self._path(digest))
        except FileNotFoundError as error:
            raise NotFound(f"blob {digest[:12]} is not stored; its task was deleted") from error
        if digest_of(found) != digest:
            raise InvalidTask(f"blob {digest[:12]} was damaged where it is stored; restore it there")
        self._keep(found, digest)
        return found

    def open(self, digest: str) -> BinaryIO:
        if (kept := self._copy(self._cache.open, digest)) is not None:
            return kept
        found = self.read(digest)
        return self._copy(self._cache.open, digest) or io.BytesIO(found)

    def _copy(self, take: Callable[[str], T], digest: str) -> T | None:
        """What ``take`` gives of a blob's copy; None where that is not there, or damaged: it is fetched anew then."""
        with contextlib.suppress(NotFound, Saturated, InvalidTask):
            found = take(digest)
            with contextlib.suppress(OSError):  # another process may have removed it
                os.utime(self._cache.path(digest))
            return found
        return None

    def exists(self, digest: str) -> bool:
        with _reached():
            return self._size(self._path(digest)) is not None

    def damaged(self, digest: str) -> bool:
        return False

    def delete(self, digest: str) -> None:
        self._cache.delete(digest)
        with _reached(), contextlib.suppress(FileNotFoundError):
            self._system.rm_file(self._path(digest))

    def list(self) -> Iterator[str]:
        names = (name.removesuffix(SUFFIX) for name in self._names() if name.endswith(SUFFIX))
        return (name for name in names if DIGEST.fullmatch(name))

    def sweep(self, age: float) -> int:
        """Removes unused copies too, but does not count them: they are not from interrupted writers."""
        self._sweep_copies()
        limit, removed = time.time() - age, 0
        for name in self._names():
            if name.startswith(TEMPORARY):
                path = f"{self._root}/{name}"
                with _reached(), contextlib.suppress(FileNotFoundError):
                    if self._system.modified(path).timestamp() < limit:
                        self._system.rm_file(path)
                        removed += 1
        return removed

    def owner(self) -> str | None:
        try:
            with _reached():
                found: bytes = self._system.cat_file(f"{self._root}/{OWNER}")
        except FileNotFoundError:
            return None
        return found.decode("ascii")

    def own(self, identity: str) -> None:
        with _reached(), contextlib.suppress(FileExistsError):
            self._system.pipe_file(f"{self._root}/{OWNER}", identity.encode(), mode="create")

    def _path(self, digest: str) -> str:
        return f"{self._root}/{self._cache.path(digest).name}"

    def _size(self, path: str) -> int | None:
        """The size, asked anew each time: another machine may have removed the file."""
        try:
            size: int | None = self._system.info(path)["size"]
        except FileNotFoundError:
            return None
        return size

    def _write(self, path: str, data: bytes) -> None:
        if not self._renames:
            self._system.pipe_file(path, data)
            return
        temporary = f"{self._root}/{TEMPORARY}{uuid.uuid4().hex}"
        try:
            self._system.pipe_file(temporary, data)
            self._system.mv(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                self._system.rm_file(temporary)
            raise

    def _names(self) -> Sequence[str]:
        with _reached():
            try:
                paths = self._system.ls(self._root, detail=False)
            except FileNotFoundError:  # an object store has no empty folders
                return []
        return [path.rpartition("/")[2] for path in paths]

    def _keep(self, data: bytes | memoryview, digest: str) -> None:
        """Keeps a copy while there is room for it."""
        with contextlib.suppress(OSError, JpetsError):
            self._cache.put(data, digest)

    def _sweep_copies(self) -> None:
        self._cache.sweep(COPY_SECONDS)
        limit = time.time() - COPY_SECONDS
        for digest in self._cache.list():
            with contextlib.suppress(OSError):  # another process may have removed it
                if self._cache.path(digest).stat().st_mtime < limit:
                    self._cache.delete(digest)


@contextlib.contextmanager
def _reached() -> Iterator[None]:
    try:
        with space_errors():
            yield
    except (JpetsError, FileNotFoundError):
        raise
    except Exception as error:  # the clients of clouds have errors of their own, such as botocore's
        raise Saturated("the storage of task files cannot be reached, or refuses; try again") from error
