"""Tasks in a repository's folder, without a server."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from sqlalchemy.exc import SQLAlchemyError

from checkpoints.repository import Repository
from checkpoints.versions import StoredTask
from jpets.access import DEFAULT_TENANT
from jpets.app.commands.tasks.store import Added
from jpets.errors import InvalidInput, NotFound
from serving.options.sources import PREFIX
from serving.protocols.schemas import TaskDetail, TaskSummary, TaskVersion

CATALOG = "catalog.sqlite"


class RepositoryStore:
    """A ``TaskStore``. Files are checked for themselves only: a folder does not know the backbone."""

    at_once = 8

    def __init__(self, repository: Repository, tenant: str) -> None:
        self._repository = repository
        self._tenant = tenant

    def tasks(self) -> Iterator[TaskSummary]:
        return map(TaskSummary.of, self._repository.every(self._tenant))

    def get(self, id: str) -> TaskDetail:
        return self._detail(self._repository.get(id, self._tenant))

    def versions(self, id: str) -> Iterator[TaskVersion]:
        return map(TaskVersion.of, self._repository.versions(id, self._tenant))

    def add(self, id: str, file: Path, if_match: int | None) -> Added:
        stored = self._repository.put(id, file, tenant=self._tenant, if_match=if_match)
        return Added(stored.id, stored.version, stored.bytes)

    def read(self, id: str) -> bytes:
        return self._repository.read(self._repository.get(id, self._tenant))

    def rollback(self, id: str, version: int | str | None) -> TaskDetail:
        return self._detail(self._repository.rollback(id, version, self._tenant))

    def alias(self, id: str, name: str, version: int | str | None) -> TaskDetail:
        self._repository.alias(id, name, version, self._tenant)
        return self.get(id)

    def remove(self, id: str) -> None:
        self._repository.delete(id, self._tenant)
        self._repository.collect()

    def _detail(self, stored: StoredTask) -> TaskDetail:
        kept = self._repository.versions(stored.id, stored.tenant)
        aliases = self._repository.aliases(stored.id, stored.tenant)
        return TaskDetail.of(stored, kept=kept, aliases=aliases, loaded=stored.version if stored.served else None)


@contextlib.contextmanager
def repository_store(folder: Path, tenant: str = DEFAULT_TENANT, *, create: bool = False) -> Iterator[RepositoryStore]:
    """The tasks of one tenant."""
    with open_repository(folder, create=create) as repository:
        yield RepositoryStore(repository, tenant)


@contextlib.contextmanager
def open_repository(folder: Path, *, create: bool = False) -> Iterator[Repository]:
    """The repository that a server with these variables has: ``JPETS_CATALOGUE`` and ``JPETS_BLOBS`` name parts of it
    that lie elsewhere. Raises what ``open_folder`` does, and ``InvalidInput`` for a folder that has a catalogue too."""
    catalogue, blobs = (os.environ.get(PREFIX + name) or None for name in ("CATALOGUE", "BLOBS"))
    if catalogue is not None and (folder / CATALOG).is_file():
        raise InvalidInput(
            f"{folder} has a catalogue of its own ({CATALOG}), and {PREFIX}CATALOGUE names another one; unset the "
            "variable, or move the file away"
        )
    with open_folder(folder, catalogue, blobs, create=create) as repository:
        yield repository


@contextlib.contextmanager
def open_folder(
    folder: Path, catalogue: str | None = None, blobs: str | None = None, *, create: bool = False
) -> Iterator[Repository]:
    """Raises ``NotFound`` where there is no repository and ``create`` is not set, ``InvalidInput`` for a damaged
    catalogue."""
    if not create and catalogue is None and not (folder / CATALOG).is_file():
        raise NotFound(f"{folder} is not a task repository: it has no {CATALOG}; jpets task add makes one")
    try:
        repository = Repository.open(folder, catalogue=catalogue, blobs=blobs)
        try:
            yield repository
        finally:
            repository.close()
    except SQLAlchemyError as error:
        why = getattr(error, "orig", None) or type(error).__name__
        used = folder / CATALOG if catalogue is None else f"{PREFIX}CATALOGUE"
        raise InvalidInput(f"{used} cannot be used: {why}") from error
