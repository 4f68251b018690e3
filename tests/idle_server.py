"""An application that does nothing behind real sockets, and a client that writes every byte itself."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import http.client
import json
import socket
import threading
from collections.abc import Iterator
from typing import Any, Self

from listening import listening
from starlette.types import Receive, Scope, Send

from serving.http.connections import Connections
from serving.http.settings import ConnectionLimits

LIMITS = ConnectionLimits(
    most=8,
    keep_alive=1,
    header_bytes=1 << 14,
    header_seconds=0.2,
    least_rate=10_000.0,
    rate_seconds=0.2,
    linger_seconds=0.3,
    look_seconds=0.02,
)
PATIENT = dataclasses.replace(
    LIMITS, most=100, keep_alive=30, header_seconds=30.0, rate_seconds=30.0, linger_seconds=30.0
)
Answer = tuple[int, Any, dict[str, str]]
"""Status, JSON and headers."""


class Application:
    """Answers with the number of bytes of the body, the path and the headers; under ``/slow`` only when it is told to,
    under ``/deaf`` without reading."""

    def __init__(self) -> None:
        self.may_answer = threading.Event()
        self.running = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.running += 1
        try:
            await self._answer(scope, receive, send)
        finally:
            self.running -= 1

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        size, more = 0, scope["path"] != "/deaf"
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            size, more = size + len(message.get("body", b"")), message.get("more_body", False)
        if scope["path"] == "/slow":
            await asyncio.to_thread(self.may_answer.wait, 20)
        body = json.dumps({"size": size, "path": scope["path"], "headers": len(scope["headers"])}).encode()
        if scope["path"] == "/large":
            body = bytes(32 << 20)
        headers = [(b"content-length", str(len(body)).encode())]
        await send(
            {"type": "http.response.start", "status": 413 if scope["path"] == "/deaf" else 200, "headers": headers}
        )
        await send({"type": "http.response.body", "body": body})


@dataclasses.dataclass
class Server:
    app: Application
    connections: Connections
    address: tuple[str, int]

    def connect(self) -> Client:
        return Client(socket.create_connection(self.address, timeout=10))

    def ask(self, data: bytes, count: int = 1) -> list[Answer]:
        """This many answers to bytes that are sent on one connection."""
        with self.connect() as client:
            client.send(data)
            return [client.answer() for _ in range(count)]


class Client:
    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self._file = connection.makefile("rb")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.close()
        self.socket.close()

    def send(self, data: bytes) -> None:
        """Sends as much as the server accepts."""
        with contextlib.suppress(ConnectionError):
            self.socket.sendall(data)

    def answer(self) -> Answer:
        status = int(self._file.readline().split()[1])
        headers = http.client.parse_headers(self._file)
        body = json.loads(self._file.read(int(headers["content-length"])))
        return status, body, {name.lower(): value for name, value in headers.items()}

    def rest(self) -> bytes:
        """The bytes that come until the server closes the connection."""
        found = b""
        with contextlib.suppress(ConnectionError):
            while part := self._file.read1():
                found += part
        return found


@contextlib.contextmanager
def serving(limits: ConnectionLimits) -> Iterator[Server]:
    app, connections = Application(), Connections(limits)
    with listening(app, http=connections.protocol, timeout_keep_alive=limits.keep_alive) as url:
        host, port = url.removeprefix("http://").split(":")
        try:
            yield Server(app, connections, (host, int(port)))
        finally:
            app.may_answer.set()


HEAD = b"POST /v1/x HTTP/1.1\r\nHost: x\r\n"
GET = b"GET /%b HTTP/1.1\r\n\r\n"
