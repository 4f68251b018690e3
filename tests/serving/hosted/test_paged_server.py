"""A server with more stored tasks than slots: it knows them all, reads few, and answers for every one."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from clients import Call, client_of, samples
from support import wait_until

from checkpoints.backbone import Backbone
from checkpoints.repository import Repository
from checkpoints.task_file import task_to_bytes
from jpets.config import EngineSettings
from jpets.deltas.protocol import ClassKey
from jpets.engine.batch.bucket import Bucket
from jpets.engine.engine import Engine
from jpets.engine.group.group import EngineGroup
from jpets.engine.interface import Serves
from jpets.engine.tasks.entries import Resident
from jpets.types import Task, TaskName
from serving.hosted.repository import Validator
from serving.hosted.service import Service
from serving.http.settings import ServingSettings

SLOTS = 7
BUCKETS = [Bucket(128, ((8, 16),))]
PAGED = EngineSettings(
    dtype="float32",
    max_length=16,
    max_batch_tokens=128,
    max_batch_rows=8,
    slots=SLOTS,
    max_slots=SLOTS,
    background_compile=False,
)
TASKS = 20
"""``task-0`` to ``task-19``: topics, except that every fifth has several labels, and another fifth an embedding
head."""


@dataclasses.dataclass
class Place:
    """A repository's folder with the tasks, and how to serve it. ``reads`` counts how often each task was read."""

    folder: Path
    backbone: Backbone
    validator: Validator
    cache: Path
    settings: ServingSettings
    reads: Counter[str] = dataclasses.field(default_factory=Counter)
    open: list[tuple[Service, Repository]] = dataclasses.field(default_factory=list)

    def repository(self) -> Repository:
        def validator(data: bytes | memoryview, id: str) -> Task:
            self.reads[id] += 1
            return self.validator(data, id)

        return Repository(self.folder, validator=validator)

    def serve(self, devices: int = 1) -> Service:
        repository = self.repository()
        service = Service(repository, self.backbone, repository._validator)
        how: dict[str, Any] = {"settings": PAGED, "cache_dir": self.cache, "buckets": BUCKETS}

        def engine(coming: Mapping[ClassKey, int]) -> Serves:
            if devices == 1:
                return Engine(self.backbone, coming=coming, **how)
            return EngineGroup(self.backbone, jax.local_devices()[:devices], coming=coming, **how)

        service.start(engine)
        self.open.append((service, repository))
        return service

    def call(self, service: Service) -> Call:
        return client_of(service, self.settings)

    def close(self) -> None:
        while self.open:
            service, repository = self.open.pop()
            service.close()
            repository.close()


def draw(make_task: Callable[..., Task], number: int, seed: int = 0) -> Task:
    how: dict[str, Any] = {"seed": 100 * seed + number}
    if number % 5 == 1:
        how["problem"] = "multi-label"
    if number % 5 == 2:
        how |= {"type": "embedding", "pooling": "mean"}
    return make_task(f"task-{number}", **how)


def engine_of(service: Service) -> Engine:
    assert isinstance(service.engine, Engine)
    return service.engine


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("paged-cache")


@pytest.fixture
def place(
    tmp_path: Path,
    cache: Path,
    backbone: Backbone,
    validator: Validator,
    make_task: Callable[..., Task],
    settings: ServingSettings,
) -> Iterator[Place]:
    own = Place(tmp_path / "repository", backbone, validator, cache, settings)
    repository = own.repository()
    for number in range(TASKS):
        repository.put(f"task-{number}", task_to_bytes(draw(make_task, number)))
    repository.close()
    own.reads.clear()
    yield own
    own.close()


def ask(call: Call, *numbers: int) -> list[Any]:
    inputs = [{"model": f"task-{number}", "text": "hello world"} for number in numbers]
    answer = call("POST", "/v1/classify", json={"inputs": inputs})
    assert answer.status_code == 200, answer.text
    return [{name: value for name, value in item.items() if name != "index"} for item in answer.json()["data"]]


def test_every_stored_task_answers(place: Place) -> None:
    service = place.serve()
    call = place.call(service)
    assert len(engine_of(service).tasks.all()) == SLOTS, "the start brings as many as fit"
    first = ask(call, *range(TASKS))
    assert not any("error" in item for item in first)
    assert all(("labels" in item) == (number % 5 == 1) for number, item in enumerate(first))
    assert all(("embedding" in item) == (number % 5 == 2) for number, item in enumerate(first))
    for number in np.random.default_rng(0).permutation(TASKS):
        (again,) = ask(call, int(number))
        assert again == first[number]
    assert len(engine_of(service).tasks.all()) <= SLOTS
    assert set(place.reads.values()) == {2}, "once for its classes, once to serve it: host memory keeps them all"


