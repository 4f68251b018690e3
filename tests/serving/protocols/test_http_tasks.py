"""/v1/tasks: a client's changes to the set of tasks; a refused one changes nothing."""

from __future__ import annotations

import errno
import threading
import urllib.parse
from collections.abc import Callable
from typing import Any

import pytest
from clients import Call, client_of

from checkpoints.repository import Repository
from jpets.engine.engine import Engine
from jpets.engine.workloads.encoder_network import EncoderNetwork
from jpets.errors import OutOfSpace
from jpets.types import Query, Task
from serving.hosted.service import Service
from serving.http.settings import ServingSettings

Upload = Callable[..., bytes]


def classify(call: Call, id: str) -> tuple[int, object]:
    answer = call("POST", "/v1/classify", json={"model": id, "input": "hello"})
    return answer.status_code, answer.json().get("data")


def everything(call: Call, engine: Engine) -> object:
    """Everything that a change could affect."""
    return call("GET", "/v1/tasks").json(), engine.tasks.occupancy(), classify(call, "topic")


def test_upload_query_read_export_delete(call: Call, upload: Upload) -> None:
    data = upload("fresh", outputs=2, seed=9)
    assert classify(call, "fresh")[0] == 404
    answer = call("PUT", "/v1/tasks/fresh", content=data)
    assert (answer.status_code, answer.headers["etag"]) == (201, '"1"')
    assert classify(call, "fresh")[0] == 200
    body = call("GET", "/v1/tasks/fresh").json()
    assert body == answer.json()
    summary = {
        "id": "fresh",
        "tenant": "default",
        "version": 1,
        "backbone": "tiny-bert",
        "deltas": [{"method": "lora"}],
        "head": "sequence-classification",
        "labels": ["label-0", "label-1"],
        "bytes": len(data),
    }
    assert summary.items() <= body.items()
    assert (body["loaded"], body["metadata"]["format"]) == (1, 1)
    assert summary in call("GET", "/v1/tasks").json()["tasks"]
    exported = call("GET", "/v1/tasks/fresh/file")
    assert exported.content == data
    assert exported.headers["content-type"] == "application/octet-stream"
    negotiated = call("GET", "/v1/tasks/fresh", headers={"accept": "application/octet-stream"})
    assert negotiated.content == data
    assert call("DELETE", "/v1/tasks/fresh").status_code == 204
    assert classify(call, "fresh")[0] == 404
    for method, path in (("DELETE", ""), ("GET", ""), ("GET", "/file"), ("POST", "/rollback")):
        assert call(method, f"/v1/tasks/fresh{path}").status_code == 404


def test_versions_and_rollback(call: Call, upload: Upload, service: Service) -> None:
    old, new = upload("turn", seed=1), upload("turn", seed=2, outputs=4)
    call("PUT", "/v1/tasks/turn", content=old)
    first = classify(call, "turn")
    assert call("PUT", "/v1/tasks/turn", content=new).json()["version"] == 2
    assert classify(call, "turn") != first
    assert call("GET", "/v2/models/turn").json()["versions"] == ["2"]
    back = call("POST", "/v1/tasks/turn/rollback")
    assert (back.status_code, back.json()["version"], back.json()["loaded"]) == (200, 1, 1)
    assert classify(call, "turn") == first
    assert call("POST", "/v1/tasks/turn/rollback", json={"version": 2}).json()["version"] == 2
    assert classify(call, "turn") != first
    for expected, status in (("1", 409), ('"2"', 200), ("2", 409)):  # another one was faster the second time
        headers = {"if-match": expected}
        answer = call("POST", "/v1/tasks/turn/rollback", json={"version": 1}, headers=headers)
        assert answer.status_code == status, expected
    assert call("POST", "/v1/tasks/turn/rollback", json={"version": 2}).json()["version"] == 2
    file = call("GET", "/v1/tasks/turn/file", params={"version": "1"})
    assert file.content == old and file.headers["content-length"] == str(len(old))
    assert call("POST", "/v1/tasks/turn/rollback", json={"version": 9}).status_code == 404
    call("DELETE", "/v1/tasks/turn")


