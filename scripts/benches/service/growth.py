"""``bench.py growth``: throughput and response times by the number of tenants (HMI figures 11 and 12)."""

from __future__ import annotations

import contextlib
import pathlib
import statistics
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import wait
from typing import Annotated, Any

import numpy as np
import typer

from benches.engine.paging import write_tasks
from benches.service.arrivals import Submit, play, steady, system
from benches.shared import console, paired_ratio, random_backbone, report
from jpets.xla_flags import set_xla_flags

PERIOD = 20.0
"""Seconds between two queries of one of HMI's tenants: 500 queries a second of 10,000."""
LEAST_RATE = 1.0
"""Queries a second of few tenants together: with one every 20 s there would be nothing to measure."""
LEAST_FOR_P99 = 500
SWAPPED = 64
"""Queries of one measurement of ``swapping``, of which every one may move a model."""


def growth(
    backbone: str = "minilm-l6",
    tenants: Annotated[
        str, typer.Option(help="numbers of tenants, each with a task of its own")
    ] = "1,10,100,1000,10000",
    slots: int = 255,
    methods: str = "adapter,lora,bitfit",
    queries: Annotated[int, typer.Option(help="that are there at once, for the throughput")] = 512,
    scale: Annotated[
        float, typer.Option(help="times as fast as HMI's: a tenant sends a query every 20 s / scale")
    ] = 0.2,
    seconds: Annotated[float, typer.Option(help="of arrivals, for the response times")] = 20.0,
    host_memory_gb: float = 6.0,
    rounds: int = 5,
    folder: Annotated[pathlib.Path | None, typer.Option(help="task files are kept here; else a temporary one")] = None,
    json_out: Annotated[pathlib.Path | None, typer.Option("--json")] = None,
) -> None:
    """Queries a second of many at once, and response times at a tenant's constant rate, by the number of tenants.

    ``paged`` has ``slots`` tasks of a class on the device; ``swapping`` as many whole models as fit their memory.
    """
    set_xla_flags()
    model, each, counts = random_backbone(backbone), methods.split(","), [int(n) for n in tenants.split(",")]
    figures: dict[str, Any] = {}
    with contextlib.ExitStack() as stack:
        kept = folder or pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
        kept.mkdir(parents=True, exist_ok=True)
        names = write_tasks(kept, model, each, max(counts))
        systems = {
            name: stack.enter_context(system(name, model, kept, names, each, slots, host_memory_gb))
            for name in ("paged", "swapping")
        }
        for count in counts:
            rates = _throughput(systems, count, queries, rounds)
            arrivals = steady(count, min(PERIOD / scale, count / LEAST_RATE), seconds, 1)
            for name, submit in systems.items():
                times = play(arrivals, submit)
                own = rates[name] | {"arrivals": len(times), "p50": float(np.median(times))}
                if len(times) >= LEAST_FOR_P99:
                    own["p99"] = float(np.percentile(times, 99))
                figures[f"{count} tenants/{name}"] = own
                console.log(f"{count} tenants, {name}: {rates[name]['qps']:.0f} queries/s, {np.median(times):.3f} s")
    settings = {
        "backbone": backbone,
        "tenants": tenants,
        "slots": slots,
        "methods": methods,
        "queries": queries,
        "scale": scale,
        "seconds": seconds,
        "host_memory_gb": host_memory_gb,
        "rounds": rounds,
    }
    report("growth", settings, figures, json_out)


def _throughput(systems: dict[str, Submit], count: int, queries: int, rounds: int) -> dict[str, dict[str, Any]]:
    """Queries a second, each for a tenant at random, of rounds that take turns; the first does not count."""
    seconds: dict[str, list[float]] = {name: [] for name in systems}
    for number in range(rounds + 1):
        drawn = np.random.default_rng(number).integers(0, count, queries).tolist()
        for name, submit in systems.items():
            asked = drawn if name != "swapping" else drawn[:SWAPPED]
            took = _once(submit, asked) / len(asked)
            if number:
                seconds[name].append(took)
    figures: dict[str, dict[str, Any]] = {
        name: {"qps": 1 / statistics.median(times)} for name, times in seconds.items()
    }
    figures["paged"]["over_swapping"] = paired_ratio(seconds["paged"], seconds["swapping"])
    return figures


def _once(submit: Submit, tenants: Sequence[int]) -> float:
    start = time.perf_counter()
    futures = [submit(tenant) for tenant in tenants]
    wait(futures)
    for future in futures:
        assert getattr(future.result(), "error", None) is None, future.result().error
    return time.perf_counter() - start
