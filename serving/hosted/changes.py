"""Changes of tasks through this server: a version is checked, stored and served, or nothing has changed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from jpets.engine.interface import Serves
from jpets.engine.tasks.lowered import LoweredTask
from jpets.errors import InvalidTask, NotFound, Preparing, UnknownClass
from jpets.text_bounds import with_short_texts
from jpets.types import Task, TaskName
from serving.hosted.layout import layout_of
from serving.hosted.preparations import Preparations, told
from serving.hosted.repository import StoredTask
from serving.hosted.served import ServedTasks
from serving.http.uploads import map_file


class Changes:
    """Methods block; thread-safe. All raise ``Saturated`` before the engine has started, and once it drains."""

    def __init__(self, tasks: ServedTasks, preparations: Preparations) -> None:
        self._tasks = tasks
        self._preparations = preparations

    def check(self, content: bytes | memoryview, name: TaskName) -> Task:
        """The task in a file, if it can be served as ``name``. Raises ``InvalidTask``, ``UnknownClass``,
        ``OutOfSpace`` where it cannot."""
        return self._checked(self._tasks.engine, content, name).task

    def check_shape(self, task: Task) -> None:
        """Raises ``UnknownClass``, ``OutOfSpace`` where a task of its shape cannot be served, now or, by an engine that
        grows, soon."""
        self._check_shape(self._tasks.engine, task)

    def put(self, name: TaskName, file: Path, if_match: int | None = None) -> StoredTask:
        """Checks, stores and loads a task file; when it returns, the next query gets it. Except where its classes are
        not there yet (``Preparations``): then an older version is served until they are. On any error nothing changed.

        Raises ``InvalidTask``, ``UnknownClass``, ``Conflict``, ``OutOfSpace``, ``Saturated``.
        """
        tasks, engine = self._tasks, self._tasks.engine
        with tasks.locks.hold(name):
            content = map_file(file)
            lowered = self._checked(engine, content, name)
            with self._domain_stays(lowered.task):
                stored = tasks.repository.put(
                    name.id,
                    content,
                    tenant=name.tenant,
                    if_match=if_match,
                    validator=lambda content, id: lowered.task,  # it was checked by now
                    retain=False,
                    layout=tasks.layouts.kept(layout_of(lowered)),
                )
            try:
                self._preparations.serve(engine, name, lowered, stored)
            except BaseException:
                with told(name, "a version that is not served stays"):  # versions that others added meanwhile do too
                    tasks.repository.discard(name.id, stored.version, name.tenant)
                raise
            self._preparations.retain(name, stored.version)
            return stored

    def rollback(self, name: TaskName, to: int | str | None = None, if_match: int | None = None) -> StoredTask:
        """Serves an earlier version; when it returns, the next query gets it. On any error nothing changed. Raises
        ``NotFound``, ``Conflict``, ``OutOfSpace``, ``InvalidTask``, ``Saturated``."""
        tasks, engine, repository = self._tasks, self._tasks.engine, self._tasks.repository
        with tasks.locks.hold(name):
            target = repository.before_served(name.id, name.tenant) if to is None else to
            found = repository.get(name.id, name.tenant, target)
            lowered = engine.lower_task(tasks.read(found, name))
            with self._domain_stays(lowered.task):
                stored, changed = repository.rolled_back(name.id, found.version, name.tenant, if_match)
            try:
                self._preparations.serve(engine, name, lowered, stored)
            except BaseException:
                with told(name, "a version that is not served stays"):
                    repository.undo(name.id, stored.version, changed, name.tenant)
                raise
            return stored

    def delete(self, name: TaskName, if_match: int | None = None) -> None:
        """Queries on their way still get their answer. Raises ``NotFound``, ``Conflict``."""
        tasks, engine = self._tasks, self._tasks.engine
        with tasks.locks.hold(name):
            try:
                tasks.repository.delete(name.id, name.tenant, if_match)
            except NotFound:
                self._preparations.forget(engine, name)  # it was deleted behind the server's back
                raise
            self._preparations.forget(engine, name)
            self._preparations.drop(name)

    @contextlib.contextmanager
    def _domain_stays(self, task: Task) -> Iterator[None]:
        """The domain that a task learnt in neither leaves nor changes now. Raises ``InvalidTask`` where it did."""
        domain, tables = task.preprocessing.domain, self._tasks.backbone.tables
        if domain is None or tables is None:
            yield
            return
        with self._tasks.domains:
            try:
                tables.full_name(domain)
            except NotFound as error:
                raise InvalidTask(f"task {task.id!r}: {error.message}") from error
            yield

    def _checked(self, engine: Serves, content: bytes | memoryview, name: TaskName) -> LoweredTask:
        if name.id == self._tasks.backbone.name:
            raise InvalidTask(f"{name.id!r} is the name of the backbone; choose another id")
        task = engine.lower_task(with_short_texts(self._tasks.check(content, name)))
        self._check_shape(engine, task)
        return task

    def _check_shape(self, engine: Serves, task: Task | LoweredTask) -> None:
        try:
            engine.check_task(task, stays=False)
        except (UnknownClass, Preparing):
            if not self._preparations.growing:
                raise
