"""What a catalogue knows about one task: its versions, the served one, its aliases."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import sqlalchemy as sa

from checkpoints.catalog import ALIASES, TASKS, USES, VERSIONS
from checkpoints.ids import LATEST, shown
from jpets.errors import Conflict, NotFound
from jpets.types import TaskName

State = Literal["uploaded", "active", "withdrawn"]
UPLOADED: State = "uploaded"
ACTIVE: State = "active"
WITHDRAWN: State = "withdrawn"


def _of(table: sa.Table) -> sa.ColumnElement[bool]:
    """Of the task that a statement is executed for."""
    return sa.and_(*(table.c[name] == sa.bindparam(f"of_{name}") for name in ("tenant", "id")))


NEWEST = sa.select(TASKS.c.newest).where(_of(TASKS))
FIRST = sa.insert(TASKS)
NEXT = sa.update(TASKS).where(_of(TASKS))
ADD = sa.insert(VERSIONS)
SERVED = sa.select(sa.func.max(VERSIONS.c.version)).where(_of(VERSIONS), VERSIONS.c.state == ACTIVE)
ONE = sa.select(VERSIONS).where(_of(VERSIONS), VERSIONS.c.version == sa.bindparam("number"))
ALL = sa.select(VERSIONS).where(_of(VERSIONS)).order_by(VERSIONS.c.version)
"""With those above, what is executed most often: to make a statement takes longer than to run it."""


@dataclasses.dataclass(frozen=True)
class StoredTask:
    """One version of a task. ``metadata`` is the file's JSON document; ``created`` is the upload, ISO 8601, UTC."""

    tenant: str
    id: str
    version: int
    digest: str
    bytes: int
    created: str
    metadata: Mapping[str, Any]
    served: bool
    """Whether queries get this version."""
    state: State

    @property
    def name(self) -> TaskName:
        return TaskName(self.tenant, self.id)


class Change(NamedTuple):
    """Of a version's state."""

    version: int
    before: State
    after: State


