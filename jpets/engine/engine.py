"""The engine: queries in, results out, for any mixture of tasks over one backbone."""

from __future__ import annotations

import logging
import pathlib
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TypeVar

import jax

from jpets.config import EngineSettings
from jpets.deltas.protocol import NO_LEAD, ClassKey
from jpets.engine.answers import Answers
from jpets.engine.assembly import Row, led
from jpets.engine.background import BackgroundCompiler
from jpets.engine.bucket import Bucket, bucket_menu, core_programs, widest
from jpets.engine.classes import class_slots
from jpets.engine.cost_profile import DeltaCosts, load_profile
from jpets.engine.delta_order import delta_streams
from jpets.engine.device_memory import GIGABYTE, DeviceMemory, device_limit, slot_bytes, tree_bytes
from jpets.engine.host_loop import HostLoop, PrefetchHook
from jpets.engine.loading import TaskLoader
from jpets.engine.memory import return_free_memory
from jpets.engine.merged import MergedCopies, copies_budget
from jpets.engine.pending import Pending, PendingQueue
from jpets.engine.planner import Plan, Planner
from jpets.engine.profile import CostTable, measure
from jpets.engine.program import Family, Program, ProgramKey, ProgramStore, compile_program, default_cache_dir
from jpets.engine.program_memory import ProgramMemory
from jpets.engine.replica import Replica
from jpets.engine.residency import Residency, stand_in
from jpets.engine.response_cache import ResponseCache, response_key
from jpets.engine.results import failure
from jpets.engine.stats import Stats
from jpets.engine.tasks import DEFAULT_TENANT, Entry, Resident, TaskTable
from jpets.errors import SHUTTING_DOWN, EngineFailure, InvalidInput, JpetsError, OutOfSpace, Saturated
from jpets.model.batch import POOLINGS
from jpets.tokenizing import TextEncoder
from jpets.types import LoadedBackbone, Preprocessing, Query, Result, Task

log = logging.getLogger(__name__)

COARSE_REPEATS = 2
"""Timed runs of each core program at a first start; ``jpets profile`` measures better."""
T = TypeVar("T")
Progress = Callable[[str, int, int], None]
"""Called with (what, done, of how many)."""


