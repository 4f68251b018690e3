"""A server's process that is killed while a group of students is trained, and started again on the same folder."""

from __future__ import annotations

import dataclasses
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from server_process import SMALL, start, url_of
from support import make_head, make_task, random_delta, shallow, wait_until

from checkpoints.native import write_native
from checkpoints.repository import Repository
from checkpoints.source import load_backbone
from checkpoints.task_file import read_task, task_to_bytes
from jpets.errors import NotFound
from serving.jobs.folder import JobFolder

ROWS = [("the library reads a module", "label-0"), ("a game of music and sound", "label-1")] * 24
LABELLED = "\n".join(["text,label", *(f"{text},{label}" for text, label in ROWS)]).encode()
ASKED: dict[str, str | int] = {
    "task": "group",
    "teacher": "topic",
    "settings": '{"rank": 4}',
    "most": 2,
    "copies": 0,
    "dtype": "float32",
}
ASKED |= {"epochs": 2, "batch": 16, "max_length": 16}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With a shallow backbone, and a repository that has a teacher."""
    write_native(shallow(layers=1), tmp_path / "backbone")
    backbone = load_backbone(tmp_path / "backbone")
    head = make_head(np.random.default_rng(5), backbone.config.hidden_size, 2, pooling="mean")
    teacher = make_task(backbone, "topic", [random_delta("lora", backbone.config, 3)], head)
    repository = Repository(tmp_path / "repository")
    repository.put("topic", task_to_bytes(dataclasses.replace(teacher, labels=("label-0", "label-1"))))
    repository.close()
    return tmp_path


@contextmanager
def served(folder: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server's process and its URL."""
    places = ("--backbone", folder / "backbone", "--repository", folder / "repository", "--cache-dir", folder / "cache")
    with start(*SMALL, *places, "--reserve", "auto") as process:
        try:
            yield process, url_of(process)
        finally:
            process.kill()


def test_a_group_whose_server_was_killed_is_trained_to_its_end(folder: Path) -> None:
    """Until then nothing of it is served."""
    with served(folder) as (process, url):
        answer = httpx.post(f"{url}/v1/students", params=ASKED, content=LABELLED)
        assert answer.status_code == 202, answer.text
        id = answer.json()["id"]
        job = JobFolder(folder / "repository" / "jobs" / id)
        wait_until(lambda: any(each.name.isdigit() for each in job.checkpoints.glob("student-0/*")), 600)
        process.kill()
    assert job.state.state == "running" and job.result is None and not job.has_made_files
    repository = Repository(folder / "repository")
    with pytest.raises(NotFound):
        repository.get("group")
    repository.close()

    with served(folder) as (_, url):

        def item() -> Any:
            return httpx.get(f"{url}/v1/jobs/{id}").json()

        assert httpx.get(f"{url}/v1/tasks/group").status_code == 404
        wait_until(lambda: item()["state"] not in ("queued", "running"), 600)
        made = item()
        assert (made["state"], made["attempts"], made["version"]) == ("succeeded", 2, 1), made
        log = httpx.get(f"{url}/v1/jobs/{id}/log").text
        assert log.count(" make-students ") == 2 and log.count(" trained ") == 1
        wait_until(lambda: httpx.get(f"{url}/v1/tasks/group").json()["state"] == "ready")
        asked = {"model": "group", "input": [text for text, _ in ROWS[:2]]}
        data = httpx.post(f"{url}/v1/classify", json=asked, timeout=60).json()["data"]
        assert [each["students"] for each in data] == [made["scores"]["students"]] * 2 == [1, 1]
        assert read_task(httpx.get(f"{url}/v1/tasks/group/file").content, id="group").students is not None
