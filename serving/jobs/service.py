"""Jobs of a server: which it accepts, and how it publishes what they make."""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from jpets.errors import Conflict, InvalidInput, NotFound, OutOfSpace, Saturated
from jpets.files import DISK_FULL, sync_tree
from jpets.types import DEFAULT_TENANT, LoadedBackbone, Task, TaskName
from serving.hosted.domains import tasks_of_domains
from serving.hosted.repository import StoredTask
from serving.hosted.service import Service
from serving.hosted.services import Services, by_name
from serving.jobs.folder import JobFolder, JobFolders
from serving.jobs.needs import has_failed, places_of, published_on, still_read
from serving.jobs.request import (
    DEFAULT_METHOD,
    Extract,
    FineTune,
    FurtherPretrain,
    JobRequest,
    MakeDomain,
    MakeStudents,
)
from serving.jobs.runner import Command, JobRunner

SERVING = ("ready", "starting")
"""States of a backbone that what a job made can be published on."""
MOST_WAITING = 100
"""Most waiting jobs: their data take space."""
MOST_OF_ONE = 25
"""Most waiting jobs of one tenant; the default one may have them all."""
Outlines = Callable[[FineTune | MakeStudents, Sequence[LoadedBackbone], Sequence[str]], Sequence[Task]]
"""A task on each of the backbones of the shape that a job would make, if it continues a task of these methods. Raises
``InvalidInput`` for settings that the method does not take, and for backbones that do not go together."""
KeepBackbone = Callable[[str, Path], None]
"""Copies a new backbone's folder to where it can be loaded from; an earlier copy stays as it is. Raises ``Conflict``
where another backbone has that name, ``OutOfSpace``."""
Asked = TypeVar("Asked", FineTune, Extract, FurtherPretrain, MakeDomain, MakeStudents)


def _check_waiting(folders: JobFolders, tenant: str, coming: Counter[str]) -> None:
    """Raises ``Saturated`` where there is no place for one more job of the tenant, besides those whose data are
    ``coming``."""
    waiting = Counter(state.tenant for state in folders.states() if not state.is_finished) + coming
    if waiting.total() >= MOST_WAITING:
        raise Saturated(f"{MOST_WAITING} jobs wait already; cancel some, or try again when one has finished")
    if tenant != DEFAULT_TENANT and waiting[tenant] >= MOST_OF_ONE:
        raise Saturated(f"{MOST_OF_ONE} jobs of yours wait already; cancel some, or wait until one has finished")


