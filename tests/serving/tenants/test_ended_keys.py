"""What is open when its key ends, ends with it: streams over gRPC, bodies and downloads over HTTP."""

from __future__ import annotations

import contextlib
import datetime
import io
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future
from typing import Any, NamedTuple
from unittest.mock import Mock

import grpc
import httpx
import pytest
from clients import Call
from fastapi import FastAPI
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from listening import listening as listening_http
from listening_grpc import listening
from remote import InferRequest, streaming
from support import wait_until

from checkpoints.access import Access
from jpets.access import Key
from jpets.engine.engine import Engine
from serving.grpc import keys
from serving.hosted.service import Service
from serving.http.settings import ConnectionLimits
from serving.protocols import tasks
from serving.tenants import keyring as rings
from serving.tenants.keyring import Keyring

Metadata = tuple[tuple[str, str], ...]
Open = Callable[[grpc.Channel, Metadata, threading.Event], Any]
"""Opens a stream that is asked once, and again when the event is set."""
TEXT = {"name": "text", "shape": [1], "datatype": "BYTES", "contents": {"bytes_contents": [b"hello"]}}


def watch(channel: grpc.Channel, metadata: Metadata, again: threading.Event) -> Any:
    stub = health_pb2_grpc.HealthStub(channel)
    return stub.Watch(health_pb2.HealthCheckRequest(), metadata=metadata, timeout=60)


def reflect(channel: grpc.Channel, metadata: Metadata, again: threading.Event) -> Any:
    stub = reflection_pb2_grpc.ServerReflectionStub(channel)
    asked = reflection_pb2.ServerReflectionRequest(list_services="")
    return stub.ServerReflectionInfo(twice(asked, again), metadata=metadata, timeout=60)


def infer(channel: grpc.Channel, metadata: Metadata, again: threading.Event) -> Any:
    asked = twice(InferRequest(model_name="topic", inputs=[TEXT]), again)
    return streaming(channel)(asked, metadata=metadata, timeout=60)


def twice(asked: Any, again: threading.Event) -> Iterator[Any]:
    yield asked
    again.wait(60)
    yield asked


STREAMS = [watch, reflect, infer]


@pytest.fixture
def channel(app: FastAPI, monkeypatch: pytest.MonkeyPatch) -> Iterator[grpc.Channel]:
    monkeypatch.setattr(keys, "LOOK", 0.05)
    with listening(app) as address, grpc.insecure_channel(address) as channel:
        yield channel


@pytest.fixture
def again() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


@pytest.fixture
def made(access: Access, keyring: Keyring) -> Callable[..., tuple[Key, Metadata]]:
    """A new key, and how calls send it."""

    def make(*scopes: Any) -> tuple[Key, Metadata]:
        key, text = access.create("acme", scopes or ("infer", "manage"), days=1)
        keyring.refresh()
        return key, (("authorization", f"Bearer {text}"),)

    return make


@pytest.fixture(params=["revoked", "expired"])
def end(
    request: pytest.FixtureRequest, access: Access, keyring: Keyring, monkeypatch: pytest.MonkeyPatch
) -> Callable[[Key], None]:
    """Ends a key."""

    def revoke(key: Key) -> None:
        access.revoke(key.id)
        keyring.refresh()

    def expire(key: Key) -> None:
        then = datetime.datetime.fromisoformat(str(key.expires)).timestamp()
        monkeypatch.setattr(rings, "time", Mock(time=lambda: then))

    return revoke if request.param == "revoked" else expire


def check_ended(stream: Any) -> None:
    with pytest.raises(grpc.RpcError) as ended:
        next(stream)
    assert ended.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert ended.value.details()


@pytest.mark.parametrize("opened", STREAMS)
def test_a_stream_ends_with_its_key(
    channel: grpc.Channel, made: Any, end: Callable[[Key], None], again: threading.Event, opened: Open
) -> None:
    key, metadata = made()
    stream = opened(channel, metadata, again)
    next(stream)
    end(key)
    check_ended(stream)


@pytest.mark.parametrize("opened", STREAMS)
def test_a_stream_without_a_key_ends_when_the_server_has_its_first(
    channel: grpc.Channel, made: Any, again: threading.Event, opened: Open
) -> None:
    stream = opened(channel, (), again)
    next(stream)
    made()
    check_ended(stream)


@pytest.mark.parametrize("opened", [reflect, infer])
def test_streams_of_other_keys_go_on(
    channel: grpc.Channel, made: Any, access: Access, keyring: Keyring, again: threading.Event, opened: Open
) -> None:
    key, metadata = made()
    stream, other = watch(channel, metadata, again), opened(channel, made()[1], again)
    first = next(other)
    next(stream)
    access.revoke(key.id)
    keyring.refresh()
    check_ended(stream)
    again.set()
    assert next(other) == first and not list(other)


