"""What an engine knows of a repository's tasks, and where each of them is."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from functools import partial

from jpets.engine.interface import Serves
from jpets.engine.tasks.entries import Entry, Tier
from jpets.engine.tasks.lowered import LoweredTask
from jpets.errors import SHUTTING_DOWN, NotFound, Saturated
from jpets.types import LoadedBackbone, Task, TaskName
from serving.hosted.layout import Known, Layout, Layouts
from serving.hosted.locks import NamedLocks
from serving.hosted.repository import StoredTask, TaskRepository, Validator


class ServedTasks:
    """The tasks of one backbone: those of ``repository`` that its engine knows. Methods block; thread-safe."""

    def __init__(self, repository: TaskRepository, backbone: LoadedBackbone, validator: Validator) -> None:
        self.repository = repository
        self.backbone = backbone
        self.layouts = Layouts(repository, backbone, validator)
        self.locks = NamedLocks[TaskName]()
        """Held by what changes a task."""
        self.domains = threading.Lock()
        """Held while a task of a domain is stored, and while a domain gets other layers or leaves."""
        self.registered: set[TaskName] = set()
        """Tasks of the repository that the engine knows."""
        self.started: Serves | None = None
        """The engine, also while it drains; None until it is ready for the first time."""
        self.closing = False
        self.follow: Callable[[TaskName], bool] = lambda name: True
        """Tells the engine what the repository holds now; False while this service is changing it."""
        self._validator = validator

    @property
    def engine(self) -> Serves:
        """The engine for a new request. Raises ``Saturated`` before its start is done and once it drains."""
        if self.closing:
            raise Saturated(SHUTTING_DOWN)
        if self.started is None:
            raise Saturated("the server is starting; try again when /v2/health/ready says so")
        return self.started

    def entry(self, name: TaskName) -> Entry | None:
        """What the engine knows of a task."""
        return self.started.entry(name.id, tenant=name.tenant) if self.started is not None else None

    def knows(self, name: TaskName) -> bool:
        """Whether it can be queried."""
        return self.entry(name) is not None

    def version(self, name: TaskName) -> int | None:
        """The version that queries get; None for a task that is not known."""
        entry = self.entry(name)
        return entry.version if entry is not None else None

    def tier(self, name: TaskName) -> Tier | None:
        """Where a task is now; None for a task that is not known."""
        return self.started.tier(name.id, tenant=name.tenant) if self.started is not None else None

    def devices(self, name: TaskName) -> Sequence[int]:
        """The numbers of the devices that serve a task."""
        return self.started.devices_of(name.id, tenant=name.tenant) if self.started is not None else ()

    def served_instead(self, stored: StoredTask) -> StoredTask | None:
        """The version that queries get while the newest one waits for its classes; None where they get the newest."""
        name = TaskName(stored.tenant, stored.id)
        version = self.version(name)
        if version is None or version == stored.version or name not in self.registered:
            return None
        with contextlib.suppress(NotFound):
            return self.repository.get(name.id, name.tenant, version)
        return None

    def register(self, engine: Serves, task: Known) -> None:
        """From now on this version can be queried: the first query has it read."""
        name, version = task.name, task.version
        layout = task.layout or self._unread(name, version)
        engine.register_task(
            name.id,
            self.loader(name, version),
            tenant=name.tenant,
            version=version,
            classes=layout.classes,
            students=layout.students,
            least=layout.least,
        )
        self.registered.add(name)

    def _unread(self, name: TaskName, version: int) -> Layout:
        """Of a task that was not read for its layout yet: its document says how many students it has."""
        with contextlib.suppress(NotFound):
            group = self.repository.get(name.id, name.tenant, version).metadata.get("students")
            return Layout((), len(group["multipliers"]), group.get("least", 1)) if group else Layout(())
        return Layout(())

    def add(self, engine: Serves, name: TaskName, version: int, task: LoweredTask) -> None:
        """``Serves.add_task`` of a version that was read and lowered."""
        engine.add_task(task, tenant=name.tenant, version=version, load=self.loader(name, version))

    def forget(self, engine: Serves, name: TaskName) -> None:
        """The plain form of a backbone stays: it is not a task of the repository."""
        if name in self.registered:
            self.registered.discard(name)
            with contextlib.suppress(NotFound):
                engine.remove_task(name.id, tenant=name.tenant)

    def loader(self, name: TaskName, version: int) -> Callable[[], Task]:
        """What reads a version when the engine asks for it."""
        return partial(self._load, name, version)

    def check(self, content: bytes | memoryview, name: TaskName) -> Task:
        """The task in a file. Raises ``InvalidTask``."""
        return self._validator(content, name.id)

    def read(self, stored: StoredTask, name: TaskName) -> Task:
        """Raises ``NotFound``, ``InvalidTask``."""
        return self.check(self.repository.read(stored), name)

    def _load(self, name: TaskName, version: int) -> Task:
        """Where the task was deleted or replaced elsewhere meanwhile, the engine is first told of that: it will ask for
        the new version. Raises ``NotFound``, ``InvalidTask``, ``Saturated``."""
        try:
            return self.read(self.repository.get(name.id, name.tenant, version), name)
        except NotFound as error:
            if self.started is None or (self.follow(name) and self.version(name) in (None, version)):
                raise
            raise Saturated(f"task {name.id!r} has just been replaced; send the request again") from error
