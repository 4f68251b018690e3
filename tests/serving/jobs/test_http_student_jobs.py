"""``POST /v1/students``: a group of students made by a job from a task that the server has."""

from __future__ import annotations

from pathlib import Path

import pytest
from clients import client_of
from support import FIXTURES, tiny

from checkpoints.task_file import read_task
from jpets.app.hosting import outline_of
from jpets.app.jobs.work import do
from jpets.errors import Conflict, InvalidInput
from jpets.training.run import UpdateReport
from serving.hosted.service import Service
from serving.hosted.services import Services
from serving.http.settings import ServingSettings
from serving.jobs.request import MakeStudents
from serving.jobs.service import Jobs

ROWS = [("the library reads a module", "label-0"), ("a game of music and sound", "label-1")] * 24
LABELLED = "\n".join(["text,verdict", *(f"{text},{label}" for text, label in ROWS)]).encode()
UNKNOWN = LABELLED.replace(b"label-0", b"good")


def test_a_group_is_made_of_a_served_task(service: Service, settings: ServingSettings, tmp_path: Path) -> None:
    jobs = Jobs(tmp_path / "jobs", Services(service), lambda job: [], outline_of)
    call = client_of(service, settings, jobs)
    asked = {"task": "group", "teacher": "topic", "settings": '{"rank": 4}', "label": "verdict", "most": 2}
    asked |= {"dtype": "float32", "epochs": 2, "batch": 8, "max_length": 16, "copies": 0}
    for wrong, said in (
        ({"teacher": "nobody"}, "expected a task of this server"),
        ({"teacher": "tiny-bert"}, "expected a task of this server"),
        ({"method": "mask", "settings": "{}"}, "next to the weights"),
        ({"settings": '{"rank": 0}'}, "rank"),
        ({"settings": "[]"}, "JSON object"),
    ):
        answer = call("POST", "/v1/students", params=asked | wrong, content=UNKNOWN)
        assert answer.status_code == 422 and said in answer.text, answer.text
    answer = call("POST", "/v1/students", params=asked, content=LABELLED)
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
    answer = call("POST", "/v1/students", params=asked, content=UNKNOWN)
    with pytest.raises(InvalidInput, match=r"good|bad"):
        do(jobs.folders.get(answer.json()["id"]), [*place, *place], lambda step: None)
