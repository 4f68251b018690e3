"""Behaviour of every route: ids, limits, deadlines, errors, health; and metrics and the pages for people."""

from __future__ import annotations

import asyncio
import logging
import re
import types
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from clients import Call, client_of, samples

from checkpoints.repository import Repository
from jpets.engine.engine import Engine
from jpets.engine.queue.response_cache import ResponseCache
from jpets.errors import Saturated
from jpets.types import Query, Task
from jpets.watch import Watch
from serving.app import create_app
from serving.hosted.repository import TaskRepository
from serving.hosted.service import Service
from serving.http.settings import ServingSettings

BODY = {"model": "topic", "input": "hello"}


@pytest.mark.parametrize("given", ["abc_DEF-1", "x" * 64])
def test_request_id_is_echoed(call: Call, given: str) -> None:
    assert call("POST", "/v1/classify", json=BODY, headers={"x-request-id": given}).headers["x-request-id"] == given


@pytest.mark.parametrize("given", ["", "x" * 65, "a b", "<script>", "é"])
def test_bad_request_ids_are_replaced(call: Call, given: str) -> None:
    answer = call("GET", "/v1/tasks/none-such", headers={"x-request-id": given.encode()})
    made = answer.headers["x-request-id"]
    assert made != given and len(made) == 32
    assert answer.json()["error"]["request_id"] == made


@pytest.mark.parametrize("content", [b"{", b"\xff\xfe{", b'{"model": NaNN}', b"[" * 100_000])
def test_what_is_no_json_is_400(call: Call, content: bytes) -> None:
    headers = {"content-type": "application/json"}
    answer = call("POST", "/v1/classify", content=content, headers=headers)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "unparseable")
    assert list(call("POST", "/v2/models/topic/infer", content=content, headers=headers).json()) == ["error"]


