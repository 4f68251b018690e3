"""Jobs whose process trains nothing, but does what their data say."""

from __future__ import annotations

import sys

from support import wait_until

from jpets.access import DEFAULT_TENANT
from jpets.errors import JpetsError
from serving.jobs.folder import JobFolder, JobFolders
from serving.jobs.request import FineTune
from serving.jobs.runner import JobRunner
from serving.protocols.schemas import JobItem

PROCESS = """
import json, os, pathlib, signal, sys, time
job = pathlib.Path(sys.argv[1])
checkpoints = job / "checkpoints"
checkpoints.mkdir(exist_ok=True)
steps = len(list(checkpoints.iterdir()))
what = (job / "data.csv").read_text()
(checkpoints / str(steps)).touch()
(job / "pid").write_text(str(os.getpid()))
if what == "crash once" and steps == 0 or what == "crash":
    os.kill(os.getpid(), signal.SIGKILL)
if what == "crash further on" and steps < 6:
    (job / "progress.json").write_text(json.dumps({"step": steps + 1, "of": 9, "loss": None}))
    os.kill(os.getpid(), signal.SIGKILL)
if what == "disk full" and steps < 7:
    sys.exit(75)
if what.startswith("outline"):
    (job / "outline.safetensors").write_text(what)
if what in ("wait", "outline wide") and steps == 0:
    sys.stdin.read()
    sys.exit(1)
(job / "task.safetensors").write_text(f"trained in {steps + 1} processes")
problem = "the data are bad" if what == "bad" else None
(job / "result.json.new").write_text(json.dumps({"problem": problem, "held_out_loss": 0.5}))
(job / "result.json.new").rename(job / "result.json")
"""
REQUEST = FineTune(task="topic")
KEPT = {"request.json", "state.json", "result.json", "pid"}
"""Files that a finished job leaves."""


class Published:
    """A repository: the published tasks, in order; ``errors`` are raised first."""

    def __init__(self) -> None:
        self.files: list[str] = []
        self.errors: list[JpetsError] = []
        self.asked = 0

    def __call__(self, job: JobFolder) -> int:
        self.asked += 1
        if self.errors:
            raise self.errors.pop()
        self.files.append(job.task_file.read_text())
        return len(self.files)


def command_of(job: JobFolder) -> list[str]:
    return [sys.executable, "-S", "-c", PROCESS, str(job.path)]


def add(jobs: JobFolders, data: str = "", runner: JobRunner | None = None, tenant: str = DEFAULT_TENANT) -> JobFolder:
    with jobs.draft(REQUEST, tenant) as draft:
        draft.data.write_text(data)
        job = jobs.commit(draft)
    if runner is not None:
        runner.wake()
    return job


def finished(job: JobFolder) -> JobItem:
    wait_until(lambda: job.state.is_finished and not job.data.exists())
    return JobItem.of(job)
