"""The engine: queries in, results out, for any mixture of tasks over one backbone."""

from __future__ import annotations

import contextlib
import logging
import pathlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TypeVar

import jax

from jpets.config import EngineSettings
from jpets.deltas.bank import SlotArrays
from jpets.deltas.protocol import ClassKey
from jpets.engine.batch.bucket import Bucket, bucket_menu, core_programs, widest
from jpets.engine.compilation.background import BackgroundCompiler
from jpets.engine.compilation.growth import Growth
from jpets.engine.compilation.program_memory import ProgramMemory
from jpets.engine.compilation.readiness import Programs
from jpets.engine.costs.cost_profile import DeltaCosts, load_profile
from jpets.engine.costs.cost_table import CostTable
from jpets.engine.device.classes import class_slots
from jpets.engine.device.memory import GIGABYTE, DeviceMemory, device_limit, is_out_of_memory, slot_bytes, tree_bytes
from jpets.engine.device.replica import Replica, SlotContents
from jpets.engine.interface import Progress, Serves
from jpets.engine.loop.host_loop import HostLoop, PrefetchHook
from jpets.engine.planning.merged import MergedCopies, copies_budget
from jpets.engine.planning.planner import Plan, Planner
from jpets.engine.programs.cache_folder import open_cache
from jpets.engine.programs.delta_order import delta_streams
from jpets.engine.programs.mesh import MeshSlice
from jpets.engine.programs.program import Family, ProgramKey, ProgramStore
from jpets.engine.queue.answers import Answers
from jpets.engine.queue.intake import Intake
from jpets.engine.queue.pending import Pending, PendingQueue
from jpets.engine.queue.response_cache import ResponseCache, response_key
from jpets.engine.residency.loading import LoadedTask, TaskLoader
from jpets.engine.residency.residency import Residency
from jpets.engine.results.results import worded
from jpets.engine.results.stats import Stats
from jpets.engine.tasks.entries import DEFAULT_TENANT
from jpets.engine.tasks.table import TaskTable
from jpets.engine.workloads.registry import workload_named
from jpets.errors import SHUTTING_DOWN, EngineFailure, InvalidInput, OutOfSpace, Saturated, UnknownClass
from jpets.free_memory import return_free_memory
from jpets.tokenizing import TextEncoder
from jpets.types import LoadedBackbone, Query, Result, Task

log = logging.getLogger(__name__)

T = TypeVar("T")