def test_every_endpoint_knows_tasks_that_are_not_on_the_device(place: Place) -> None:
    service = place.serve()
    call = place.call(service)
    away = [n for n in range(TASKS) if service.tasks.tier(TaskName.of(f"task-{n}")) == "repository"]
    topic, tags, vectors = (next(n for n in away if n % 5 == kind) for kind in (0, 1, 2))
    outputs = call("GET", f"/v2/models/task-{topic}").json()["outputs"]
    assert outputs[0] == {"name": "logits", "datatype": "FP32", "shape": [-1, 3]}
    assert call("GET", f"/v2/models/task-{topic}/ready").json()["ready"]
    assert call("GET", f"/v1/tasks/task-{topic}").json()["tier"] == "repository"
    assert place.reads[f"task-{topic}"] == 1, "a look reads nothing"
    body = {"inputs": [{"name": "text", "shape": [1], "datatype": "BYTES", "data": ["hello"]}]}
    assert call("POST", f"/v2/models/task-{topic}/infer", json=body).status_code == 200
    answer = call("GET", f"/v1/tasks/task-{topic}").json()
    assert (answer["tier"], answer["loaded"]) == ("device", 1)
    single = call("POST", "/v1/classify", json={"model": f"task-{tags}", "input": "hello"}).json()["data"][0]
    assert "labels" in single
    refused = call("POST", "/v1/classify", json={"model": f"task-{vectors}", "input": "hello"})
    assert refused.status_code == 422 and "embeddings" in refused.text
    assert call("POST", "/v1/embeddings", json={"model": f"task-{vectors}", "input": "hello"}).status_code == 200


def test_a_restart_reads_the_most_used_and_no_other(place: Place) -> None:
    service = place.serve()
    favourites = [11, 13, 14, 15, 16, 18, 19]
    call = place.call(service)
    before = ask(call, *favourites)
    for _ in range(3):
        ask(call, *favourites)
    place.close()
    place.reads.clear()
    service = place.serve()
    assert {resident.task.id for resident in engine_of(service).tasks.all()} == {f"task-{n}" for n in favourites}
    assert place.reads == {f"task-{n}": 1 for n in favourites}
    assert ask(place.call(service), *favourites) == before
    assert engine_of(service).tasks.misses == 0


def test_after_a_crash_the_same_tasks_are_there(place: Place) -> None:
    """The repository is never closed: another process opens the same folder."""
    crashed = place.serve()
    call = place.call(crashed)
    expected = ask(call, *range(TASKS))
    call("DELETE", "/v1/tasks/task-3")
    service = place.serve()
    call = place.call(service)
    rest = [n for n in range(TASKS) if n != 3]
    assert ask(call, *rest) == [expected[n] for n in rest]
    assert ask(call, 3)[0]["error"]["code"] == "not_found"


def test_a_file_that_disappears_costs_no_other(place: Place) -> None:
    service = place.serve()
    call = place.call(service)
    away = [n for n in range(TASKS) if service.tasks.tier(TaskName.of(f"task-{n}")) == "repository"][:3]
    gone, damaged, fine = away
    folder = place.folder / "blobs"
    digests = {n: call("GET", f"/v1/tasks/task-{n}").json()["digest"] for n in away}
    (folder / f"{digests[gone]}.safetensors").unlink()
    (folder / f"{digests[damaged]}.safetensors").write_bytes(b"\0" * 100)
    codes = [item.get("error", {}).get("code") for item in ask(call, gone, damaged, fine)]
    assert codes == ["not_found", "invalid_task", None]
    assert samples(call)["jpets_tasks_failed_total", ()] == 2
    place.close()
    again = place.serve()
    assert again.unreadable == 0, "what is known of a file needs no second look"
    codes = [item.get("error", {}).get("code") for item in ask(place.call(again), gone, damaged, fine)]
    assert codes == ["not_found", "invalid_task", None]


