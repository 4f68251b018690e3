"""A task of another tenant answers exactly as one that does not exist: on every route, in both protocols, as fast."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import numpy as np
import pytest
from clients import Call
from fastapi import FastAPI
from grpc_health.v1 import health_pb2
from listening_grpc import listening
from remote import InferRequest, Remote, streaming
from signed import Signed, operations

from checkpoints.access import Access
from serving.grpc.messages import METHODS, message
from serving.tenants.keyring import Keyring

UNKNOWN = "unkown"
TEXT = {"name": "text", "shape": [1], "datatype": "BYTES", "data": ["hello"]}
BODIES: dict[str, Callable[[str], Any]] = {
    "/v1/classify": lambda id: {"model": id, "input": "hello"},
    "/v1/embeddings": lambda id: {"model": id, "input": "hello"},
    "/v1/fanout": lambda id: {"tasks": [id, "topic"], "text": "hello"},
    "/v1/rerank": lambda id: {"model": id, "query": "hello", "documents": ["a"]},
    "/rerank": lambda id: {"model": id, "query": "hello", "documents": ["a"]},
    "/v2/rerank": lambda id: {"model": id, "query": "hello", "documents": ["a"]},
    "/v1/score": lambda id: {"model": id, "text_1": "hello", "text_2": "a"},
    "/score": lambda id: {"model": id, "text_1": "hello", "text_2": "a"},
    "/classify": lambda id: {"model": id, "input": "hello"},
    "/pooling": lambda id: {"model": id, "input": "hello"},
    "/hf/{task}": lambda id: {"inputs": "hello"},
    "/tei/{task}/embed": lambda id: {"inputs": "hello"},
    "/tei/{task}/predict": lambda id: {"inputs": "hello"},
    "/tei/{task}/rerank": lambda id: {"query": "hello", "texts": ["a"]},
    "/v2/models/{model}/infer": lambda id: {"inputs": [TEXT]},
    "/v2/models/{model}/versions/{version}/infer": lambda id: {"inputs": [TEXT]},
    "/v2/repository/models/{model}/load": lambda id: {},
    "/v2/repository/models/{model}/unload": lambda id: {},
    "/v1/tasks/{id}/rollback": lambda id: {},
}
NAMING = ("{id}", "{id:path}", "{model}", "{task}")
APART = ("/v1/keys/{id}", "/v1/jobs/{id}", "/v1/jobs/{id}/log")
"""Paths whose id is not a task's."""


def asks_for_a_task(method: str, path: str) -> bool:
    """An upload makes one's own task, whoever has one of that id."""
    named = path not in APART and method != "PUT" and any(part in path for part in NAMING)
    return named or (method == "POST" and path in BODIES)


def ask(call: Call, method: str, path: str, id: str) -> Any:
    body = BODIES.get(path)
    for part in NAMING:
        path = path.replace(part, id)
    path = path.replace("{version}", "1").replace("{alias}", "stable")
    how = {} if body is None or method != "POST" else {"json": body(id)}
    answer = call(method, path, **how)
    return answer.status_code, neutral(answer.text, id)


def neutral(text: str, id: str) -> Any:
    """An answer without its id, times and the task's name."""
    found = json.loads(text.replace(id, "TASK"))
    if isinstance(found, dict):
        for name in ("id", "created"):
            found.pop(name, None)
        if isinstance(found.get("error"), dict):
            found["error"].pop("request_id")
    return found


def test_over_every_route(app: FastAPI, signed: Signed, theirs: str) -> None:
    acme, globex = signed("acme"), signed("globex")
    asked = sorted(each for each in operations(app) if asks_for_a_task(*each))
    assert {path for method, path in asked if method == "POST"} == BODIES.keys()
    assert len(asked) > 25
    known = 0
    for method, path in asked:
        foreign, unknown = ask(acme, method, path, theirs), ask(acme, method, path, UNKNOWN)
        assert foreign == unknown, (method, path)
        assert foreign[0] == 404 or path == "/v1/fanout", (method, path)
        if method == "GET":
            known += ask(globex, method, path, theirs)[0] == 200 if not path.endswith("/file") else 0
    assert known >= 6, "its own tenant sees it"


def test_no_list_shows_it(signed: Signed, theirs: str) -> None:
    acme, globex = signed("acme"), signed("globex")
    for method, path in (("GET", "/v1/tasks"), ("GET", "/v1/models"), ("GET", "/"), ("POST", "/v2/repository/index")):
        assert theirs not in acme(method, path).text, path
        assert theirs in globex(method, path).text, path


def test_an_upload_of_the_same_id_is_another_task(signed: Signed, theirs: str, upload: Callable[..., bytes]) -> None:
    acme, globex = signed("acme"), signed("globex")
    before = globex("GET", f"/v1/tasks/{theirs}").content
    made = acme("PUT", f"/v1/tasks/{theirs}", content=upload("theirs", outputs=2), headers={"If-None-Match": "*"})
    assert (made.status_code, made.json()["version"], made.json()["tenant"]) == (201, 1, "acme")
    assert globex("GET", f"/v1/tasks/{theirs}").content == before
    assert acme("DELETE", f"/v1/tasks/{theirs}").status_code == 204
    assert globex("GET", f"/v1/tasks/{theirs}").content == before


