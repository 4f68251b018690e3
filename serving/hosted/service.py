"""The service of one backbone: an engine and a repository, kept in step from its start to its end."""

from __future__ import annotations

import functools
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence

from jpets.deltas import task_lead
from jpets.deltas.protocol import ClassKey
from jpets.engine.interface import Serves
from jpets.engine.results.stats import BatchObserver
from jpets.tokenizing import TextEncoder
from jpets.types import LoadedBackbone, Progress, Task, TaskName
from serving.hosted.changes import Changes
from serving.hosted.following import Following
from serving.hosted.outlines import Outlines
from serving.hosted.preparations import Preparations
from serving.hosted.repository import TaskRepository, Validator
from serving.hosted.served import ServedTasks
from serving.hosted.usage import UsageLog

WARMING = 20.0
"""Seconds that a start waits at most for tasks to come to the device; the others come while it serves."""
POLL = 0.02
MakeEngine = Callable[[Mapping[ClassKey, int]], Serves]
"""Makes an engine for this many tasks of each class."""


class Service:
    """Serves what ``repository`` holds. The plain backbone is asked by ``backbone``'s name.

    It answers health and metrics at once, queries and changes only after ``start``. Methods block; thread-safe.

    Tasks of classes that the engine does not have are taken in only if it is ``growing``, and are served once it has
    those classes. It gets the classes of ``standard`` tasks after its start.

    Look-ups are those of ``tasks`` and ``outlines``, changes by this server those of ``changes``, and changes by others
    come by ``following``; ``preparations`` has what waits for its classes.
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
        self.tasks = ServedTasks(repository, backbone, validator)
        self.preparations = Preparations(self.tasks, growing=growing)
        self.following = Following(self.tasks, self.preparations)
        self.outlines = Outlines(self.tasks, self.following)
        self.changes = Changes(self.tasks, self.preparations)
        self.phase = ("starting", 0, 0)
        """What a start is doing: (step, done, total)."""
        self.unreadable = 0
        """Stored tasks that could not be read at start."""
        self._standard = standard
        self._usage: UsageLog | None = None
        self._observers: list[BatchObserver] = []
        self._failed = False

    @functools.cached_property
    def text(self) -> TextEncoder:
        """Makes token ids of texts, also where the backbone looks tokens up in tables."""
        return TextEncoder.of(self.backbone, looked_up=False)

    @property
    def has_text(self) -> bool:
        """Whether ``text`` was asked for before."""
        return "text" in self.__dict__

    @property
    def ready(self) -> bool:
        """Every query would be answered without waiting for a compilation or for one of the most used tasks."""
        return self.started is not None and not self.tasks.closing and self.started.ready

    @property
    def live(self) -> bool:
        """False when only a new process helps."""
        return not self._failed and (self.started is None or self.started.live)

    @property
    def started(self) -> Serves | None:
        """The engine, also while it drains; None until it is ready for the first time."""
        return self.tasks.started

    @property
    def engine(self) -> Serves:
        """The engine for a new request. Raises ``Saturated`` before ``start`` is done and after ``drain``."""
        return self.tasks.engine

    def longest(self, task: Task | None) -> int:
        """Most tokens of a text for this task, or for the backbone itself."""
        longest = self.engine.longest
        if task is None:
            return min(longest, self.backbone.embeds.preprocessing.max_length or longest)
        room = task_lead(task.parts[0]).room(longest, self.backbone.config.max_positions)
        return min(room, task.preprocessing.max_length or room)

    def check_open(self) -> None:
        """Raises ``Saturated`` where ``engine`` would."""
        _ = self.engine

    def start(self, make_engine: MakeEngine, progress: Progress = lambda what, done, total: None) -> None:
        """Makes and starts an engine that knows every task of the repository, the most used ones on the device.

        Queries of a task that cannot be read are told what is wrong with it.
        """

        def report(what: str, done: int, total: int) -> None:
            self.phase = (what, done, total)
            progress(what, done, total)

        engine: Serves | None = None
        try:
            report("repository", 0, 1)
            known = self.following.begin(report)
            report("repository", 1, 1)
            self.unreadable = sum(task.classes is None for task in known)
            engine = make_engine(Counter(key for task in known for key in task.classes or ()))
            for observer in self._observers:
                engine.observe(observer)
            for task in known:
                self.tasks.register(engine, task)
            engine.start(report)
            _warm(engine, [task.name for task in known if task.classes is not None], report)
        except BaseException:
            self._failed = True
            if engine is not None:
                engine.close()
            raise
        self._usage = UsageLog(self.repository, engine.uses)
        self._usage.start()
        self.tasks.started = engine
        self.phase = ("ready", 0, 0)
        self.preparations.add_standard(engine, self._standard)

    def drain(self) -> None:
        """Refuses new requests; running ones are answered."""
        self.tasks.closing = True
        self.phase = ("draining", 0, 0)

    def close(self) -> None:
        self.drain()
        self.preparations.close()
        try:
            if self.started is not None:
                self.started.close()
        finally:
            if self._usage is not None:
                self._usage.close()

    def observe(self, observer: BatchObserver) -> None:
        """Calls ``observer`` with every batch, on the engine's completion thread."""
        self._observers.append(observer)
        if self.started is not None:
            self.started.observe(observer)


def _warm(engine: Serves, names: Sequence[TaskName], report: Progress) -> None:
    """Brings the first of these to the device, and waits for them a while."""
    ids = defaultdict[str, list[str]](list)
    for name in names:
        ids[name.tenant].append(name.id)
    for tenant, own in ids.items():
        engine.warm(own, tenant=tenant)
    end = time.monotonic() + WARMING
    while (left := engine.warming) and time.monotonic() < end and engine.live:
        report("tasks", len(names) - left, len(names))
        time.sleep(POLL)
    report("tasks", len(names) - engine.warming, len(names))
