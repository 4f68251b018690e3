"""One limit for the bodies of all connections that are in memory."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator

from starlette.exceptions import HTTPException
from starlette.types import Message, Receive

from jpets.errors import Saturated
from jpets.free_memory import return_free_memory
from serving.http.errors import retry_headers

FREE = 1 << 16
"""Bytes of a body that are not counted: a connection may hold as many in its buffers, and small requests shall pass
when large ones fill the budget."""
BODY = "jpets.body"
"""A request's ``Body`` in its ASGI scope."""
MUCH = 32 << 20
"""Bytes of bodies after which freed memory is given back to the system: the C library keeps most of it."""
PATIENCE = 5.0
"""Seconds that a body may take to arrive before it has to make room for others."""


class NoRoom(HTTPException):
    """FastAPI lets only its own exceptions through while it reads a body."""

    def __init__(self) -> None:
        message = "the bodies of other requests take all memory that there is for them; try again"
        super().__init__(Saturated.status, message, retry_headers(Saturated))


class BodyBudget:
    """The bytes of bodies that are in memory, at most ``limit``; one alone may have more. Event loop only.

    Where there is no room for more bytes, bodies that have been arriving for longer than ``PATIENCE`` are refused, the
    oldest first: a slow client must not keep others out. Where there is no such body, the newcomer is refused.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.held = 0
        """Bytes."""
        self._most = 0
        """Bytes of bodies since memory was last given back to the system."""
        self._coming: dict[Body, None] = {}
        """Bodies that have not come whole, in the order in which they began."""

    @contextlib.contextmanager
    def body(self, receive: Receive) -> Iterator[Body]:
        """The body of a request that ``receive`` reads; at the end it is no longer in memory."""
        body = Body(self, receive)
        try:
            yield body
        finally:
            self.ended(body)
            self.give_back(body)

    def take(self, body: Body, size: int) -> None:
        """Raises ``NoRoom``."""
        if self.held + size > self._limit:
            self._make_room(body, size)
        self.held += size
        self._most = max(self._most, self.held)
        body.held += size

    def give_back(self, body: Body) -> None:
        self.held -= body.held
        body.held = 0
        if not self.held and self._most > MUCH:
            self._most = 0
            asyncio.get_running_loop().run_in_executor(None, return_free_memory)

    def began(self, body: Body) -> None:
        self._coming[body] = None

    def ended(self, body: Body) -> None:
        self._coming.pop(body, None)

    def _make_room(self, newcomer: Body, size: int) -> None:
        late = time.monotonic() - PATIENCE
        for body in list(self._coming):
            if self.held + size <= self._limit or body.since > late:
                break
            if body is not newcomer and body.give_way():
                self.ended(body)
                self.give_back(body)
        if self.held + size > self._limit and self.held > newcomer.held:
            raise NoRoom


class Body:
    """One request's body as it comes."""

    def __init__(self, budget: BodyBudget, receive: Receive) -> None:
        self._budget = budget
        self._receive = receive
        self._waiting: asyncio.Timeout | None = None
        self._size = 0
        self._is_coming = False
        self.held = 0
        """Bytes that the budget counts."""
        self.since = time.monotonic()

    async def receive(self) -> Message:
        """The next message. Raises ``NoRoom``."""
        message = await (self._interruptible() if self._is_coming else self._receive())
        came = len(message.get("body", b""))
        if not message.get("more_body", False):
            self._is_coming = False
            self._budget.ended(self)
        elif not self._is_coming:
            self._is_coming = True
            self._budget.began(self)
        free = max(0, FREE - self._size)
        self._size += came
        if came > free:
            self._budget.take(self, came - free)
        return message

    def unpacked(self, size: int) -> None:
        """Counts a packed body's bytes once they are unpacked, until its request has its answer. Raises ``NoRoom``."""
        self._budget.take(self, max(0, size - FREE))

    def give_way(self) -> bool:
        """Refuses the body if more of it is still to come."""
        if self._waiting is None:
            return False
        self._waiting.reschedule(0.0)
        return True

    async def _interruptible(self) -> Message:
        try:
            async with asyncio.timeout(None) as self._waiting:
                return await self._receive()
        except TimeoutError:
            raise NoRoom from None
        finally:
            self._waiting = None
