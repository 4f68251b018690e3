"""Which tasks are a tenant's own, whether an engine knows them or not."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

from jpets.errors import JpetsError, NotFound
from jpets.types import DEFAULT_TENANT, TaskName
from serving.hosted.repository import TaskRepository

log = logging.getLogger(__name__)


class OwnedTasks:
    """The names of stored tasks of all tenants but the default one. A query for one of them never gets a shared task
    of the same id: not while its backbone is being loaded, nor while it waits for its classes.

    Methods but ``__contains__`` and ``has_id`` block; thread-safe.
    """

    def __init__(self, repository: TaskRepository) -> None:
        self._repository = repository
        self._names: set[TaskName] = set()
        self._seen: int | None = None
        self._lock = threading.Lock()

    def __contains__(self, name: TaskName) -> bool:
        return name in self._names

    def has_id(self, id: str) -> bool:
        """Whether any of these tenants has a task of this id."""
        return any(name.id == id for name in self._names.copy())

    def refresh(self) -> None:
        """Sees what others changed since the last call."""
        with self._lock:
            changed: Sequence[TaskName] = ()
            if self._seen is None:
                number = self._repository.last_change()
            else:
                number, changed = self._repository.changes(self._seen)
            if self._seen is None or number < self._seen:  # an older copy of the catalogue took its place
                self._names = set(self._repository.private())
            else:
                for name in changed:
                    self._read(name)
            self._seen = number

    def look(self, name: TaskName) -> None:
        """Sees a change that was made just now."""
        with self._lock:
            try:
                self._read(name)
            except JpetsError as error:  # the change is made; ``refresh`` sees it later
                log.warning("a change of a task is seen later: %s", error.message, extra={"task": name.id})

    def _read(self, name: TaskName) -> None:
        if name.tenant == DEFAULT_TENANT:
            return
        try:
            self._repository.get(name.id, name.tenant)
        except NotFound:
            self._names.discard(name)
        else:
            self._names.add(name)
