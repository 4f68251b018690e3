"""A server takes a known shape of tasks after any restart, and takes a new one while it serves."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from clients import Call, client_of, wait_for_preparations
from support import wait_until

from checkpoints.backbone import Backbone
from checkpoints.repository import Repository
from checkpoints.task_file import task_to_bytes
from jpets.config import EngineSettings
from jpets.engine.batch.bucket import Bucket
from jpets.engine.compilation.growth import Growth
from jpets.engine.engine import Engine
from jpets.errors import EngineFailure, JpetsError, OutOfSpace, Saturated, UnknownClass
from jpets.types import Task, TaskName
from serving.hosted.preparations import Preparations
from serving.hosted.repository import Validator
from serving.hosted.service import Service
from serving.http.settings import ServingSettings

SETTINGS = EngineSettings(
    dtype="float32", max_length=16, max_batch_tokens=32, max_batch_rows=2, slots=3, background_compile=False
)
BUCKETS = [Bucket(32, ((2, 16),))]
Start = Callable[..., Service]


@pytest.fixture
def start(tmp_path: Path, program_cache: Path, backbone: Backbone, validator: Validator) -> Iterator[Start]:
    """Starts a server on the one repository; the earlier server ends."""
    repository = Repository(tmp_path / "repository", validator=validator)
    running: list[Service] = []

    def started(**how: Any) -> Service:
        while running:
            running.pop().close()
        service = Service(repository, backbone, validator, **how)
        running.append(service)
        service.start(
            lambda coming: Engine(backbone, (), SETTINGS, coming=coming, cache_dir=program_cache, buckets=BUCKETS)
        )
        return service

    yield started
    for service in running:
        service.close()
    repository.close()


def client(service: Service, settings: ServingSettings) -> Call:
    return client_of(service, settings)


def put(call: Call, task: Task) -> Any:
    return call("PUT", f"/v1/tasks/{task.id}", content=task_to_bytes(task))


def state(call: Call, id: str, unlike: str = "preparing") -> Any:
    """The task, once its state has changed."""

    def look() -> Any:
        answer = call("GET", f"/v1/tasks/{id}")
        return None if answer.json().get("state") == unlike else answer

    return wait_until(look)


def ask(call: Call, id: str) -> Any:
    return call("POST", "/v1/classify", json={"model": id, "input": "hello world"})


def test_restart_and_add(start: Start, make_task: Callable[..., Task], settings: ServingSettings) -> None:
    """An empty repository takes adapters and LoRA; so does the server after a restart with one such task."""
    first, second, head = make_task("first", seed=1), make_task("second", seed=2, rank=16), make_task("wide", outputs=9)
    call = client(start(standard=lambda: [first, second]), settings)
    answer = put(call, first)
    assert answer.status_code in (201, 202)
    assert state(call, "first").json()["state"] == "ready"
    assert ask(call, "first").status_code == 200
    call = client(start(standard=lambda: [first, second]), settings)
    assert ask(call, "first").status_code == 200
    for task in (second, head):
        assert put(call, task).status_code in (201, 202)
        assert state(call, task.id).json()["state"] == "ready"
        assert ask(call, task.id).status_code == 200
    call = client(start(), settings)
    assert [ask(call, id).status_code for id in ("first", "second", "wide")] == [200] * 3


def test_an_old_version_serves_until_the_new_ones_shape_is_there(
    start: Start, make_task: Callable[..., Task], settings: ServingSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = client(start(), settings)
    assert put(call, make_task("topic")).status_code == 202
    state(call, "topic")
    opened = Growth._open

    def slow(growth: Growth, keys: Any) -> None:
        index = {each["name"]: each["state"] for each in call("POST", "/v2/repository/index").json()}
        able = call("GET", "/v2/models/other/ready").status_code
        seen.append((ask(call, "topic").status_code, ask(call, "other"), able, index))
        opened(growth, keys)

    seen: list[Any] = []
    monkeypatch.setattr(Growth, "_open", slow)
    answer = put(call, make_task("topic", outputs=9))
    assert (answer.status_code, answer.json()["state"]) == (202, "preparing")
    assert state(call, "topic").json()["loaded"] == 2
    assert put(call, make_task("other", rank=16)).status_code == 202
    assert state(call, "other").json()["state"] == "ready"
    (old, missing, *_), (_, early, able, index) = seen
    assert (able, index["other"], index["topic"]) == (503, "UNAVAILABLE", "READY")
    assert call("GET", "/v2/models/other/ready").status_code == 200
    assert (old, missing.status_code) == (200, 404)
    assert (early.status_code, early.json()["error"]["code"]) == (503, "preparing")
    assert len(ask(call, "topic").json()["data"][0]["probs"]) == 9


@pytest.mark.parametrize("before", [True, False])
def test_a_shape_without_room_is_told_and_not_kept(
    start: Start,
    make_task: Callable[..., Task],
    settings: ServingSettings,
    monkeypatch: pytest.MonkeyPatch,
    *,
    before: bool,
) -> None:
    service = start()
    call = client(service, settings)
    if before:
        put(call, make_task("topic"))
        state(call, "topic")

    def full(growth: Growth, keys: Any) -> None:
        raise OutOfSpace("no room; raise --device-memory-gb")

    monkeypatch.setattr(Growth, "_open", full)
    assert put(call, make_task("topic", outputs=9)).status_code == 202
    state(call, "topic")
    wait_for_preparations(service)
    service.following.refresh()  # what was not kept is a change of the repository too
    answer = call("GET", "/v1/tasks/topic")
    assert "--device-memory-gb" in answer.text
    assert not before or answer.json()["state"] == "failed"
    assert answer.status_code == (200 if before else 507)
    assert ask(call, "topic").status_code == (200 if before else 404)
    assert len(list(call("GET", "/v1/tasks").json()["tasks"])) == before


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("error", [EngineFailure("a program could not be compiled"), Saturated("no progress")])
def test_a_shape_that_cannot_be_had_now_comes_later(
    start: Start,
    make_task: Callable[..., Task],
    settings: ServingSettings,
    monkeypatch: pytest.MonkeyPatch,
    error: JpetsError,
    *,
    own: bool,
) -> None:
    """As where the process that compiles was killed: neither an upload nor a restart is needed."""
    service = start()
    call, opened = client(service, settings), Growth._open
    service.preparations._retry_seconds = 0.5
    errors = [error, error]

    def failing(growth: Growth, keys: Any) -> None:
        if errors:
            raise errors.pop()
        opened(growth, keys)

    monkeypatch.setattr(Growth, "_open", failing)
    if own:
        assert put(call, make_task("topic")).status_code == 202
    else:
        service.repository.put("topic", memoryview(task_to_bytes(make_task("topic"))))
        service.following.refresh()
    found, states = [], []

    def answered() -> bool:
        if (answer := ask(call, "topic")).status_code == 200:
            return True
        found.append(answer.json()["error"]["code"])
        shown = call("GET", "/v1/tasks/topic").json()
        states.append((shown["state"], shown["problem"]))
        return False

    wait_until(answered)
    assert set(found) == {"preparing"} and not errors
    assert ("preparing", error.message) in states
    assert {state for state, _ in states} <= {"preparing", "ready"}
    assert service.preparations.get(TaskName("default", "topic")) is None


def test_an_upload_that_fails_costs_no_older_version(
    start: Start, make_task: Callable[..., Task], settings: ServingSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The repository keeps five."""
    service = start()
    call = client(service, settings)

    def versions() -> list[int]:
        return [stored.version for stored in service.repository.versions("topic")]

    for _ in range(5):
        assert put(call, make_task("topic")).status_code in (201, 202)
        state(call, "topic")
    with monkeypatch.context() as broken:
        broken.setattr(Preparations, "serve", mock.Mock(side_effect=Saturated("not now")))
        assert put(call, make_task("topic")).status_code == 503
    assert versions() == [1, 2, 3, 4, 5]
    failing = mock.Mock(side_effect=OSError(errno.EMFILE, "Too many open files"))  # of another upload of its commit
    with monkeypatch.context() as busy:
        busy.setattr(service.repository, "retain", failing)
        answer = put(call, make_task("topic"))
        assert (answer.status_code, answer.json()["version"]) == (201, 7), "it is served all the same"
    assert failing.call_count == 1 and versions() == [1, 2, 3, 4, 5, 7]
    assert put(call, make_task("topic")).status_code == 201
    assert versions() == [3, 4, 5, 7, 8]


