"""Jobs on a repository that several servers share, and that other users write to."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from clients import client_of
from fake_jobs import Published, add, command_of, finished
from support import wait_until

from jpets.access import DEFAULT_TENANT
from jpets.app.hosting import outlines_of
from serving.hosted.service import Service
from serving.hosted.services import Services
from serving.http.settings import ServingSettings
from serving.jobs import runner as runner_module
from serving.jobs.folder import JobFolder, JobFolders, JobResult
from serving.jobs.request import FurtherPretrain
from serving.jobs.runner import JobRunner
from serving.jobs.service import Jobs


def test_jobs_that_another_server_can_run_are_left_to_it(
    jobs: JobFolders, published: Published, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first server lacks the backbone of some jobs; it runs the others, and then lets the second one run jobs."""
    monkeypatch.setattr(runner_module, "HAND_OVER", 0.2)
    monkeypatch.setattr(runner_module, "LOOK", 0.02)
    lacking, having = Published(), published
    special = add(jobs, "special")
    usual = add(jobs)
    first = JobRunner(
        jobs, command_of, lacking, back_off=0.01, runnable=lambda job: "special" not in job.data.read_text()
    )
    second = JobRunner(jobs, command_of, having, back_off=0.01)
    try:
        first.start()
        wait_until(lambda: usual.state.is_finished)
        second.start()
        assert finished(special).state == "succeeded"
    finally:
        first.close()
        second.close()
    assert (len(lacking.files), len(having.files)) == (1, 1)
    assert special.state.attempts == 1


def test_a_waiting_job_is_cancelled_by_a_server_that_runs_none(
    jobs: JobFolders, make_runner: Callable[[], JobRunner], published: Published
) -> None:
    runner = make_runner()
    running, waiting = add(jobs, "wait", runner), add(jobs)
    wait_until(lambda: (running.path / "pid").exists())
    other = JobRunner(jobs, command_of, published)
    other.cancel(waiting)
    assert waiting.state.state == "cancelled" and not waiting.data.exists()
    other.cancel(running)
    assert finished(running).state == "cancelled"


def test_a_job_that_is_cancelled_before_its_next_attempt_stays_cancelled(
    jobs: JobFolders, published: Published
) -> None:
    """A runner waits a little before it starts a job again, and has read the job's state before that."""
    job = add(jobs)
    job.change(attempts=1, fruitless=1)
    runner = JobRunner(jobs, command_of, published, back_off=0.5)
    runner.start()
    try:
        wait_until(lambda: runner._current is not None)
        JobRunner(jobs, command_of, published).cancel(job)
        wait_until(lambda: runner._current is None)
    finally:
        runner.close()
    assert (job.state.state, job.state.attempts, published.asked) == ("cancelled", 1, 0)


def test_a_job_that_another_user_owns_stops_no_other(
    jobs: JobFolders, make_runner: Callable[[], JobRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden = add(jobs)
    read = Path.read_bytes

    def refuse(path: Path) -> bytes:
        if path.parent == hidden.path:
            raise PermissionError(13, "Permission denied")
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", refuse)
    later = add(jobs)
    make_runner()
    assert finished(later).state == "succeeded"
    assert len(jobs.states()) == 1


def test_a_finished_job_whose_files_stay_stops_no_other(
    jobs: JobFolders, make_runner: Callable[[], JobRunner], published: Published, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = add(jobs)
    done.change(state="failed")
    freed = JobFolder.free

    def free(job: JobFolder) -> None:
        if job.id == done.id:
            raise PermissionError(13, "another user's")
        freed(job)

    monkeypatch.setattr(JobFolder, "free", free)
    later = add(jobs)
    make_runner()
    assert finished(later).state == "succeeded"


def test_new_backbones_take_a_folder_for_them(service: Service, settings: ServingSettings, tmp_path: Path) -> None:
    """A server without one takes no such job, and leaves those that another one took to it."""
    services = Services(service)
    without = Jobs(tmp_path / "jobs", services, lambda job: [], outlines_of)
    asked = {"name": "new", "text": "text"}
    answer = client_of(service, settings, without)("POST", "/v1/jobs/further-pretrain", params=asked, content=b"x")
    assert answer.status_code == 422 and "--backbones DIR" in answer.text
    having = Jobs(tmp_path / "jobs", services, lambda job: [], outlines_of, keep_backbone=lambda name, folder: None)
    with having.folders.draft(FurtherPretrain(name="new"), DEFAULT_TENANT) as draft:
        draft.data.write_text("")
        job = having.folders.commit(draft)
    assert having._is_runnable(job) and not without._is_runnable(job)
    job.write_result(JobResult(problem="the texts are bad"))
    assert without._is_runnable(job), "it ends here"
