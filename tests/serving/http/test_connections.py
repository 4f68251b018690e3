"""What clients may take of the server by connections alone: real sockets against an application that does nothing."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Self

import pytest
from listening import listening
from starlette.types import Receive, Scope, Send

from serving.http.connections import SPARE, Connections
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
PATIENT = dataclasses.replace(LIMITS, most=100, keep_alive=30, header_seconds=30.0, rate_seconds=30.0)


Answer = tuple[int, Any, dict[str, str]]
"""Status, JSON and headers."""


class Application:
    """Answers how many bytes the body had, and the path and the headers; under ``/slow`` when it is told to, under
    ``/deaf`` without reading."""

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
        """So many answers to what is sent on one connection."""
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
        """As far as the server takes it."""
        with contextlib.suppress(ConnectionError):
            self.socket.sendall(data)

    def answer(self) -> Answer:
        status = int(self._file.readline().split()[1])
        headers = http.client.parse_headers(self._file)
        body = json.loads(self._file.read(int(headers["content-length"])))
        return status, body, {name.lower(): value for name, value in headers.items()}

    def rest(self) -> bytes:
        """What comes until the server closes the connection."""
        found = b""
        with contextlib.suppress(ConnectionError):
            while part := self._file.read1():
                found += part
        return found


def wait_until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 10
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.005)


@contextlib.contextmanager
def serving(limits: ConnectionLimits) -> Iterator[Server]:
    app, connections = Application(), Connections(limits)
    with listening(app, http=connections.protocol, timeout_keep_alive=limits.keep_alive) as url:
        host, port = url.removeprefix("http://").split(":")
        try:
            yield Server(app, connections, (host, int(port)))
        finally:
            app.may_answer.set()


@pytest.fixture(scope="module")
def strict() -> Iterator[Server]:
    """With limits of a fraction of a second."""
    with serving(LIMITS) as server:
        yield server


@pytest.fixture(scope="module")
def patient() -> Iterator[Server]:
    """With limits that no test reaches by time."""
    with serving(PATIENT) as server:
        yield server


HEAD = b"POST /v1/x HTTP/1.1\r\nHost: x\r\n"
GET = b"GET /%b HTTP/1.1\r\n\r\n"


@pytest.mark.parametrize(
    ("start", "status"),
    [
        (b"GET /" + b"a" * (1 << 20), 414),
        (b"GET /v2/x?" + b"a" * (1 << 20), 414),
        (b"GET / HTTP/1.1\r\nX-Long: " + b"a" * (1 << 20), 431),
        (b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * (1 << 17), 431),
        (b"GET / HTTP/1.1\r\n" + b"A" * (1 << 20), 431),
        (b"GET / HTTP/1.1\r\nX-Long: " + b"a" * (1 << 20) + b"\r\n\r\n", 431),
        (b"GET / HTTP/1.1\r\nX-Long: " + b"a" * ((1 << 14) - 10) + b"\r\n\r\n", 431),
        (b"GET / HTTP/1.1\r\nX: " + b" \t" * (1 << 19), 431),
    ],
)
def test_long_headers_are_refused_and_the_connection_closed(patient: Server, start: bytes, status: int) -> None:
    with patient.connect() as client:
        client.send(start)
        found, body, headers = client.answer()
        assert (found, headers["connection"]) == (status, "close")
        assert isinstance(body["error"], str if b"/v2" in start[:10] else dict)
        assert client.rest() == b""


@pytest.mark.parametrize("pieces", [1, 7])
def test_headers_up_to_the_limit_are_read(patient: Server, pieces: int) -> None:
    start = b"GET /" + b"a" * 7000 + b" HTTP/1.1\r\nX-Long: " + b"a" * 9000 + b"\r\n\r\n"
    size = -(-len(start) // pieces)
    with patient.connect() as client:
        for at in range(0, len(start), size):
            client.send(start[at : at + size])
        assert client.answer()[0] == 200


@pytest.mark.parametrize("data", [b"\x16\x03\x01\x02", b"NONSENSE", b"GET / HTTP/1.1\r\nContent-Length: " + b"9" * 400])
def test_what_is_no_http_is_told_so_in_json(patient: Server, data: bytes) -> None:
    ((status, body, headers),) = patient.ask(data + b"\r\n\r\n")
    assert (status, body["error"]["code"]) == (400, "unparseable")
    assert headers["x-request-id"] == body["error"]["request_id"] != ""


@pytest.mark.parametrize("start", [b"", b"GET /", HEAD, HEAD + b"X-Slow: "])
def test_headers_that_do_not_come_are_not_waited_for(strict: Server, start: bytes) -> None:
    """Also where a byte comes now and then."""
    with strict.connect() as client:
        client.send(start)
        client.socket.settimeout(0.05)
        for _ in range(200):
            with contextlib.suppress(TimeoutError):
                received = client.socket.recv(1 << 16)
                break
            client.send(b"a" if start else b"")
        assert received.startswith(b"HTTP/1.1 408") == bool(start)


@pytest.mark.parametrize("framing", [b"Content-Length: 1000000\r\n\r\n", b"Transfer-Encoding: chunked\r\n\r\n"])
@pytest.mark.parametrize("sent", [0, 100, 100_000])
def test_bodies_that_come_too_slowly_are_not_waited_for(strict: Server, framing: bytes, sent: int) -> None:
    """However fast they began."""
    with strict.connect() as client:
        size = b"%x\r\n" % sent if b"chunked" in framing and sent else b""
        client.send(HEAD + framing + size + b"a" * sent)
        status, body, _ = client.answer()
        assert (status, body["error"]["code"]) == (408, "too_slow")
        assert client.rest() == b""
    wait_until(lambda: not strict.app.running)


def test_a_body_that_comes_slowly_but_steadily_is_read() -> None:
    limits = dataclasses.replace(LIMITS, rate_seconds=0.4, least_rate=10.0)
    with serving(limits) as server, server.connect() as client:
        client.send(HEAD + b"Content-Length: 30000\r\n\r\n")
        for _ in range(30):
            threading.Event().wait(0.03)
            client.send(b"a" * 1000)
        assert client.answer()[1]["size"] == 30_000


@pytest.mark.parametrize("count", [1, 3])
def test_answers_that_nobody_takes_are_not_kept(strict: Server, caplog: pytest.LogCaptureFixture, count: int) -> None:
    """Nor are errors logged for those that were not written yet."""
    with strict.connect() as client:
        client.send(GET % b"large" * count)
        wait_until(lambda: len(strict.connections) > 0)
        wait_until(lambda: not len(strict.connections) and not strict.app.running)
    assert not [record for record in caplog.records if record.name.startswith("uvicorn")]


def test_idle_connections_are_kept_as_long_as_asked(strict: Server, patient: Server) -> None:
    with strict.connect() as short, patient.connect() as long:
        for client in (short, long):
            client.send(GET % b"")
            assert client.answer()[0] == 200
        assert short.rest() == b""
        long.send(GET % b"")
        assert long.answer()[0] == 200


@pytest.mark.parametrize(
    "endless",
    [b"1;" + b"x=y;" * (1 << 18), b"0\r\n" + b"A: b\r\n" * (1 << 17), b"0" * (1 << 20)],
    ids=["extension", "trailer", "size"],
)
def test_what_is_around_a_body_is_bounded(patient: Server, endless: bytes) -> None:
    with patient.connect() as client:
        client.send(HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + endless)
        assert client.answer()[0] in (400, 431)
        assert client.rest() == b""


def test_small_chunks_are_read_and_trailers_are_no_headers(patient: Server) -> None:
    body = b"1;n=v\r\na\r\n" * 30_000 + b"0\r\nX-Late: 1\r\n\r\n"
    ((status, found, _),) = patient.ask(HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + body)
    assert (status, found) == (200, {"size": 30_000, "path": "/v1/x", "headers": 2})


def test_many_requests_at_once_are_answered_in_order_and_few_are_read_at_a_time(patient: Server) -> None:
    """Behind one that takes long, only so much is read as a piece holds."""
    patient.app.may_answer.clear()
    paths = [b"%d" % number for number in range(5000)]
    with patient.connect() as client:
        sender = threading.Thread(target=client.send, args=(b"".join(GET % path for path in (b"slow", *paths)),))
        sender.start()
        wait_until(lambda: patient.app.running > 0)
        (connection,) = patient.connections
        wait_until(lambda: bool(connection.flow.read_paused))
        assert 0 < len(connection.pipeline) < 300
        patient.app.may_answer.set()
        assert client.answer()[1]["path"] == "/slow"
        assert [client.answer()[1]["path"] for _ in paths] == [f"/{path.decode()}" for path in paths]
        sender.join()


@pytest.mark.parametrize("size", [0, 5, 5000, 300_000, 3_000_000])
@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize(
    "offer", [b"", b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAA\r\n"]
)
def test_bodies_come_whole(patient: Server, size: int, chunked: bool, offer: bytes) -> None:
    """Also behind an offer of another protocol: Java's client offers HTTP/2, and does not send its body again."""
    body, data = b"a" * size, HEAD + offer
    if chunked:
        data += b"Transfer-Encoding: chunked\r\n\r\n" + (b"%x\r\n%b\r\n" % (size, body) if size else b"") + b"0\r\n\r\n"
    else:
        data += b"Content-Length: %d\r\n\r\n%b" % (size, body)
    found = patient.ask(data + data + GET % b"after", 3)
    assert [(each[1]["size"], each[1]["path"]) for each in found] == [(size, "/v1/x"), (size, "/v1/x"), (0, "/after")]


