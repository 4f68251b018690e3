"""Copies a repository into another one, for a backup or from one, while both are in use."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import sqlalchemy as sa

from checkpoints.access import count_change
from checkpoints.blobs import Blobs
from checkpoints.catalog import ALIASES, BACKBONES, KEYS, LAYOUTS, LIMITS, TASKS, USES, VERSIONS, Catalog
from checkpoints.dialects import insert
from jpets.errors import Conflict, InvalidTask, NotFound

REPLACED = (VERSIONS, ALIASES, USES, BACKBONES)
"""Tables that are afterwards as in the source."""
TRIES = 20
FEW = 8
"""Files that are copied while others may not write to the target."""
AT_ONCE = 500
"""Rows that are written in one statement."""
SHOWN = 1000
"""Characters of a message that names damaged files."""
Rows = Mapping[sa.Table, Sequence[dict[str, Any]]]


def copy(source: tuple[Catalog, Blobs], target: tuple[Catalog, Blobs]) -> int:
    """Makes the tasks of ``target`` those of ``source``, as they were at one moment; returns how many versions there
    are. Files that the target has are not copied again, unless they are damaged there.

    The target changes in one transaction, in which the database itself counts a change of every task: servers on it
    follow. Version numbers that it gave out are not given out again, and keys that one of both revoked are revoked.

    Raises ``Conflict`` where the target has another file under a version's number, where the source lacks a file, and
    where its tasks were deleted faster than their files could be read; ``InvalidTask`` for a damaged file,
    ``OutOfSpace``, ``Saturated``.
    """
    (catalog, blobs), (other_catalog, other_blobs) = source, target
    lacks, sound = "", set[str]()
    for _ in range(TRIES):
        rows = _read(catalog)
        digests = {row["digest"] for row in rows[VERSIONS]}
        try:
            there = digests.intersection(other_blobs.list())
            damaged = set(filter(other_blobs.damaged, there - sound))
            sound |= there - damaged
            _copy_files(blobs, other_blobs, digests - there | damaged)
            with other_catalog.write() as connection:
                absent = digests.difference(other_blobs.list())  # a server on the target removes what no version names
                if len(absent) > FEW:
                    continue
                _copy_files(blobs, other_blobs, absent)
                _write(connection, rows)
        except NotFound as error:
            lacks = f" ({error.message})"
            continue
        return len(rows[VERSIONS])
    raise Conflict(f"the source lacks files, or its tasks are deleted faster than they can be copied; try again{lacks}")


def _copy_files(source: Blobs, target: Blobs, digests: Iterable[str]) -> None:
    """Raises ``NotFound``; ``InvalidTask``, behind all others, for files that are not those of their names."""
    damaged = []
    for digest in digests:
        try:
            target.put(source.read(digest))
        except InvalidTask:
            damaged.append(digest)
    if damaged:
        raise InvalidTask(
            f"files of the source are damaged: {', '.join(damaged)[:SHOWN]}; restore them, or delete the versions that "
            "have them"
        )


def _read(catalog: Catalog) -> Rows:
    tables = (TASKS, *REPLACED, LAYOUTS, KEYS, LIMITS)
    with catalog.read() as connection:
        return {table: [dict(row._mapping) for row in connection.execute(sa.select(table))] for table in tables}


def _write(connection: sa.Connection, rows: Rows) -> None:
    _check_numbers(connection, rows[VERSIONS])
    for table in REPLACED:
        connection.execute(sa.delete(table))
        _insert(connection, sa.insert(table), rows[table])
    _insert(connection, insert(connection, LAYOUTS).on_conflict_do_nothing(), rows[LAYOUTS])
    key = insert(connection, KEYS)
    either = sa.func.coalesce(KEYS.c.revoked, key.excluded.revoked)
    _insert(connection, key.on_conflict_do_update(index_elements=["id"], set_={"revoked": either}), rows[KEYS])
    tenants = {row["tenant"] for row in (*rows[KEYS], *rows[LIMITS])}  # one that is new in the target keeps its limits
    connection.execute(sa.delete(LIMITS).where(LIMITS.c.tenant.in_(tenants)))
    _insert(connection, sa.insert(LIMITS), rows[LIMITS])
    given = insert(connection, TASKS)
    higher = sa.case((given.excluded.newest > TASKS.c.newest, given.excluded.newest), else_=TASKS.c.newest)
    _insert(
        connection,
        given.on_conflict_do_update(index_elements=["tenant", "id"], set_={"newest": higher}),
        rows[TASKS],
    )
    count_change(connection)


def _check_numbers(connection: sa.Connection, versions: Sequence[dict[str, Any]]) -> None:
    """Raises ``Conflict``: servers that have loaded a version do not look at it again."""
    key = VERSIONS.c.tenant, VERSIONS.c.id, VERSIONS.c.version
    there = {
        (row.tenant, row.id, row.version): row.digest for row in connection.execute(sa.select(*key, VERSIONS.c.digest))
    }
    for row in versions:
        if there.get((row["tenant"], row["id"], row["version"]), row["digest"]) != row["digest"]:
            raise Conflict(
                f"version {row['version']} of task {row['id']!r} is another file in the target; delete the task there, "
                "then it gets the source's"
            )


def _insert(connection: sa.Connection, statement: Any, rows: Sequence[dict[str, Any]]) -> None:
    for start in range(0, len(rows), AT_ONCE):
        connection.execute(statement, rows[start : start + AT_ONCE])
