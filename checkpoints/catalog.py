"""The repository's database: versions, aliases and changes. SQLite or PostgreSQL, durable at every commit."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Sequence, Set
from pathlib import Path
from typing import Any, TypeVar

import sqlalchemy as sa

from checkpoints.dialects import Name, catalogue_url, dialect_of, make_engine
from checkpoints.grouped import Grouped, Outcome
from jpets.errors import JpetsError, Saturated
from jpets.watch import Watch

log = logging.getLogger(__name__)

T = TypeVar("T")
Work = Callable[[sa.Connection], T]
Shared = tuple[Work[Any], Callable[[], None] | None]

BUSY_SECONDS = 30
WRITE = "jpets_write"
"""Execution option of transactions that write: they take the lock at their start, so that none has to be retried."""

METADATA = sa.MetaData()
TASKS = sa.Table(
    "tasks",
    METADATA,
    sa.Column("tenant", Name(128), primary_key=True),
    sa.Column("id", Name(128), primary_key=True),
    sa.Column("newest", sa.Integer, nullable=False),
)
"""The last version number given out; kept when a task is deleted, so that a number is never used twice."""
VERSIONS = sa.Table(
    "versions",
    METADATA,
    sa.Column("tenant", Name(128), primary_key=True),
    sa.Column("id", Name(128), primary_key=True),
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
    sa.Column("tenant", Name(128), primary_key=True),
    sa.Column("id", Name(128), primary_key=True),
    sa.Column("name", Name(64), primary_key=True),
    sa.Column("version", sa.Integer, nullable=False),
)
LAYOUTS = sa.Table(
    "layouts",
    METADATA,
    sa.Column("digest", Name(64), primary_key=True),
    sa.Column("maker", sa.String(160), primary_key=True),
    sa.Column("layout", sa.Text, nullable=False),
)
"""What ``maker``, a reader of blobs, keeps about a blob to know before it reads it. It can be made again from the
blob."""
USES = sa.Table(
    "uses",
    METADATA,
    sa.Column("tenant", Name(128), primary_key=True),
    sa.Column("id", Name(128), primary_key=True),
    sa.Column("queries", sa.Float, nullable=False),
)
"""How often a task was queried; older queries count less."""
BACKBONES = sa.Table("backbones", METADATA, sa.Column("name", Name(128), primary_key=True))
"""Backbones that were loaded besides the one that a server is started with."""
KEYS = sa.Table(
    "keys",
    METADATA,
    sa.Column("id", Name(32), primary_key=True),
    sa.Column("tenant", Name(128), nullable=False),
    sa.Column("scopes", sa.String(64), nullable=False),
    sa.Column("digest", sa.String(64), nullable=False),
    sa.Column("created", sa.String(40), nullable=False),
    sa.Column("default_task", Name(128)),
    sa.Column("expires", sa.String(40)),
    sa.Column("revoked", sa.String(40)),
    sa.Column("note", sa.Text, nullable=False),
)
"""Keys of requests; those that were revoked stay, so that a server with keys never becomes one without."""
LIMITS = sa.Table(
    "limits",
    METADATA,
    sa.Column("tenant", Name(128), primary_key=True),
    sa.Column("requests_per_minute", sa.Float),
    sa.Column("tokens_per_minute", sa.Float),
    sa.Column("priority", sa.Integer, nullable=False),
)
ACCESS = sa.Table(
    "access",
    METADATA,
    sa.Column("row", sa.Integer, primary_key=True),
    sa.Column("number", sa.BigInteger, nullable=False),
)
"""One row: how often keys and limits have changed."""
CHANGES = sa.Table(
    "changes",
    METADATA,
    sa.Column("tenant", Name(128), primary_key=True),
    sa.Column("id", Name(128), primary_key=True),
    sa.Column("number", sa.BigInteger, nullable=False, unique=True),
)
"""When a task's versions changed last, or when it was deleted: every change has a higher number than those before it.

