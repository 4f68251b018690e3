"""The engine: queries in, results out, for any mixture of tasks over one backbone."""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future

import jax

from jpets.config import EngineSettings
from jpets.deltas.protocol import ClassKey
from jpets.engine.batch.bucket import FULL, Bucket, lone_buckets, make_variant
from jpets.engine.build import make_frame, make_parts
from jpets.engine.compilation.remembered import KEEP_SECONDS
from jpets.engine.interface import Serves, refuse_group
from jpets.engine.programs.cache_folder import open_cache
from jpets.engine.programs.program import Family, ProgramKey
from jpets.engine.queue.pending import Pending
from jpets.engine.report import (
    ClassReport,
    CostsReport,
    DeviceReport,
    EngineReport,
    ProgramsReport,
    ResponsesReport,
    RowsReport,
    TasksReport,
)
from jpets.engine.residency.loading import LoadedTask
from jpets.engine.results.stats import BatchObserver
from jpets.engine.tasks.entries import Entry, Tier
from jpets.engine.tasks.lowered import LoweredTask
from jpets.errors import SHUTTING_DOWN, InvalidInput, JpetsError, Saturated, UnknownClass
from jpets.free_memory import return_free_memory
from jpets.repeated import Repeated
from jpets.types import DEFAULT_TENANT, LoadedBackbone, Progress, Query, Result, Task, TaskName


