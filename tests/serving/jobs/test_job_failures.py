"""What a server, its disk or its system fail to do costs no job its work."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable

import jax
import pytest
from fake_jobs import KEPT, Published, add, command_of, finished
from support import wait_until

from jpets.access import DEFAULT_TENANT
from jpets.app.jobs import process
from jpets.errors import OutOfSpace
from serving.jobs.folder import JobFolder, JobFolders, JobState
from serving.jobs.request import Extract
from serving.jobs.runner import JobRunner
from serving.jobs.states import JobProgress


def test_what_a_server_fails_to_publish_is_tried_again_and_kept(
    jobs: JobFolders, make_runner: Callable[[], JobRunner], published: Published
) -> None:
    """As where a folder may not be written: training may have taken days."""
    published.errors = [PermissionError("secret")]  # type: ignore[list-item]
    runner = make_runner()
    assert finished(add(jobs, runner=runner)).state == "succeeded"
    published.errors = [RuntimeError("secret")] * 3  # type: ignore[list-item]
    item = finished(job := add(jobs, runner=runner))
    assert (
        item.state == "failed" and "is in the job's folder" in str(item.problem) and "secret" not in str(item.problem)
    )
    runner.close()
    make_runner()
    assert finished(add(jobs)).state == "succeeded"
    assert {path.name for path in job.path.iterdir()} == KEPT | {"task.safetensors"}


def test_a_job_waits_for_what_the_system_lacks(jobs: JobFolders, published: Published) -> None:
    errors = [OSError(errno.EMFILE, "no descriptors"), OSError(errno.EAGAIN, "no processes")] * 4

    def command(job: JobFolder) -> list[str]:
        if errors:
            raise errors.pop()
        return command_of(job)

    runner = JobRunner(jobs, command, published, attempts=3, back_off=0.01)
    runner.start()
    assert finished(add(jobs, runner=runner)).state == "succeeded"
    runner.close()


def test_a_platform_that_is_not_there_is_the_problem(jobs: JobFolders, monkeypatch: pytest.MonkeyPatch) -> None:
    """It will not be otherwise next time."""
    monkeypatch.setattr(process, "do", lambda *_: jax.local_devices(backend="gpus"))
    job = add(jobs)
    assert process._work(job, []) == 0
    assert job.result is not None and "--job-platform" in str(job.result.problem)


def test_a_job_that_gets_further_each_time_is_not_given_up(
    jobs: JobFolders, make_runner: Callable[[], JobRunner], published: Published
) -> None:
    """Its server may be killed as often as it likes."""
    runner = make_runner()
    assert finished(add(jobs, "crash further on", runner)).state == "succeeded"
    assert published.files == ["trained in 7 processes"]


def test_a_full_disk_is_freed_by_a_cancellation(
    jobs: JobFolders, make_runner: Callable[[], JobRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, change = make_runner(), JobFolder.change
    running, waiting = add(jobs, "wait", runner), add(jobs)
    wait_until(lambda: (running.path / "pid").exists())

    def full(job: JobFolder, **changes: object) -> JobState:
        if changes.get("state") == "cancelled" and list(job.path.glob("data.*")):
            raise OutOfSpace("the disk is full")
        return change(job, **changes)

    monkeypatch.setattr(JobFolder, "change", full)
    runner.cancel(waiting)
    assert waiting.state.state == "cancelled"


def test_a_finished_job_of_another_version_is_freed(jobs: JobFolders, make_runner: Callable[[], JobRunner]) -> None:
    old = add(jobs)
    old.change(state="failed")
    (old.path / "request.json").write_text('{"kind": "of another version"}')
    make_runner()
    wait_until(lambda: not list(old.path.glob("data.*")))


def test_what_was_taken_in_is_read_though_it_would_be_refused_now(jobs: JobFolders) -> None:
    with jobs.draft(Extract(task="topic", method="lora"), DEFAULT_TENANT) as draft:
        draft.data.write_text("")
        job = jobs.commit(draft)
    stored = job.path / "request.json"
    document = json.loads(stored.read_text()) | {"density": 0.02, "energy": 0.5, "rank": 16}
    stored.write_text(json.dumps(document))
    request = job.request
    assert isinstance(request, Extract) and (request.density, request.energy, request.rank) == (0.02, 0.5, 16)
    for changes, told in (
        ({"rank": 8, "energy": None}, "density is an option of method diff"),
        ({"density": 0.005}, "rank or energy"),
    ):
        with pytest.raises(ValueError, match=told):
            Extract.model_validate(document | changes)


def test_a_job_that_ends_where_others_ended_gets_no_further(jobs: JobFolders) -> None:
    """The last step that a process told of differs a little each time."""
    job = add(jobs)
    for step, furthest in ((149, 149), (141, 149), (149, 149), (150, 150)):
        job.write_progress(JobProgress(step=step, of=200, loss=None))
        assert job.furthest == JobProgress(step=furthest, of=200, loss=None)
        job.begin(job.state.attempts + 1)
    job.write_progress(JobProgress(step=3, of=90, loss=None))
    assert job.furthest == JobProgress(step=3, of=90, loss=None), "a second stage"


def test_each_stage_of_a_job_gets_further(jobs: JobFolders) -> None:
    """The rates of a sweep and the students of a group take as many batches each."""
    job = add(jobs)
    for stage, step in (("rate 0.0001", 200), ("rate 0.0003", 20), ("rate 0.0003", 40), ("rate 0.001", 1)):
        reached = job.state.reached
        job.write_progress(JobProgress(step=step, of=200, loss=None, stage=stage))
        assert job.furthest != reached
        job.begin(job.state.attempts + 1)
    job.write_progress(JobProgress(step=1, of=200, loss=None, stage="rate 0.001"))
    assert job.furthest == job.state.reached
