"""One lock a name, made when somebody holds it and gone when nobody does."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Iterator


@dataclasses.dataclass
class _Entry:
    lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)
    users: int = 0


class NamedLocks:
    """Thread-safe."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._entries: dict[str, _Entry] = {}

    @contextlib.contextmanager
    def hold(self, name: str) -> Iterator[None]:
        """Waits until nobody else holds ``name``."""
        with self._guard:
            entry = self._entries.setdefault(name, _Entry())
            entry.users += 1
        try:
            with entry.lock:
                yield
        finally:
            with self._guard:
                entry.users -= 1
                if not entry.users:
                    del self._entries[name]