class TaskRows:
    """The rows of one (tenant, id), in one transaction."""

    def __init__(self, connection: sa.Connection, tenant: str, id: str) -> None:
        self._connection = connection
        self._key = {"tenant": tenant, "id": id}
        self._of = {"of_tenant": tenant, "of_id": id}
        self._name = shown(id)

    def add(self, row: Mapping[str, Any]) -> int:
        """A new version; its number has never been used before."""
        newest = self._connection.execute(NEWEST, self._of).scalar()
        version = (newest or 0) + 1
        if newest is None:
            self._connection.execute(FIRST, {**self._key, "newest": version})
        else:
            self._connection.execute(NEXT, {**self._of, "newest": version})
        self._connection.execute(ADD, {**self._key, "version": version, **row})
        return version

    def served(self) -> int | None:
        """The newest active version."""
        found: int | None = self._connection.execute(SERVED, self._of).scalar()
        return found

    def before_served(self) -> int:
        """The active version that was served before. Raises ``NotFound``."""
        served = self.served()
        before = self._newest(VERSIONS.c.state == ACTIVE, VERSIONS.c.version < served) if served is not None else None
        if before is None:
            raise NotFound(f"task {self._name} has no earlier version to go back to")
        return before

    def find(self, version: int | str | None) -> StoredTask:
        """A version by number or alias, by default the served one, or else the newest. Raises ``NotFound``."""
        served = self.served()
        if version is None:
            number = served if served is not None else self._newest()
        elif version == LATEST:
            number = served
        elif isinstance(version, str):
            chosen = sa.select(ALIASES.c.version).where(self._mine(ALIASES), ALIASES.c.name == version)
            number = self._connection.execute(chosen).scalar()
        else:
            number = version
        row = self._connection.execute(ONE, {**self._of, "number": number}).first()
        if row is None:
            what = "" if version is None else f" version {shown(version) if isinstance(version, str) else version}"
            raise NotFound(f"task {self._name}{what} is not in the repository; list the tasks to see what is")
        return stored_task(row, served)

    def all(self) -> list[StoredTask]:
        """Every kept version, the oldest first."""
        served = self.served()
        return [stored_task(row, served) for row in self._connection.execute(ALL, self._of)]

    def check_match(self, expected: int | None) -> None:
        """Raises ``Conflict`` unless the newest version that was not rolled back is ``expected`` (0: there is none)."""
        if expected is None:
            return
        found = self._newest(VERSIONS.c.state != WITHDRAWN) or 0
        if found != expected:
            raise Conflict(f"task {self._name} is at version {found}, expected {expected}; read it again and retry")

    def rollback(self, target: int) -> list[Change]:
        """Activates a version and withdraws newer ones; returns what that changed."""
        found = [(each.version, each.state, ACTIVE if each.version == target else WITHDRAWN) for each in self.all()]
        changes = [Change(*each) for each in found if each[0] >= target and each[1] != each[2]]
        for change in changes:
            self._set_state(change.after, VERSIONS.c.version == change.version)
        return changes

    def undo(self, target: int, changes: Sequence[Change]) -> None:
        """Takes back those changes of a rollback to ``target`` that nobody has changed since; where another version is
        served by now, it still is."""
        served = self.served()
        for version, before, after in changes:
            if served in (None, target) or version < served:
                self._set_state(before, sa.and_(VERSIONS.c.version == version, VERSIONS.c.state == after))

    def aliases(self) -> dict[str, int]:
        rows = self._connection.execute(sa.select(ALIASES).where(self._mine(ALIASES)))
        return {row.name: row.version for row in rows}

    def set_alias(self, name: str, version: int | None) -> None:
        """None: it names no version any more. Raises ``NotFound`` where it named none."""
        gone = self._connection.execute(sa.delete(ALIASES).where(self._mine(ALIASES), ALIASES.c.name == name))
        if version is not None:
            self._connection.execute(sa.insert(ALIASES).values(**self._key, name=name, version=version))
        elif not gone.rowcount:
            raise NotFound(f"task {self._name} has no alias {shown(name)}; it has {sorted(self.aliases()) or 'none'}")

    def retain(self, keep: int) -> None:
        """Forgets all but the last ``keep`` versions, versions with an alias, the served one, and the one that was
        served before: it serves on if the newer one cannot be loaded."""
        every = self.all()
        numbers = [stored.version for stored in every]
        active = [stored.version for stored in every if stored.state == ACTIVE]
        wanted = {*numbers[-keep:], *active[-2:], *self.aliases().values()}
        old = [number for number in numbers if number not in wanted]
        self._connection.execute(sa.delete(VERSIONS).where(self._mine(VERSIONS), VERSIONS.c.version.in_(old)))

    def discard(self, version: int) -> None:
        """Forgets one version and its aliases."""
        for table in (VERSIONS, ALIASES):
            self._connection.execute(sa.delete(table).where(self._mine(table), table.c.version == version))

    def delete(self) -> None:
        for table in (VERSIONS, ALIASES, USES):
            self._connection.execute(sa.delete(table).where(self._mine(table)))

    def _mine(self, table: sa.Table) -> sa.ColumnElement[bool]:
        return sa.and_(*(table.c[name] == value for name, value in self._key.items()))

    def _newest(self, *conditions: sa.ColumnElement[bool]) -> int | None:
        newest = sa.select(sa.func.max(VERSIONS.c.version)).where(self._mine(VERSIONS), *conditions)
        found: int | None = self._connection.execute(newest).scalar()
        return found

    def _set_state(self, state: str, condition: sa.ColumnElement[bool]) -> None:
        self._connection.execute(sa.update(VERSIONS).where(self._mine(VERSIONS), condition).values(state=state))


def list_tasks(connection: sa.Connection, tenant: str, limit: int, after: str) -> list[StoredTask]:
    """A tenant's tasks, by the served version or else the newest: up to ``limit``, by id, with ids past ``after``."""
    mine = served_versions().where(VERSIONS.c.tenant == tenant, VERSIONS.c.id > after)
    tasks = mine.order_by(VERSIONS.c.id).limit(limit).subquery()
    chosen = sa.func.coalesce(tasks.c.served, tasks.c.newest)
    rows = (
        sa.select(VERSIONS, tasks.c.served.label("served"))
        .join(tasks, sa.and_(VERSIONS.c.id == tasks.c.id, VERSIONS.c.version == chosen))
        .where(VERSIONS.c.tenant == tenant)
        .order_by(VERSIONS.c.id)
    )
    return [stored_task(row, row.served) for row in connection.execute(rows)]


def served_versions() -> sa.Select[Any]:
    """(tenant, id, served, newest) of each task; ``served`` is null if no version is active."""
    active = sa.func.max(sa.case((VERSIONS.c.state == ACTIVE, VERSIONS.c.version)))
    newest = sa.func.max(VERSIONS.c.version)
    name = (VERSIONS.c.tenant, VERSIONS.c.id)
    return sa.select(*name, active.label("served"), newest.label("newest")).group_by(*name)


def stored_task(row: sa.Row[Any], served: int | None) -> StoredTask:
    return StoredTask(
        row.tenant,
        row.id,
        row.version,
        row.digest,
        row.bytes,
        row.created,
        json.loads(row.metadata),
        row.version == served,
        row.state,
    )
