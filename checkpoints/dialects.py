"""The differences of SQLite and PostgreSQL for a catalogue: locks, the count of changes and who hears of them, errors,
some expressions.

Both keep one rule: transactions that write follow one another, from their start to their commit. So a version number
is given out only once, and a reader that has seen a change's number has seen every change before it.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Mapping, Set
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import sqlalchemy as sa
from sqlalchemy.dialects import sqlite
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.functions import FunctionElement

from checkpoints.listening import PREFIX, TELLING, Listener
from jpets.errors import InvalidInput, JpetsError, OutOfSpace, Saturated
from jpets.files import DISK_FULL

if TYPE_CHECKING:
    from sqlalchemy.dialects import postgresql

BUSY = "the catalogue was busy for too long; try again"
IN_USE = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_PROTOCOL)
"""SQLite's errors of transactions that others keep waiting; the last one comes of a log that they hold too long."""
CLIENT_WAITS = {"connect_timeout": 10, "tcp_user_timeout": 30_000, "keepalives_idle": 30, "keepalives_interval": 10}
"""Seconds (``tcp_user_timeout``: milliseconds) after which a PostgreSQL that does not answer counts as unreachable, but
for those that its URL sets: by itself a client waits for a quarter of an hour."""
EVENTS = {"insert": "INSERT", "update": "UPDATE OF state", "delete": "DELETE"}
"""Statements that change which version of a task is served, by the name of their trigger."""
NUMBER = "coalesce((SELECT max(number) FROM changes), 0) + 1"
RENUMBERED = "ON CONFLICT (tenant, id) DO UPDATE SET number = excluded.number"
LOCK = "pg_advisory_xact_lock(1785750899, hashtext({schema}))"
"""PostgreSQL's write lock of a schema, held until the transaction ends. The number tells it apart from other programs'
locks."""


class Dialect(Protocol):
    """One kind of database. It is made with the seconds that a transaction waits for others."""

    names: ClassVar[str]
    """A query for the names of the existing tables and triggers."""
    triggers: ClassVar[Mapping[str, str]]
    """Statements by the trigger that they make. The database itself counts changes, so that those by other releases and
    programs count too."""
    telling: ClassVar[Set[str]]
    """Those of them that only tell of what was counted: a catalogue does without."""

    def engine(self, url: sa.URL) -> sa.Engine: ...

    def listener(self, engine: sa.Engine) -> Listener | None:
        """What hears of changes; None where the database, or its driver, tells of none."""
        ...

    def begin(self, connection: sa.Connection, *, writes: bool) -> None:
        """Begins a transaction; one that writes holds the catalogue's only write lock from here on."""
        ...

    def problem(self, error: sa.exc.DBAPIError) -> JpetsError | None:
        """The error to tell a caller; None for an unexpected one."""
        ...


class SQLite:
    """A file in WAL mode, durable at every commit."""

    names: ClassVar[str] = "SELECT name FROM sqlite_master"
    triggers: ClassVar[Mapping[str, str]] = {
        f"changed_{name}": f"""
            CREATE TRIGGER IF NOT EXISTS changed_{name} AFTER {event} ON versions BEGIN
                INSERT INTO changes (tenant, id, number) VALUES ({row}.tenant, {row}.id, {NUMBER}) {RENUMBERED};
            END"""
        for name, event in EVENTS.items()
        for row in ("OLD" if event == "DELETE" else "NEW",)
    }
    telling: ClassVar[Set[str]] = frozenset()

    def __init__(self, patience: float) -> None:
        self._patience = patience

    def engine(self, url: sa.URL) -> sa.Engine:
        if url.database in (None, "", ":memory:"):
            raise InvalidInput("a catalogue of SQLite needs a file: sqlite:////folder/catalog.sqlite")
        engine = sa.create_engine(url, connect_args={"timeout": self._patience})

        def configure(connection: DBAPIConnection, record: object) -> None:
            # SQLAlchemy begins transactions itself (the driver's own way begins them too late).
            connection.isolation_level = None
            cursor = connection.cursor()
            for pragma in (f"busy_timeout={round(self._patience * 1000)}", "journal_mode=WAL", "synchronous=FULL"):
                cursor.execute(f"PRAGMA {pragma}")
            cursor.close()

        sa.event.listen(engine, "connect", configure)
        return engine

    def listener(self, engine: sa.Engine) -> Listener | None:
        return None

    def begin(self, connection: sa.Connection, *, writes: bool) -> None:
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")

    def problem(self, error: sa.exc.DBAPIError) -> JpetsError | None:
        code = getattr(error.orig, "sqlite_errorcode", 0) & 0xFF
        if code == sqlite3.SQLITE_FULL:
            return OutOfSpace(DISK_FULL)
        return Saturated(BUSY) if code in IN_USE else None


