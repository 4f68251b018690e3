"""Counters of an engine, read by metrics and tests."""

from __future__ import annotations

import dataclasses
import logging
import threading
import weakref
from collections import Counter
from collections.abc import Callable

import jax.monitoring

log = logging.getLogger(__name__)

COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


@dataclasses.dataclass(frozen=True)
class BatchRecord:
    """One executed batch. Times are seconds; ``queued`` holds one entry a query.

    ``computing`` is the device's time for it and ``predicted`` what was expected of that; ``missed`` is by how much a
    program that was still missing would have been faster.
    """

    rows: int
    real_tokens: int
    computed_tokens: int
    seconds: float
    queued: tuple[float, ...]
    fallback: bool
    computing: float
    predicted: float
    missed: float


BatchObserver = Callable[[BatchRecord], None]


class Stats:
    """Thread-safe counters. ``observers`` are called with every batch, on the completion thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.answers: Counter[str] = Counter()
        """Queries answered, by ``ok`` or the error's code."""
        self.batches = 0
        self.fallbacks = 0
        self.real_tokens = 0
        self.computed_tokens = 0
        self.computing_seconds = 0.0
        self.predicted_seconds = 0.0
        self.missed_seconds = 0.0
        self.request_path_compiles = 0
        self.out_of_memory = 0
        """Batches and tasks that found no room on the device."""
        self.observers: list[BatchObserver] = []

    def answered(self, outcome: str) -> None:
        with self._lock:
            self.answers[outcome] += 1

    def had_no_memory(self) -> None:
        with self._lock:
            self.out_of_memory += 1

    def ran(self, record: BatchRecord) -> None:
        with self._lock:
            self.batches += 1
            self.fallbacks += record.fallback
            self.real_tokens += record.real_tokens
            self.computed_tokens += record.computed_tokens
            self.computing_seconds += record.computing
            self.predicted_seconds += record.predicted
            self.missed_seconds += record.missed
        for observer in self.observers:
            try:
                observer(record)
            except Exception:  # an observer must not harm the engine
                log.exception("an observer failed")

    def count_compiles_on(self, threads: set[int]) -> None:
        """From now on counts every XLA compilation that one of these threads (by ident) has to wait for."""
        own = weakref.ref(self)  # listeners live as long as the process, longer than an engine's figures

        def heard(event: str, duration_secs: float, **_: object) -> None:
            del duration_secs
            stats = own()
            if stats is not None and event == COMPILE_EVENT and threading.get_ident() in threads:
                with stats._lock:
                    stats.request_path_compiles += 1

        jax.monitoring.register_event_duration_secs_listener(heard)
