"""``POST /v1/students``: a group of students made by a job from a task that the server has."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest
from clients import client_of
from groups import group_task
from support import ENGINE_SETTINGS, FIXTURES, tiny, wait_until

from checkpoints.backbone import Backbone
from checkpoints.source import load_backbone
from checkpoints.task_file import fingerprint_of, read_task, task_to_bytes
from jpets.app.hosting import outlines_of
from jpets.app.jobs.work import do
from jpets.deltas.protocol import ClassKey
from jpets.engine.batch.bucket import Bucket
from jpets.engine.engine import Engine
from jpets.engine.interface import Serves
from jpets.engine.students.serving import StudentServing
from jpets.errors import Conflict, InvalidInput
from jpets.training.run import UpdateReport
from jpets.types import Task
from serving.hosted.service import MakeEngine, Service
from serving.hosted.services import Services
from serving.http.settings import ServingSettings
from serving.jobs.folder import JobFolder, JobResult
from serving.jobs.request import MakeStudents
from serving.jobs.service import Jobs

ROWS = [("the library reads a module", "label-0"), ("a game of music and sound", "label-1")] * 24
LABELLED = "\n".join(["text,verdict", *(f"{text},{label}" for text, label in ROWS)]).encode()
OPTIONS = {"task": "group", "teacher": "topic", "settings": '{"rank": 4}', "label": "verdict", "most": 2}
OPTIONS |= {"dtype": "float32", "epochs": 2, "batch": 8, "max_length": 16, "copies": 0}
UNKNOWN = LABELLED.replace(b"label-0", b"good")


def test_a_group_is_made_of_a_served_task(service: Service, settings: ServingSettings, tmp_path: Path) -> None:
    jobs = Jobs(tmp_path / "jobs", Services(service), lambda job: [], outlines_of)
    call = client_of(service, settings, jobs)
    for wrong, said in (
        ({"teacher": "nobody"}, "expected a task of this server"),
        ({"teacher": "tiny-bert"}, "expected a task of this server"),
        ({"method": "mask", "settings": "{}"}, "next to the weights"),
        ({"settings": '{"rank": 0}'}, "rank"),
        ({"settings": "[]"}, "JSON object"),
        ({"boosting": "false", "stacking": 1}, "stacking: without boosting"),
        ({"other_backbones": "gone", "backbone": "tiny-bert"}, "other_backbones: expected one of ['tiny-bert']"),
    ):
        answer = call("POST", "/v1/students", params=OPTIONS | wrong, content=UNKNOWN)
        assert answer.status_code == 422 and said in answer.text, answer.text
    answer = call("POST", "/v1/students", params=OPTIONS, content=LABELLED)
    assert (answer.status_code, answer.json()["kind"], answer.json()["task"]) == (202, "make-students", "group")
    job = jobs.folders.get(answer.json()["id"])
    assert isinstance(job.request, MakeStudents) and job.request.teacher_backbone == "tiny-bert"
    with pytest.raises(Conflict, match="needs backbone"):
        jobs.check_unused("tiny-bert")
    place, steps = [str(FIXTURES / "tiny-bert"), "tiny-bert"], list[UpdateReport]()
    result = do(job, [*place, *place], steps.append)
    task = read_task(job.task_file, id="group", config=tiny().config, backbone=tiny().ref())
    assert task.students is not None and len(task.parts) == result.scores["students"]
    assert steps and "teacher's accuracy" in result.held_against and task.labels[:2] == ("label-0", "label-1")
    assert call("DELETE", f"/v1/jobs/{job.id}").status_code == 202
    answer = call("POST", "/v1/students", params=OPTIONS, content=UNKNOWN)
    with pytest.raises(InvalidInput, match=r"good|bad"):
        do(jobs.folders.get(answer.json()["id"]), [*place, *place], lambda step: None)


@pytest.fixture
def shallow_backbone(shallow_folder: Path) -> Backbone:
    return load_backbone(shallow_folder, "shallow")


@pytest.fixture
def two(service: Service, shallow_backbone: Backbone, program_cache: Path) -> Iterator[Services]:
    """A server of tiny-bert that has loaded a backbone of fewer layers, on which groups may be served."""
    own = shallow_backbone
    shapes = outlines_of(MakeStudents(**OPTIONS), [own], ())  # type: ignore[arg-type]

    def read(data: bytes | memoryview, id: str) -> Task:
        return read_task(data, id=id, config=own.config, backbone=own.ref())

    def engine(coming: Mapping[ClassKey, int]) -> Serves:
        buckets = [Bucket(32, ((1, 32),))]
        made = Engine(own, (), ENGINE_SETTINGS, reserve=shapes, cache_dir=program_cache, buckets=buckets)
        return StudentServing(made)

    def open_backbone(name: str, engines: Callable[[], Sequence[Serves]]) -> tuple[Service, MakeEngine]:
        return Service(service.repository, own, read, growing=False), engine

    found = Services(service, available=lambda: [own.name], open_backbone=open_backbone, backbone_of=fingerprint_of)
    found.backbones.load(own.name)
    wait_until(lambda: [each.state for each in found.backbones.list()] == ["ready", "ready"])
    yield found
    found.backbones.unload(own.name)


def test_a_group_is_made_on_the_shallowest_backbone_that_is_enough(
    two: Services, settings: ServingSettings, shallow_backbone: Backbone, shallow_folder: Path, tmp_path: Path
) -> None:
    """As bagging without pruning, from texts without labels too; it is then served on that backbone."""
    jobs = Jobs(tmp_path / "jobs", two, lambda job: [], outlines_of)
    call = client_of(two, settings, jobs)
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("train.csv", LABELLED)
        archive.writestr("texts.txt", "".join(f"a text without a label, number {number}\n" for number in range(21)))
    asked = OPTIONS | {"backbone": "tiny-bert", "other_backbones": "shallow", "format": "zip"}
    asked |= {"boosting": "false", "pruning": "false"}
    for wrong, status, said in (
        ({"other_backbones": "tiny-bert"}, 422, "each once"),
        ({"task": "topic"}, 409, "is one of backbone 'tiny-bert'"),
    ):
        answer = call("POST", "/v1/students", params=asked | wrong, content=packed.getvalue())
        assert answer.status_code == status and said in answer.text, answer.text
    answer = call("POST", "/v1/students", params=asked, content=packed.getvalue())
    assert answer.status_code == 202, answer.text
    job = jobs.folders.get(answer.json()["id"])
    with pytest.raises(Conflict, match="needs backbone"):
        jobs.check_unused("shallow")
    deep, steps = [str(FIXTURES / "tiny-bert"), "tiny-bert"], list[UpdateReport]()
    result = do(job, [*deep, str(shallow_folder), "shallow", *deep], steps.append)
    task = read_task(job.task_file, id="group", config=shallow_backbone.config, backbone=shallow_backbone.ref())
    assert task.students is not None and task.students.multipliers[0] == 0.5, "they began as the mean of two"
    assert (result.chosen, result.backbone) == (f"{len(task.parts)} students on shallow", "shallow")
    assert steps[0].of == 8, "two epochs of half of 43 texts with labels and 21 without, in eights"
    job.write_result(result)
    jobs.runner.start()
    wait_until(lambda: job.state.is_finished)
    jobs.runner.close()
    assert (job.state.state, job.state.version) == ("succeeded", 1), job.state
    (found,) = call("POST", "/v1/classify", json={"model": "group", "input": ROWS[0][0]}).json()["data"]
    assert found["students"] == len(task.parts)
    assert call("DELETE", "/v1/tasks/group").status_code == 204


def ended(
    jobs: Jobs, result: JobResult, backbones: tuple[str, str], content: bytes = b"", *, publishing: bool = False
) -> JobFolder:
    """A job that has its result, of two backbones to choose from."""
    own, other = backbones
    asked = OPTIONS | {"task": "made", "backbone": own, "other_backbones": other, "teacher_backbone": "tiny-bert"}
    with jobs.folders.draft(MakeStudents(**asked)) as draft:  # type: ignore[arg-type]
        draft.data.touch()
        draft.task_file.write_bytes(content)
        draft.write_result(result)
        draft.change(state="running", publishing=publishing, above=0)
        return jobs.folders.commit(draft)


def test_a_group_is_published_where_only_its_own_backbone_is_loaded(
    two: Services, settings: ServingSettings, shallow_backbone: Backbone, tmp_path: Path
) -> None:
    jobs = Jobs(tmp_path / "jobs", two, lambda job: [], outlines_of)
    call = client_of(two, settings, jobs)
    content = task_to_bytes(group_task("made", 2, backbone=shallow_backbone))
    waiting = ended(jobs, JobResult(backbone="gone"), ("shallow", "gone"), content)
    job = ended(jobs, JobResult(backbone="shallow"), ("gone", "shallow"), content)
    lacking = ended(jobs, JobResult(backbone="gone"), ("shallow", "gone"), content, publishing=True)
    bad = ended(jobs, JobResult(problem="the texts are bad"), ("gone", "shallow"))
    with pytest.raises(Conflict, match=f"job {job.id} needs backbone"):
        jobs.check_unused("shallow")
    jobs.check_unused("tiny-bert")
    jobs.runner.start()
    wait_until(lambda: all(each.state.is_finished for each in (job, bad)))
    assert not (waiting.state.is_finished or lacking.state.is_finished), "another server may have their backbone"
    jobs.runner.close()
    assert (job.state.state, job.state.version) == ("succeeded", 1), job.state
    assert (bad.state.state, bad.state.problem) == ("failed", "the texts are bad")
    (found,) = call("POST", "/v1/classify", json={"model": "made", "input": ROWS[0][0]}).json()["data"]
    assert found["students"] == 2
    assert call("DELETE", "/v1/tasks/made").status_code == 204
