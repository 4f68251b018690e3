"""Training jobs on disk: a folder for each, from which a job goes on after its process or its server was killed.

    <id>/request.json   what was asked
    <id>/data.<format>  the texts or the archive, until the job has finished
    <id>/start.safetensors  the task that training continues, if any
    <id>/outline.safetensors  an untrained task with the head that its data ask for; written by its process
    <id>/state.json     written by the server that runs it
    <id>/progress.json  written by its process, as are
    <id>/checkpoints/   what training resumes from, until the job has finished
    <id>/tmp/           its process's temporary files, until then too
    <id>/task.safetensors or backbone/, result.json, log.txt

A file has one writer, and is replaced whole. An id sorts by the time when the job was made.
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from jpets.errors import NotFound
from jpets.files import SHORTAGES, STALE_SECONDS, TEMPORARY, space_errors, sweep, sync_folder, write_atomic
from jpets.types import DEFAULT_TENANT, TaskName
from serving.jobs.request import STORED, STORED_BEFORE, JobRequest
from serving.jobs.states import JobProgress, JobStateName

ID = re.compile(r"job-[0-9a-f-]{1,60}")
DRAFT, GONE = ".new-", ".gone-"
FINISHED = ("succeeded", "failed", "cancelled")
LOG_BYTES = 1 << 20
"""Bytes shown of a log, from its end."""
Model = TypeVar("Model", bound=BaseModel)
Parsed = TypeVar("Parsed")


class JobState(BaseModel):
    """``tenant`` owns the job and what it makes. ``attempts``: processes that were started for it; the last
    ``fruitless`` of them got no further than ``reached``. ``publishing``: a task may have been published, as a version
    above ``above``. ``kept``: what it made could not be published, and stays in its folder."""

    model_config = ConfigDict(frozen=True)

    tenant: str = DEFAULT_TENANT
    state: JobStateName = "queued"
    created: str
    started: str | None = None
    finished: str | None = None
    attempts: int = 0
    fruitless: int = 0
    reached: JobProgress | None = None
    publishing: bool = False
    above: int | None = None
    version: int | None = None
    problem: str | None = None
    kept: bool = False

    @property
    def is_finished(self) -> bool:
        return self.state in FINISHED


class JobResult(BaseModel):
    """The end of a job's process: a task, a backbone or a domain with its scores (None: not finite), or the problem.
    ``extracted`` says how the task was extracted, ``chosen`` how it was trained, ``held_against`` has the scores of
    simpler baselines; ``branch`` is what the tree of tables is to call the domain, ``backbone`` the one that was chosen
    of several."""

    problem: str | None = None
    held_out_loss: float | None = None
    scores: dict[str, float | None] = {}
    updates: int | None = None
    extracted: str | None = None
    chosen: str | None = None
    held_against: dict[str, float | None] = {}
    warnings: list[str] = []
    branch: dict[str, Any] | None = None
    backbone: str | None = None


class JobFolder:
    """One job in ``path``.

    It has more than 20 methods, as it names everything that is read and written there, by the server and by the job's
    process.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.start_file = path / "start.safetensors"
        self.outline_file = path / "outline.safetensors"
        self.task_file = path / "task.safetensors"
        self.backbone = path / "backbone"
        self.scratch = path / "tmp"
        """Temporary files of its process."""
        self.log_file = path / "log.txt"
        self.lock_file = path / "lock"
        """Locked by the job's process, and holds its number: a new process waits for the end of an old one."""

    @property
    def id(self) -> str:
        return self.path.name

    @property
    def has_made_files(self) -> bool:
        """Whether what it made lies here; a domain's table lies beside the other tables."""
        return self.task_file.exists() or self.backbone.exists()

    @property
    def request(self) -> JobRequest:
        return self._parsed(partial(STORED.validate_json, context=STORED_BEFORE), "request.json")

    def task_name(self, id: str) -> TaskName:
        """The task of its tenant."""
        return TaskName(self.state.tenant, id)

    @property
    def data(self) -> Path:
        return self.path / f"data.{self.request.format}"

    @property
    def state(self) -> JobState:
        return self._read(JobState, "state.json")

    def is_of(self, tenant: str | None) -> bool:
        """Whether it is the tenant's, or anybody's for None; False also where it is not there."""
        state = self._found(JobState, "state.json")
        return state is not None and tenant in (None, state.tenant)

    @property
    def progress(self) -> JobProgress | None:
        return self._found(JobProgress, "progress.json")

    @property
    def result(self) -> JobResult | None:
        return self._found(JobResult, "result.json")

    @property
    def is_to_end(self) -> bool:
        """Whether its cancellation was asked for."""
        return (self.path / "cancel").exists()

    @contextlib.contextmanager
    def deciding(self) -> Iterator[None]:
        """Only one server and thread at a time decides whether a job is cancelled or published. Raises ``NotFound``."""
        try:
            folder = os.open(self.path, os.O_RDONLY)
        except FileNotFoundError:
            raise NotFound(f"no job {self.id!r}; it was removed meanwhile") from None
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)
            yield
        finally:
            os.close(folder)

    def ask_to_end(self) -> None:
        (self.path / "cancel").touch()

    def write(self, request: JobRequest, tenant: str) -> None:
        """Writes everything that a new job has besides its data."""
        _replace(self.path / "request.json", request)
        _replace(self.path / "state.json", JobState(created=_now(), tenant=tenant))

    def write_progress(self, progress: JobProgress) -> None:
        _replace(self.path / "progress.json", progress)

    def write_result(self, result: JobResult) -> None:
        """The last thing that a job's process does."""
        _replace(self.path / "result.json", result)

    def change(self, **changes: Any) -> JobState:
        state = self.state.model_copy(update=changes)
        _replace(self.path / "state.json", state)
        return state

    def fresh_scratch(self) -> Path:
        shutil.rmtree(self.scratch, ignore_errors=True)
        self.scratch.mkdir()
        return self.scratch

    def begin(self, attempts: int, fruitless: int = 1) -> None:
        started = self.state.started or _now()
        self.change(state="running", attempts=attempts, fruitless=fruitless, reached=self.furthest, started=started)

    @property
    def furthest(self) -> JobProgress | None:
        """The most progress of all its processes: where one ends differs a little each time."""
        now, before = self.progress, self.state.reached
        if now is None or before is None or (now.stage, now.of) != (before.stage, before.of):
            return now or before
        return now if now.step > before.step else before

    def finish(self, state: JobStateName, **changes: Any) -> None:
        """Keeps the description and the log, and deletes the rest; of a job that is cancelled first the rest, as the
        disk may be full."""
        if state == "cancelled":
            self._delete_work()
        self.change(state=state, finished=_now(), **changes)
        self.free()

    def free(self) -> None:
        """Deletes everything of a finished job except its description, result and log, and what could not be
        published."""
        self._delete_work(keep_made=self.state.kept)
        (self.path / "cancel").unlink(missing_ok=True)

    def _delete_work(self, keep_made: bool = False) -> None:
        half_written = list(self.path.glob(f"{TEMPORARY}*"))  # by a process that was killed
        made = [] if keep_made else [self.task_file, self.backbone]
        data = self.path.glob("data.*")  # by its name: a request of another version of jpets cannot be read
        work = [self.checkpoints, self.scratch, self.start_file, self.outline_file, self.lock_file]
        for path in (*work, *made, *half_written, *data):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)

    def log(self) -> bytes:
        """The end of its log."""
        try:
            with self.log_file.open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - LOG_BYTES))
                return file.read()
        except FileNotFoundError:
            return b""

    def _found(self, model: type[Model], name: str) -> Model | None:
        try:
            return self._read(model, name)
        except NotFound:
            return None

    def _read(self, model: type[Model], name: str) -> Model:
        return self._parsed(model.model_validate_json, name)

    def _parsed(self, parse: Callable[[bytes], Parsed], name: str) -> Parsed:
        try:
            return parse((self.path / name).read_bytes())
        except (OSError, ValidationError) as error:  # removed meanwhile, or not of this version of jpets
            if isinstance(error, OSError) and error.errno in SHORTAGES:
                raise
            raise NotFound(f"job {self.id} is not there or cannot be read; GET /v1/jobs lists what there is") from error


