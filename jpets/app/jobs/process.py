"""The process of a job: ``python -m jpets.app.jobs.process FOLDER SOURCE NAME ...``, which a server starts.

Makes what FOLDER asks for over the backbone from SOURCE, called NAME there, and leaves it and the result in the folder.
The last of several backbones is that of a teacher, or the one that a root was made of.
The process goes on from the checkpoints that an earlier one left, and ends with the server.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import math
import os
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from jpets.app.jobs.work import do
from jpets.errors import JpetsError, OutOfSpace
from jpets.failures import as_told, no_such_platform
from jpets.files import DISK_FULL, space_errors
from jpets.training.process import set_up_training
from serving.http.logs import FieldFormatter, places
from serving.jobs.folder import JobFolder, JobResult
from serving.jobs.states import DISK_IS_FULL, JobProgress

if TYPE_CHECKING:
    from jpets.training.run import UpdateReport

log = logging.getLogger("jpets.job")

TOLD_EVERY = 0.5
"""Seconds between two updates of the progress."""
LOGGED_EVERY = 10.0
"""Seconds between two lines of progress in the log."""


def main() -> None:
    with contextlib.suppress(OSError):
        os.nice(19)
    set_up_training()
    threading.Thread(target=_end_with_server, daemon=True).start()
    job, places = JobFolder(Path(sys.argv[1])), sys.argv[2:]
    try:
        with space_errors(), job.lock_file.open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # the process of a server that was killed may not have ended yet
            lock.write(str(os.getpid()))
            lock.flush()
            _set_up_log(job)
            if job.result is None:
                sys.exit(_work(job, places))
    except OutOfSpace:
        sys.exit(DISK_IS_FULL)


def _work(job: JobFolder, places_of: Sequence[str]) -> int:
    """The exit status: 0 where there is a result."""
    try:
        try:
            with space_errors():
                result = do(job, places_of, _Reporter(job))
        except JpetsError as error:
            log.warning("failed: %s", error.message)
            if error.message == DISK_FULL:
                return DISK_IS_FULL
            result = JobResult(problem=error.message)
        job.write_result(result)
    except OutOfSpace:
        return DISK_IS_FULL
    except Exception as error:  # noqa: BLE001 (the text of an unforeseen exception may quote the data)
        if (told := as_told(error)) is not None:
            log.warning("failed: %s", told.message)
            if no_such_platform(error):
                job.write_result(JobResult(problem=told.message))
                return 0
            return 1
        log.error("unexpected error", extra={"type": type(error).__name__, "at": places(error)})
        return 1
    return 0


class _Reporter:
    """Notes the progress, at most once in ``TOLD_EVERY`` seconds."""

    def __init__(self, job: JobFolder) -> None:
        self._job = job
        self._told = self._logged = -math.inf

    def __call__(self, step: UpdateReport) -> None:
        now, last = time.monotonic(), step.number == step.of
        loss = step.loss if math.isfinite(step.loss) else None
        if last or now - self._told >= TOLD_EVERY:
            self._told = now
            with contextlib.suppress(OutOfSpace):
                self._job.write_progress(JobProgress(step=step.number, of=step.of, loss=loss, stage=step.stage))
        if last or now - self._logged >= LOGGED_EVERY:
            self._logged = now
            stage = {"stage": step.stage} if step.stage else {}
            log.info("step", extra={**stage, "step": f"{step.number}/{step.of}", "loss": loss})


def _end_with_server() -> None:
    """Standard input is a pipe from the server, which writes nothing: it ends when the server does."""
    os.read(sys.stdin.fileno(), 1)
    os._exit(1)


def _set_up_log(job: JobFolder) -> None:
    """Our lines go to the job's log; lines of libraries, which may name folders, only where they are errors."""
    others = logging.StreamHandler()
    others.setLevel(logging.ERROR)
    logging.basicConfig(handlers=[others])
    handler = logging.FileHandler(job.log_file, encoding="utf-8")
    handler.setFormatter(FieldFormatter(as_json=False))
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    log.propagate = False


if __name__ == "__main__":
    main()
