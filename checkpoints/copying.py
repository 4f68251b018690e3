"""Copies a repository into another one, for a backup or from one, while both are in use."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import sqlalchemy as sa

from checkpoints.access import count_change
from checkpoints.blobs import Blobs
from checkpoints.catalog import ALIASES, BACKBONES, KEYS, LAYOUTS, LIMITS, TASKS, USES, VERSIONS, Catalog
from jpets.errors import Conflict, InvalidTask, NotFound

COPIED = (TASKS, VERSIONS, ALIASES, USES, BACKBONES, LAYOUTS, KEYS, LIMITS)
TRIES = 20
FEW = 8
"""Files that are copied while others may not write to the target."""
AT_ONCE = 500
"""Rows that are written in one statement."""
SHOWN = 1000
"""Characters of a message that names damaged files."""
Row = dict[str, Any]
Rows = Mapping[sa.Table, Sequence[Row]]


class Copied(NamedTuple):
    """How many versions of tasks there are, and how many rows of the target's catalogue were not so before."""

    versions: int
    changed: int


def copy(source: tuple[Catalog, Blobs], target: tuple[Catalog, Blobs]) -> Copied:
    """Makes the tasks of ``target`` those of ``source``, as they were at one moment. Files that the target has are not
    copied again, unless they are damaged there; rows that it has are not written again.

    The target changes in one transaction, in which the database itself counts a change of every task that differs:
    servers on it follow. Version numbers that it gave out are not given out again. A key that was revoked in one of
    both is revoked.

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
                other_blobs.sync()
                changed = _write(connection, rows)
        except NotFound as error:
            lacks = f" ({error.message})"
            continue
        return Copied(len(rows[VERSIONS]), changed)
    raise Conflict(f"the source lacks files, or its tasks are deleted faster than they can be copied; try again{lacks}")


def _copy_files(source: Blobs, target: Blobs, digests: Iterable[str]) -> None:
    """Raises ``NotFound``; ``InvalidTask``, behind all others, for files that are not those of their names."""
    damaged = []
    for digest in digests:
        try:
            target.put(source.read(digest), digest)
        except InvalidTask:
            damaged.append(digest)
    if damaged:
        raise InvalidTask(
            f"files of the source are damaged: {', '.join(damaged)[:SHOWN]}; restore them, or delete the versions that "
            "have them"
        )


def _read(catalog: Catalog) -> Rows:
    with catalog.read() as connection:
        return {table: [dict(row._mapping) for row in connection.execute(sa.select(table))] for table in COPIED}


def _write(connection: sa.Connection, rows: Rows) -> int:
    """Writes what differs; returns how many rows of the target that was, those that are gone included."""
    tenants = {row["tenant"] for row in (*rows[KEYS], *rows[LIMITS])}  # one that is new in the target keeps its limits
    access = _merge(connection, KEYS, rows[KEYS], _revoked)
    access += _merge(connection, LIMITS, rows[LIMITS], goes=lambda there: there["tenant"] in tenants)
    if access:
        count_change(connection)
    tasks = _merge(connection, VERSIONS, rows[VERSIONS], _same_file, goes=_every)
    tasks += sum(_merge(connection, table, rows[table], goes=_every) for table in (ALIASES, USES, BACKBONES))
    tasks += _merge(connection, LAYOUTS, rows[LAYOUTS], lambda own, there: there)
    tasks += _merge(connection, TASKS, rows[TASKS], _higher)
    return access + tasks


def _merge(
    connection: sa.Connection,
    table: sa.Table,
    rows: Sequence[Row],
    of_both: Callable[[Row, Row], Row] = lambda own, there: own,
    goes: Callable[[Row], bool] = lambda there: False,
) -> int:
    """Brings the source's ``rows`` into the target's table. Where it has a row of the same key, it gets ``of_both``
    (the source's, its own); another one goes where ``goes`` says so. Returns how many rows were not so before."""
    key = [column.name for column in table.primary_key]
    missing = {tuple(row[name] for name in key): row for row in rows}
    old: list[tuple[Any, ...]] = []
    for found in connection.execute(sa.select(table)):
        there = dict(found._mapping)
        at = tuple(there[name] for name in key)
        if at not in missing:
            old += [at] if goes(there) else []
        elif (wanted := of_both(missing[at], there)) == there:
            del missing[at]
        else:
            missing[at] = wanted
            old.append(at)
    this = sa.and_(*(table.c[name] == sa.bindparam(f"old_{name}") for name in key))
    gone = [{f"old_{name}": value for name, value in zip(key, at, strict=True)} for at in old]
    _each(connection, sa.delete(table).where(this), gone)
    _each(connection, sa.insert(table), list(missing.values()))
    return len(missing.keys() | old)


def _every(there: Row) -> bool:
    return True


def _same_file(own: Row, there: Row) -> Row:
    """Raises ``Conflict``: servers that have loaded a version do not look at it again."""
    if own["digest"] != there["digest"]:
        raise Conflict(
            f"version {own['version']} of task {own['id']!r} is another file in the target; delete the task there, "
            "then it gets the source's"
        )
    return own


def _revoked(own: Row, there: Row) -> Row:
    return {**there, "revoked": there["revoked"] or own["revoked"]}


def _higher(own: Row, there: Row) -> Row:
    return {**there, "newest": max(own["newest"], there["newest"])}


def _each(connection: sa.Connection, statement: sa.Delete | sa.Insert, rows: Sequence[Row]) -> None:
    for start in range(0, len(rows), AT_ONCE):
        connection.execute(statement, rows[start : start + AT_ONCE])
