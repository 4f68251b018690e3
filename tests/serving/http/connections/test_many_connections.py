"""Which connections make room if there are too many."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator

import pytest
from idle_server import GET, HEAD, PATIENT, Client, Server, serving
from support import wait_until

from serving.http.connections import SPARE


@pytest.fixture
def crowded() -> Iterator[Server]:
    """Room for eight connections, each with a request that is not answered yet."""
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
    """A request that has come whole does not."""
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
    """Also a connection that never sent anything."""
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
