"""Prometheus metrics of one service, in a registry of their own."""

from __future__ import annotations

import math
from collections import Counter as Counts
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from jpets.engine.engine import Engine
from jpets.engine.stats import BatchRecord
from serving.service import Service

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Metrics:
    """What is counted as it happens; the rest is read from the engine when somebody asks."""

    def __init__(self, service: Service) -> None:
        self.registry = CollectorRegistry()
        self._requests = Counter(
            "jpets_http_requests",
            "HTTP requests by route template and status",
            ["route", "status"],
            registry=self.registry,
        )
        self._latency = Histogram(
            "jpets_http_request_seconds",
            "Time from request to answer",
            ["route"],
            buckets=SECONDS,
            registry=self.registry,
        )
        self._batch = Histogram(
            "jpets_batch_seconds",
            "Time from a batch's dispatch to its results",
            buckets=SECONDS,
            registry=self.registry,
        )
        self._queued = Histogram(
            "jpets_queue_seconds", "Time that a query waited for its batch", buckets=SECONDS, registry=self.registry
        )
        ProcessCollector(registry=self.registry)
        self.registry.register(ServiceCollector(service))
        service.observe(self._ran)

    def request(self, route: str, status: int, seconds: float) -> None:
        self._requests.labels(route, str(status)).inc()
        self._latency.labels(route).observe(seconds)

    def render(self) -> bytes:
        """The text that Prometheus scrapes."""
        return generate_latest(self.registry)

    def _ran(self, batch: BatchRecord) -> None:
        self._batch.observe(batch.seconds)
        for seconds in batch.queued:
            self._queued.observe(seconds)


class ServiceCollector(Collector):
    """Reads a service's and its engine's counters at the time of a scrape."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def collect(self) -> Iterator[Metric]:
        service = self._service
        yield GaugeMetricFamily("jpets_live", "1 unless only a new process can help", value=service.live)
        yield GaugeMetricFamily("jpets_ready", "1 when queries are answered at full speed", value=service.ready)
        yield GaugeMetricFamily("jpets_tasks_skipped", "Stored tasks that could not be loaded", value=service.skipped)
        if service.started is not None:
            yield from _counters(service.started)
            yield from _classes(service.started)
            yield from _device_memory(service.started)


def _counters(engine: Engine) -> Iterator[Metric]:
    stats, compiler, responses = engine.stats, engine.compiler, engine.responses
    answers = CounterMetricFamily("jpets_answers", "Queries answered, by ok or the error's code", labels=["outcome"])
    for outcome, count in list(stats.answers.items()):
        answers.add_metric([outcome], count)
    yield answers
    for name, text, count in (
        ("jpets_batches", "Device batches", stats.batches),
        ("jpets_fallbacks", "Batches for which a better executable was still missing", stats.fallbacks),
        ("jpets_real_tokens", "Tokens of queries", stats.real_tokens),
        ("jpets_computed_tokens", "Tokens computed, padding included", stats.computed_tokens),
        ("jpets_request_path_compiles", "Compilations that queries had to wait for", stats.request_path_compiles),
        ("jpets_out_of_device_memory", "Batches that the device had no room for", stats.out_of_memory),
        ("jpets_background_compiles", "Programs added in the background", compiler.compiled),
        ("jpets_background_compile_failures", "Programs that could not be compiled", compiler.failed),
        ("jpets_response_cache_hits", "Queries answered from the response cache", responses.hits),
        ("jpets_response_cache_misses", "Queries that the response cache had no answer for", responses.misses),
        ("jpets_programs_evicted", "Idle programs that left for wanted ones", compiler.memory.evicted),
    ):
        yield CounterMetricFamily(name, text, value=count)
    yield GaugeMetricFamily("jpets_background_compiles_waiting", "Programs yet to be compiled", value=compiler.waiting)
    yield GaugeMetricFamily("jpets_program_bytes", "Host memory of programs, estimated", value=compiler.memory.used)
    yield GaugeMetricFamily(
        "jpets_response_cache_bytes", "Host memory of kept answers, estimated", value=responses.bytes
    )
    yield GaugeMetricFamily("jpets_queue_depth", "Queries waiting for a batch", value=len(engine.pending))
    copies = sum(len(merged.copies) for merged in engine.merged.values())
    yield GaugeMetricFamily("jpets_merged_tasks", "Hot tasks that have merged weights", value=copies)
    yield GaugeMetricFamily("jpets_resident_tasks", "Tasks on the device", value=len(engine.tasks.all()))


def _device_memory(engine: Engine) -> Iterator[Metric]:
    taken = GaugeMetricFamily(
        "jpets_device_bytes", "Device memory: arrays exactly, working memory as compiled", labels=["device", "part"]
    )
    limits = GaugeMetricFamily("jpets_device_limit_bytes", "Device memory that may be used", labels=["device"])
    found = GaugeMetricFamily("jpets_device_bytes_in_use", "What the device itself counts", labels=["device"])
    for number, replica in enumerate(engine.replicas):
        for part, size in engine.memory.use(replica.programs)._asdict().items():
            taken.add_metric([str(number), part], size)
        if math.isfinite(engine.memory.limit):
            limits.add_metric([str(number)], engine.memory.limit)
        counted = replica.device.memory_stats()
        if counted:
            found.add_metric([str(number)], counted["bytes_in_use"])
    yield from (taken, limits, found)


def _classes(engine: Engine) -> Iterator[Metric]:
    """Classes that differ only in their layers share a label, and are added up."""
    used, total, size = Counts[str](), Counts[str](), Counts[str]()
    for key, (taken, slots) in engine.tasks.occupancy().items():
        used[str(key)] += taken
        total[str(key)] += slots
        size[str(key)] += sum(replica.bank_bytes()[key] for replica in engine.replicas)
    for name, text, counts in (
        ("jpets_slots_used", "Bank slots in use", used),
        ("jpets_slots", "Bank slots, the free ones included", total),
        ("jpets_bank_bytes", "Device memory of banks, all replicas", size),
    ):
        family = GaugeMetricFamily(name, text, labels=["class"])
        for label, count in counts.items():
            family.add_metric([label], count)
        yield family
