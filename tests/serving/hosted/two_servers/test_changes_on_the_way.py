"""Changes by others while a task waits for its classes, is read, or has queries."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any
from unittest import mock

import pytest
from clients import wait_for_preparations
from server_pair import Server, Upload
from support import paused, wait_until

from checkpoints.repository import Repository
from jpets.deltas.protocol import ClassKey
from jpets.errors import EngineFailure, OutOfSpace, UnknownClass
from jpets.types import Query, TaskName


@pytest.fixture
def preparations(servers: tuple[Server, Server], monkeypatch: pytest.MonkeyPatch) -> list[Future[None]]:
    """Futures that the second server waits for: its engine has no classes until the test says so."""
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
    wait_for_preparations(second.service)
    old = second.ask("shape")
    assert old == first.ask("shape")
    first.put("shape", upload("shape", seed=2))
    for _ in range(2):
        second.service.following.refresh()
        assert second.ask("shape") == old and len(preparations) == 1
    preparations.pop().set_result(None)
    wait_for_preparations(second.service)
    assert second.ask("shape") == first.ask("shape") != old


@pytest.mark.parametrize("change", ["replace", "rollback", "delete"])
def test_what_waits_for_its_classes_does_not_come_after_a_later_change(
    servers: tuple[Server, Server], upload: Upload, preparations: list[Future[None]], change: str
) -> None:
    first, second = servers
    first.put("late", upload("late", seed=1))
    second.service.following.refresh()
    preparations[0].set_result(None)
    wait_for_preparations(second.service)
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
    wait_for_preparations(second.service)
    assert second.service.preparations.get(TaskName.of("late")) is None
    assert second.service.tasks.version(TaskName.of("late")) == first.service.tasks.version(TaskName.of("late"))
    assert second.ask("late") == first.ask("late")


def test_a_server_without_room_takes_nothing_of_others_away(
    servers: tuple[Server, Server], upload: Upload, preparations: list[Future[None]]
) -> None:
    """It says that it has no room, and does not answer with an old version."""
    first, second = servers
    first.put("large", upload("large", seed=1))
    second.service.following.refresh()
    preparations.pop().set_exception(OutOfSpace("no room; raise --device-memory-gb"))
    wait_for_preparations(second.service)
    assert second.call("GET", "/v1/tasks/large").json()["state"] == "failed"
    version = first.put("large", upload("large", seed=2))
    second.service.following.refresh()
    preparations.pop().set_exception(OutOfSpace("no room; raise --device-memory-gb"))
    wait_for_preparations(second.service)
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
    """Its queries wait for it meanwhile: they get the new version, or are told that it is gone."""
    first, second = servers
    first.put("late", upload("late", seed=1))
    with contextlib.closing(Repository(first.repository.folder, keep_versions=1)) as beside:
        known = second.service.tasks.layouts.known(TaskName.of("late"))
        assert known is not None
        second.service.tasks.register(second.engine, known)  # as a refresh does, but it is not brought yet
        if change == "replace":
            for _ in range(2):  # the version that was served before a last one stays
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
    """The query was accepted; its task is deleted while it is read."""
    first, second = servers
    first.put("late", upload("late", seed=1))
    read, changed = second.repository.read, threading.Event()

    def slow(stored: Any) -> bytes:
        if not changed.is_set():
            with contextlib.closing(Repository(first.repository.folder, keep_versions=1)) as beside:
                if change == "replace":
                    for _ in range(2):
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


def test_an_old_version_serves_until_one_from_elsewhere_is_read(
    servers: tuple[Server, Server], upload: Upload, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A storage that is slow, or does not answer, costs the task's queries nothing."""
    first, second = servers
    first.put("slow", upload("slow", seed=1))
    second.service.following.refresh()
    old, repository, may = second.ask("slow"), second.service.tasks.repository, threading.Event()
    read, failing = repository.read, [EngineFailure("the storage does not answer")]

    def slow(stored: Any) -> bytes:
        assert may.wait(30)
        if failing:
            raise failing.pop()
        return read(stored)

    monkeypatch.setattr(repository, "read", slow)
    first.put("slow", upload("slow", seed=2))
    for _ in range(2):
        second.service.following.refresh()
        assert second.ask("slow") == old
    may.set()
    wait_until(lambda: not failing)
    second.service.following.refresh()  # finds that it could not be read: the catalogue was, and others are followed
    assert second.ask("slow") == old

    def followed() -> bool:
        second.service.following.refresh()
        return bool(second.ask("slow") == first.ask("slow"))

    wait_until(followed)
    assert second.ask("slow") != old
    assert second.service.tasks.version(TaskName.of("slow")) == 2
    assert not second.service.preparations._ahead._reading


