"""A deadline is counted from when a request's head came: the arrival and the reading of its body take of it."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc
import pytest
from clients import Call, client_of, client_to
from listening import listening
from listening_grpc import listening as listening_grpc
from starlette.types import Receive, Scope, Send
from support import wait_until

from jpets.engine.engine import Engine
from jpets.errors import DeadlineExceeded
from serving.app import create_app
from serving.grpc.messages import SERVICE, message
from serving.hosted.service import Service
from serving.http.settings import ServingSettings
from serving.requests.bodies import HEADER_LENGTH
from serving.requests.context import Context
from serving.requests.deadlines import in_time

CLASSIFY, INFER = "/v1/classify", "/v2/models/topic/infer"
BODY = json.dumps({"model": "topic", "input": "hello"}).encode()
SOON = {"x-request-timeout": "0.05"}
PAUSE = 0.3
"""Longer than a deadline that has passed, and shorter than one that has not."""
EARLY, LATER = 50_000, 30_000_000
"""Microseconds."""


def check_late(answer: Any, part: str = "deadline passed") -> None:
    error = answer.json()["error"]
    assert answer.status_code == 504, answer.text
    if isinstance(error, dict):
        assert error["code"] == "deadline_exceeded"
        error = error["message"]
    assert part in error


async def parted(*parts: bytes, pause: float = PAUSE) -> AsyncIterator[bytes]:
    """A body that comes slowly."""
    for at, part in enumerate(parts):
        if at:
            await asyncio.sleep(pause)
        yield part


@pytest.fixture
def submitted(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What reaches the engine."""
    seen: list[Any] = []
    submit = engine.submit

    def noted(queries: Any, **how: Any) -> Any:
        seen.extend(queries)
        return submit(queries, **how)

    monkeypatch.setattr(engine, "submit", noted)
    return seen


@pytest.mark.parametrize("path", [CLASSIFY, INFER, "/hf/topic", "/v1/tasks/topic/rollback"])
def test_a_body_that_does_not_come_in_time_is_not_waited_for(call: Call, path: str) -> None:
    check_late(call("POST", path, content=parted(BODY[:9], BODY[9:], pause=60), headers=SOON), "the body had come")


def test_without_a_header_the_servers_deadline_holds(service: Service, settings: ServingSettings) -> None:
    call = client_of(service, dataclasses.replace(settings, request_timeout=0.05))
    check_late(call("POST", CLASSIFY, content=parted(BODY[:9], BODY[9:], pause=60)), "the body had come")


def oip(timeout: int, binary: bool) -> tuple[bytes, bytes, dict[str, str]]:
    """The two parts of a body, and its headers."""
    tensor: dict[str, Any] = {"name": "text", "shape": [1], "datatype": "BYTES", "data": ["hello"]}
    behind = (5).to_bytes(4, "little") + b"hello"
    if binary:
        del tensor["data"]
        tensor["parameters"] = {"binary_data_size": len(behind)}
    head = json.dumps({"inputs": [tensor], "parameters": {"timeout": timeout}}).encode()
    return (head, behind, {HEADER_LENGTH: str(len(head))}) if binary else (head[:9], head[9:], {})


@pytest.mark.parametrize("binary", [False, True])
def test_a_deadline_in_the_body_is_counted_from_the_head(
    service: Service, settings: ServingSettings, submitted: list[Any], binary: bool
) -> None:
    """It may be later than the server's own, so that one does not end the reading."""
    call = client_of(service, dataclasses.replace(settings, request_timeout=0.05))
    *parts, headers = oip(EARLY, binary)
    check_late(call("POST", INFER, content=parted(*parts), headers=headers))
    assert not submitted
    *parts, headers = oip(LATER, binary)
    assert call("POST", INFER, content=parted(*parts), headers=headers).status_code == 200
    assert len(submitted) == 1


@pytest.fixture
def busy(service: Service, settings: ServingSettings) -> Iterator[Call]:
    """A server whose threads for large work have some already."""
    app = create_app(service, settings)
    context: Context = app.state.context
    free, taken = threading.Event(), threading.Semaphore(0)

    def work() -> None:
        taken.release()
        free.wait(60)

    pool = context.aside._pool
    running = [pool.submit(work) for _ in range(pool._max_workers)]
    for _ in running:
        assert taken.acquire(timeout=20)
    yield client_to(app)
    free.set()
    pool.shutdown()


