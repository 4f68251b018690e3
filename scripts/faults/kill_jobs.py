"""Training jobs whose processes are killed at random moments end with the task of one that ran through.

``PYTHONPATH=scripts python -m faults.kill_jobs --times 20`` trains a small task once, then as often again, each time
killing the process (SIGKILL) at a random moment of the run; every tensor, loss and score must be equal.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import signal
import sys
import tempfile
import time
from collections.abc import Mapping
from typing import Annotated

import numpy as np
import typer

from checkpoints.task_file import read_task
from jpets.types import Task
from serving.jobs.folder import JobFolder, JobFolders
from serving.jobs.request import FineTune
from serving.jobs.runner import JobRunner
from serving.protocols.schemas import JobItem

BACKBONE = pathlib.Path(__file__).parents[2] / "tests" / "fixtures" / "tiny-bert"
WORDS = {"good": ["library", "module"], "bad": ["game", "sound"]}
REQUEST = FineTune(task="killed", backbone="tiny-bert", epochs=6, batch=8, max_length=16, dtype="float32")


class Killed:
    """Runs jobs of one data set, and keeps the tasks that they publish."""

    def __init__(self, folder: pathlib.Path) -> None:
        self._jobs = JobFolders(folder)
        self._tasks: dict[str, Task] = {}
        self._runner = JobRunner(self._jobs, _command, self._publish, back_off=0.1)
        self._runner.start()
        rng = np.random.default_rng(0)
        lines = [f"{' '.join(rng.choice(WORDS[label], 12))},{label}" for label in rng.choice(sorted(WORDS), 64)]
        self._data = "\n".join(["text,label", *lines])

    def run(self, kill_after: float | None = None) -> tuple[JobItem, Task]:
        """A job whose first process is killed so many seconds after its start."""
        with self._jobs.draft(REQUEST) as draft:
            draft.data.write_text(self._data)
            job = self._jobs.commit(draft)
        self._runner.wake()
        if kill_after is not None:
            while not (job.lock_file.exists() and job.lock_file.read_text()):
                time.sleep(0.01)
            process = int(job.lock_file.read_text())
            end = time.monotonic() + kill_after
            while time.monotonic() < end and not job.state.is_finished:
                time.sleep(0.01)
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        while not job.state.is_finished:
            time.sleep(0.05)
        return JobItem.of(job), self._tasks[job.id]

    def close(self) -> None:
        self._runner.close()

    def _publish(self, job: JobFolder) -> int:
        self._tasks[job.id] = read_task(job.task_file)
        return 1


def main(
    times: Annotated[int, typer.Option(min=1, help="jobs to kill")] = 20,
    seed: Annotated[int, typer.Option(help="of the moments")] = 0,
) -> None:
    """Prints how often processes were killed as JSON; fails where a task differs."""
    rng = np.random.default_rng(seed)
    with tempfile.TemporaryDirectory(prefix="jpets-kill-") as folder:
        killed = Killed(pathlib.Path(folder))
        try:
            start = time.monotonic()
            expected, task = killed.run()
            seconds = time.monotonic() - start
            attempts = []
            for _ in range(times):
                start = time.monotonic()
                item, own = killed.run(float(rng.uniform(0, seconds)))
                if item.attempts == 1:
                    seconds = min(seconds, time.monotonic() - start)  # the first time the machine was busier
                for what in ("state", "progress", "held_out_loss", "scores"):
                    if getattr(item, what) != getattr(expected, what):
                        raise RuntimeError(
                            f"{what}: {getattr(item, what)} where {getattr(expected, what)} was expected"
                        )
                for one, other in zip(_tensors(own), _tensors(task), strict=True):
                    assert one.keys() == other.keys()
                    for name, array in other.items():
                        np.testing.assert_array_equal(one[name], array)
                attempts.append(item.attempts)
        finally:
            killed.close()
    again = sum(each > 1 for each in attempts)
    if not again:
        raise RuntimeError("no process was killed before its job had ended: nothing was compared")
    typer.echo(json.dumps({"jobs": times, "went_on": again, "seconds_unkilled": round(seconds, 1), "differ": 0}))


def _tensors(task: Task) -> list[Mapping[str, np.ndarray]]:
    return [task.head.tensors, *(delta.tensors for delta in task.deltas)]


def _command(job: JobFolder) -> list[str]:
    return [sys.executable, "-m", "jpets.app.jobs.process", str(job.path), str(BACKBONE), "tiny-bert"]


if __name__ == "__main__":
    typer.run(main)
