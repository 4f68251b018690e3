"""Several backbones in one server: tasks go by their own, which come and go while the others serve."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from clients import Call, client_of, samples
from support import wait_until

from checkpoints.backbone import Backbone
from checkpoints.repository import Repository
from checkpoints.source import load_backbone
from checkpoints.task_file import fingerprint_of, read_task, task_to_bytes
from jpets.config import EngineSettings
from jpets.deltas import METHODS
from jpets.deltas.protocol import ClassKey
from jpets.engine.batch.bucket import Bucket
from jpets.engine.engine import Engine
from jpets.engine.interface import Serves
from jpets.errors import InvalidBackbone, Saturated
from jpets.types import Head, Query, Task, TaskName
from serving.hosted.repository import Validator
from serving.hosted.service import MakeEngine, Service
from serving.hosted.services import Services
from serving.http.settings import ServingSettings

FIXTURES = Path(__file__).parents[2] / "fixtures"
SETTINGS = EngineSettings(
    dtype="float32", max_length=16, max_batch_tokens=64, max_batch_rows=4, slots=7, background_compile=False
)
BUCKETS = [Bucket(64, ((4, 16),))]
OTHER = "tiny-distilbert"
GATE = threading.Event()
GATE.set()
"""Engines are made only while it is open."""
SHARED: deque[int] = deque(maxlen=1)
"""Among how many engines memory was shared last."""


def bitfit_task(backbone: Backbone, id: str, seed: int) -> Task:
    rng = np.random.default_rng(seed)
    delta = METHODS["bitfit"].init(rng, {}, backbone.config, 0.1)
    kernel = rng.standard_normal((backbone.config.hidden_size, 3)).astype(np.float32)
    head = Head("sequence-classification", {"kernel": kernel, "bias": np.zeros(3, np.float32)})
    return Task(id, backbone.ref(), (delta,), head, ("a", "b", "c"))


@pytest.fixture(scope="module")
def other() -> Backbone:
    return load_backbone(FIXTURES / OTHER)


def validator(own: Backbone) -> Validator:
    return lambda data, id: read_task(data, id=id, config=own.config, backbone=own.fingerprint)


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory, backbone: Backbone, other: Backbone) -> Iterator[Repository]:
    """``first`` is a task of tiny-bert, ``second`` and ``price`` are of tiny-distilbert."""
    made = Repository(tmp_path_factory.mktemp("repository"), validator=validator(backbone))
    made.put("first", task_to_bytes(bitfit_task(backbone, "first", 1)))
    made.put("second", task_to_bytes(bitfit_task(other, "second", 2)), validator=validator(other))
    price = bitfit_task(other, "price", 5)
    price = dataclasses.replace(price, head=dataclasses.replace(price.head, problem="regression"), labels=())
    made.put("price", task_to_bytes(price), validator=validator(other))
    yield made
    made.close()


Start = Callable[[], Services]


@pytest.fixture(scope="module")
def start(
    tmp_path_factory: pytest.TempPathFactory, repository: Repository, backbone: Backbone, other: Backbone
) -> Start:
    """Starts a server of tiny-bert; tiny-distilbert may be loaded."""
    cache = tmp_path_factory.mktemp("cache")

    def make(own: Backbone, engines: Callable[[], Sequence[Serves]], coming: Mapping[ClassKey, int]) -> Serves:
        assert GATE.wait(30)
        return Engine(own, (), SETTINGS, coming=coming, cache_dir=cache, buckets=BUCKETS)

    def service(own: Backbone) -> Service:
        return Service(repository, own, validator(own))

    def open_backbone(name: str, engines: Callable[[], Sequence[Serves]]) -> tuple[Service, MakeEngine]:
        assert engines()
        if name == "broken":
            raise InvalidBackbone("config.json lacks hidden_size")
        own = {
            OTHER: other,
            "copy": dataclasses.replace(backbone, name="copy"),
            "third": dataclasses.replace(other, name="third", fingerprint="sha256:3"),
        }.get(name, dataclasses.replace(other, name="misnamed"))
        return service(own), partial(make, own, engines)

    def started() -> Services:
        found = Services(
            service(backbone),
            available=lambda: [OTHER, "broken", "renamed", "copy", "first", "third"],
            open_backbone=open_backbone,
            backbone_of=fingerprint_of,
            share_memory=lambda engines: SHARED.append(len(engines)),
        )
        found.start(partial(make, backbone, tuple))
        return found

    return started


@pytest.fixture(scope="module")
def services(start: Start) -> Iterator[Services]:
    found = start()
    yield found
    found.close()


@pytest.fixture
def call(services: Services, settings: ServingSettings) -> Call:
    return client_of(services, settings)


@pytest.fixture
def loaded(call: Call) -> Iterator[None]:
    call("PUT", f"/v1/backbones/{OTHER}")
    wait_for(call, OTHER, "ready")
    yield
    if state(call, OTHER) == "ready":
        assert call("DELETE", f"/v1/backbones/{OTHER}").status_code == 204


def state(call: Call, name: str) -> str:
    return next(item["state"] for item in call("GET", "/v1/backbones").json()["backbones"] if item["name"] == name)


def wait_for(call: Call, name: str, wanted: str) -> None:
    end = time.monotonic() + 60
    while state(call, name) != wanted:
        assert time.monotonic() < end, state(call, name)
        time.sleep(0.02)


def classify(call: Call, model: str) -> Any:
    answer = call("POST", "/v1/classify", json={"model": model, "input": "hello world"})
    return answer.status_code, answer.json().get("data")


def test_tasks_of_another_backbone_wait_for_it(call: Call) -> None:
    assert classify(call, "first")[0] == 200
    assert classify(call, "second")[0] == 404
    names = {item["name"]: item["state"] for item in call("GET", "/v1/backbones").json()["backbones"]}
    assert names == {
        "tiny-bert": "ready",
        OTHER: "available",
        "broken": "available",
        "renamed": "available",
        "copy": "available",
        "first": "available",
        "third": "available",
    }


def test_one_request_asks_tasks_of_both(call: Call, loaded: None, other: Backbone, services: Services) -> None:
    models = ["first", "second", None, "tiny-bert", OTHER]
    answer = call("POST", "/v1/classify", json={"inputs": [{"model": m, "text": "hello world"} for m in models]})
    first, second, plain, named, theirs = answer.json()["data"]
    assert first["probs"] == classify(call, "first")[1][0]["probs"]
    assert second["probs"] == classify(call, "second")[1][0]["probs"]
    assert plain["embedding"] == named["embedding"]
    np.testing.assert_allclose(np.linalg.norm(theirs["embedding"]), 1, atol=1e-5)
    alone = call("POST", "/v1/embeddings", json={"model": OTHER, "input": "hello world"}).json()["data"][0]
    np.testing.assert_allclose(alone["embedding"], theirs["embedding"], atol=1e-6)
    assert len(theirs["embedding"]) == len(plain["embedding"]) and theirs["embedding"] != plain["embedding"]
    outputs = call("GET", f"/v2/models/{OTHER}").json()
    assert (outputs["outputs"][0]["shape"], outputs["versions"]) == ([-1, other.config.hidden_size], ["1"])
    item = next(each for each in call("GET", "/v1/backbones").json()["backbones"] if each["name"] == OTHER)
    assert (item["fingerprint"], item["tasks"], item["default"]) == (other.fingerprint, 3, False)
    assert item["device_bytes"] > 0
    found = samples(call)
    assert found["jpets_device_tasks", (("device", "0"),)] == 4
    assert found["jpets_batches_total", ()] >= 4
    assert len(services.started) == 2


def test_uploads_go_to_their_own_backbone(call: Call, loaded: None, backbone: Backbone, other: Backbone) -> None:
    assert call("PUT", "/v1/tasks/third", content=task_to_bytes(bitfit_task(other, "third", 3))).status_code == 201
    assert classify(call, "third")[0] == 200
    clash = call("PUT", "/v1/tasks/third", content=task_to_bytes(bitfit_task(backbone, "third", 3)))
    assert clash.status_code == 409 and OTHER in clash.text
    for name in ("tiny-bert", OTHER):
        named = call("PUT", f"/v1/tasks/{name}", content=task_to_bytes(bitfit_task(other, name, 3)))
        assert named.status_code == 422 and "name of" in named.text
    assert call("PUT", "/v1/tasks/third", content=task_to_bytes(bitfit_task(other, "third", 4))).json()["loaded"] == 2
    assert call("POST", "/v1/tasks/third/rollback").json()["version"] == 1
    assert call("DELETE", "/v1/tasks/third").status_code == 204
    assert classify(call, "third")[0] == 404


def test_unloading_answers_what_runs_and_keeps_the_tasks(call: Call, services: Services) -> None:
    call("PUT", f"/v1/backbones/{OTHER}")
    wait_for(call, OTHER, "ready")
    before = classify(call, "second")
    replica = weakref.ref(services.started[1].replica)
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


def test_changes_while_the_repository_is_read_again(
    call: Call, loaded: None, services: Services, other: Backbone, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What comes, goes or changes after the changes were read stays as it is."""
    own, repository = services.all[1], services.repository
    changes, first = repository.changes, iter([True])

    def put(name: str, seed: int) -> None:
        assert call("PUT", f"/v1/tasks/{name}", content=task_to_bytes(bitfit_task(other, name, seed))).is_success

    def late(since: int) -> Any:
        found = changes(since)
        if next(first, False):
            put("coming", 1)
            put("changing", 2)
            assert call("DELETE", "/v1/tasks/going").status_code == 204
        return found

    for name in ("going", "changing"):
        put(name, 1)
    monkeypatch.setattr(repository, "changes", late)
    own.following.refresh()
    assert [classify(call, name)[0] for name in ("coming", "changing", "going")] == [200, 200, 404]
    assert (
        own.tasks.version(TaskName.of("coming")),
        own.tasks.version(TaskName.of("changing")),
        own.tasks.version(TaskName.of("going")),
    ) == (1, 2, None)
    for name in ("coming", "changing"):
        call("DELETE", f"/v1/tasks/{name}")