class Engine(Serves):
    """Serves one backbone's tasks. ``start`` compiles and warms up; ``close`` answers what is running and stops.

    Classes (delta shapes) are fixed at start by ``tasks``, by ``reserve``, tasks that lend only their shape, and by
    ``coming``: how many tasks of which classes will be registered. ``devices`` compute each batch together (one by
    default); ``EngineGroup`` gives each its own.
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
        self.settings = settings or EngineSettings()
        self.backbone = backbone
        config = backbone.config
        longest = min(self.settings.max_length, config.max_positions)
        if buckets:
            longest = min(longest, max(bucket.longest for bucket in buckets))
        self.workload = workload_named(backbone.kind)(backbone, longest)
        network = self.workload.network
        first = list(tasks)
        self._start_tasks = first
        mesh = MeshSlice(devices or jax.local_devices()[:1], config.heads)
        device = mesh.devices[0]
        streams = delta_streams(self.settings, device.platform)
        limit = device_limit(device, self.settings.device_memory_gb)
        slots = class_slots(
            first, list(reserve), coming or {}, network, dict(backbone.params), self.settings, limit, mesh
        )
        family = Family(network, self.settings.dtype, slots, streams)
        most_tokens = max(longest, self.settings.max_batch_tokens)
        self.menu = tuple(buckets) if buckets else bucket_menu(longest, most_tokens, self.settings.max_batch_rows)
        light, heavy = (widest([key for key, _ in family.slots], heavy=h) for h in (False, True))
        self._every = [ProgramKey(b, variant) for variant in dict.fromkeys([light, heavy]) for b in self.menu]
        core = core_programs(self.menu, light, heavy)
        self.core = self._every if buckets else [ProgramKey(*pair) for pair in core]
        self.cache_dir = open_cache(cache_dir)
        self.replica = Replica(family, backbone.params, mesh, self.workload.inputs)
        at_a_time = self.settings.in_flight + 1  # and the first run of a program that arrived
        self.memory = DeviceMemory(tree_bytes(self.replica.params), self.replica.bank_bytes(), limit, at_a_time)
        self.stats = Stats()
        self.tasks = TaskTable(dict(family.slots), reserved=self.settings.reserved_tasks)
        self._loader = TaskLoader(backbone, family, longest)
        self._answers = Answers(self.tasks, self.stats)
        self.intake = Intake(self.workload, self.tasks, self.stats)
        self.pending = PendingQueue(self.settings.max_queue, self._answers.left)
        self.responses = ResponseCache(self.settings.response_cache_mb * 2**20)
        store = ProgramStore(self.cache_dir / "programs", mesh)
        costs = self.cache_dir / "costs" / store.family_name(family)
        self.costs = CostTable(costs.with_suffix(".json"), family)
        self.profile_path = costs.with_suffix(".profile.json")
        profile = load_profile(self.profile_path)
        self.deltas = DeltaCosts(profile, family) if profile else None
        """What heavy rows add to a program's time; None until ``jpets profile`` measured it."""
        self._programs = Programs(self.replica, store, self.costs, self._wait_for)
        memory = ProgramMemory(self.replica, self.settings.program_memory_mb * 2**20, self.memory)
        self.compiler = BackgroundCompiler(self.replica, store, self.cache_dir / "programs", self._programs.add, memory)
        self.growth = Growth(
            self.replica,
            self.tasks,
            self.memory,
            self._programs,
            self.compiler if self.settings.background_compile else None,
            self.menu,
            1 << self.settings.slots.bit_length(),
            self._wait_for,
        )
        budget = copies_budget(self.settings, profiled=self.deltas is not None)
        self.merged = MergedCopies(self.replica, dict(backbone.params), budget, self.memory)
        self._planner = self._make_planner()
        self._loop = HostLoop(
            self.replica,
            self.workload,
            self._make_planner(),
            self.pending,
            self._answers,
            self.stats,
            self.settings,
            self._want,
        )
        self.residency = Residency(
            self.tasks,
            self.pending,
            self._answers,
            self.replica,
            self._loader,
            self.workload.row,
            self._write,
            self.settings.host_memory_gb * GIGABYTE,
            prefetch=self.settings.prefetch,
            busy=lambda: self._loop.busy,
        )
        self._ready = False

    @property
    def family(self) -> Family:
        return self.replica.family

    @property
    def text(self) -> TextEncoder:
        return self.workload.text

    @property
    def hooks(self) -> list[PrefetchHook]:
        """Called on the owner thread with every batch's queries before it is assembled."""
        return self._loop.hooks

    @property
    def members(self) -> Sequence[Engine]:
        return (self,)

    def devices_of(self, id: str, *, tenant: str = DEFAULT_TENANT) -> Sequence[int]:
        return (0,) if self.tasks.entry(tenant, id) is not None else ()

    def idle(self, id: str, *, tenant: str = DEFAULT_TENANT) -> bool:
        """Whether no query for this task waits or runs."""
        entry = self.tasks.entry(tenant, id)
        if entry is None:
            return True
        if self.pending.waiting_for(entry):
            return False
        resident = entry.resident  # read after the cold queries: they become its own, never the other way round
        return resident is None or not resident.queries

    def query_weight(self, id: str, *, tenant: str = DEFAULT_TENANT) -> float | None:
        """How many times as long as without a delta a query of usual length is predicted to take in a batch.

        Devices measure times of their own; as a ratio the answers of equal ones agree. None for a task that is not on
        the device.
        """
        entry = self.tasks.entry(tenant, id)
        resident = entry.resident if entry is not None else None
        return self._planner.query_weight(resident.slots) if resident is not None else None

    @property
    def busy(self) -> bool:
        """Whether a batch is on the device."""
        return self._loop.busy

    @property
    def ready(self) -> bool:
        return self._ready and self.live

    @property
    def live(self) -> bool:
        return self.residency.live and self._loop.live

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
            progress("executables", done, len(self.core))
            self._programs.prepare(key)
        self.memory.check(self.replica.programs)
        self.costs.save()
        progress("executables", len(self.core), len(self.core))
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
            rest = [key for key in self._every if key not in self.core]
            lone = [key for key in rest if key.bucket.rectangular and key.variant.has("heavy")]
            self.compiler.start(key for key in rest if key not in lone)

    def close(self) -> None:
        self._ready = False
        with contextlib.ExitStack() as last_first:  # each is done, whatever another one raises
            last_first.callback(self._keep_costs)
            last_first.callback(self.residency.join)
            last_first.callback(self._loop.join)
            last_first.callback(lambda: self._answers.fail(self.pending.close(), Saturated(SHUTTING_DOWN)))
            last_first.callback(self.merged.close)
            last_first.callback(self.growth.close)
            last_first.callback(self.compiler.close)

    def _keep_costs(self) -> None:
        for program in self.replica.programs:
            if program.followed:  # a mere estimate must not pass for a measurement
                self.costs.set(program.key, program.seconds)
        self.costs.save()

    def submit(
        self,
        queries: Sequence[Query],
        *,
        deadline: float | None = None,
        priority: int = 0,
        tenant: str = DEFAULT_TENANT,
    ) -> list[Future[Result]]:
        until = None if deadline is None else time.monotonic() + deadline
        prepared: list[Pending | Future[Result]] = []
        try:
            for query in queries:
                prepared.append(self.intake.prepare(query, until, priority, tenant))
            if self.responses.budget:
                for at, item in enumerate(prepared):
                    prepared[at] = self._look_up(item) if isinstance(item, Pending) and not item.cold else item
            pushed_out = self.pending.put([item for item in prepared if isinstance(item, Pending)])
        except BaseException:
            self.intake.give_back(prepared)
            raise
        if any(isinstance(item, Pending) and item.cold for item in prepared):
            self.residency.wake()
        full = Saturated("the queue is full and others have less waiting; send fewer at a time")
        self._answers.fail(pushed_out, full)
        return [item.future if isinstance(item, Pending) else item for item in prepared]

    def specialise(self, queries: Sequence[Query], *, tenant: str = DEFAULT_TENANT) -> ProgramKey | None:
        """Compiles now what a batch of exactly these queries would run best in, for traffic that is known ahead.

        Their tasks must be on the device. Raises ``InvalidInput`` where one is not.
        """
        prepared = [self.intake.prepare(query, None, 0, tenant) for query in queries]
        self.intake.give_back(prepared)
        if absent := [item.task for item in prepared if isinstance(item, Pending) and item.cold]:
            raise InvalidInput(f"tasks {absent[:3]} are not on the device; ask each of them once first")
        key = self._planner.ideal([item.row for item in prepared if isinstance(item, Pending)])
        if key is not None:
            self._programs.add(self._programs.get(key))
        return key

    def add_task(
        self,
        task: Task,
        *,
        tenant: str = DEFAULT_TENANT,
        version: int | None = None,
        load: Callable[[], Task] | None = None,
    ) -> None:
        began = time.monotonic()
        loaded = self._loader.load(task, self.tasks)
        if load is None:
            self.adopt(loaded, tenant=tenant, version=version)
            return
        try:
            cost = time.monotonic() - began
            self.adopt(loaded.outlined(), tenant=tenant, version=version, load=load, cost=cost)
        except OutOfSpace:
            if self.tasks.hopeless(loaded.contents):
                raise
            self.tasks.register(tenant, task.id, load, version, keys=tuple(loaded.contents))

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
        """``add_task`` for what is loaded already, here or by an engine of the same classes, in ``cost`` seconds.

        Raises ``OutOfSpace``, ``Saturated``; then nothing changed.
        """
        keys = list(loaded.contents)
        slots = self._with_numbers(keys, partial(self.tasks.reserve, keys, tenant))
        try:
            contents = {key: (slots[key], arrays) for key, arrays in loaded.contents.items()}
            self._wait_for(self.replica.stage(partial(self._write, contents)))
        except BaseException:
            self.tasks.release(slots)
            raise
        self.tasks.publish(loaded.resident(tenant, slots, version), load, cost, pinned=pinned)
        self.growth.used(keys)

    def export(self, id: str, *, tenant: str = DEFAULT_TENANT) -> LoadedTask | None:
        """What another engine of the same classes can ``take_in`` and ``adopt``, still on this one's device; None where
        the task is not there."""
        entry = self.tasks.entry(tenant, id)
        resident = self.tasks.hold(entry, 1) if entry is not None else None
        if resident is None:
            return None
        try:
            contents: dict[ClassKey, SlotArrays] = {}
            self._wait_for(self.replica.stage(lambda: contents.update(self.replica.read(resident.slots))))
            return LoadedTask(resident.task, contents, resident.pooling, resident.longest, resident.lead)
        finally:
            self.tasks.done(resident)

    def register_task(
        self,
        id: str,
        load: Callable[[], Task],
        *,
        tenant: str = DEFAULT_TENANT,
        version: int | None = None,
        pinned: bool = False,
        classes: Sequence[ClassKey] = (),
    ) -> None:
        try:
            keys = tuple(self.tasks.fit(classes)) or None
        except (UnknownClass, Saturated):
            keys = None
        self.growth.used(keys or ())
        self.tasks.register(tenant, id, load, version, pinned=pinned, keys=keys)

    def warm(self, ids: Iterable[str], *, tenant: str = DEFAULT_TENANT) -> None:
        entries = (self.tasks.entry(tenant, id) for id in ids)
        self.residency.warm([entry for entry in entries if entry is not None])

    def check_task(self, task: Task, *, stays: bool = True) -> None:
        keys = self._loader.keys(task, self.tasks)
        if stays or self.tasks.hopeless(keys):
            self._with_numbers(keys, partial(self.tasks.check, keys))

    def prepare(self, classes: Sequence[ClassKey]) -> Future[None]:
        return self.growth.want(classes)

    def remove_task(self, task: str, *, tenant: str = DEFAULT_TENANT) -> None:
        self.residency.host.drop(self.tasks.remove(tenant, task))

    def _with_numbers(self, keys: Sequence[ClassKey], place: Callable[[], T]) -> T:
        """``place()``, which may raise ``OutOfSpace``: that is raised with what the device holds."""
        try:
            return place()
        except OutOfSpace as error:
            wanted = sum(slot_bytes(key, self.family.config, self.family.dtype, self.replica.mesh) for key in keys)
            raise OutOfSpace(
                f"{error.message}. The task takes {wanted / 1e6:.1f} MB; in use, with free slots of other classes: "
                f"{self.memory.use(self.replica.programs)}"
            ) from None

    def _write(self, contents: SlotContents) -> None:
        """Owner thread only. Puts a task into its slots; where the device has no room, again without merged copies.

        Raises ``Saturated`` where it has none then.
        """
        for last in (False, True):
            try:
                self.replica.write(contents)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                self.stats.had_no_memory()
                if last:
                    raise Saturated("the device has no memory to take the task in now; try again") from error
                self.merged.clear()
            else:
                return

    def _wait_for(self, done: Future[None]) -> None:
        """Waits as long as there is a thread that can do it."""
        while True:
            try:
                return done.result(timeout=1.0)
            except TimeoutError:
                if not self.live and not done.done():
                    raise EngineFailure("the engine is not running; start it, or start a new one") from None

    def _look_up(self, item: Pending) -> Pending | Future[Result]:
        """The kept answer to a query, or the query, which will then have its own kept."""
        key = response_key(item.tenant, item.resident.loading if item.resident else None, item.row)
        result = self.responses.get(key)
        if result is None:
            item.keep = partial(self.responses.keep, key)
            return item
        self._answers.give(item, worded(result, item.row.passage))
        return item.future

    def _make_planner(self) -> Planner:
        return Planner(self.replica, self.costs, self.deltas, self.settings, self.menu, self.merged)

    def _want(self, plan: Plan) -> None:
        if plan.wanted is not None:
            self.compiler.want(plan.wanted, plan.missed)