@pytest.fixture
def remote(app: FastAPI, access: Access, keyring: Keyring) -> Any:
    def make(tenant: str, *scopes: Any) -> Remote:
        _, key = access.create(tenant, scopes or ("infer", "manage"))
        keyring.refresh()
        return Remote(channel, key)

    with listening(app) as address, grpc.insecure_channel(address) as channel:
        make.bare = Remote(channel)  # type: ignore[attr-defined]
        yield make


def fields_of(method: str, id: str) -> dict[str, Any]:
    own = {field.name for field in METHODS[method].input_type.fields}
    name = next(iter(own & {"name", "model_name"}))
    tensor = {"name": "text", "shape": [1], "datatype": "BYTES", "contents": {"bytes_contents": [b"hello"]}}
    return {name: id} | ({"inputs": [tensor]} if method == "ModelInfer" else {})


def told(remote: Remote, method: str, id: str) -> tuple[Any, str]:
    try:
        return None, str(remote(method, **fields_of(method, id))).replace(id, "TASK")
    except grpc.RpcError as error:
        return error.code(), str(error.details()).replace(id, "TASK")


PROBES = ("ServerLive", "ServerReady")
NAMED = ("ModelReady", "ModelMetadata", "ModelInfer", "RepositoryModelLoad", "RepositoryModelUnload")


def test_over_grpc(remote: Any, theirs: str) -> None:
    acme, globex = remote("acme"), remote("globex")
    for method in NAMED:
        assert told(acme, method, theirs) == told(acme, method, UNKNOWN), method
        assert told(globex, method, theirs)[0] is None, method
    names = [each.name for each in acme("RepositoryIndex").models]
    assert theirs not in names and "topic" in names
    asked = [InferRequest(**fields_of("ModelInfer", id)) for id in (theirs, UNKNOWN, "topic")]
    first, second, third = streaming(acme.channel)(iter(asked), metadata=acme.signed, timeout=30)
    assert first.error_message.replace(theirs, "X") == second.error_message.replace(UNKNOWN, "X") != ""
    assert not third.error_message


def test_grpc_needs_keys_of_the_right_scope(remote: Any) -> None:
    reader = remote("acme", "manage")
    for method in METHODS:
        if method == "ModelStreamInfer":
            continue
        if method in PROBES:
            remote.bare(method)
            continue
        fields = fields_of(method, "topic") if method in NAMED else {}
        with pytest.raises(grpc.RpcError) as error:
            remote.bare(method, **fields)
        assert error.value.code() == grpc.StatusCode.UNAUTHENTICATED, method
    assert told(reader, "ModelInfer", "topic")[0] == grpc.StatusCode.PERMISSION_DENIED
    assert told(remote("acme", "infer"), "RepositoryModelUnload", "topic")[0] == grpc.StatusCode.PERMISSION_DENIED
    shared = told(remote("acme", "manage"), "RepositoryModelUnload", "topic")
    assert shared[0] == grpc.StatusCode.PERMISSION_DENIED and "is shared" in shared[1]


def test_refused_calls_are_counted_under_known_names(remote: Any, signed: Signed) -> None:
    remote("acme")
    request, response = InferRequest, message("ModelInferResponse")
    for path in (
        "/inference.GRPCInferenceService/ModelInfer",
        "/inference.GRPCInferenceService/own",
        "/own/ModelInfer",
    ):
        with pytest.raises(grpc.RpcError):
            remote.bare.channel.unary_unary(path, request.SerializeToString, response.FromString)(request(), timeout=30)
    metrics = signed("default", "admin")("GET", "/metrics").text
    assert 'method="unmatched"' in metrics and 'method="own"' not in metrics


def test_calls_without_a_key_take_no_places_and_are_not_read(remote: Any) -> None:
    remote("acme")
    request, never = InferRequest, threading.Event()
    methods = [
        ("/inference.GRPCInferenceService/ModelStreamInfer", message("ModelStreamInferResponse")),
        ("/grpc.health.v1.Health/Watch", health_pb2.HealthCheckResponse),
        ("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", message("ModelStreamInferResponse")),
    ]
    for path, response in methods:
        stream = remote.bare.channel.stream_stream(path, request.SerializeToString, response.FromString)

        def silent() -> Iterator[Any]:
            never.wait(20)
            yield request()

        with pytest.raises(grpc.RpcError) as error:
            next(stream(silent(), timeout=10))
        assert error.value.code() == grpc.StatusCode.UNAUTHENTICATED, path
    never.set()
    check = remote.bare.channel.unary_unary(
        "/grpc.health.v1.Health/Check",
        health_pb2.HealthCheckRequest.SerializeToString,
        health_pb2.HealthCheckResponse.FromString,
    )
    assert check(health_pb2.HealthCheckRequest(), timeout=30).status == health_pb2.HealthCheckResponse.SERVING


def test_it_is_refused_as_fast(app: FastAPI, signed: Signed, theirs: str) -> None:
    """In turns, and the fastest of each: a busy machine slows both."""
    acme = signed("acme")
    for method, path in (("POST", "/v1/classify"), ("GET", "/v1/tasks/{id}"), ("GET", "/v2/models/{model}")):
        seconds: dict[str, list[float]] = {theirs: [], UNKNOWN: []}
        for turn in range(60):
            for id in sorted(seconds, reverse=turn % 2 == 0):
                began = time.perf_counter()
                ask(acme, method, path, id)
                seconds[id].append(time.perf_counter() - began)
        fastest = {id: float(np.min(each)) for id, each in seconds.items()}
        assert 0.6 < fastest[theirs] / fastest[UNKNOWN] < 1.6, (path, fastest)