@pytest.mark.parametrize("path", [CLASSIFY, INFER])
def test_a_large_body_is_not_read_for_longer_than_its_deadline(busy: Call, path: str) -> None:
    check_late(busy("POST", path, content=BODY + b" " * 100_000, headers=SOON), "and was read")


def test_large_tensors_are_not_read_for_longer_than_their_deadline(busy: Call) -> None:
    tensor = {"name": "input_ids", "shape": [32, 60], "datatype": "INT64", "data": [2] * 32 * 60}
    body = json.dumps({"inputs": [tensor], "parameters": {"timeout": EARLY}}, separators=(",", ":"))
    check_late(busy("POST", INFER, content=body))


@pytest.mark.parametrize(("timeout", "code"), [(EARLY, grpc.StatusCode.DEADLINE_EXCEEDED), (LATER, None)])
def test_a_message_that_comes_late_takes_of_its_deadline(
    service: Service, settings: ServingSettings, submitted: list[Any], timeout: int, code: grpc.StatusCode | None
) -> None:
    request = message("ModelInferRequest")
    text = {"name": "text", "shape": [1], "datatype": "BYTES", "contents": {"bytes_contents": [b"hello"]}}

    def late() -> Iterator[Any]:
        time.sleep(PAUSE)
        yield request(model_name="topic", inputs=[text], parameters={"timeout": {"int64_param": timeout}})

    with listening_grpc(create_app(service, settings)) as address, grpc.insecure_channel(address) as channel:
        method = channel.stream_unary(f"/{SERVICE}/ModelInfer", request.SerializeToString)
        told = method.future(late(), timeout=60)
        assert told.exception(60) is None or "deadline passed" in told.details()
    assert told.code() == (code or grpc.StatusCode.OK)
    assert len(submitted) == (code is None)


def test_a_request_behind_another_on_its_connection_has_come() -> None:
    """Its wait for the one before it takes of its deadline too."""
    arrived: list[float] = []
    answer = threading.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        arrived.append(scope["state"]["arrived"])
        await asyncio.to_thread(answer.wait, 20)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body"})

    with listening(app) as url:
        host, port = url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=20) as connection:
            connection.sendall(b"GET /first HTTP/1.1\r\nHost: x\r\n\r\nGET /second HTTP/1.1\r\nHost: x\r\n\r\n")
            wait_until(lambda: len(arrived) == 1)
            answered = time.monotonic()
            answer.set()
            wait_until(lambda: len(arrived) == 2)
    first, second = arrived
    assert first <= second < answered


def test_a_time_limit_of_the_work_is_none_of_the_request(service: Service, settings: ServingSettings) -> None:
    """As a driver's: it is no answer that more time would change."""
    here = dataclasses.replace(create_app(service, settings).state.context, arrived=time.monotonic())

    async def refused() -> None:
        raise TimeoutError("the storage did not answer")

    async def given(seconds: float) -> None:
        await in_time(here, seconds, refused() if seconds else asyncio.sleep(60))

    with pytest.raises(TimeoutError, match="did not answer") as raised:
        asyncio.run(given(60.0))
    assert not isinstance(raised.value, DeadlineExceeded)
    with pytest.raises(DeadlineExceeded):
        asyncio.run(given(0.0))


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v2/rerank", {"model": "price", "query": "a", "documents": ["b" * 2000] * 40, "max_tokens_per_doc": 4}),
        ("/v2/embed", {"model": "vectors", "texts": ["b" * 2000] * 40, "max_tokens": 4}),
        ("/v1/embeddings", {"model": "vectors", "input": [[2] * 60] * 30}),
        ("/pooling", {"model": "vectors", "input": [[2] * 60] * 30}),
        ("/v1/classify", {"model": "topic", "input": ["b " * 2000], "windows": True}),
    ],
)
def test_what_is_read_of_texts_beside_the_loop_takes_of_the_deadline(
    busy: Call, submitted: list[Any], path: str, body: dict[str, Any]
) -> None:
    check_late(busy("POST", path, json=body, headers={"x-request-timeout": "0.3"}), "deadline passed")
    assert not submitted
