"""PET operator scheduling (PetS section 6.3.3, figure 11): ``python scripts/bench.py operators [options] --json OUT``.

One batch of queries over many tasks whose deltas have many shapes, so that many operators meet at each site. On a GPU
the systems are numbers of streams; elsewhere only the order can differ: ``fifo`` leaves the classes as they come,
``scheduled`` follows Algorithm 2. The figure is ``--tasks`` 32, 64 and 128 by ``--length`` 4 to 64.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import pathlib
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import jax
import numpy as np
import typer

from benches.shared import (
    RandomBackbone,
    answers,
    console,
    engine_cache,
    interleave,
    paired_ratio,
    random_backbone,
    random_tasks,
    report,
)
from jpets.config import EngineSettings
from jpets.deltas import METHODS
from jpets.engine.batch.bucket import Bucket
from jpets.engine.engine import Engine
from jpets.engine.programs.delta_order import delta_order
from jpets.types import Query, Task
from jpets.xla_flags import set_xla_flags

LORA_SITES = ["query", "value"]
SHAPES: Sequence[tuple[str, Mapping[str, Any]]] = [
    ("lora", {"sites": LORA_SITES, "rank": 4}),
    ("adapter", {"bottleneck": 16}),
    ("diff", {"density": 0.001}),
    ("mask", {}),
    ("lora", {"sites": LORA_SITES, "rank": 16}),
    ("adapter", {"bottleneck": 64}),
    ("diff", {"density": 0.005}),
    ("bitfit", {}),
    ("lora", {"sites": LORA_SITES, "rank": 64}),
    ("adapter", {"bottleneck": 256}),
    ("diff", {"density": 0.02}),
]
"""PetS Table 4 and sizes around it, far enough apart that each is a class of its own."""
STREAMS = (1, 2, 4, 8, 16, 32)


def varied_tasks(backbone: RandomBackbone, methods: Sequence[str], count: int) -> list[Task]:
    """``count`` tasks that take the shapes of ``methods`` in turn."""
    rng = np.random.default_rng(0)
    shapes = [shape for shape in SHAPES if shape[0] in methods]
    tasks = []
    for i, plain in enumerate(random_tasks(backbone, ["bitfit"], count)):
        method, settings = shapes[i % len(shapes)]
        delta = METHODS[method].init(rng, settings, backbone.config, 0.02)
        tasks.append(dataclasses.replace(plain, id=f"{method}-{i}", deltas=(delta,)))
    return tasks


def systems_here() -> dict[str, int]:
    """Systems and their ``delta_streams``."""
    if jax.devices()[0].platform == "gpu":
        return {"fifo": 0, **{f"streams-{count}": count for count in STREAMS}}
    return {"fifo": 0, "scheduled": 1}


def operators(
    backbone: str = "bert-base",
    tasks: int = 32,
    rows: int = 128,
    length: int = 32,
    methods: str = "adapter,lora,bitfit,mask,diff",
    rounds: int = 15,
    json_out: Annotated[pathlib.Path | None, typer.Option("--json")] = None,
) -> None:
    """Queries a second of one batch of equal lengths, by order and number of streams of its delta operators."""
    set_xla_flags()
    loaded = random_backbone(backbone)
    made = varied_tasks(loaded, methods.split(","), tasks)
    bucket = Bucket(rows * length, ((rows, length),))
    ids = list(range(1000, 1000 + length))
    queries = [Query(made[i * tasks // rows].id, input_ids=ids) for i in range(rows)]
    plain = EngineSettings(background_compile=False, max_batch_tokens=bucket.tokens, max_batch_rows=rows, slots=tasks)
    turns: dict[str, list[str]] = {}
    with engine_cache() as cache, contextlib.ExitStack() as running:
        runs: dict[str, Callable[[], object]] = {}
        for name, streams in systems_here().items():
            console.log(f"{name}: compiling")
            settings = dataclasses.replace(plain, delta_streams=streams)
            engine = Engine(loaded, made, settings, cache_dir=cache, buckets=[bucket])
            running.enter_context(engine).start()
            key = engine.specialise(queries)
            assert key is not None
            order = delta_order(loaded.config, bucket, key.variant, engine.family.streams)
            turns[name] = [f"{turn.key}" + (f"@{turn.stream}" if turn.stream else "") for turn in order]
            runs[name] = functools.partial(answers, engine, queries)
        seconds = interleave(runs, rounds)
    figures: dict[str, Any] = {}
    for name, times in seconds.items():
        figures[name] = {"qps": rows / statistics.median(times), "seconds": statistics.median(times)}
        if name != "fifo":
            figures[name]["fifo_ratio"] = paired_ratio(times, seconds["fifo"])
    settings_used = {
        "backbone": backbone,
        "tasks": tasks,
        "rows": rows,
        "length": length,
        "methods": methods,
        "rounds": rounds,
        "bucket": str(bucket),
        "order": turns,
    }
    report("operators", settings_used, figures, json_out)
