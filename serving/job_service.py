"""Training jobs of a server: what it takes in, and how what they make is published."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

from jpets.errors import Conflict, InvalidInput, NotFound, Saturated
from jpets.types import LoadedBackbone, Task
from serving.job_folder import JobFolder, JobFolders
from serving.job_request import FineTune
from serving.job_runner import Command, JobRunner
from serving.service import Service
from serving.services import Services

MOST_WAITING = 100
"""Jobs that wait at most; their data take space."""
Outline = Callable[[FineTune, LoadedBackbone], Task]
"""A task of the shape that a job would make. Raises ``InvalidInput`` for settings that the method does not take."""


class Jobs:
    """Jobs in ``folder`` that train tasks of ``services``. Methods block; thread-safe."""

    def __init__(
        self, folder: Path, services: Services, command: Command, outline: Outline, *, platform: str = "cpu"
    ) -> None:
        self.folders = JobFolders(folder)
        self.runner = JobRunner(self.folders, command, self._publish, platform=platform)
        self._services = services
        self._outline = outline

    def accept(self, request: FineTune) -> FineTune:
        """The request with its backbone named, where all but the texts is as it must be: what is wrong is told before
        they are sent, and before hours of training.

        Raises ``InvalidInput``, ``UnknownClass``, ``OutOfSpace``, ``Conflict``, ``Saturated``.
        """
        self._services.check_open()
        request = request.model_copy(update={"backbone": request.backbone or self._services.backbone.name})
        own = self._service(request)
        if own is None:
            known = [service.backbone.name for service in self._services.all]
            raise InvalidInput(f"backbone: expected one of {known}, found {request.backbone!r}; load it first")
        if request.task in [hosted.name for hosted in self._services.backbones()]:
            raise InvalidInput(f"task: {request.task!r} is the name of a backbone; choose another id")
        if any(service.knows(request.task) for service in self._services.all if service is not own):
            raise Conflict(f"task {request.task!r} is one of another backbone; delete it first")
        own.engine.check_task(self._outline(request, own.backbone), stays=False)
        if sum(not job.state.is_finished for job in self.folders.all()) >= MOST_WAITING:
            raise Saturated(f"{MOST_WAITING} jobs wait already; cancel some, or try again when one has finished")
        return request

    def delete(self, job: JobFolder) -> bool:
        """Cancels a job, or removes one that has finished (True). Raises ``NotFound``."""
        if job.state.is_finished:
            self.folders.remove(job)
            return True
        self.runner.cancel(job)
        return False

    def _publish(self, job: JobFolder, again: bool) -> int:
        """The version as which the task of ``job`` is served. Raises what ``Services.put_task`` does."""
        request, services = job.request, self._services
        if self._service(request) is None:
            states = {hosted.name: hosted.state for hosted in services.backbones()}
            if states.get(request.backbone or "") == "starting":
                raise Saturated("its backbone is starting")
            raise NotFound(f"backbone {request.backbone!r} is not loaded any more; load it, then start a new job")
        if again and (version := self._published(request.task, job.task_file)) is not None:
            return version
        return services.put_task(request.task, job.task_file).version

    def _published(self, task: str, file: Path) -> int | None:
        """The version of the task that is this very file, if it is the served one."""
        try:
            stored = self._services.repository.get(task)
        except NotFound:
            return None
        return stored.version if stored.digest == hashlib.sha256(file.read_bytes()).hexdigest() else None

    def _service(self, request: FineTune) -> Service | None:
        return next((s for s in self._services.all if s.backbone.name == request.backbone), None)
