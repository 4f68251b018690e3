"""``bench quotas``: a tenant's latency over HTTP beside one that asks ten times what it may."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import pathlib
import statistics
import tempfile
from functools import partial
from typing import Annotated, Any

import numpy as np
import typer
from served import serve

from benches.scheduling.batching import draw
from benches.service.serving import (
    CALIBRATION_SECONDS,
    CLASSIFY,
    DEMO,
    Loaded,
    answered,
    classified,
    compiled,
    load,
    pass_over,
    pooled,
    run_client,
    times_as_long,
)
from benches.shared import console, report, warm_up
from jpets.access import Limits

MINUTE = 60.0
FLOOD = 10.0
"""Times its quota that the other tenant asks."""
LEAD = 2.0
"""Seconds that the other's load lasts before and after: what it saved up is used by then."""
CASES = {"alone": 0.0, "one at its quota": 1.0, "one at ten times": FLOOD}
"""What the other tenant asks meanwhile, as times its quota."""


def quotas(
    share: Annotated[
        float, typer.Option(help="the tenant's load, as a part of what clients that wait are answered")
    ] = 0.2,
    quota: Annotated[float, typer.Option(help="the other's quota, as such a part")] = 0.2,
    seconds: Annotated[float, typer.Option(help="length of each measurement")] = 10.0,
    rounds: Annotated[int, typer.Option(help="measurements of each case, in turns; p99s are of all requests")] = 9,
    tokens: Annotated[bool, typer.Option("--tokens", help="the quota counts tokens, by default requests")] = False,
    json_out: Annotated[pathlib.Path | None, typer.Option("--json")] = None,
) -> None:
    """p99 of one tenant alone, beside one at its quota, and beside one that asks ten times its quota. A quota of tokens
    is of as many texts: it has what their lengths have on average.

    Both ask the demo's five tasks, which are shared, with a single text of normal length (mean 32, deviation 8) at a
    time; the client runs on the same cores.
    """
    from checkpoints.repository import Repository  # other benchmarks run without a database's package

    lengths = draw("gaussian", 4096, 8.0, 500)
    bodies = classified(lengths)
    found: dict[str, list[dict[str, float]]] = {name: [] for name in CASES}
    loads: dict[str, list[Loaded]] = {name: [] for name in CASES}
    with contextlib.ExitStack() as stack:
        folder = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="jpets-bench-")))
        repository = stack.enter_context(contextlib.closing(Repository(folder / "repository")))
        keys = {name: repository.access.create(name, ("infer", "admin"))[1] for name in ("light", "flood")}
        options = [*DEMO, "--repository", str(folder / "repository"), "--cache-dir", str(folder / "cache")]
        server = stack.enter_context(serve(options, key=keys["light"]))
        server.settle()
        url = server.url + CLASSIFY
        pace = partial(answered, url, CALIBRATION_SECONDS, bodies, keys["light"])
        usual = run_client(pace())
        rates = [usual * part for part in (share, share + quota, 1.0)]
        warm_up(
            "server", partial(pass_over, server, CLASSIFY, rates, bodies, key=keys["light"]), partial(compiled, server)
        )
        for number in range(rounds):
            rate = run_client(pace())
            limits = quota_of(quota * rate, lengths if tokens else None)
            server.client.put("/v1/tenants/flood", json=dataclasses.asdict(limits)).raise_for_status()
            for name, times in CASES.items():
                both = _both(url, (share * rate, times * quota * rate), seconds, bodies, keys, number)
                light, flood = run_client(both)
                figures = {
                    "answered": light.responses,
                    "others_asked": times * quota * rate,
                    "others_answered": flood.responses if flood is not None else 0.0,
                }
                loads[name].append(light)
                console.log(name, {key: round(value, 4) for key, value in figures.items()})
                found[name].append(figures)
    alone = pooled(loads["alone"]).quantile(99)
    settings = {"share": share, "quota": quota, "seconds": seconds, "rounds": rounds, "tokens": tokens, "served": DEMO}
    report("quotas", settings, {name: _figures(own, loads[name], alone) for name, own in found.items()}, json_out)


def _figures(rounds: list[dict[str, float]], loads: list[Loaded], alone: float) -> dict[str, Any]:
    own = pooled(loads)
    return {
        **{key: statistics.median(each[key] for each in rounds) for key in rounds[0]},
        "requests": len(own.latencies),
        "p50": own.quantile(50),
        "p99": own.quantile(99),
        "p99_ratio": times_as_long(own.quantile(99), alone),
        "p99s": [each.quantile(99) for each in loads],
    }


def quota_of(rate: float, lengths: np.ndarray | None) -> Limits:
    """The limits of a tenant that may ask so many texts a second; where tokens count, texts of these ``lengths``."""
    if lengths is None:
        return Limits(requests_per_minute=MINUTE * rate)
    return Limits(tokens_per_minute=MINUTE * rate * float(lengths.mean()))


async def _both(
    url: str, rates: tuple[float, float], seconds: float, bodies: list[bytes], keys: dict[str, str], seed: int
) -> tuple[Loaded, Loaded | None]:
    """What ``load`` found for each of the two at the same time; the other's load begins first."""
    light, flood = rates
    if not flood:
        return await load(url, light, seconds, bodies, seed, keys["light"]), None
    other = asyncio.create_task(load(url, flood, seconds + 2 * LEAD, bodies, seed, keys["flood"]))
    await asyncio.sleep(LEAD)
    return await load(url, light, seconds, bodies, seed, keys["light"]), await other
