"""Several backbones in one server: a query, an upload and a change go to the task's own backbone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from backbone_server import OTHER, bitfit_task, classify, validator
from clients import Call, samples

from checkpoints.backbone import Backbone
from checkpoints.repository import Repository
from checkpoints.task_file import fingerprint_of, task_to_bytes
from jpets.errors import Saturated
from jpets.types import Query, TaskName
from serving.hosted.services import Services


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
    assert call("PUT", "/v1/tasks/newest", content=task_to_bytes(bitfit_task(other, "newest", 3))).status_code == 201
    assert classify(call, "newest")[0] == 200
    clash = call("PUT", "/v1/tasks/newest", content=task_to_bytes(bitfit_task(backbone, "newest", 3)))
    assert clash.status_code == 409 and OTHER in clash.text
    for name in ("tiny-bert", OTHER):
        named = call("PUT", f"/v1/tasks/{name}", content=task_to_bytes(bitfit_task(other, name, 3)))
        assert named.status_code == 422 and "name of" in named.text
    assert call("PUT", "/v1/tasks/newest", content=task_to_bytes(bitfit_task(other, "newest", 4))).json()["loaded"] == 2
    assert call("POST", "/v1/tasks/newest/rollback").json()["version"] == 1
    assert call("DELETE", "/v1/tasks/newest").status_code == 204
    assert classify(call, "newest")[0] == 404


def test_changes_while_the_repository_is_read_again(
    call: Call, loaded: None, services: Services, other: Backbone, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tasks that come, go or change after the changes were read stay as they are."""
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