@pytest.mark.parametrize("size", [100_000, 30_000_000])
def test_an_early_answer_comes_while_the_body_is_still_sent(patient: Server, size: int) -> None:
    """At once, and to a client that looks for it only behind the body."""
    head = b"POST /deaf HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % size
    with patient.connect() as client:
        client.send(head)
        assert client.answer()[0] == 413
        client.send(bytes(size) + GET % b"next")
        assert client.answer()[1]["path"] == "/next"
    assert patient.ask(head + bytes(size))[0][0] == 413


def test_what_is_sent_after_an_early_answer_is_not_read_for_ever(strict: Server) -> None:
    with strict.connect() as client:
        client.send(b"POST /deaf HTTP/1.1\r\nContent-Length: 1000000000000\r\n\r\n")
        assert client.answer()[0] == 413
        with pytest.raises(ConnectionError):
            while True:
                client.socket.sendall(bytes(1 << 14))


def test_a_bad_request_does_not_cut_off_the_answer_before_it(patient: Server) -> None:
    patient.app.may_answer.clear()
    with patient.connect() as client:
        client.send(GET % b"slow" + b"\x16\x03\x01")
        wait_until(lambda: patient.app.running > 0)
        patient.app.may_answer.set()
        assert client.answer()[1]["path"] == "/slow"
        assert client.rest() == b""


