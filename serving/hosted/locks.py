"""One lock a name, made when it is first held and gone when it is free again."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

Name = TypeVar("Name", bound=Hashable)


@dataclasses.dataclass
class _Entry:
    lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)
    users: int = 0


class NamedLocks(Generic[Name]):
    """Thread-safe."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._entries: dict[Name, _Entry] = {}

    @contextlib.contextmanager
    def hold(self, name: Name) -> Iterator[None]:
        """Waits until no other thread holds ``name``."""
        with self._used(name) as lock, lock:
            yield

    @contextlib.contextmanager
    def attempt(self, name: Name) -> Iterator[bool]:
        """Holds ``name`` if it is free. False if another thread holds it."""
        with self._used(name) as lock:
            held = lock.acquire(blocking=False)
            try:
                yield held
            finally:
                if held:
                    lock.release()

    @contextlib.contextmanager
    def _used(self, name: Name) -> Iterator[threading.Lock]:
        with self._guard:
            entry = self._entries.setdefault(name, _Entry())
            entry.users += 1
        try:
            yield entry.lock
        finally:
            with self._guard:
                entry.users -= 1
                if not entry.users:
                    del self._entries[name]
