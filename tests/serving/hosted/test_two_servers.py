"""Two servers on one repository, and commands beside them: each soon answers as it lists, whoever changed a task."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from clients import Call, client_of, samples, wait_for_preparations
from faults.two_servers import measure
from listening import listening
from support import paused, wait_until

from checkpoints.backbone import Backbone
from checkpoints.repository import Repository
from checkpoints.task_file import task_to_bytes
from jpets.config import EngineSettings
from jpets.deltas.protocol import ClassKey
from jpets.engine.batch.bucket import Bucket
from jpets.engine.engine import Engine
from jpets.errors import NotFound, OutOfSpace
from jpets.types import Query, Task, TaskName
from serving.app import create_app
from serving.hosted.follower import Follower
from serving.hosted.service import Service
from serving.hosted.services import Services
from serving.http.settings import ServingSettings

SETTINGS = EngineSettings(
    dtype="float32", max_length=16, max_batch_tokens=128, max_batch_rows=8, slots=7, background_compile=False
)
BUCKETS = [Bucket(128, ((8, 16),))]
Upload = Callable[..., bytes]


@dataclasses.dataclass
class Server:
    repository: Repository
    services: Services
    settings: ServingSettings
    call: Call

    @property
    def service(self) -> Service:
        return self.services.first

    @property
    def engine(self) -> Engine:
        found = self.service.engine
        assert isinstance(found, Engine)
        return found

    def put(self, id: str, data: bytes) -> int:
        answer = self.call("PUT", f"/v1/tasks/{id}", content=data)
        assert answer.status_code == 201, answer.text
        return int(answer.json()["version"])

    def ask(self, id: str) -> Any:
        answer = self.call("POST", "/v1/classify", json={"model": id, "input": "hello world"})
        return answer.json()["data"] if answer.is_success else answer.status_code

    def tells(self, ids: Sequence[str]) -> dict[str, Any]:
        """Everything by which a client could tell two servers apart."""
        gauges = samples(self.call)
        return {
            "list": self.call("GET", "/v1/tasks").json(),
            "answers": {id: self.ask(id) for id in ids},
            "versions": {id: self.service.tasks.version(TaskName.of(id)) for id in ids},
            "ready": {id: self.call("GET", f"/v2/models/{id}/ready").status_code for id in ids},
            "known": gauges["jpets_tasks", (("tier", "repository"),)],
        }


def make_server(folder: Path, backbone: Backbone, validator: Any, cache: Path, settings: ServingSettings) -> Server:
    repository = Repository(folder, validator=validator)
    services = Services(Service(repository, backbone, validator))

    def make(coming: Mapping[ClassKey, int]) -> Engine:
        return Engine(backbone, (), SETTINGS, coming=coming, cache_dir=cache, buckets=BUCKETS)

    services.first.start(make)  # nobody follows by themselves: the tests say when
    return Server(repository, services, settings, client_of(services, settings))


@pytest.fixture(scope="module")
def servers(
    tmp_path_factory: pytest.TempPathFactory, backbone: Backbone, validator: Any, make_task: Callable[..., Task]
) -> Iterator[tuple[Server, Server]]:
    """Both know ``always``."""
    folder, cache = tmp_path_factory.mktemp("repository"), tmp_path_factory.mktemp("cache")
    settings = ServingSettings(upload_folder=tmp_path_factory.mktemp("uploads"))
    repository = Repository(folder, validator=validator)
    repository.put("always", task_to_bytes(make_task("always")))
    repository.close()
    made = [make_server(folder, backbone, validator, cache, settings) for _ in range(2)]
    yield made[0], made[1]
    for server in made:
        server.services.close()
        server.repository.close()


@pytest.fixture(autouse=True)
def tidy(servers: tuple[Server, Server]) -> Iterator[None]:
    yield
    first, second = servers
    for stored in first.repository.list()[0]:
        if stored.id != "always":
            first.repository.delete(stored.id)
    for server in servers:
        server.service.following.refresh()
    assert first.tells(["always"]) == second.tells(["always"])


def test_what_one_changes_the_other_answers(servers: tuple[Server, Server], upload: Upload) -> None:
    first, second = servers
    ids = ["always", "new", "changed", "deleted", "renewed", "back"]
    for name in ids[2:]:
        first.put(name, upload(name, seed=1))
    second.service.following.refresh()
    assert first.tells(ids) == second.tells(ids)
    old = second.ask("changed")
    first.put("new", upload("new", seed=2))
    first.put("changed", upload("changed", seed=2))
    assert first.call("DELETE", "/v1/tasks/deleted").status_code == 204
    assert first.call("DELETE", "/v1/tasks/renewed").status_code == 204
    assert first.put("renewed", upload("renewed", seed=3)) == 2
    first.put("back", upload("back", seed=4))
    assert first.call("POST", "/v1/tasks/back/rollback").json()["version"] == 1
    second.service.following.refresh()
    assert first.tells(ids) == second.tells(ids)
    assert second.ask("changed") not in (old, 404) and second.ask("deleted") == 404
    assert second.service.tasks.version(TaskName.of("renewed")) == 2


def test_both_hear_of_commands_beside_them(servers: tuple[Server, Server], upload: Upload, backbone: Backbone) -> None:
    """A folder's store takes what servers of this backbone do not."""
    first, second = servers
    with contextlib.closing(Repository(first.repository.folder)) as beside:
        beside.put("new", upload("new", seed=1))
        beside.put("aside", upload("aside", seed=1), activate=False)
        foreign = dataclasses.replace(backbone.ref(), fingerprint="sha256:" + "0" * 64)
        task = dataclasses.replace(second.repository.task(second.repository.get("always")), backbone=foreign)
        beside.put("foreign", task_to_bytes(task))
        ids = ["new", "aside", "foreign"]
        for server in servers:
            server.service.following.refresh()
        told = first.tells(ids)
        assert told == second.tells(ids)
        assert told["answers"]["foreign"] == 404 and told["answers"]["new"] != 404
        beside.put("new", task_to_bytes(task))  # it becomes one of another backbone
        for server in servers:
            server.service.following.refresh()
        assert first.ask("new") == second.ask("new") == 404


