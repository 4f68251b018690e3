"""Versions of tasks that wait for their classes: until the engine has them, an older version is served."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

from jpets.engine.interface import Serves
from jpets.engine.tasks.lowered import LoweredTask
from jpets.errors import (
    EngineFailure,
    InvalidTask,
    JpetsError,
    NotFound,
    OutOfSpace,
    Preparing,
    Saturated,
    UnknownClass,
    one_line,
)
from jpets.types import Task, TaskName
from serving.hosted.layout import Known, layout_of
from serving.hosted.read_ahead import ReadAhead
from serving.hosted.repository import StoredTask
from serving.hosted.served import ServedTasks

log = logging.getLogger(__name__)

RETRY_SECONDS, MOST_RETRY_SECONDS = 60.0, 3600.0
"""Seconds after which classes are asked for again that could not be had; each further time twice as long."""
SOON = 0.2
"""Seconds that a look for changes waits for versions to be read, all of them together."""


class Preparation(NamedTuple):
    """A version of a task that waits for its classes. ``problem`` says why they could not be had so far; they are not
    asked for again unless it is still ``coming``."""

    version: int
    problem: str | None = None
    coming: bool = True

    def is_coming(self, version: int) -> bool:
        return self.coming and self.version == version


@contextlib.contextmanager
def told(name: TaskName, otherwise: str) -> Iterator[None]:
    """A problem of the catalogue, of any kind, is no answer to a request whose own outcome is known; the log has it."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 (another upload of the same commit may have met it)
        log.warning("%s: %s", otherwise, one_line(error), extra={"task": name.id})


