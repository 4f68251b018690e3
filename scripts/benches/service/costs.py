"""``bench.py costs``: how soon a default server has measured its classes, and what light traffic feels of it."""

from __future__ import annotations

import pathlib
import tempfile
import time
from collections.abc import Callable
from typing import Annotated, Any

import numpy as np
import typer
from served import Served, serve

from benches.shared import console, report

TEXTS = (
    "a chess engine",
    "LDAP support for the Courier authentication library.",
    "Development files for the AT-SPI 2 toolkit bridge, with which assistive technologies talk to programs.",
)
LOOK = 5.0
"""Seconds between looks at the server's counters."""


def costs(
    rate: float = 5.0,
    minutes: Annotated[float, typer.Option(help="most minutes until all classes are measured")] = 5.0,
    after: Annotated[float, typer.Option(help="seconds of the same traffic at the next start")] = 120.0,
    json_out: Annotated[pathlib.Path | None, typer.Option("--json")] = None,
) -> None:
    """A demo server with an empty cache: seconds from ready until its classes are measured, and p99 of single texts
    meanwhile; beside that of the next start with the same cache, which compiles and measures nothing more."""
    with tempfile.TemporaryDirectory() as cache:
        with serve(["--demo", "--cache-dir", cache]) as server:
            tasks = server.tasks()
            ready = time.monotonic()
            meanwhile, classes, measured = traffic(server, tasks, rate, 60 * minutes, lambda own: _left(own) == 0)
            seconds = time.monotonic() - ready
            console.log(f"{measured} of {classes} classes measured after {seconds:.0f} s")
        with serve(["--demo", "--cache-dir", cache, "--no-background-compile"]) as server:
            calm, _, _ = traffic(server, tasks, rate, after, lambda own: False)
    figures: dict[str, dict[str, Any]] = {"meanwhile": latencies(meanwhile), "afterwards": latencies(calm)}
    figures["meanwhile"] |= {"seconds": seconds, "measured": measured, "classes": classes}
    settings = {"rate": rate, "minutes": minutes, "after": after}
    report("costs", settings, figures, json_out)


def _left(metrics: dict[str, float]) -> float:
    return metrics["jpets_cost_classes_coarse"]


def traffic(
    server: Served, tasks: list[str], rate: float, seconds: float, ended: Callable[[dict[str, float]], bool]
) -> tuple[list[float], int, int]:
    """Single texts (Poisson) until ``ended`` says so of the metrics. Returns their response times, and how many classes
    there are and are measured. A text that comes while another one is answered is sent after it, and waits from when it
    came."""
    rng, found = np.random.default_rng(0), list[float]()
    begun = look = due = time.monotonic()
    metrics = server.metrics()
    while time.monotonic() < begun + seconds:
        if time.monotonic() >= look:
            metrics, look = server.metrics(), time.monotonic() + LOOK
            if ended(metrics):
                break
        due += rng.exponential(1 / rate)
        time.sleep(max(0.0, due - time.monotonic()))
        body = {"model": tasks[int(rng.integers(len(tasks)))], "input": TEXTS[int(rng.integers(len(TEXTS)))]}
        server.client.post("/v1/classify", json=body).raise_for_status()
        found.append(time.monotonic() - due)
    measured = int(metrics["jpets_cost_classes_measured"])
    return found, measured + int(_left(metrics)), measured


def latencies(seconds: list[float]) -> dict[str, Any]:
    p50, p99 = np.percentile(seconds, [50, 99])
    return {"requests": len(seconds), "p50": float(p50), "p99": float(p99), "worst": max(seconds)}