def test_a_refresh_takes_time_by_what_changed(
    servers: tuple[Server, Server], upload: Upload, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that was away for long looks at each changed task once, however often it changed, and at no other."""
    first, second = servers
    with contextlib.closing(Repository(first.repository.folder)) as beside:
        for number in range(12):
            beside.put(f"task-{number % 4}", upload("task", seed=number))
        beside.delete("task-3")
    looked: list[str] = []
    indexed = second.repository.indexed
    monkeypatch.setattr(second.repository, "indexed", lambda id, maker: looked.append(id) or indexed(id, maker))
    second.service.following.refresh()
    assert looked == ["task-0", "task-1", "task-2", "task-3"]
    second.service.following.refresh()
    assert len(looked) == 4
    first.service.following.refresh()
    ids = [f"task-{number}" for number in range(4)]
    assert first.tells(ids) == second.tells(ids)


def test_a_task_that_is_being_changed_here_is_looked_at_again(servers: tuple[Server, Server], upload: Upload) -> None:
    first, second = servers
    first.put("busy", upload("busy", seed=1))
    first.put("other", upload("other", seed=1))
    with second.service.tasks.locks.hold(TaskName.of("busy")):
        second.service.following.refresh()
        assert (
            second.service.tasks.version(TaskName.of("busy")) is None
            and second.service.tasks.version(TaskName.of("other")) == 1
        )
    second.service.following.refresh()
    assert second.service.tasks.version(TaskName.of("busy")) == 1


def test_a_catalogue_that_cannot_be_read_on_the_way_is_read_again(
    servers: tuple[Server, Server], upload: Upload, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = servers
    for name in ("one", "two"):
        first.put(name, upload(name))
    with monkeypatch.context() as patch:
        patch.setattr(second.repository, "indexed", lambda id, maker: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            second.service.following.refresh()
    second.service.following.refresh()
    assert first.tells(["one", "two"]) == second.tells(["one", "two"])


def test_an_older_copy_of_the_catalogue(
    servers: tuple[Server, Server], upload: Upload, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = servers
    first.put("one", upload("one"))
    second.service.following._seen += 1000
    second.service.following.refresh()
    assert first.tells(["one"]) == second.tells(["one"])


@pytest.fixture
def preparations(servers: tuple[Server, Server], monkeypatch: pytest.MonkeyPatch) -> list[Future[None]]:
    """What the second server waits for: its engine has no classes until the test says so."""
    made: list[Future[None]] = []

    def prepare(classes: Sequence[ClassKey]) -> Future[None]:
        made.append(Future())
        return made[-1]

    monkeypatch.setattr(servers[1].engine, "prepare", prepare)
    return made


def test_an_old_version_serves_until_the_classes_of_one_from_elsewhere_are_there(
    servers: tuple[Server, Server], upload: Upload, preparations: list[Future[None]]
) -> None:
    first, second = servers
    first.put("shape", upload("shape", seed=1))
    second.service.following.refresh()
    detail = second.call("GET", "/v1/tasks/shape").json()
    assert (detail["state"], len(preparations)) == ("preparing", 1)
    preparations.pop().set_result(None)
    wait_for_preparations()
    old = second.ask("shape")
    assert old == first.ask("shape")
    first.put("shape", upload("shape", seed=2))
    for _ in range(2):
        second.service.following.refresh()
        assert second.ask("shape") == old and len(preparations) == 1
    preparations.pop().set_result(None)
    wait_for_preparations()
    assert second.ask("shape") == first.ask("shape") != old


@pytest.mark.parametrize("change", ["replace", "rollback", "delete"])
def test_what_waits_for_its_classes_does_not_come_after_a_later_change(
    servers: tuple[Server, Server], upload: Upload, preparations: list[Future[None]], change: str
) -> None:
    first, second = servers
    first.put("late", upload("late", seed=1))
    second.service.following.refresh()
    preparations[0].set_result(None)
    wait_for_preparations()
    first.put("late", upload("late", seed=2))
    second.service.following.refresh()
    if change == "replace":
        first.put("late", upload("late", seed=3))
    elif change == "rollback":
        assert first.call("POST", "/v1/tasks/late/rollback").is_success
    else:
        first.call("DELETE", "/v1/tasks/late")
    second.service.following.refresh()
    for done in preparations[:0:-1]:
        done.set_result(None)
    wait_for_preparations()
    assert second.service.preparations.get(TaskName.of("late")) is None
    assert second.service.tasks.version(TaskName.of("late")) == first.service.tasks.version(TaskName.of("late"))
    assert second.ask("late") == first.ask("late")


def test_a_server_without_room_takes_nothing_of_others_away(
    servers: tuple[Server, Server], upload: Upload, preparations: list[Future[None]]
) -> None:
    """It says so, and does not answer by an old version."""
    first, second = servers
    first.put("large", upload("large", seed=1))
    second.service.following.refresh()
    preparations.pop().set_exception(OutOfSpace("no room; raise --device-memory-gb"))
    wait_for_preparations()
    assert second.call("GET", "/v1/tasks/large").json()["state"] == "failed"
    version = first.put("large", upload("large", seed=2))
    second.service.following.refresh()
    preparations.pop().set_exception(OutOfSpace("no room; raise --device-memory-gb"))
    wait_for_preparations()
    assert second.call("GET", "/v1/tasks/large").json()["state"] == "failed"
    second.service.following.refresh()
    first.service.following.refresh()
    assert (
        first.service.tasks.version(TaskName.of("large"))
        == second.service.tasks.version(TaskName.of("large"))
        == version
    )
    assert [each.version for each in first.repository.versions("large")][-1] == version


@pytest.mark.parametrize("change", ["replace", "delete"])
def test_a_task_changes_elsewhere_before_it_is_read(
    servers: tuple[Server, Server], upload: Upload, change: str
) -> None:
    """Its queries wait for it meanwhile: they get the new version, or hear that it is gone."""
    first, second = servers
    first.put("late", upload("late", seed=1))
    with contextlib.closing(Repository(first.repository.folder, keep_versions=1)) as beside:
        known = second.service.tasks.layouts.known(TaskName.of("late"))
        assert known is not None
        second.service.tasks.register(second.engine, known)  # as a refresh does, but it is not brought yet
        if change == "replace":
            beside.put("late", upload("late", seed=2))
        else:
            beside.delete("late")
            beside.collect()
    answer = second.ask("late")
    first.service.following.refresh()
    assert answer == first.ask("late")
    assert second.service.tasks.version(TaskName.of("late")) == first.service.tasks.version(TaskName.of("late"))
    assert (answer == 404) == (change == "delete")


@pytest.mark.parametrize("change", ["replace", "delete"])
def test_a_task_changes_elsewhere_while_it_is_read(
    servers: tuple[Server, Server], upload: Upload, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    """The query has been taken; what it asks for goes as it is being read."""
    first, second = servers
    first.put("late", upload("late", seed=1))
    read, changed = second.repository.read, threading.Event()

    def slow(stored: Any) -> bytes:
        if not changed.is_set():
            with contextlib.closing(Repository(first.repository.folder, keep_versions=1)) as beside:
                if change == "replace":
                    beside.put("late", upload("late", seed=2))
                else:
                    beside.delete("late")
                beside.collect()
            changed.set()
        return read(stored)

    known = second.service.tasks.layouts.known(TaskName.of("late"))
    assert known is not None
    second.service.tasks.register(second.engine, known)
    monkeypatch.setattr(second.repository, "read", slow)
    answer = second.ask("late")
    first.service.following.refresh()
    assert changed.is_set() and answer == first.ask("late")
    assert (answer == 404) == (change == "delete")


def test_an_upload_that_fails_takes_nothing_of_others_away(
    servers: tuple[Server, Server], upload: Upload, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = servers

    def full(*_: object, **__: object) -> None:
        second.put("both", upload("both", seed=2))  # 201: it was accepted
        raise OutOfSpace("no free slot")

    with monkeypatch.context() as patch:
        patch.setattr(first.engine, "add_task", full)
        assert first.call("PUT", "/v1/tasks/both", content=upload("both", seed=1)).status_code == 507
    first.service.following.refresh()
    assert first.service.tasks.version(TaskName.of("both")) == second.service.tasks.version(TaskName.of("both")) == 2
    assert first.tells(["both"]) == second.tells(["both"])


def test_queries_on_their_way_are_answered_when_their_task_is_deleted_elsewhere(
    servers: tuple[Server, Server], upload: Upload
) -> None:
    first, second = servers
    first.put("going", upload("going"))
    second.service.following.refresh()
    assert second.ask("going") != 404
    with paused(second.engine):
        (future,) = second.services.submit([Query("going", "hello world")])
        first.call("DELETE", "/v1/tasks/going")
        second.service.following.refresh()
        assert second.ask("going") == 404
    assert future.result(30).error is None


def test_a_server_follows_by_itself(servers: tuple[Server, Server], upload: Upload) -> None:
    first, second = servers
    follower = Follower(second.services.refresh, period=0.01)
    assert follower.age is None
    follower.start()
    try:
        for seed in (1, 2):
            version = first.put("followed", upload("followed", seed=seed))
            wait_until(lambda version=version: second.service.tasks.version(TaskName.of("followed")) == version, 30)
        first.call("DELETE", "/v1/tasks/followed")
        wait_until(lambda: not second.services.knows(TaskName.of("followed")), 30)
    finally:
        follower.close()
    assert follower.age is not None and follower.age < 60


def test_both_answer_alike_under_many_changes(servers: tuple[Server, Server], make_task: Callable[..., Task]) -> None:
    """Through both servers, and beside them; each answer is right as soon as its server has the version."""
    files = {
        name: task_to_bytes(dataclasses.replace(make_task(name), labels=tuple(name * number for number in (1, 2, 3))))
        for name in ("one", "two")
    }
    for name, data in files.items():
        servers[0].put(name, data)
    followers = [Follower(server.services.refresh) for server in servers]
    with contextlib.ExitStack() as stack:
        for follower in followers:
            follower.start()
            stack.callback(follower.close)
        urls = [stack.enter_context(listening(create_app(server.services, server.settings))) for server in servers]
        beside = stack.enter_context(contextlib.closing(Repository(servers[0].repository.folder)))
        found = asyncio.run(measure(urls, beside, files, rate=20, seconds=2.4))
    assert found["changes"].keys() == {"upload", "stored beside", "deletion", "rollback"}
    assert found["changes"]["upload"] == 48 and found["changes"]["stored beside"] == 24


def test_a_follower_survives_whatever_happens_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    calls: list[float] = []

    def refresh() -> None:
        calls.append(time.monotonic())
        if len(calls) < 4:
            raise NotFound("gone") if len(calls) % 2 else OSError("read-only")

    caplog.set_level(logging.INFO, "serving.hosted.follower")
    follower = Follower(refresh, period=0.001)
    follower.start()
    wait_until(lambda: len(calls) > 5, 30)
    follower.close()
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]
