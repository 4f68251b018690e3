"""A request's tenant and priority reach the queue, and the names in it are the tenant's."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from clients import Call
from signed import Signed

from checkpoints.access import Access
from jpets.access import Limits
from jpets.engine.engine import Engine
from jpets.types import Task, TaskName
from serving.hosted.owned import OwnedTasks
from serving.hosted.preparations import Preparation
from serving.hosted.service import Service
from serving.hosted.services import Services


@pytest.fixture
def theirs(engine: Engine, make_task: Callable[..., Task]) -> Iterator[Task]:
    """``topic`` and ``mine`` of another tenant, with other labels than the default tenant's ``topic``."""
    task = dataclasses.replace(make_task("topic", seed=9), labels=("x", "y", "z"))
    for each in (task, dataclasses.replace(task, id="mine")):
        engine.add_task(each, tenant="other", load=functools.partial(lambda own: own, each))
    yield task
    for id in ("topic", "mine"):
        engine.remove_task(id, tenant="other")


def labels(call: Call, id: str = "topic") -> Any:
    answer = call("POST", "/v1/classify", json={"model": id, "input": "hello world", "top_k": 3})
    return {item["label"] for item in answer.json()["data"][0]["top"]} if answer.is_success else answer.status_code


def test_a_name_is_the_tenants(call: Call, signed: Signed, theirs: Task) -> None:
    other = signed("other")
    assert labels(other) == {"x", "y", "z"}
    assert labels(call) == {"label-0", "label-1", "label-2"}
    assert labels(call, "mine") == 404 and labels(other, "mine") == {"x", "y", "z"}
    assert labels(signed("nobody")) == {"label-0", "label-1", "label-2"}, "the shared one"
    assert other("GET", "/v2/models/mine").status_code == 200
    assert call("GET", "/v2/models/mine").status_code == 404


def test_tenant_and_priority_reach_the_engine(
    signed: Signed, access: Access, engine: Engine, theirs: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, int]] = []
    submit = engine.submit

    def watched(*queries: Any, **how: Any) -> Any:
        seen.append((how["tenant"], how["priority"]))
        return submit(*queries, **how)

    monkeypatch.setattr(engine, "submit", watched)
    access.limit("other", Limits(priority=3))
    labels(signed("other"))
    labels(signed("default"))
    assert seen == [("other", 3), ("default", 0)]


def test_shared_tasks_are_read_by_all_and_changed_by_their_owner(call: Call, signed: Signed) -> None:
    nobody = signed("nobody")
    for path in ("", "/file", "/versions"):
        assert nobody("GET", f"/v1/tasks/topic{path}").content == call("GET", f"/v1/tasks/topic{path}").content
    for method, path in (("POST", "/v1/tasks/topic/rollback"), ("DELETE", "/v1/tasks/topic"),
                         ("POST", "/v2/repository/models/topic/unload")):  # fmt: skip
        refused = nobody(method, path)
        assert refused.status_code == 403 and "is shared" in refused.text
    assert call("GET", "/v1/tasks/topic").status_code == 200


def test_an_own_task_goes_before_the_shared_one_of_its_id(
    call: Call, signed: Signed, upload: Callable[..., bytes]
) -> None:
    nobody = signed("nobody")
    assert labels(nobody, "tags") == labels(call, "tags")
    assert nobody("PUT", "/v1/tasks/tags", content=upload("tags", outputs=2, seed=3)).status_code == 201
    assert labels(nobody, "tags") == {"label-0", "label-1"} and len(labels(call, "tags")) == 3
    mixed = {"inputs": [{"model": id, "text": "hello world"} for id in ("tags", "topic", "tags")], "top_k": 9}
    answers = nobody("POST", "/v1/classify", json=mixed).json()["data"]
    assert [len(each["top"]) for each in answers] == [2, 3, 2], "own and shared ones in one request"
    listed = nobody("GET", "/v1/tasks").json()["tasks"]
    assert [(task["tenant"], task["labels"][:2]) for task in listed if task["id"] in ("tags", "topic")] == [
        ("nobody", ["label-0", "label-1"]),
        ("default", ["label-0", "label-1"]),
    ]
    assert [task["tenant"] for task in call("GET", "/v1/tasks").json()["tasks"] if task["id"] == "tags"] == ["default"]
    assert nobody("DELETE", "/v1/tasks/tags").status_code == 204
    assert labels(nobody, "tags") == labels(call, "tags"), "the shared one again"


def test_an_own_task_that_cannot_be_answered_is_not_replaced_by_the_shared_one(
    signed: Signed, service: Service, upload: Callable[..., bytes], tmp_path: Path
) -> None:
    """As where its backbone is not loaded: the repository has it, and no engine."""
    file = tmp_path / "topic.safetensors"
    file.write_bytes(upload("topic", seed=5))
    service.repository.put("topic", file, tenant="stored-only")
    away = signed("stored-only")
    try:
        services = Services(service)
        services.owned.refresh()
        assert services.resolve(TaskName("stored-only", "topic")) == ("stored-only", "topic")
        assert services.resolve(TaskName("stored-only", "tags")) == ("default", "tags")
        away.services.owned.refresh()  # type: ignore[attr-defined]
        assert labels(away) == 404 and away("GET", "/v1/tasks/topic").json()["tenant"] == "stored-only"
        assert labels(away, "tags") == labels(signed("default"), "tags")
    finally:
        service.repository.delete("topic", tenant="stored-only")


def test_owned_tasks_follow_the_repository(service: Service, upload: Callable[..., bytes], tmp_path: Path) -> None:
    owned = OwnedTasks(service.repository)
    owned.refresh()
    name = TaskName("watched", "task")
    assert name not in owned
    file = tmp_path / "task.safetensors"
    file.write_bytes(upload("task"))
    service.repository.put(name.id, file, tenant=name.tenant)
    owned.refresh()
    assert name in owned and owned.has_id("task")
    service.repository.delete(name.id, name.tenant)
    owned.refresh()
    assert name not in owned and not owned.has_id("task")
    service.repository.put(name.id, file, tenant=name.tenant)
    owned.look(name)
    assert name in owned
    service.repository.delete(name.id, name.tenant)
    owned.look(name)
    assert name not in owned


def test_a_failed_upload_is_told_where_a_shared_task_has_the_id(
    signed: Signed, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = signed("unlucky")
    assert call("GET", "/v1/tasks/tags").json()["tenant"] == "default"
    failed = Preparation(1, "no room", coming=False)
    monkeypatch.setattr(service.preparations, "get", lambda name: failed if name.tenant == "unlucky" else None)
    assert call("GET", "/v1/tasks/tags").status_code == 507