def test_versions_have_names(call: Call, upload: Upload) -> None:
    for seed in (1, 2):
        call("PUT", "/v1/tasks/named", content=upload("named", seed=seed))
    path = "/v1/tasks/named/aliases"
    assert call("PUT", f"{path}/stable", json={"version": 1}).json()["aliases"] == {"stable": 1, "latest": 2}
    assert call("PUT", f"{path}/tried", json={"version": "latest"}).json()["aliases"]["tried"] == 2
    assert call("GET", "/v1/tasks/named", params={"version": "stable"}).json()["version"] == 1
    assert call("POST", "/v1/tasks/named/rollback", json={"version": "stable"}).json()["loaded"] == 1
    assert call("DELETE", f"{path}/tried").json()["aliases"] == {"stable": 1, "latest": 1}
    for method, name, version, status in (
        ("PUT", "latest", 1, 422), ("PUT", "A", 1, 422), ("PUT", "stable", 9, 404), ("PUT", "stable", "no-such", 404),
        ("PUT", "stable", 0, 422), ("DELETE", "tried", None, 404),
    ):  # fmt: skip
        body = {} if version is None else {"json": {"version": version}}
        assert call(method, f"{path}/{name}", **body).status_code == status, (method, name, version)
    assert call("PUT", "/v1/tasks/no-such/aliases/stable", json={"version": 1}).status_code == 404
    call("DELETE", "/v1/tasks/named")


def test_a_rollback_that_fails_changes_nothing(
    call: Call, upload: Upload, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed in range(3):
        call("PUT", "/v1/tasks/stuck", content=upload("stuck", seed=seed))
    first = classify(call, "stuck")

    def states() -> list[tuple[int, str, bool]]:
        found = call("GET", "/v1/tasks/stuck/versions").json()["versions"]
        return [(each["version"], each["state"], each["served"]) for each in found]

    before = states()

    def refuse(*given: object, **more: object) -> None:
        raise OutOfSpace("no slot")

    for place, name in ((service.tasks, "read"), (service.changes._preparations, "serve")):
        with monkeypatch.context() as patch:
            patch.setattr(place, name, refuse)
            assert call("POST", "/v1/tasks/stuck/rollback", json={"version": 1}).status_code == 507
        assert states() == before and classify(call, "stuck") == first
    call("DELETE", "/v1/tasks/stuck")


def test_versions_are_listed_a_page_at_a_time(call: Call, upload: Upload, service: Service) -> None:
    for seed in range(4):
        call("PUT", "/v1/tasks/many", content=upload("many", seed=seed))
    assert isinstance(service.repository, Repository)
    service.repository.put("many", upload("many", seed=9), activate=False)
    call("POST", "/v1/tasks/many/rollback", json={"version": 3})
    page = call("GET", "/v1/tasks/many/versions").json()
    states = [(each["version"], each["state"], each["served"]) for each in page["versions"]]
    assert states == [
        (1, "active", False),
        (2, "active", False),
        (3, "active", True),
        (4, "withdrawn", False),
        (5, "withdrawn", False),
    ]
    assert page["next"] is None
    detail = call("GET", "/v1/tasks/many").json()
    assert (detail["version"], detail["served"], detail["loaded"], detail["versions"]) == (3, 3, 3, [1, 2, 3, 4, 5])
    assert call("GET", "/v1/tasks/many", params={"version": "1"}).json()["served"] == 3
    for name in ("id", "backbone", "deltas", "head", "labels", "bytes", "created", "digest"):
        assert page["versions"][2][name] == detail[name]
    pages = [call("GET", "/v1/tasks/many/versions", params={"limit": 2, "after": after}).json() for after in (0, 2, 4)]
    assert [[each["version"] for each in page["versions"]] for page in pages] == [[1, 2], [3, 4], [5]]
    assert [page["next"] for page in pages] == [2, 4, None]
    call("DELETE", "/v1/tasks/many")


@pytest.mark.parametrize(
    ("query", "status"),
    [("limit=0", 422), ("limit=1001", 422), ("after=-1", 422), ("after=9" + "9" * 30, 422), ("", 404)],
)
def test_versions_of_nothing_and_bad_pages(call: Call, query: str, status: int) -> None:
    answer = call("GET", f"/v1/tasks/unheard-of/versions?{query}")
    assert answer.status_code == status and answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("search=LABEL-2", ["tags", "topic"]),
        ("search=pri", ["price"]),
        ("head=token-classification", ["names"]),
        ("head=embedding&search=vec", ["vectors"]),
        ("head=embedding&search=pri", []),
        ("method=lora&search=t", ["questions", "tags", "topic", "vectors"]),
        ("method=adapter", []),
        ("backbone=tiny-bert&head=question-answering", ["questions"]),
        ("backbone=another", []),
        ("tenant=default&search=topic", ["topic"]),
        ("tenant=acme", []),
    ],
)
def test_lists_are_filtered(call: Call, tasks: list[object], query: str, expected: list[str]) -> None:
    every = call("GET", f"/v1/tasks?{query}").json()
    ids = [task["id"] for task in every["tasks"] if task["id"] in [task.id for task in tasks]]  # type: ignore[attr-defined]
    assert ids == expected
    found, after = [], ""
    while after is not None:
        page = call("GET", f"/v1/tasks?{query}&limit=1&after={after}").json()
        assert len(page["tasks"]) <= 1
        found += page["tasks"]
        after = page["next"]
    assert found == every["tasks"]


