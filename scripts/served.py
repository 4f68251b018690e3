"""A server of one's own on a free loopback port, for scripts that measure it from outside."""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import httpx
from prometheus_client.parser import text_string_to_metric_families

ROOT = pathlib.Path(__file__).parents[1]


@dataclass(frozen=True)
class Served:
    """A running server that says it is ready."""

    url: str
    client: httpx.Client
    seconds_to_ready: float

    def metrics(self) -> dict[str, float]:
        """Sums of the server's counters and gauges by name."""
        found: dict[str, float] = {}
        for family in text_string_to_metric_families(self.client.get("/metrics").text):
            for sample in family.samples:
                found[sample.name] = found.get(sample.name, 0) + sample.value
        return found

    def tasks(self) -> list[str]:
        return [task["id"] for task in self.client.get("/v1/tasks").json()["tasks"]]


@contextlib.contextmanager
def serve(options: Sequence[str], timeout: float = 600) -> Iterator[Served]:
    """``python -m jpets.serve`` with these options, from process start to ready; ended with SIGTERM."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    command = [sys.executable, "-m", "jpets.serve", *options, "--port", str(port), "--log-level", "warning"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    start = time.perf_counter()
    server = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    try:
        url = f"http://127.0.0.1:{port}"
        with httpx.Client(base_url=url, timeout=30) as client:
            while not _ready(client):
                if server.poll() is not None:
                    raise RuntimeError(f"the server ended with {server.returncode}")
                if time.perf_counter() - start > timeout:
                    raise TimeoutError(f"the server was not ready after {timeout} s")
                time.sleep(0.05)
            yield Served(url, client, time.perf_counter() - start)
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(timeout=60)


def _ready(client: httpx.Client) -> bool:
    try:
        return client.get("/v2/health/ready").status_code == 200
    except httpx.TransportError:
        return False
