"""Makes the parts of an engine and joins them, in the order of a query's way. Nothing is compiled or started here,
but for trials of kernels."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import jax

from jpets.config import EngineSettings
from jpets.deltas.operators import usual_operators
from jpets.deltas.protocol import ClassKey
from jpets.engine.batch.bucket import Bucket, Variant, bucket_menu, steady_menu, widest
from jpets.engine.compilation.background import BackgroundCompiler
from jpets.engine.compilation.core import Core
from jpets.engine.compilation.growth import Growth
from jpets.engine.compilation.program_memory import ProgramMemory
from jpets.engine.compilation.readiness import Programs
from jpets.engine.compilation.remembered import RememberedPrograms
from jpets.engine.costs.batch_limits import MANY_TOKENS, with_batch_limits
from jpets.engine.costs.cost_table import CostTable
from jpets.engine.costs.idle_measurement import IdleMeasurement
from jpets.engine.costs.live_profile import LiveProfile, figures_file
from jpets.engine.costs.pace import Pace
from jpets.engine.device.classes import class_slots
from jpets.engine.device.memory import GIGABYTE, DeviceMemory, device_limit, held, staged_rows, tree_bytes
from jpets.engine.device.replica import Replica
from jpets.engine.kernels.choosing import before_trials, choose, known_operators
from jpets.engine.liveness import Liveness
from jpets.engine.loop.host_loop import HostLoop
from jpets.engine.planning.menu import Menu
from jpets.engine.planning.merged import MergedCopies, copies_budget
from jpets.engine.planning.planner import Planner
from jpets.engine.planning.trunks import shares_trunks
from jpets.engine.programs.delta_order import delta_streams
from jpets.engine.programs.mesh import MeshSlice
from jpets.engine.programs.program import Family, ProgramKey, chained_on
from jpets.engine.programs.store import ProgramStore
from jpets.engine.queue.answers import Answers
from jpets.engine.queue.intake import Intake
from jpets.engine.queue.pending_queue import PendingQueue
from jpets.engine.queue.response_cache import ResponseCache
from jpets.engine.queue.submitting import Submissions
from jpets.engine.residency.adding import TaskAdder
from jpets.engine.residency.delivering import Delivery
from jpets.engine.residency.fetching import Fetcher
from jpets.engine.residency.host_cache import HostCache
from jpets.engine.residency.loading import TaskLoader
from jpets.engine.residency.residency import ON_THE_WAY, Residency
from jpets.engine.residency.writing import SlotWriter
from jpets.engine.results.stats import Stats
from jpets.engine.tasks.table import TaskTable
from jpets.engine.workloads.registry import workload_named
from jpets.engine.workloads.workload import Workload
from jpets.free_memory import usual_programs_mb
from jpets.types import LoadedBackbone, Task


@dataclass(frozen=True)
class Frame:
    """What an engine can run, known before it has a device's memory."""

    settings: EngineSettings
    """With what was left to the device."""
    workload: Workload
    mesh: MeshSlice
    limit: float
    """Bytes that the engine may take of each device."""
    family: Family
    cores: Core
    offered: Sequence[ProgramKey]
    """Each bucket of the menu with the light classes, for idle moments; others come when batches miss them."""
    core: Sequence[ProgramKey]
    """The programs that must be ready before the first query."""
    figures: pathlib.Path
    """The file of measured costs."""


@dataclass(frozen=True)
class Compilation:
    """The costs of programs, and the parts that make programs ready."""

    costs: CostTable
    profile: LiveProfile
    programs: Programs
    compiler: BackgroundCompiler
    remembered: RememberedPrograms
    growth: Growth


@dataclass(frozen=True)
class Parts:
    """An engine's parts."""

    replica: Replica
    memory: DeviceMemory
    stats: Stats
    tasks: TaskTable
    intake: Intake
    answers: Answers
    pending: PendingQueue
    responses: ResponseCache
    submissions: Submissions
    compilation: Compilation
    measurement: IdleMeasurement
    merged: MergedCopies
    menu: Menu
    planner: Planner
    """For questions outside the traffic; the loop has a planner of its own."""
    loop: HostLoop
    residency: Residency
    adder: TaskAdder
    liveness: Liveness


