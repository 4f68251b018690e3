"""Bodies over sockets: refused before they are sent, bounded together; and the answers when descriptors or space run
out."""

from __future__ import annotations

import contextlib
import errno
import http.client
import json
import os
import socket
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from clients import Call, client_of
from listening import listening
from support import wait_until

from jpets.errors import Saturated
from serving.app import create_app
from serving.hosted.service import Service
from serving.http.descriptors import FEWEST, most_connections, shortage
from serving.http.settings import ServingSettings
from serving.http.uploads import Room

LARGE = 10 << 30
Ask = Callable[..., tuple[http.client.HTTPResponse, Any]]


@pytest.fixture(scope="module")
def address(service: Service, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, int]]:
    settings = ServingSettings(
        max_body_bytes=1 << 20,
        max_task_bytes=1 << 20,
        max_bodies_bytes=1 << 20,
        upload_folder=tmp_path_factory.mktemp("uploads"),
    )
    app = create_app(service, settings)
    with listening(app) as url:
        host, port = url.removeprefix("http://").split(":")
        yield host, int(port)


@contextlib.contextmanager
def sent(address: tuple[str, int], head: str, body: bytes = b"") -> Iterator[http.client.HTTPResponse]:
    """The answer to a request that is sent only up to here."""
    with socket.create_connection(address, timeout=20) as connection:
        connection.sendall(f"{head}\r\nHost: x\r\n\r\n".encode() + body)
        answer = http.client.HTTPResponse(connection)
        answer.begin()
        yield answer


@pytest.mark.parametrize("expect", ["", "\r\nExpect: 100-continue"])
@pytest.mark.parametrize("route", ["PUT /v1/tasks/topic", "POST /v1/classify", "POST /v2/models/topic/infer"])
def test_what_announces_too_much_is_refused_before_it_is_sent(
    address: tuple[str, int], route: str, expect: str
) -> None:
    with sent(address, f"{route} HTTP/1.1\r\nContent-Length: {LARGE}{expect}") as answer:
        assert answer.status == 413
        assert answer.headers["connection"] == ("close" if expect else None)
        body = json.loads(answer.read())
        assert isinstance(body["error"], str) or body["error"]["code"] == "too_large"


@pytest.mark.parametrize("length", ["-1", "1e3", "99999999999999999999999", "9" * 5000, "10, 11"])
def test_lengths_that_are_none_are_refused(address: tuple[str, int], length: str) -> None:
    with sent(address, f"PUT /v1/tasks/topic HTTP/1.1\r\nContent-Length: {length}") as answer:
        assert (answer.status, json.loads(answer.read())["error"]["code"]) == (400, "unparseable")


def test_who_asks_whether_to_send_is_told_to(address: tuple[str, int]) -> None:
    body = json.dumps({"model": "topic", "input": "hello"}).encode()
    head = f"POST /v1/classify HTTP/1.1\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    with socket.create_connection(address, timeout=20) as connection, connection.makefile("rb") as file:
        connection.sendall(f"{head}\r\nExpect: 100-continue\r\n\r\n".encode())
        assert (file.readline(), file.readline()) == (b"HTTP/1.1 100 Continue\r\n", b"\r\n")
        connection.sendall(body)
        assert file.readline().startswith(b"HTTP/1.1 200 ")


def test_bodies_of_all_connections_are_bounded_together(address: tuple[str, int]) -> None:
    """Three halves do not fit; a small body does."""
    head = "POST /v1/classify HTTP/1.1\r\nContent-Type: application/json\r\nContent-Length: 1000000"
    with contextlib.ExitStack() as stack:
        connections = [stack.enter_context(socket.create_connection(address, timeout=20)) for _ in range(3)]
        for connection in connections:
            connection.sendall(f"{head}\r\n\r\n".encode() + b" " * 600_000)
        answer = None
        while answer is None:
            for connection in connections:
                connection.setblocking(False)
                with contextlib.suppress(BlockingIOError):
                    connection.recv(1, socket.MSG_PEEK)
                    connection.setblocking(True)
                    answer = http.client.HTTPResponse(connection)
                    answer.begin()
        assert (answer.status, answer.headers["retry-after"]) == (503, "1")
        assert json.loads(answer.read())["error"]["code"] == "saturated"
        small = json.dumps({"model": "topic", "input": "hello"})
        client = http.client.HTTPConnection(*address, timeout=20)
        client.request("POST", "/v1/classify", small, {"Content-Type": "application/json"})
        assert client.getresponse().status == 200
        client.close()


