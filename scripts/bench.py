"""Benchmarks: ``python scripts/bench.py NAME [options] --json OUT``.

Systems that are compared run interleaved in one process, warm; rates are medians, and a ratio comes with the 95 %
interval of the median of the paired ratios (bootstrap; of three to five rounds their range).
"""

from __future__ import annotations

import pathlib
import statistics
import tempfile
from typing import Annotated

import typer
from benches.device.kernels import choice, kernels
from benches.device.trace import trace
from benches.device.traffic import traffic
from benches.engine.breakdown import breakdown
from benches.engine.capacity import capacity, memory
from benches.engine.curve import curve
from benches.engine.fanout import fanout
from benches.engine.host import host
from benches.engine.layerwise import layerwise
from benches.engine.operators import operators
from benches.engine.paging import paging
from benches.engine.prediction import prediction
from benches.engine.programs import programs
from benches.engine.runtimes import runtimes
from benches.engine.scaling import scaling
from benches.engine.tables import hierarchical, lookup
from benches.engine.throughput import throughput
from benches.engine.training import training
from benches.scheduling.batching import batching
from benches.scheduling.migration import interval, migration
from benches.scheduling.spread import spread
from benches.scheduling.validation import validation
from benches.service.arrivals import arrivals
from benches.service.costs import costs
from benches.service.domains import domains
from benches.service.growth import growth
from benches.service.jobs import jobs
from benches.service.quotas import quotas
from benches.service.registered import registered
from benches.service.serving import serving
from benches.service.students import students
from benches.service.tenants import tenants
from benches.service.uploads import uploads
from benches.shared import console, report
from served import serve

app = typer.Typer(add_completion=False, help=__doc__)
COMMANDS = (
    arrivals,
    batching,
    breakdown,
    capacity,
    choice,
    costs,
    curve,
    domains,
    fanout,
    growth,
    hierarchical,
    host,
    interval,
    jobs,
    kernels,
    layerwise,
    lookup,
    memory,
    migration,
    operators,
    paging,
    prediction,
    programs,
    quotas,
    registered,
    runtimes,
    scaling,
    spread,
    training,
    serving,
    students,
    tenants,
    throughput,
    trace,
    traffic,
    uploads,
    validation,
)
for command in COMMANDS:
    app.command()(command)


@app.command()
def startup(rounds: int = 5, json_out: Annotated[pathlib.Path | None, typer.Option("--json")] = None) -> None:
    """Seconds from process start to ready of the served demo, with an empty cache and with a warm one."""
    seconds: dict[str, list[float]] = {"cold": [], "warm": []}
    resident = 0.0
    for number in range(rounds):
        with tempfile.TemporaryDirectory() as cache:
            for state in seconds:
                console.log(f"round {number + 1} of {rounds}: {state}")
                with serve(["--demo", "--cache-dir", cache]) as server:
                    seconds[state].append(server.seconds_to_ready)
                    resident = max(resident, server.metrics()["process_resident_memory_bytes"])
    figures = {state: {"seconds": statistics.median(times), "worst": max(times)} for state, times in seconds.items()}
    report("startup", {"rounds": rounds, "resident_bytes": resident}, figures, json_out)


if __name__ == "__main__":
    app()
