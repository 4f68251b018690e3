"""A connection of the HTTP server, within the limits that uvicorn's protocol does not have."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, cast

import httptools
from uvicorn.config import Config
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT, FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol
from uvicorn.server import ServerState

from serving.http.errors import error_response

if TYPE_CHECKING:
    from serving.http.connections import Connections

PIECE = 1024
"""Bytes outside of bodies that are parsed before other connections have their turn: at most some 50 requests."""
FRAMING = 16
"""Bytes beyond the limit of headers that are read for each byte of a chunked body: a chunk of one byte has five, and
may have extensions."""
Phase = Literal["between", "head", "body"]
"""What the client is sending: no request, a request's headers, its body."""


class Flow(FlowControl):
    """Reading goes on when everything read before has been parsed; ``parse`` parses more where some is left."""

    def __init__(self, transport: asyncio.Transport, parse: Callable[[], bool]) -> None:
        super().__init__(transport)
        self._parse = parse

    def resume_reading(self) -> None:
        if self.read_paused and not self._parse():
            super().resume_reading()


class GentleTransport:
    """A transport as requests see it: ``close`` is the connection's, which waits for a client that still sends. Bytes
    written to a client that is gone are dropped."""

    def __init__(self, transport: asyncio.Transport, close: Callable[[], None]) -> None:
        self._transport = transport
        self.is_closing = transport.is_closing
        self.close = close

    def write(self, data: bytes) -> None:
        if not self._transport.is_closing():
            self._transport.write(data)