class Engine:
    """Serves one backbone's tasks. ``start`` compiles and warms up; ``close`` answers what is running and stops.

    Classes (delta shapes) are fixed at start by ``tasks`` and by ``reserve``, tasks that lend only their shape.
    """

    def __init__(
        self,
        backbone: LoadedBackbone,
        tasks: Iterable[Task] = (),
        settings: EngineSettings | None = None,
        *,
        reserve: Iterable[Task] = (),
        cache_dir: pathlib.Path | None = None,
        buckets: Sequence[Bucket] | None = None,
    ) -> None:
        self.settings = settings or EngineSettings()
        self.backbone = backbone
        config = backbone.config
        longest = min(self.settings.max_length, config.max_positions)
        if buckets:
            longest = min(longest, max(bucket.longest for bucket in buckets))
        self.text = TextEncoder(backbone.tokenizer_json, config.vocab_size, config.type_vocab_size, longest)
        first = list(tasks)
        self._start_tasks = first
        device = jax.local_devices()[0]
        streams = delta_streams(self.settings, device.platform)
        limit = device_limit(device, self.settings.device_memory_gb)
        slots = class_slots(first, list(reserve), config, dict(backbone.params), self.settings, limit)
        family = Family(config, self.settings.dtype, slots, streams)
        most_tokens = max(longest, self.settings.max_batch_tokens)
        self.menu = tuple(buckets) if buckets else bucket_menu(longest, most_tokens, self.settings.max_batch_rows)
        light, heavy = (widest([key for key, _ in family.slots], heavy=h) for h in (False, True))
        self._every = [ProgramKey(b, variant) for variant in dict.fromkeys([light, heavy]) for b in self.menu]
        core = core_programs(self.menu, light, heavy)
        self.core = self._every if buckets else [ProgramKey(*pair) for pair in core]
        self.cache_dir = cache_dir or default_cache_dir()
        self.replicas = [Replica(family, backbone.params, self.text.pad_id, jax.sharding.SingleDeviceSharding(device))]
        self.memory = DeviceMemory(
            tree_bytes(self.replicas[0].params), self.replicas[0].bank_bytes(), limit, self.settings.in_flight
        )
        self.stats = Stats()
        self.hooks: list[PrefetchHook] = []
        """Called on the owner thread with every batch's queries before it is assembled."""
        self.tasks = TaskTable(dict(family.slots), reserved=self.settings.reserved_tasks)
        self._loader = TaskLoader(backbone, family, longest)
        self._answers = Answers(self.tasks, self.stats)
        self.pending = PendingQueue(self.settings.max_queue, self._answers.left)
        self.responses = ResponseCache(self.settings.response_cache_mb * 2**20)
        self.store = ProgramStore(self.cache_dir / "programs", device)
        costs = self.cache_dir / "costs" / self.store.family_name(family)
        self.costs = CostTable(costs.with_suffix(".json"), family)
        self.profile_path = costs.with_suffix(".profile.json")
        profile = load_profile(self.profile_path)
        self.deltas = DeltaCosts(profile, family) if profile else None
        """What heavy rows add to a program's time; None until ``jpets profile`` measured it."""
        memory = ProgramMemory(self.replicas, self.settings.program_memory_mb * 2**20, self.memory)
        self.compiler = BackgroundCompiler(
            family, self.store, self.cache_dir / "programs", self._add_tried, memory, device.platform
        )
        budget = copies_budget(self.settings, profiled=self.deltas is not None)
        self.merged = {
            replica: MergedCopies(replica, dict(backbone.params), budget, self.memory) for replica in self.replicas
        }
        self._planner = self._make_planner(self.replicas[0])
        self._loops = [self._loop(replica) for replica in self.replicas]
        self.residency = Residency(
            self.tasks,
            self.pending,
            self._answers,
            self.replicas,
            self._loader,
            self._row,
            self.settings.host_memory_gb * GIGABYTE,
            prefetch=self.settings.prefetch,
            busy=lambda: any(loop.busy for loop in self._loops),
        )
        self._ready = False

    @property
    def family(self) -> Family:
        return self.replicas[0].family

    @property
    def ready(self) -> bool:
        """Warm: no query will wait for a compilation."""
        return self._ready and self.live

    @property
    def live(self) -> bool:
        return self.residency.live and all(loop.live for loop in self._loops)

    def start(self, progress: Progress = lambda what, done, total: None) -> Engine:
        """Loads or compiles the core programs, measures them once, loads the tasks, starts the threads."""
        for done, key in enumerate(self.core):
            progress("executables", done, len(self.core))
            self._prepare(key)
        self.memory.check(self.replicas[0].programs)
        self.costs.save()
        progress("executables", len(self.core), len(self.core))
        for loop in self._loops:
            loop.start()
        self.residency.start()
        for done, task in enumerate(self._start_tasks):
            progress("tasks", done, len(self._start_tasks))
            self.add_task(task)
        progress("tasks", len(self._start_tasks), len(self._start_tasks))
        self._start_tasks = []
        return_free_memory()
        self.stats.count_compiles_on({ident for loop in self._loops for ident in loop.idents()})
        self._ready = True
        for copies in self.merged.values():
            copies.start()
        if self.settings.background_compile:
            rest = [key for key in self._every if key not in self.core]
            lone = [key for key in rest if key.bucket.rectangular and key.variant.has("heavy")]
            self.compiler.start(key for key in rest if key not in lone)
        return self

    def close(self) -> None:
        """Refuses new queries, answers the waiting ones with an error and those on the device normally."""
        self._ready = False
        self.compiler.close()
        for copies in self.merged.values():
            copies.close()
        self._answers.fail(self.pending.close(), Saturated(SHUTTING_DOWN))
        for loop in self._loops:
            loop.join()
        self.residency.join()
        for program in self.replicas[0].programs:
            if program.followed:  # a mere estimate must not pass for a measurement
                self.costs.set(program.key, program.seconds)
        self.costs.save()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def submit(
        self,
        queries: Sequence[Query],
        *,
        deadline: float | None = None,
        priority: int = 0,
        tenant: str = DEFAULT_TENANT,
    ) -> list[Future[Result]]:
        """One future a query, in order; cancel one to drop it. ``deadline`` is seconds from now.

        What is wrong with a single query is in its result's ``error``. What the response cache has is answered at once,
        whatever the deadline. Raises ``Saturated`` when the queue is full.
        """
        until = None if deadline is None else time.monotonic() + deadline
        prepared: list[Pending | Future[Result]] = []
        try:
            for query in queries:
                prepared.append(self._prepare_query(query, until, priority, tenant))
            if self.responses.budget:
                for at, item in enumerate(prepared):
                    prepared[at] = self._look_up(item) if isinstance(item, Pending) and not item.cold else item
            pushed_out = self.pending.put([item for item in prepared if isinstance(item, Pending)])
        except BaseException:
            self._give_back(prepared)
            raise
        if any(isinstance(item, Pending) and item.cold for item in prepared):
            self.residency.wake()
        full = Saturated("the queue is full and others have less waiting; send fewer at a time")
        self._answers.fail(pushed_out, full)
        return [item.future if isinstance(item, Pending) else item for item in prepared]

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

    def specialise(self, queries: Sequence[Query], *, tenant: str = DEFAULT_TENANT) -> ProgramKey | None:
        """Compiles now what a batch of exactly these queries would run best in, for traffic that is known ahead.

        Their tasks must be on the device. Raises ``InvalidInput`` where one is not.
        """
        prepared = [self._prepare_query(query, None, 0, tenant) for query in queries]
        self._give_back(prepared)
        if absent := [item.task for item in prepared if isinstance(item, Pending) and item.cold]:
            raise InvalidInput(f"tasks {absent[:3]} are not on the device; ask each of them once first")
        key = self._planner.ideal([item.row for item in prepared if isinstance(item, Pending)])
        if key is not None:
            self._add_tried(self.store.load(self.family, key) or self._compile(key))
        return key

    def add_task(self, task: Task, *, tenant: str = DEFAULT_TENANT, version: int | None = None) -> None:
        """Loads a task; returns when the next query sees it. An older one of the same id serves until then.

        Raises ``InvalidTask`` (another backbone), ``UnknownClass`` (no class holds it), ``OutOfSpace`` (no free slot).
        """
        loaded = self._loader.load(task, self.tasks)
        keys = list(loaded.contents)
        slots = self._with_numbers(keys, partial(self.tasks.reserve, keys, tenant))
        try:
            contents = {key: (slots[key], arrays) for key, arrays in loaded.contents.items()}
            for done in [replica.stage(partial(replica.write, contents)) for replica in self.replicas]:
                self._wait_for(done)
        except BaseException:
            self.tasks.release(slots)
            raise
        self.tasks.publish(loaded.resident(tenant, slots, version))

    def register_task(
        self,
        id: str,
        load: Callable[[], Task],
        *,
        tenant: str = DEFAULT_TENANT,
        version: int | None = None,
        pinned: bool = False,
    ) -> None:
        """Makes a task known without reading it: ``load`` is called when a query asks for it and it is not on the
        device, again whenever it has left for other tasks. ``pinned``: once there it stays.

        Its classes must be among the engine's (``reserve``); what is wrong with it, its queries hear.
        """
        self.tasks.register(tenant, id, load, version, pinned=pinned)

    def check_task(self, task: Task) -> None:
        """Raises what ``add_task`` would raise if it were called now; changes nothing."""
        keys = self._loader.keys(task, self.tasks)
        self._with_numbers(keys, partial(self.tasks.check, keys))

    def remove_task(self, task: str, *, tenant: str = DEFAULT_TENANT) -> None:
        """Queries already submitted still get their answer, but those that wait for it to come. Raises ``NotFound``."""
        self.tasks.remove(tenant, task)

    def _with_numbers(self, keys: Sequence[ClassKey], place: Callable[[], T]) -> T:
        """``place()``, which may raise ``OutOfSpace``: that is raised with what the device holds."""
        try:
            return place()
        except OutOfSpace as error:
            wanted = sum(slot_bytes(key, self.family.config, self.family.dtype) for key in keys)
            raise OutOfSpace(
                f"{error.message}. The task takes {wanted / 1e6:.1f} MB; in use, with free slots of other classes: "
                f"{self.memory.use(self.replicas[0].programs)}"
            ) from None

    def _wait_for(self, done: Future[None]) -> None:
        """Waits as long as there is a thread that can do it."""
        while True:
            try:
                return done.result(timeout=1.0)
            except TimeoutError:
                if not self.live and not done.done():
                    raise EngineFailure("the engine is not running; start it, or start a new one") from None

    def _give_back(self, prepared: Iterable[Pending | Future[Result]]) -> None:
        """Lets go of the tasks of queries that will not run."""
        for item in prepared:
            if isinstance(item, Pending) and item.resident is not None:
                self.tasks.done(item.resident)

    def _prepare_query(
        self, query: Query, deadline: float | None, priority: int, tenant: str
    ) -> Pending | Future[Result]:
        found: Resident | Entry | None = None
        try:
            if query.task is not None:
                found = self.tasks.acquire(tenant, query.task)
            if isinstance(found, Entry):
                row = stand_in(query, self.text.longest)
                return Pending(query.task, None, row, deadline, priority, tenant, absent=found, query=query)
            return Pending(query.task, found, self._row(query, found), deadline, priority, tenant)
        except BaseException as error:
            if isinstance(found, Resident):
                self.tasks.done(found)
            if not isinstance(error, JpetsError):
                raise
            future: Future[Result] = Future()
            future.set_result(failure(query.task, error))
            self.stats.answered(error.code)
            return future

    def _row(self, query: Query, resident: Resident | None) -> Row:
        """Raises what is wrong with the query."""
        if resident is None:
            tokens = self.text.encode(query, Preprocessing(), self.text.longest)
            return Row(tokens.ids, tokens.types, {}, POOLINGS.index("mean"))
        tokens = self.text.encode(query, resident.task.preprocessing, resident.longest)
        row = Row(tokens.ids, tokens.types, resident.slots, POOLINGS.index(resident.pooling))
        return row if resident.lead == NO_LEAD else led(row, resident.lead, self.text.pad_id)

    def _look_up(self, item: Pending) -> Pending | Future[Result]:
        """The kept answer to a query, or the query, which will then have its own kept."""
        key = response_key(item.tenant, item.resident.loading if item.resident else None, item.row)
        result = self.responses.get(key)
        if result is None:
            item.keep = partial(self.responses.keep, key)
            return item
        self._answers.give(item, result)
        return item.future

    def _prepare(self, key: ProgramKey) -> None:
        """Loads or compiles a program, and runs it: the first run is slow, and its cost must be known."""
        known = self.costs.get(key)
        repeats = COARSE_REPEATS if known is None else 0
        program = self.store.load(self.family, key)
        if program is not None:
            try:
                seconds = measure(self.replicas[0], program, repeats)
            except jax.errors.JaxRuntimeError:
                log.exception("a stored program does not run and is compiled again")
                self.store.forget(self.family, key)
                program = None
        if program is None:
            program = self._compile(key)
            seconds = measure(self.replicas[0], program, repeats)
        program.seconds = seconds if known is None else known
        self.costs.set(key, program.seconds)
        self._add_everywhere(program)

    def _compile(self, key: ProgramKey) -> Program:
        """A program compiled here and kept; one that was loaded must not be kept again, it would lack its code."""
        program = compile_program(self.family, key)
        self.store.save(self.family, program)
        return program

    def _make_planner(self, replica: Replica) -> Planner:
        return Planner(replica, self.costs, self.deltas, self.settings, self.menu, self.merged[replica])

    def _loop(self, replica: Replica) -> HostLoop:
        planner = self._make_planner(replica)
        return HostLoop(
            replica, planner, self.pending, self._answers, self.stats, self.settings, self._want, self.hooks
        )

    def _want(self, plan: Plan) -> None:
        if plan.wanted is not None:
            self.compiler.want(plan.wanted)

    def _add_everywhere(self, program: Program) -> None:
        for replica in self.replicas:
            replica.add_program(program)

    def _add_tried(self, program: Program) -> None:
        """A program that comes while queries are served runs once between two batches before it gets any."""
        program.seconds = self.costs.estimate(program.key)
        for replica in self.replicas:
            self._wait_for(replica.stage(partial(measure, replica, program, 0)))
        self._add_everywhere(program)
