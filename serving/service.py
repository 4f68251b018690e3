"""The service: an engine and a repository kept in step. Every change of a task goes through it."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from jpets.engine.engine import Engine, Progress
from jpets.engine.stats import BatchRecord
from jpets.engine.tasks import DEFAULT_TENANT
from jpets.errors import SHUTTING_DOWN, InvalidTask, JpetsError, NotFound, Saturated
from jpets.types import BackboneRef, Task
from serving.locks import NamedLocks
from serving.repository import StoredTask, TaskRepository, Validator

log = logging.getLogger(__name__)

PAGE = 200
MakeEngine = Callable[[Sequence[Task]], Engine]
BatchObserver = Callable[[BatchRecord], None]


class Service:
    """Serves what ``repository`` holds. The plain backbone is asked by ``backbone``'s name.

    It can answer health and metrics at once, queries and changes only after ``start``. Methods block; thread-safe.
    """

    def __init__(self, repository: TaskRepository, backbone: BackboneRef, validator: Validator) -> None:
        self.repository = repository
        self.backbone = backbone
        self.phase = ("starting", 0, 0)
        """What a start is doing: (what, done, of how many)."""
        self.skipped = 0
        """Stored tasks that could not be loaded at start."""
        self._validator = validator
        self._engine: Engine | None = None
        self._versions: dict[str, int] = {}
        self._locks = NamedLocks()
        self._observers: list[BatchObserver] = []
        self._failed = False
        self._closing = False

    @property
    def ready(self) -> bool:
        """Every query would be answered without waiting for a compilation or for a task to load."""
        return self._engine is not None and not self._closing and self._engine.ready

    @property
    def live(self) -> bool:
        """False when only a new process can help."""
        return not self._failed and (self._engine is None or self._engine.live)

    @property
    def started(self) -> Engine | None:
        """The engine, also while it drains; None until it is ready for the first time."""
        return self._engine

    @property
    def engine(self) -> Engine:
        """The engine for a new request. Raises ``Saturated`` before ``start`` is done and after ``drain``."""
        if self._closing:
            raise Saturated(SHUTTING_DOWN)
        if self._engine is None:
            raise Saturated("the server is starting; try again when /v2/health/ready says so")
        return self._engine

    def check_open(self) -> None:
        """Raises ``Saturated`` where ``engine`` would."""
        _ = self.engine

    def start(self, make_engine: MakeEngine, progress: Progress = lambda what, done, total: None) -> None:
        """Makes and starts the engine with every task of the repository. A task that cannot be read is skipped."""

        def report(what: str, done: int, total: int) -> None:
            self.phase = (what, done, total)
            progress(what, done, total)

        try:
            self.repository.collect()
            report("repository", 0, 1)
            stored = self._stored()
            report("repository", 1, 1)
            engine = make_engine([task for task, _ in stored])
            engine.stats.observers.extend(self._observers)
            engine.start(report)
        except BaseException:
            self._failed = True
            raise
        self._versions = {task.id: version for task, version in stored}
        self._engine = engine
        self.phase = ("ready", 0, 0)

    def drain(self) -> None:
        """Refuses new requests; those that run are answered."""
        self._closing = True
        self.phase = ("draining", 0, 0)

    def close(self) -> None:
        self.drain()
        if self._engine is not None:
            self._engine.close()

    def observe(self, observer: BatchObserver) -> None:
        """Calls ``observer`` with every batch, on the engine's completion thread."""
        self._observers.append(observer)
        if self._engine is not None:
            self._engine.stats.observers.append(observer)

    def find(self, model: str) -> Task | None:
        """The loaded task of that name, or None where ``model`` is the backbone's. Raises ``NotFound``."""
        task = self.loaded(model)
        if task is None and model != self.backbone.name:
            raise NotFound(f"unknown task {model[:128]!r}; GET /v1/tasks lists what there is")
        return task

    def loaded(self, id: str) -> Task | None:
        """The task that queries for ``id`` get now."""
        resident = self.engine.tasks.get(DEFAULT_TENANT, id)
        return resident.task if resident is not None else None

    def version(self, task: str) -> int | None:
        """The version that queries get; None for what is not loaded."""
        return self._versions.get(task)

    def put_task(self, id: str, file: Path, if_match: int | None = None) -> StoredTask:
        """Checks, stores and loads a task file; when it returns, the next query sees it. On any error nothing changed.

        Raises ``InvalidTask``, ``UnknownClass``, ``Conflict``, ``OutOfSpace``, ``Saturated``.
        """
        engine = self.engine
        checked: list[Task] = []

        def acceptable(content: bytes, name: str) -> Task:
            if name == self.backbone.name:
                raise InvalidTask(f"{name!r} is the name of the backbone; choose another id")
            task = self._validator(content, name)
            engine.check_task(task)
            checked.append(task)
            return task

        with self._locks.hold(id):
            before = self._served(id)
            stored = self.repository.put(id, file, if_match=if_match, validator=acceptable)
            try:
                engine.add_task(checked[0], version=stored.version)
            except BaseException:
                if before is None:
                    self.repository.delete(id)
                else:
                    self.repository.rollback(id, before.version)
                raise
            self._versions[id] = stored.version
            return stored

    def rollback(self, id: str, to: int | str | None = None) -> StoredTask:
        """Serves an earlier version; when it returns, the next query sees it. Raises ``NotFound``, ``OutOfSpace``."""
        engine = self.engine
        with self._locks.hold(id):
            before = self.repository.get(id)
            stored = self.repository.rollback(id, to)
            try:
                engine.add_task(self.repository.task(stored), version=stored.version)
            except BaseException:
                self.repository.activate(id, before.version)
                raise
            self._versions[id] = stored.version
            return stored

    def delete_task(self, id: str, if_match: int | None = None) -> None:
        """Queries on their way still get their answer. Raises ``NotFound``, ``Conflict``."""
        engine = self.engine
        with self._locks.hold(id):
            self.repository.delete(id, if_match=if_match)
            self._versions.pop(id, None)
            with contextlib.suppress(NotFound):  # stored, but never loaded
                engine.remove_task(id)
        self.repository.collect()

    def _served(self, id: str) -> StoredTask | None:
        try:
            return self.repository.get(id)
        except NotFound:
            return None

    def _stored(self) -> list[tuple[Task, int]]:
        """Every served task of the repository and its version."""
        found: list[tuple[Task, int]] = []
        after: str | None = None
        while True:
            page, after = self.repository.list(limit=PAGE, after=after)
            for stored in page:
                try:
                    found.append((self.repository.task(stored), stored.version))
                except JpetsError as error:
                    self.skipped += 1
                    log.error(
                        "task not loaded", extra={"task": stored.id, "version": stored.version, "why": error.code}
                    )
            if after is None:
                return found