@pytest.fixture
def crowded() -> Iterator[Server]:
    """Room for eight connections, which all have a request that is not answered yet."""
    with serving(dataclasses.replace(PATIENT, most=8)) as server, contextlib.ExitStack() as stack:
        for _ in range(8):
            stack.enter_context(server.connect()).send(GET % b"slow")
        wait_until(lambda: server.app.running == 8)
        yield server


def test_beyond_the_limit_of_connections_requests_are_refused_and_health_is_not(crowded: Server) -> None:
    ((status, body, headers),) = crowded.ask(HEAD + b"Content-Length: 3\r\n\r\nabc")
    assert (status, body["error"]["code"], headers["retry-after"]) == (503, "saturated", "1")
    ((status, body, _),) = crowded.ask(GET % b"v2/x")
    assert status == 503 and isinstance(body["error"], str)
    assert crowded.ask(GET % b"v2/health/live")[0][0] == 200


def test_far_beyond_the_limit_only_the_newest_connections_are_read(crowded: Server) -> None:
    with contextlib.ExitStack() as stack:
        oldest, second, *_ = [stack.enter_context(crowded.connect()) for _ in range(SPARE)]
        wait_until(lambda: len(crowded.connections) == 8 + SPARE)
        for refused in (oldest, second):
            newest = stack.enter_context(crowded.connect())
            status, _, headers = refused.answer()
            assert (status, headers["retry-after"]) == (503, "1")
            assert refused.rest() == b""
            newest.send(GET % b"v2/health/live")
            assert newest.answer()[0] == 200


@pytest.mark.parametrize("start", [b"", b"GET /", HEAD + b"Content-Length: 1000000\r\n\r\nabc"])
def test_requests_that_come_slowly_make_room(monkeypatch: pytest.MonkeyPatch, start: bytes) -> None:
    """No request that has come whole does."""
    monkeypatch.setattr("serving.http.connections.PATIENCE", -1.0)
    monkeypatch.setattr("serving.http.connections.IDLE_SECONDS", -1.0)
    monkeypatch.setattr("serving.http.connections.FAST", 1e9)
    monkeypatch.setattr("serving.http.connections.LOOK_AGAIN", -1.0)
    with serving(dataclasses.replace(PATIENT, most=2)) as server, server.connect() as whole, server.connect() as slow:
        whole.send(GET % b"slow")
        wait_until(lambda: server.app.running == 1)
        slow.send(start)
        wait_until(
            lambda: (
                len(server.connections) == 2
                and (not start or any(each.is_slow(1e9, time.monotonic(), -1.0) for each in server.connections))
            )
        )
        assert server.ask(GET % b"new")[0][0] == 200
        assert slow.rest().startswith(b"HTTP/1.1 503 " if start else b"")
        server.app.may_answer.set()
        assert whole.answer()[1]["path"] == "/slow"


def test_idle_connections_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that never sent anything, too."""
    monkeypatch.setattr("serving.http.connections.IDLE_SECONDS", -1.0)
    monkeypatch.setattr("serving.http.connections.LOOK_AGAIN", -1.0)
    with serving(dataclasses.replace(PATIENT, most=2)) as server, contextlib.ExitStack() as stack:

        def connect(*, asks: bool) -> Client:
            client = stack.enter_context(server.connect())
            if asks:
                client.send(GET % b"")
                assert client.answer()[0] == 200
            return client

        used, silent = connect(asks=True), connect(asks=False)
        wait_until(lambda: len(server.connections) == 2)
        for oldest in (used, silent):
            connect(asks=True)
            assert oldest.rest() == b""
        assert len(server.connections) == 2


def test_of_a_flood_of_slow_clients_nothing_is_left(strict: Server) -> None:
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(strict.connect()) for _ in range(200)]
        for number, client in enumerate(clients):
            client.send((HEAD, b"", HEAD + b"Content-Length: 9\r\n\r\n")[number % 3])
        for client in clients:
            client.rest()
        wait_until(lambda: not len(strict.connections))
        assert strict.ask(GET % b"")[0][0] == 200
