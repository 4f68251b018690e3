"""The task repository: versions of task files by (tenant, id, version), in a folder.

    catalog.sqlite               versions, aliases, changes and keys
    blobs/<sha256>.safetensors   the files

Machines may share both: the catalogue in PostgreSQL, the blobs in any storage that fsspec reaches.

Blobs are removed under the catalogue's write lock. An upload writes its blob before it takes the lock. Under it, and
before its row commits, it looks whether the blob is there and has it survive a crash: no row names a missing blob.
"""

from __future__ import annotations

import contextlib
import datetime
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

import sqlalchemy as sa

from checkpoints.access import Access
from checkpoints.blobs import Blobs, LocalBlobs, digest_of
from checkpoints.catalog import BACKBONES, CHANGES, LAYOUTS, TASKS, VERSIONS, Catalog
from checkpoints.copying import Copied, copy
from checkpoints.dialects import insert
from checkpoints.ids import LATEST, check_alias, check_id
from checkpoints.index import IndexedTask, add_uses, age_uses, changed_since, index_tasks, keep_layouts, last_change
from checkpoints.ownership import catalog_of, check_owner, claim
from checkpoints.task_document import TaskDocument
from checkpoints.task_file import read_bytes, read_task
from checkpoints.versions import ACTIVE, UPLOADED, Change, StoredTask, TaskRows, list_tasks
from jpets.errors import JpetsError
from jpets.text_bounds import with_short_texts
from jpets.types import DEFAULT_TENANT, Task, TaskName
from jpets.watch import Watch

STALE_SECONDS = 3600.0
"""Age of a temporary file that only a dead writer can have left."""
PAGE = 500
"""Tasks that ``every`` reads at once."""
AT_ONCE = 100
"""Blobs that are removed in one transaction: uploads wait for it, and a remote storage takes a while for each."""
Validator = Callable[[bytes | memoryview, str], Task]
"""(file's bytes, id) -> the task; raises ``InvalidTask`` for a file that cannot be served."""
StoredTasks = list[StoredTask]


def check_structure(data: bytes | memoryview, id: str) -> Task:
    """The validator of a repository that knows no backbone."""
    return read_task(data, id=id)


