"""Jobs on disk and their processes, with a process that trains nothing, but does what its data say."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

import pytest
from fake_jobs import KEPT, REQUEST, Published, add, command_of, finished
from support import wait_until

from jpets.errors import (
    Conflict,
    EngineFailure,
    InvalidTask,
    JpetsError,
    NotFound,
    OutOfSpace,
    Saturated,
    UnknownClass,
)
from serving.jobs.folder import JobFolder, JobFolders, JobState
from serving.jobs.runner import JobRunner


def test_jobs_are_published_in_their_order(
    jobs: JobFolders, make_runner: Callable[[], JobRunner], published: Published
) -> None:
    first = add(jobs)
    runner = make_runner()
    second = add(jobs, runner=runner)
    done = [finished(first), finished(second)]
    assert [(item.state, item.version, item.attempts) for item in done] == [("succeeded", 1, 1), ("succeeded", 2, 1)]
    assert (done[0].held_out_loss, done[0].problem, published.asked) == (0.5, None, 2)
    assert done[0].created <= str(done[0].started) <= str(done[0].finished)
    assert [job.id for job in jobs.all()] == [second.id, first.id]
    assert {path.name for path in first.path.iterdir()} == KEPT


def test_tenants_take_turns(jobs: JobFolders, make_runner: Callable[[], JobRunner]) -> None:
    added = [add(jobs, tenant=tenant) for tenant in ("acme", "acme", "acme", "globex", "globex", "initech")]
    make_runner()
    ended = sorted((finished(job).finished, job.state.tenant) for job in added)
    assert [tenant for _, tenant in ended] == ["acme", "globex", "initech", "acme", "globex", "acme"]


@pytest.mark.parametrize(("data", "problem"), [("bad", "the data are bad"), ("crash", "ended 3 times")])
def test_a_job_that_fails_publishes_nothing(
    jobs: JobFolders, make_runner: Callable[[], JobRunner], published: Published, data: str, problem: str
) -> None:
    runner = make_runner()
    item = finished(add(jobs, data, runner))
    assert item.state == "failed" and problem in str(item.problem) and item.version is None
    assert not published.asked


def test_a_process_that_was_killed_goes_on(
    jobs: JobFolders, make_runner: Callable[[], JobRunner], published: Published
) -> None:
    runner = make_runner()
    item = finished(add(jobs, "crash once", runner))
    assert (item.state, item.attempts, published.files) == ("succeeded", 2, ["trained in 2 processes"])


def test_a_job_outlives_its_server(
    jobs: JobFolders, make_runner: Callable[[], JobRunner], published: Published
) -> None:
    first = make_runner()
    job = add(jobs, "wait", first)
    wait_until(lambda: (job.path / "pid").exists())
    assert job.state.state == "running"
    first.close()
    assert (job.state.state, job.state.attempts) == ("queued", 0)  # it was not the job's fault
    with pytest.raises(ProcessLookupError):
        os.kill(int((job.path / "pid").read_text()), 0)
    job.begin(1)  # as a server that is killed leaves it
    make_runner()
    assert (finished(job).state, job.state.attempts) == ("succeeded", 2)
    assert published.files == ["trained in 2 processes"]


def test_what_a_dead_server_may_have_published_is_looked_for(
    jobs: JobFolders, make_runner: Callable[[], JobRunner], published: Published
) -> None:
    job = add(jobs)
    job.task_file.write_text("done")
    (job.path / "result.json").write_text(json.dumps({"held_out_loss": None}))
    job.change(state="running", publishing=True, attempts=1)
    make_runner()
    assert (finished(job).state, published.asked, published.files) == ("succeeded", 1, ["done"])


def test_a_task_that_cannot_be_published_fails_its_job(
    jobs: JobFolders, make_runner: Callable[[], JobRunner], published: Published
) -> None:
    published.errors = [InvalidTask("the task is damaged"), Saturated("later")]
    runner = make_runner()
    item = finished(add(jobs, runner=runner))
    told = "the task is damaged; what it made is in the job's folder"
    assert (item.state, item.problem, published.asked) == ("failed", told, 2)
    assert finished(add(jobs, runner=runner)).state == "succeeded"


@pytest.mark.parametrize(
    "error", [Conflict("the task is another's"), NotFound("its backbone is gone"), InvalidTask("of another backbone")]
)
def test_what_may_be_published_by_hand_is_kept(
    jobs: JobFolders, make_runner: Callable[[], JobRunner], published: Published, error: JpetsError
) -> None:
    published.errors = [error]
    job = add(jobs)
    make_runner()
    item = finished(job)
    assert item.state == "failed" and item.problem == f"{error.message}; what it made is in the job's folder"
    assert job.task_file.exists() and job.state.kept


def test_what_a_job_made_waits_for_the_engine(
    jobs: JobFolders, make_runner: Callable[[], JobRunner], published: Published
) -> None:
    published.errors = [EngineFailure("the engine is not running"), EngineFailure("the engine is not running")]
    make_runner()
    assert finished(add(jobs)).state == "succeeded" and published.asked == 3


def test_a_job_that_cannot_be_published_keeps_no_other_back(
    jobs: JobFolders, make_runner: Callable[[], JobRunner], published: Published
) -> None:
    """As on a full disk: it waits longer each time, and can be cancelled meanwhile."""
    stuck = add(jobs, "wait")
    published.errors = []

    def full(job: JobFolder) -> int:
        if job.id == stuck.id:
            raise OutOfSpace("the disk is full")
        return published(job)

    stuck.task_file.write_text("done")
    (stuck.path / "result.json").write_text(json.dumps({"held_out_loss": None}))
    stuck.change(state="running", publishing=True, attempts=1)
    runner = JobRunner(jobs, command_of, full, back_off=0.05)
    runner.start()
    others = [add(jobs, runner=runner) for _ in range(3)]
    assert [finished(other).state for other in others] == ["succeeded"] * 3
    assert not stuck.state.is_finished and runner._put_offs[stuck.id].times >= 1
    wait_until(lambda: runner._put_offs[stuck.id].times >= 3)

    def cancelled() -> bool:
        with contextlib.suppress(Conflict):
            runner.cancel(stuck)
            return True
        return False

    wait_until(cancelled)
    assert finished(stuck).state == "cancelled"
    runner.close()


def test_what_was_being_published_waits_for_a_server_that_can(jobs: JobFolders, published: Published) -> None:
    """A server without the job's backbone would fail it."""
    job = add(jobs)
    job.task_file.write_text("done")
    (job.path / "result.json").write_text(json.dumps({"held_out_loss": None}))
    job.change(state="running", publishing=True, attempts=1)
    able = threading.Event()
    runner = JobRunner(jobs, command_of, published, runnable=lambda job: able.is_set())
    runner.start()
    time.sleep(0.3)
    assert not job.state.is_finished
    able.set()
    runner.wake()
    assert finished(job).state == "succeeded" and published.files == ["done"]
    runner.close()