One row a task, so that a reader finds each changed task once even after a long time. Transactions that write follow
one another, so a reader that has seen a number has seen every change before it.
"""


class Catalog:
    """Transactions on one database. Safe for threads and processes, with PostgreSQL also for several machines.

    A catalogue of an earlier release gets its missing tables and triggers when it is opened.
    """

    def __init__(self, place: Path | str) -> None:
        """``place``: SQLite's file, or a URL of SQLAlchemy's. Raises ``InvalidInput`` for an invalid URL."""
        self._writer = threading.Lock()  # threads queue here in turn; the database's own lock may be unfair
        self._shared = Grouped[Shared, Outcome[Any]](self._write_all)
        url = sa.URL.create("sqlite", database=str(place)) if isinstance(place, Path) else catalogue_url(place)
        self._dialect = dialect_of(url, BUSY_SECONDS)
        self._engine = make_engine(self._dialect, url)
        sa.event.listen(self._engine, "begin", self._begin)
        self._listener = self._dialect.listener(self._engine)
        with self.read() as connection:
            missing = self._missing(connection)
        if missing:
            self._complete(missing)

    @contextlib.contextmanager
    def read(self) -> Iterator[sa.Connection]:
        """One consistent view of the catalogue. Raises ``Saturated``."""
        with self._errors(), self._engine.connect() as connection, connection.begin():
            yield connection

    @contextlib.contextmanager
    def write(self) -> Iterator[sa.Connection]:
        """A transaction that holds the only write lock and commits durably. Raises ``OutOfSpace``, ``Saturated``."""
        with self._writer, self._errors(), self._engine.connect() as plain:
            connection = plain.execution_options(**{WRITE: True})
            with connection.begin():
                yield connection

    def shared_write(self, work: Work[T], last: Callable[[], None] | None = None) -> T:
        """What ``work`` returns, in a transaction as ``write`` gives, which calls of several threads at a time share: a
        commit takes the disk as long for many rows as for one. ``last`` comes before it, once for calls with the same.

        What ``work`` did is taken back where it raises an error, and that of the others stays. Errors of ``last``, and
        those of the catalogue, are all calls'.
        """
        outcome: Outcome[T] = self._shared((work, last))
        return outcome.take()

    def watch(self, table: sa.Table) -> Watch:
        """A watch for changes that ``table`` counts, by any writer. It is told of them where the database tells."""
        return Watch() if self._listener is None else self._listener.watch(table.name)

    def close(self) -> None:
        if self._listener is not None:
            self._listener.close()
        self._engine.dispose()

    def _write_all(self, calls: Sequence[Shared]) -> Sequence[Outcome[Any]]:
        with self.write() as connection:
            done = [_attempt(connection, work) for work, _ in calls]
            for last in dict.fromkeys(last for _, last in calls if last is not None):
                last()
            return done

    def _missing(self, connection: sa.Connection) -> Set[str]:
        """The tables and triggers that do not exist; none: then a read-only catalogue can be opened too."""
        found = connection.exec_driver_sql(self._dialect.names).scalars().all()
        return (METADATA.tables.keys() | self._dialect.triggers.keys()) - set(found)

    def _complete(self, missing: Set[str]) -> None:
        """Makes all tables and triggers. What only tells of changes may stay away: another than the owner of the tables
        cannot make it."""
        try:
            with self.write() as connection:
                METADATA.create_all(connection)
                for trigger in self._dialect.triggers.values():
                    connection.exec_driver_sql(trigger)
        except (sa.exc.DBAPIError, JpetsError) as error:
            if not missing <= self._dialect.telling:
                raise
            why = {"why": type(error).__name__}
            log.warning("the catalogue tells of no change: the owner of its tables must open it once", extra=why)
            self._listener = None

    def _begin(self, connection: sa.Connection) -> None:
        self._dialect.begin(connection, writes=WRITE in connection.get_execution_options())

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except sa.exc.TimeoutError as error:
            raise Saturated("too many requests read the catalogue at once; try again") from error
        except sa.exc.DBAPIError as error:
            if problem := self._dialect.problem(error):
                raise problem from error
            raise


def _attempt(connection: sa.Connection, work: Work[T]) -> Outcome[T]:
    """What ``work`` returns or raises. Raises errors of the database itself: they concern the whole transaction, which
    it may have taken back already, and the savepoint with it."""
    outcome, savepoint = Outcome[T](), connection.begin_nested()
    try:
        found = work(connection)
        savepoint.commit()
    except sa.exc.SQLAlchemyError:
        raise
    except Exception as error:  # noqa: BLE001 (it is for who asked for the work)
        savepoint.rollback()
        outcome.fail(error)
    else:
        outcome.set(found)
    return outcome