class Engine(Serves):
    """Serves one backbone's tasks. ``start`` compiles and warms up; ``close`` answers what is running and stops.

    Classes (delta shapes) are fixed at start by ``tasks``, by ``reserve`` (tasks of which only the shape is used) and
    by ``coming``: how many tasks of which classes will be registered. ``devices`` compute each batch together (one by
    default); ``EngineGroup`` has an engine on each.

    It holds its parts and starts and stops them; the work is theirs.

    It has more than 20 methods, as most are those of ``Serves``.
    """

    def __init__(
        self,
        backbone: LoadedBackbone,
        tasks: Iterable[Task] = (),
        settings: EngineSettings | None = None,
        *,
        reserve: Iterable[Task] = (),
        coming: Mapping[ClassKey, int] | None = None,
        cache_dir: pathlib.Path | None = None,
        buckets: Sequence[Bucket] | None = None,
        devices: Sequence[jax.Device] = (),
    ) -> None:
        self.backbone = backbone
        self._start_tasks = list(tasks)
        self.cache_dir = open_cache(cache_dir)
        frame = make_frame(
            backbone,
            self._start_tasks,
            settings or EngineSettings(),
            reserve,
            coming or {},
            buckets,
            devices,
            self.cache_dir,
        )
        self.settings = frame.settings
        self.workload = frame.workload
        self.text = frame.workload.text
        self.core, self._offered = frame.core, frame.offered

        parts = make_parts(backbone, frame, self.cache_dir)
        self.replica = parts.replica
        self.memory = parts.memory
        self.stats = parts.stats
        self.hooks = parts.loop.hooks
        """Called on the owner thread with every batch's queries before it is assembled."""
        self.tasks = parts.tasks
        self.intake = parts.intake
        self.pending = parts.pending
        self.responses = parts.responses
        self.costs, self.profile = parts.compilation.costs, parts.compilation.profile
        self.compiler, self.growth = parts.compilation.compiler, parts.compilation.growth
        self.merged = parts.merged
        self.menu = parts.menu
        self.residency = parts.residency
        self._answers = parts.answers
        self._submissions = parts.submissions
        self._programs = parts.compilation.programs
        self._planner = parts.planner
        self._loop = parts.loop
        self._adder = parts.adder
        self._liveness = parts.liveness
        self._measurement = parts.measurement
        self._remembered = parts.compilation.remembered
        self._keeper = Repeated(self._keep, "keeping what was learnt of programs", KEEP_SECONDS)
        self._ready = False

    @property
    def family(self) -> Family:
        return self.replica.family

    def devices_of(self, id: str, *, tenant: str = DEFAULT_TENANT) -> Sequence[int]:
        return (0,) if self.tasks.entry(tenant, id) is not None else ()

    def entry(self, id: str, *, tenant: str = DEFAULT_TENANT) -> Entry | None:
        return self.tasks.entry(tenant, id)

    @property
    def warming(self) -> int:
        return self.residency.warming

    def tier(self, id: str, *, tenant: str = DEFAULT_TENANT) -> Tier | None:
        entry = self.tasks.entry(tenant, id)
        return self.residency.tier(entry) if entry is not None else None

    def uses(self) -> Mapping[TaskName, int]:
        return self.tasks.uses()

    def report(self) -> EngineReport:
        stats, bank_bytes, found = self.stats, self.replica.bank_bytes(), self.replica.device.memory_stats()
        return EngineReport(
            (
                DeviceReport(
                    answers=dict(stats.answers),
                    batches=stats.batches,
                    fallbacks=stats.fallbacks,
                    missed_seconds=stats.missed_seconds,
                    computing_seconds=stats.computing_seconds,
                    predicted_seconds=stats.predicted_seconds,
                    real_tokens=stats.real_tokens,
                    computed_tokens=stats.computed_tokens,
                    request_path_compiles=stats.request_path_compiles,
                    out_of_memory=stats.out_of_memory,
                    waiting=len(self.pending),
                    busy=self.busy,
                    programs=ProgramsReport.of(self.compiler),
                    costs=CostsReport.of(self.profile),
                    responses=ResponsesReport.of(self.responses),
                    rows=RowsReport.of(self.workload.row_cache),
                    tasks=TasksReport.of(self.tasks, self.residency, self.merged),
                    classes={
                        key: ClassReport(taken, slots, bank_bytes[key])
                        for key, (taken, slots) in self.tasks.occupancy().items()
                    },
                    kernels=tuple(self.replica.family.operators.entries()),
                    memory=self.memory.use(self.replica.programs),
                    limit=self.memory.limit,
                    bytes_in_use=found["bytes_in_use"] if found else None,
                ),
            )
        )

    def observe(self, observer: BatchObserver) -> None:
        self.stats.observers.append(observer)

    def limit(self, spare: Sequence[float]) -> None:
        (more,) = spare
        self.memory.limit = self.memory.use(self.replica.programs).total + more

    @property
    def longest(self) -> int:
        return self.text.longest

    def beside(self, rows: int, length: int) -> int:
        return self.profile.current.beside(rows, length)

    def expect(self, classes: Sequence[ClassKey], rows: int) -> None:
        if not self.settings.background_compile or not self.menu.grows:
            return
        variant = make_variant(dict.fromkeys(self.tasks.fitting.fit(classes), FULL))
        self.compiler.offer([ProgramKey(own, variant) for own in lone_buckets(rows, self.longest)], first=True)

    def idle(self, id: str, *, tenant: str = DEFAULT_TENANT) -> bool:
        """Whether no query for this task waits or runs."""
        entry = self.tasks.entry(tenant, id)
        if entry is None:
            return True
        if self.pending.waiting_for(entry):
            return False
        resident = entry.resident  # read after the cold queries: they become the resident's, never the other way round
        return resident is None or not resident.queries

    def query_weight(self, id: str, *, tenant: str = DEFAULT_TENANT) -> float | None:
        """Predicted cost of a query of usual length in a batch, as a multiple of that without a delta.

        Devices measure times of their own; the ratios of equal devices agree. None for a task that is not on
        the device.
        """
        entry = self.tasks.entry(tenant, id)
        resident = entry.resident if entry is not None else None
        return self._planner.query_weight(resident.slots) if resident is not None else None

    def slots_of(self, id: str, *, tenant: str = DEFAULT_TENANT) -> Mapping[ClassKey, int]:
        """The classes in which a task has a slot, with the bytes that are on the device; 0 while it is not there."""
        entry = self.tasks.entry(tenant, id)
        resident = entry.resident if entry is not None else None
        if resident is not None:
            return {key: self.replica.banks[key].slot_bytes for key in resident.slots}
        return dict.fromkeys(entry.keys or (), 0) if entry is not None else {}

    @property
    def busy(self) -> bool:
        """Whether a batch runs on the device."""
        return self._loop.busy

    @property
    def ready(self) -> bool:
        return self._ready and self.live

    @property
    def live(self) -> bool:
        return self._liveness.live

    def start(self, progress: Progress = lambda what, done, total: None) -> Engine:
        """Loads or compiles the core programs, measures them once, loads the tasks, starts the threads. Where that
        fails, the engine is closed."""
        try:
            self._start(progress)
        except BaseException:
            self.close()
            raise
        return self

    def _start(self, progress: Progress) -> None:
        for done, key in enumerate(self.core):
            progress("programs", done, len(self.core))
            self._programs.prepare(key)
        self.memory.check(self.replica.programs)
        self.costs.save()
        progress("programs", len(self.core), len(self.core))
        self._loop.start()
        self.residency.start()
        for done, task in enumerate(self._start_tasks):
            progress("tasks", done, len(self._start_tasks))
            self.add_task(task)
        progress("tasks", len(self._start_tasks), len(self._start_tasks))
        self._start_tasks = []
        return_free_memory()
        self.stats.count_compiles_on(self._loop.idents())
        self._ready = True
        self.merged.start()
        if self.settings.background_compile:
            known = self._remembered.read(self.replica.classes, lambda key: self.menu.allows(key.bucket))
            self.menu.learn(key.bucket for key in known if key.trunk is None and not key.bucket.rectangular)
            self.compiler.start(key for key in dict.fromkeys([*known, *self._offered]) if key not in self.core)
            self._measurement.start()
        self._keeper.start()

    def _keep(self) -> None:
        """Costs of programs, and which there are, for the next start."""
        programs = self.replica.programs
        self.costs.follow_up(programs)
        self._remembered.write(programs, self.core)

    def refuse_waiting(self, error: JpetsError) -> None:
        """Answers all queries that wait, and run in no batch yet, with ``error``."""
        self._answers.fail(self.pending.drain(), error)

    def close(self) -> None:
        self._ready = False
        with contextlib.ExitStack() as last_first:  # each is done even if another one raises
            last_first.callback(self._keep)
            last_first.callback(self._keeper.close)
            last_first.callback(self._measurement.close)
            last_first.callback(self.residency.join)
            last_first.callback(self._loop.join)
            last_first.callback(lambda: self._answers.fail(self.pending.close(), Saturated(SHUTTING_DOWN)))
            last_first.callback(self.merged.close)
            last_first.callback(self.growth.close)
            last_first.callback(self.compiler.close)

    def submit(
        self,
        queries: Sequence[Query],
        *,
        deadline: float | None = None,
        priority: int = 0,
        tenant: str = DEFAULT_TENANT,
    ) -> list[Future[Result]]:
        return self._submissions.submit(queries, deadline, priority, tenant, self.responses)

    def specialise(self, queries: Sequence[Query], *, tenant: str = DEFAULT_TENANT) -> ProgramKey | None:
        """Compiles the best program for a batch of exactly these queries, as one function, for traffic that is known in
        advance.

        Their tasks must be on the device. Raises ``InvalidInput`` where one is not.
        """
        prepared = [self.intake.prepare(query, None, 0, tenant) for query in queries]
        self.intake.give_back(prepared)
        if absent := [item.task for item in prepared if isinstance(item, Pending) and item.cold]:
            raise InvalidInput(f"tasks {absent[:3]} are not on the device; ask each of them once first")
        waiting = [item for item in prepared if isinstance(item, Pending)]
        self._submissions.share(waiting)
        key = self._planner.ideal(waiting)
        if key is not None:
            self._programs.add(self._programs.get_whole(key))
        return key

    def lower_task(self, task: Task | LoweredTask) -> LoweredTask:
        return self._adder.lower(task)

    def add_task(
        self,
        task: Task | LoweredTask,
        *,
        tenant: str = DEFAULT_TENANT,
        version: int | None = None,
        load: Callable[[], Task] | None = None,
        place: int | None = None,
    ) -> None:
        del place  # there is one device
        self._adder.add(task, tenant, version, load)
        self.residency.wake()  # queries may wait for an older version, which is being read

    def adopt(
        self,
        loaded: LoadedTask,
        *,
        tenant: str = DEFAULT_TENANT,
        version: int | None = None,
        load: Callable[[], Task] | None = None,
        cost: float = 0.0,
        pinned: bool = False,
    ) -> None:
        """``add_task`` for a task loaded already, here or by an engine of the same classes, in ``cost`` seconds.

        Raises ``OutOfSpace``, ``Saturated``; then nothing changed.
        """
        self._adder.adopt(loaded, tenant, version, load=load, cost=cost, pinned=pinned)
        self.residency.wake()

    def export(self, id: str, *, tenant: str = DEFAULT_TENANT) -> LoadedTask | None:
        """The task for ``take_in`` and ``adopt`` of another engine of the same classes, still on this one's device;
        None if the task is not there."""
        return self._adder.export(id, tenant)

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
        del place, least  # there is one device, and no group
        if students:
            refuse_group(id)
        try:
            keys = tuple(self.tasks.fitting.fit(classes)) or None
        except (UnknownClass, Saturated):
            keys = None
        self.growth.used(keys or ())
        self.tasks.register(tenant, id, load, version, pinned=pinned, keys=keys)

    def warm(self, ids: Iterable[str], *, tenant: str = DEFAULT_TENANT) -> None:
        entries = (self.tasks.entry(tenant, id) for id in ids)
        self.residency.warm([entry for entry in entries if entry is not None])

    def unload(self, id: str, *, tenant: str = DEFAULT_TENANT) -> None:
        self.tasks.unload(tenant, id)

    def check_task(self, task: Task | LoweredTask, *, stays: bool = True) -> None:
        self._adder.check(task, stays=stays)

    def prepare(self, classes: Sequence[ClassKey]) -> Future[None]:
        return self.growth.want(classes)

    def remove_task(self, task: str, *, tenant: str = DEFAULT_TENANT) -> None:
        self.residency.host.drop(self.tasks.remove(tenant, task))
        self.residency.wake()
