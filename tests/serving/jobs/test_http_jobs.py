"""/v1/jobs: tasks and backbones made by a real process beside a server; one process is killed on its way."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from clients import Call, client_of, finished
from full_model import biases, write_full
from support import tiny, wait_until

from checkpoints.backbone import Backbone
from checkpoints.source import load_backbone
from checkpoints.task_file import read_task
from jpets.app.hosting import outlines_of
from jpets.app.jobs.work import _check_held_out, do, texts_of, training_of
from jpets.errors import InvalidInput
from jpets.training import sweep
from jpets.training.data import Columns, Example, read_examples
from jpets.training.session import run_training
from serving.hosted.service import Service
from serving.hosted.services import Services
from serving.http.settings import ServingSettings
from serving.jobs.folder import JobFolder, JobResult
from serving.jobs.request import FineTune
from serving.jobs.service import Jobs

FIXTURES = Path(__file__).parents[2] / "fixtures"
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
def kept(tmp_path: Path) -> dict[str, Path]:
    """The backbones that jobs made."""
    return {}


@pytest.fixture
def jobs(service: Service, kept: dict[str, Path], tmp_path: Path) -> Iterator[Jobs]:
    def command(job: JobFolder) -> list[str]:
        source = str(FIXTURES / "tiny-bert")
        return [sys.executable, "-m", "jpets.app.jobs.process", str(job.path), source, "tiny-bert"]

    def keep(name: str, folder: Path) -> None:
        kept[name] = shutil.copytree(folder, tmp_path / "backbones" / name)

    made = Jobs(tmp_path / "jobs", Services(service), command, outlines_of, keep_backbone=keep)
    yield made
    made.runner.close()


@pytest.fixture
def call(service: Service, settings: ServingSettings, jobs: Jobs) -> Call:
    return client_of(service, settings, jobs)


def test_a_job_that_is_killed_goes_on_and_publishes_its_task(
    call: Call, jobs: Jobs, reviews: bytes, backbone: Backbone
) -> None:
    given = {**ASKED, "task": "trained", "method": "frozen", "settings": "{}"}  # compiled soonest
    asked = {name: value for name, value in given.items() if name != "rate"}
    answer = call("POST", "/v1/jobs", params=asked, content=reviews)
    assert (answer.status_code, answer.json()["state"], answer.json()["backbone"]) == (202, "queued", "tiny-bert")
    id = answer.json()["id"]
    job = jobs.folders.get(id)
    request, examples = job.request, read_examples(job.data, Columns("text", None, "verdict"))
    assert isinstance(request, FineTune)
    jobs.runner.start()
    with ThreadPoolExecutor(1) as beside:
        whole = beside.submit(run_training, "trained", backbone, training_of(request), examples)
        wait_until(lambda: any(each.name.isdigit() for each in job.checkpoints.glob("0/0/*")))
        os.kill(int(job.lock_file.read_text()), signal.SIGKILL)
        item, expected = finished(call, id), whole.result()
    assert (item["state"], item["version"], item["attempts"]) == ("succeeded", 1, 2)
    loss = pytest.approx(expected.losses[-1], rel=1e-4)
    assert item["progress"] == {"step": 24, "of": 24, "loss": loss, "stage": ""}
    assert item["held_out_loss"] == pytest.approx(expected.held_out, rel=1e-4)
    assert item["scores"] == pytest.approx(expected.scores) and item["scores"]["accuracy"] > 0.9
    answered = call("POST", "/v1/classify", json={"model": "trained", "input": "game sound game"}).json()
    assert answered["data"][0]["label"] == "bad"
    log = call("GET", f"/v1/jobs/{id}/log")
    assert log.headers["content-type"].startswith("text/plain") and log.text.count(" fine-tune method=frozen") == 2
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
    assert "expected a column 'stars'" in item["problem"]
    assert "expected a column" in call("GET", f"/v1/jobs/{id}/log").text
    assert call("GET", "/v1/tasks/unborn").status_code == 404


def trained(jobs: Jobs, request: FineTune, content: bytes) -> JobFolder:
    """A job that already has its task; a server that died may have published it."""
    with jobs.folders.draft(request) as draft:
        draft.data.touch()
        draft.task_file.write_bytes(content)
        draft.write_result(JobResult())
        draft.change(state="running", publishing=True, above=0)
        return jobs.folders.commit(draft)


def test_a_task_is_published_once(call: Call, jobs: Jobs, upload: Callable[..., bytes]) -> None:
    before, after = upload("twice", seed=1), upload("twice", seed=2)
    assert call("PUT", "/v1/tasks/twice", content=before).json()["version"] == 1
    request = FineTune(task="twice", backbone="tiny-bert")
    ids = [trained(jobs, request, content).id for content in (before, after)]
    jobs.runner.start()
    assert [finished(call, id)["version"] for id in ids] == [1, 2]
    assert call("GET", "/v1/tasks/twice/file").content == after
    late = trained(jobs, request, before)
    jobs.runner.wake()
    assert finished(call, late.id)["version"] == 1
    assert call("GET", "/v1/tasks/twice/file").content == after, "what was uploaded since is still served"
    call("DELETE", "/v1/tasks/twice")


def test_what_the_server_refuses_is_not_published(call: Call, jobs: Jobs, upload: Callable[..., bytes]) -> None:
    gone = trained(jobs, FineTune(task="gone", backbone="other"), upload("gone"))
    broken = trained(jobs, FineTune(task="gone", backbone="tiny-bert"), b"no task file")
    large = trained(jobs, FineTune(task="gone", backbone="tiny-bert"), upload("gone", rank=48))
    unloaded = call("DELETE", "/v1/backbones/other")
    assert unloaded.status_code == 409 and f"job {gone.id}" in unloaded.json()["error"]["message"]
    jobs.runner.start()
    for job, part in ((broken, "task file"), (large, "class")):
        item = finished(call, job.id)
        assert item["state"] == "failed" and part in item["problem"] and "in the job's folder" in item["problem"]
    assert call("GET", "/v1/tasks/gone").status_code == 404
    assert not gone.state.is_finished, "its backbone may be loaded again, here or by another server"
    assert call("DELETE", f"/v1/jobs/{gone.id}").status_code == 202 and finished(call, gone.id)["state"] == "cancelled"
    assert call("DELETE", "/v1/backbones/other").status_code == 404, "no job is in the way any more"


@pytest.mark.parametrize(
    ("changes", "status", "part"),
    [
        ({"task": "../x"}, 422, "query.task"),
        ({"task": "tiny-bert"}, 422, "name of a backbone"),
        ({"method": "magic"}, 422, "query.method"),
        ({"colour": "red"}, 422, "query.colour"),
        ({"rate": "nan"}, 422, "query.rate"),
        ({"sweep": "1..x"}, 422, "must be rate=LOW..HIGH"),
        ({"method": "frozen", "settings": "{}"}, 422, "give head_rate"),
        ({"head": "embedding"}, 422, "trained on pairs"),
        ({"settings": "{"}, 422, "expected a JSON object"),
        ({"settings": "[1]"}, 422, "query.settings"),
        ({"settings": '{"depth": 4}'}, 422, "found ['depth']"),
        ({"settings": '{"rank": 99999}'}, 422, "hidden size"),
        ({"method": "bitfit", "settings": "{}"}, 422, "class"),
        ({"method": "mask", "settings": '{"rank": 4}'}, 422, "mask takes no settings, found ['rank']"),
        ({"settings": '{"rank": 4.0}'}, 422, "rank must be a whole number"),
        ({"settings": '{"rank": 1e999}'}, 422, "rank must be a whole number"),
        ({"settings": '{"rank": 4, "alpha": NaN}'}, 422, "alpha must be a number above 0"),
        ({"settings": '{"sites": [[[[[["query"]]]]]]}'}, 422, "expected a JSON object"),
        ({"method": "diff", "settings": '{"price": "x"}'}, 422, "price must be a number"),
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
    monkeypatch.setattr("serving.jobs.service.MOST_WAITING", 1)
    assert post(b"x") == 503


@pytest.mark.parametrize("path", ["/v1/students", "/v1/domains"])
def test_other_jobs_take_data_that_are_larger_than_a_request(
    service: Service, settings: ServingSettings, jobs: Jobs, path: str
) -> None:
    call = client_of(service, ServingSettings(max_data_bytes=1000, max_body_bytes=10), jobs)
    asked = {"task": "new", "teacher": "topic"} if path == "/v1/students" else {"domain": "new"}
    assert call("POST", path, params=asked, content=b"x" * 900).status_code not in (413, 500)


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


def test_a_head_that_cannot_be_served_is_told_before_it_is_trained(call: Call, jobs: Jobs) -> None:
    lines = ["text,verdict", *(f"a library,{number % 40}x" for number in range(400))]
    asked = {**ASKED, "task": "wide", "epochs": 1000}
    id = call("POST", "/v1/jobs", params=asked, content="\n".join(lines).encode()).json()["id"]
    jobs.runner.start()
    item = finished(call, id)
    assert item["state"] == "failed" and "no class of this server holds ['head" in item["problem"], item
    job = jobs.folders.get(id)
    wait_until(lambda: not job.outline_file.exists())  # files are removed once its end is written
    assert job.result is None and call("GET", "/v1/tasks/wide").status_code == 404


def test_a_server_without_jobs_says_so(service: Service, settings: ServingSettings) -> None:
    answer = client_of(service, settings)("GET", "/v1/jobs")
    assert (answer.status_code, "runs no jobs" in answer.text) == (404, True)


def archive_of(folder: Path, target: Path) -> bytes:
    with zipfile.ZipFile(target, "w") as archive:
        for path in folder.iterdir():
            archive.write(path, f"model/{path.name}")
    return target.read_bytes()


def test_a_task_is_extracted(call: Call, jobs: Jobs, tmp_path: Path) -> None:
    model = write_full(tmp_path / "model", biases)
    (model / "t.txt").write_text("a library\na game\n")
    asked = {"task": "made", "method": "auto", "texts": "t.txt", "agreement": 1, "truncation_strategy": "only_second"}
    answer = call("POST", "/v1/jobs/extract", params=asked, content=archive_of(model, tmp_path / "model.zip"))
    assert (answer.status_code, answer.json()["kind"], answer.json()["method"]) == (202, "extract", "auto")
    job = jobs.folders.get(answer.json()["id"])
    result = do(job, [str(FIXTURES / "tiny-bert"), "tiny-bert"], lambda step: None)
    assert result.extracted == "bitfit"
    assert result.scores == {"agreement": 1.0, "most_lost": pytest.approx(0, abs=1e-6)}
    task = read_task(job.task_file, id="made", config=tiny().config, backbone=tiny().ref())
    assert [delta.method for delta in task.deltas] == ["bitfit"] and task.labels[0] == "name-0"
    assert task.preprocessing.truncation_strategy == "only_second"
    job.write_result(result)
    jobs.runner.start()
    item = finished(call, job.id)  # this server was started without such tasks
    assert item["state"] == "failed" and "no class of this server holds ['bitfit']" in item["problem"]
    assert item["extracted"] == "bitfit"


def test_a_backbone_is_trained_further(call: Call, jobs: Jobs, kept: dict[str, Path]) -> None:
    asked = {"name": "domain", "layers": 2, "max_length": 16, "dtype": "float32", "batch": 8}
    answer = call("POST", "/v1/jobs/further-pretrain", params=asked, content=b"the library reads files\n" * 16)
    assert (answer.json()["new_backbone"], answer.json()["task"]) == ("domain", None)
    assert 'jpets_jobs{state="queued"} 1.0' in call("GET", "/metrics").text
    jobs.runner.start()
    item = finished(call, answer.json()["id"])
    assert (item["state"], item["version"]) == ("succeeded", None), item["problem"]
    assert (item["progress"]["step"], sorted(item["scores"])) == (2, ["first_loss", "last_loss"])
    made = load_backbone(kept["domain"])
    assert made.name == "domain" and made.fingerprint != tiny().fingerprint
    assert 'jpets_jobs{state="succeeded"} 1.0' in call("GET", "/metrics").text


def test_a_job_that_goes_on_from_a_task_gets_its_file(
    call: Call, jobs: Jobs, upload: Callable[..., bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = {"task": "next", "start": "before", "sweep": "1e-3..1e-2", "text": "a", "label": "b"}
    refused = call("POST", "/v1/jobs", params=asked, content=b"a,b\n")
    assert refused.status_code == 422 and "start: expected a task of backbone 'tiny-bert'" in refused.text
    content = upload("before")
    call("PUT", "/v1/tasks/before", content=content)
    for changes, part in (
        ({"method": "frozen"}, "a task of lora, found frozen"),
        ({"settings": '{"rank": 2}'}, "rank"),
        ({"pooling": "mean"}, "pooling: task 'before' has 'cls', which training keeps, found 'mean'"),
    ):
        refused = call("POST", "/v1/jobs", params={**asked, **changes}, content=b"a,b\n")
        assert refused.status_code == 422 and part in refused.text
    answer = call("POST", "/v1/jobs", params={**asked, "pooling": "cls"}, content=b"a,b\nx,y\n").json()
    assert answer["method"] == "lora"
    job = jobs.folders.get(answer["id"])
    assert job.start_file.read_bytes() == content
    tried: list[Any] = []

    def stop(rates: Any, id: str, backbone: Any, training: Any, examples: Any, *held_out: Any, **how: Any) -> None:
        del backbone
        start = how["start"]
        tried.extend([rates, id, training.method, examples[0].label, start.labels])
        raise InvalidInput("enough")

    monkeypatch.setattr(sweep, "best_of", stop)
    with pytest.raises(InvalidInput, match="enough"):
        do(job, [str(FIXTURES / "tiny-bert"), "tiny-bert"], lambda step: None)
    assert tried[0] == pytest.approx([1e-3, 10 ** (-8 / 3), 10 ** (-7 / 3), 1e-2])
    assert tried[1:4] == ["next", "lora", "y"] and len(tried[4]) > 1
    assert call("DELETE", f"/v1/jobs/{job.id}").status_code == 202
    call("DELETE", "/v1/tasks/before")


@pytest.mark.parametrize(
    ("kind", "changes", "part"),
    [
        ("extract", {"method": "magic"}, "query.method"),
        ("extract", {"method": "auto"}, "compares answers"),
        ("extract", {"method": "diff", "density": 2}, "query.density"),
        ("extract", {"method": "lora", "texts": "../x.txt"}, "query.texts"),
        ("extract", {"method": "lora", "format": "csv"}, "query.format"),
        ("further-pretrain", {"layers": "two"}, "query.layers"),
        ("further-pretrain", {"layers": "0,99"}, "layers: expected numbers from 0 to"),
        ("further-pretrain", {"name": "tiny-bert"}, "already"),
        ("further-pretrain", {"name": "a/b"}, "query.name"),
        ("further-pretrain", {"backbone": "other"}, "expected one of ['tiny-bert']"),
    ],
)
def test_other_kinds_of_jobs_are_checked_too(
    call: Call, jobs: Jobs, kind: str, changes: dict[str, object], part: str
) -> None:
    named = {"task": "new"} if kind == "extract" else {"name": "new"}
    answer = call("POST", f"/v1/jobs/{kind}", params={**named, **changes}, content=b"x")
    assert answer.status_code in (409, 422) and part in answer.json()["error"]["message"], answer.text
    assert not list(jobs.folders.path.iterdir())


def test_an_archive_that_cannot_be_trusted_publishes_nothing(call: Call, jobs: Jobs, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "bad.zip", "w") as archive:
        archive.writestr("../../x", "a")
    body = (tmp_path / "bad.zip").read_bytes()
    id = call("POST", "/v1/jobs/extract", params={"task": "bad", "method": "bitfit"}, content=body).json()["id"]
    jobs.runner.start()
    item = finished(call, id)
    assert item["state"] == "failed" and "would leave its folder" in item["problem"]
    assert call("GET", "/v1/tasks/bad").status_code == 404


def test_a_share_and_a_file_of_held_out_texts_are_one_too_many() -> None:
    given = [Example("a", None, "b")]
    for request in (FineTune(task="own", held_out=0.3), FineTune(task="own")):
        _check_held_out(request, ())
    _check_held_out(FineTune(task="own"), given)
    with pytest.raises(InvalidInput, match="held_out: the archive's validation"):
        _check_held_out(FineTune(task="own", held_out=0.3), given)


def test_an_archive_may_hold_files_alone(tmp_path: Path) -> None:
    """A folder of the datasets library names the files that the library reads."""
    with zipfile.ZipFile(tmp_path / "texts.zip", "w") as archive:
        archive.writestr("train/state.json", "{}")
        archive.writestr("validation.csv", "text,label\na,b\n")
    with pytest.raises(InvalidInput, match="expected an archive of train"):
        texts_of(tmp_path / "texts.zip", {"train": Columns(), "validation": Columns()})
