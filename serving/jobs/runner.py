"""Runs jobs, one after the other, each in a process of low priority that serving hardly notices.

A job resumes from its checkpoints after its process or the server was killed; the server publishes what it made.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, NamedTuple

from jpets.errors import Conflict, EngineFailure, JpetsError, NotFound, OutOfSpace, Saturated
from serving.jobs.folder import JobFolder, JobFolders, JobState
from serving.jobs.states import DISK_IS_FULL

log = logging.getLogger(__name__)

Command = Callable[[JobFolder], Sequence[str]]
"""The command line of a job's process. Raises ``JpetsError`` where it cannot be run."""
Publish = Callable[[JobFolder], int | None]
"""Publishes what a job made, and returns a task's version. An earlier attempt may have done so before its server ended.

Raises ``Saturated``, ``OutOfSpace`` or ``EngineFailure`` to be called again, another ``JpetsError`` for what cannot be
published.
"""
Platform = Callable[[JobFolder], str]
"""What a job's process computes on, as ``JAX_PLATFORMS`` has it."""
Check = Callable[[JobFolder], None]
"""Is called with a job once its process has written its outline.

Raises ``Saturated`` to be called again, another ``JpetsError`` where such a task cannot be served.
"""
ATTEMPTS = 5
BACK_OFF = 1.0
"""Seconds before the second attempt; each further attempt waits that much longer."""
ENGINE_BACK_OFF = 10.0
"""How many times longer what was made waits for an engine that does not work: only a new process may help."""
LONGEST_BACK_OFF = 60.0
"""Seconds that what was made waits at most for the next attempt."""
MOST_DOUBLINGS = 16
CUT_OFF = "its server ended while it published what the job made: that may be stored, so look whether it is served"
POLL = 0.1
HAND_OVER = 10.0
"""Seconds in which another server may begin to run the jobs that this one cannot."""
LOOK = 5.0
"""Seconds between looks for jobs that another server on the same repository took in."""


class _PutOff(NamedTuple):
    """``until`` (``time.monotonic``), for the nth time, of which some were errors that nobody foresaw."""

    until: float = 0.0
    times: int = 0
    unforeseen: int = 0