class Repository:
    """Thread-safe, and safe across processes: of one machine, or of several that share both parts.

    The served version of a task, also called ``latest``, is the newest *active* one. ``put`` activates unless it is
    told not to; ``rollback`` withdraws versions newer than its target.

    It has more than 20 methods, as each is one transaction on tables that change together.
    """

    def __init__(
        self,
        folder: Path | str,
        *,
        validator: Validator = check_structure,
        keep_versions: int = 5,
        blobs: Blobs | None = None,
        catalog: Catalog | None = None,
    ) -> None:
        """``blobs`` and ``catalog`` may lie elsewhere; by default they are in ``folder``, as ``catalog_of`` has it."""
        if keep_versions < 1:
            raise ValueError(f"keep_versions must be at least 1, got {keep_versions}")
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._blobs = blobs or LocalBlobs(self.folder / "blobs")
        self._catalog = catalog or catalog_of(self.folder, self._blobs)
        self.access = Access(self._catalog)
        self._validator = validator
        self._keep = keep_versions

    @classmethod
    def open(
        cls,
        folder: Path | str,
        *,
        catalogue: str | None = None,
        blobs: str | None = None,
        cache: Path | None = None,
        validator: Validator = check_structure,
        keep_versions: int = 5,
    ) -> Repository:
        """A repository with parts that may lie elsewhere than in ``folder``, so that machines can share it.

        ``catalogue``: a URL of SQLAlchemy's (SQLite, PostgreSQL). ``blobs``: a URL of fsspec's; it belongs to this one
        catalogue, as ``collect`` removes blobs that the catalogue does not name. ``cache``: the folder for copies of
        remote blobs, by default in ``folder``. Raises ``InvalidInput`` for an invalid URL, and for blobs that belong to
        another catalogue.
        """
        from checkpoints.remote_blobs import open_blobs  # most programs do without it

        place = Path(folder)
        opened = cls(
            place,
            validator=validator,
            keep_versions=keep_versions,
            blobs=None if blobs is None else open_blobs(blobs, cache or place / "cache"),
            catalog=None if catalogue is None else Catalog(catalogue),
        )
        try:
            if catalogue is not None or blobs is not None:
                claim(opened._catalog, opened._blobs)
            with opened._catalog.read() as connection:
                check_owner(connection, opened._blobs)
        except BaseException:
            opened.close()
            raise
        return opened

    def put(
        self,
        id: str,
        data: bytes | memoryview | Path,
        *,
        tenant: str = DEFAULT_TENANT,
        if_match: int | None = None,
        activate: bool = True,
        validator: Validator | None = None,
        retain: bool = True,
        layout: tuple[str, str] | None = None,
    ) -> StoredTask:
        """Stores ``data`` as a new version, even if its content is the same.

        ``if_match``: the newest version must be this one (0: there must be none). ``activate=False`` leaves the served
        version as it is. ``retain=False``: versions that are too old stay until ``retain`` is called. ``layout``: what
        ``keep_layouts`` keeps of it, behind its maker. On any error nothing has changed.
        Raises ``InvalidTask``, ``Conflict``, ``OutOfSpace``, ``Saturated``.
        """
        check_id(id)
        check_id(tenant, "tenant")
        content = read_bytes(data) if isinstance(data, Path) else data
        task = with_short_texts((validator or self._validator)(content, id))
        digest, document = digest_of(content), TaskDocument.of_task(task).to_json()
        row = {
            "digest": digest,
            "bytes": len(content),
            "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds"),
            "metadata": document,
            "state": ACTIVE if activate else UPLOADED,
        }

        def add(connection: sa.Connection) -> int:
            rows = TaskRows(connection, tenant, id)
            rows.check_match(if_match)
            if not self._blobs.exists(digest):
                self._blobs.put(content, digest)
            version = rows.add(row)
            if layout is not None:
                keep_layouts(connection, layout[0], {digest: layout[1]})
            if retain and version > self._keep:
                rows.retain(self._keep)
            return version

        with self._stored_blob(content, digest):
            version = self._catalog.shared_write(add, self._blobs.sync)
        known = {**row, "metadata": json.loads(document)}
        return StoredTask(tenant, id, version, served=activate, **known)  # an active version that is new is the newest

    def retain(self, id: str, tenant: str, newest: int) -> None:
        """Forgets the versions of a task that are too old, if it can have some: its ``newest`` one has this number."""
        if newest > self._keep:
            self._catalog.shared_write(lambda connection: TaskRows(connection, tenant, id).retain(self._keep))

    def get(self, id: str, tenant: str = DEFAULT_TENANT, version: int | str | None = None) -> StoredTask:
        """A version by number or alias; by default the served one, or else the newest. Raises ``NotFound``."""
        with self._catalog.read() as connection:
            return TaskRows(connection, tenant, id).find(version)

    def read(self, stored: StoredTask | IndexedTask) -> bytes:
        """The task file. Raises ``NotFound`` if it has been deleted since."""
        return self._blobs.read(stored.digest)

    def file(self, stored: StoredTask) -> BinaryIO:
        """The task file, to be read in pieces. Raises as ``read`` does."""
        return self._blobs.open(stored.digest)

    def task(self, stored: StoredTask) -> Task:
        """The task, checked again. Raises ``NotFound``, ``InvalidTask``."""
        return self._validator(self.read(stored), stored.id)

    def outline(self, stored: StoredTask) -> Task | None:
        """``task(stored).outlined()`` from the document alone; None if that does not say how many outputs there are."""
        return TaskDocument.parse(json.dumps(stored.metadata)).outline(stored.id)

    def index(self, maker: str) -> Sequence[IndexedTask]:
        """Every task of every tenant with the layout that ``maker`` kept of its blob, the most used first."""
        with self._catalog.read() as connection:
            return index_tasks(connection, maker)

    def indexed(self, name: TaskName, maker: str) -> IndexedTask | None:
        """One task as ``index`` has it; None if it is not there."""
        with self._catalog.read() as connection:
            return next(iter(index_tasks(connection, maker, name)), None)

    def last_change(self) -> int:
        """The number of the repository's last change, by any writer."""
        with self._catalog.read() as connection:
            return last_change(connection)

    def changes(self, since: int) -> tuple[int, Sequence[TaskName]]:
        """The number of the repository's last change, by any writer, and the tasks with versions that changed after the
        number ``since``: each once, deleted ones included."""
        with self._catalog.read() as connection:
            return changed_since(connection, since)

    def watch(self) -> Watch:
        """A watch for ``changes``; it is told of them where the catalogue's database tells."""
        return self._catalog.watch(CHANGES)

    def keep_layouts(self, maker: str, layouts: Mapping[str, str]) -> None:
        """Keeps the layouts of ``maker`` for blobs (by digest), until the blobs are removed."""
        with self._catalog.write() as connection:
            keep_layouts(connection, maker, layouts)

    def add_uses(self, queries: Mapping[TaskName, float]) -> None:
        """Adds to the count of queries of each of these tasks."""
        with self._catalog.write() as connection:
            add_uses(connection, queries)

    def age_uses(self, share: float) -> None:
        """Multiplies every count until now by ``share``."""
        with self._catalog.write() as connection:
            age_uses(connection, share)

    def backbones(self) -> Sequence[str]:
        """The further backbones to be served, in the order of their names."""
        with self._catalog.read() as connection:
            return connection.execute(sa.select(BACKBONES.c.name).order_by(BACKBONES.c.name)).scalars().all()

    def keep_backbone(self, name: str) -> None:
        """Counts a backbone among those to be served, if it is not there yet."""
        with self._catalog.write() as connection:
            connection.execute(insert(connection, BACKBONES).values(name=name).on_conflict_do_nothing())

    def forget_backbone(self, name: str) -> None:
        with self._catalog.write() as connection:
            connection.execute(sa.delete(BACKBONES).where(BACKBONES.c.name == name))

    def tenants(self) -> Sequence[str]:
        """Those that have tasks, in order."""
        names = sa.select(VERSIONS.c.tenant).distinct().order_by(VERSIONS.c.tenant)
        with self._catalog.read() as connection:
            return connection.execute(names).scalars().all()

    def private(self) -> Sequence[TaskName]:
        """The names of all tasks of other tenants than the default one."""
        names = sa.select(VERSIONS.c.tenant, VERSIONS.c.id).where(VERSIONS.c.tenant != DEFAULT_TENANT).distinct()
        with self._catalog.read() as connection:
            return [TaskName(row.tenant, row.id) for row in connection.execute(names)]

    def list(
        self, tenant: str = DEFAULT_TENANT, limit: int = 100, after: str | None = None, *, beside: str | None = None
    ) -> tuple[StoredTasks, str | None]:
        """Up to ``limit`` tasks with ids past ``after``, in the order of their ids, and the next ``after`` or None.

        A task is shown by its served version, or by its newest if none is active yet. ``beside``: tasks of that tenant
        too, except where ``tenant`` has one of the same id.
        """
        if limit < 1:
            raise ValueError(f"limit must be at least 1, got {limit}")
        found: dict[str, StoredTask] = {}
        with self._catalog.read() as connection:
            for owner in dict.fromkeys((beside or tenant, tenant)):
                found |= {stored.id: stored for stored in list_tasks(connection, owner, limit + 1, after or "")}
        ids = sorted(found)
        return [found[id] for id in ids[:limit]], ids[limit - 1] if len(ids) > limit else None

    def every(self, tenant: str | None = None) -> Iterator[StoredTask]:
        """All tasks as ``list`` has them, by tenant and id; or those of one tenant."""
        for owner in self.tenants() if tenant is None else [tenant]:
            after: str | None = None
            while True:
                page, after = self.list(owner, PAGE, after)
                yield from page
                if after is None:
                    break

    def versions(self, id: str, tenant: str = DEFAULT_TENANT) -> StoredTasks:
        """Every kept version, the oldest first. Raises ``NotFound``."""
        with self._catalog.read() as connection:
            rows = TaskRows(connection, tenant, id)
            return rows.all() or [rows.find(None)]

    def before_served(self, id: str, tenant: str = DEFAULT_TENANT) -> int:
        """The version to which ``rollback`` goes by default. Raises ``NotFound``."""
        with self._catalog.read() as connection:
            return TaskRows(connection, tenant, id).before_served()

    def rollback(self, id: str, to: int | str | None = None, tenant: str = DEFAULT_TENANT) -> StoredTask:
        """Serves version ``to``, by default the active one before the served one; newer ones are withdrawn. Raises
        ``NotFound`` if there is no such version."""
        return self.rolled_back(id, to, tenant)[0]

    def rolled_back(
        self, id: str, to: int | str | None, tenant: str, if_match: int | None = None
    ) -> tuple[StoredTask, Sequence[Change]]:
        """``rollback``, and what it changed, for ``undo``. Raises ``Conflict``."""
        with self._catalog.write() as connection:
            rows = TaskRows(connection, tenant, id)
            rows.check_match(if_match)
            target = rows.find(to).version if to is not None else rows.before_served()
            changed = rows.rollback(target)
            return rows.find(target), changed

    def undo(self, id: str, target: int, changes: Sequence[Change], tenant: str) -> None:
        """Takes back a rollback to ``target``, but for what others changed meanwhile."""
        with self._catalog.write() as connection:
            TaskRows(connection, tenant, id).undo(target, changes)

    def alias(self, id: str, name: str, version: int | str | None, tenant: str = DEFAULT_TENANT) -> None:
        """Points alias ``name`` at a version, given by number or alias; None: it is none any more. Raises ``NotFound``,
        ``InvalidTask`` for an invalid name."""
        check_alias(name)
        with self._catalog.write() as connection:
            rows = TaskRows(connection, tenant, id)
            rows.set_alias(name, None if version is None else rows.find(version).version)

    def aliases(self, id: str, tenant: str = DEFAULT_TENANT) -> dict[str, int]:
        """Alias -> version, ``latest`` included if a version is active."""
        with self._catalog.read() as connection:
            rows = TaskRows(connection, tenant, id)
            served = rows.served()
            return rows.aliases() | ({LATEST: served} if served is not None else {})

    def discard(self, id: str, version: int, tenant: str = DEFAULT_TENANT) -> None:
        """Forgets one version, if it is there; the others, and the served one, stay as they are."""
        with self._catalog.write() as connection:
            TaskRows(connection, tenant, id).discard(version)

    def delete(self, id: str, tenant: str = DEFAULT_TENANT, if_match: int | None = None) -> None:
        """Removes every version and alias; then, by a second transaction, their blobs: a commit may fail, and rows that
        stay need theirs. What cannot be removed now ``collect`` removes. Raises ``NotFound``, ``Conflict``."""
        with self._catalog.write() as connection:
            rows = TaskRows(connection, tenant, id)
            rows.find(None)
            rows.check_match(if_match)
            digests = {stored.digest for stored in rows.all()}
            rows.delete()
        with contextlib.suppress(JpetsError, OSError, sa.exc.SQLAlchemyError):  # the task is deleted all the same
            self._remove(tuple(digests))

    def copy_to(self, target: Repository) -> Copied:
        """Makes the tasks of ``target`` those of this repository, while both are in use: ``copying.copy``."""
        return copy((self._catalog, self._blobs), (target._catalog, target._blobs))

    def collect(self, stale_seconds: float = STALE_SECONDS) -> int:
        """Removes blobs that no version names and files that dead writers left; returns how many.

        A catalogue that has never had a task removes no blob: it may stand in the place of one that was lost. Raises
        ``InvalidInput`` where another catalogue has come to own the blobs.
        """
        stored = list(self._blobs.list())
        with self._catalog.read() as connection:
            used = set(connection.execute(sa.select(VERSIONS.c.digest).distinct()).scalars())
            fresh = connection.execute(sa.select(TASKS.c.id).limit(1)).first() is None
        unused, removed = [] if fresh else [digest for digest in stored if digest not in used], 0
        for start in range(0, len(unused), AT_ONCE):
            removed += self._remove(unused[start : start + AT_ONCE])
        with self._catalog.write() as connection:
            connection.execute(sa.delete(LAYOUTS).where(LAYOUTS.c.digest.not_in(sa.select(VERSIONS.c.digest))))
        return removed + self._blobs.sweep(stale_seconds)

    def close(self) -> None:
        self._catalog.close()

    def _remove(self, digests: Sequence[str]) -> int:
        """Removes the blobs that no version names, while none can be added; returns how many. Each is looked up by
        itself: that fails once the connection, and with it the lock, is lost."""
        removed = 0
        with self._catalog.write() as connection:
            check_owner(connection, self._blobs)
            for digest in digests:
                if connection.execute(sa.select(VERSIONS.c.id).where(VERSIONS.c.digest == digest)).first() is None:
                    self._blobs.delete(digest)
                    removed += 1
        return removed

    @contextlib.contextmanager
    def _stored_blob(self, content: bytes | memoryview, digest: str) -> Iterator[None]:
        """Stores a blob for the body to refer to; if the body fails, removes it unless a version names it."""
        try:
            self._blobs.put(content, digest)
            yield
        except BaseException:  # if removing it fails too, ``collect`` does it
            with contextlib.suppress(JpetsError, OSError, sa.exc.SQLAlchemyError):
                self._remove([digest])
            raise
