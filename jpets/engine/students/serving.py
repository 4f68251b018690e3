"""Serves groups of students beside other tasks, over any engine."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Self

from jpets.config import SizingRule
from jpets.deltas.protocol import NO_LEAD, ClassKey
from jpets.engine.interface import Serves
from jpets.engine.report import EngineReport, StudentsReport
from jpets.engine.results.stats import BatchObserver
from jpets.engine.students.combining import combined, when_all
from jpets.engine.students.group import TIERS, Group, group_of, with_id
from jpets.engine.students.sizing import GroupSize
from jpets.engine.tasks.entries import Entry, Tier
from jpets.engine.tasks.lowered import LoweredTask
from jpets.errors import JpetsError, NotFound
from jpets.types import DEFAULT_TENANT, Progress, Query, Result, Task, TaskName


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
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.engine = engine
        self.size = GroupSize(rule or SizingRule(), devices, clock)
        self._groups: dict[TaskName, Group] = {}
        self._changes = threading.Lock()
        """Held while groups change."""
        self._numbers = itertools.count()
        self._answers: Counter[int] = Counter()
        self._counting = threading.Lock()

    @property
    def ready(self) -> bool:
        return self.engine.ready

    @property
    def live(self) -> bool:
        return self.engine.live

    def start(self, progress: Progress = lambda what, done, total: None) -> Self:
        self.engine.start(progress)
        return self

    def close(self) -> None:
        self.engine.close()

    def submit(
        self,
        queries: Sequence[Query],
        *,
        deadline: float | None = None,
        priority: int = 0,
        tenant: str = DEFAULT_TENANT,
    ) -> list[Future[Result]]:
        queries = list(queries)
        groups = [self._group(query.task, tenant) for query in queries]
        count = len(queries) - groups.count(None)
        if not count:
            return self.engine.submit(queries, deadline=deadline, priority=priority, tenant=tenant)
        self.size.asked(count)
        parts = [
            [query] if group is None else group.queries(query, self.size.of(len(group.ids)))
            for query, group in zip(queries, groups, strict=True)
        ]
        try:
            every = [one for own in parts for one in own]
            futures = iter(self.engine.submit(every, deadline=deadline, priority=priority, tenant=tenant))
        except BaseException:
            self.size.answered(count)
            raise
        found = []
        for own, group in zip(parts, groups, strict=True):
            some = [next(futures) for _ in own]
            found.append(some[0] if group is None else self._joined(group, some))
        return found

    def _joined(self, group: Group, parts: Sequence[Future[Result]]) -> Future[Result]:
        whole = when_all(parts, partial(self._combine, group))
        whole.add_done_callback(lambda _: self.size.answered())
        return whole

    def _combine(self, group: Group, found: Sequence[Result]) -> Result:
        result = combined(group.entry.task, group.outline, found)
        if result.students is not None:
            with self._counting:
                self._answers[result.students] += 1
        return result

    def _group(self, task: object, tenant: str) -> Group | None:
        return self._groups.get(TaskName(tenant, task)) if self._groups and isinstance(task, str) else None

    def lower_task(self, task: Task | LoweredTask) -> LoweredTask:
        if isinstance(task, LoweredTask) or task.students is None:
            return self.engine.lower_task(task)
        students = tuple(self.engine.lower_task(own) for own in task.parts)
        return LoweredTask(task, task, (), NO_LEAD, students)

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
    ) -> None:
        """Of a group all students are there, or none: an older version is served until the last has come."""
        lowered = self.lower_task(task)
        name = TaskName(tenant, lowered.task.id)
        if not lowered.students:
            self.engine.add_task(lowered, tenant=tenant, version=version, load=load)
            self._replace(name, None)
            return
        group = group_of(name, load or (lambda: lowered.task), version, len(lowered.students), next(self._numbers))
        group.outline = dataclasses.replace(lowered.task, deltas=())
        try:
            for at, (id, own) in enumerate(zip(group.ids, lowered.students, strict=True)):
                again = None if load is None else group.loader(at)
                self.engine.add_task(with_id(own, id), tenant=tenant, version=version, load=again)
        except BaseException:
            self._remove(group)
            raise
        self._replace(name, group)

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
    ) -> None:
        name = TaskName(tenant, id)
        if not students:
            self.engine.register_task(id, load, tenant=tenant, version=version, pinned=pinned, classes=classes)
            self._replace(name, None)
            return
        group = group_of(name, load, version, students, next(self._numbers))
        each = len(classes) // students
        for at, own in enumerate(group.ids):
            some = classes[at * each : (at + 1) * each]
            self.engine.register_task(
                own, group.loader(at), tenant=tenant, version=version, pinned=pinned, classes=some
            )
        self._replace(name, group)

    def prepare(self, classes: Sequence[ClassKey]) -> Future[None]:
        return self.engine.prepare(classes)

    def remove_task(self, task: str, *, tenant: str = DEFAULT_TENANT) -> None:
        with self._changes:
            group = self._groups.pop(TaskName(tenant, task), None)
            self._resize()
        if group is None:
            self.engine.remove_task(task, tenant=tenant)
        else:
            self._remove(group)

    def warm(self, ids: Iterable[str], *, tenant: str = DEFAULT_TENANT) -> None:
        self.engine.warm([one for id in ids for one in self._ids(id, tenant)], tenant=tenant)

    @property
    def warming(self) -> int:
        return self.engine.warming

    def devices_of(self, id: str, *, tenant: str = DEFAULT_TENANT) -> Sequence[int]:
        found = (self.engine.devices_of(one, tenant=tenant) for one in self._ids(id, tenant))
        return sorted({device for devices in found for device in devices})

    def entry(self, id: str, *, tenant: str = DEFAULT_TENANT) -> Entry | None:
        group = self._group(id, tenant)
        return self.engine.entry(id, tenant=tenant) if group is None else group.entry

    def tier(self, id: str, *, tenant: str = DEFAULT_TENANT) -> Tier | None:
        """Of a group that of the student that is furthest from the device."""
        tiers = [self.engine.tier(one, tenant=tenant) for one in self._ids(id, tenant)]
        known = [tier for tier in tiers if tier is not None]
        return max(known, key=TIERS.index, default=None)

    def uses(self, tenant: str = DEFAULT_TENANT) -> Mapping[str, int]:
        """A query of a group counts once: its first student answers all."""
        found = Counter(self.engine.uses(tenant))
        with self._changes:
            groups = [group for name, group in self._groups.items() if name.tenant == tenant]
        for group in groups:
            asked = [found.pop(id, 0) for id in group.ids]
            if asked[0]:
                found[group.entry.task] += asked[0]
        return found

    def report(self) -> EngineReport:
        found = self.engine.report()
        with self._changes:
            groups = list(self._groups.values())
        if not groups:
            return found
        largest, size = max(len(group.ids) for group in groups), self.size
        with self._counting:
            answers = dict(self._answers)
        told = StudentsReport(size.rule, len(groups), largest, size.of(largest), size.drops, size.additions, answers)
        return dataclasses.replace(found, students=told)

    def observe(self, observer: BatchObserver) -> None:
        self.engine.observe(observer)

    def limit(self, spare: Sequence[float]) -> None:
        self.engine.limit(spare)

    def _ids(self, id: str, tenant: str) -> Sequence[str]:
        """The engine's tasks for one task."""
        group = self._group(id, tenant)
        return (id,) if group is None else group.ids

    def _replace(self, name: TaskName, group: Group | None) -> None:
        """From now on queries of ``name`` get this group, or the engine's own task of that name."""
        with self._changes:
            before = self._groups.pop(name, None)
            if group is not None:
                self._groups[name] = group
            self._resize()
        if before is not None:
            self._remove(before)
        elif group is not None and self.engine.entry(name.id, tenant=name.tenant) is not None:
            with contextlib.suppress(NotFound):
                self.engine.remove_task(name.id, tenant=name.tenant)

    def _resize(self) -> None:
        self.size.resize(max((len(group.ids) for group in self._groups.values()), default=1))

    def _remove(self, group: Group) -> None:
        for id in group.ids:
            with contextlib.suppress(JpetsError):
                self.engine.remove_task(id, tenant=group.entry.tenant)