class Connection(HttpToolsProtocol):
    """Refuses headers that are too long, and reads no more requests than it has begun to answer. ``look`` is called
    once a second, and ends a connection with too slow a client. ``connections`` are all of the server.

    It has more than 20 methods, as a third of them are events of uvicorn's protocol.
    """

    def __init__(
        self,
        connections: Connections,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._all = connections
        self._limits = connections.limits
        self._socket: asyncio.Transport = None  # type: ignore[assignment]  # as in uvicorn, until connection_made
        self._phase: Phase = "between"
        self.since = 0.0
        """When this phase began or the last answer was sent."""
        self._fed = 0
        """Bytes parsed since this phase began."""
        self._body = 0
        """Bytes of them that belonged to a body."""
        self._marked = (0.0, 0, 0)
        """A time, and at that time the bytes that had come and those that still had to go."""
        self._held = b""
        """Bytes that were read and are not parsed yet."""
        self._parses_soon = False
        self._problem: tuple[int, str, str] | None = None
        """Why the request in the parser is refused."""
        self._hidden = False
        """The parser reads a head that the server wrote, not a client."""
        self.lingers = False
        """The last answer was sent; what the client still sends is dropped."""

    @property
    def idle(self) -> bool:
        """Whether there is no request, nor a part of one."""
        answered = self.cycle is None or self.cycle.response_complete
        return answered and self._phase == "between" and not self._held and not self._socket.is_closing()

    @property
    def busy(self) -> bool:
        """Whether a request has come whole and is not answered yet."""
        return self._phase == "between" and not (self.cycle is None or self.cycle.response_complete)

    def is_slow(self, rate: float, now: float, seconds: float) -> bool:
        """Whether its only request has been arriving for ``seconds`` or longer, at less than ``rate`` bytes a
        second."""
        answered = self.cycle is None or self.cycle.response_complete
        own = self._phase == "body" and not self.pipeline and not self.cycle.response_started
        coming = self._phase != "between" and not self.lingers and not self._socket.is_closing()
        waited = now - self.since
        return coming and (answered or own) and waited > seconds and self._fed < rate * waited

    def end(self) -> None:
        """Closes the connection when what was written is sent."""
        self._socket.close()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in uvicorn
        super().connection_made(transport)
        self._socket = transport
        self.transport = cast(asyncio.Transport, GentleTransport(transport, self._close))
        self.flow = Flow(transport, self._parse_held)
        self.since = self._all.now
        self._marked = (self.since, 0, 0)
        self._all.opened(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._all.closed(self)
        self._held = b""
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.lingers:
            return
        if self._held or self.pipeline or len(data) > PIECE:
            self._held += data
            self._parse_on()
        else:
            self._parse(data)

    def shutdown(self) -> None:
        if self.cycle is None or self.cycle.response_complete:
            self._socket.close()
        else:
            super().shutdown()

    def send_400_response(self, msg: str) -> None:
        self.refuse(400, "unparseable", msg)

    def refuse(self, status: int, code: str, message: str, headers: Mapping[str, str] | None = None) -> None:
        """Answers a client with an incomplete request, and closes the connection."""
        cycle, own = self.cycle, self._phase == "body"
        if own and (self.pipeline or cycle.response_started):
            self._socket.close()
            return
        if not own and cycle is not None and not cycle.response_complete:
            cycle.keep_alive = False  # earlier requests are answered first; that closes the connection
            self.lingers = True
            return
        if own:
            cycle.disconnected = True
            cycle.message_event.set()
        path = self.url.split(b"?")[0].decode("latin-1") if self._phase != "between" else "/"
        request_id = uuid.uuid4().hex
        scope = {"path": path, "state": {"request_id": request_id}}
        response = error_response(scope, status, code, message, {**(headers or {}), "X-Request-Id": request_id})
        lines = [*self.server_state.default_headers, *response.raw_headers, (b"connection", b"close")]
        head = b"".join(b"%b: %b\r\n" % line for line in lines)
        self._socket.write(b"%b%b\r\n%b" % (STATUS_LINE[status], head, bytes(response.body)))
        self._linger()

    def look(self, now: float) -> None:
        """Closes the connection where its client has taken too long for what it does."""
        limits, waited = self._limits, now - self.since
        answering = self.cycle is not None and not (self.cycle.response_complete or self.cycle.disconnected)
        if self.lingers:
            if waited > limits.linger_seconds and not answering:
                self._socket.abort()
        elif self._too_slow(now):
            if self._phase == "body" and answering and not self._socket.is_closing():
                self._all.count("slow_body")
                self.refuse(408, "too_slow", f"expected at least {limits.least_rate:.0f} bytes of a body each second")
            else:
                self._socket.abort()
        elif self._phase == "head":
            if self.flow.read_paused:
                self.since = now
            elif waited > limits.header_seconds:
                self._all.count("slow_headers")
                self.refuse(408, "too_slow", f"expected the headers within {limits.header_seconds:g} seconds")
        elif self._phase == "body":
            if self.cycle.response_complete and waited > limits.linger_seconds:
                self._socket.close()
        elif self.idle and waited > (limits.header_seconds if self.cycle is None else limits.keep_alive):
            self._socket.close()

    def _too_slow(self, now: float) -> bool:
        """Whether too little of a body came, or of an answer went, in the whole time since ``_marked``."""
        unsent = self._socket.get_write_buffer_size()
        came = self._fed
        waiting = self.cycle is not None and self.cycle.waiting_for_100_continue
        asked = self._phase == "body" and not self.flow.read_paused and not waiting
        since, came_then, unsent_then = self._marked
        if not asked and not (unsent and unsent_then):
            self._marked = (now, came, unsent)
            return False
        if now - since < self._limits.rate_seconds:
            return False
        self._marked = (now, came, unsent)
        least = self._limits.least_rate * (now - since)
        return (asked and came - came_then < least) or (min(unsent, unsent_then) > 0 and unsent_then - unsent < least)

    def _close(self) -> None:
        if self._phase == "between" or self._socket.is_closing():
            self._socket.close()
        else:
            self._linger()

    def _linger(self) -> None:
        """Closes the connection once the client does, or some seconds later: closing a socket while the client still
        sends would lose the answer."""
        self.lingers, self.since, self._held = True, self._all.now, b""
        with contextlib.suppress(OSError, RuntimeError, NotImplementedError):  # the client is gone, or it is TLS
            self._socket.write_eof()
        self.flow.resume_reading()

    def _parse_held(self) -> bool:
        """Whether bytes are held; then they will be parsed."""
        if self._held and not self._parses_soon:
            self._parses_soon = True
            self.loop.call_soon(self._parse_later)
        return bool(self._held)

    def _parse_later(self) -> None:
        self._parses_soon = False
        self._parse_on()

    def _parse_on(self) -> None:
        """Parses a piece of the held bytes, and as many as are known to belong to a body. The rest follows after other
        connections had their turn; behind requests or a body that wait, after these are done."""
        parsed = False
        while self._held and not self._is_full():
            size = self._body_left()
            if size == 0:
                if parsed:
                    self.flow.pause_reading()
                    self._parse_held()
                    return
                parsed, size = True, PIECE
            piece, self._held = self._held[:size], self._held[size:]
            self._parse(piece)
        if self._held:
            self.flow.pause_reading()
        elif not self._is_full():
            self.flow.resume_reading()

    def _is_full(self) -> bool:
        cycle = self.cycle
        waiting = cycle is not None and not cycle.response_complete and len(cycle.body) > HIGH_WATER_LIMIT
        return waiting or bool(self.pipeline)

    def _body_left(self) -> int:
        """Bytes of the body that are still to come, if its length is known."""
        if self._phase != "body":
            return 0
        declared = next((value for name, value in self.headers if name == b"content-length"), b"0")
        return max(0, int(declared) - self._body)

    def _parse(self, data: bytes) -> None:
        if self.parser is None or self.lingers:
            return
        self._fed += len(data)
        self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as error:
            self._ignore_upgrade(data[error.args[0] :])
        except httptools.HttpParserError:
            self.refuse(*(self._problem or (400, "unparseable", "the request is not valid HTTP")))
        else:
            if self._phase == "head" and self._fed > self._limits.header_bytes:
                self.refuse(*self._too_long())
            elif self._phase == "body" and self._fed > self._limits.header_bytes + (1 + FRAMING) * self._body:
                self.refuse(431, "too_large", "expected less around the body's chunks and behind them")

    def _ignore_upgrade(self, rest: bytes) -> None:
        """Goes on reading HTTP/1.1 where the client offers another protocol, which a server may do. The parser would
        stop there; so a new one is told to expect the body."""
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as in uvicorn
        if self._phase == "body":
            head = b"".join(b"%b: %b\r\n" % line for line in self._framing())
            self._hidden = True
            self.parser.feed_data(b"POST / HTTP/1.1\r\n%b\r\n" % head)
            self._hidden = False
        if rest:
            self._held = rest + self._held
            self._parse_on()

    def _framing(self) -> list[tuple[bytes, bytes]]:
        """The headers that say how long the body is, if there is one."""
        framing = [line for line in self.headers if line[0] in (b"content-length", b"transfer-encoding")]
        return framing if any(value.strip(b"0") for _, value in framing) else []

    def _too_long(self) -> tuple[int, str, str]:
        limit = self._limits.header_bytes
        if len(self.url) > limit // 2:
            return 414, "too_large", f"expected a path and query of at most {limit // 2} bytes, found more"
        return 431, "too_large", f"expected headers of at most {limit} bytes, found more"

    def on_message_begin(self) -> None:
        if not self._hidden:
            super().on_message_begin()
            self._phase, self._fed, self.since = "head", 0, self._all.now

    def on_headers_complete(self) -> None:
        if self._hidden:
            return
        if self._fed > self._limits.header_bytes - PIECE:
            size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
            if size > self._limits.header_bytes:
                self._problem = self._too_long()
                raise ValueError("headers are too long")
        self.scope["state"]["arrived"] = time.monotonic()  # the request may wait for those before it
        super().on_headers_complete()
        self.headers = [*self.headers]  # the request's own are complete; trailers would be added to them
        self._phase, self._fed, self._body = "body", 0, 0
        self._marked = (self._all.now, 0, 0)

    def on_body(self, body: bytes) -> None:
        self._body += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade() and self._framing():
            return  # the parser takes it for a request without a body
        super().on_message_complete()
        self._phase, self.since = "between", self._all.now

    def on_response_complete(self) -> None:
        self.since = self._all.now
        super().on_response_complete()
