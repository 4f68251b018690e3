"""A server on a catalogue that tells of changes looks when it is told of one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from server_pair import Server, Upload, make_server
from support import wait_until

import jpets.repeated
import serving.hosted.services
from checkpoints.backbone import Backbone
from checkpoints.index import IndexedTask
from checkpoints.repository import Repository
from checkpoints.versions import StoredTask
from jpets.repeated import Repeated
from jpets.types import TaskName
from jpets.watch import Watch
from serving.http.settings import ServingSettings

NAME = TaskName.of("followed")
NEVER = 3600.0


@pytest.fixture
def period() -> float:
    """Seconds between looks by time where nobody tells, or where something is left to do."""
    return 0.01


@pytest.fixture
def server(
    schema: str,
    period: float,
    backbone: Backbone,
    validator: Any,
    settings: ServingSettings,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Server]:
    """It follows by itself, and has heard that it is told of changes."""

    def repeated(call: Callable[[], object], what: str, *_: Any, watch: Watch | None = None) -> Repeated:
        return Repeated(call, what, period, watch)

    monkeypatch.setattr(serving.hosted.services, "Repeated", repeated)
    monkeypatch.setattr(jpets.repeated, "CHECK_SECONDS", NEVER)
    made = make_server(tmp_path / "tasks", backbone, validator, tmp_path / "cache", settings, catalogue=schema)
    watch = made.repository.watch()
    wait_until(lambda: watch.told)
    yield made
    made.services.close()
    made.repository.close()


@pytest.fixture
def beside(schema: str, tmp_path: Path) -> Iterator[Repository]:
    with contextlib.closing(Repository.open(tmp_path / "tasks", catalogue=schema)) as repository:
        yield repository


def follows(server: Server, version: int) -> Callable[[], bool]:
    return lambda: server.service.tasks.version(NAME) == version


@pytest.mark.parametrize("period", [NEVER])
def test_a_server_follows_what_it_is_told(server: Server, beside: Repository, upload: Upload) -> None:
    for seed in (1, 2):
        wait_until(follows(server, beside.put(NAME.id, upload(NAME.id, seed=seed)).version))
    beside.delete(NAME.id)
    wait_until(lambda: not server.services.knows(NAME))


def test_a_task_that_is_being_changed_here_is_looked_at_again(
    server: Server, beside: Repository, upload: Upload
) -> None:
    with server.service.tasks.locks.hold(NAME):
        beside.put(NAME.id, upload(NAME.id))
        wait_until(lambda: server.service.following.unfinished)
    wait_until(follows(server, 1))


@pytest.mark.parametrize("period", [NEVER])
def test_a_version_that_is_not_read_in_time_is_looked_at_again(
    server: Server, beside: Repository, upload: Upload, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its classes had to come first, and nobody tells of a change when they are there."""
    beside.put(NAME.id, upload(NAME.id, seed=1))
    wait_until(follows(server, 1))
    server.ask(NAME.id)
    classes, repository = Future[None](), server.service.tasks.repository
    read = repository.read

    def slow(stored: StoredTask | IndexedTask) -> bytes:
        wait_until(lambda: server.service.following.unfinished)
        return read(stored)

    monkeypatch.setattr(server.engine, "prepare", lambda keys: classes)
    monkeypatch.setattr(repository, "read", slow)
    beside.put(NAME.id, upload(NAME.id, seed=2))
    wait_until(lambda: server.service.preparations.get(NAME) is not None and not server.service.following.unfinished)
    classes.set_result(None)
    wait_until(follows(server, 2))
