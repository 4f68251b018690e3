"""What engines count, as Prometheus metrics: read at the time of a scrape, added up over devices."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.samples import Sample

from jpets.engine.interface import Serves
from jpets.engine.report import BalanceReport, DeviceReport, EngineReport, StudentsReport, TasksReport
from jpets.engine.tasks.entries import Tier

Counted = Counter[tuple[str, tuple[tuple[str, str], ...]]]
"""Values of counters, by name and labels."""
COUNTERS: Sequence[tuple[str, str, Callable[[DeviceReport], float]]] = (
    ("batches", "Device batches", lambda d: d.batches),
    ("fallbacks", "Batches for which a better program was still missing", lambda d: d.fallbacks),
    (
        "missed_seconds",
        "Predicted seconds by which batches would have been faster in missing programs",
        lambda d: d.missed_seconds,
    ),
    ("computing_seconds", "Seconds that devices took for batches", lambda d: d.computing_seconds),
    ("predicted_seconds", "Seconds that batches were predicted to take", lambda d: d.predicted_seconds),
    ("real_tokens", "Tokens of queries", lambda d: d.real_tokens),
    ("computed_tokens", "Tokens computed, padding included", lambda d: d.computed_tokens),
    ("request_path_compiles", "Compilations that queries had to wait for", lambda d: d.request_path_compiles),
    ("out_of_device_memory", "Batches and tasks that a device had no room for", lambda d: d.out_of_memory),
    (
        "background_compiles",
        "Programs added in the background, or compiled anew",
        lambda d: d.programs.compiled,
    ),
    ("background_compile_failures", "Programs that could not be compiled", lambda d: d.programs.failed),
    ("response_cache_hits", "Queries answered from the response cache", lambda d: d.responses.hits),
    ("response_cache_misses", "Queries that the response cache had no answer for", lambda d: d.responses.misses),
    ("staged_row_hits", "Different rows of tables in a batch that its device had", lambda d: d.rows.hits),
    ("staged_row_misses", "Different rows of tables in a batch that the host brought", lambda d: d.rows.misses),
    ("programs_evicted", "Idle programs that left for wanted ones", lambda d: d.programs.evicted),
    ("tasks_brought_bytes", "Bytes of tasks written to devices", lambda d: d.tasks.brought_bytes),
    ("tasks_failed", "Times that a task could not be brought", lambda d: d.tasks.failed),
    ("tasks_evicted", "Tasks that left their device for others", lambda d: d.tasks.evicted),
)
GAUGES: Sequence[tuple[str, str, Callable[[DeviceReport], float]]] = (
    ("background_compiles_waiting", "Programs yet to be compiled", lambda d: d.programs.waiting),
    ("cost_classes_measured", "Classes of deltas whose costs were measured", lambda d: d.costs.measured),
    ("cost_classes_coarse", "Classes of deltas whose costs are estimates so far", lambda d: d.costs.coarse),
    ("program_bytes", "Host memory of programs, estimated", lambda d: d.programs.host_bytes),
    ("response_cache_bytes", "Host memory of kept answers, estimated", lambda d: d.responses.bytes),
    ("host_bytes", "Host memory of tasks, in the device's form", lambda d: d.tasks.host_bytes),
    ("queue_depth", "Queries waiting for a batch", lambda d: d.waiting),
    ("merged_tasks", "Hot tasks that have merged weights", lambda d: d.tasks.merged),
)
BROUGHT_FROM: Sequence[Tier] = ("host", "repository")


def engine_metrics(engines: Sequence[Serves], gone: Counted) -> Iterator[Metric]:
    """Of all backbones together; counters go on from the values (``gone``) of engines that have gone."""
    for metric in _of([engine.report() for engine in engines]):
        if metric.type == "counter":
            name = f"{metric.name}_total"
            values = Counter({labels: value for (of, labels), value in gone.items() if of == name})
            values.update({tuple(sample.labels.items()): sample.value for sample in metric.samples})
            metric.samples = [Sample(name, dict(labels), value) for labels, value in values.items()]
        yield metric


def counted(engine: Serves) -> Counted:
    """What an engine has counted until now."""
    counters = [metric for metric in _of([engine.report()]) if metric.type == "counter"]
    return Counter({(s.name, tuple(s.labels.items())): s.value for metric in counters for s in metric.samples})


def _of(engines: Sequence[EngineReport]) -> Iterator[Metric]:
    devices = [device for engine in engines for device in engine.devices]
    for name, text, count in COUNTERS:
        yield CounterMetricFamily(f"jpets_{name}", text, value=sum(map(count, devices)))
    for name, text, count in GAUGES:
        yield GaugeMetricFamily(f"jpets_{name}", text, value=sum(map(count, devices)))
    answers = sum((Counter(device.answers) for device in devices), Counter[str]())
    yield _counter("jpets_answers", "Queries answered, by ok or the error's code", "outcome", answers)
    yield from _residency([device.tasks for device in devices])
    yield from _classes(devices)
    yield from _kernels(devices)
    yield from _device_memory(engines)
    yield from _devices(engines)
    if students := [engine.students for engine in engines if engine.students is not None]:
        yield from _students(students)
    if balances := [engine.balance for engine in engines if engine.balance is not None]:
        yield from _balance(balances)


def _residency(devices: Sequence[TasksReport]) -> Iterator[Metric]:
    """The tier that each task is in, and the work of moving tasks between tiers."""
    tiers = sum((Counter[str](tasks.tiers) for tasks in devices), Counter[str]())
    asked = {"hit": sum(tasks.hits for tasks in devices), "miss": sum(tasks.misses for tasks in devices)}
    brought: dict[str, int] = {tier: sum(tasks.brought[tier] for tasks in devices) for tier in BROUGHT_FROM}
    text = "Tasks that each tier holds; the repository has all, one on several devices counts for each"
    yield _gauge("jpets_tasks", text, "tier", {tier: tiers[tier] for tier in ("device", "host", "repository")})
    text = "Queries that found their task on the device, or had to wait"
    yield _counter("jpets_residency_queries", text, "outcome", asked)
    yield _counter("jpets_tasks_brought", "Tasks written to devices, by where they were", "tier", brought)


def _classes(devices: Sequence[DeviceReport]) -> Iterator[Metric]:
    """Devices have the same classes, which are added up."""
    used, total, size = Counter[str](), Counter[str](), Counter[str]()
    for device in devices:
        for key, found in device.classes.items():
            used[str(key)] += found.used
            total[str(key)] += found.slots
            size[str(key)] += found.bytes
    yield _gauge("jpets_slots_used", "Bank slots in use", "class", used)
    yield _gauge("jpets_slots", "Bank slots, the free ones included", "class", total)
    yield _gauge("jpets_bank_bytes", "Device memory of banks, all devices", "class", size)


def _kernels(devices: Sequence[DeviceReport]) -> Iterator[Metric]:
    """What computes each operator: found at the first start, or set by ``--kernels``."""
    count = Counter(entry for device in devices for entry in device.kernels)
    text = "Devices on which a candidate computes an operator; without a class, of all classes that are not named"
    chosen = GaugeMetricFamily("jpets_kernel_choice", text, labels=["class", "operator", "candidate"])
    for labels, number in sorted(count.items()):
        chosen.add_metric(labels, number)
    yield chosen


def _device_memory(engines: Sequence[EngineReport]) -> Iterator[Metric]:
    parts, limits, found = Counter[tuple[str, str]](), dict[str, float](), dict[str, float]()
    for number, device in _numbered(engines):
        for part, size in device.memory._asdict().items():
            parts[number, part] += size
        if math.isfinite(device.limit):
            limits[number] = limits.get(number, 0) + device.limit
        if device.bytes_in_use is not None:
            found[number] = device.bytes_in_use
    text = "Device memory: arrays exactly, working memory as compiled"
    taken = GaugeMetricFamily("jpets_device_bytes", text, labels=["device", "part"])
    for labels, size in parts.items():
        taken.add_metric(list(labels), size)
    yield taken
    yield _gauge("jpets_device_limit_bytes", "Device memory that may be used", "device", limits)
    yield _gauge("jpets_device_bytes_in_use", "What the device itself counts", "device", found)


def _devices(engines: Sequence[EngineReport]) -> Iterator[Metric]:
    def each(value: Callable[[DeviceReport], float]) -> dict[str, float]:
        found: dict[str, float] = {}
        for number, device in _numbered(engines):
            found[number] = found.get(number, 0) + value(device)
        return found

    yield _gauge("jpets_device_tasks", "Tasks whose queries a device gets", "device", each(lambda d: d.tasks.known))
    yield _gauge("jpets_device_queue_depth", "Queries that wait at a device", "device", each(lambda d: d.waiting))
    yield _counter("jpets_device_batches", "Batches of a device", "device", each(lambda d: d.batches))


def _numbered(engines: Sequence[EngineReport]) -> Iterator[tuple[str, DeviceReport]]:
    """Every device of every engine with its number: engines of several backbones are on the same devices."""
    for engine in engines:
        yield from ((str(number), device) for number, device in enumerate(engine.devices))


def _balance(groups: Sequence[BalanceReport]) -> Iterator[Metric]:
    made = {outcome: sum(group.moves[outcome] for group in groups) for outcome in groups[0].moves}
    yield _counter("jpets_migrations", "Tasks that went to another device", "outcome", made)
    moved, rounds = sum(group.moved_bytes for group in groups), sum(group.rounds for group in groups)
    yield CounterMetricFamily("jpets_migrated_bytes", "Bytes of tasks copied between devices", value=moved)
    yield CounterMetricFamily("jpets_balance_rounds", "Times that devices' loads were compared", value=rounds)
    text = "Least over most load of a device at the last comparison; 1 where chance explains it"
    yield GaugeMetricFamily("jpets_balance", text, value=min(group.phi for group in groups))
    text = "Old places of moved tasks that still have queries"
    yield GaugeMetricFamily("jpets_migrations_leaving", text, value=sum(group.leaving for group in groups))


def _students(found: Sequence[StudentsReport]) -> Iterator[Metric]:
    """Groups of students: how many answer, and how many answers each number of them made."""
    answers = sum((Counter({str(size): count for size, count in own.answers.items()}) for own in found), Counter[str]())
    yield _counter("jpets_students_answers", "Answers of groups, by the number of students", "students", answers)
    text = "Mean share of the teacher's score that groups keep, by the number of students, as far as they say"
    kept = {str(size): share for size, share in _of_largest(found).kept.items()}
    yield _gauge("jpets_students_kept_score", text, "students", kept)
    text = "Students of the largest group that answer now"
    yield GaugeMetricFamily("jpets_students_answering", text, value=_of_largest(found).answering)
    yield GaugeMetricFamily("jpets_students_groups", "Groups of students", value=sum(own.groups for own in found))
    text = "Times that one student fewer answered, as queries waited"
    yield CounterMetricFamily("jpets_students_drops", text, value=sum(own.drops for own in found))
    text = "Times that one student more answered, after a quiet while"
    yield CounterMetricFamily("jpets_students_additions", text, value=sum(own.additions for own in found))


def _of_largest(found: Sequence[StudentsReport]) -> StudentsReport:
    """That of the backbone with the largest group; of several, the one where most were dropped."""
    return max(found, key=lambda own: (own.largest, -own.answering))


def _gauge(name: str, text: str, label: str, values: dict[str, float] | Counter[str]) -> Metric:
    return _labelled(GaugeMetricFamily(name, text, labels=[label]), values.items())


def _counter(name: str, text: str, label: str, values: dict[str, float] | dict[str, int] | Counter[str]) -> Metric:
    return _labelled(CounterMetricFamily(name, text, labels=[label]), values.items())


def _labelled(
    family: GaugeMetricFamily | CounterMetricFamily, values: Iterable[tuple[str, float]]
) -> GaugeMetricFamily | CounterMetricFamily:
    for label, value in values:
        family.add_metric([label], value)
    return family