class PostgreSQL:
    """A schema of a server that several machines may reach: the first of the connection's ``search_path``."""

    names: ClassVar[str] = """
        SELECT tablename FROM pg_tables WHERE schemaname = current_schema()
        UNION SELECT tgname FROM pg_trigger
            WHERE tgrelid IN (to_regclass('versions'), to_regclass('changes'), to_regclass('access'))"""
    _counting: ClassVar[Mapping[str, str]] = {
        f"changed_{name}": f"""
            CREATE OR REPLACE FUNCTION count_change() RETURNS trigger LANGUAGE plpgsql SET search_path FROM CURRENT
            AS $$
            DECLARE
                changed record;
            BEGIN
                PERFORM {LOCK.format(schema="TG_TABLE_SCHEMA")};
                IF TG_OP = 'DELETE' THEN changed := OLD; ELSE changed := NEW; END IF;
                INSERT INTO changes (tenant, id, number) VALUES (changed.tenant, changed.id, {NUMBER}) {RENUMBERED};
                RETURN NULL;
            END $$;
            DROP TRIGGER IF EXISTS changed_{name} ON versions;
            CREATE TRIGGER changed_{name} AFTER {event} ON versions FOR EACH ROW EXECUTE FUNCTION count_change()"""
        for name, event in EVENTS.items()
    }
    _telling: ClassVar[Mapping[str, str]] = {
        f"told_{table}": f"""
            CREATE OR REPLACE FUNCTION tell_change() RETURNS trigger LANGUAGE plpgsql
            AS $$
            BEGIN
                PERFORM pg_notify('{PREFIX}' || TG_TABLE_NAME, TG_TABLE_SCHEMA);
                RETURN NULL;
            END $$;
            DROP TRIGGER IF EXISTS told_{table} ON {table};
            CREATE TRIGGER told_{table} AFTER INSERT OR UPDATE ON {table}
                FOR EACH STATEMENT EXECUTE FUNCTION tell_change()"""
        for table in TELLING
    }
    triggers: ClassVar[Mapping[str, str]] = {**_counting, **_telling}
    telling: ClassVar[Set[str]] = _telling.keys()
    unreachable = ("08", "53", "57", "58")
    """Classes of errors of the connection, of the server's resources, of a server that is shut down, and of its
    system."""

    def __init__(self, patience: float) -> None:
        self._patience = patience

    def engine(self, url: sa.URL) -> sa.Engine:
        if url.drivername == "postgresql":
            url = url.set(drivername="postgresql+psycopg")
        return self._engine(url, pool_pre_ping=True)

    def listener(self, engine: sa.Engine) -> Listener | None:
        if engine.dialect.driver != "psycopg":
            return None
        return Listener(self._engine(engine.url, poolclass=sa.NullPool))

    def _engine(self, url: sa.URL, **pool: Any) -> sa.Engine:
        waits = {name: value for name, value in CLIENT_WAITS.items() if name not in url.query}
        engine = sa.create_engine(url, isolation_level="READ COMMITTED", connect_args=waits, **pool)

        def configure(connection: DBAPIConnection, record: object) -> None:
            # A machine that disappears must not hold the lock for hours.
            cursor = connection.cursor()
            for setting, value in (("idle", 30), ("interval", 10), ("count", 3)):
                cursor.execute(f"SET tcp_keepalives_{setting} = {value}")
            cursor.close()
            connection.commit()

        sa.event.listen(engine, "connect", configure)
        return engine

    def begin(self, connection: sa.Connection, *, writes: bool) -> None:
        if not writes:
            connection.exec_driver_sql("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")
            return
        connection.exec_driver_sql(f"SET LOCAL lock_timeout = {max(1, round(self._patience * 1000))}")
        connection.exec_driver_sql(f"SELECT {LOCK.format(schema='current_schema()')}")

    def problem(self, error: sa.exc.DBAPIError) -> JpetsError | None:
        state = getattr(error.orig, "sqlstate", None) or getattr(error.orig, "pgcode", None)
        if state == "53100":
            return OutOfSpace("the disk of the catalogue's database is full; free space, then try again")
        if state in ("55P03", "40001", "40P01"):  # waited too long, or two that waited for each other
            return Saturated(BUSY)
        lost = error.connection_invalidated or (state is None and isinstance(error, sa.exc.OperationalError))
        if lost or (state is not None and state[:2] in self.unreachable):
            return Saturated("the catalogue's database cannot be reached; try again")
        return None


