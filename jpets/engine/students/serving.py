"""Serves groups of students beside other tasks, over any engine."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Self

from jpets.config import EngineSettings, SizingRule
from jpets.deltas.protocol import NO_LEAD, ClassKey
from jpets.engine.batch.bucket import Bucket
from jpets.engine.engine import Engine
from jpets.engine.interface import Serves
from jpets.engine.report import EngineReport
from jpets.engine.results.stats import BatchObserver
from jpets.engine.students.asking import parts_of, sent
from jpets.engine.students.combining import combined, when_all
from jpets.engine.students.files import GroupFiles, in_memory
from jpets.engine.students.group import TIERS, Group, group_of, kept_scores, with_id
from jpets.engine.students.sizing import GroupSize, Together
from jpets.engine.tasks.entries import Entry, Tier
from jpets.engine.tasks.lowered import LoweredTask
from jpets.engine.tasks.student_names import MARK, is_first
from jpets.engine.workloads.registry import network_of
from jpets.errors import JpetsError, NotFound
from jpets.types import DEFAULT_TENANT, LoadedBackbone, Progress, Query, Result, Task, TaskName


class StudentServing(Serves):
    """``engine`` with groups of students: each student is a task of the engine, in its banks and batches as any other,
    on whatever device the engine puts it. A query of a group becomes one query for each student that answers now; their
    pooled vectors are added up and read by the group's head here.

    How many students answer follows the load (``rule``); an answer says how many did.

    It has more than 20 methods, as ``Serves`` has.
    """

    def __init__(
        self,
        engine: Serves,
        rule: SizingRule | None = None,
        *,
        devices: int = 1,
        groups: Sequence[Task] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``groups`` are added at the start."""
        self.engine = engine
        self._start_groups = list(groups)
        self.size, self._devices = GroupSize(rule or SizingRule(), devices, clock), devices
        self._groups: dict[TaskName, Group] = {}
        self._sizes = Counter[int]()
        """Groups by their number of students."""
        self._files = GroupFiles(engine)
        self._changes = threading.Lock()
        """Held while groups change."""
        self._retiring = ThreadPoolExecutor(1, thread_name_prefix="jpets-retire")
        """Removes groups whose last answer came after they were replaced. Who gives that answer must not: it may be the
        thread that a removal waits for."""
        self._numbers = itertools.count()
        self._answers: Counter[int] = Counter()
        self._together = Together(self.size, engine.beside, clock)
        self._counting = threading.Lock()

    @classmethod
    def of_tasks(
        cls,
        backbone: LoadedBackbone,
        tasks: Iterable[Task],
        settings: EngineSettings,
        *,
        reserve: Iterable[Task] = (),
        cache_dir: Path | None = None,
        buckets: Sequence[Bucket] | None = None,
        rule: SizingRule | None = None,
    ) -> Self:
        """With an engine on one device that has room for these tasks, groups among them; ``start`` adds them. All
        students answer, unless ``rule`` says something else."""
        every = list(tasks)
        groups = [task for task in every if task.students is not None]
        plain = [task for task in every if task.students is None]
        network, params = network_of(backbone), dict(backbone.params)
        coming = Counter(key for group in groups for key in network.classes(group, params))
        shapes = [part for task in reserve for part in task.parts]
        engine = Engine(backbone, plain, settings, reserve=shapes, coming=coming, cache_dir=cache_dir, buckets=buckets)
        return cls(engine, rule or SizingRule(fixed=True), groups=groups)

    @property
    def ready(self) -> bool:
        return self.engine.ready and not self._start_groups

    @property
    def live(self) -> bool:
        return self.engine.live

    def start(self, progress: Progress = lambda what, done, total: None) -> Self:
        self.engine.start(progress)
        try:
            for done, task in enumerate(self._start_groups):
                progress("groups", done, len(self._start_groups))
                self.add_task(task, load=in_memory(task))
        except BaseException:
            self.close()
            raise
        self._start_groups = []
        return self

    def close(self) -> None:
        try:
            self.engine.close()
        finally:
            self._retiring.shutdown(wait=False, cancel_futures=True)

    def submit(
        self,
        queries: Sequence[Query],
        *,
        deadline: float | None = None,
        priority: int = 0,
        tenant: str = DEFAULT_TENANT,
    ) -> list[Future[Result]]:
        queries = list(queries)
        send = partial(self.engine.submit, deadline=deadline, priority=priority, tenant=tenant)
        if not self._groups:
            return send(queries)
        self._together.look()
        held: list[Group | None] = []
        counted = 0
        try:
            held += (self._hold(query.task, query.owner or tenant) for query in queries)
            if counted := sum(group is not None for group in held):
                self.size.asked(counted)
            answering = self.size.answering  # one number for all texts, whose scores may be compared
            parts = [parts_of(query, group, answering) for query, group in zip(queries, held, strict=True)]
            for own, group in zip(parts, held, strict=True):
                if group is not None:
                    self._files.want(group, len(own))
            every = [one for own in parts for one in own]
            futures = iter(send(every) if self.size.rule.fixed else sent(parts, held, send))
        except BaseException:
            self.size.answered(counted)
            for group in held:
                self._let_go(group)
            raise
        found = []
        for own, group in zip(parts, held, strict=True):
            some = [next(futures) for _ in own]
            found.append(some[0] if group is None else self._joined(group, some))
        return found

    def _joined(self, group: Group, parts: Sequence[Future[Result]]) -> Future[Result]:
        whole = when_all(parts, partial(self._combine, group))
        whole.add_done_callback(lambda _: self._answered(group))
        return whole

    def _answered(self, group: Group) -> None:
        self.size.answered()
        self._let_go(group)

    def _hold(self, task: object, tenant: str) -> Group | None:
        """The group of that name, for a query; ``_let_go`` gives it back. Its students stay until then."""
        if self._group(task, tenant) is None:
            return None  # most queries: they need not wait for changes of groups
        with self._changes:
            group = self._group(task, tenant)
            if group is None:
                return None
            group.asked += 1
        return group

    def _let_go(self, group: Group | None) -> None:
        if group is None:
            return
        with self._changes:
            group.asked -= 1
            if not group.asked:
                self._files.forget(group)
            leaves = group.leaving and not group.asked
        if leaves:
            with contextlib.suppress(RuntimeError):  # closed: all leave with the engine
                self._retiring.submit(self._remove, group)

    def _combine(self, group: Group, found: Sequence[Result]) -> Result:
        found = [group.reworded(own) for own in found]
        result = combined(group.entry.task, group.outline, found, fixed=self.size.rule.fixed)
        if result.students is not None:
            with self._counting:
                self._answers[result.students] += 1
                self._together.answered(result.tokens)
        return result

    def _group(self, task: object, tenant: str) -> Group | None:
        return self._groups.get(TaskName(tenant, task)) if self._groups and isinstance(task, str) else None

    def lower_task(self, task: Task | LoweredTask) -> LoweredTask:
        if isinstance(task, LoweredTask) or task.students is None:
            return self.engine.lower_task(task)
        return LoweredTask(task, task, (), NO_LEAD, tuple(map(self.engine.lower_task, task.parts)))

    def check_task(self, task: Task | LoweredTask, *, stays: bool = True) -> None:
        lowered = self.lower_task(task)
        for own in lowered.students or (lowered,):
            self.engine.check_task(own, stays=stays)

    def add_task(
        self,
        task: Task | LoweredTask,
        *,
        tenant: str = DEFAULT_TENANT,
        version: int | None = None,
        load: Callable[[], Task] | None = None,
        place: int | None = None,
    ) -> None:
        """Of a group all students are there, or none: an older version is served until the last has come."""
        lowered = self.lower_task(task)
        name = TaskName(tenant, lowered.task.id)
        if not lowered.students:
            self.engine.add_task(lowered, tenant=tenant, version=version, load=load, place=place)
            self._replace(name, None)
            return
        assert lowered.task.students is not None
        count, least = len(lowered.students), lowered.task.students.least
        group = group_of(name, load or in_memory(lowered.task), version, count, next(self._numbers), least)
        group.outline = dataclasses.replace(lowered.task, deltas=())
        try:
            for at, (id, own) in enumerate(zip(group.ids, lowered.students, strict=True)):
                again, where = None if load is None else self._files.loader(group, at), group.place(at, self._devices)
                self.engine.add_task(with_id(own, id), tenant=tenant, version=version, load=again, place=where)
        except BaseException:
            self._remove(group)
            raise
        self._replace(name, group)
        self._expect(lowered.students[0].classes, len(group.ids))

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
        name = TaskName(tenant, id)
        if not students:
            self.engine.register_task(
                id, load, tenant=tenant, version=version, pinned=pinned, classes=classes, place=place
            )
            self._replace(name, None)
            return
        group = group_of(name, load, version, students, next(self._numbers), least)
        each = len(classes) // students
        try:
            for at, own in enumerate(group.ids):
                again, some = self._files.loader(group, at), classes[at * each : (at + 1) * each]
                self.engine.register_task(
                    own,
                    again,
                    tenant=tenant,
                    version=version,
                    pinned=pinned,
                    classes=some,
                    place=group.place(at, self._devices),
                )
        except BaseException:
            self._remove(group)
            raise
        self._replace(name, group)
        self._expect(classes[:each], students)

    def prepare(self, classes: Sequence[ClassKey]) -> Future[None]:
        return self.engine.prepare(classes)

    def remove_task(self, task: str, *, tenant: str = DEFAULT_TENANT) -> None:
        if self._group(task, tenant) is None or not self._retire(TaskName(tenant, task)):
            self.engine.remove_task(task, tenant=tenant)

    def warm(self, ids: Iterable[str], *, tenant: str = DEFAULT_TENANT) -> None:
        every = list(ids)
        for group in filter(None, (self._group(id, tenant) for id in every)):
            self._files.warm(group)
        self.engine.warm([one for id in every for one in self._ids(id, tenant)], tenant=tenant)

    def unload(self, id: str, *, tenant: str = DEFAULT_TENANT) -> None:
        for one in self._ids(id, tenant):
            self.engine.unload(one, tenant=tenant)

    @property
    def warming(self) -> int:
        return self.engine.warming

    def expect(self, classes: Sequence[ClassKey], rows: int) -> None:
        self.engine.expect(classes, rows)

    def _expect(self, classes: Sequence[ClassKey], rows: int) -> None:
        with contextlib.suppress(JpetsError):  # of classes that are still to come batches will tell
            self.engine.expect(classes, rows)

    def devices_of(self, id: str, *, tenant: str = DEFAULT_TENANT) -> Sequence[int]:
        found = (self.engine.devices_of(one, tenant=tenant) for one in self._ids(id, tenant))
        return sorted({device for devices in found for device in devices})

    def entry(self, id: str, *, tenant: str = DEFAULT_TENANT) -> Entry | None:
        if (group := self._group(id, tenant)) is not None:
            return group.entry
        return None if MARK in id else self.engine.entry(id, tenant=tenant)

    def tier(self, id: str, *, tenant: str = DEFAULT_TENANT) -> Tier | None:
        """Of a group that of the student that is furthest from the device."""
        tiers = [self.engine.tier(one, tenant=tenant) for one in self._ids(id, tenant)]
        known = [tier for tier in tiers if tier is not None]
        return max(known, key=TIERS.index, default=None)

    def uses(self) -> Mapping[TaskName, int]:
        """A query of a group counts once: its first student answers all."""
        found = Counter[TaskName]()
        for name, count in self.engine.uses().items():
            if is_first(name.id):
                found[TaskName(name.tenant, name.id.partition(MARK)[0])] += count
        return found

    def report(self) -> EngineReport:
        found = self.engine.report()
        if not self._groups:
            return found
        with self._counting:
            answers = dict(self._answers)
        kept = kept_scores(list(self._groups.values()))
        return dataclasses.replace(found, students=self.size.report(len(self._groups), answers, kept))

    def observe(self, observer: BatchObserver) -> None:
        self.engine.observe(observer)

    @property
    def longest(self) -> int:
        return self.engine.longest

    def beside(self, rows: int, length: int) -> int:
        return self.engine.beside(rows, length)

    def limit(self, spare: Sequence[float]) -> None:
        self.engine.limit(spare)

    def _ids(self, id: str, tenant: str) -> Sequence[str]:
        """The engine's tasks for one task."""
        group = self._group(id, tenant)
        return (id,) if group is None else group.ids

    def _replace(self, name: TaskName, group: Group | None) -> None:
        """From now on queries of ``name`` get this group, or the engine's own task of that name."""
        replaced = self._retire(name, group)
        if replaced or group is None:
            return
        if (entry := self.engine.entry(name.id, tenant=name.tenant)) is not None:
            entry.replaced = True
            with contextlib.suppress(NotFound):
                self.engine.remove_task(name.id, tenant=name.tenant)

    def _retire(self, name: TaskName, following: Group | None = None) -> bool:
        """Queries get no longer the group of this name, if there is one, but the ``following``; its students stay until
        its last query is answered."""
        with self._changes:
            before = self._groups.pop(name, None)
            if following is not None:
                self._groups[name] = following
                self._sizes[len(following.ids)] += 1
            if before is not None:
                self._sizes[len(before.ids)] -= 1
                before.leaving = True
            if before is not None or following is not None:
                self.size.resize(max((size for size, count in self._sizes.items() if count), default=1))
            idle = before is not None and not before.asked
        if before is not None and idle:
            self._remove(before)
        return before is not None

    def _remove(self, group: Group) -> None:
        self._files.drop(group)
        for id in group.ids:
            with contextlib.suppress(JpetsError):
                self.engine.remove_task(id, tenant=group.entry.tenant)