def test_no_stored_task_takes_the_place_of_a_plain_backbone(
    call: Call, loaded: None, services: Services, repository: Repository, other: Backbone
) -> None:
    def plain() -> Any:
        return call("POST", "/v1/embeddings", json={"model": OTHER, "input": "hello world"}).json()["data"]

    before = plain()
    assert call("DELETE", f"/v1/tasks/{OTHER}").status_code == 404
    assert plain() == before
    repository.put(OTHER, task_to_bytes(bitfit_task(other, OTHER, 1)), validator=validator(other))
    services.refresh()
    assert plain() == before
    repository.delete(OTHER)
    services.refresh()
    assert plain() == before


def test_one_is_unloaded_while_another_starts(call: Call, services: Services) -> None:
    """Its memory is free, and stays that of the one that starts until that is there."""
    call("PUT", f"/v1/backbones/{OTHER}")
    wait_for(call, OTHER, "ready")
    replica = weakref.ref(services.started[1].replica)
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
    wait_until(lambda: not engines[0].live, 30)
    assert len(services.started) == 1 and classify(call, "second")[0] == 404
    call("PUT", f"/v1/backbones/{OTHER}")
    wait_for(call, OTHER, "ready")
    assert classify(call, "second")[0] == 200
    call("DELETE", f"/v1/backbones/{OTHER}")


def test_a_task_without_labels_is_read_by_its_own_backbone(call: Call, loaded: None, services: Services) -> None:
    own = services.all[1]
    entry = own.engine.entry("price")
    assert entry is not None
    assert own.outlines.read(entry).head.outputs == 3
    assert len(classify(call, "price")[1][0]["values"]) == 3


def test_a_full_submission_to_both_is_refused_as_a_whole(
    call: Call, loaded: None, services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise Saturated("the queue is full")

    monkeypatch.setattr(services.all[1].engine, "submit", full)
    with pytest.raises(Saturated):
        services.submit([Query("first", "a")] * 3 + [Query("second", "a")])


def test_a_file_says_which_backbone_it_is_for(tmp_path: Path, other: Backbone) -> None:
    path = tmp_path / "task.safetensors"
    path.write_bytes(task_to_bytes(bitfit_task(other, "task", 1)))
    assert fingerprint_of(path) == other.fingerprint
    for content in (b"", b"\0" * 8, b"\x02" + b"\0" * 7 + b"{}", b"\xff" * 100):
        path.write_bytes(content)
        assert fingerprint_of(path) is None
