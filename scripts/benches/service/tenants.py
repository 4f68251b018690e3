"""``bench tenants``: latency of a tenant's queries beside a tenant that offers ten times its share."""

from __future__ import annotations

import contextlib
import pathlib
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, wait
from functools import partial
from typing import Annotated, Any

import numpy as np
import typer

from benches.shared import RandomBackbone, console, draw_lengths, random_backbone, random_tasks, report, warm_up
from jpets.config import EngineSettings
from jpets.engine.engine import Engine
from jpets.errors import Saturated
from jpets.free_memory import freeze_heap
from jpets.types import Query, Result, Task
from jpets.xla_flags import set_xla_flags

TENANTS = ("light", "flood")
FLOOD = 10.0
"""Times its share that the other tenant offers."""
CHUNK = 0.02
"""Seconds of the flood that are submitted together."""
BURST = 1024
"""Queries that come at once before each round; a share is half of the rate at which they are answered."""
SLICES = 4
"""Slices of a round, each alone and then beside the flood with the same arrivals: a shared machine's speed changes
within a round."""
WARM = 1.0
"""Seconds of a slice before the first query that counts."""
SYSTEMS = {"short batches": EngineSettings.flood_stretch, "fair shares alone": 0.0}
"""``flood_stretch`` of each."""


def tenants(
    backbone: str = "minilm-l6",
    tasks: int = 32,
    methods: str = "adapter,lora,bitfit",
    loads: Annotated[str, typer.Option(help="the first tenant's load, as parts of its share")] = "0.2,0.5",
    seconds: Annotated[
        float, typer.Option(min=2 * SLICES * WARM, help="of a round alone, and as many beside the flood")
    ] = 20.0,
    rounds: int = 5,
    json_out: Annotated[pathlib.Path | None, typer.Option("--json")] = None,
) -> None:
    """p99 of one tenant alone, and beside one at ten times its share: half of what the engine serves in a burst.

    Lengths are normal (mean 32, deviation 8). Rounds interleave the systems; medians of the rounds are reported.
    """
    set_xla_flags()
    loaded = random_backbone(backbone)
    made = random_tasks(loaded, methods.split(","), tasks)
    lengths = draw_lengths(4096, 32, 8.0, loaded.config.max_positions)
    queries = [Query(made[i % tasks].id, input_ids=list(range(1000, 1000 + n))) for i, n in enumerate(lengths)]
    figures: dict[str, dict[str, Any]] = {}
    with contextlib.ExitStack() as stack:
        engines = {name: stack.enter_context(_started(loaded, made, stretch)) for name, stretch in SYSTEMS.items()}
        freeze_heap()  # as a server does
        steps = [float(load) for load in loads.split(",")]
        for name, engine in engines.items():
            pass_over = partial(_pass_over, engine, queries, steps, seconds)
            warm_up(name, pass_over, partial(_compiled, engine))
        for load in steps:
            found: dict[str, dict[str, list[float]]] = {name: {} for name in engines}
            for number in range(rounds):
                for name, engine in engines.items():
                    for every in engines.values():
                        _settle(every)  # the other's compilations take the cores as well
                    figure = _round(engine, queries, load, seconds, number)
                    console.log(name, load, {key: round(value, 4) for key, value in figure.items()})
                    for key, value in figure.items():
                        found[name].setdefault(key, []).append(value)
            for name, columns in found.items():
                figures[f"{name}, load {load:g}"] = {key: statistics.median(values) for key, values in columns.items()}
    settings = {
        "backbone": backbone,
        "tasks": tasks,
        "methods": methods,
        "seconds": seconds,
        "rounds": rounds,
        "flood_stretch": SYSTEMS,
    }
    report("tenants", settings, figures, json_out)


