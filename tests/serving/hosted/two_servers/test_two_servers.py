"""Two servers on one repository, and commands beside them: each soon answers as it lists, however a task was
changed."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable
from typing import Any

import pytest
from faults.two_servers import measure
from listening import listening
from server_pair import Server, Upload
from support import wait_until

from checkpoints.backbone import Backbone
from checkpoints.repository import Repository
from checkpoints.task_file import task_to_bytes
from jpets.errors import NotFound
from jpets.repeated import Repeated
from jpets.types import Task, TaskName
from serving.app import create_app
from serving.hosted.services import FOLLOWING


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
    """A folder's store accepts tasks that servers of this backbone refuse."""
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
        beside.put("new", task_to_bytes(task))  # it becomes a task of another backbone
        for server in servers:
            server.service.following.refresh()
        assert first.ask("new") == second.ask("new") == 404


def test_a_refresh_takes_time_by_what_changed(
    servers: tuple[Server, Server], upload: Upload, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that was away for long looks only at changed tasks, and once at each, however often it changed."""
    first, second = servers
    with contextlib.closing(Repository(first.repository.folder)) as beside:
        for number in range(12):
            beside.put(f"task-{number % 4}", upload("task", seed=number))
        beside.delete("task-3")
    looked: list[str] = []
    indexed = second.repository.indexed

    def noted(name: TaskName, maker: Any) -> Any:
        looked.append(name.id)
        return indexed(name, maker)

    monkeypatch.setattr(second.repository, "indexed", noted)
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


def test_a_task_whose_change_fails_keeps_no_other_from_being_seen(
    servers: tuple[Server, Server], upload: Upload, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = servers
    for name in ("bad", "good"):
        first.put(name, upload(name))
    following, whole = second.service.following, second.repository.indexed

    def failing(name: TaskName, maker: str) -> Any:
        if name.id == "bad":
            raise OSError("a disk fails")
        return whole(name, maker)

    with monkeypatch.context() as patch:
        patch.setattr(second.repository, "indexed", failing)
        with pytest.raises(OSError, match="a disk fails"):
            following.refresh()
        assert second.service.tasks.version(TaskName.of("good")) == 1
        assert second.service.tasks.version(TaskName.of("bad")) is None
    following.refresh()
    assert first.tells(["bad", "good"]) == second.tells(["bad", "good"])


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


def follows(server: Server, version: int) -> None:
    wait_until(lambda: server.service.tasks.version(TaskName.of("followed")) == version)


def test_a_server_follows_by_itself(servers: tuple[Server, Server], upload: Upload) -> None:
    first, second = servers
    follower = Repeated(second.services.refresh, FOLLOWING, 0.01)
    assert follower.age is None
    follower.start()
    try:
        for seed in (1, 2):
            follows(second, first.put("followed", upload("followed", seed=seed)))
        first.call("DELETE", "/v1/tasks/followed")
        wait_until(lambda: not second.services.knows(TaskName.of("followed")))
    finally:
        follower.close()
    assert follower.age is not None and follower.age < 60


def test_both_answer_alike_under_many_changes(servers: tuple[Server, Server], make_task: Callable[..., Task]) -> None:
    """Changes go through both servers, and past them; each answer is right as soon as its server has the version."""
    files = {
        name: task_to_bytes(dataclasses.replace(make_task(name), labels=tuple(name * number for number in (1, 2, 3))))
        for name in ("one", "two")
    }
    for name, data in files.items():
        servers[0].put(name, data)
    followers = [Repeated(server.services.refresh, FOLLOWING) for server in servers]
    with contextlib.ExitStack() as stack:
        for follower in followers:
            follower.start()
            stack.callback(follower.close)
        urls = [stack.enter_context(listening(create_app(server.services, server.settings))) for server in servers]
        beside = stack.enter_context(contextlib.closing(Repository(servers[0].repository.folder)))
        found = asyncio.run(measure(urls, beside, files, rate=20, seconds=2.4))
        kept = [version.digest for task in beside.list()[0] for version in beside.versions(task.id)]
    assert found["uploads_lost"] == 0
    assert found["changes"].keys() == {"upload", "stored beside", "deletion", "rollback"}
    assert found["changes"]["upload"] == 48 and found["changes"]["stored beside"] == 24
    assert len(set(kept)) == len(kept), "no two files are alike"


def test_a_follower_survives_whatever_happens_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    calls: list[float] = []

    def refresh() -> None:
        calls.append(time.monotonic())
        if len(calls) < 4:
            raise NotFound("gone") if len(calls) % 2 else OSError("read-only")

    caplog.set_level(logging.INFO, "jpets.repeated")
    follower = Repeated(refresh, FOLLOWING, 0.001)
    follower.start()
    wait_until(lambda: len(calls) > 5)
    follower.close()
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]
