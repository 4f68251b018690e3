"""Load on a served demo: random lengths, batch sizes and task mixtures over HTTP, then what the server counted.

``python scripts/soak.py --requests 10000`` starts a server of its own on a free loopback port, sends the first requests
while executables still compile in the background and the rest afterwards, and compares the two.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import pathlib
import tempfile
import time
from typing import Annotated, Any

import httpx
import numpy as np
import typer
from rich.console import Console
from rich.progress import Progress
from served import ROOT, Served, serve

SAMPLE = ROOT / "tests" / "data" / "debian_packages.jsonl.gz"
WAITING = "jpets_background_compiles_waiting"
console = Console(stderr=True)


def read_words() -> list[str]:
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


def main(
    requests: Annotated[int, typer.Option(help="requests in all")] = 10_000,
    clients: Annotated[int, typer.Option(help="connections that send at a time")] = 8,
    cache: Annotated[pathlib.Path | None, typer.Option(help="cache folder; an empty one by default")] = None,
    json_out: Annotated[pathlib.Path | None, typer.Option("--json")] = None,
) -> None:
    """Runs the load and prints the figures as JSON."""
    with contextlib.ExitStack() as stack:
        folder = cache or stack.enter_context(tempfile.TemporaryDirectory(prefix="jpets-soak-"))
        server = stack.enter_context(serve(["--demo", "--cache-dir", str(folder)]))
        figures: dict[str, Any] = {"seconds_to_ready": server.seconds_to_ready}
        figures |= run_phases(server, Traffic([*server.tasks(), None], 0), requests, clients)
        figures["resident_bytes"] = server.metrics()["process_resident_memory_bytes"]
    text = json.dumps(figures, indent=1)
    if json_out is not None:
        json_out.write_text(text + "\n")
    typer.echo(text)


def run_phases(server: Served, traffic: Traffic, requests: int, clients: int) -> dict[str, Any]:
    """At most half of the requests while programs compile in the background, the rest once no more are waiting."""
    before = server.metrics()
    during: list[float] = []
    while server.metrics()[WAITING] > 0 and len(during) < requests // 2:
        during += asyncio.run(send(server.url, traffic, 100, clients, f"while compiling ({len(during)})"))
    start = time.perf_counter()
    while server.metrics()[WAITING] > 0 and time.perf_counter() - start < 900:
        time.sleep(1)
    after = asyncio.run(send(server.url, traffic, requests - len(during), clients, "afterwards"))
    end = server.metrics()
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