def make_frame(
    backbone: LoadedBackbone,
    tasks: Sequence[Task],
    settings: EngineSettings,
    reserve: Iterable[Task],
    coming: Mapping[ClassKey, int],
    buckets: Sequence[Bucket] | None,
    devices: Sequence[jax.Device],
    folder: pathlib.Path,
) -> Frame:
    """The arguments are ``Engine``'s. Raises ``OutOfSpace`` where ``tasks`` do not fit, and ``InvalidInput`` if
    the setting ``kernels`` or ``tables`` has no sense here."""
    config = backbone.config
    longest = min(settings.max_length, config.max_positions)
    if buckets:
        longest = min(longest, max(bucket.longest for bucket in buckets))
    mesh = MeshSlice(devices or jax.local_devices()[:1], config.heads)
    device = mesh.devices[0]
    limit = device_limit(device, settings.device_memory_gb)
    platform = device.platform
    usual = settings.max_batch_tokens or MANY_TOKENS
    staged = staged_rows(
        settings, config, platform, limit, max([usual, longest, *(bucket.tokens for bucket in buckets or ())])
    )
    workload = workload_named(backbone.kind)(backbone, longest, staged_rows=staged)
    operators = before_trials(usual_operators(platform), settings.kernels, mesh)
    streams = delta_streams(settings, platform)
    steady = settings.policy == "steady"
    # A program that is made one function while it serves gives other bits, if only the last ones.
    chained = chained_on(mesh) and not (steady and settings.background_compile)
    family = Family(workload.network, settings.dtype, (), streams, operators, chained)
    figures = figures_path(folder, ProgramStore(folder / "programs", mesh), family)
    measured = figures_file(figures).read()
    settings = with_batch_limits(settings, platform, measured.packed if measured else ())
    slots = class_slots(tasks, list(reserve), coming, workload.network, dict(workload.params), settings, limit, mesh)
    family = dataclasses.replace(family, slots=slots)
    most_tokens = max(longest, settings.max_batch_tokens)
    menu = bucket_menu(longest, most_tokens, settings.max_batch_rows)
    if buckets or steady:  # of which each is in the core
        menu = tuple(buckets or steady_menu(longest, most_tokens, settings.max_batch_rows))
    classes = [key for key, _ in slots]
    light, core = widest(classes, heavy=False), Core(menu, bool(buckets) or steady)
    offered = [ProgramKey(bucket, light) for bucket in menu]
    return Frame(settings, workload, mesh, limit, family, core, offered, core.programs(classes), figures)


def figures_path(folder: pathlib.Path, store: ProgramStore, family: Family) -> pathlib.Path:
    """The file of measured costs; ``folder`` is the cache folder. It does not depend on what trials of kernels find:
    figures follow what batches take."""
    return folder / "costs" / f"{store.shape_name(family)}.profile.json"


def make_menu(frame: Frame, settings: EngineSettings) -> Menu:
    """The buckets that programs may be compiled for; those that were given are all."""
    menu, chosen = frame.cores
    most = 0 if chosen else max(bucket.tokens for bucket in menu)
    network = frame.family.network
    return Menu(menu, lambda bucket: network.arithmetic(bucket, Variant()), settings.max_batch_rows, most)


