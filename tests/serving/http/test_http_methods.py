"""HEAD, OPTIONS, ``Allow``, and query parameters, for every route."""

from __future__ import annotations

import pytest
from clients import Call, samples

GETS = [
    "/",
    "/metrics",
    "/docs",
    "/openapi.json",
    "/v1/tasks",
    "/v1/tasks/topic",
    "/v1/tasks/topic/file",
    "/v1/models",
    "/v1/models/topic",
    "/v1/backbones",
    "/v2",
    "/v2/health/live",
    "/v2/health/ready",
    "/v2/models/topic",
    "/v2/models/topic/ready",
    "/v2/models/topic/versions/1",
]


@pytest.mark.parametrize("path", GETS)
def test_head_is_get_without_the_body(call: Call, path: str) -> None:
    got, head = call("GET", path), call("HEAD", path)
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-type"] == got.headers["content-type"]
    if path not in ("/", "/metrics"):  # their numbers change
        assert head.headers["content-length"] == str(len(got.content))


def test_head_of_what_there_is_not(call: Call) -> None:
    assert (call("HEAD", "/v1/tasks/no-such").status_code, call("HEAD", "/nothing").status_code) == (404, 404)
    assert call("HEAD", "/v1/classify").status_code == 405
    counted = (("route", "/v1/tasks/{id}"), ("status", "404"))
    assert ("jpets_http_requests_total", counted) in samples(call)


@pytest.mark.parametrize(
    ("path", "methods"),
    [
        ("/v2/health/live", {"GET", "HEAD", "OPTIONS"}),
        ("/v1/tasks/topic", {"GET", "PUT", "DELETE", "HEAD", "OPTIONS"}),
        ("/v1/classify", {"POST", "OPTIONS"}),
        ("/v1/jobs", {"GET", "POST", "HEAD", "OPTIONS"}),
        ("/docs", {"GET", "HEAD", "OPTIONS"}),
    ],
)
def test_options_and_other_methods_name_what_there_is(call: Call, path: str, methods: set[str]) -> None:
    options, refused = call("OPTIONS", path), call("PATCH", path)
    assert (options.status_code, options.content, refused.status_code) == (204, b"", 405)
    assert set(options.headers["allow"].split(", ")) == set(refused.headers["allow"].split(", ")) == methods
    assert refused.json()["error"] if path.startswith("/v2") else "Allow" in refused.json()["error"]["message"]


def test_options_of_no_path(call: Call) -> None:
    assert call("OPTIONS", "/nothing").status_code == 404


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/tasks"),
        ("GET", "/v1/tasks/topic"),
        ("GET", "/v1/tasks/topic/file"),
        ("HEAD", "/v1/tasks"),
        ("GET", "/v1/models"),
        ("GET", "/v1/backbones"),
        ("GET", "/v1/jobs"),
        ("GET", "/metrics"),
        ("GET", "/"),
        ("GET", "/v2"),
        ("GET", "/v2/models/topic"),
        ("GET", "/v2/models/topic/ready"),
        ("DELETE", "/v1/tasks/topic"),
        ("PUT", "/v1/tasks/topic"),
        ("POST", "/v1/tasks/topic/rollback"),
        ("POST", "/v1/classify"),
        ("POST", "/v2/models/topic/infer"),
    ],
)
def test_parameters_that_no_route_reads_are_named(call: Call, method: str, path: str) -> None:
    answer = call(method, f"{path}?limt=3")
    assert answer.status_code == 422
    assert method == "HEAD" or "query.limt" in answer.text


def test_parameters_that_come_twice(call: Call) -> None:
    answer = call("GET", "/v1/tasks?limit=1&limit=2")
    assert (answer.status_code, "query.limit: given more than once" in answer.text) == (422, True)


def test_probes_may_add_what_they_like(call: Call) -> None:
    assert call("GET", "/v2/health/live?t=1").status_code == 200
    assert call("GET", "/v2/health/ready?t=1").status_code == 200


def test_what_is_nowhere_says_where_to_look(call: Call) -> None:
    assert "/docs" in call("GET", "/nothing").json()["error"]["message"]
