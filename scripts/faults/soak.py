"""Load on a served demo: random lengths, batch sizes and task mixtures over HTTP, then what the server counted.

``PYTHONPATH=scripts python -m faults.soak --requests 10000`` starts a server of its own on a free loopback port, sends
the first requests while programs still compile in the background and the rest afterwards, and compares the two.

``--grow 60000`` sends so many more, short ones of many kinds, some of them wrong, and reports how resident memory grew
meanwhile. With ``--leak`` the server keeps every body: growth has to show that.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import http.client
import json
import pathlib
import tempfile
import threading
import time
import urllib.parse
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any

import httpx
import numpy as np
import typer
from rich.console import Console
from rich.progress import Progress, track
from served import ROOT, SERVER, Served, serve

from faults.memory_growth import Growth

SAMPLE = ROOT / "tests" / "data" / "debian_packages.jsonl.gz"
WAITING = "jpets_background_compiles_waiting"
console = Console(stderr=True)


def read_words() -> list[str]:
    with gzip.open(SAMPLE, "rt") as file:
        return " ".join(json.loads(line)["text"] for line in file).split()


class Traffic:
    """Random requests: 1 to 8 texts, log-normal lengths (median 20 words, up to ``longest``), any task for each."""

    def __init__(self, tasks: list[str | None], seed: int, longest: int = 300) -> None:
        self._longest = longest
        self._rng = np.random.default_rng(seed)
        self._tasks = tasks
        self._words = read_words()

    def request(self) -> dict[str, Any]:
        return {"inputs": [self._item() for _ in range(int(self._rng.integers(1, 9)))]}

    def _task(self) -> str | None:
        return self._tasks[int(self._rng.integers(len(self._tasks)))]

    def _item(self) -> dict[str, Any]:
        length = int(np.clip(self._rng.lognormal(np.log(20), 0.8), 1, self._longest))
        start = int(self._rng.integers(len(self._words) - length))
        return {"model": self._task(), "text": " ".join(self._words[start : start + length])}


class Mixture(Traffic):
    """Short requests to several routes, a tenth of them wrong; whatever a server could keep of a request is new each
    time."""

    def __init__(self, tasks: list[str | None], backbone: str, seed: int) -> None:
        super().__init__(tasks, seed)
        self._backbone = backbone

    def asked(self) -> tuple[str, str, dict[str, Any] | None]:
        """Method, path and body."""
        number = int(self._rng.integers(1 << 40))
        text = f"{' '.join(self._rng.choice(self._words, int(self._rng.integers(1, 12))))} {number}"
        kind = int(self._rng.integers(20))
        if kind < 12:
            return "POST", "/v1/classify", {"inputs": [{"model": self._task(), "text": text}]}
        if kind < 16:
            return "POST", "/v1/embeddings", {"model": self._backbone, "input": [text, text[:20]]}
        if kind < 18:
            return "GET", f"/v2/models/{self._task() or self._backbone}", None
        if kind < 19:
            return "POST", "/v1/classify", {"model": f"unknown-{number}", "input": text}
        return "POST", "/v1/classify", {f"field-{number}": text, "input": number}


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
    grow: Annotated[int, typer.Option(help="further requests, over which the growth of memory is measured")] = 0,
    backbone: Annotated[str | None, typer.Option(help="folder of a plain backbone instead of the demo")] = None,
    bucket: Annotated[list[str] | None, typer.Option(help="the only shapes; nothing compiles later")] = None,
    longest: Annotated[int, typer.Option(help="words of the longest text")] = 300,
    leak: Annotated[bool, typer.Option("--leak", help="a server that keeps every body")] = False,
    cache: Annotated[pathlib.Path | None, typer.Option(help="cache folder; an empty one by default")] = None,
    json_out: Annotated[pathlib.Path | None, typer.Option("--json")] = None,
) -> None:
    """Runs the load and prints the figures as JSON."""
    with contextlib.ExitStack() as stack:
        folder = cache or stack.enter_context(tempfile.TemporaryDirectory(prefix="jpets-soak-"))
        program = (str(ROOT / "scripts" / "faults" / "leaking_server.py"),) if leak else SERVER
        served = ["--demo"] if backbone is None else ["--backbone", backbone]
        served += [f"--bucket={each}" for each in bucket or ()]
        server = stack.enter_context(serve([*served, "--cache-dir", str(folder)], program=program))
        figures: dict[str, Any] = {"seconds_to_ready": server.seconds_to_ready}
        figures |= run_phases(server, Traffic([*server.tasks(), None], 0, longest), requests, clients)
        if grow:
            traffic = Mixture([*server.tasks(), None], server.backbone(), 1)
            figures["growth"] = measure_growth(server, traffic, grow, clients)
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
        "missed_share": total["jpets_missed_seconds_total"] / total["jpets_predicted_seconds_total"],
    }


def measure_growth(server: Served, traffic: Mixture, requests: int, clients: int) -> dict[str, Any]:
    """How resident memory grows over so many requests; looks at it a hundred times."""
    each = requests // 100 // clients
    if not each:
        raise typer.BadParameter(f"expected at least {100 * clients} requests to see growth by, found {requests}")
    growth, start = Growth(), time.perf_counter()
    url = urllib.parse.urlsplit(server.url)

    def send_some(connection: http.client.HTTPConnection) -> None:
        for _ in range(each):
            with asking:
                method, path, body = traffic.asked()
            content = json.dumps(body) if body is not None else None
            connection.request(method, path, content, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            answer.read()
            if answer.status >= 500:
                raise RuntimeError(f"{method} {path} got {answer.status}")

    asking = threading.Lock()
    connections = [http.client.HTTPConnection(str(url.hostname), url.port, timeout=120) for _ in range(clients)]
    with ThreadPoolExecutor(clients) as pool:
        for at in track(range(100), "growth", console=console):
            list(pool.map(send_some, connections))
            programs = server.metrics()["jpets_background_compiles_total"]
            growth.add((at + 1) * each * clients, server.resident(), int(programs))
    return {**growth.figures(), "seconds": time.perf_counter() - start}


def quantile(seconds: list[float], percent: float) -> float:
    return float(np.percentile(seconds, percent)) if seconds else float("nan")


if __name__ == "__main__":
    typer.run(main)