def test_jobs_are_cancelled(jobs: JobFolders, make_runner: Callable[[], JobRunner], published: Published) -> None:
    runner = make_runner()
    running, waiting = add(jobs, "wait", runner), add(jobs)
    wait_until(lambda: (running.path / "pid").exists())
    runner.cancel(waiting)
    assert waiting.state.state == "cancelled" and running.state.state == "running"
    runner.cancel(running)
    assert finished(running).state == "cancelled"
    with pytest.raises(ProcessLookupError):
        os.kill(int((running.path / "pid").read_text()), 0)
    assert not published.asked
    runner.cancel(running)
    jobs.remove(running)
    for gone in (lambda: jobs.get(running.id), lambda: jobs.remove(running), lambda: jobs.get("../jobs")):
        with pytest.raises(NotFound):
            gone()


def test_a_cancelled_job_is_not_published_though_it_is_done(
    jobs: JobFolders, make_runner: Callable[[], JobRunner], published: Published
) -> None:
    done = add(jobs)
    (done.path / "result.json").write_text(json.dumps({"held_out_loss": 0.5}))  # its process has not ended yet
    done.ask_to_end()
    runner = make_runner()
    assert (finished(done).state, published.asked) == ("cancelled", 0)
    published.errors = [Saturated("later")] * 10_000
    waiting = add(jobs, runner=runner)

    def cancelled() -> bool:
        with contextlib.suppress(Conflict):
            runner.cancel(waiting)
            return True
        return False

    wait_until(lambda: published.asked and cancelled())
    assert (finished(waiting).state, published.files) == ("cancelled", [])


def test_a_job_whose_server_ended_while_it_published_says_so_when_it_is_cancelled(
    jobs: JobFolders, published: Published
) -> None:
    """What it made may be stored: nobody knows."""
    runner = JobRunner(jobs, command_of, published)
    cut_off, waiting = add(jobs), add(jobs)
    cut_off.change(state="running", publishing=True, attempts=1)
    for job in (cut_off, waiting):
        runner.cancel(job)
    assert [job.state.state for job in (cut_off, waiting)] == ["cancelled"] * 2
    assert "may be stored" in str(cut_off.state.problem) and waiting.state.problem is None


def test_a_task_that_could_not_be_published_is_not_made(jobs: JobFolders, published: Published) -> None:
    def check(job: JobFolder) -> None:
        checked.append(job.outline_file.read_text())
        if checked == ["outline wide"]:
            raise Saturated("later")
        if checked[-1] == "outline wide":
            raise UnknownClass("no class holds it")

    checked: list[str] = []
    runner = JobRunner(jobs, command_of, published, check)
    runner.start()
    item = finished(wide := add(jobs, "outline wide", runner))
    assert (item.state, item.problem, item.attempts) == ("failed", "no class holds it", 1)
    with pytest.raises(ProcessLookupError):
        os.kill(int((wide.path / "pid").read_text()), 0)
    fitting = add(jobs, "outline", runner)
    assert finished(fitting).state == "succeeded" and {path.name for path in fitting.path.iterdir()} == KEPT
    assert checked[:2] == ["outline wide"] * 2
    runner.close()


