"""All connections of the HTTP server: how many there may be, and that none waits for ever."""

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
from serving.connection import Connection
from serving.errors import error_response
from serving.settings import ConnectionLimits

log = logging.getLogger(__name__)

SPARE = 32
"""Connections beyond the limit that are still read: health is answered on them, everything else refused."""
HEALTH = ("/v2/health/", "/metrics")
IDLE_SECONDS = 1.0
"""How long a connection must have been idle to be closed for a new one."""
LOOK_AGAIN = 0.1
"""Seconds between two searches for idle connections."""
TELL_SECONDS = 60.0
"""Between two log lines of what was refused."""


class Connections:
    """All connections, and what uvicorn makes a new one by (``protocol``). Event loop only.

    One timer looks after all of them; with no connection there is none. Where there are too many, the one that has been
    idle for longest makes room, and without one the newcomer is refused.
    """

    def __init__(self, limits: ConnectionLimits) -> None:
        self.limits = limits
        self.now = time.monotonic()
        """When ``look`` last came round: exact enough for seconds, and no clock has to be read for each request."""
        self._open: dict[Connection, None] = {}
        """A set in the order in which they were opened."""
        self._timer: asyncio.TimerHandle | None = None
        self._idle: deque[Connection] = deque()
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
        """Takes a connection in, or refuses it where there are too many."""
        now = connection.since = time.monotonic()
        if self._timer is None:
            self.now = now
            self._timer = connection.loop.call_later(self.limits.look_seconds, self._look, connection.loop)
        over = len(self._open) + 1 - self.limits.most
        has_room = over <= 0 or self._make_room(now)
        self._open[connection] = None
        if has_room:
            return
        self.count("too_many_connections")
        if over <= SPARE:
            connection.app = _only_health(connection.app)
        else:
            connection.refuse(*_too_many(), {"Retry-After": str(Saturated.retry_after)})
            connection.transport.close()

    def closed(self, connection: Connection) -> None:
        self._open.pop(connection, None)

    def _make_room(self, now: float) -> bool:
        """Closes the connection that has been idle for longest."""
        if not self._idle and now - self._searched > LOOK_AGAIN:
            self._searched = now
            found = [each for each in self._open if each.idle and now - each.since > IDLE_SECONDS]
            self._idle = deque(sorted(found, key=lambda each: each.since))
        while self._idle:
            oldest = self._idle.popleft()
            if oldest.idle and now - oldest.since > IDLE_SECONDS:
                oldest.transport.close()
                return True
        return False

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        self.now = time.monotonic()
        for connection in self:
            connection.look(self.now)
        self._timer = loop.call_later(self.limits.look_seconds, self._look, loop) if self._open else None
        if self._counts and self.now - self._told > TELL_SECONDS:
            log.warning("clients were refused", extra=dict(self._counts))
            self._counts.clear()
            self._told = self.now


def _too_many() -> tuple[int, str, str]:
    return Saturated.status, Saturated.code, "the server has too many connections; try again, or close idle ones"


def _only_health(app: ASGIApp) -> ASGIApp:
    async def limited(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"].startswith(HEALTH):
            await app(scope, receive, send)
            return
        request_id = scope.setdefault("state", {})["request_id"] = uuid.uuid4().hex
        headers = {"Retry-After": str(Saturated.retry_after), "Connection": "close", "X-Request-Id": request_id}
        await error_response(scope, *_too_many(), headers)(scope, receive, send)

    return limited