def test_a_filter_looks_at_a_bounded_number_of_tasks(
    call: Call, tasks: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("serving.requests.context.PAGE", 1)
    monkeypatch.setattr("serving.requests.context.MOST_PAGES", 2)
    found, after, empty = [], "", 0
    while after is not None:
        page = call("GET", f"/v1/tasks?head=question-answering&limit=5&after={after}").json()
        found += [task["id"] for task in page["tasks"]]
        empty += not page["tasks"]
        after = page["next"]
    assert found == ["questions"] and empty


def test_pages(call: Call, tasks: list[object]) -> None:
    ids: list[str] = []
    after = None
    while True:
        page = call("GET", "/v1/tasks", params={"limit": 2, **({"after": after} if after else {})}).json()
        assert len(page["tasks"]) <= 2
        ids += [each["id"] for each in page["tasks"]]
        after = page["next"]
        if after is None:
            break
    assert ids == sorted(ids) == ["names", "price", "questions", "tags", "topic", "vectors"]
    assert call("GET", "/v1/tasks", params={"limit": 0}).status_code == 422


def test_conditions(call: Call, upload: Upload) -> None:
    data = upload("careful")
    assert call("PUT", "/v1/tasks/careful", content=data, headers={"if-none-match": "*"}).status_code == 201
    conflict = call("PUT", "/v1/tasks/careful", content=data, headers={"if-none-match": "*"})
    assert (conflict.status_code, conflict.json()["error"]["code"]) == (409, "conflict")
    assert call("PUT", "/v1/tasks/careful", content=data, headers={"if-match": '"7"'}).status_code == 409
    assert call("DELETE", "/v1/tasks/careful", headers={"if-match": "7"}).status_code == 409
    assert call("PUT", "/v1/tasks/careful", content=data, headers={"if-match": '"1"'}).json()["version"] == 2
    assert call("PUT", "/v1/tasks/careful", content=data, headers={"if-match": "new"}).status_code == 422
    assert call("DELETE", "/v1/tasks/careful", headers={"if-match": '"2"'}).status_code == 204


@pytest.mark.parametrize("id", ["../x", "%2e%2e%2fx", "", "a" * 300, "a\0b", "Upper", ".hidden", "tiny-bert"])
def test_bad_ids_change_nothing(call: Call, engine: Engine, upload: Upload, id: str) -> None:
    before = everything(call, engine)
    answer = call("PUT", f"/v1/tasks/{urllib.parse.quote(id, safe='%')}", content=upload("topic"))
    assert 400 <= answer.status_code < 500
    assert everything(call, engine) == before


def test_bad_files_change_nothing(call: Call, engine: Engine, upload: Upload, settings: ServingSettings) -> None:
    good = upload("topic", seed=8)
    before = everything(call, engine)
    files = {
        "truncated": (good[:-100], 422),
        "header only": (good[:50], 422),
        "empty": (b"", 422),
        "noise": (bytes(range(256)) * 8, 422),
        "too large": (good + bytes(settings.max_task_bytes), 413),
    }
    for name, (data, status) in files.items():
        answer = call("PUT", "/v1/tasks/topic", content=data)
        assert answer.status_code == status, name
        assert answer.json()["error"]["message"]
        assert everything(call, engine) == before, name
    assert settings.upload_folder is not None
    assert not list(settings.upload_folder.iterdir())


def test_unknown_class_is_refused_with_the_reason(call: Call, engine: Engine, upload: Upload) -> None:
    before = everything(call, engine)
    answer = call("PUT", "/v1/tasks/topic", content=upload("topic", rank=40))
    assert (answer.status_code, answer.json()["error"]["code"]) == (422, "unknown_class")
    assert "lora/query:48+value:48" in answer.json()["error"]["message"]
    assert everything(call, engine) == before


def test_an_upload_is_lowered_once(call: Call, upload: Upload, monkeypatch: pytest.MonkeyPatch) -> None:
    lowered, lower = [], EncoderNetwork.lower

    def counted(network: EncoderNetwork, task: Task, params: Any) -> Any:
        lowered.append(task.id)
        return lower(network, task, params)

    monkeypatch.setattr(EncoderNetwork, "lower", counted)
    assert call("PUT", "/v1/tasks/once", content=upload("once")).status_code == 201
    assert classify(call, "once")[0] == 200
    assert lowered == ["once"]
    assert call("DELETE", "/v1/tasks/once").status_code == 204


def test_a_device_full_of_tasks_that_stay_refuses_more(
    call: Call, engine: Engine, upload: Upload, make_task: Callable[..., Task]
) -> None:
    key = next(key for key in engine.tasks.classes if key.method == "lora")
    staying = [f"stays-{number}" for number in range(engine.tasks.occupancy()[key][1] - 1)]
    for name in staying:
        engine.add_task(make_task(name))
    answer = call("PUT", "/v1/tasks/more", content=upload("more"))
    assert (answer.status_code, answer.json()["error"]["code"]) == (507, "out_of_space")
    assert call("GET", "/v1/tasks/more").status_code == 404
    assert classify(call, "topic")[0] == 507
    for name in staying:
        engine.remove_task(name)
    assert classify(call, "topic")[0] == 200


@pytest.mark.parametrize("id", ["topic", "unheard-of"])
def test_failed_load_undoes_the_stored_version(
    call: Call, engine: Engine, upload: Upload, monkeypatch: pytest.MonkeyPatch, id: str
) -> None:
    before = everything(call, engine)

    def full(*_: object, **__: object) -> None:
        raise OutOfSpace("no free slot")

    with monkeypatch.context() as patch:
        patch.setattr(engine, "add_task", full)
        assert call("PUT", f"/v1/tasks/{id}", content=upload(id, seed=8)).status_code == 507
    assert everything(call, engine) == before


@pytest.mark.parametrize("where", ["upload", "store"])
def test_full_disk_changes_nothing(
    call: Call, engine: Engine, upload: Upload, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    before = everything(call, engine)

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "/secret/place")

    with monkeypatch.context() as patch:
        if where == "upload":
            patch.setattr("serving.protocols.tasks.tempfile.NamedTemporaryFile", full)
        else:
            patch.setattr("jpets.files._write_synced", full)
        answer = call("PUT", "/v1/tasks/topic", content=upload("topic", seed=88))
    assert (answer.status_code, answer.json()["error"]["code"]) == (507, "out_of_space")
    assert "secret" not in answer.text
    assert everything(call, engine) == before


def test_concurrent_uploads_of_one_id_are_serialised(
    service: Service, settings: ServingSettings, upload: Upload, engine: Engine
) -> None:
    files = {seed: upload("race", seed=seed) for seed in range(6)}
    answers = {}
    call = client_of(service, settings)  # made once: building an application is not thread-safe, and no server does it

    def put(seed: int) -> None:
        answers[seed] = call("PUT", "/v1/tasks/race", content=files[seed]).json()

    threads = [threading.Thread(target=put, args=(seed,)) for seed in files]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(answer["version"] for answer in answers.values()) == [1, 2, 3, 4, 5, 6]
    last = next(seed for seed, answer in answers.items() if answer["version"] == 6)
    call = client_of(service, settings)
    assert call("GET", "/v1/tasks/race/file").content == files[last]
    served = classify(call, "race")
    call("PUT", "/v1/tasks/race", content=files[last])
    assert classify(call, "race") == served
    call("DELETE", "/v1/tasks/race")


def test_delete_with_queries_in_flight(call: Call, engine: Engine, upload: Upload) -> None:
    call("PUT", "/v1/tasks/leaving", content=upload("leaving"))
    futures = engine.submit([Query("leaving", "hello world")] * 64)
    assert call("DELETE", "/v1/tasks/leaving").status_code == 204
    assert all(future.result(30).error is None for future in futures)
    assert classify(call, "leaving")[0] == 404
