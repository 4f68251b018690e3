"""A request's tenant and priority reach the queue, and the names in it are the tenant's."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from clients import Call, client_of

from jpets.engine.engine import Engine
from jpets.types import Task, TaskName
from serving.hosted.repository import named, stored_as
from serving.hosted.service import Service
from serving.http.settings import ServingSettings
from serving.requests import context
from serving.requests.context import Asker


@pytest.fixture
def call_for(service: Service, settings: ServingSettings, monkeypatch: pytest.MonkeyPatch) -> Callable[[Asker], Call]:
    """A client with all requests for one asker."""

    def make(asker: Asker) -> Call:
        monkeypatch.setattr("serving.app.Context", functools.partial(context.Context, asker=asker))
        return client_of(service, settings)

    return make


@pytest.fixture
def theirs(engine: Engine, make_task: Callable[..., Task]) -> Iterator[Task]:
    """``topic`` of another tenant, with other labels than the default tenant's."""
    task = dataclasses.replace(make_task("topic", seed=9), labels=("x", "y", "z"))
    engine.add_task(task, tenant="other", load=lambda: task)
    yield task
    engine.remove_task("topic", tenant="other")


def labels(call: Call, id: str = "topic") -> Any:
    answer = call("POST", "/v1/classify", json={"model": id, "input": "hello world", "top_k": 3})
    return {item["label"] for item in answer.json()["data"][0]["top"]} if answer.is_success else answer.status_code


def test_a_name_is_the_tenants(call: Call, call_for: Callable[[Asker], Call], theirs: Task) -> None:
    other = call_for(Asker("other"))
    assert labels(other) == {"x", "y", "z"}
    assert labels(call) == {"label-0", "label-1", "label-2"}
    assert labels(other, "tags") == 404 and labels(call_for(Asker("nobody"))) == 404
    assert other("GET", "/v2/models/topic").status_code == 200
    assert other("GET", "/v2/models/tags").status_code == 404


def test_tenant_and_priority_reach_the_engine(
    call_for: Callable[[Asker], Call], engine: Engine, theirs: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, int]] = []
    submit = engine.submit

    def watched(*queries: Any, **how: Any) -> Any:
        seen.append((how["tenant"], how["priority"]))
        return submit(*queries, **how)

    monkeypatch.setattr(engine, "submit", watched)
    labels(call_for(Asker("other", 3)))
    labels(call_for(Asker()))
    assert seen == [("other", 3), ("default", 0)]


def test_another_tenants_tasks_are_not_changed(call: Call, call_for: Callable[[Asker], Call]) -> None:
    other = call_for(Asker("other"))
    for method, path in (("GET", ""), ("GET", "/file"), ("GET", "/versions"), ("POST", "/rollback"), ("DELETE", "")):
        assert other(method, f"/v1/tasks/topic{path}").status_code == 404
    assert call("GET", "/v1/tasks/topic").status_code == 200


@pytest.mark.parametrize(("name", "id"), [(TaskName.of("a"), "a"), (TaskName("other", "a"), "other/a")])
def test_the_repository_keeps_ids_of_the_default_tenant_as_they_are(name: TaskName, id: str) -> None:
    assert stored_as(name) == id
    assert named(id) == name