DIALECTS: Mapping[str, Callable[[float], Dialect]] = {"sqlite": SQLite, "postgresql": PostgreSQL}


def catalogue_url(text: str) -> sa.URL:
    """Raises ``InvalidInput`` without the URL in its message: it may hold a password."""
    try:
        url = sa.make_url(text)
        found = url.get_backend_name() in DIALECTS
    except (sa.exc.ArgumentError, ValueError):
        found = False
    if not found:
        raise InvalidInput(
            "a catalogue's URL is like sqlite:////folder/catalog.sqlite or postgresql://user@host/database"
        )
    return url


def make_engine(dialect: Dialect, url: sa.URL) -> sa.Engine:
    """Raises ``InvalidInput`` for a driver that is missing or unknown."""
    try:
        engine = dialect.engine(url)
    except (ImportError, sa.exc.ArgumentError) as error:
        raise InvalidInput(
            f"a catalogue in {url.get_backend_name()} needs its driver: {error}; see docs/operation.md"
        ) from error
    if engine.dialect.is_async:
        raise InvalidInput(f"a catalogue takes a driver that is not asynchronous, found {url.drivername}")
    return engine


def dialect_of(url: sa.URL, patience: float) -> Dialect:
    return DIALECTS[url.get_backend_name()](patience)


class Name(sa.TypeDecorator[str]):
    """A short text that tells rows apart, in the order of its code points in every database."""

    impl = sa.String
    cache_ok = True

    def load_dialect_impl(self, dialect: sa.Dialect) -> Any:
        length = self.impl_instance.length  # type: ignore[attr-defined]
        collation = "C" if dialect.name == "postgresql" else None
        return dialect.type_descriptor(sa.String(length, collation=collation))

    def process_bind_param(self, value: str | None, dialect: sa.Dialect) -> str | None:
        """PostgreSQL takes no NUL. No name has one, so a text with one is never found."""
        return value.replace("\0", "\1") if value is not None and dialect.name == "postgresql" else value


class fingerprint_in(FunctionElement[str]):
    """(a task's JSON document) -> the fingerprint of its backbone."""

    inherit_cache = True
    type = sa.Text()


@compiles(fingerprint_in, "sqlite")
def _with_sqlite(element: fingerprint_in, compiler: SQLCompiler, **options: Any) -> str:
    return f"json_extract({compiler.process(element.clauses, **options)}, '$.backbone.fingerprint')"


@compiles(fingerprint_in, "postgresql")
def _with_postgresql(element: fingerprint_in, compiler: SQLCompiler, **options: Any) -> str:
    """PostgreSQL refuses a document with an escape of NUL anywhere. A fingerprint has no escapes, so they may all be
    removed first."""
    text = compiler.process(element.clauses, **options)
    return rf"CAST(replace(replace({text}, '\\', '//'), '\u', '/u') AS json) #>> '{{backbone,fingerprint}}'"


def insert(connection: sa.Connection, table: sa.Table) -> postgresql.Insert | sqlite.Insert:
    """An ``INSERT`` that may say what to do ``on_conflict``."""
    if connection.dialect.name != "postgresql":
        return sqlite.insert(table)
    from sqlalchemy.dialects import postgresql  # most programs do without it

    return postgresql.insert(table)
