"""Load on a served demo: random lengths, batch sizes and task mixtures over HTTP, then what the server counted.

``python scripts/soak.py --requests 10000`` starts a server of its own on a free loopback port, sends the first requests
while executables still compile in the background and the rest afterwards, and compares the two.
"""

from __future__ import annotations

import asyncio
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
from typing import Annotated, Any

import httpx
import numpy as np
import typer
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from rich.progress import Progress

ROOT = pathlib.Path(__file__).parents[1]
SAMPLE = ROOT / "tests" / "data" / "debian_packages.jsonl.gz"
console = Console(stderr=True)


def read_words() -> list[str]:
    import gzip

    with gzip.open(SAMPLE, "rt") as file:
        return " ".join(json.loads(line)["text"] for line in file).split()


class Traffic:
    """Random requests: 1 to 8 texts, log-normal lengths (median 20 words, up to 300), any task for each text."""

    def __init__(self, tasks: list[str | None], seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self._tasks = tasks
        self._words = read_words()

    def request(self) -> dict[str, Any]:
        return {"inputs": [self._item() for _ in range(int(self._rng.integers(1, 9)))]}

    def _item(self) -> dict[str, Any]:
        length = int(np.clip(self._rng.lognormal(np.log(20), 0.8), 1, 300))
        start = int(self._rng.integers(len(self._words) - length))
        model = self._tasks[int(self._rng.integers(len(self._tasks)))]
        return {"model": model, "text": " ".join(self._words[start : start + length])}


def metrics(client: httpx.Client) -> dict[str, float]:
    """Sums of the server's counters and gauges by name."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(client.get("/metrics").text):
        for sample in family.samples:
            found[sample.name] = found.get(sample.name, 0) + sample.value
    return found


async def send(url: str, traffic: Traffic, count: int, clients: int, name: str) -> list[float]:
    """Seconds of each request; ``clients`` connections send one request after the other. Any error ends the run."""
    seconds: list[float] = []
    left = iter(range(count))
    with Progress(console=console) as progress:
        bar = progress.add_task(name, total=count)

        async def one(client: httpx.AsyncClient) -> None:
            for _ in left:
                body = traffic.request()
                start = time.perf_counter()
                response = await client.post("/v1/classify", json=body)
                seconds.append(time.perf_counter() - start)
                progress.advance(bar)
                response.raise_for_status()
                failed = [item["error"] for item in response.json()["data"] if item.get("error")]
                if failed:
                    raise RuntimeError(f"a row failed: {failed[0]}")

        async with httpx.AsyncClient(base_url=url, timeout=120) as client:
            await asyncio.gather(*(one(client) for _ in range(clients)))
    return seconds


def wait_until(client: httpx.Client, ready: str, timeout: float, server: subprocess.Popen[bytes]) -> float:
    start = time.perf_counter()
    while time.perf_counter() - start < timeout:
        if server.poll() is not None:
            raise RuntimeError(f"the server ended with {server.returncode}")
        try:
            if client.get(ready).status_code == 200:
                return time.perf_counter() - start
        except httpx.TransportError:
            pass
        time.sleep(0.1)
    raise TimeoutError(f"the server was not ready after {timeout} s")


def free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main(
    requests: Annotated[int, typer.Option(help="requests in all")] = 10_000,
    clients: Annotated[int, typer.Option(help="connections that send at a time")] = 8,
    cache: Annotated[pathlib.Path | None, typer.Option(help="cache folder; an empty one by default")] = None,
    json_out: Annotated[pathlib.Path | None, typer.Option("--json")] = None,
) -> None:
    """Runs the load and prints the figures as JSON."""
    port, url_cache = free_port(), cache or pathlib.Path(tempfile.mkdtemp(prefix="jpets-soak-"))
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "jpets.serve", "--demo", "--port", str(port), "--cache-dir", str(url_cache)]
    server = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.DEVNULL)
    try:
        with httpx.Client(base_url=url, timeout=30) as client:
            figures: dict[str, Any] = {"seconds_to_ready": wait_until(client, "/v2/health/ready", 300, server)}
            tasks: list[str | None] = [task["id"] for task in client.get("/v1/tasks").json()["tasks"]]
            traffic = Traffic([*tasks, None], 0)
            figures |= run_phases(client, url, traffic, requests, clients)
            figures["resident_bytes"] = metrics(client)["process_resident_memory_bytes"]
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(timeout=60)
    text = json.dumps(figures, indent=1)
    if json_out is not None:
        json_out.write_text(text + "\n")
    typer.echo(text)


def run_phases(client: httpx.Client, url: str, traffic: Traffic, requests: int, clients: int) -> dict[str, Any]:
    """Half of the requests while programs compile in the background, half once no more are waiting."""
    before = metrics(client)
    during: list[float] = []
    while metrics(client)["jpets_background_compiles_waiting"] > 0 and len(during) < requests // 2:
        during += asyncio.run(send(url, traffic, 100, clients, f"while compiling ({len(during)})"))
    start = time.perf_counter()
    while metrics(client)["jpets_background_compiles_waiting"] > 0 and time.perf_counter() - start < 900:
        time.sleep(1)
    after = asyncio.run(send(url, traffic, requests - len(during), clients, "afterwards"))
    end = metrics(client)
    total = {name: end[name] - before.get(name, 0) for name in end}
    return {
        "requests": {"while_compiling": len(during), "afterwards": len(after)},
        "p50_seconds": {"while_compiling": quantile(during, 50), "afterwards": quantile(after, 50)},
        "p99_seconds": {"while_compiling": quantile(during, 99), "afterwards": quantile(after, 99)},
        "p99_ratio": quantile(during, 99) / quantile(after, 99),
        "request_path_compiles": total["jpets_request_path_compiles_total"],
        "background_programs": total["jpets_background_compiles_total"],
        "computed_per_real_token": total["jpets_computed_tokens_total"] / total["jpets_real_tokens_total"],
        "fallback_share": total["jpets_fallbacks_total"] / total["jpets_batches_total"],
    }


def quantile(seconds: list[float], percent: float) -> float:
    return float(np.percentile(seconds, percent)) if seconds else float("nan")


if __name__ == "__main__":
    typer.run(main)