class Jobs:
    """Jobs in ``folder`` that make tasks and domains of ``services``, and backbones where there is a place to keep
    them. Methods block; thread-safe.

    It has more than 20 methods, as every kind of job is checked when it comes and again when it is published."""

    def __init__(
        self,
        folder: Path,
        services: Services,
        command: Command,
        outlines: Outlines,
        *,
        platform: str = "cpu",
        keep_backbone: KeepBackbone | None = None,
    ) -> None:
        self.folders = JobFolders(folder)
        self.runner = JobRunner(
            self.folders,
            command,
            self._publish,
            self._check_outline,
            platform=self._platform_of,
            runnable=self._is_runnable,
        )
        self._services, self._platform = services, platform
        self._outlines = outlines
        self._keep_backbone = keep_backbone
        self._committing = threading.Lock()
        self._coming = Counter[str]()
        """Jobs by tenant whose data are on their way."""

    def accept(self, request: Asked, tenant: str = DEFAULT_TENANT) -> Asked:
        """A tenant's request with its backbone named, if all but the data is right: errors are reported before the data
        are sent, and before hours of training.

        Raises ``InvalidInput``, ``UnknownClass``, ``OutOfSpace``, ``Conflict``, ``Saturated``.
        """
        self._services.first.check_open()
        request = request.model_copy(update={"backbone": request.backbone or self._services.first.backbone.name})
        own, *others = self._loaded(request)
        if isinstance(request, FurtherPretrain | Extract) and own.backbone.tables is not None:
            raise InvalidInput(
                f"backbone: expected one that computes all layers, found {own.backbone.name!r}, whose lower layers are "
                "tables; give it a domain (POST /v1/domains), or a task that is trained over its tables"
            )
        if isinstance(request, FurtherPretrain):
            self._check_name(request.name)
            self._check_layers(request.layers, own.backbone.config.layers)
        elif isinstance(request, MakeDomain):
            self._check_domain(request, own.backbone)
            if request.whole is not None and not self._is_backbone(request.whole):
                raise InvalidInput(f"whole: expected a backbone that GET /v1/backbones lists, found {request.whole!r}")
            assert own.backbone.tables is not None
            own.backbone.tables.check_writable()
            if request.epochs:
                self._check_domain_unused(own.backbone.name, request.domain, FineTune)
        else:
            self._check_task(TaskName(tenant, request.task), [own, *others])
        if isinstance(request, FineTune):
            start = self._start(request, own, tenant)
            methods = [delta["method"] for delta in start.get("deltas", ())]
            named = {
                "method": request.method or next(iter(methods), DEFAULT_METHOD),
                "domain": request.domain or start.get("preprocessing", {}).get("domain"),
                "pooling": None if start else request.pooling,
            }
            request = request.model_copy(update=named)
            _check_known(request.domain, own.backbone)
            self._check_domain_stays(request)
            self._check_shapes(request, [own], methods)
        if isinstance(request, MakeStudents):
            teacher = _teacher_service(self._services, self._services.resolve(TaskName(tenant, request.teacher)))
            request = request.model_copy(update={"teacher_backbone": teacher.backbone.name})
            self._check_shapes(request, [own, *others], ())
        return request

    def _loaded(self, request: JobRequest) -> Sequence[Service]:
        """The services of the backbones that what it makes may be for. Raises ``InvalidInput``."""
        known = by_name(self._services)
        for name in (names := places_of(request)):
            if name not in known:
                field = "backbone" if name == request.backbone else "other_backbones"
                raise InvalidInput(f"{field}: expected one of {[*known]}, found {name!r}; load it first")
        return [known[name] for name in names if name is not None]

    def _check_shapes(
        self, request: FineTune | MakeStudents, services: Sequence[Service], methods: Sequence[str]
    ) -> None:
        """Raises what ``Outlines`` and ``Changes.check_shape`` do."""
        outlines = self._outlines(request, [own.backbone for own in services], methods)
        for own, outline in zip(services, outlines, strict=True):
            own.changes.check_shape(outline)

    @contextlib.contextmanager
    def draft(self, request: Asked, tenant: str = DEFAULT_TENANT) -> Iterator[JobFolder]:
        """``JobFolders.draft``. Raises ``Saturated`` where too many jobs wait or are on their way: each of these may
        have written as much as a job's data may have."""
        with self._committing:
            _check_waiting(self.folders, tenant, self._coming)
            self._coming[tenant] += 1
        try:
            with self.folders.draft(request, tenant) as draft:
                yield draft
        finally:
            with self._committing:
                self._coming[tenant] -= 1

    def commit(self, draft: JobFolder) -> JobFolder:
        """Queues the draft, with all that it needs, as a job. Raises ``NotFound``; ``InvalidInput`` where its domain is
        gone by now; ``Saturated`` where too many wait by now: another server may have taken some in."""
        request = draft.request
        needed = request.start if isinstance(request, FineTune) else None
        needed = request.teacher if isinstance(request, MakeStudents) else needed
        if needed is not None:
            repository, name = self._services.repository, self._services.resolve(draft.task_name(needed))
            draft.start_file.write_bytes(repository.read(repository.get(name.id, name.tenant)))
        sync_tree(draft.path)  # it takes long, and others do not wait for it
        with self._committing:
            if isinstance(request, FineTune) and (own := self._service(request.backbone)) is not None:
                _check_known(request.domain, own.backbone)  # it may have been deleted while the data came
                self._check_domain_stays(request)
            if isinstance(request, MakeDomain) and request.epochs and request.backbone is not None:
                self._check_domain_unused(request.backbone, request.domain, FineTune)
            tenant = draft.state.tenant
            _check_waiting(self.folders, tenant, self._coming - Counter({tenant: 1}))
            job = self.folders.commit(draft)
        self.runner.wake()
        return job

    def delete(self, job: JobFolder) -> bool:
        """Cancels a job, or removes one that has finished (True). Raises ``NotFound``."""
        if job.state.is_finished:
            self.folders.remove(job)
            return True
        self.runner.cancel(job)
        return False

    def check_unused(self, backbone: str) -> None:
        """Raises ``Conflict`` where a job that has not finished needs the backbone."""
        for job in self.folders.all():
            with contextlib.suppress(NotFound):  # removed meanwhile
                if backbone in (*still_read(job), *published_on(job)) and not job.state.is_finished:
                    raise Conflict(f"job {job.id} needs backbone {backbone!r}; cancel it or wait until it has finished")

    @contextlib.contextmanager
    def without_domain(self, backbone: str, domain: str) -> Iterator[None]:
        """No job of the domain is queued meanwhile. Raises ``Conflict`` where one that has not finished trains a task
        of it, or makes it anew."""
        with self._committing:
            self._check_domain_unused(backbone, domain, FineTune, MakeDomain)
            yield

    def _check_domain_unused(self, backbone: str, domain: str, *kinds: type[FineTune] | type[MakeDomain]) -> None:
        """Raises ``Conflict`` where a job of one of the ``kinds`` that has not finished needs the domain."""
        for job, request in self._of_domain(backbone, domain):
            if isinstance(request, kinds):
                does = "makes" if isinstance(request, MakeDomain) else "trains a task of"
                name = domain.partition("@")[0]
                raise Conflict(f"job {job.id} {does} domain {name!r}; cancel it or wait until it has finished")

    def _check_domain_stays(self, request: FineTune) -> None:
        """Raises ``Conflict`` where a job is to train the layers of the domain anew that a task is to learn from."""
        if request.domain is None:
            return
        for job, other in self._of_domain(request.backbone, request.domain):
            if isinstance(other, MakeDomain) and other.epochs:
                raise Conflict(f"job {job.id} makes domain {other.domain!r} anew; wait until it has finished")

    def _of_domain(self, backbone: str | None, domain: str) -> Iterator[tuple[JobFolder, FineTune | MakeDomain]]:
        """The jobs of a domain that have not finished, by any of its names."""
        for job in self.folders.all():
            with contextlib.suppress(NotFound):  # removed meanwhile
                request = job.request
                if not isinstance(request, FineTune | MakeDomain) or request.domain is None or job.state.is_finished:
                    continue
                if (request.backbone, request.domain.partition("@")[0]) == (backbone, domain.partition("@")[0]):
                    yield job, request

    def counts(self) -> Mapping[str, int]:
        """How many jobs there are in each state."""
        return Counter(state.state for state in self.folders.states())

    def _start(self, request: FineTune, own: Service, tenant: str) -> Mapping[str, Any]:
        """The document of the task that training is to continue; empty without one. Raises ``InvalidInput``."""
        if (start := request.start) is None:
            return {}
        name = self._services.resolve(TaskName(tenant, start))
        if not own.tasks.knows(name):
            raise InvalidInput(f"start: expected a task of backbone {own.backbone.name!r}, found {start!r}")
        known = self._services.repository.get(name.id, name.tenant).metadata
        if known.get("students"):
            raise InvalidInput(f"start: {start!r} is a group of students, which training cannot go on from")
        if request.pooling not in (None, pooling := known["head"]["pooling"]):
            found = f"found {request.pooling!r}; leave it out"
            raise InvalidInput(f"pooling: task {start!r} has {pooling!r}, which training keeps, {found}")
        return known

    def _check_task(self, name: TaskName, places: Sequence[Service]) -> None:
        """A task that is there already stays on its backbone; of several ``places`` another one may be chosen."""
        if self._is_backbone(name.id):
            raise InvalidInput(f"task: {name.id!r} is the name of a backbone; choose another id")
        for service in self._services.all:
            if service.tasks.knows(name) and [service] != [*places]:
                own = service.backbone.name
                raise Conflict(f"task {name.id!r} is one of backbone {own!r}; delete it first, or name only that one")

    def _check_name(self, name: str) -> None:
        if self._keep_backbone is None:
            raise InvalidInput("this server has no folder for new backbones; start it with --backbones DIR")
        if self._is_backbone(name) or self._services.knows(TaskName.of(name)):
            raise Conflict(f"there is a backbone or a task {name!r} already; choose another name")

    def _check_layers(self, given: str | None, count: int) -> None:
        if given is not None and max(map(int, given.split(","))) >= count:
            raise InvalidInput(f"layers: expected numbers from 0 to {count - 1}, found {given}")

    def _check_domain(self, request: MakeDomain, backbone: LoadedBackbone) -> None:
        if backbone.tables is None:
            raise InvalidInput(
                f"backbone: expected one with tables, found {backbone.name!r}, which computes all layers"
            )
        users = tasks_of_domains(self._services)[backbone.fingerprint, request.domain]
        if users and request.epochs:
            raise Conflict(
                f"{users} tasks use domain {request.domain!r}, and learnt from its n-gram layers: ask for epochs=0, "
                "which keeps them, choose another name, or delete the tasks first"
            )

    def _is_backbone(self, name: str) -> bool:
        return name in [hosted.name for hosted in self._services.backbones.list()]

    def _check_outline(self, job: JobFolder) -> None:
        """Raises what ``Changes.check`` does where the head that a job's data ask for cannot be served; ``Saturated``
        while its backbone is starting."""
        request = job.request
        if isinstance(request, FineTune):
            try:
                own = self._serving(request.backbone)
            except NotFound as error:  # it may be loaded again until there is something to publish
                raise Saturated(error.message) from error
            own.changes.check(job.outline_file.read_bytes(), job.task_name(request.task))

    def _serving(self, name: str | None) -> Service:
        """The service of a backbone. Raises ``Saturated`` while it is starting, ``NotFound`` where it is not loaded."""
        states = {hosted.name: hosted.state for hosted in self._services.backbones.list()}
        if (own := self._service(name)) is not None:
            return own
        if states.get(name or "") == "starting":
            raise Saturated(f"backbone {name!r} is starting")
        raise NotFound(f"backbone {name!r} is not loaded any more; load it, then start a new job")

    def _publish(self, job: JobFolder) -> int | None:
        """The version as which the task of ``job`` is served, if it made one; an earlier attempt may have stored it.

        Raises what ``Services.put_task`` and ``KeepBackbone`` do.
        """
        request, services = job.request, self._services
        if isinstance(request, FurtherPretrain):
            if self._keep_backbone is None:
                raise NotFound("this server has no folder for new backbones any more; start it with --backbones DIR")
            self._keep_backbone(request.name, job.backbone)
            return None
        own, *_ = [self._serving(name) for name in published_on(job)]
        if isinstance(request, MakeDomain):
            self._publish_domain(job, request, own)
            return None
        name = job.task_name(request.task)
        kept = self._versions(name)
        if (above := job.state.above) is not None:
            digest = hashlib.sha256(job.task_file.read_bytes()).hexdigest()
            mine = [stored.version for stored in kept if stored.version > above and stored.digest == digest]
            if mine:  # versions that were uploaded or chosen since stay
                return mine[0]
        job.change(above=max((stored.version for stored in kept), default=0))
        return services.put_task(name, job.task_file).version

    def _publish_domain(self, job: JobFolder, request: MakeDomain, own: Service) -> None:
        """Raises ``Conflict`` where tasks have come meanwhile that learnt from other n-gram layers; and where other
        layers have, and the job was to keep those that were there."""
        assert own.backbone.tables is not None and job.result is not None and job.result.branch is not None
        with own.tasks.domains:
            used = tasks_of_domains(self._services)[own.backbone.fingerprint, request.domain] > 0
            try:
                kept = used or not request.epochs
                own.backbone.tables.add(request.domain, job.result.branch, same_layers=kept)
            except OutOfSpace as error:
                if error.message == DISK_FULL:
                    raise
                raise Conflict(error.message) from error  # no waiting makes room among open tables

    def _versions(self, name: TaskName) -> Sequence[StoredTask]:
        try:
            return self._services.repository.versions(name.id, name.tenant)
        except NotFound:
            return []

    def _platform_of(self, job: JobFolder) -> str:
        """The platform that a job computes on: tables are in host memory, and far larger than a device's. Those of a
        teacher's backbone too; and one that is not loaded may have some."""
        read = [self._service(name) for name in still_read(job)]
        return "cpu" if any(own is None or own.backbone.tables is not None for own in read) else self._platform

    def _is_runnable(self, job: JobFolder) -> bool:
        """Whether the backbones that a job reads are here, and none of them starting: then nothing says yet whether it
        has tables. Those that it makes something for are loaded or, once it is made, starting. And whether this server
        keeps the backbone that it makes, if it does."""
        if isinstance(job.request, FurtherPretrain) and self._keep_backbone is None and not has_failed(job):
            return False
        states = {hosted.name: hosted.state for hosted in self._services.backbones.list()}
        served = all(states.get(name or "") in SERVING for name in published_on(job))
        read = [states.get(name) for name in still_read(job)]
        return served and None not in read and "starting" not in read

    def _service(self, name: str | None) -> Service | None:
        return by_name(self._services).get(name or "")


def _teacher_service(services: Services, name: TaskName) -> Service:
    """The service of the task that a group is to learn from. Raises ``InvalidInput``."""
    own = next((service for service in services.all if service.tasks.knows(name)), None)
    outline = own.outlines.find(name) if own is not None else None
    if own is None or outline is None or name.id == own.backbone.name:
        raise InvalidInput(f"teacher: expected a task of this server, found {name.id!r}")
    if outline.students is not None or outline.head.type != "sequence-classification":
        kind = "a group of students" if outline.students is not None else outline.head.type
        raise InvalidInput(f"teacher: expected a task of classes, label sets or values of a text, found {kind}")
    return own


def _check_known(domain: str | None, backbone: LoadedBackbone) -> None:
    """Raises ``InvalidInput`` for a domain that the backbone does not have."""
    if domain is None:
        return
    if backbone.tables is None:
        raise InvalidInput(f"domain: expected none, as backbone {backbone.name!r} has no tables, found {domain!r}")
    try:
        backbone.tables.full_name(domain)
    except NotFound as error:
        raise InvalidInput(f"domain: {error.message}") from error
