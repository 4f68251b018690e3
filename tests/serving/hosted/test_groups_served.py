"""A group of students over HTTP: uploaded, listed, asked, started again, on one device and on two."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import jax
import numpy as np
import pytest
from clients import Call, client_of, samples
from groups import group_task, logits_by_size
from listening import listening
from support import ENGINE_SETTINGS, light_or_mask_task, shallow, wait_until

from checkpoints.repository import Repository
from checkpoints.task_file import read_task, task_to_bytes
from jpets.config import SizingRule
from jpets.deltas.protocol import ClassKey
from jpets.engine.batch.bucket import Bucket
from jpets.engine.compilation.growth import Growth
from jpets.engine.engine import Engine
from jpets.engine.group.group import EngineGroup
from jpets.engine.interface import Serves
from jpets.engine.results.numbers import softmax
from jpets.engine.students.serving import StudentServing
from jpets.types import Task
from serving.app import create_app
from serving.hosted.service import Service
from serving.http.settings import ServingSettings

BUCKETS = [Bucket(64, ((4, 16),))]
TEXTS = ["a chess engine", "the library that it needs"]
SETTINGS = dataclasses.replace(ENGINE_SETTINGS, max_length=16, slots=4)


def validator(data: bytes | memoryview, id: str) -> Task:
    return read_task(data, id=id, config=shallow().config, backbone=shallow().fingerprint)


class Place:
    def __init__(self, folder: Path, cache: Path) -> None:
        self.folder, self.cache = folder, cache
        self.open: list[tuple[Service, Repository]] = []

    def serve(self, devices: int = 1, growing: bool = False) -> Call:
        """``growing``: by a server that has no class yet."""
        repository = Repository(self.folder / "repository", validator=validator)
        service = Service(repository, shallow(), validator, growing=growing)
        how: dict[str, Any] = {"settings": SETTINGS, "cache_dir": self.cache, "buckets": BUCKETS}
        shapes = [] if growing else [*group_task().parts, light_or_mask_task(0)]

        def engine(coming: Mapping[ClassKey, int]) -> Serves:
            rule = SizingRule(fixed=True)
            if devices == 1:
                return StudentServing(Engine(shallow(), reserve=shapes, coming=coming, **how), rule)
            group = EngineGroup(shallow(), jax.local_devices()[:devices], reserve=shapes, coming=coming, **how)
            return StudentServing(group, rule, devices=devices)

        service.start(engine)
        self.open.append((service, repository))
        return client_of(service, ServingSettings(upload_folder=self.folder))

    def close(self) -> None:
        while self.open:
            service, repository = self.open.pop()
            service.close()
            repository.close()


@pytest.fixture
def place(tmp_path: Path, program_cache: Path) -> Iterator[Place]:
    found = Place(tmp_path, program_cache)
    yield found
    found.close()


def assert_data(answer: httpx.Response, task: Task) -> None:
    for item, logits in zip(answer.json()["data"], logits_by_size(task, TEXTS)[-1], strict=True):
        np.testing.assert_allclose(item["probs"], softmax(logits), atol=1e-4)
        assert item["students"] == len(task.parts)


def assert_answers(call: Call, task: Task) -> None:
    assert_data(call("POST", "/v1/classify", json={"model": task.id, "input": TEXTS}), task)
    asked = {"inputs": [{"name": "text", "shape": [2], "datatype": "BYTES", "data": TEXTS}]}
    named = [each["name"] for each in call("GET", f"/v2/models/{task.id}").json()["outputs"]]
    outputs = call("POST", f"/v2/models/{task.id}/infer", json=asked).json()["outputs"]
    assert [each["name"] for each in outputs] == ["logits", "label", "score", "probs", "students"]
    assert named == ["logits", "label", "score", "probs", "json", "students"]
    assert outputs[-1]["datatype"] == "INT64" and outputs[-1]["data"] == [len(task.parts)] * 2


def test_a_group_is_uploaded_asked_and_found_again_after_a_restart(place: Place) -> None:
    call, task = place.serve(), group_task()
    assert call("GET", "/v1/students").json() == {"students": []}
    assert call("PUT", "/v1/tasks/group", content=task_to_bytes(task)).status_code == 201
    assert_answers(call, task)
    told = call("GET", "/v1/tasks/group").json()
    assert told["tier"] == "device" and told["loaded"] == 1 and told["state"] == "ready"
    assert told["metadata"]["students"]["scores"] == list(task.students.scores)  # type: ignore[union-attr]
    (own,) = call("GET", "/v1/students").json()["students"]
    assert (own["groups"], own["largest"], own["answering"], own["fixed"]) == (1, 3, 3, True)
    assert own["answers"] == {"3": 2 * len(TEXTS)}
    found = samples(call)
    assert found["jpets_students_answers_total", (("students", "3"),)] == 2 * len(TEXTS)
    assert own["kept"]["3"] == pytest.approx(found["jpets_students_kept_score", (("students", "3"),)])
    assert own["kept"] == pytest.approx({"1": 0.8 / 0.9, "2": 0.81 / 0.9, "3": 0.82 / 0.9})
    assert found["jpets_students_answering", ()] == 3
    place.close()

    call = place.serve()
    assert call("GET", "/v1/tasks").json()["tasks"][0]["id"] == "group"
    assert_answers(call, task)
    second = group_task(students=2, seed=50)
    assert call("PUT", "/v1/tasks/group", content=task_to_bytes(second)).status_code == 201
    assert_answers(call, second)
    assert call("POST", "/v1/tasks/group/rollback", json={}).status_code == 200
    assert_answers(call, task)
    mixed = [{"model": "group", "text": TEXTS[0]}, {"model": None, "text": TEXTS[0]}]
    item, plain = call("POST", "/v1/classify", json={"inputs": mixed}).json()["data"]
    assert item["students"] == 3 and "students" not in plain
    assert call("DELETE", "/v1/tasks/group").status_code == 204
    assert call("POST", "/v1/classify", json={"model": "group", "input": TEXTS}).status_code == 404


def test_students_of_a_group_are_on_several_devices(place: Place) -> None:
    """By equation 6: the first group's are on devices 0, 1, 2, the second one's on 3, 0, 1."""
    call = place.serve(devices=4)
    for name, devices in (("first", [0, 1, 2]), ("second", [0, 1, 3])):
        task = group_task(name)
        assert call("PUT", f"/v1/tasks/{name}", content=task_to_bytes(task)).status_code == 201
        assert_answers(call, task)
        assert call("GET", f"/v1/tasks/{name}").json()["devices"] == devices


def test_a_group_that_others_stored_is_known_as_one(place: Place) -> None:
    """Also by a server that does not read files for their classes."""
    call, task = place.serve(), group_task()
    ((_, repository),) = place.open
    repository.put("group", task_to_bytes(task))
    ((service, _),) = place.open
    service.following.refresh()
    assert_answers(call, task)


def test_a_file_that_is_no_group_is_refused(place: Place) -> None:
    call, task = place.serve(), group_task()
    assert task.students is not None
    odd = dataclasses.replace(task, deltas=task.deltas[:2])
    content = bytes(task_to_bytes(task)).replace(b":[1.0,0.5,", b":[NaN,0.5,")
    assert call("PUT", "/v1/tasks/group", content=content).status_code == 422
    with pytest.raises(Exception, match="as many deltas for each of 3 students"):
        task_to_bytes(odd)
    with pytest.raises(Exception, match=r"students\.scores"):
        task_to_bytes(dataclasses.replace(task, students=dataclasses.replace(task.students, scores=(0.5,))))
    with pytest.raises(Exception, match="head of one layer"):
        task_to_bytes(dataclasses.replace(task, head=dataclasses.replace(task.head, type="token-classification")))


def test_a_burst_for_a_group_that_is_still_prepared(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until its programs are there queries are told to come again; then all its students answer."""
    opening, go_on, opened = threading.Event(), threading.Event(), Growth._open

    def slow(growth: Growth, keys: Any) -> None:
        opening.set()
        assert go_on.wait(60)
        opened(growth, keys)

    monkeypatch.setattr(Growth, "_open", slow)
    call, task = place.serve(growing=True), group_task()
    ((service, _),) = place.open
    assert call("PUT", "/v1/tasks/group", content=task_to_bytes(task)).status_code == 202
    assert opening.wait(60)
    with listening(create_app(service, ServingSettings())) as url, ThreadPoolExecutor(8) as clients:

        def ask(number: int) -> httpx.Response:
            return httpx.post(f"{url}/v1/classify", json={"model": "group", "input": TEXTS}, timeout=60)

        def burst() -> list[httpx.Response]:
            return list(clients.map(ask, range(16)))

        def whole() -> bool:
            """Whether all get an answer now, each of which is right."""
            found = burst()
            good = [answer for answer in found if answer.is_success]
            assert {answer.status_code for answer in found} <= {200, 503}
            for answer in good:
                assert_data(answer, task)
            return len(good) == len(found)

        early = burst()
        assert {(answer.status_code, answer.json()["error"]["code"]) for answer in early} == {(503, "preparing")}
        go_on.set()
        wait_until(whole)
    assert_answers(call, task)