def test_nobody_cancels_what_is_being_published(jobs: JobFolders, tmp_path: Path) -> None:
    started, ended = threading.Event(), threading.Event()

    def publish(job: JobFolder) -> int:
        started.set()
        assert ended.wait(10)
        return 1

    runner = JobRunner(jobs, command_of, publish)
    runner.start()
    job = add(jobs, runner=runner)
    assert started.wait(10)
    with pytest.raises(Conflict, match="is being published"):
        runner.cancel(job)
    ended.set()
    assert finished(job).state == "succeeded"
    runner.close()


def test_another_server_cannot_cancel_what_is_just_being_published(
    jobs: JobFolders, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Future[None]] = []

    def publish(job: JobFolder) -> int:
        wait(asked, timeout=10)
        return 1

    own, other = (JobRunner(jobs, command_of, publish) for _ in range(2))
    change = JobFolder.change

    def changed(job: JobFolder, **changes: object) -> JobState:
        if changes.get("publishing"):  # it had not been cancelled
            asked.append(pool.submit(other.cancel, job))
            wait(asked, timeout=0.1)
        return change(job, **changes)

    monkeypatch.setattr(JobFolder, "change", changed)
    with ThreadPoolExecutor(1) as pool:
        own.start()
        job = add(jobs, runner=own)
        assert finished(job).state == "succeeded"
        with pytest.raises(Conflict, match="is being published"):
            asked[0].result()
    own.close()


def test_temporary_files_go_with_the_process_and_the_job(
    jobs: JobFolders, make_runner: Callable[[], JobRunner]
) -> None:
    old = add(jobs)
    old.finish("failed")
    old.data.write_text("a kill came before this was deleted")
    (old.fresh_scratch() / "unpacked").touch()
    (old.path / ".tmp-1").mkdir()
    (old.path / ".tmp-2").touch()
    make_runner()
    wait_until(lambda: not old.data.exists() and not old.scratch.exists() and not list(old.path.glob(".tmp-*")))
    left = add(jobs, "wait")
    (left.fresh_scratch() / "unpacked").touch()
    wait_until(lambda: left.state.state == "running" and not (left.scratch / "unpacked").exists())


def test_a_job_waits_for_space_on_the_disk(
    jobs: JobFolders, make_runner: Callable[[], JobRunner], published: Published, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin, left = JobFolder.begin, [3]

    def full(job: JobFolder, attempts: int, fruitless: int) -> None:
        left[0] -= 1
        if left[0] >= 0:
            raise OutOfSpace("the disk is full")
        begin(job, attempts, fruitless)

    monkeypatch.setattr(JobFolder, "begin", full)
    item = finished(add(jobs, runner=make_runner()))
    assert (item.state, item.attempts, left) == ("succeeded", 1, [-1])


def test_a_process_that_finds_the_disk_full_is_started_again(
    jobs: JobFolders, make_runner: Callable[[], JobRunner]
) -> None:
    item = finished(add(jobs, "disk full", runner=make_runner()))
    assert (item.state, item.attempts) == ("succeeded", 1)


def test_a_folder_that_cannot_be_listed_for_a_while_ends_nothing(
    jobs: JobFolders, make_runner: Callable[[], JobRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, left = jobs.all, [3]

    def failing() -> Sequence[JobFolder]:
        left[0] -= 1
        if left[0] >= 0:
            raise OSError(24, "Too many open files")
        return whole()

    monkeypatch.setattr(jobs, "all", failing)
    assert finished(add(jobs, runner=make_runner())).state == "succeeded"


def test_one_server_of_several_runs_the_jobs(
    jobs: JobFolders, make_runner: Callable[[], JobRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("serving.jobs.runner.LOOK", 0.02)
    first, second = make_runner(), make_runner()
    waiting = add(jobs, "wait")  # no runner is told
    wait_until(lambda: (waiting.path / "pid").exists())
    second.cancel(waiting)
    assert finished(waiting).state == "cancelled"
    first.close()
    assert finished(add(jobs)).state == "succeeded"


def test_a_command_that_cannot_be_run_is_the_problem(jobs: JobFolders, published: Published) -> None:
    def command(job: JobFolder) -> list[str]:
        raise NotFound("its backbone is gone")

    runner = JobRunner(jobs, command, published)
    runner.start()
    assert finished(add(jobs, runner=runner)).problem == "its backbone is gone"
    runner.close()


def test_a_draft_that_fails_leaves_nothing(jobs: JobFolders) -> None:
    def fail() -> None:
        with jobs.draft(REQUEST) as draft:
            draft.data.write_text("half")
            raise ValueError

    with pytest.raises(ValueError):
        fail()
    assert not list(jobs.path.iterdir())
    (jobs.path / ".gone-job-1").mkdir()
    jobs.sweep()
    assert not list(jobs.path.iterdir())
