"""One engine on each of several devices, which share the tasks (multi-GPU PetS section 2.3.2).

Every device has the backbone and a queue of its own. A task is on one device, its *home*, or on several if one cannot
serve all its queries; its queries go there. Homes change while queries are served (``Mover``, ``Balancer``).
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import pathlib
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Self

import jax

from jpets.config import EngineSettings
from jpets.deltas.protocol import ClassKey
from jpets.engine.batch.bucket import Bucket
from jpets.engine.engine import Engine
from jpets.engine.group.balancer import Balancer
from jpets.engine.group.homes import Home, Homes
from jpets.engine.group.mover import Mover
from jpets.engine.group.readers import Readers
from jpets.engine.interface import Serves, refuse_group, submit_parts
from jpets.engine.report import BalanceReport, EngineReport
from jpets.engine.results.stats import BatchObserver
from jpets.engine.tasks.entries import Entry, Tier
from jpets.engine.tasks.lowered import LoweredTask
from jpets.errors import JpetsError, NotFound, OutOfSpace, Preparing, UnknownClass
from jpets.free_memory import usual_programs_mb
from jpets.scheduling.balancing.rounds import AdaptiveInterval
from jpets.types import DEFAULT_TENANT, LoadedBackbone, Progress, Query, Result, Task, TaskName

STARTS = 4
"""Engines that start at a time: each compiles its own programs, or loads them."""


class EngineGroup(Serves):
    """``devices`` is at least one; several in place of one compute each batch together (tensor parallelism) and count
    as one here. ``host_memory_gb``, ``response_cache_mb``, ``move_mb_per_second`` and the usual ``program_memory_mb``
    are shared by all; other limits hold for each device.

    ``interval``: seconds between balancing moves; None: tasks move only when ``mover`` is told.

    It has more than 20 methods, as ``Serves`` has.
    """

    def __init__(
        self,
        backbone: LoadedBackbone,
        devices: Sequence[jax.Device | Sequence[jax.Device]],
        settings: EngineSettings | None = None,
        *,
        reserve: Iterable[Task] = (),
        coming: Mapping[ClassKey, int] | None = None,
        cache_dir: pathlib.Path | None = None,
        buckets: Sequence[Bucket] | None = None,
        interval: AdaptiveInterval | None = None,
    ) -> None:
        slices = [(some,) if isinstance(some, jax.Device) else tuple(some) for some in devices]
        every = [device for some in slices for device in some]
        if not every or len(set(every)) != len(every):
            raise ValueError(f"expected one device or more, each once, got {list(map(str, every))}")
        own = _divided(settings or EngineSettings(), len(slices))
        shapes = list(reserve)
        part = {key: math.ceil(count / len(slices)) for key, count in (coming or {}).items()}
        self._members = tuple(
            Engine(backbone, (), own, reserve=shapes, coming=part, cache_dir=cache_dir, buckets=buckets, devices=some)
            for some in slices
        )
        self._changes = threading.RLock()
        """Held while homes, or the tasks at them, change."""
        self._readers = Readers()
        self.homes = Homes(len(slices))
        self.mover = Mover(self._members, self.homes, self._readers, self._changes)
        self.balancer = Balancer(self._members, self.homes, self.mover, interval, own.move_mb_per_second * 1e6)

    @property
    def ready(self) -> bool:
        return all(member.ready for member in self._members)

    @property
    def live(self) -> bool:
        return self.balancer.live and all(member.live for member in self._members)

    def start(self, progress: Progress = lambda what, done, total: None) -> Self:
        """The first engine starts alone, as it measures the costs of programs; the others then start side by side."""
        first, *others = self._members
        progress("devices", 0, len(self._members))
        try:
            _start(first, progress)
            for member in others:
                member.costs.reload()
            with ThreadPoolExecutor(STARTS) as pool:
                for number, done in enumerate([pool.submit(_start, member) for member in others], 1):
                    progress("devices", number, len(self._members))
                    done.result()
        except BaseException:
            self.close()
            raise
        progress("devices", len(self._members), len(self._members))
        self.balancer.start()
        return self

    def close(self) -> None:
        with contextlib.ExitStack() as last_first:
            for member in reversed(self._members):
                last_first.callback(member.close)
            last_first.callback(self.balancer.close)

    def submit(
        self,
        queries: Sequence[Query],
        *,
        deadline: float | None = None,
        priority: int = 0,
        tenant: str = DEFAULT_TENANT,
    ) -> list[Future[Result]]:
        def send(device: int, some: Sequence[Query]) -> Sequence[Future[Result]]:
            return self._members[device].submit(some, deadline=deadline, priority=priority, tenant=tenant)

        with self._readers.reading():
            futures = submit_parts(queries, self._routed(queries, tenant), send)
        if self.balancer.watches:
            asked = (q.task_name(tenant) for q, own in zip(queries, futures, strict=True) if not _took_nothing(own))
            self.homes.called(Counter(name for name in asked if name is not None))
        return futures

    def _routed(self, queries: Sequence[Query], tenant: str) -> Mapping[int, Sequence[int]]:
        """The places in ``queries`` that each device gets; of several homes, the one with the fewest waiting
        queries. A device that does not work has none: it fails them at once."""
        waiting = [(not member.live, len(member.pending)) for member in self._members]
        every = tuple(range(len(self._members)))
        routed: dict[int, list[int]] = defaultdict(list)
        for at, query in enumerate(queries):
            name = query.task_name(tenant)
            home = None if name is None else self.homes.get(name)
            devices = home.devices if home is not None else every
            device = devices[0] if len(devices) == 1 else min(devices, key=waiting.__getitem__)
            down, count = waiting[device]
            waiting[device] = down, count + 1
            routed[device].append(at)
        return routed

    def lower_task(self, task: Task | LoweredTask) -> LoweredTask:
        return self._members[0].lower_task(task)  # the members are equal in all that lowering depends on

    def add_task(
        self,
        task: Task | LoweredTask,
        *,
        tenant: str = DEFAULT_TENANT,
        version: int | None = None,
        load: Callable[[], Task] | None = None,
        place: int | None = None,
    ) -> None:
        """A new task goes to the device with the fewest tasks, unless ``place`` names one.

        Where ``load`` is not given, the task itself is kept in host memory, so it may leave its device.
        """
        lowered = self.lower_task(task)
        own = lowered.task
        name, again = TaskName(tenant, own.id), load or (lambda: own)
        with self._changes:
            before = self.homes.get(name)
            chosen = before.devices[:1] if before is not None else self._in_turn(place)
            for tried, device in enumerate(chosen, start=1):
                try:
                    self._members[device].add_task(lowered, tenant=tenant, version=version, load=again)
                except OutOfSpace:
                    if tried == len(chosen):
                        raise
                else:
                    self.homes.set(name, Home((device,), again, version, classes=tuple(lowered.classes)))
                    break
            if before is not None:  # copies have the old version
                self.mover.leave(name, before.devices[1:])

    def _in_turn(self, place: int | None) -> Sequence[int]:
        """The devices that a new task is tried on, one after the other: those that work, if there are some."""
        order = list(self.homes.by_tasks())
        if place is not None:
            order.sort(key=lambda device: device != place % len(self._members))
        return [device for device in order if self._members[device].live] or order

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
        del least
        if students:
            refuse_group(id)
        name = TaskName(tenant, id)
        with self._changes:
            before = self.homes.get(name)
            device = before.devices[0] if before is not None else self._in_turn(place)[0]
            home = Home((device,), load, version, pinned, tuple(classes))
            self._members[device].register_task(
                id, load, tenant=tenant, version=version, pinned=pinned, classes=classes
            )
            self.homes.set(name, home)
            if before is not None:
                self.mover.leave(name, before.devices[1:])

    def check_task(self, task: Task | LoweredTask, *, stays: bool = True) -> None:
        lowered = self.lower_task(task)
        problem: JpetsError | None = None
        for member in self._members:
            try:
                return member.check_task(lowered, stays=stays)
            except OutOfSpace as error:
                problem = error
        assert problem is not None
        raise problem

    def prepare(self, classes: Sequence[ClassKey]) -> Future[None]:
        done: Future[None] = Future()
        parts = [member.prepare(classes) for member in self._members]

        def one_more(part: Future[None]) -> None:
            with lock:
                problem = part.exception()
                if problem is not None and not done.done():
                    done.set_exception(problem)
                elif not done.done() and all(each.done() for each in parts):
                    done.set_result(None)

        lock = threading.Lock()
        for part in parts:
            part.add_done_callback(one_more)
        return done

    def remove_task(self, task: str, *, tenant: str = DEFAULT_TENANT) -> None:
        name = TaskName(tenant, task)
        with self._changes:
            home = self.homes.remove(name)
            for device in home.devices:
                self._members[device].remove_task(task, tenant=tenant)
            self.mover.forget(name)

    def warm(self, ids: Iterable[str], *, tenant: str = DEFAULT_TENANT) -> None:
        own: dict[int, list[str]] = defaultdict(list)
        for id in ids:
            for device in self.devices_of(id, tenant=tenant):
                own[device].append(id)
        for device, some in own.items():
            self._members[device].warm(some, tenant=tenant)

    def unload(self, id: str, *, tenant: str = DEFAULT_TENANT) -> None:
        with self._readers.reading():
            devices = self.devices_of(id, tenant=tenant)
            if not devices:
                raise NotFound(f"unknown task {id!r}")
            for device in devices:
                self._members[device].unload(id, tenant=tenant)

    @property
    def warming(self) -> int:
        return sum(member.warming for member in self._members)

    def entry(self, id: str, *, tenant: str = DEFAULT_TENANT) -> Entry | None:
        with self._readers.reading():  # else it could leave the home that was just looked up
            devices = self.devices_of(id, tenant=tenant)
            return self._members[devices[0]].entry(id, tenant=tenant) if devices else None

    def tier(self, id: str, *, tenant: str = DEFAULT_TENANT) -> Tier | None:
        with self._readers.reading():
            tiers = (self._members[device].tier(id, tenant=tenant) for device in self.devices_of(id, tenant=tenant))
            return next((tier for tier in tiers if tier is not None), None)

    def uses(self) -> Mapping[TaskName, int]:
        found = Counter[TaskName]()
        for member in self._members:
            found.update(member.uses())
        return found

    def report(self) -> EngineReport:
        counts = self.mover.counts
        balance = BalanceReport(
            moves={outcome: counts[outcome] for outcome in ("moved", "copied", "failed", "rescued")},
            moved_bytes=counts["bytes"],
            leaving=self.mover.leaving,
            rounds=self.balancer.rounds,
            phi=self.balancer.phi,
        )
        return EngineReport([device for member in self._members for device in member.report().devices], balance)

    def observe(self, observer: BatchObserver) -> None:
        for member in self._members:
            member.observe(observer)

    def limit(self, spare: Sequence[float]) -> None:
        for member, more in zip(self._members, spare, strict=True):
            member.limit([more])

    @property
    def longest(self) -> int:
        return self._members[0].longest

    def beside(self, rows: int, length: int) -> int:
        return min(member.beside(rows, length) for member in self._members)

    def expect(self, classes: Sequence[ClassKey], rows: int) -> None:
        for member in self._members:
            with contextlib.suppress(UnknownClass, Preparing):  # the tasks are on others
                member.expect(classes, rows)

    def devices_of(self, id: str, *, tenant: str = DEFAULT_TENANT) -> Sequence[int]:
        home = self.homes.get(TaskName(tenant, id))
        return home.devices if home is not None else ()


def _took_nothing(answer: Future[Result]) -> bool:
    """Whether a query was answered without work of a device: from the response cache, or as it is wrong."""
    if not answer.done() or answer.cancelled() or answer.exception() is not None:
        return False
    found = answer.result()
    return found.error is not None or (found.timing is not None and found.timing.cached)


def _start(member: Engine, progress: Progress = lambda what, done, total: None) -> None:
    for bank in member.replica.banks.values():
        bank.read(0)  # compiled before a query waits for it
    member.start(progress)


def _divided(settings: EngineSettings, devices: int) -> EngineSettings:
    """One device's part of the settings that count for the whole host."""
    return dataclasses.replace(
        settings,
        host_memory_gb=settings.host_memory_gb / devices,
        response_cache_mb=-(-settings.response_cache_mb // devices),
        program_memory_mb=settings.program_memory_mb or usual_programs_mb(devices),
    )
