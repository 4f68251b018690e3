"""Copies a repository into another one, for a backup or from one, while both are in use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import sqlalchemy as sa

from checkpoints.access import count_change
from checkpoints.blobs import Blobs
from checkpoints.catalog import ALIASES, BACKBONES, KEYS, LAYOUTS, LIMITS, TASKS, USES, VERSIONS, Catalog
from checkpoints.dialects import insert
from jpets.errors import Conflict, NotFound

REPLACED = (VERSIONS, ALIASES, USES, BACKBONES)
"""Tables that are afterwards as in the source."""
ADDED = (LAYOUTS, KEYS, LIMITS)
"""Tables of which rows that the target has stay as they are: a key that was revoked since a backup stays so."""
TRIES = 20
AT_ONCE = 500
"""Rows that are written in one statement."""
Rows = Mapping[sa.Table, Sequence[dict[str, Any]]]


def copy(source: tuple[Catalog, Blobs], target: tuple[Catalog, Blobs]) -> int:
    """Makes the tasks of ``target`` those of ``source``, as they were at one moment; returns how many versions there
    are. Files that the target has are not copied again.

    The target changes in one transaction, in which the database itself counts a change of every task: servers on it
    follow. Version numbers that it gave out are not given out again. Raises ``Conflict`` where tasks of the source were
    deleted faster than their files could be read, ``OutOfSpace``, ``Saturated``.
    """
    (catalog, blobs), (other_catalog, other_blobs) = source, target
    for _ in range(TRIES):
        rows = _read(catalog)
        digests = {row["digest"] for row in rows[VERSIONS]}
        try:
            for digest in digests.difference(other_blobs.list()):
                other_blobs.put(blobs.read(digest))
            with other_catalog.write() as connection:
                for digest in digests:  # a server on the target removes files that no version names
                    if not other_blobs.exists(digest):
                        other_blobs.put(blobs.read(digest))
                _write(connection, rows)
        except NotFound:
            continue
        return len(rows[VERSIONS])
    raise Conflict("the source's tasks are deleted faster than they can be copied; try again")


def _read(catalog: Catalog) -> Rows:
    tables = (TASKS, *REPLACED, *ADDED)
    with catalog.read() as connection:
        return {table: [dict(row._mapping) for row in connection.execute(sa.select(table))] for table in tables}


def _write(connection: sa.Connection, rows: Rows) -> None:
    for table in REPLACED:
        connection.execute(sa.delete(table))
        _insert(connection, sa.insert(table), rows[table])
    for table in ADDED:
        _insert(connection, insert(connection, table).on_conflict_do_nothing(), rows[table])
    given = insert(connection, TASKS)
    higher = sa.case((given.excluded.newest > TASKS.c.newest, given.excluded.newest), else_=TASKS.c.newest)
    _insert(
        connection,
        given.on_conflict_do_update(index_elements=["tenant", "id"], set_={"newest": higher}),
        rows[TASKS],
    )
    count_change(connection)


def _insert(connection: sa.Connection, statement: Any, rows: Sequence[dict[str, Any]]) -> None:
    for start in range(0, len(rows), AT_ONCE):
        connection.execute(statement, rows[start : start + AT_ONCE])
