"""Backbones come and go while the others serve."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
import weakref
from unittest import mock

import pytest
from backbone_server import GATE, OTHER, SHARED, Start, bitfit_task, classify, state, wait_for
from clients import Call, client_of, samples
from support import wait_until

from checkpoints.backbone import Backbone
from checkpoints.repository import Repository
from checkpoints.task_file import task_to_bytes
from jpets.engine.engine import Engine
from jpets.engine.interface import Serves
from jpets.errors import OutOfSpace, Saturated
from serving.hosted.service import Service
from serving.hosted.services import Services
from serving.http.settings import ServingSettings


def test_unloading_answers_what_runs_and_keeps_the_tasks(call: Call, services: Services) -> None:
    call("PUT", f"/v1/backbones/{OTHER}")
    wait_for(call, OTHER, "ready")
    before = classify(call, "second")
    second = services.started[1]
    assert isinstance(second, Engine)
    replica = weakref.ref(second.replica)
    del second  # it would keep the replica
    codes: list[int] = []
    over = threading.Event()

    def ask(model: str) -> None:
        while not over.is_set():
            codes.append(classify(call, model)[0])

    scraped = [samples(call)]

    def scrape() -> None:
        while not over.is_set():
            scraped.append(samples(call))

    threads = [threading.Thread(target=ask, args=(model,)) for model in ("first", "second")]
    threads.append(threading.Thread(target=scrape))
    for thread in threads:
        thread.start()
    time.sleep(0.1)
    assert call("DELETE", f"/v1/backbones/{OTHER}").status_code == 204
    over.set()
    for thread in threads:
        thread.join()
    assert set(codes) <= {200, 404} and 200 in codes
    scraped.append(samples(call))
    for one, following in itertools.pairwise(scraped):
        counters = {key: value for key, value in one.items() if key[0].endswith("_total")}
        assert counters and not [key for key, value in counters.items() if following.get(key, -1) < value]
    assert classify(call, "second")[0] == 404 and classify(call, "first")[0] == 200
    assert state(call, OTHER) == "available" and len(services.started) == 1
    assert replica() is None, "its memory is free"
    assert call("PUT", f"/v1/backbones/{OTHER}").status_code == 202
    wait_for(call, OTHER, "ready")
    assert classify(call, "second") == before
    assert call("PUT", f"/v1/backbones/{OTHER}").status_code == 200, "it is there already"
    call("DELETE", f"/v1/backbones/{OTHER}")


def test_unloading_waits_for_readers_that_have_its_engine(call: Call, services: Services) -> None:
    """As a scrape does, which reads all engines while one of them goes."""
    call("PUT", f"/v1/backbones/{OTHER}")
    wait_for(call, OTHER, "ready")
    reading = [services.started[1]]
    reference = weakref.ref(reading[0])
    reader = threading.Timer(0.5, reading.clear)
    reader.start()
    assert call("DELETE", f"/v1/backbones/{OTHER}").status_code == 204
    assert reference() is None
    reader.join()


def test_loaded_backbones_are_there_after_a_restart(
    start: Start, repository: Repository, settings: ServingSettings
) -> None:
    def states(server: Services) -> dict[str, str]:
        return {hosted.name: hosted.state for hosted in server.backbones.list()}

    with contextlib.closing(start()) as server:
        server.backbones.load(OTHER)
        server.backbones.load("broken")
        wait_for(client_of(server, settings), OTHER, "ready")
        wait_for(client_of(server, settings), "broken", "failed")
    repository.keep_backbone("gone")
    with contextlib.closing(start()) as server:
        call = client_of(server, settings)
        wait_for(call, OTHER, "ready")
        assert states(server)["broken"] == "available" and "gone" not in states(server)
        assert classify(call, "second")[0] == 200
        server.backbones.unload(OTHER)
    with contextlib.closing(start()) as server:
        assert states(server)[OTHER] == "available"
    repository.forget_backbone("gone")


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("broken", "lacks hidden_size"),
        ("renamed", "calls itself 'misnamed'"),
        ("copy", "the same backbone as 'tiny-bert'"),
    ],
)
def test_what_cannot_be_loaded_says_why(call: Call, name: str, part: str) -> None:
    assert call("PUT", f"/v1/backbones/{name}").status_code == 202
    wait_for(call, name, "failed")
    item = next(each for each in call("GET", "/v1/backbones").json()["backbones"] if each["name"] == name)
    assert part in item["problem"]
    assert classify(call, "first")[0] == 200
    assert call("DELETE", f"/v1/backbones/{name}").status_code == 204
    assert state(call, name) == "available"


@pytest.mark.parametrize("part", ["close", "drain", "count"])
def test_a_backbone_that_does_not_close_well_is_gone_all_the_same(
    call: Call, loaded: None, services: Services, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    def close(service: Service) -> None:
        shut(service)
        raise RuntimeError("a thread did not end")

    with monkeypatch.context() as broken:
        shut = Service.close
        if part == "close":
            broken.setattr(Service, "close", close)
        else:
            name = "_idle" if part == "drain" else "counted"
            broken.setattr(f"serving.hosted.backbones.{name}", mock.Mock(side_effect=RuntimeError))
        assert call("DELETE", f"/v1/backbones/{OTHER}").status_code == 204
    names = {item["name"]: item["state"] for item in call("GET", "/v1/backbones").json()["backbones"]}
    assert names[OTHER] == "available"
    assert call("PUT", f"/v1/backbones/{OTHER}").status_code == 202
    wait_for(call, OTHER, "ready")


def test_housekeeping_that_fails_is_no_reason_not_to_start(
    start: Start, repository: Repository, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*given: object) -> None:
        raise OutOfSpace("the disk is full")

    with monkeypatch.context() as patch:
        for name in ("collect", "age_uses"):
            patch.setattr(repository, name, full)
        with contextlib.closing(start()) as server:
            assert server.first.ready
    assert "task files were not removed: the disk is full" in caplog.text


def test_no_task_takes_the_name_of_a_backbone_that_may_be_loaded(call: Call, backbone: Backbone) -> None:
    """Else it could not be loaded any more. A task that was there before goes on."""
    for name, status in (("broken", 422), (OTHER, 422), ("first", 201)):
        answer = call("PUT", f"/v1/tasks/{name}", content=task_to_bytes(bitfit_task(backbone, name, 1)))
        assert answer.status_code == status, answer.text
        assert status == 201 or "name of a backbone" in answer.text


def test_what_is_refused(call: Call) -> None:
    assert call("PUT", "/v1/backbones/unheard-of").status_code == 404
    assert call("PUT", "/v1/backbones/first").status_code == 409, "a task has the name"
    assert call("PUT", "/v1/backbones/tiny-bert").status_code == 200
    assert call("DELETE", "/v1/backbones/tiny-bert").status_code == 409
    assert call("DELETE", f"/v1/backbones/{OTHER}").status_code == 404


def test_changes_while_a_backbone_starts(call: Call, services: Services, backbone: Backbone, other: Backbone) -> None:
    GATE.clear()
    try:
        call("PUT", f"/v1/backbones/{OTHER}")
        wait_for(call, OTHER, "starting")
        named = call("PUT", f"/v1/tasks/{OTHER}", content=task_to_bytes(bitfit_task(backbone, OTHER, 3)))
        assert named.status_code == 422 and "name of" in named.text
        assert call("PUT", f"/v1/backbones/{OTHER}").status_code == 202
        assert call("DELETE", f"/v1/backbones/{OTHER}").status_code == 409, "it is starting"
        (stored,) = (task for task in services.repository.index("") if task.id == "second")
        content = services.repository.read(stored)
        assert call("DELETE", "/v1/tasks/second").status_code == 204
    finally:
        GATE.set()
    wait_for(call, OTHER, "ready")
    assert classify(call, "second")[0] == 404
    assert call("PUT", "/v1/tasks/second", content=content).status_code == 201
    assert classify(call, "second")[0] == 200
    call("DELETE", f"/v1/backbones/{OTHER}")


def test_one_is_unloaded_while_another_starts(call: Call, services: Services) -> None:
    """Its memory is free, and stays reserved for the starting backbone until that is ready."""
    call("PUT", f"/v1/backbones/{OTHER}")
    wait_for(call, OTHER, "ready")
    second = services.started[1]
    assert isinstance(second, Engine)
    replica = weakref.ref(second.replica)
    del second  # it would keep the replica
    GATE.clear()
    try:
        call("PUT", "/v1/backbones/third")
        wait_for(call, "third", "starting")
        SHARED.clear()
        assert call("DELETE", f"/v1/backbones/{OTHER}").status_code == 204
        assert replica() is None and not SHARED
    finally:
        GATE.set()
    wait_for(call, "third", "ready")
    assert SHARED.pop() == len(services.started) == 2
    assert call("DELETE", "/v1/backbones/third").status_code == 204


def test_a_backbone_that_fails_after_its_start_is_gone(
    call: Call, services: Services, repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines: list[Serves] = []

    def full(name: str) -> None:
        assert classify(call, "second")[0] == 200
        engines.append(services.started[1])
        raise Saturated("the catalogue is busy")

    with monkeypatch.context() as patch:
        patch.setattr(repository, "keep_backbone", full)
        call("PUT", f"/v1/backbones/{OTHER}")
        wait_for(call, OTHER, "failed")
    wait_until(lambda: not engines[0].live)
    assert len(services.started) == 1 and classify(call, "second")[0] == 404
    call("PUT", f"/v1/backbones/{OTHER}")
    wait_for(call, OTHER, "ready")
    assert classify(call, "second")[0] == 200
    call("DELETE", f"/v1/backbones/{OTHER}")