SHORT = {
    errno.EMFILE: (503, "saturated"),
    errno.ENFILE: (503, "saturated"),
    errno.ENOSPC: (507, "out_of_space"),
    errno.EDQUOT: (507, "out_of_space"),
}


def test_uploads_on_their_way_are_bounded_together(
    service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of four times the largest file, whose checks come when all of it is there."""
    monkeypatch.setattr("serving.app.LEAST_UPLOADED", 0)
    app = create_app(service, ServingSettings(max_task_bytes=1 << 20, upload_folder=tmp_path))
    put = "PUT /v1/tasks/topic HTTP/1.1\r\nContent-Length: "
    with listening(app) as url, contextlib.ExitStack() as open_ones:
        host, port = url.removeprefix("http://").split(":")
        address, room = (host, int(port)), app.state.context.room
        for _ in range(4):
            connection = open_ones.enter_context(socket.create_connection(address, timeout=20))
            connection.sendall(f"{put}1000000\r\nHost: x\r\n\r\n".encode() + bytes(999_999))
        wait_until(lambda: room._bytes == 4 * 999_999)
        with sent(address, f"{put}1000000", bytes(1_000_000)) as answer:
            assert answer.status == 503 and answer.headers["retry-after"]
            assert b"too many files are on their way" in answer.read()
        open_ones.close()
        wait_until(lambda: not room._bytes)
        with sent(address, f"{put}4", b"none") as answer:
            assert answer.status == 422, "there is room again"


def test_one_upload_may_take_all_room() -> None:
    room = Room(10, files=2)
    with room.upload() as first, room.upload() as second:
        first(100)
        first(100)
        with pytest.raises(Saturated):
            second(1)
        with pytest.raises(Saturated), room.upload():
            pass
    several = Room(10, files=8)
    with contextlib.ExitStack() as stack:
        for tenant in ("one", "one", "another"):
            stack.enter_context(several.upload(tenant))
        with pytest.raises(Saturated):
            stack.enter_context(several.upload("one"))
    with several.upload("one"), several.upload("one"):
        pass
    with room.upload() as alone:
        alone(11)


@pytest.mark.parametrize("number", SHORT)
@pytest.mark.parametrize(
    "place", ["serving.protocols.tasks.tempfile.NamedTemporaryFile", "serving.hosted.changes.map_file"]
)
def test_uploads_that_lack_descriptors_or_space_say_so(
    call: Call, upload: Callable[..., bytes], monkeypatch: pytest.MonkeyPatch, number: int, place: str
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number), "/secret/place")

    monkeypatch.setattr(place, fail)
    answer = call("PUT", "/v1/tasks/topic", content=upload("topic"))
    assert (answer.status_code, answer.json()["error"]["code"]) == SHORT[number]
    assert "secret" not in answer.text
    assert ("retry-after" in answer.headers) == (answer.status_code == 503)


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENOSPC])
def test_reads_that_lack_descriptors_say_so(
    service: Service, settings: ServingSettings, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """On any route, not only for uploads."""

    def fail(*_: object, **__: object) -> None:
        try:
            raise OSError(number, os.strerror(number))
        except OSError as error:
            raise RuntimeError("something failed") from error

    monkeypatch.setattr(service.repository, "list", fail)
    assert client_of(service, settings)("GET", "/v1/tasks").status_code == SHORT[number][0]


def test_shortages_are_told_from_other_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    cannot_open = sqlite3.OperationalError("unable to open database file")
    cannot_open.sqlite_errorcode = sqlite3.SQLITE_CANTOPEN
    for error in (OSError(errno.EACCES, "no"), ValueError("no"), cannot_open):
        assert shortage(error) is None

    def none_left(*_: object) -> int:
        raise OSError(errno.EMFILE, "none left")

    monkeypatch.setattr("serving.http.descriptors.os.open", none_left)
    found = shortage(cannot_open)
    assert found is not None and found.status == 503


@pytest.mark.parametrize(
    ("limit", "wanted", "fewest", "most"),
    [(1 << 16, 1024, 1024, 1024), (256, 1024, FEWEST, 192), (16, 1024, FEWEST, 8)],
)
def test_connections_leave_descriptors_to_files(
    monkeypatch: pytest.MonkeyPatch, limit: int, wanted: int, fewest: int, most: int
) -> None:
    monkeypatch.setattr("serving.http.descriptors.resource.getrlimit", lambda _: (limit, limit))
    monkeypatch.setattr("serving.http.descriptors._open_now", lambda: 10)
    assert fewest <= most_connections(wanted) <= most
