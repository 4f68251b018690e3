"""What an engine on one device and a group of them on several have in common."""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Self, TypeVar

from jpets.deltas.protocol import ClassKey
from jpets.engine.report import EngineReport
from jpets.engine.results.stats import BatchObserver
from jpets.engine.tasks.entries import Entry, Tier
from jpets.engine.tasks.lowered import LoweredTask
from jpets.errors import InvalidTask
from jpets.types import DEFAULT_TENANT, Progress, Query, Result, Task, TaskName

Part = TypeVar("Part")


class Serves(abc.ABC):
    """Queries in, results out, for any mixture of tasks over one backbone. Thread-safe.

    It has more than 20 methods, as it is all that a server sees of an engine: start and end, queries, tasks, figures.
    """

    @property
    @abc.abstractmethod
    def ready(self) -> bool:
        """Warm: no query will wait for a compilation."""

    @property
    @abc.abstractmethod
    def live(self) -> bool:
        """False when only a new engine helps."""

    @abc.abstractmethod
    def start(self, progress: Progress = lambda what, done, total: None) -> Self:
        """Compiles or loads programs, and starts the threads."""

    @abc.abstractmethod
    def close(self) -> None:
        """Refuses new queries, answers the waiting ones with an error and those on the device normally."""

    @abc.abstractmethod
    def submit(
        self,
        queries: Sequence[Query],
        *,
        deadline: float | None = None,
        priority: int = 0,
        tenant: str = DEFAULT_TENANT,
    ) -> list[Future[Result]]:
        """One future a query, in order; cancel one to drop it. ``deadline`` is seconds from now.

        The error of a single query is in its result's ``error``. Answers in the response cache are given at once,
        whatever the deadline. Raises ``Saturated`` when the queue is full.
        """

    def infer(
        self,
        queries: Sequence[Query],
        *,
        deadline: float | None = None,
        priority: int = 0,
        tenant: str = DEFAULT_TENANT,
    ) -> list[Result]:
        """``submit`` and wait."""
        return [f.result() for f in self.submit(queries, deadline=deadline, priority=priority, tenant=tenant)]

    @abc.abstractmethod
    def lower_task(self, task: Task | LoweredTask) -> LoweredTask:
        """The form of a task that ``check_task`` and ``add_task`` need, for a caller that calls both. It needs no class
        of the engine yet. A lowered task is returned as it is.

        Raises ``InvalidTask`` (another backbone).
        """

    @abc.abstractmethod
    def add_task(
        self,
        task: Task | LoweredTask,
        *,
        tenant: str = DEFAULT_TENANT,
        version: int | None = None,
        load: Callable[[], Task] | None = None,
        place: int | None = None,
    ) -> None:
        """Loads a task; when it returns, the next query gets it. An older version is served until then.

        The task stays on its device, unless ``load`` can read it again: then it may leave for other tasks, and while
        all slots are in use, it comes only when a query asks for it. A new task goes to the device of number ``place``,
        modulo the number of devices, if it is given and that has room.

        Raises ``InvalidTask`` (another backbone), ``UnknownClass`` (no class holds it), ``OutOfSpace`` (no free slot).
        """

    @abc.abstractmethod
    def register_task(
        self,
        id: str,
        load: Callable[[], Task],
        *,
        tenant: str = DEFAULT_TENANT,
        version: int | None = None,
        pinned: bool = False,
        classes: Sequence[ClassKey] = (),
        students: int = 0,
        least: int = 1,
        place: int | None = None,
    ) -> None:
        """Makes a task known without reading it. ``load`` is called when a query asks for a task that is not on the
        device: the first time, and again each time it has left for other tasks. ``pinned``: once there it stays.

        Its classes must be among the engine's (``reserve``, ``coming``). Its queries are told what is wrong with it.
        ``classes`` (``task_classes``), if known, save reading the task while none of their slots is free. ``students``:
        how many students a group has, of which ``least`` answer at least. ``place``: see ``add_task``.

        Raises ``InvalidTask`` for a group where groups are not served.
        """

    @abc.abstractmethod
    def check_task(self, task: Task | LoweredTask, *, stays: bool = True) -> None:
        """Raises what ``add_task`` would raise if it were called now; changes nothing. ``stays``: ``load`` is not
        given."""

    @abc.abstractmethod
    def prepare(self, classes: Sequence[ClassKey]) -> Future[None]:
        """Makes room for tasks of more classes (``task_classes``) while others are served. Once the future is done,
        tasks of these classes can be added; it is done at once if the classes are there. Until then their tasks can be
        registered, and their queries are told that it takes a while.

        The future raises ``OutOfSpace`` where the device has no room for them, ``EngineFailure``.
        """

    @abc.abstractmethod
    def remove_task(self, task: str, *, tenant: str = DEFAULT_TENANT) -> None:
        """Queries already submitted still get their answer, except those that wait for the task to be loaded. Raises
        ``NotFound``."""

    @abc.abstractmethod
    def warm(self, ids: Iterable[str], *, tenant: str = DEFAULT_TENANT) -> None:
        """Brings registered tasks to the device before queries ask for them, in this order, while slots are free.

        Returns at once; ``warming`` says how many are left.
        """

    @abc.abstractmethod
    def unload(self, id: str, *, tenant: str = DEFAULT_TENANT) -> None:
        """The task leaves the device, once its queries there are answered, and comes again with its next query. One
        that was added without a way to load it stays. Raises ``NotFound``."""

    @property
    @abc.abstractmethod
    def warming(self) -> int:
        """Tasks of ``warm`` that are not there yet."""

    @abc.abstractmethod
    def devices_of(self, id: str, *, tenant: str = DEFAULT_TENANT) -> Sequence[int]:
        """The numbers of the devices that serve a task, as ``report`` counts them; none for a task that is not
        known."""

    @abc.abstractmethod
    def entry(self, id: str, *, tenant: str = DEFAULT_TENANT) -> Entry | None:
        """What is known of a task, on the device or not."""

    @abc.abstractmethod
    def tier(self, id: str, *, tenant: str = DEFAULT_TENANT) -> Tier | None:
        """Where a task is now; None for a task that is not known."""

    @abc.abstractmethod
    def uses(self) -> Mapping[TaskName, int]:
        """Queries for each task since the last call."""

    @abc.abstractmethod
    def report(self) -> EngineReport:
        """What each device counts, holds and has waiting, now."""

    @abc.abstractmethod
    def observe(self, observer: BatchObserver) -> None:
        """Calls ``observer`` with every batch from now on, on the completion thread of its device."""

    @abc.abstractmethod
    def limit(self, spare: Sequence[float]) -> None:
        """From now on each device may take this many bytes more than it has now, and no more: one number a device, in
        the order of ``report``."""

    @property
    @abc.abstractmethod
    def longest(self) -> int:
        """Tokens of the longest query that it takes."""

    @abc.abstractmethod
    def beside(self, rows: int, length: int) -> int:
        """How many times ``rows`` texts of ``length`` tokens a device computes in at most twice the time of one, by the
        costs that are known now."""

    @abc.abstractmethod
    def expect(self, classes: Sequence[ClassKey], rows: int) -> None:
        """Rows of one text will come, for up to ``rows`` tasks of these classes at a time: their programs are compiled
        before others, if any are in the background. Raises ``UnknownClass``, ``Preparing``."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def refuse_group(id: str) -> None:
    """Raises ``InvalidTask``: an engine serves the students of a group, and ``StudentServing`` the group."""
    raise InvalidTask(f"task {id!r} is a group of students; serve it by jpets.engine.students.serving.StudentServing")


def submit_parts(
    queries: Sequence[Query],
    routed: Mapping[Part, Sequence[int]],
    send: Callable[[Part, Sequence[Query]], Sequence[Future[Result]]],
) -> list[Future[Result]]:
    """One future a query, in order, of a submission with parts (places in ``queries``) for several.

    If one of them refuses its part, the other parts are cancelled, and its error is raised.
    """
    futures: dict[int, Future[Result]] = {}
    try:
        for part, places in routed.items():
            futures.update(zip(places, send(part, [queries[at] for at in places]), strict=True))
    except BaseException:
        for future in futures.values():
            future.cancel()
        raise
    return [futures[at] for at in range(len(queries))]