def test_a_file_that_may_not_be_read_is_told_as_such(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    service = place.serve()
    call = place.call(service)
    away = next(n for n in range(TASKS) if service.tasks.tier(TaskName.of(f"task-{n}")) == "repository")
    digest = call("GET", f"/v1/tasks/task-{away}").json()["digest"]
    whole = Path.read_bytes

    def refused(path: Path) -> bytes:
        if digest in path.name:
            raise PermissionError(13, "Permission denied")
        return whole(path)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", refused)
        (item,) = ask(call, away)
    assert item["error"]["code"] == "saturated" and "Permission denied" in item["error"]["message"]
    wait_until(lambda: "error" not in ask(call, away)[0])  # it is told the same for as long as a few readings take


def test_a_task_that_cannot_be_read_does_not_keep_a_server_from_starting(place: Place) -> None:
    repository = place.repository()
    stored = repository.get("task-4")
    repository.close()
    (place.folder / "blobs" / f"{stored.digest}.safetensors").write_bytes(b"\0" * 100)
    service = place.serve()
    assert service.unreadable == 1
    results = ask(place.call(service), 4, 5)
    assert results[0]["error"]["code"] == "invalid_task" and "error" not in results[1]


def test_changes_of_tasks_that_are_not_on_the_device(place: Place, make_task: Callable[..., Task]) -> None:
    service = place.serve()
    call = place.call(service)
    away = [n for n in range(TASKS) if service.tasks.tier(TaskName.of(f"task-{n}")) == "repository"]
    changed = next(n for n in away if n % 5 == 0)
    (old,) = ask(call, changed)
    ask(call, *range(TASKS))
    new = task_to_bytes(dataclasses.replace(draw(make_task, changed, seed=7), id=f"task-{changed}"))
    assert call("PUT", f"/v1/tasks/task-{changed}", content=new).status_code == 201
    (later,) = ask(call, changed)
    assert later != old
    ask(call, *(n for n in range(TASKS) if n != changed))
    assert ask(call, changed) == [later]
    assert call("POST", f"/v1/tasks/task-{changed}/rollback").status_code == 200
    assert ask(call, changed) == [old]
    ask(call, *(n for n in range(TASKS) if n != changed))
    assert call("DELETE", f"/v1/tasks/task-{changed}").status_code == 204
    assert ask(call, changed)[0]["error"]["code"] == "not_found"


def test_an_upload_while_every_slot_is_in_use(place: Place, make_task: Callable[..., Task]) -> None:
    service = place.serve()
    call, tasks = place.call(service), engine_of(service).tasks
    taken = [tasks.acquire("default", resident.task.id) for resident in tasks.all()]
    held = [resident for resident in taken if isinstance(resident, Resident)]
    assert len(held) == len(taken)
    data = task_to_bytes(dataclasses.replace(draw(make_task, 0, seed=3), id="fresh"))
    answer = call("PUT", "/v1/tasks/fresh", content=data)
    assert (answer.status_code, answer.json()["tier"]) == (201, "repository")
    for resident in held:
        tasks.done(resident)
    assert call("POST", "/v1/classify", json={"model": "fresh", "input": "hello"}).status_code == 200


def test_metrics_of_the_tiers(place: Place) -> None:
    service = place.serve()
    call = place.call(service)
    away = next(n for n in range(TASKS) if service.tasks.tier(TaskName.of(f"task-{n}")) == "repository")
    before = samples(call)
    ask(call, away, away)
    after = samples(call)

    def grew(name: str, **labels: str) -> float:
        key = (name, tuple(sorted(labels.items())))
        return after[key] - before[key]

    assert after["jpets_tasks", (("tier", "repository"),)] == TASKS
    assert after["jpets_tasks", (("tier", "device"),)] == SLOTS
    assert grew("jpets_tasks", tier="host") == 1
    assert grew("jpets_residency_queries_total", outcome="miss") == 2
    assert grew("jpets_tasks_brought_total", tier="repository") == 1
    assert grew("jpets_tasks_brought_bytes_total") > 0
    assert grew("jpets_tasks_evicted_total") == 1
    assert after["jpets_host_bytes", ()] > before["jpets_host_bytes", ()] > 0


def test_a_server_on_several_devices(place: Place, make_task: Callable[..., Task]) -> None:
    service = place.serve(devices=2)
    call = place.call(service)
    group = service.engine
    assert isinstance(group, EngineGroup)
    first = ask(call, *range(TASKS))
    assert not any("error" in item for item in first)
    assert ask(call, *range(TASKS)) == first
    assert ask(call, 0) == first[:1], "it is on its device now"
    (home,) = call("GET", "/v1/tasks/task-0").json()["devices"]
    assert group.mover.move(TaskName.of("task-0"), home, 1 - home)
    assert call("GET", "/v1/tasks/task-0").json()["devices"] == [1 - home]
    assert ask(call, 0) == first[:1]
    new = task_to_bytes(dataclasses.replace(draw(make_task, 0, seed=7), id="task-0"))
    assert call("PUT", "/v1/tasks/task-0", content=new).json()["loaded"] == 2
    assert ask(call, 0) != first[:1]
    assert call("DELETE", "/v1/tasks/task-0").status_code == 204
    found = samples(call)
    assert found["jpets_migrations_total", (("outcome", "moved"),)] == 1
    assert found["jpets_migrated_bytes_total", ()] > 0
    counts = [found["jpets_device_tasks", (("device", str(device)),)] for device in range(2)]
    assert sum(counts) == TASKS - 1 and min(counts) >= TASKS // 2 - 2
    assert all(found["jpets_device_batches_total", (("device", str(device)),)] > 0 for device in range(2))
    assert found["jpets_balance", ()] == 1
    assert "devices" in call("GET", "/").text
    place.close()
    again = place.serve(devices=2)
    assert ask(place.call(again), *range(1, TASKS)) == first[1:]