class JobFolders:
    """Every job of a repository, in ``path``."""

    def __init__(self, path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._ended: dict[str, JobState] = {}
        """States of jobs that will not change."""

    @contextlib.contextmanager
    def draft(self, request: JobRequest, tenant: str = DEFAULT_TENANT) -> Iterator[JobFolder]:
        """A folder to put the data in; it is removed at the end unless it was committed. Raises ``OutOfSpace``."""
        made = datetime.datetime.now(datetime.UTC).strftime("%Y%m%d-%H%M%S-%f")
        draft = JobFolder(self.path / f"{DRAFT}job-{made}-{secrets.token_hex(2)}")
        try:
            with space_errors():
                draft.path.mkdir()
                draft.write(request, tenant)
                yield draft
        finally:
            shutil.rmtree(draft.path, ignore_errors=True)

    def commit(self, draft: JobFolder) -> JobFolder:
        """Makes the draft, whose files are on the disk by now (``sync_tree``), a job."""
        job = JobFolder(self.path / draft.id.removeprefix(DRAFT))
        draft.path.rename(job.path)
        sync_folder(self.path)
        return job

    def get(self, id: str, tenant: str | None = None) -> JobFolder:
        """A job, of the tenant alone if one is given. Raises ``NotFound``."""
        job = JobFolder(self.path / id) if ID.fullmatch(id) else None
        if job is None or not job.is_of(tenant):
            raise NotFound(f"no job {id[:64]!r}; GET /v1/jobs lists what there is")
        return job

    def all(self) -> Sequence[JobFolder]:
        """The newest first."""
        names = sorted((name for name in os.listdir(self.path) if ID.fullmatch(name)), reverse=True)
        return [JobFolder(self.path / name) for name in names]

    def states(self) -> Sequence[JobState]:
        """Of all jobs; those of finished ones are read once."""
        found: dict[str, JobState] = {}
        for job in self.all():
            try:
                found[job.id] = self._ended.get(job.id) or job.state
            except NotFound:  # removed meanwhile, or of another version of jpets
                continue
        self._ended = {id: state for id, state in found.items() if state.is_finished}
        return list(found.values())

    def remove(self, job: JobFolder) -> None:
        """Raises ``NotFound`` if it is removed already."""
        gone = self.path / f"{GONE}{job.id}"
        try:
            job.path.rename(gone)
        except FileNotFoundError:
            raise NotFound(f"no job {job.id!r}; it was removed already") from None
        shutil.rmtree(gone, ignore_errors=True)

    def sweep(self) -> None:
        """Removes what dead servers left."""
        sweep(self.path, DRAFT, STALE_SECONDS)
        for path in self.path.glob(f"{GONE}*"):
            shutil.rmtree(path, ignore_errors=True)


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")


def _replace(path: Path, content: BaseModel) -> None:
    write_atomic(path, content.model_dump_json().encode())
