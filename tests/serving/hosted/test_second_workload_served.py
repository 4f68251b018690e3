"""A second kind of model over HTTP, from a repository: by the same queue, residency, loop and routes."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from clients import client_of
from looked_up import LookedUpWorkload, expected, two_tasks
from support import ENGINE_SETTINGS, shallow

from checkpoints.repository import Repository
from checkpoints.task_file import read_task, task_to_bytes
from jpets.engine.batch.bucket import Bucket
from jpets.engine.engine import Engine
from jpets.engine.workloads.registry import WORKLOADS
from jpets.tokenizing import TextEncoder
from jpets.types import Query, Task
from serving.hosted.service import Service
from serving.http.settings import ServingSettings

BUCKETS = [Bucket(32, ((4, 8), (2, 16)))]
TEXTS = ["a chess engine", "the library that it needs", "chess"]


def test_it_is_served_over_http(tmp_path: Path, program_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(WORKLOADS, "looked-up", LookedUpWorkload)
    backbone, tasks = dataclasses.replace(shallow(), kind="looked-up"), two_tasks()

    def validator(data: bytes | memoryview, id: str) -> Task:
        return read_task(data, id=id, config=backbone.config, backbone=backbone.fingerprint)

    repository = Repository(tmp_path / "repository", validator=validator)
    for task in tasks:
        repository.put(task.id, task_to_bytes(task))
    service = Service(repository, backbone, validator, growing=False)
    service.start(
        lambda coming: Engine(backbone, (), ENGINE_SETTINGS, coming=coming, cache_dir=program_cache, buckets=BUCKETS)
    )
    try:
        call = client_of(service, ServingSettings(upload_folder=tmp_path))
        inputs = [{"model": task.id, "text": text} for task in tasks for text in TEXTS]
        answer = call("POST", "/v1/classify", json={"inputs": inputs}).json()
    finally:
        service.close()
        repository.close()
    for given, item in zip(inputs, answer["data"], strict=True):
        task = next(task for task in tasks if task.id == given["model"])
        ids = TextEncoder.of(backbone).encode(Query(task.id, given["text"]), task.preprocessing).ids
        logits = expected(task, ids)
        assert item["label"] == task.labels[int(logits.argmax())]
