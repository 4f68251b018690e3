"""Prometheus metrics of one service, in a registry of their own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from jpets.engine.results.stats import BatchRecord
from serving.hosted.engine_metrics import engine_metrics
from serving.hosted.services import Services
from serving.jobs.service import Jobs
from serving.jobs.states import JobStateName

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Metrics:
    """Counts events as they happen; the rest is read from the engine at the time of a scrape."""

    def __init__(self, service: Services, jobs: Jobs | None = None) -> None:
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
        self._calls = Counter(
            "jpets_grpc_requests", "gRPC requests by method and status", ["method", "code"], registry=self.registry
        )
        self._call_latency = Histogram(
            "jpets_grpc_request_seconds",
            "Time from gRPC request to answer",
            ["method"],
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
        self.registry.register(ServiceCollector(service, jobs))
        service.observe(self._ran)

    def request(self, route: str, status: int, seconds: float) -> None:
        self._requests.labels(route, str(status)).inc()
        self._latency.labels(route).observe(seconds)

    def remote_call(self, method: str, code: str, seconds: float) -> None:
        self._calls.labels(method, code).inc()
        self._call_latency.labels(method).observe(seconds)

    def render(self) -> bytes:
        """The text that Prometheus scrapes."""
        return generate_latest(self.registry)

    def _ran(self, batch: BatchRecord) -> None:
        self._batch.observe(batch.seconds)
        for seconds in batch.queued:
            self._queued.observe(seconds)


class ServiceCollector(Collector):
    """Reads a service's, its jobs' and its engine's counters at the time of a scrape."""

    def __init__(self, service: Services, jobs: Jobs | None) -> None:
        self._service, self._jobs = service, jobs

    def collect(self) -> Iterator[Metric]:
        service = self._service
        yield GaugeMetricFamily("jpets_live", "1 unless only a new process can help", value=service.live)
        yield GaugeMetricFamily("jpets_ready", "1 when queries are answered at full speed", value=service.first.ready)
        yield GaugeMetricFamily(
            "jpets_tasks_unreadable", "Stored tasks that could not be read at start", value=service.unreadable
        )
        if (age := service.seen_age) is not None:
            text = "Seconds since the repository was last looked at for changes by others"
            yield GaugeMetricFamily("jpets_repository_seen_seconds", text, value=age)
        if self._jobs is not None:
            counts = self._jobs.counts()
            metric = GaugeMetricFamily("jpets_jobs", "Jobs that are kept, by state", labels=["state"])
            for state in get_args(JobStateName):
                metric.add_metric([state], counts.get(state, 0))
            yield metric
        yield from _tables(service)
        engines, gone = service.backbones.counted()
        if engines:
            yield from engine_metrics(engines, gone)


def _tables(services: Services) -> Iterator[Metric]:
    """Where the tokens of texts were found, and how large tables are; the root's domain is empty."""
    text = "Tokens that were looked up in tables, by where their n-grams were found"
    tokens = CounterMetricFamily("jpets_looked_up_tokens", text, labels=["backbone", "domain", "level"])
    entries = GaugeMetricFamily("jpets_table_entries", "N-grams in a table", labels=["backbone", "domain"])
    size = GaugeMetricFamily("jpets_table_bytes", "Bytes of a table's file", labels=["backbone", "domain"])
    for service in services.all:
        if (tables := service.backbone.tables) is None:
            continue
        for own in tables.report():
            labels = [service.backbone.name, own.name]
            for level, count in own.levels.items():
                tokens.add_metric([*labels, level], count)
            entries.add_metric(labels, own.entries)
            size.add_metric(labels, own.bytes)
    yield from (tokens, entries, size)
