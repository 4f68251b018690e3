"""/v1/jobs: tasks trained by a real process beside a server, one of which is killed on its way."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from clients import Call, client_of

from checkpoints.backbone import Backbone
from jpets.commands.training_job import training_of
from jpets.hosting import outline_of
from jpets.training.data import Columns, read_examples
from jpets.training.session import run_training
from serving.job_folder import JobFolder, JobResult
from serving.job_request import FineTune
from serving.job_service import Jobs
from serving.service import Service
from serving.services import Services
from serving.settings import ServingSettings

FIXTURES = Path(__file__).parents[1] / "fixtures"
ASKED = {
    "settings": '{"rank": 4}',
    "label": "verdict",
    "dtype": "float32",
    "epochs": 3,
    "batch": 8,
    "max_length": 16,
    "rate": 0.02,
    "head_rate": 0.02,
}


@pytest.fixture(scope="module")
def reviews() -> bytes:
    rng = np.random.default_rng(0)
    words = {"good": ["library", "module"], "bad": ["game", "sound"]}
    lines = [f"{' '.join(rng.choice(words[label], 12))},{label}" for label in rng.choice(["good", "bad"], 64)]
    return "\n".join(["text,verdict", *lines]).encode()


@pytest.fixture
def jobs(service: Service, tmp_path: Path) -> Iterator[Jobs]:
    def command(job: JobFolder) -> list[str]:
        source = str(FIXTURES / "tiny-bert")
        return [sys.executable, "-m", "jpets.commands.training_job", str(job.path), source, "tiny-bert"]

    made = Jobs(tmp_path / "jobs", Services(service), command, outline_of)
    yield made
    made.runner.close()


@pytest.fixture
def call(service: Service, settings: ServingSettings, jobs: Jobs) -> Call:
    return client_of(service, settings, jobs)


def wait_for(look: Callable[[], Any], seconds: float = 120) -> Any:
    end = time.monotonic() + seconds
    while not (found := look()):
        assert time.monotonic() < end
        time.sleep(0.05)
    return found


def finished(call: Call, id: str) -> Any:
    def look() -> Any:
        item = call("GET", f"/v1/jobs/{id}").json()
        return item if item["state"] not in ("queued", "running") else None

    return wait_for(look)


def test_a_job_that_is_killed_goes_on_and_publishes_its_task(
    call: Call, jobs: Jobs, reviews: bytes, backbone: Backbone
) -> None:
    asked = {**ASKED, "task": "trained", "method": "frozen", "settings": "{}"}  # compiled soonest
    answer = call("POST", "/v1/jobs", params=asked, content=reviews)
    assert (answer.status_code, answer.json()["state"], answer.json()["backbone"]) == (202, "queued", "tiny-bert")
    id = answer.json()["id"]
    job = jobs.folders.get(id)
    examples = read_examples(job.data, Columns("text", None, "verdict"))
    jobs.runner.start()
    with ThreadPoolExecutor(1) as beside:
        whole = beside.submit(run_training, "trained", backbone, training_of(job.request), examples)
        wait_for(lambda: any(each.name.isdigit() for each in job.checkpoints.glob("0/*")))
        os.kill(int(job.lock_file.read_text()), signal.SIGKILL)
        item, expected = finished(call, id), whole.result()
    assert (item["state"], item["version"], item["attempts"]) == ("succeeded", 1, 2)
    assert item["progress"] == {"step": 24, "of": 24, "loss": pytest.approx(expected.losses[-1], rel=1e-4)}
    assert item["held_out_loss"] == pytest.approx(expected.held_out, rel=1e-4)
    assert item["scores"] == pytest.approx(expected.scores) and item["scores"]["accuracy"] > 0.9
    answered = call("POST", "/v1/classify", json={"model": "trained", "input": "game sound game"}).json()
    assert answered["data"][0]["label"] == "bad"
    log = call("GET", f"/v1/jobs/{id}/log")
    assert log.headers["content-type"].startswith("text/plain") and log.text.count(" train method=frozen") == 2
    assert "library" not in log.text and str(job.path.parent) not in log.text
    assert call("DELETE", f"/v1/jobs/{id}").status_code == 204
    assert call("DELETE", "/v1/tasks/trained").status_code == 204
    assert call("GET", "/v1/jobs").json() == {"jobs": [], "next": None}


def test_a_job_with_bad_data_fails_and_publishes_nothing(call: Call, jobs: Jobs, reviews: bytes) -> None:
    asked = {**ASKED, "task": "unborn", "label": "stars"}
    id = call("POST", "/v1/jobs", params=asked, content=reviews).json()["id"]
    jobs.runner.start()
    item = finished(call, id)
    assert (item["state"], item["attempts"], item["version"]) == ("failed", 1, None)
    assert (
        "expected a column 'stars'" in item["problem"] and "expected a column" in call("GET", f"/v1/jobs/{id}/log").text
    )
    assert call("GET", "/v1/tasks/unborn").status_code == 404


def trained(jobs: Jobs, request: FineTune, content: bytes) -> JobFolder:
    """A job that has its task already, which a server that died may have published."""
    with jobs.folders.draft(request) as draft:
        draft.data.touch()
        draft.task_file.write_bytes(content)
        draft.write_result(JobResult())
        draft.change(state="running", publishing=True)
        return jobs.folders.commit(draft)


def test_a_task_is_published_once(call: Call, jobs: Jobs, upload: Callable[..., bytes]) -> None:
    before, after = upload("twice", seed=1), upload("twice", seed=2)
    assert call("PUT", "/v1/tasks/twice", content=before).json()["version"] == 1
    request = FineTune(task="twice", backbone="tiny-bert")
    ids = [trained(jobs, request, content).id for content in (before, after)]
    jobs.runner.start()
    assert [finished(call, id)["version"] for id in ids] == [1, 2]
    assert call("GET", "/v1/tasks/twice/file").content == after
    call("DELETE", "/v1/tasks/twice")


def test_what_the_server_refuses_is_not_published(call: Call, jobs: Jobs, upload: Callable[..., bytes]) -> None:
    gone = trained(jobs, FineTune(task="gone", backbone="other"), upload("gone"))
    broken = trained(jobs, FineTune(task="gone", backbone="tiny-bert"), b"no task file")
    large = trained(jobs, FineTune(task="gone", backbone="tiny-bert"), upload("gone", rank=48))
    jobs.runner.start()
    for job, part in ((gone, "not loaded any more"), (broken, "task file"), (large, "class")):
        item = finished(call, job.id)
        assert item["state"] == "failed" and part in item["problem"]
    assert call("GET", "/v1/tasks/gone").status_code == 404


@pytest.mark.parametrize(
    ("changes", "status", "part"),
    [
        ({"task": "../x"}, 422, "query.task"),
        ({"task": "tiny-bert"}, 422, "name of a backbone"),
        ({"method": "magic"}, 422, "query.method"),
        ({"colour": "red"}, 422, "query.colour"),
        ({"epochs": 0}, 422, "query.epochs"),
        ({"rate": "nan"}, 422, "query.rate"),
        ({"settings": "{"}, 422, "expected a JSON object"),
        ({"settings": "[1]"}, 422, "query.settings"),
        ({"settings": '{"depth": 4}'}, 422, "lora"),
        ({"settings": '{"rank": 99999}'}, 422, "hidden size"),
        ({"method": "bitfit", "settings": "{}"}, 422, "class"),
        ({"method": "mask", "settings": '{"rank": 4}'}, 422, "takes none of ['rank']"),
        ({"backbone": "other"}, 422, "expected one of ['tiny-bert']"),
    ],
)
def test_what_cannot_be_trained_is_refused_before_the_data_are_read(
    call: Call, jobs: Jobs, changes: dict[str, object], status: int, part: str
) -> None:
    answer = call("POST", "/v1/jobs", params={**ASKED, "task": "new", **changes}, content=b"x" * (1 << 20))
    assert (answer.status_code, part in answer.json()["error"]["message"]) == (status, True), answer.text
    assert not list(jobs.folders.path.iterdir())


def test_data_are_bounded(
    service: Service, settings: ServingSettings, jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = client_of(service, ServingSettings(max_data_bytes=1000, max_body_bytes=10), jobs)

    def post(content: Any) -> int:
        return call("POST", "/v1/jobs", params={"task": "new", "settings": '{"rank": 4}'}, content=content).status_code

    async def chunks() -> Any:
        for _ in range(11):
            yield b"x" * 100

    assert (post(b"x" * 1001), post(chunks()), post(b"")) == (413, 413, 422)
    assert not list(jobs.folders.path.iterdir())
    assert post(b"x" * 1000) == 202
    monkeypatch.setattr("serving.job_service.MOST_WAITING", 1)
    assert post(b"x") == 503


def test_jobs_are_listed_shown_and_cancelled(call: Call, jobs: Jobs) -> None:
    asked = {"task": "new", "settings": '{"rank": 4}', "format": "jsonl"}
    ids = [call("POST", "/v1/jobs", params=asked, content=b"{}").json()["id"] for _ in range(3)]
    first = call("GET", "/v1/jobs", params={"limit": 2}).json()
    assert [item["id"] for item in first["jobs"]] == [ids[2], ids[1]] and first["next"] == ids[1]
    rest = call("GET", "/v1/jobs", params={"limit": 2, "after": first["next"]}).json()
    assert ([item["id"] for item in rest["jobs"]], rest["next"]) == ([ids[0]], None)
    assert call("DELETE", f"/v1/jobs/{ids[0]}").status_code == 202
    jobs.runner.start()
    assert finished(call, ids[0])["state"] == "cancelled"
    assert call("DELETE", f"/v1/jobs/{ids[0]}").status_code == 204
    for method, path in (("GET", ids[0]), ("GET", f"{ids[0]}/log"), ("DELETE", ids[0]), ("GET", "..%2f..")):
        assert call(method, f"/v1/jobs/{path}").status_code == 404


def test_a_server_without_jobs_says_so(service: Service, settings: ServingSettings) -> None:
    answer = client_of(service, settings)("GET", "/v1/jobs")
    assert (answer.status_code, "runs no jobs" in answer.text) == (404, True)
