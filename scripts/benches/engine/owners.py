"""The part of ``bench.py host`` for several devices: what their owner threads wait for."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from jpets.engine.engine import Engine
from jpets.types import Query

BATCHES = 24
"""Batches that wait for each owner when it begins."""


class Drain(NamedTuple):
    """Batches, batches a second, and seconds of the process's threads for each."""

    batches: int
    rate: float
    cpu: float


def owners(engines: Sequence[Engine], queries: Sequence[Query], rounds: int) -> dict[str, dict[str, Any]]:
    """Batches a second of the first 1, 2, 4 ... engines, each with a backlog of these queries.

    Where more owners make no more batches though ``cores_used`` stays at about one, they wait for Python's lock.
    """
    counts = [count for count in (2**power for power in range(10)) if count <= len(engines)]
    waiting = list(queries) * BATCHES
    drains: dict[int, list[Drain]] = {count: [] for count in counts}
    for number in range(-1, rounds):
        for count in counts:
            drain = drained(engines[:count], waiting)
            if number >= 0:
                drains[count].append(drain)
    alone = statistics.median(drain.rate for drain in drains[1])
    return {
        f"{count} owners": {
            "batches_per_second": statistics.median(drain.rate for drain in found),
            "times_one": statistics.median(drain.rate for drain in found) / alone,
            "cpu_ms_a_batch": statistics.median(drain.cpu for drain in found) * 1e3,
            "cores_used": statistics.median(drain.cpu * drain.rate for drain in found),
            "rows_a_batch": statistics.median(count * len(waiting) / drain.batches for drain in found),
        }
        for count, found in drains.items()
    }


def drained(engines: Sequence[Engine], queries: Sequence[Query]) -> Drain:
    """Lets these engines answer the queries, each all of them. Their owners begin together, when all queries wait."""
    go = threading.Event()
    for engine in engines:
        engine.replica.staging.stage(go.wait)
    before = sum(engine.stats.batches for engine in engines)
    futures = [future for engine in engines for future in engine.submit(queries)]
    start, cpu = time.perf_counter(), time.process_time()
    go.set()
    for future in futures:
        error = future.result(120).error
        assert error is None, error
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    batches = sum(engine.stats.batches for engine in engines) - before
    return Drain(batches, batches / seconds, cpu / batches)
