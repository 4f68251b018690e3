"""The repository's database: which versions and aliases there are. SQLite in WAL mode, durable at every commit."""

from __future__ import annotations

import contextlib
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path

import sqlalchemy as sa
from sqlalchemy.engine.interfaces import DBAPIConnection

from jpets.errors import OutOfSpace, Saturated

BUSY_SECONDS = 30
WRITE = "jpets_write"
"""Execution option of transactions that write: they take the lock at their start, so that none has to be repeated."""

METADATA = sa.MetaData()
TASKS = sa.Table(
    "tasks",
    METADATA,
    sa.Column("tenant", sa.String(128), primary_key=True),
    sa.Column("id", sa.String(128), primary_key=True),
    sa.Column("newest", sa.Integer, nullable=False),
)
"""The last version number given out; kept when a task is deleted, so that a number never means two things."""
VERSIONS = sa.Table(
    "versions",
    METADATA,
    sa.Column("tenant", sa.String(128), primary_key=True),
    sa.Column("id", sa.String(128), primary_key=True),
    sa.Column("version", sa.Integer, primary_key=True),
    sa.Column("digest", sa.String(64), nullable=False, index=True),
    sa.Column("bytes", sa.BigInteger, nullable=False),
    sa.Column("created", sa.String(40), nullable=False),
    sa.Column("metadata", sa.Text, nullable=False),
    sa.Column("state", sa.String(16), nullable=False),
)
"""``state``: ``uploaded``, ``active`` or, after a rollback to an older version, ``withdrawn``."""
ALIASES = sa.Table(
    "aliases",
    METADATA,
    sa.Column("tenant", sa.String(128), primary_key=True),
    sa.Column("id", sa.String(128), primary_key=True),
    sa.Column("name", sa.String(64), primary_key=True),
    sa.Column("version", sa.Integer, nullable=False),
)
LAYOUTS = sa.Table(
    "layouts",
    METADATA,
    sa.Column("digest", sa.String(64), primary_key=True),
    sa.Column("maker", sa.String(160), primary_key=True),
    sa.Column("layout", sa.Text, nullable=False),
)
"""What ``maker``, a reader of blobs, has to know of one before it reads it. It can be made again from the blob."""
USES = sa.Table(
    "uses",
    METADATA,
    sa.Column("tenant", sa.String(128), primary_key=True),
    sa.Column("id", sa.String(128), primary_key=True),
    sa.Column("queries", sa.Float, nullable=False),
)
"""How often a task was asked, older queries counting less."""
BACKBONES = sa.Table("backbones", METADATA, sa.Column("name", sa.String(128), primary_key=True))
"""Those that were loaded beside the one that a server is started with."""
CHANGES = sa.Table(
    "changes",
    METADATA,
    sa.Column("tenant", sa.String(128), primary_key=True),
    sa.Column("id", sa.String(128), primary_key=True),
    sa.Column("number", sa.BigInteger, nullable=False, unique=True),
)
"""When a task's versions changed last, its deletion included: every change has a higher number than those before it.

One row a task, so that a reader which was away for long finds each changed task once. Transactions that write follow
one another, so a reader that has seen a number has seen everything before it.
"""
TRIGGERS = {
    f"changed_{name}": f"""
        CREATE TRIGGER IF NOT EXISTS changed_{name} AFTER {event} ON versions BEGIN
            INSERT INTO changes (tenant, id, number)
            VALUES ({row}.tenant, {row}.id, coalesce((SELECT max(number) FROM changes), 0) + 1)
            ON CONFLICT (tenant, id) DO UPDATE SET number = excluded.number;
        END"""
    for name, event, row in (
        ("insert", "INSERT", "NEW"),
        ("update", "UPDATE OF state", "NEW"),
        ("delete", "DELETE", "OLD"),
    )
}
"""The database counts changes itself, so that those of releases which know nothing of it count too."""


class Catalog:
    """Transactions on one database file. Safe for threads and for several processes on one machine.

    A catalogue of an earlier release gets what it lacks when it is opened.
    """

    def __init__(self, path: Path) -> None:
        self._writer = threading.Lock()  # threads queue here in turn; SQLite's own lock is polled and unfair
        self._engine = sa.create_engine(
            sa.URL.create("sqlite", database=str(path)), connect_args={"timeout": BUSY_SECONDS}
        )
        sa.event.listen(self._engine, "connect", _configure)
        sa.event.listen(self._engine, "begin", _begin)
        with self.read() as connection:
            complete = _is_complete(connection)
        if not complete:
            with self.write() as connection:
                METADATA.create_all(connection)
                for trigger in TRIGGERS.values():
                    connection.exec_driver_sql(trigger)

    @contextlib.contextmanager
    def read(self) -> Iterator[sa.Connection]:
        """One consistent view of the catalogue."""
        with _errors(), self._engine.connect() as connection, connection.begin():
            yield connection

    @contextlib.contextmanager
    def write(self) -> Iterator[sa.Connection]:
        """A transaction that holds the only write lock and commits durably. Raises ``OutOfSpace``, ``Saturated``."""
        with self._writer, _errors(), self._engine.connect() as plain:
            connection = plain.execution_options(**{WRITE: True})
            with connection.begin():
                yield connection

    def close(self) -> None:
        self._engine.dispose()


def _is_complete(connection: sa.Connection) -> bool:
    """Whether there is nothing to make: then a catalogue that cannot be written can be read."""
    found = connection.exec_driver_sql("SELECT name FROM sqlite_master").scalars().all()
    return METADATA.tables.keys() | TRIGGERS.keys() <= set(found)


def _configure(connection: DBAPIConnection, record: object) -> None:
    """SQLAlchemy begins transactions itself (the driver's own way begins them too late)."""
    connection.isolation_level = None
    cursor = connection.cursor()
    for pragma in (f"busy_timeout={BUSY_SECONDS * 1000}", "journal_mode=WAL", "synchronous=FULL"):
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()


def _begin(connection: sa.Connection) -> None:
    connection.exec_driver_sql("BEGIN IMMEDIATE" if connection.get_execution_options().get(WRITE) else "BEGIN")


@contextlib.contextmanager
def _errors() -> Iterator[None]:
    try:
        yield
    except sa.exc.TimeoutError as error:
        raise Saturated("too many requests read the catalogue at once; try again") from error
    except sa.exc.OperationalError as error:
        code = getattr(error.orig, "sqlite_errorcode", 0) & 0xFF
        if code == sqlite3.SQLITE_FULL:
            raise OutOfSpace("the disk is full; free space or remove tasks, then try again") from error
        if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            raise Saturated("the catalogue was busy for too long; try again") from error
        raise