class JobRunner:
    """Runs the jobs in ``jobs``, of each tenant in turn the oldest, in a thread of its own.

    Of several servers on one repository one runs jobs; when it ends, another one does, and where it has none left that
    are ``runnable`` there: a server may lack a job's backbone. Thread-safe.
    """

    def __init__(
        self,
        jobs: JobFolders,
        command: Command,
        publish: Publish,
        check: Check = lambda job: None,
        *,
        platform: Platform = lambda job: "cpu",
        runnable: Callable[[JobFolder], bool] = lambda job: True,
        attempts: int = ATTEMPTS,
        back_off: float = BACK_OFF,
    ) -> None:
        self._jobs, self._command, self._publish, self._check = jobs, command, publish, check
        self._platform, self._runnable = platform, runnable
        self._attempts, self._back_off = attempts, back_off
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._work, name="jpets-jobs", daemon=True)
        self._closed = False
        self._alone = False
        """Whether this server is the one that runs jobs."""
        self._current: JobFolder | None = None
        self._turns: dict[str, int] = {}
        """The number of each tenant's last turn."""
        self._finished: set[str] = set()
        """Jobs with states that need not be read again."""
        self._put_offs: dict[str, _PutOff] = {}
        """Jobs whose results could not be published yet."""

    def start(self) -> None:
        self._thread.start()

    def wake(self) -> None:
        """Is called when there may be a new job."""
        with self._changed:
            self._changed.notify_all()

    def cancel(self, job: JobFolder) -> None:
        """A waiting job is cancelled when this returns, a running one soon after; the problem of one whose server ended
        while it published is that. Raises ``NotFound``; ``Conflict`` where what it made is being published."""
        with self._changed, job.deciding():
            state = job.state
            if state.is_finished:
                return
            rests = self._rests(job)
            if state.publishing and not rests:  # else its server was killed while it did so
                raise Conflict(f"what {job.id} made is being published; remove that when it has finished")
            job.ask_to_end()
            if state.state == "queued" or rests:  # another server may be about to run it
                job.finish("cancelled", problem=CUT_OFF if state.publishing else None)
            self._changed.notify_all()

    def close(self) -> None:
        """Ends the running job's process; the next server resumes the job."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join(timeout=10)

    def _work(self) -> None:
        while not self._closed:
            try:
                with self._lock():
                    self._jobs.sweep()
                    self._work_alone()
            except OSError:  # as without descriptors: the jobs wait
                log.exception("jobs cannot be looked at")
                self._pause(self._back_off)
            else:
                with self._changed:
                    if not self._closed:
                        self._changed.wait(HAND_OVER)  # a new job, or a cancelled one, is looked at sooner

    def _work_alone(self) -> None:
        """Runs jobs until the server ends, or those that are left cannot be run here."""
        while (job := self._next()) is not None:
            try:
                self._run(job)
            except NotFound:
                log.warning("a job was removed while it ran", extra={"job": job.id})
            except OutOfSpace:
                log.warning("a job waits for space on the disk", extra={"job": job.id})
                self._pause(self._back_off)
            except OSError:  # as without descriptors or processes: the job waits
                log.exception("a job cannot be run now", extra={"job": job.id})
                self._pause(self._back_off)
            except Exception:  # the other jobs go on
                log.exception("a job failed", extra={"job": job.id})
                try:
                    job.finish("failed", problem="the server failed; its log has the details")
                except (OSError, JpetsError):
                    self._pause(self._back_off)
            with self._changed:
                self._current = None

    def _rests(self, job: JobFolder) -> bool:
        """Whether no server runs a job now."""
        if self._alone:
            return self._current is None or self._current.id != job.id
        with self._lock_file.open("w") as file:
            return _locked(file)

    @property
    def _lock_file(self) -> Path:
        """Held by the server that runs jobs."""
        return self._jobs.path / ".lock"

    @contextlib.contextmanager
    def _lock(self) -> Iterator[None]:
        """Waits until no other server runs jobs of this repository, or until this one ends."""
        with self._lock_file.open("w") as file:
            while not self._closed and not self._alone:
                self._alone = _locked(file)
                if not self._alone:
                    self._pause(LOOK)
            try:
                yield
            finally:
                self._alone = False

    def _next(self) -> JobFolder | None:
        """The oldest job that has not finished and can be run here, of the tenant whose last turn is longest ago; waits
        for one. None at the end, and where all that wait can only be run elsewhere."""
        with self._changed:
            while not self._closed:
                oldest: dict[str, JobFolder] = {}
                elsewhere, wait = False, LOOK
                for job in reversed(self._jobs.all()):
                    if job.id in self._finished:
                        continue
                    with contextlib.suppress(NotFound):
                        if not (state := job.state).is_finished:
                            later = self._later(job)
                            if later > 0:
                                wait = min(wait, later)
                            elif (job.is_to_end and not state.publishing) or self._can_run(job):
                                oldest.setdefault(state.tenant, job)
                            else:
                                elsewhere = True
                            continue
                        self._finished.add(job.id)
                        self._put_offs.pop(job.id, None)
                        job.free()  # a kill may have come before that
                if oldest:
                    tenant = min(oldest, key=lambda each: self._turns.get(each, 0))
                    self._turns[tenant] = max(self._turns.values(), default=0) + 1
                    self._current = oldest[tenant]
                    return self._current
                if elsewhere:
                    return None
                self._changed.wait(wait)
        return None

    def _later(self, job: JobFolder) -> float:
        """Seconds until what a job made may be published."""
        put_off = self._put_offs.get(job.id)
        return 0.0 if put_off is None or job.is_to_end else put_off.until - time.monotonic()

    def _can_run(self, job: JobFolder) -> bool:
        """Also where its request cannot be read: that ends it."""
        try:
            return self._runnable(job)
        except NotFound:
            return True

    def _run(self, job: JobFolder) -> None:
        """Runs a job until it has finished or the server ends."""
        while not self._closed:
            state = job.state
            if state.is_finished:  # another server has cancelled it
                return
            if job.is_to_end and not state.publishing:
                job.finish("cancelled")
                return
            if (result := job.result) is not None:
                self._end(job, result.problem)
                return
            fruitless = 0 if _has_got_further(job, state) else state.fruitless
            if fruitless >= self._attempts:
                job.finish("failed", problem=f"its process ended {fruitless} times without getting any further")
                return
            if state.attempts and self._pause(self._back_off * max(1, fruitless)):
                return
            with job.deciding():
                if job.is_to_end or job.state.is_finished:  # it was cancelled meanwhile, by another server perhaps
                    continue
                job.begin(state.attempts + 1, fruitless + 1)
            try:
                status = self._process(job)
            except JpetsError as error:
                job.finish("failed", problem=error.message)
                return
            except OSError:  # nothing ran
                job.change(state="queued", attempts=state.attempts, fruitless=fruitless)
                raise
            if self._closed or status == DISK_IS_FULL:  # not the job's fault
                job.change(state="queued", attempts=state.attempts, fruitless=fruitless)
                if not self._closed:
                    raise OutOfSpace("the disk is full")
            elif status:
                log.warning("the process of a job ended early", extra={"job": job.id, "status": status})

    def _process(self, job: JobFolder) -> int | None:
        """Runs a job's process. Returns its exit status; None where it was told to end. Raises ``JpetsError`` where
        what it is going to make cannot be published."""
        checked = False
        with subprocess.Popen(
            [*self._command(job)],
            stdin=subprocess.PIPE,  # closes when this server ends, which ends the process
            stdout=subprocess.DEVNULL,
            env=self._environment(job, job.fresh_scratch()),
        ) as process:
            try:
                while (status := process.poll()) is None:
                    if not checked and job.outline_file.exists():
                        with contextlib.suppress(Saturated):
                            self._check(job)
                            checked = True
                    with self._changed:
                        if self._closed or job.is_to_end:
                            return None
                        self._changed.wait(POLL)
                return status
            finally:
                process.kill()

    def _environment(self, job: JobFolder, scratch: Path) -> dict[str, str]:
        root = str(Path(__file__).parents[2])
        paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
        return {
            **os.environ,
            "JAX_PLATFORMS": self._platform(job),
            "JAX_NUM_CPU_DEVICES": "1",
            "NPROC": str(max(1, (os.cpu_count() or 1) // 2)),  # threads of XLA on a CPU
            "PYTHONPATH": os.pathsep.join(paths),
            "TMPDIR": str(scratch),  # what a killed process left there goes with the job
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",  # the device's memory belongs to the server
        }

    def _end(self, job: JobFolder, problem: str | None) -> None:
        """Publishes what a job made; nothing where it has a problem, or while the server ends."""
        if problem is not None:
            job.finish("failed", problem=problem)
            return
        with self._changed, job.deciding():  # from here on it cannot be cancelled
            state = job.state
            if state.is_finished or self._closed:
                return
            if job.is_to_end and not state.publishing:
                job.finish("cancelled")
                return
            job.change(publishing=True)
        try:
            version = self._publish(job)
        except (Saturated, OutOfSpace, EngineFailure) as error:
            if not isinstance(error, Saturated):
                log.warning("what a job made waits: %s", error.message, extra={"job": job.id})
            self._put_off(job, ENGINE_BACK_OFF if isinstance(error, EngineFailure) else 1)
        except JpetsError as error:  # as without its backbone: the work of days is not thrown away
            where = "; what it made is in the job's folder" if job.has_made_files else ""
            job.finish("failed", problem=f"{error.message}{where}", kept=True)
        except Exception as error:  # such as a folder that may not be written
            log.exception("what a job made cannot be published", extra={"job": job.id})
            self._put_off(job, 1, unforeseen=True)
            if self._put_offs[job.id].unforeseen >= self._attempts:
                where = ", and is in the job's folder" if job.has_made_files else ""
                why = f"what it made could not be published ({type(error).__name__}){where}"
                with job.deciding():
                    if not job.state.is_finished:  # it may be cancelled by now
                        job.finish("failed", problem=f"{why}; the server's log has the details", kept=True)
        else:
            job.finish("succeeded", version=version)
            log.info(
                "a job published what it made", extra={"job": job.id, "kind": job.request.kind, "version": version}
            )

    def _put_off(self, job: JobFolder, longer: float, *, unforeseen: bool = False) -> None:
        """What a job made is published later, ``longer`` times as late as usual; other jobs go on."""
        last = self._put_offs.get(job.id, _PutOff())
        if unforeseen:  # a storage that is away for minutes is no reason to give up the work of days
            seconds = self._back_off * 4 ** min(last.unforeseen + 1, self._attempts)
        else:
            seconds = min(self._back_off * longer * 2 ** min(last.times, MOST_DOUBLINGS), LONGEST_BACK_OFF)
        self._put_offs[job.id] = _PutOff(time.monotonic() + seconds, last.times + 1, last.unforeseen + unforeseen)
        with contextlib.suppress(OSError, OutOfSpace):  # the disk may be full
            job.change(publishing=False)

    def _pause(self, seconds: float) -> bool:
        """Waits; True where the server ends."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed, timeout=seconds)
            return self._closed


def _locked(file: IO[str]) -> bool:
    """Locks a file until it is closed, unless another one has it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _has_got_further(job: JobFolder, state: JobState) -> bool:
    """Whether the last process got further than all before it: a job of days may see its server killed often."""
    return job.furthest != state.reached
