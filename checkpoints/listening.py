"""Hears at once of what others change in a catalogue of PostgreSQL: its triggers tell which table has counted a change
when the transaction commits.

Who hears nothing looks by time. So it is while there is no connection, and where a pooler lies between that lends
connections for one transaction each: it takes a ``LISTEN`` and passes nothing on.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING

import sqlalchemy as sa

from jpets.watch import Watch

if TYPE_CHECKING:
    import psycopg

log = logging.getLogger(__name__)

TELLING = ("changes", "access")
"""Tables that tell. Each has a channel, which all schemas of a database share; what is told is the schema's name."""
PREFIX = "jpets_"
LISTEN = "; ".join(f"LISTEN {PREFIX}{table}" for table in TELLING)
TRY = f"SELECT current_schema(), pg_notify('{PREFIX}{TELLING[0]}', current_schema())"
SLICE = 0.25
"""Seconds between looks whether to end."""
FIRST_PAUSE = 0.25
LONGEST_PAUSE = 30.0
"""Seconds until a lost connection is made again; each pause is twice as long as the one before."""
PATIENCE = 0.5
"""Seconds that an end waits for a connection that is being made."""


class Listener:
    """Wakes watches, in a thread and on a connection of its own. Thread-safe."""

    def __init__(self, engine: sa.Engine) -> None:
        """``engine``, of psycopg and without a pool, gives that connection, and another one that tries it out."""
        self._engine = engine
        self._lock = threading.Lock()
        self._watches: dict[str, list[Watch]] = defaultdict(list)
        """By channel."""
        self._told = False
        """Whether the connection has heard anything: only then is it known to hear."""
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._work, name="jpets-listener", daemon=True)

    def watch(self, table: str) -> Watch:
        """A watch for changes that the table counts. The first one has the connection made."""
        watch = Watch()
        with self._lock:
            if not self._watches:
                self._thread.start()
            self._watches[PREFIX + table].append(watch)
            watch.told = self._told
        return watch

    def close(self) -> None:
        self._end.set()
        if self._thread.is_alive():
            self._thread.join(PATIENCE)

    def _work(self) -> None:
        pause, warned = FIRST_PAUSE, False
        while not self._end.is_set():
            try:
                self._listen()
            except Exception as error:  # noqa: BLE001 (a database that is away comes back)
                if self._lost():
                    pause, warned = FIRST_PAUSE, False
                if not warned and not self._end.is_set():
                    log.warning("changes are not told; looking for them by time", extra={"why": type(error).__name__})
                warned = True
                self._end.wait(pause)
                pause = min(2 * pause, LONGEST_PAUSE)

    def _listen(self) -> None:
        """Wakes watches until the end. Raises what the driver does where the connection is lost."""
        with self._connection() as connection:
            connection.execute(LISTEN)
            with self._engine.begin() as other:
                schema = other.exec_driver_sql(TRY).scalar()
            while not self._end.is_set():
                for heard in connection.notifies(timeout=SLICE, stop_after=1):
                    if heard.payload == schema:
                        self._tell(heard.channel)

    @contextlib.contextmanager
    def _connection(self) -> Iterator[psycopg.Connection]:
        made = self._engine.raw_connection()
        connection: psycopg.Connection = made.driver_connection  # type: ignore[assignment]
        made.detach()  # or else SQLAlchemy would end a transaction on it, also where it is lost
        with contextlib.closing(connection):
            connection.autocommit = True
            yield connection

    def _tell(self, channel: str) -> None:
        with self._lock:
            first, self._told = not self._told, True
            for each, watches in self._watches.items():
                for watch in watches:
                    watch.told = True
                    if first or each == channel:  # what changed before the first was told to nobody
                        watch.wake()

    def _lost(self) -> bool:
        """Nothing is told from now on; whether anything was before."""
        with self._lock:
            told, self._told = self._told, False
            for watch in (each for watches in self._watches.values() for each in watches):
                watch.told = False
                watch.wake()
            return told
