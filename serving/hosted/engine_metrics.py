"""What engines count, as Prometheus metrics: read at the time of a scrape, added up over devices."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.samples import Sample

from jpets.engine.engine import Engine
from jpets.engine.group.group import EngineGroup
from jpets.engine.interface import Serves

Counted = Counter[tuple[str, tuple[tuple[str, str], ...]]]
"""Values of counters, by name and labels."""
COUNTERS: Sequence[tuple[str, str, Callable[[Engine], float]]] = (
    ("batches", "Device batches", lambda e: e.stats.batches),
    ("fallbacks", "Batches for which a better executable was still missing", lambda e: e.stats.fallbacks),
    ("real_tokens", "Tokens of queries", lambda e: e.stats.real_tokens),
    ("computed_tokens", "Tokens computed, padding included", lambda e: e.stats.computed_tokens),
    ("request_path_compiles", "Compilations that queries had to wait for", lambda e: e.stats.request_path_compiles),
    ("out_of_device_memory", "Batches and tasks that a device had no room for", lambda e: e.stats.out_of_memory),
    ("background_compiles", "Programs added in the background", lambda e: e.compiler.compiled),
    ("background_compile_failures", "Programs that could not be compiled", lambda e: e.compiler.failed),
    ("response_cache_hits", "Queries answered from the response cache", lambda e: e.responses.hits),
    ("response_cache_misses", "Queries that the response cache had no answer for", lambda e: e.responses.misses),
    ("programs_evicted", "Idle programs that left for wanted ones", lambda e: e.compiler.memory.evicted),
    ("tasks_brought_bytes", "Bytes of tasks written to devices", lambda e: e.residency.counts["bytes"]),
    ("tasks_failed", "Times that a task could not be brought", lambda e: e.residency.counts["failed"]),
    ("tasks_evicted", "Tasks that left their device for others", lambda e: e.tasks.evictions),
)
GAUGES: Sequence[tuple[str, str, Callable[[Engine], float]]] = (
    ("background_compiles_waiting", "Programs yet to be compiled", lambda e: e.compiler.waiting),
    ("program_bytes", "Host memory of programs, estimated", lambda e: e.compiler.memory.used),
    ("response_cache_bytes", "Host memory of kept answers, estimated", lambda e: e.responses.bytes),
    ("host_bytes", "Host memory of tasks, in the device's form", lambda e: e.residency.host_bytes),
    ("queue_depth", "Queries waiting for a batch", lambda e: len(e.pending)),
    ("merged_tasks", "Hot tasks that have merged weights", lambda e: len(e.merged.copies)),
)


def engine_metrics(engines: Sequence[Serves], gone: Counted) -> Iterator[Metric]:
    """Of all backbones together; counters go on from what engines counted that are ``gone``."""
    for metric in _of(engines):
        if metric.type == "counter":
            name = f"{metric.name}_total"
            values = Counter({labels: value for (of, labels), value in gone.items() if of == name})
            values.update({tuple(sample.labels.items()): sample.value for sample in metric.samples})
            metric.samples = [Sample(name, dict(labels), value) for labels, value in values.items()]
        yield metric


def counted(engine: Serves) -> Counted:
    """What an engine has counted until now."""
    counters = [metric for metric in _of([engine]) if metric.type == "counter"]
    return Counter({(s.name, tuple(s.labels.items())): s.value for metric in counters for s in metric.samples})


def _of(engines: Sequence[Serves]) -> Iterator[Metric]:
    members = [member for engine in engines for member in engine.members]
    for name, text, count in COUNTERS:
        yield CounterMetricFamily(f"jpets_{name}", text, value=sum(map(count, members)))
    for name, text, count in GAUGES:
        yield GaugeMetricFamily(f"jpets_{name}", text, value=sum(map(count, members)))
    answers = sum((Counter(member.stats.answers) for member in members), Counter[str]())
    yield _counter("jpets_answers", "Queries answered, by ok or the error's code", "outcome", answers)
    yield from _residency(members)
    yield from _classes(members)
    yield from _device_memory(engines)
    yield from _devices(engines)
    if groups := [engine for engine in engines if isinstance(engine, EngineGroup)]:
        yield from _groups(groups)


def _residency(members: Sequence[Engine]) -> Iterator[Metric]:
    """Which tier tasks are in, and what it takes that there are several."""
    tiers = sum((Counter[str](member.residency.tiers()) for member in members), Counter[str]())
    asked = {
        "hit": sum(member.tasks.hits for member in members),
        "miss": sum(member.tasks.misses for member in members),
    }
    brought = {
        "host": sum(member.residency.counts["host"] for member in members),
        "repository": sum(member.residency.counts["load"] for member in members),
    }
    text = "Tasks that each tier holds; the repository has all, one on several devices counts for each"
    yield _gauge("jpets_tasks", text, "tier", {tier: tiers[tier] for tier in ("device", "host", "repository")})
    text = "Queries that found their task on the device, or had to wait"
    yield _counter("jpets_residency_queries", text, "outcome", asked)
    yield _counter("jpets_tasks_brought", "Tasks written to devices, by where they were", "tier", brought)


def _classes(members: Sequence[Engine]) -> Iterator[Metric]:
    """Classes that differ only in their layers share a label, and are added up."""
    used, total, size = Counter[str](), Counter[str](), Counter[str]()
    for member in members:
        bank_bytes = member.replica.bank_bytes()
        for key, (taken, slots) in member.tasks.occupancy().items():
            used[str(key)] += taken
            total[str(key)] += slots
            size[str(key)] += bank_bytes[key]
    yield _gauge("jpets_slots_used", "Bank slots in use", "class", used)
    yield _gauge("jpets_slots", "Bank slots, the free ones included", "class", total)
    yield _gauge("jpets_bank_bytes", "Device memory of banks, all devices", "class", size)


def _device_memory(engines: Sequence[Serves]) -> Iterator[Metric]:
    parts, limits, found = Counter[tuple[str, str]](), dict[str, float](), dict[str, float]()
    for engine in engines:
        for number, member in enumerate(engine.members):
            replica, device = member.replica, str(number)
            for part, size in member.memory.use(replica.programs)._asdict().items():
                parts[device, part] += size
            if math.isfinite(member.memory.limit):
                limits[device] = limits.get(device, 0) + member.memory.limit
            if counted := replica.device.memory_stats():
                found[device] = counted["bytes_in_use"]
    text = "Device memory: arrays exactly, working memory as compiled"
    taken = GaugeMetricFamily("jpets_device_bytes", text, labels=["device", "part"])
    for labels, size in parts.items():
        taken.add_metric(list(labels), size)
    yield taken
    yield _gauge("jpets_device_limit_bytes", "Device memory that may be used", "device", limits)
    yield _gauge("jpets_device_bytes_in_use", "What the device itself counts", "device", found)


def _devices(engines: Sequence[Serves]) -> Iterator[Metric]:
    def each(value: Callable[[Engine], float]) -> dict[str, float]:
        found: dict[str, float] = {}
        for engine in engines:
            for number, member in enumerate(engine.members):
                found[str(number)] = found.get(str(number), 0) + value(member)
        return found

    yield _gauge("jpets_device_tasks", "Tasks whose queries a device gets", "device", each(lambda e: len(e.tasks)))
    yield _gauge("jpets_device_queue_depth", "Queries that wait at a device", "device", each(lambda e: len(e.pending)))
    yield _counter("jpets_device_batches", "Batches of a device", "device", each(lambda e: e.stats.batches))


def _groups(groups: Sequence[EngineGroup]) -> Iterator[Metric]:
    counts = sum((group.mover.counts for group in groups), Counter[str]())
    made = {outcome: counts[outcome] for outcome in ("moved", "copied", "failed")}
    yield _counter("jpets_migrations", "Tasks that went to another device", "outcome", made)
    yield CounterMetricFamily("jpets_migrated_bytes", "Bytes of tasks copied between devices", value=counts["bytes"])
    rounds, leaving = sum(group.balancer.rounds for group in groups), sum(group.mover.leaving for group in groups)
    yield CounterMetricFamily("jpets_balance_rounds", "Times that devices' loads were compared", value=rounds)
    text = "Least over most load of a device at the last comparison; 1 where chance explains it"
    yield GaugeMetricFamily("jpets_balance", text, value=min(group.balancer.phi for group in groups))
    text = "Old places of moved tasks that still have queries"
    yield GaugeMetricFamily("jpets_migrations_leaving", text, value=leaving)


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
