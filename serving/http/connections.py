"""All connections of the HTTP server: how many there may be, and how long each may wait."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections import Counter, deque
from collections.abc import Iterator
from typing import Any, cast

from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.config import Config
from uvicorn.server import ServerState

from jpets.errors import Saturated
from serving.http.connection import Connection
from serving.http.errors import error_response, retry_headers
from serving.http.settings import ConnectionLimits

log = logging.getLogger(__name__)

SPARE = 32
"""Connections beyond the limit that are still read: they get health, everything else is refused."""
HEALTH = ("/v2/health/", "/metrics")
IDLE_SECONDS = 1.0
"""How long a connection must have been idle to be closed for a new one."""
PATIENCE = 5.0
"""How long a request may take to come before its connection is closed for a new one, unless it comes fast."""
FAST = 32.0
"""Fast, as a multiple of the least rate."""
LOOK_AGAIN = 0.1
"""Seconds between two searches for connections that may be closed."""
TELL_SECONDS = 60.0
"""Seconds between two log lines about refused clients."""
RETRY = retry_headers(Saturated)
TOO_MANY = (
    Saturated.status,
    Saturated.code,
    "the server has too many connections; try again, or close idle ones",
    RETRY,
)


class Connections:
    """All connections, with the factory of new ones for uvicorn (``protocol``). Event loop only.

    One timer checks all of them; with no connection there is none. Where there are too many, an idle connection makes
    room, or else one with a slow request. If there is neither, the newcomer is refused, unless it asks for health and
    is among the newest.
    """

    def __init__(self, limits: ConnectionLimits) -> None:
        self.limits = limits
        self.now = time.monotonic()
        """When ``look`` last ran: exact enough for seconds, and saves reading a clock for each request."""
        self._open: dict[Connection, None] = {}
        """A set in order of opening."""
        self._timer: asyncio.TimerHandle | None = None
        self._spare: dict[Connection, None] = {}
        """The connections beyond the limit, in order of opening."""
        self._yielding: deque[Connection] = deque()
        """The connections that may be closed, as of the last search."""
        self._searched = 0.0
        self._counts: Counter[str] = Counter()
        self._told = 0.0

    def __call__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> Connection:
        return Connection(self, config, server_state, app_state, _loop)

    @property
    def protocol(self) -> type[asyncio.Protocol]:
        """For ``uvicorn.Config(http=...)``, which only calls it."""
        return cast("type[asyncio.Protocol]", self)

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[Connection]:
        return iter(tuple(self._open))

    def count(self, reason: str) -> None:
        """Counts a client that was refused; the log has the sums."""
        self._counts[reason] += 1

    def opened(self, connection: Connection) -> None:
        """Accepts a connection, or refuses it if there are too many."""
        now = connection.since = time.monotonic()
        if self._timer is None:
            self.now = now
            self._timer = connection.loop.call_later(self.limits.look_seconds, self._look, connection.loop)
        has_room = len(self._open) < self.limits.most or self._make_room(now)
        self._open[connection] = None
        if not has_room:
            self.count("too_many_connections")
            self._add_spare(connection)

    def closed(self, connection: Connection) -> None:
        self._open.pop(connection, None)
        self._spare.pop(connection, None)

    def _make_room(self, now: float) -> bool:
        """Closes the connection that has been idle for longest, or else the one with the request that has been arriving
        for longest."""
        if not self._yielding and now - self._searched > LOOK_AGAIN:
            self._searched = now
            found = [each for each in self._open if self._yields(each, now)]
            self._yielding = deque(sorted(found, key=lambda each: (not each.idle, each.since)))
        while self._yielding:
            oldest = self._yielding.popleft()
            if not self._yields(oldest, now):
                continue
            if not oldest.idle:
                oldest.refuse(*TOO_MANY)
            oldest.end()
            return True
        return False

    def _yields(self, connection: Connection, now: float) -> bool:
        if connection.idle:
            return now - connection.since > IDLE_SECONDS
        return connection.is_slow(FAST * self.limits.least_rate, now, PATIENCE)

    def _add_spare(self, connection: Connection) -> None:
        connection.app = _only_health(connection.app)
        self._spare[connection] = None
        if len(self._spare) > SPARE:
            oldest = next((each for each in self._spare if not each.busy), connection)
            del self._spare[oldest]
            oldest.refuse(*TOO_MANY)
            oldest.end()

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        self.now = time.monotonic()
        for connection in self:
            connection.look(self.now)
        self._timer = loop.call_later(self.limits.look_seconds, self._look, loop) if self._open else None
        if self._counts and self.now - self._told > TELL_SECONDS:
            log.warning("clients were refused", extra=dict(self._counts))
            self._counts.clear()
            self._told = self.now


def _only_health(app: ASGIApp) -> ASGIApp:
    async def limited(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"].startswith(HEALTH):
            await app(scope, receive, send)
            return
        request_id = scope.setdefault("state", {})["request_id"] = uuid.uuid4().hex
        headers = {**RETRY, "Connection": "close", "X-Request-Id": request_id}
        await error_response(scope, *TOO_MANY[:3], headers)(scope, receive, send)

    return limited