@contextlib.contextmanager
def _started(backbone: RandomBackbone, tasks: list[Task], stretch: float) -> Iterator[Engine]:
    with tempfile.TemporaryDirectory() as cache:
        settings = EngineSettings(flood_stretch=stretch, slots=len(TENANTS) * len(tasks))
        engine = Engine(backbone, (), settings, reserve=tasks, cache_dir=pathlib.Path(cache))
        engine.start(lambda what, done, total: None)
        for tenant in TENANTS:
            for task in tasks:
                engine.add_task(task, tenant=tenant)
        try:
            _burst(engine, [Query(tasks[i % len(tasks)].id, input_ids=[5] * 32) for i in range(256)])
            _settle(engine)
            yield engine
        finally:
            engine.close()


def _compiled(engine: Engine) -> int:
    """Programs that were compiled in the background."""
    return engine.report().devices[0].programs.compiled


def _answered(engine: Engine) -> int:
    return engine.report().devices[0].answers.get("ok", 0)


def _settle(engine: Engine) -> None:
    """Waits until nothing compiles in the background any more."""
    while engine.report().devices[0].programs.waiting:
        time.sleep(1)


def _pass_over(engine: Engine, queries: list[Query], loads: Sequence[float], seconds: float, seed: int) -> None:
    for load in loads:
        _round(engine, queries, load, seconds, seed)
        _settle(engine)


def _burst(engine: Engine, queries: list[Query]) -> float:
    """Queries a second when all come at once."""
    start = time.perf_counter()
    _check(engine.infer(queries, tenant=TENANTS[0]))
    return len(queries) / (time.perf_counter() - start)


def _round(engine: Engine, queries: list[Query], load: float, seconds: float, seed: int) -> dict[str, float]:
    compiled = _compiled(engine)
    share = _burst(engine, queries[:BURST]) / 2
    alone: list[float] = []
    beside: list[float] = []
    served = 0
    for part in range(SLICES):
        light = partial(_light, engine, queries, load * share, seconds / SLICES, (seed, part))
        alone += light()
        with _flooded(engine, queries, FLOOD * share):
            before = _answered(engine)
            beside += light()
            served += _answered(engine) - before
    p99 = {name: float(np.percentile(took, 99)) for name, took in (("alone", alone), ("beside", beside))}
    return {
        "share": share,
        "alone_p50": statistics.median(alone),
        "alone_p99": p99["alone"],
        "beside_p50": statistics.median(beside),
        "beside_p99": p99["beside"],
        "ratio": p99["beside"] / p99["alone"],
        "served": served / seconds,
        "compiled": _compiled(engine) - compiled,
    }


def _light(engine: Engine, queries: list[Query], rate: float, seconds: float, seed: tuple[int, int]) -> list[float]:
    """Latencies (s) of Poisson arrivals at ``rate``."""
    rng = np.random.default_rng(seed)
    due = np.cumsum(rng.exponential(1 / rate, round(rate * seconds)))
    took: list[float] = []
    start, futures = time.monotonic(), []
    for number, at in enumerate(due.tolist()):
        time.sleep(max(0.0, start + at - time.monotonic()))
        (future,) = engine.submit([queries[number % len(queries)]], tenant=TENANTS[0])
        if at > WARM:
            future.add_done_callback(partial(_note, took, start + at))
        futures.append(future)
    _check([future.result() for future in futures])
    return took


def _check(results: Sequence[Result]) -> None:
    for result in results:
        if result.error is not None:
            raise result.error


def _note(took: list[float], begun: float, future: Future[Result]) -> None:
    del future
    took.append(time.monotonic() - begun)


@contextlib.contextmanager
def _flooded(engine: Engine, queries: list[Query], rate: float) -> Iterator[None]:
    ended = threading.Event()
    thread = threading.Thread(target=_flood, args=(engine, queries, rate, ended), daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _flood(engine: Engine, queries: list[Query], rate: float, ended: threading.Event) -> None:
    rng = np.random.default_rng(0)
    futures: list[Future[Result]] = []
    at = 0
    while not ended.wait(CHUNK):
        count = int(rng.poisson(rate * CHUNK))
        with contextlib.suppress(Saturated):
            futures += engine.submit([queries[(at + i) % len(queries)] for i in range(count)], tenant=TENANTS[1])
        at += count
    for future in futures:  # the next round must not begin behind them
        future.cancel()
    wait(futures)
