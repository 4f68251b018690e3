"""Benchmarks: ``python scripts/bench.py NAME [options] --json OUT``.

Systems that are compared run interleaved in one process, warm; rates are medians, and a ratio comes with the 95 %
interval of the median of the paired ratios (bootstrap).
"""

from __future__ import annotations

import pathlib
import statistics
import tempfile
from typing import Annotated

import typer
from bench_arrivals import arrivals
from bench_batching import batching
from bench_breakdown import breakdown
from bench_capacity import capacity, memory
from bench_jobs import jobs
from bench_kernels import kernels
from bench_layerwise import layerwise
from bench_migration import interval, migration
from bench_operators import operators
from bench_paging import paging
from bench_prediction import prediction
from bench_registered import registered
from bench_scaling import scaling
from bench_serving import serving
from bench_tenants import tenants
from bench_throughput import throughput
from bench_training import training
from bench_validation import validation
from benching import console, report
from served import serve

app = typer.Typer(add_completion=False, help=__doc__)
COMMANDS = (
    arrivals,
    batching,
    breakdown,
    capacity,
    interval,
    jobs,
    kernels,
    layerwise,
    memory,
    migration,
    operators,
    paging,
    prediction,
    registered,
    scaling,
    training,
    serving,
    tenants,
    throughput,
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
