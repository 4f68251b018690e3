"""Bodies that are files: written to disk as they come, within a limit."""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol, TypeVar

from fastapi import Request

from jpets.errors import Saturated, TooLarge, UnsupportedMedia
from jpets.free_memory import return_free_memory
from jpets.types import DEFAULT_TENANT
from serving.http.errors import ClientGone
from serving.http.fields import declared_length

T = TypeVar("T")

FILE_TYPE = "application/octet-stream"
FILE_BODY: dict[str, Any] = {
    "requestBody": {"required": True, "content": {FILE_TYPE: {"schema": {"type": "string", "format": "binary"}}}}
}
"""How OpenAPI describes such a body."""
CHUNK = 1 << 17
"""Bytes that are gathered before a write; every upload may hold that many."""
LARGE = 16 << 20
"""Bytes of a file that is checked alone: a check takes memory in proportion to them."""


THREADS = 4
"""Files that are checked at once."""
FILES = 64
"""Files that may be on their way: each has a buffer and an open file."""
SHARE = 1 / 4
"""Part of them that one tenant may have, apart from the default one."""
FULL = "too many files are on their way; try again"


class Room:
    """Files that are on disk until they are checked: at most so many ``bytes`` and ``files``, but for one alone. Event
    loop only."""

    def __init__(self, bytes: int = 2 << 30, files: int = FILES) -> None:
        self._most_bytes, self._most_files = bytes, files
        self._bytes = 0
        self._files = Counter[str]()
        """By tenant."""

    @contextlib.contextmanager
    def upload(self, tenant: str = DEFAULT_TENANT) -> Iterator[Callable[[int], None]]:
        """What counts the bytes of one more file of the tenant as they come; a tenant that sends many leaves places to
        others. Raises ``Saturated``, as it does."""
        share = self._most_files if tenant == DEFAULT_TENANT else max(1, int(self._most_files * SHARE))
        if self._files.total() >= self._most_files or self._files[tenant] >= share:
            raise Saturated(FULL)
        own = 0

        def count(size: int) -> None:
            nonlocal own
            if self._bytes + size > self._most_bytes and self._bytes > own:
                raise Saturated(FULL)
            own += size
            self._bytes += size

        self._files[tenant] += 1
        try:
            yield count
        finally:
            self._files[tenant] -= 1
            self._bytes -= own
            self._files += Counter()  # forgets tenants without any


class Turns:
    """Checks files, and changes tasks and keys, in threads of its own, so that no read of a task waits for them: one
    large file at a time, and small ones at any time."""

    def __init__(self) -> None:
        self._large = asyncio.Lock()
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="jpets-upload")
        self._keys = ThreadPoolExecutor(1, thread_name_prefix="jpets-keys")

    async def check(self, size: int, work: Callable[[], T]) -> T:
        """``work()`` on a file of this many bytes, when its turn comes."""
        async with self._turn(size):
            return await self.change(work)

    async def change(self, work: Callable[[], T]) -> T:
        """``work()``, a change that may wait for the catalogue: the threads that look tasks up wait for nothing."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    async def change_keys(self, work: Callable[[], T]) -> T:
        """``change`` of a key or of limits: a key that is revoked must not be accepted for as long as many changes of
        its tenant's tasks take."""
        return await asyncio.get_running_loop().run_in_executor(self._keys, work)

    @contextlib.asynccontextmanager
    async def _turn(self, size: int) -> AsyncIterator[None]:
        """A turn. After a large file, freed memory is given back to the system."""
        if size <= LARGE:
            yield
            return
        async with self._large:
            try:
                yield
            finally:
                await asyncio.to_thread(return_free_memory)


class Writable(Protocol):
    def write(self, data: bytes, /) -> Any: ...
    def flush(self) -> Any: ...


async def receive(
    request: Request, file: Writable, limit: int, what: str, count: Callable[[int], None] = lambda size: None
) -> int:
    """Writes the body to ``file``; returns its bytes. ``count`` is told of them as they come, and may refuse more.
    Raises ``TooLarge`` past ``limit``, ``ClientGone``, ``UnsupportedMedia`` for what is not the file itself."""
    _check_plain(request)
    if declared_length(request.headers.get("content-length", "0")) > limit:
        raise _too_large(limit, what)
    size = 0
    waiting = bytearray()
    async for chunk in _chunks(request):
        waiting += chunk
        size += len(chunk)
        if size > limit:
            raise _too_large(limit, what)
        count(len(chunk))
        if len(waiting) >= CHUNK:
            await asyncio.to_thread(file.write, bytes(waiting))
            waiting.clear()
    await asyncio.to_thread(file.write, bytes(waiting))
    await asyncio.to_thread(file.flush)
    return size


def _check_plain(request: Request) -> None:
    if request.headers.get("content-encoding", "identity").strip().lower() not in ("identity", ""):
        raise UnsupportedMedia("expected the file without Content-Encoding, found one; unpack it before it is sent")
    if request.headers.get("content-type", "").lower().startswith("multipart/"):
        raise UnsupportedMedia(
            "expected the file itself as the body, found a form; send it by curl --data-binary @FILE"
        )


def map_file(path: Path) -> memoryview:
    """The bytes of a file that does not change, read from disk only as they are used."""
    with path.open("rb") as file:
        if not os.fstat(file.fileno()).st_size:
            return memoryview(b"")
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


async def _chunks(request: Request) -> AsyncIterator[bytes]:
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        yield message.get("body", b"")
        if not message.get("more_body", False):
            return


def _too_large(limit: int, what: str) -> TooLarge:
    return TooLarge(f"{what} may have {limit} bytes; this one has more")