class Preparations:
    """Makes an engine serve versions, now or once it has their classes.

    It gets no more classes than it was started with unless it is ``growing``.
    """

    def __init__(self, tasks: ServedTasks, *, growing: bool) -> None:
        self.growing = growing
        self._tasks = tasks
        self._ahead = ReadAhead(tasks)
        self.again: Callable[[TaskName], None] = lambda name: None
        """Is told of a version of others that has to be looked at again."""
        self._waiting: dict[TaskName, Preparation] = {}
        """Tasks that were taken in and wait for their classes, or that failed to get them."""
        self._finishing = ThreadPoolExecutor(1, "jpets-prepare")
        """One at a time: thousands may wait for one class, and each is read whole."""
        self._failed: list[tuple[Serves, Known, bool]] = []
        """What gets another try by the timer, and whether it came by this service."""
        self._timer: threading.Timer | None = None
        self._retry_seconds = RETRY_SECONDS
        self._retrying = threading.Lock()

    def get(self, name: TaskName) -> Preparation | None:
        """The state of a version that waits for classes which the engine does not have yet."""
        return self._waiting.get(name)

    def drop(self, name: TaskName) -> None:
        """The version that waits under this name is not wanted any more."""
        self._waiting.pop(name, None)

    def forget(self, engine: Serves, name: TaskName) -> None:
        """The task is gone. The reason why its classes could not be had is kept."""
        if (waits := self._waiting.get(name)) is not None and waits.coming:
            del self._waiting[name]
        self._ahead.forget(name)
        self._tasks.forget(engine, name)

    def serve(self, engine: Serves, name: TaskName, task: LoweredTask, stored: StoredTask) -> None:
        """Serves a version that came by this service; its caller holds the task's lock. When this returns, the next
        query gets the version, unless it waits for its classes.

        Raises ``UnknownClass`` where the engine takes no more classes, ``OutOfSpace``, ``Saturated``.
        """
        try:
            self._tasks.add(engine, name, stored.version, task)
        except (UnknownClass, Preparing):
            if not self.growing:
                raise
            known = Known(name, stored.version, layout_of(task))
            self._wait_for(engine, known, engine.prepare(task.classes), own=True)
        else:
            self.drop(name)  # only now: until then an older version is served
            self._ahead.forget(name)
        self._tasks.registered.add(name)

    def retain(self, name: TaskName, newest: int) -> None:
        """Forgets the versions of a task that are too old, unless its newest one waits: an older one is served then."""
        if self.get(name) is None:
            with told(name, "old versions stay until the next upload"):
                self._tasks.repository.retain(name.id, name.tenant, newest)

    def take(self, engine: Serves, known: Known, until: float) -> bool:
        """A version that others stored: an older version is served until the engine has its classes, and, if it is on
        the device, until the new one is read, which is waited for until then (``time.monotonic``). False where it has
        to be taken later."""
        done = engine.prepare(known.classes or ()) if self.growing else None
        if done is None or (done.done() and done.exception() is None):
            return self._replace(engine, known, until)
        self.not_read(known.name)
        self._wait_for(engine, known, done, own=False)
        return True

    def not_read(self, name: TaskName) -> None:
        """No version of others is to be read for the task."""
        self._ahead.forget(name)

    def _replace(self, engine: Serves, known: Known, until: float) -> bool:
        """``take`` of a version whose classes are there."""
        name = known.name
        if self._tasks.tier(name) == "device":
            with contextlib.suppress(NotFound, InvalidTask, UnknownClass, OutOfSpace, Preparing):  # queries are told
                lowered = self._read(engine, known, until)
                if lowered is None:
                    return False
                self._tasks.add(engine, name, known.version, lowered)
                self._tasks.registered.add(name)
                return True
        self.not_read(name)
        self._tasks.register(engine, known)
        engine.warm([name.id], tenant=name.tenant)
        return True

    def _read(self, engine: Serves, known: Known, until: float) -> LoweredTask | None:
        """None where it is not read yet, and where the storage does not give it now: then it is read again."""
        try:
            return self._ahead.read(engine, known, until)
        except (InvalidTask, NotFound, UnknownClass):
            raise
        except Exception as error:  # noqa: BLE001 (a storage that is away comes back)
            why = error.message if isinstance(error, JpetsError) else type(error).__name__
            log.warning("a new version cannot be read yet", extra={"task": known.name.id, "why": why})
            return None

    def add_standard(self, engine: Serves, standard: Callable[[], Sequence[Task]]) -> None:
        """Gives the engine the classes of the usual task shapes, if it is ``growing``; in a thread of its own."""
        if self.growing:
            threading.Thread(
                target=self._add_standard, args=(engine, standard), name="jpets-standard", daemon=True
            ).start()

    def _add_standard(self, engine: Serves, standard: Callable[[], Sequence[Task]]) -> None:
        classes = {key for task in standard() for key in self._tasks.layouts.classes(task)}
        try:
            engine.prepare(sorted(classes)).result()
        except JpetsError as error:
            if not self._tasks.closing:
                log.warning("tasks of other shapes than those of the start are not taken: %s", error.message)

    def _wait_for(
        self, engine: Serves, known: Known, done: Future[None], *, own: bool, problem: str | None = None
    ) -> None:
        """Serves a version once its classes are there (``done``). Queries for a task without an older version are told
        that it is being prepared. ``own``: it came by this service. ``problem`` is that of an earlier try."""
        self._waiting[known.name] = Preparation(known.version, problem)
        if not self._tasks.knows(known.name):
            self._tasks.register(engine, known)

        def finish(done: Future[None]) -> None:
            with contextlib.suppress(RuntimeError):  # it was closed
                self._finishing.submit(self._finish, engine, known, done.exception(), own)

        done.add_done_callback(finish)

    def close(self) -> None:
        """What waits is not looked at any more."""
        with self._retrying:
            if self._timer is not None:
                self._timer.cancel()
        self._finishing.shutdown(wait=False, cancel_futures=True)
        self._ahead.close()

    def _finish(self, engine: Serves, known: Known, problem: BaseException | None, own: bool) -> None:
        name, version = known.name, known.version
        if self._tasks.closing:
            return
        with self._tasks.locks.hold(name):
            if (waits := self._waiting.get(name)) is None or not waits.is_coming(version):
                return  # another version came, or it was deleted
            try:
                if problem is None and not own:
                    taken = self._replace(engine, known, time.monotonic() + SOON)
                    self.drop(name)
                    if not taken:
                        self.again(name)
                elif problem is None:
                    stored = self._tasks.repository.get(name.id, name.tenant, version)
                    self.serve(engine, name, engine.lower_task(self._tasks.read(stored, name)), stored)
                    self.retain(name, version)
            except (Saturated, OSError) as error:  # a storage that is away comes back
                log.warning("a version cannot be served yet", extra={"task": name.id, "why": type(error).__name__})
                self.drop(name)
                self.again(name)
            except Exception as error:  # noqa: BLE001 (any other error is the answer to the task's queries)
                problem = error
            if problem is None:
                self._retry_seconds = RETRY_SECONDS
            elif isinstance(problem, (Saturated, EngineFailure)) and not self._tasks.closing:
                self._try_again(engine, known, problem, own)
            elif not self._tasks.closing:
                self._give_up(engine, known, problem, own)

    def _try_again(self, engine: Serves, known: Known, problem: JpetsError, own: bool) -> None:
        """Asks for the classes of a task again later: they could not be had now, such as for a process that was
        killed. The task is still being prepared until then."""
        log.warning("the classes of a task cannot be had now", extra={"task": known.name.id, "why": problem.message})
        self._waiting[known.name] = Preparation(known.version, problem.message)
        with self._retrying:
            self._failed.append((engine, known, own))
            if self._timer is None:
                self._timer = threading.Timer(self._retry_seconds, self._retry)
                self._timer.daemon = True
                self._timer.start()

    def _retry(self) -> None:
        with self._retrying:
            failed, self._failed, self._timer = self._failed, [], None
            self._retry_seconds = min(2 * self._retry_seconds, MOST_RETRY_SECONDS)
        for engine, known, own in failed:
            with self._tasks.locks.hold(known.name), contextlib.suppress(Saturated):  # it is closing
                waits = self._waiting.get(known.name)
                if not self._tasks.closing and waits is not None and waits.is_coming(known.version):
                    self._wait_for(engine, known, engine.prepare(known.classes or ()), own=own, problem=waits.problem)

    def _give_up(self, engine: Serves, known: Known, problem: BaseException, own: bool) -> None:
        """A service does not keep a task of its own that has no room: the next start would have one task too many for
        the device. A task of others stays; its queries are answered here with what is wrong."""
        name, version, tasks = known.name, known.version, self._tasks
        why = problem.message if isinstance(problem, JpetsError) else type(problem).__name__
        log.error("a task cannot be served", extra={"task": name.id, "version": version, "why": why})
        self._waiting[name] = Preparation(version, why, coming=False)
        if not own:
            if tasks.version(name) != version:
                tasks.register(engine, known)
            return
        if isinstance(problem, OutOfSpace):
            tasks.repository.discard(name.id, version, name.tenant)
        if tasks.version(name) == version:
            self.forget(engine, name)