def test_a_task_that_is_deleted_meanwhile_stays_away(
    start: Start, make_task: Callable[..., Task], settings: ServingSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = start()
    call, opened = client(service, settings), Growth._open

    def slow(growth: Growth, keys: Any) -> None:
        assert call("DELETE", "/v1/tasks/topic").status_code == 204
        opened(growth, keys)

    monkeypatch.setattr(Growth, "_open", slow)
    assert put(call, make_task("topic")).status_code == 202
    service.engine.prepare(service.tasks.layouts.classes(make_task("topic"))).result(60)
    assert ask(call, "topic").status_code == 404


def test_what_others_add_is_served_too(start: Start, make_task: Callable[..., Task], settings: ServingSettings) -> None:
    service = start()
    call = client(service, settings)
    service.repository.put("beside", memoryview(task_to_bytes(make_task("beside"))))

    def answered() -> bool:
        service.following.refresh()
        return ask(call, "beside").status_code == 200

    wait_until(answered)


def test_many_tasks_of_a_new_class_are_read_one_at_a_time(
    start: Start, make_task: Callable[..., Task], settings: ServingSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Thousands may wait for one class; those that others stored are read when they are asked for."""
    service = start()
    call, opened, threads = client(service, settings), Growth._open, []

    def slow(growth: Growth, keys: Any) -> None:
        for number in range(20):
            service.repository.put(f"beside-{number}", memoryview(task_to_bytes(make_task(f"beside-{number}"))))
        service.following.refresh()
        threads.append(threading.active_count())
        opened(growth, keys)

    before = threading.active_count()
    monkeypatch.setattr(Growth, "_open", slow)
    assert put(call, make_task("topic")).status_code == 202
    assert state(call, "topic").json()["state"] == "ready"
    wait_for_preparations(service)
    assert threads[0] < before + 10
    assert [ask(call, f"beside-{number}").status_code for number in (0, 19)] == [200, 200]


def test_a_server_that_does_not_grow_names_the_option(
    start: Start, make_task: Callable[..., Task], settings: ServingSettings
) -> None:
    service = start()
    service.changes.check_shape(make_task("topic"))  # it would get the class, so a job may make such a task
    service = start(growing=False)
    with pytest.raises(UnknownClass):
        service.changes.check_shape(make_task("topic"))
    answer = put(client(service, settings), make_task("topic"))
    assert (answer.status_code, answer.json()["error"]["code"]) == (422, "unknown_class")
    assert "--reserve" in answer.text