def test_bodies_are_bounded_before_they_are_read(service: Service, settings: ServingSettings) -> None:
    call = client_of(service, settings)
    sent = 0

    async def endless() -> Any:
        nonlocal sent
        while sent < 100 << 20:
            sent += 1 << 16
            yield b" " * (1 << 16)

    answer = call("POST", "/v1/classify", content=endless(), headers={"content-type": "application/json"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "too_large")
    assert sent <= settings.max_body_bytes + (1 << 17)
    declared = call("POST", "/v2/models/topic/infer", content=b" " * ((1 << 20) + 1))
    assert declared.status_code == 413
    assert list(declared.json()) == ["error"]


@pytest.mark.parametrize(
    ("timeout", "status"), [("0.000001", 504), ("5", 200), ("0", 504), ("-1", 504), ("nan", 422), ("soon", 422)]
)
def test_deadlines(call: Call, timeout: str, status: int) -> None:
    answer = call("POST", "/v1/classify", json=BODY, headers={"x-request-timeout": timeout})
    assert answer.status_code == status


def test_unknown_routes_and_methods(call: Call) -> None:
    assert call("GET", "/nope").json()["error"]["code"] == "not_found"
    assert call("GET", "/v1/classify").json()["error"]["code"] == "method_not_allowed"
    assert list(call("GET", "/v2/nope").json()) == ["error"]


def test_saturation_says_when_to_retry(call: Call, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise Saturated("the queue is full")

    monkeypatch.setattr(engine, "submit", full)
    answer = call("POST", "/v1/classify", json=BODY)
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")


def test_unforeseen_errors_tell_nobody_the_text(
    call: Call, engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def bug(queries: list[Any], **_: object) -> None:
        raise KeyError(queries[0].text)

    monkeypatch.setattr(engine, "submit", bug)
    with caplog.at_level(logging.DEBUG):
        answer = call("POST", "/v1/classify", json={"model": "topic", "input": "my secret"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "internal")
    assert "secret" not in answer.text
    record = next(record for record in caplog.records if record.message.startswith("unexpected error"))
    assert vars(record)["type"] == "KeyError"
    assert not any("secret" in str(vars(record)) for record in caplog.records if record.name.startswith("serving"))


CLASSIFY = {
    "type": "http",
    "http_version": "1.1",
    "method": "POST",
    "path": "/v1/classify",
    "raw_path": b"",
    "query_string": b"",
    "headers": [(b"content-type", b"application/json")],
    "scheme": "http",
    "server": ("s", 80),
    "client": ("c", 1),
    "root_path": "",
}
"""The ASGI scope of a request."""


def test_client_that_leaves_frees_its_place(
    service: Service, settings: ServingSettings, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The application is told of the disconnect while the query waits in the queue."""
    app = create_app(service, settings)
    waiting: list[Future[Any]] = []

    async def scenario() -> list[Any]:
        messages = [{"type": "http.request", "body": b'{"model": "topic", "input": "hello"}', "more_body": False}]
        sent: list[Any] = []

        async def receive() -> Any:
            if messages:
                return messages.pop()
            while not waiting:
                await asyncio.sleep(0.005)
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            sent.append(message)

        await app({**CLASSIFY}, receive, send)
        return sent

    def never(*_: object, **__: object) -> list[Future[Any]]:
        waiting.append(Future())
        return waiting

    monkeypatch.setattr(engine, "submit", never)
    sent = asyncio.run(scenario())
    assert waiting[0].cancelled()
    assert sent[0]["status"] == 499


def test_client_that_leaves_in_the_middle_of_its_body(
    service: Service, settings: ServingSettings, caplog: pytest.LogCaptureFixture
) -> None:
    messages = [{"type": "http.request", "body": b'{"model": "topic", "inp', "more_body": True}]
    sent: list[Any] = []

    async def receive() -> Any:
        return messages.pop() if messages else {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(create_app(service, settings)({**CLASSIFY}, receive, send))
    assert sent[0]["status"] == 400
    assert not any(record.message.startswith("unexpected error") for record in caplog.records)


def test_health_before_start_and_while_draining(
    service: Service, settings: ServingSettings, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    fresh = Service(service.repository, service.backbone, lambda data, id: None)  # type: ignore[arg-type,return-value]
    call = client_of(fresh, settings)
    assert call("GET", "/v2/health/live").status_code == 200
    assert call("GET", "/v2/health/ready").status_code == 503
    for method, path in (("POST", "/v1/classify"), ("PUT", "/v1/tasks/a"), ("DELETE", "/v1/tasks/a")):
        answer = call(method, path, json=BODY)
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1"), path
    assert call("GET", "/v1/tasks").status_code == 200
    assert "not ready" in call("GET", "/").text
    assert samples(call)["jpets_ready", ()] == 0
    monkeypatch.setattr(fresh.tasks, "started", engine)
    assert call("GET", "/v2/health/ready").status_code == 200
    fresh.drain()
    assert call("GET", "/v2/health/ready").status_code == 503
    assert call("GET", "/v2/health/live").status_code == 200
    assert call("POST", "/v1/classify", json=BODY).status_code == 503


def test_dead_engine_is_not_live(service: Service, settings: ServingSettings) -> None:
    def broken(_: object) -> Any:
        raise RuntimeError("no device")

    fresh = Service(_Empty(), service.backbone, lambda data, id: None)  # type: ignore[arg-type,return-value]
    with pytest.raises(RuntimeError):
        fresh.start(broken)
    call = client_of(fresh, settings)
    assert call("GET", "/v2/health/live").status_code == 503
    assert call("GET", "/v2/health/live").json() == {"live": False}


class _Empty:
    def collect(self) -> int:
        return 0

    def age_uses(self, share: float) -> None:
        pass

    def last_change(self) -> int:
        return 0

    def changes(self, since: int) -> tuple[int, list[str]]:
        return since, []

    def watch(self) -> Watch:
        return Watch()

    def index(self, maker: str) -> list[Any]:
        return []


def test_metrics(call: Call, engine: Engine, tasks: list[Task]) -> None:
    asked = [Query(own.id, "a", "b" if own.id == "questions" else None) for own in tasks]
    engine.infer([*asked, Query("broken", "a")])  # some may have left the device in other tests
    before = samples(call)
    call("POST", "/v1/classify", json=BODY)
    call("POST", "/v1/classify", json={"model": "no-such", "input": "a"})
    call("GET", "/v1/tasks/none-such")
    after = samples(call)

    def grew(name: str, **labels: str) -> float:
        key = (name, tuple(sorted(labels.items())))
        return after[key] - before.get(key, 0)

    assert grew("jpets_answers_total", outcome="ok") == 1
    assert grew("jpets_batches_total") == 1
    assert grew("jpets_batch_seconds_count") == 1
    assert grew("jpets_queue_seconds_count") == 1
    assert grew("jpets_http_requests_total", route="/v1/classify", status="200") == 1
    assert grew("jpets_http_requests_total", route="/v1/classify", status="404") == 1
    assert grew("jpets_http_requests_total", route="/v1/tasks/{id}", status="404") == 1
    assert grew("jpets_http_request_seconds_count", route="/v1/classify") == 2
    assert after["jpets_request_path_compiles_total", ()] == 0
    assert after["jpets_computed_tokens_total", ()] >= after["jpets_real_tokens_total", ()] > 0
    assert (after["jpets_ready", ()], after["jpets_live", ()]) == (1, 1)
    assert after["jpets_tasks", (("tier", "device"),)] == 7
    lora = (("class", "lora/query:4+value:4/layers 0-2"),)
    assert after["jpets_slots_used", lora] == 7
    assert after["jpets_slots", lora] >= 12
    assert after["jpets_bank_bytes", lora] > 0
    for name in ("hits_total", "misses_total", "bytes"):
        assert after[f"jpets_response_cache_{name}", ()] == 0
    assert after["process_resident_memory_bytes", ()] > 1 << 20
    assert ("jpets_queue_depth", ()) in after and ("jpets_background_compiles_waiting", ()) in after


def test_metrics_of_the_response_cache(call: Call, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "responses", ResponseCache(1 << 20))
    first, again = (call("POST", "/v1/classify", json=BODY).json()["data"] for _ in range(2))
    assert first == again
    found = samples(call)
    assert (found["jpets_response_cache_hits_total", ()], found["jpets_response_cache_misses_total", ()]) == (1, 1)
    assert found["jpets_response_cache_bytes", ()] == engine.responses.bytes > 0


def test_status_page_escapes_and_loads_nothing(call: Call, service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    page = call("GET", "/")
    assert page.headers["content-type"].startswith("text/html")
    for expected in ("topic", "lora", "token-classification", "label-0", "tiny-bert"):
        assert expected in page.text
    assert "http://" not in page.text and "https://" not in page.text and "<script" not in page.text

    document = {"deltas": [{"method": "<b>"}], "head": {"type": "<i>"}, "labels": ["<script>alert(1)</script>"]}
    evil = types.SimpleNamespace(id="<script>", version=1, bytes=1, metadata=document)
    monkeypatch.setattr(service.repository, "list", lambda *_, **__: ([evil], "more"))
    text = call("GET", "/").text
    assert "<script" not in text and "<b>" not in text.split("<h2>Tasks")[1] and "<i>" not in text


def test_openapi_describes_every_route(call: Call) -> None:
    document = call("GET", "/openapi.json").json()
    routes = {
        "/",
        "/classify",
        "/hf/{task}",
        "/metrics",
        "/pooling",
        "/rerank",
        "/score",
        "/tei/{task}/embed",
        "/tei/{task}/info",
        "/tei/{task}/predict",
        "/tei/{task}/rerank",
        "/v1/backbones",
        "/v1/backbones/{name}",
        "/v1/classify",
        "/v1/domains",
        "/v1/domains/{name}",
        "/v1/students",
        "/v1/embed",
        "/v1/embeddings",
        "/v1/fanout",
        "/v1/jobs",
        "/v1/jobs/extract",
        "/v1/jobs/further-pretrain",
        "/v1/jobs/{id}",
        "/v1/jobs/{id}/log",
        "/v1/keys",
        "/v1/keys/{id}",
        "/v1/models",
        "/v1/models/{id}",
        "/v1/rerank",
        "/v1/score",
        "/v1/tasks",
        "/v1/tasks/{id}",
        "/v1/tasks/{id}/aliases/{alias}",
        "/v1/tasks/{id}/file",
        "/v1/tasks/{id}/rollback",
        "/v1/tasks/{id}/versions",
        "/v1/tenants",
        "/v1/tenants/{name}",
        "/v2",
        "/v2/health/live",
        "/v2/embed",
        "/v2/rerank",
        "/v2/health/ready",
        "/v2/models/{model}",
        "/v2/models/{model}/ready",
        "/v2/models/{model}/infer",
        "/v2/models/{model}/versions/{version}",
        "/v2/models/{model}/versions/{version}/ready",
        "/v2/models/{model}/versions/{version}/infer",
        "/v2/repository/index",
        "/v2/repository/models/{model}/load",
        "/v2/repository/models/{model}/unload",
    }
    assert set(document["paths"]) == routes
    tags = {tag["name"] for tag in document["tags"]}
    for path, operations in document["paths"].items():
        for operation in operations.values():
            assert operation["summary"] and set(operation["tags"]) <= tags and operation["tags"], path
            if "422" in operation["responses"]:
                body = "InferenceErrorBody" if f"{path}/".startswith("/v2/") else "ErrorBody"
                assert f"schemas/{body}'" in str(operation["responses"]["422"]), path


def test_docs_load_nothing_from_elsewhere(call: Call) -> None:
    page = call("GET", "/docs")
    assert page.status_code == 200
    loaded = re.findall(r'(?:src|href)="([^"]+)"', page.text)
    assert any(path.endswith(".js") for path in loaded) and any(path.endswith(".css") for path in loaded)
    assert all(path.startswith("/") and call("GET", path).status_code == 200 for path in loaded)


def test_repository_protocol_is_the_repositorys(tmp_path: Path) -> None:
    repository: TaskRepository = Repository(tmp_path)
    assert repository.list() == ([], None)
