"""The service: an engine and a repository kept in step. Every change of a task goes through it."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import NamedTuple

from cachetools import LRUCache

from jpets.deltas.protocol import ClassKey
from jpets.engine.interface import Progress, Serves
from jpets.engine.results.stats import BatchObserver
from jpets.engine.tasks.entries import Entry, Tier
from jpets.engine.tasks.lowered import LoweredTask
from jpets.errors import (
    SHUTTING_DOWN,
    InvalidTask,
    JpetsError,
    NotFound,
    OutOfSpace,
    Preparing,
    Saturated,
    UnknownClass,
)
from jpets.types import LoadedBackbone, Task
from serving.hosted.layout import Known, Layouts
from serving.hosted.locks import NamedLocks
from serving.hosted.repository import StoredTask, TaskRepository, Validator
from serving.hosted.usage import UsageLog
from serving.http.uploads import map_file

log = logging.getLogger(__name__)

WARMING = 20.0
"""Seconds that a start waits at most for tasks to come to the device; the others come while it serves."""
OUTLINES = 8192
"""Tasks that are not on the device whose outlines are remembered."""
POLL = 0.02


class Preparation(NamedTuple):
    """A version of a task that waits for its classes; ``problem`` says why they could not be had."""

    version: int
    problem: str | None = None


MakeEngine = Callable[[Mapping[ClassKey, int]], Serves]
"""From how many tasks of which classes there are."""


class Service:
    """Serves what ``repository`` holds. The plain backbone is asked by ``backbone``'s name.

    It can answer health and metrics at once, queries and changes only after ``start``. Methods block; thread-safe.

    Tasks of classes that the engine does not have are taken in unless it is not ``growing``, and served once it has
    them; those of ``standard`` tasks it gets after its start.
    """

    def __init__(
        self,
        repository: TaskRepository,
        backbone: LoadedBackbone,
        validator: Validator,
        *,
        standard: Callable[[], Sequence[Task]] = tuple,
        growing: bool = True,
    ) -> None:
        self.repository = repository
        self.backbone = backbone
        self.phase = ("starting", 0, 0)
        """What a start is doing: (what, done, of how many)."""
        self.unreadable = 0
        """Stored tasks that could not be read at start."""
        self._validator = validator
        self._standard = standard
        self._growing = growing
        self._preparing: dict[str, Preparation] = {}
        """Tasks that were taken in and wait for their classes, or whose classes could not be had."""
        self._engine: Serves | None = None
        self._layouts = Layouts(repository, backbone, validator)
        self._usage: UsageLog | None = None
        self._registered: set[str] = set()
        """Tasks of the repository that the engine knows."""
        self._seen = 0
        """The number of the repository's last change that is in ``_changed``, or that the engine knows."""
        self._changed: dict[str, None] = {}
        """Tasks that have to be looked at."""
        self._refreshing = threading.Lock()
        self._outlines: LRUCache[object, Task] = LRUCache(OUTLINES)
        self._outlines_lock = threading.Lock()
        self._locks = NamedLocks()
        self._observers: list[BatchObserver] = []
        self._failed = False
        self._closing = False

    @property
    def ready(self) -> bool:
        """Every query would be answered without waiting for a compilation, or for one of the most used tasks."""
        return self._engine is not None and not self._closing and self._engine.ready

    @property
    def live(self) -> bool:
        """False when only a new process can help."""
        return not self._failed and (self._engine is None or self._engine.live)

    @property
    def started(self) -> Serves | None:
        """The engine, also while it drains; None until it is ready for the first time."""
        return self._engine

    @property
    def engine(self) -> Serves:
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
        """Makes and starts an engine that knows every task of the repository, the most used ones on the device.

        What is wrong with a task that cannot be read, its queries hear.
        """

        def report(what: str, done: int, total: int) -> None:
            self.phase = (what, done, total)
            progress(what, done, total)

        engine: Serves | None = None
        try:
            report("repository", 0, 1)
            self._seen, _ = self.repository.changes(0)
            known = self._layouts.tasks(report)
            report("repository", 1, 1)
            self.unreadable = sum(task.classes is None for task in known)
            engine = make_engine(Counter(key for task in known for key in task.classes or ()))
            for observer in self._observers:
                engine.observe(observer)
            for task in known:
                self._register(engine, task)
            engine.start(report)
            _warm(engine, [task.id for task in known if task.classes is not None], report)
        except BaseException:
            self._failed = True
            if engine is not None:
                engine.close()
            raise
        self._usage = UsageLog(self.repository, engine.uses)
        self._usage.start()
        self._engine = engine
        self.phase = ("ready", 0, 0)
        if self._growing:
            threading.Thread(target=self._add_standard, args=(engine,), name="jpets-standard", daemon=True).start()

    def refresh(self) -> None:
        """Has the engine know what others than this service changed in the repository since the last call.

        That takes time by the number of changed tasks. One that this service is changing now is looked at again the
        next time.
        """
        engine = self.engine
        with self._refreshing:
            number, changed = self.repository.changes(self._seen)
            if number < self._seen:  # an older copy of the catalogue took its place
                known = self._layouts.tasks(lambda what, done, total: None)
                changed = [*self._registered.copy(), *(task.id for task in known)]
            self._changed.update(dict.fromkeys(changed))
            self._seen = number
            for id in list(self._changed):
                if self._follow(engine, id):
                    del self._changed[id]

    def drain(self) -> None:
        """Refuses new requests; those that run are answered."""
        self._closing = True
        self.phase = ("draining", 0, 0)

    def close(self) -> None:
        self.drain()
        try:
            if self._engine is not None:
                self._engine.close()
        finally:
            if self._usage is not None:
                self._usage.close()

    def observe(self, observer: BatchObserver) -> None:
        """Calls ``observer`` with every batch, on the engine's completion thread."""
        self._observers.append(observer)
        if self._engine is not None:
            self._engine.observe(observer)

    def find(self, model: str) -> Task | None:
        """The outline of the task that queries for ``model`` get, or None where that is the backbone's name.

        Raises ``NotFound``.
        """
        engine = self.engine
        while True:
            entry = self._entry(model)
            if entry is None and model == self.backbone.name:
                return None
            if entry is None:
                raise NotFound(f"unknown task {model[:128]!r}; GET /v1/tasks lists what there is")
            version = entry.version
            try:
                return self._remembered(entry) or self._outline(entry)
            except NotFound:  # deleted or replaced elsewhere
                with self._locks.hold(model):
                    self._bring_up(engine, model)
                if self.version(model) == version:
                    raise

    def at_hand(self, model: str) -> bool:
        """Whether ``find`` has to read nothing."""
        entry = self._entry(model)
        return entry is None or self._remembered(entry) is not None

    def knows(self, task: str) -> bool:
        """Whether queries may ask for it."""
        return self._entry(task) is not None

    def version(self, task: str) -> int | None:
        """The version that queries get; None for what is not known."""
        entry = self._entry(task)
        return entry.version if entry is not None else None

    def preparation(self, task: str) -> Preparation | None:
        """What became of a version that waits for classes which the engine does not have yet."""
        return self._preparing.get(task)

    def tier(self, task: str) -> Tier | None:
        """Where a task is now; None for what is not known."""
        return self._engine.tier(task) if self._engine is not None else None

    def devices(self, task: str) -> Sequence[int]:
        """The numbers of the devices that serve a task."""
        return self._engine.devices_of(task) if self._engine is not None else ()

    def check_task(self, content: bytes | memoryview, id: str) -> Task:
        """The task in a file, which could be served as ``id``. Raises ``InvalidTask``, ``UnknownClass``, ``OutOfSpace``
        where it could not."""
        return self._checked(self.engine, content, id).task

    def put_task(self, id: str, file: Path, if_match: int | None = None) -> StoredTask:
        """Checks, stores and loads a task file; when it returns, the next query sees it, unless there is a
        ``preparation`` of it: then an older version serves until that is done. On any error nothing changed.

        Raises ``InvalidTask``, ``UnknownClass``, ``Conflict``, ``OutOfSpace``, ``Saturated``.
        """
        engine = self.engine
        checked: list[LoweredTask] = []

        def acceptable(content: bytes | memoryview, name: str) -> Task:
            checked.append(self._checked(engine, content, name))
            return checked[0].task

        with self._locks.hold(id):
            stored = self.repository.put(id, map_file(file), if_match=if_match, validator=acceptable)
            try:
                self._layouts.keep(stored.digest, checked[0].classes)
                self._serve(engine, checked[0], stored)
            except BaseException:
                self.repository.discard(id, stored.version)  # what others added meanwhile stays
                raise
            return stored

    def rollback(self, id: str, to: int | str | None = None) -> StoredTask:
        """Serves an earlier version; when it returns, the next query sees it. Raises ``NotFound``, ``OutOfSpace``."""
        engine = self.engine
        with self._locks.hold(id):
            before = self.repository.get(id)
            stored = self.repository.rollback(id, to)
            try:
                self._serve(engine, engine.lower_task(self._read(stored)), stored)
            except BaseException:
                self.repository.activate(id, before.version)
                raise
            return stored

    def delete_task(self, id: str, if_match: int | None = None) -> None:
        """Queries on their way still get their answer. Raises ``NotFound``, ``Conflict``."""
        engine = self.engine
        with self._locks.hold(id):
            try:
                self.repository.delete(id, if_match=if_match)
            except NotFound:
                self._forget(engine, id)  # it was deleted behind the server's back
                raise
            self._forget(engine, id)
            self._preparing.pop(id, None)
        self.repository.collect()

    def _checked(self, engine: Serves, content: bytes | memoryview, id: str) -> LoweredTask:
        if id == self.backbone.name:
            raise InvalidTask(f"{id!r} is the name of the backbone; choose another id")
        task = engine.lower_task(self._validator(content, id))
        try:
            engine.check_task(task, stays=False)
        except (UnknownClass, Preparing):
            if not self._growing:
                raise
        return task

    def _follow(self, engine: Serves, id: str) -> bool:
        """Has the engine know what the repository holds under ``id`` now. False while this service is changing it."""
        with self._locks.attempt(id) as held:
            if held:
                self._bring_up(engine, id)
            return held

    def _bring_up(self, engine: Serves, id: str) -> None:
        """``_follow`` by a caller that holds the task's lock."""
        known, version = self._layouts.known(id), self.version(id)
        if known is None:
            self._forget(engine, id)
        elif (waits := self._preparing.get(id)) is not None and waits.version == known.version:
            return
        elif version is not None and id not in self._registered:
            log.warning("a stored task has the name of a backbone, which goes before it", extra={"task": id})
        else:
            self._preparing.pop(id, None)  # what waits there is not wanted any more
            if version != known.version:
                self._take(engine, known)

    def _take(self, engine: Serves, known: Known) -> None:
        """Serves what others stored, as they do: an older version until the engine has its classes."""
        done = engine.prepare(self._classes(known)) if self._growing else None
        if done is None or done.done():
            self._register(engine, known)
            engine.warm([known.id])
        else:
            self._wait_for(engine, known, done, own=False)

    def _classes(self, known: Known) -> Sequence[ClassKey]:
        """None at all where the task cannot be read: its queries hear why."""
        if known.classes is not None:
            return known.classes
        with contextlib.suppress(JpetsError):
            stored = self.repository.get(known.id, version=known.version)
            classes = self._layouts.classes(self._read(stored))
            self._layouts.keep(stored.digest, classes)
            return classes
        return ()

    def _serve(self, engine: Serves, task: LoweredTask, stored: StoredTask) -> None:
        try:
            engine.add_task(task, version=stored.version, load=partial(self._load, stored.id, stored.version))
        except (UnknownClass, Preparing):
            if not self._growing:
                raise
            known = Known(stored.id, stored.version, task.classes)
            self._wait_for(engine, known, engine.prepare(task.classes), own=True)
        else:
            self._preparing.pop(stored.id, None)  # only now: until then an older version is served
        self._registered.add(stored.id)

    def _wait_for(self, engine: Serves, known: Known, done: Future[None], *, own: bool) -> None:
        """Serves a version once its classes are there (``done``); queries for a task that nobody served before hear
        that. ``own``: it came by this service."""
        self._preparing[known.id] = Preparation(known.version)
        if not self.knows(known.id):
            self._register(engine, known)
        wait = threading.Thread(target=self._finish, args=(engine, known, done, own), name="jpets-prepare", daemon=True)
        wait.start()

    def _finish(self, engine: Serves, known: Known, done: Future[None], own: bool) -> None:
        problem: BaseException | None = done.exception()
        id, version = known.id, known.version
        with self._locks.hold(id):
            if self._preparing.get(id) != Preparation(version):
                return  # another version came, or it was deleted
            try:
                if problem is None:
                    stored = self.repository.get(id, version=version)
                    self._serve(engine, engine.lower_task(self._read(stored)), stored)
            except Exception as error:  # noqa: BLE001 (whatever it is, who asks for the task hears of it)
                problem = error
            if problem is not None and not self._closing:
                self._give_up(engine, known, problem, own)

    def _give_up(self, engine: Serves, known: Known, problem: BaseException, own: bool) -> None:
        """Without room for a task of its own a service does not keep it: the next start would be one too many tasks for
        the device. One of others stays; who asks for it here hears what is wrong."""
        id, version = known.id, known.version
        why = problem.message if isinstance(problem, JpetsError) else type(problem).__name__
        log.error("a task cannot be served", extra={"task": id, "version": version, "why": why})
        self._preparing[id] = Preparation(version, why)
        if not own:
            if self.version(id) != version:
                self._register(engine, known)
            return
        if isinstance(problem, OutOfSpace):
            self.repository.discard(id, version)
        if self.version(id) == version:
            self._forget(engine, id)

    def _add_standard(self, engine: Serves) -> None:
        """Has the engine take tasks of the usual shapes, whatever it was started with."""
        classes = {key for task in self._standard() for key in self._layouts.classes(task)}
        try:
            engine.prepare(sorted(classes)).result()
        except JpetsError as error:
            if not self._closing:
                log.warning("tasks of other shapes than those of the start are not taken: %s", error.message)

    def _register(self, engine: Serves, task: Known) -> None:
        load = partial(self._load, task.id, task.version)
        engine.register_task(task.id, load, version=task.version, classes=task.classes or ())
        self._registered.add(task.id)

    def _forget(self, engine: Serves, id: str) -> None:
        """The plain form of a backbone stays: it is no task of the repository."""
        if (waits := self._preparing.get(id)) is not None and waits.problem is None:
            del self._preparing[id]
        if id in self._registered:
            self._registered.discard(id)
            with contextlib.suppress(NotFound):
                engine.remove_task(id)

    def _load(self, id: str, version: int) -> Task:
        """Where the task was deleted or replaced elsewhere meanwhile, the engine first hears of that: it will ask for
        the new version. Raises ``NotFound``, ``InvalidTask``, ``Saturated``."""
        try:
            return self._read(self.repository.get(id, version=version))
        except NotFound as error:
            engine = self._engine
            if engine is None or (self._follow(engine, id) and self.version(id) in (None, version)):
                raise
            raise Saturated(f"task {id!r} has just been replaced; send the request again") from error

    def _read(self, stored: StoredTask) -> Task:
        return self._validator(self.repository.read(stored), stored.id)

    def _entry(self, task: str) -> Entry | None:
        return self._engine.entry(task) if self._engine is not None else None

    def _remembered(self, entry: Entry) -> Task | None:
        if (resident := entry.resident) is not None:
            return resident.task
        with self._outlines_lock:
            return self._outlines.get(entry.loading)

    def _outline(self, entry: Entry) -> Task:
        loading, version = entry.loading, entry.version
        stored = self.repository.get(entry.task, version=version)
        outline = self.repository.outline(stored) or self._read(stored).outlined()
        with self._outlines_lock:
            self._outlines[loading] = outline
        return outline


def _warm(engine: Serves, ids: Sequence[str], report: Progress) -> None:
    """Brings the first of these to the device, and waits for them a while."""
    engine.warm(ids)
    end = time.monotonic() + WARMING
    while (left := engine.warming) and time.monotonic() < end and engine.live:
        report("tasks", len(ids) - left, len(ids))
        time.sleep(POLL)
    report("tasks", len(ids) - engine.warming, len(ids))