@pytest.mark.parametrize("refusal", [UnknownClass("no such class"), OutOfSpace("no slot")])
def test_a_version_that_the_engine_refuses_is_registered_and_not_tried_for_ever(
    servers: tuple[Server, Server], upload: Upload, monkeypatch: pytest.MonkeyPatch, refusal: Exception
) -> None:
    """Its queries are told why; the old version would answer for it for ever."""
    first, second = servers
    first.put("odd", upload("odd", seed=1))
    second.service.following.refresh()
    second.ask("odd")
    add = mock.Mock(side_effect=refusal)
    monkeypatch.setattr(second.service.tasks, "add", add)
    version = first.put("odd", upload("odd", seed=2))

    def registered() -> bool:
        second.service.following.refresh()
        return second.service.tasks.version(TaskName.of("odd")) == version

    wait_until(registered)
    second.service.following.refresh()
    assert add.call_count == 1 and not second.service.preparations._ahead._reading
    assert second.ask("odd") == first.ask("odd")


def begin_to_read(
    servers: tuple[Server, Server], upload: Upload, monkeypatch: pytest.MonkeyPatch, name: str
) -> threading.Event:
    """A task on the second server's device, whose second version is being read there until the event is set."""
    first, second = servers
    first.put(name, upload(name, seed=1))
    second.service.following.refresh()
    second.ask(name)
    may, read = threading.Event(), second.service.tasks.repository.read
    monkeypatch.setattr(second.service.tasks.repository, "read", lambda stored: (may.wait(30), read(stored))[1])
    first.put(name, upload(name, seed=2))
    second.service.following.refresh()
    return may


def test_what_is_read_is_forgotten_where_the_old_version_comes_back(
    servers: tuple[Server, Server], upload: Upload, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = servers
    may = begin_to_read(servers, upload, monkeypatch, "back")
    assert second.service.preparations._ahead._reading
    assert first.call("POST", "/v1/tasks/back/rollback").is_success
    second.service.following.refresh()
    may.set()
    assert not second.service.preparations._ahead._reading
    assert second.ask("back") == first.ask("back")


def test_many_slow_versions_are_read_side_by_side_in_one_look(
    servers: tuple[Server, Server], upload: Upload, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = servers
    names = [f"many-{n}" for n in range(4)]
    for name in names:
        first.put(name, upload(name, seed=1))
    second.service.following.refresh()
    for name in names:
        second.ask(name)
    may, read, begun = threading.Event(), second.service.tasks.repository.read, list[str]()

    def slow(stored: Any) -> bytes:
        begun.append(stored.id)
        assert may.wait(30)
        return read(stored)

    monkeypatch.setattr(second.service.tasks.repository, "read", slow)
    for name in names:
        first.put(name, upload(name, seed=2))
    second.service.following.refresh()
    wait_until(lambda: len(begun) == 4)
    may.set()

    def followed() -> bool:
        second.service.following.refresh()
        return all(second.service.tasks.version(TaskName.of(name)) == 2 for name in names)

    wait_until(followed)


def test_a_version_that_is_deleted_while_it_is_read_does_not_come(
    servers: tuple[Server, Server], upload: Upload, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = servers
    may = begin_to_read(servers, upload, monkeypatch, "gone")
    first.call("DELETE", "/v1/tasks/gone")
    second.service.following.refresh()
    may.set()
    second.service.following.refresh()
    time.sleep(0.1)
    second.service.following.refresh()
    assert second.service.tasks.version(TaskName.of("gone")) is None
    assert not second.service.preparations._ahead._reading