def make_parts(backbone: LoadedBackbone, frame: Frame, folder: pathlib.Path) -> Parts:
    """Makes all parts; parameters and empty banks go to the device. ``folder`` is the cache folder.

    At the first start on a GPU the candidates of operators are tried before that.
    """
    settings, workload = frame.settings, frame.workload
    largest = max(frame.core, key=lambda key: (key.bucket.tokens, key.variant.has("heavy")))
    chosen = choose(frame.family, largest, frame.mesh, settings.kernels, folder / "costs")
    family = dataclasses.replace(frame.family, operators=chosen.operators)
    stats, liveness = Stats(), Liveness()
    replica = Replica(family, workload.params, frame.mesh, workload.inputs)
    workload.attach(replica.write_rows)
    at_a_time = settings.in_flight + 1  # and the first run of a program that arrived
    taken = tree_bytes(held(family.network, replica.params, frame.mesh))
    mapped = tree_bytes(replica.params) - taken
    memory = DeviceMemory(taken, replica.bank_bytes(), frame.limit, at_a_time, mapped)
    tasks = TaskTable(dict(family.slots), reserved=settings.reserved_tasks)

    answers = Answers(tasks, stats)
    intake = Intake(workload, tasks, stats)
    pending = PendingQueue(settings.max_queue, answers.left)
    responses = ResponseCache(settings.response_cache_mb * 2**20)

    replica.choose = partial(known_operators, program=largest, mesh=frame.mesh, choice=chosen.choice)
    compilation = _compilation(replica, tasks, memory, liveness, settings, frame, folder)
    budget = copies_budget(settings)
    merged = MergedCopies(replica, dict(backbone.params), budget, memory)
    compiler, menu = compilation.compiler, make_menu(frame, settings)
    make_planner = partial(Planner, replica, compilation.costs, compilation.profile, settings, menu, merged)
    planner, own = make_planner(), make_planner(compiler if settings.background_compile else None)
    loop = HostLoop(replica, workload, own, pending, answers, stats, settings, compiler.want)
    compiler.idle_seconds = lambda: loop.idle_seconds
    measurement = IdleMeasurement(
        replica,
        compilation.profile,
        memory,
        compiler.compile_other,
        lambda: loop.idle_seconds,
        lambda: {key: used for key, (used, _) in tasks.occupancy().items()},
        liveness.wait,
    )
    loader = TaskLoader(backbone, family, workload.longest)
    writer = SlotWriter(replica, stats, lambda: merged.clear())
    host_bytes = settings.host_memory_gb * GIGABYTE
    used, on_the_way = compilation.growth.used, host_bytes * ON_THE_WAY
    delivery = Delivery(tasks, pending, answers, replica, writer, workload.row, on_the_way, used)
    host = HostCache(host_bytes * (1 - ON_THE_WAY))
    fetcher = Fetcher(loader, tasks, host, delivery, replica.task_bytes)
    residency = Residency(
        tasks, pending, answers, fetcher, delivery, prefetch=settings.prefetch, busy=lambda: loop.busy
    )
    adder = TaskAdder(loader, tasks, replica, writer, memory, liveness.wait, used)
    shared = family.config.layers if shares_trunks(replica, settings) else 0
    submissions = Submissions(intake, pending, answers, residency.wake, shared)
    liveness.parts += [lambda: residency.live, lambda: loop.live]
    liveness.running += [lambda: residency.live, lambda: loop.runs]
    return Parts(
        replica,
        memory,
        stats,
        tasks,
        intake,
        answers,
        pending,
        responses,
        submissions,
        compilation,
        measurement,
        merged,
        menu,
        planner,
        loop,
        residency,
        adder,
        liveness,
    )


def _compilation(
    replica: Replica,
    tasks: TaskTable,
    memory: DeviceMemory,
    liveness: Liveness,
    settings: EngineSettings,
    frame: Frame,
    folder: pathlib.Path,
) -> Compilation:
    """``folder`` is the cache folder."""
    family, programs_folder = replica.family, folder / "programs"
    store = ProgramStore(programs_folder, replica.mesh)
    common = dataclasses.replace(family, operators=family.operators.within(()))  # trials find more at later starts
    name = folder / "costs" / store.family_name(common)
    costs = CostTable(name.with_suffix(".json"), family, lambda: replica.family.operators)
    costs.pace = Pace(lambda: replica.programs)
    profile = LiveProfile(replica, costs, frame.figures)
    programs = Programs(replica, store, costs, liveness.wait, alike=settings.policy == "steady")
    room = ProgramMemory(replica, (settings.program_memory_mb or usual_programs_mb()) << 20, memory)
    compiler = BackgroundCompiler(replica, store, programs_folder, programs.add, room, programs.exchange)
    growth = Growth(
        replica,
        tasks,
        memory,
        programs,
        compiler if settings.background_compile else None,
        frame.cores,
        1 << settings.slots.bit_length(),
        liveness.wait,
    )
    remembered = RememberedPrograms(frame.figures.with_suffix("").with_suffix(".programs.json"))
    return Compilation(costs, profile, programs, compiler, remembered, growth)
