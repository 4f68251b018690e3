"""A file that several processes add to: none of them loses what another one wrote."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import pathlib
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from jpets.engine.programs.store import STALE_WRITE_SECONDS
from jpets.errors import OutOfSpace
from jpets.files import TEMPORARY, sweep, write_atomic

log = logging.getLogger(__name__)

T = TypeVar("T")


class SharedFile(Generic[T]):
    """Holds ``what``. ``parse`` raises ``ValueError`` for a damaged text: the file is then removed, to be made
    again."""

    def __init__(self, path: pathlib.Path, what: str, parse: Callable[[str], T], write: Callable[[T], str]) -> None:
        self.path = path
        self._what = what
        self._parse = parse
        self._write = write
        self._warned = False
        sweep(path.parent, TEMPORARY, STALE_WRITE_SECONDS)

    def read(self) -> T | None:
        """None where there is nothing that can be read."""
        try:
            return self._read()
        except OSError as error:
            log.warning("the stored %s cannot be read: %s", self._what, error)
            return None

    def _read(self) -> T | None:
        """None where there is no file, or a damaged one."""
        try:
            return self._parse(self.path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except ValueError as error:
            log.warning("the stored %s cannot be used and come anew: %s", self._what, error)
            with contextlib.suppress(OSError):
                self.path.unlink()
            return None

    def update(self, merge: Callable[[T | None], T]) -> T | None:
        """Replaces the file by ``merge`` of what is in it now, if that is anything else, and returns it; None where the
        file could not be written. A full or read-only disk only makes the next start slower: it is told once."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self._alone():
                stored = self._read()
                merged = merge(stored)
                text = self._write(merged)
                if stored is None or text != self._write(stored):
                    write_atomic(self.path, text.encode())
        except (OSError, OutOfSpace) as error:
            if not self._warned:
                log.warning("the %s could not be kept: %s", self._what, error)
            self._warned = True
            return None
        self._warned = False
        return merged

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """One process at a time reads, merges and writes. The lock ends with its process."""
        descriptor = os.open(self.path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)