def test_a_stream_does_not_wait_for_the_answers_of_a_key_that_ended(
    channel: grpc.Channel,
    made: Any,
    end: Callable[[Key], None],
    again: threading.Event,
    engine: Engine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waiting: list[Future[Any]] = []

    def never(queries: Any, **_: Any) -> list[Future[Any]]:
        waiting.extend(Future() for _ in queries)
        return waiting

    monkeypatch.setattr(engine, "submit", never)
    key, metadata = made()
    stream = infer(channel, metadata, again)
    wait_until(lambda: bool(waiting))
    end(key)
    check_ended(stream)
    wait_until(waiting[0].cancelled)


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/classify"),
        ("POST", "/v2/models/topic/infer"),
        ("POST", "/v1/tasks/topic/rollback"),
        ("PUT", "/v1/tasks/late"),
    ],
)
def test_a_body_is_not_read_on_when_its_key_ended(
    bare: Call, made: Any, end: Callable[[Key], None], method: str, path: str
) -> None:
    key, ((_, authorization),) = made()

    async def body() -> AsyncIterator[bytes]:
        yield b'{"model": "topic", '
        end(key)
        yield b'"input": "hello"'
        pytest.fail("the body was read on")

    refused = bare(method, path, content=body(), headers={"Authorization": authorization})
    assert refused.status_code == 401 and refused.headers["www-authenticate"] == "Bearer"
    assert path.startswith("/v2") or refused.json()["error"]["code"] == "unauthorized"


def test_a_download_ends_with_its_key(
    app: FastAPI, service: Service, made: Any, end: Callable[[Key], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    key, ((_, authorization),) = made()
    content = bytes(5000)

    class Ending(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            if self.tell() == 2000:
                end(key)
            return super().read(size)

    monkeypatch.setattr(tasks, "PIECE", 1000)
    monkeypatch.setattr(service.repository, "file", lambda stored: Ending(content))
    headers = {"Authorization": authorization}
    got = b""
    with listening_http(app) as url, httpx.stream("GET", f"{url}/v1/tasks/topic/file", headers=headers) as answer:
        assert answer.status_code == 200
        with pytest.raises(httpx.RemoteProtocolError, match="complete"):
            for piece in answer.iter_raw():
                got += piece
    assert got == content[:2000]


class Unread(NamedTuple):
    """A stream that a server is answering, whose client reads nothing: ``told`` are the statuses that it counted."""

    address: str
    key: Key
    stream: Any
    told: list[str]


@pytest.fixture
def unread(app: FastAPI, made: Any, again: threading.Event, monkeypatch: pytest.MonkeyPatch) -> Iterator[Unread]:
    """On a server with a place for one call; the answer is more than the client's window takes."""
    monkeypatch.setattr(keys, "LOOK", 0.05)
    told: list[str] = []
    monkeypatch.setattr(app.state.context.metrics, "remote_call", lambda method, code, seconds: told.append(code))
    key, metadata = made()
    texts = {**TEXT, "shape": [1000], "contents": {"bytes_contents": [b"hello"] * 1000}}
    window = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1 << 16))
    with (
        listening(app, limits=ConnectionLimits(most=1)) as address,
        grpc.insecure_channel(address, window) as channel,
    ):
        asked = twice(InferRequest(model_name="vectors", inputs=[texts]), again)
        stream = streaming(channel)(asked, metadata=metadata)
        wait_until(lambda: told == ["OK"])
        yield Unread(address, key, stream, told)


def has_place(address: str) -> bool:
    """Whether a server takes another connection and call."""
    with grpc.insecure_channel(address) as channel, contextlib.suppress(grpc.RpcError):
        health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=5)
        return True
    return False


def test_a_client_that_reads_nothing_does_not_keep_its_call(
    unread: Unread, end: Callable[[Key], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its status waits behind the answers that it leaves unread."""
    monkeypatch.setattr(keys, "UNREAD", 0.2)
    assert not has_place(unread.address)
    end(unread.key)
    wait_until(lambda: has_place(unread.address))
    assert unread.stream.code() is grpc.StatusCode.UNAVAILABLE


def test_a_client_that_reads_late_hears_that_its_key_ended(unread: Unread, end: Callable[[Key], None]) -> None:
    end(unread.key)
    wait_until(lambda: unread.told == ["OK", "UNAUTHENTICATED"])
    assert next(unread.stream).infer_response.outputs
    check_ended(unread.stream)
