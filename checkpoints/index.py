"""All served tasks at once, without their documents: what a server has to know of each before its first query."""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa

from checkpoints.catalog import CHANGES, LAYOUTS, USES, VERSIONS
from checkpoints.dialects import fingerprint_in, insert
from checkpoints.versions import served_versions
from jpets.types import TaskName

NOTHING = 0.01
"""Uses of a task: fewer than this are forgotten."""


@dataclasses.dataclass(frozen=True, slots=True)
class IndexedTask:
    """The served version of a task, or its newest if none is active. ``layout`` is the text that its reader kept, if
    any."""

    name: TaskName
    version: int
    digest: str
    backbone: str
    """The fingerprint of its backbone."""
    layout: str | None
    queries: float

    @property
    def id(self) -> str:
        return self.name.id


def index_tasks(connection: sa.Connection, maker: str, name: TaskName | None = None) -> list[IndexedTask]:
    """Every task of every tenant, the most used first; or ``name`` alone, if there is such a task."""
    rows = connection.execute(_index(one=name is not None), {"maker": maker, **(name._asdict() if name else {})})
    # Many tasks share few layouts, so one text for each is enough.
    return [
        IndexedTask(
            TaskName(sys.intern(tenant), id),
            version,
            digest,
            sys.intern(of),
            None if layout is None else sys.intern(layout),
            queries,
        )
        for tenant, id, version, digest, of, layout, queries in rows
    ]


@functools.cache
def _index(*, one: bool) -> sa.Select[Any]:
    """The statement of ``index_tasks``, for ``maker`` and, of one task, ``tenant`` and ``id``. To make it takes longer
    than to run it for one."""
    versions = served_versions()
    if one:
        versions = versions.where(VERSIONS.c.tenant == sa.bindparam("tenant"), VERSIONS.c.id == sa.bindparam("id"))
    chosen = versions.subquery()
    version = sa.func.coalesce(chosen.c.served, chosen.c.newest)
    queries = sa.func.coalesce(USES.c.queries, 0.0)
    backbone = fingerprint_in(VERSIONS.c.metadata)
    return (
        sa.select(
            *(VERSIONS.c.tenant, VERSIONS.c.id, VERSIONS.c.version, VERSIONS.c.digest),
            *(backbone, LAYOUTS.c.layout, queries),
        )
        .select_from(chosen)
        .join(VERSIONS, sa.and_(_same_task(VERSIONS, chosen), VERSIONS.c.version == version))
        .outerjoin(LAYOUTS, sa.and_(LAYOUTS.c.digest == VERSIONS.c.digest, LAYOUTS.c.maker == sa.bindparam("maker")))
        .outerjoin(USES, _same_task(USES, VERSIONS))
        .order_by(queries.desc(), VERSIONS.c.tenant, VERSIONS.c.id)
    )


def _same_task(one: sa.FromClause, other: sa.FromClause) -> sa.ColumnElement[bool]:
    return sa.and_(one.c.tenant == other.c.tenant, one.c.id == other.c.id)


def last_change(connection: sa.Connection) -> int:
    """The number of the catalogue's last change."""
    return connection.execute(sa.select(sa.func.max(CHANGES.c.number))).scalar() or 0


def changed_since(connection: sa.Connection, number: int) -> tuple[int, list[TaskName]]:
    """The number of the catalogue's last change, and in order the tasks that changed after ``number``."""
    now = last_change(connection)
    if now == number:
        return now, []
    changed = sa.select(CHANGES.c.tenant, CHANGES.c.id).where(CHANGES.c.number > number).order_by(CHANGES.c.number)
    return now, [TaskName(row.tenant, row.id) for row in connection.execute(changed)]


def keep_layouts(connection: sa.Connection, maker: str, layouts: Mapping[str, str]) -> None:
    """Keeps ``layouts``, by digest."""
    rows = [{"digest": digest, "maker": maker, "layout": layout} for digest, layout in layouts.items()]
    if rows:
        new = insert(connection, LAYOUTS)
        update = {"layout": new.excluded.layout}
        connection.execute(new.on_conflict_do_update(index_elements=["digest", "maker"], set_=update), rows)


def add_uses(connection: sa.Connection, queries: Mapping[TaskName, float]) -> None:
    rows = [{**name._asdict(), "queries": count} for name, count in queries.items()]
    if rows:
        new = insert(connection, USES)
        update = {"queries": USES.c.queries + new.excluded.queries}
        connection.execute(new.on_conflict_do_update(index_elements=["tenant", "id"], set_=update), rows)


def age_uses(connection: sa.Connection, share: float) -> None:
    """Multiplies every count until now by ``share``; counts next to zero are forgotten."""
    connection.execute(sa.update(USES).values(queries=USES.c.queries * share))
    connection.execute(sa.delete(USES).where(USES.c.queries < NOTHING))
