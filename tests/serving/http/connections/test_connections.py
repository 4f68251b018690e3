"""The limits of clients' connections: real sockets against an application that does nothing."""

from __future__ import annotations

import contextlib
import dataclasses
import threading

import pytest
from idle_server import GET, HEAD, LIMITS, Server, serving
from support import wait_until


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
    """Even if a byte comes now and then."""
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
    """Even if they began fast."""
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
    """And no errors are logged for answers that were not written yet."""
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
    """Behind a request that takes long, no more than one piece is read."""
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
    """It comes at once, and also to a client that reads it only after sending the body."""
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
